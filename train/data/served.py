"""Answers of a target that a server runs; only its tokenizer, template and end tokens are here.

Prompts go out as token ids, rendered as for a target in this process. Where the server tells the
ids that it wrote (vLLM: `return_token_ids`), those are what is learned. Else its text is tokenised,
and learned only if the ids decode to the same text.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from transformers import AutoConfig

from draftheads.train.data.conversation import LOSSY, Conversation, Renderer
from draftheads.train.data.generate import Answerer, Batch, Sampling, until_end
from draftheads.train.data.remote import (
    Completion,
    Json,
    Server,
    ServerError,
    ServerGone,
    ServerOptions,
)
from draftheads.train.data.textside import TextSide

AHEAD = 4
"""Conversations begun before the oldest batch is done, per request at a time: long answers then
do not leave the server idle, and a killed run loses no more than these."""

NEUTRAL: Json = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said aloud, as servers else take a model's own defaults, which stay out here as everywhere."""


class ServedTarget(Answerer):
    """A target whose tokens come from a server. name: the same model's folder or Hub id."""

    def __init__(self, name: str, options: ServerOptions, revision: str | None = None) -> None:
        self._server = Server(options)  # before anything is downloaded
        config = AutoConfig.from_pretrained(name, revision=revision)
        text = config.get_text_config(decoder=True)
        context = getattr(text, "max_position_embeddings", None) or 1 << 30
        side = TextSide.load(name, revision)
        context = min(context, self._server.context or context)
        super().__init__(name, side.tokenizer, side.eos_ids, context)
        self._revision = revision or getattr(config, "_commit_hash", None)
        self._vocabulary: int = text.vocab_size
        self._renderer = Renderer(self, {})
        self._one_at_a_time = threading.Lock()  # tokenizers refuse two threads ("Already borrowed")

    def origin(self) -> dict[str, Any]:
        """As of a local target; weights nobody here has seen have no fingerprint."""
        server = {"url": self._server.url, "model": self._server.model, "context": self.context}
        return {
            "name": self.name,
            "revision": self._revision,
            "fingerprint": None,
            "dtype": None,
            "server": server,
        }

    def answer(
        self, batches: Iterable[Batch], sampling: Sampling, seed: int
    ) -> Generator[tuple[list[Conversation], Exception | None]]:
        """Many conversations at a time, over the borders of batches.

        Raises ServerGone when nobody listens any more. Whatever ends this early cuts all requests.
        """
        width = self._server.options.concurrency
        begun: deque[tuple[list[Conversation], list[Future[ServerError | None]]]] = deque()
        with ThreadPoolExecutor(width, "distill") as pool, self._server:
            for _, rows in batches:
                futures = [pool.submit(self._converse, row, sampling, seed) for row in rows]
                begun.append((rows, futures))
                while begun and (
                    sum(len(rows) for rows, _ in begun) > AHEAD * width
                    or all(future.done() for future in begun[0][1])
                ):
                    yield _collected(*begun.popleft())
            while begun:
                yield _collected(*begun.popleft())

    def _converse(self, row: Conversation, sampling: Sampling, seed: int) -> ServerError | None:
        """All turns of one conversation; returns what made it fail."""
        while self._ask(row):
            try:
                completion = self._server.complete(self._request(row, sampling, seed))
                with self._one_at_a_time:
                    self._take(row, completion)
            except ServerGone as error:
                raise ServerGone(
                    f"{self._server.url}: {error}; start the server, then run the same command "
                    "again to go on"
                ) from error
            except ServerError as error:  # this prompt is lost, the run is not
                row.end("failed", str(error))
                return ServerError(
                    f"{self._server.url}: {error}; see the server's log, then run the same "
                    "command again to go on"
                )
        return None

    def _ask(self, row: Conversation) -> bool:
        with self._one_at_a_time:
            return row.ask()

    def _request(self, row: Conversation, sampling: Sampling, seed: int) -> Json:
        drawn = hashlib.sha256(f"{seed}/{row.prompt.index}/{row.answered}".encode()).digest()
        return {
            "prompt": row.tokens,
            "max_tokens": min(sampling.max_new_tokens, self.context - len(row.tokens)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": int.from_bytes(drawn[:4]) >> 1,  # servers take 31 bits
            "stop_token_ids": list(self.eos_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
            **NEUTRAL,
        }

    def _take(self, row: Conversation, completion: Completion) -> None:
        """Put an answer behind its question, its end token included."""
        ids = completion.ids
        if ids is None:
            ids = self._renderer.written(completion.text, row.tokens)
            if ids is None:
                row.end("skipped", LOSSY)
                return
            row.retokenized += 1
        ids = until_end(ids, self.eos_ids)
        if completion.ended and self.eos_ids and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self._end(completion)]
        if not ids:
            raise ServerError("answer without tokens")
        if max(ids) >= self._vocabulary:
            raise ServerError(
                f"expected token ids below {self._vocabulary}, the vocabulary of {self.name}, got "
                f"greater ones from {self._server.model}: is it the same model"
            )
        row.answer(ids)

    def _end(self, completion: Completion) -> int:
        """The end token that a server left out: the one it names, else the tokenizer's own."""
        for token in (completion.stop, self.tokenizer.eos_token_id):
            if token in self.eos_ids:
                return int(token)
        return self.eos_ids[0]


def _collected(
    rows: list[Conversation], futures: list[Future[ServerError | None]]
) -> tuple[list[Conversation], ServerError | None]:
    errors = [error for future in futures if (error := future.result())]
    return rows, errors[-1] if errors else None
