"""Answers of a target that a server runs; only its tokenizer, template and end tokens are here.

Prompts go out as token ids, rendered as for a target in this process. Where the server tells the
ids that it wrote (vLLM: `return_token_ids`), those are what is learned. Else its text is tokenised,
and learned only if the ids decode to the same text.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Any

from transformers import AutoConfig

from draftheads.train.data.conversation import LOSSY, Conversation, Renderer
from draftheads.train.data.generate import Answered, Answerer, Sampling, until_end
from draftheads.train.data.remote import (
    Completion,
    Json,
    PromptRefused,
    Server,
    ServerError,
    ServerFault,
    ServerGone,
    ServerOptions,
)
from draftheads.train.data.textside import TextSide

AHEAD = 2
"""Conversations handed out at a time, per request at a time, so that no request waits for one."""
GIVE_UP = 10
"""Prompts in a row that the server failed to answer, each asked several times, after which it
counts as down."""

logger = logging.getLogger("draftheads")

NEUTRAL: Json = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said aloud, as servers else take a model's own defaults, which stay out here as everywhere."""


class ServedTarget(Answerer):
    """A target whose tokens come from a server. name: the same model's folder or Hub id."""

    together = False

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
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """Many conversations at a time, yielded as soon as they are done.

        Left out are those that the server failed to answer. Raises ServerError when that happens
        many times in a row, nobody listens any more or all requests are refused, after what is done
        was yielded. Whatever ends this early cuts all requests.
        """
        width = self._server.options.concurrency
        rows, failed = chain.from_iterable(batches), 0
        reasons: set[str] = set()
        pending: set[Future[tuple[Conversation, ServerError | None]]] = set()
        with ThreadPoolExecutor(width, "distill") as pool, self._server:
            while True:
                for row in islice(rows, AHEAD * width - len(pending)):
                    pending.add(pool.submit(self._converse, row, sampling, seeds))
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                results = [future.result() for future in done]
                refused = [error for _, error in results if isinstance(error, PromptRefused)]
                faults = [error for _, error in results if error and error not in refused]
                finished = [row for row, error in results if error not in faults]
                if refused or any(row.answered for row in finished):
                    failed = 0
                if finished:
                    yield finished, self._last_word(refused[-1]) if refused else None
                for error in faults:
                    failed += 1
                    if failed >= GIVE_UP or type(error) is not ServerFault:
                        raise self._last_word(error)
                    if str(error) not in reasons:
                        reasons.add(str(error))
                        logger.warning("%s; the prompt is left for the next launch", error)

    def _last_word(self, error: ServerError) -> ServerError:
        step = "put that right"
        if isinstance(error, ServerGone):
            step = "start the server"
        elif isinstance(error, ServerFault):
            step = "see the server's log"
        return type(error)(
            f"{self._server.url}: {error}; {step}, then run the same command again to resume"
        )

    def _converse(
        self, row: Conversation, sampling: Sampling, seeds: Sequence[str]
    ) -> tuple[Conversation, ServerError | None]:
        """All turns of one conversation, and what made it fail."""
        try:
            while self._ask(row):
                completion = self._server.complete(self._request(row, sampling, seeds))
                with self._one_at_a_time:
                    self._take(row, completion, sampling)
        except PromptRefused as error:  # this prompt is lost, the run is not
            row.end("failed", str(error))
            return row, error
        except ServerError as error:
            return row, error
        return row, None

    def _ask(self, row: Conversation) -> bool:
        with self._one_at_a_time:
            return row.ask()

    def _request(self, row: Conversation, sampling: Sampling, seeds: Sequence[str]) -> Json:
        drawn = hashlib.sha256(f"{seeds[row.prompt.index]}/{row.answered}".encode()).digest()
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

    def _take(self, row: Conversation, completion: Completion, sampling: Sampling) -> None:
        """Put an answer after its question, its end token included."""
        ids = completion.token_ids
        if ids is None:
            ids = self._renderer.written(completion.text or "", row.tokens)
            if ids is None or len(ids) > sampling.max_new_tokens:  # not those that were written
                row.end("skipped", LOSSY)
                return
            row.retokenized += 1
        ids = until_end(ids, self.eos_ids)
        ended = completion.finish_reason == "stop"
        if ended and self.eos_ids and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self._end(completion)]
        if not ids:
            raise ServerFault("answer without tokens")
        if max(ids) >= self._vocabulary:
            raise ServerError(
                f"expected token ids below {self._vocabulary}, the vocabulary of {self.name}, got "
                f"greater ones from {self._server.model}: is it the same model"
            )
        row.answer(ids)

    def _end(self, completion: Completion) -> int:
        """The end token that a server left out: the one it names, else the tokenizer's own."""
        told = (completion.stop_reason, completion.matched_stop, self.tokenizer.eos_token_id)
        for token in told:
            if isinstance(token, int) and token in self.eos_ids:
                return token
        return self.eos_ids[0]
