"""A target whose tokens come from OpenAI-compatible servers (vLLM, SGLang, llama.cpp, ...).

Only its tokenizer, chat template and end tokens are loaded here. Prompts are sent as token ids,
rendered as for a target in this process. If the server returns the ids that it generated (vLLM:
`return_token_ids`), those are learned; else its text is tokenized, and learned only if the ids
decode to the same text.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftheads.heads.target.placement import read_config
from draftheads.infer.remote import (
    PromptRefused,
    ServedCompletion,
    Server,
    ServerError,
    ServerFault,
    ServerOptions,
    connect,
)
from draftheads.train.data.conversation import LOSSY, Conversation
from draftheads.train.data.distill import (
    Answered,
    Answerer,
    AnswerSampling,
    EmptyAnswer,
)
from draftheads.train.data.text_side import TextSide

GIVE_UP = 10
"""Consecutive prompts that a server failed to answer after which it counts as down."""

logger = logging.getLogger("draftheads")


class ServedTarget(Answerer):
    """A target at one or several servers. name: folder or Hub id of the same model, for its
    tokenizer.

    Raises ValueError for an invalid address, key or model name, and for servers of several models;
    ServerError if one of them does not answer. The key appears in no message: *** replaces it in
    what a server returns.
    """

    def __init__(self, name: str, options: ServerOptions, revision: str | None = None) -> None:
        self.servers = connect(options)  # before any download
        self._concurrency = options.concurrency
        self.model = self.servers[0].model
        config = read_config(name, revision)
        text = config.get_text_config(decoder=True)
        lengths = [getattr(text, "max_position_embeddings", None) or 1 << 30]
        lengths += [server.context for server in self.servers if server.context]
        self.text_side = TextSide.load(name, revision)
        super().__init__(self.text_side, min(lengths))
        self._revision = revision or getattr(config, "_commit_hash", None)
        self._vocabulary: int = text.vocab_size

    def origin(self) -> dict[str, Any]:
        """The manifest's entry for the target; the servers' weights have no fingerprint."""
        urls = [server.url for server in self.servers]
        return {
            "name": self.side.name,
            "revision": self._revision,
            "fingerprint": None,
            "dtype": None,
            "server": {"urls": urls, "model": self.model, "context": self.context},
        }

    def answer(
        self,
        rows: Iterable[Conversation],
        sampling: AnswerSampling,
    ) -> Generator[Answered]:
        """Answer many conversations at a time; each is yielded as soon as it is done.

        What a server fails or refuses to answer goes to the others. A server is dropped if it is
        gone, denies access or fails many in a row. Raises ServerError, after yielding what is done,
        when none is left. All pending requests are cancelled when this ends early.
        """
        if sampling.temperature > 0:
            for server in self.servers:
                server.warn_of_speculation()
        work = _Work(self.servers, self._concurrency, rows)
        with asyncio.Runner() as runner:
            clients = {server: server.client() for server in self.servers}

            def converse(errand: _Errand) -> Coroutine[Any, Any, None]:
                return self._converse(errand, clients[errand.server], sampling)

            try:
                while ended := runner.run(work.next_ended(converse)):
                    for errand in filter(work.is_done, ended):
                        error: OSError | None = errand.error
                        if errand.row.answers and not errand.row.has_text:
                            error = error or EmptyAnswer(
                                f"{errand.server.url}: expected answers with text, got empty ones "
                                "alone; ask the server for a completion by hand, then run the same "
                                "command again"
                            )
                        yield errand.row, error
            finally:
                for task in work.pending:
                    task.cancel()
                for client in clients.values():
                    runner.run(client.aclose())

    async def _converse(self, errand: _Errand, client: Any, sampling: AnswerSampling) -> None:
        """Answer all turns of one conversation, until an error."""
        row = errand.row
        server = errand.server
        errand.error = None
        try:
            while errand.is_open or row.ask():
                errand.is_open = True
                request = self.request(row.tokens, sampling, sampling.seed_of(row))
                completion = await server.complete(client, request)
                self._take(row, completion, sampling)
                errand.is_open = False
        except ServerError as error:
            errand.reason = str(error)
            errand.error = server.explained(error)

    def request(self, prompt: Sequence[int], sampling: AnswerSampling, seed: str) -> dict[str, Any]:
        """The body that asks for one completion of token ids, with this seed."""
        digest = hashlib.sha256(seed.encode()).digest()
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": min(sampling.max_new_tokens, self.context - len(prompt)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": int.from_bytes(digest[:4]) >> 1,  # 31 bits
            "stop_token_ids": list(self.side.eos_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
            "min_p": 0.0,  # this and the rest override the model's own defaults at the server
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    def _take(
        self, row: Conversation, completion: ServedCompletion, sampling: AnswerSampling
    ) -> None:
        """Append an answer, its end token included, to its conversation."""
        ids = completion.token_ids
        if ids is None:
            ids = row.retokenize(completion.text or "")
            if ids is None or len(ids) > sampling.max_new_tokens:  # not the generated ones
                row.end("skipped", LOSSY)
                return
            row.retokenized += 1
        ids = self.ended(ids, completion)
        if max(ids) >= self._vocabulary:
            raise ServerError(
                f"expected token ids below {self._vocabulary}, the vocabulary of {self.side.name}, "
                f"got larger ones from {self.servers[0].shown}: is it the same model"
            )
        row.answer(ids)

    def ended(self, ids: list[int], completion: ServedCompletion) -> list[int]:
        """The token ids of a completion up to its end token, also where the server left that out.
        Raises ServerFault if there are none.
        """
        eos_ids = self.side.eos_ids
        for place, token in enumerate(ids):
            if token in eos_ids:
                return ids[: place + 1]  # the rest is padding
        if completion.finish_reason == "stop" and eos_ids:  # the server left the end token out
            reported = (completion.stop_reason, completion.matched_stop)
            candidates = (*reported, self.side.tokenizer.eos_token_id, eos_ids[0])
            ids = [*ids, next(token for token in candidates if token in eos_ids)]
        if not ids:
            raise ServerFault("answer without tokens")
        return ids


@dataclass(eq=False)
class _Errand:
    """A conversation at a server. is_open: its last question has no answer yet. failed_at: these
    servers did not answer it. error: why, at the present one, in a line; reason: without advice.
    """

    row: Conversation
    server: Server
    is_open: bool = False
    failed_at: set[Server] = field(default_factory=set)
    error: ServerError | None = None
    reason: str = ""


class _Work:
    """Conversations on their way to servers, each with `concurrency` places. up: the servers left.
    failed: conversations in a row that a server failed to answer.
    """

    def __init__(
        self, servers: list[Server], concurrency: int, rows: Iterable[Conversation]
    ) -> None:
        self.up = list(servers)
        self.concurrency = concurrency
        self.failed = Counter[Server]()
        self.pending: dict[asyncio.Task[None], _Errand] = {}
        self._rows = iter(rows)
        self._again: list[_Errand] = []

    async def next_ended(
        self, converse: Callable[[_Errand], Coroutine[Any, Any, None]]
    ) -> list[_Errand]:
        """Begin a conversation in each free place and wait until some end; these, first those
        without an error. None are left if there are none.
        """
        busy = Counter(errand.server for errand in self.pending.values())
        for place in range(self.concurrency):
            for server in self.up:  # first at those with the most free places
                if busy[server] <= place and (errand := self._next(server)):
                    self.pending[asyncio.create_task(converse(errand))] = errand
        if not self.pending:
            return []
        tasks, _ = await asyncio.wait(self.pending, return_when=asyncio.FIRST_COMPLETED)
        ended = []
        for task in tasks:
            task.result()  # raises an error that is not the server's
            ended.append(self.pending.pop(task))
        return sorted(ended, key=lambda errand: errand.error is not None)

    def is_done(self, errand: _Errand) -> bool:
        """True if a conversation is answered, or refused by all servers. What a server did not
        answer goes to another one, or waits for the next launch.

        Raises the conversation's error if no server is left.
        """
        if errand.error is None:
            self.failed[errand.server] = 0
            return True
        errand.failed_at.add(errand.server)
        self._drop_if_down(errand, errand.error)
        if not errand.failed_at.issuperset(self.up):
            self._again.append(errand)
            return False
        if isinstance(errand.error, PromptRefused):
            errand.row.end("failed", errand.reason)
            return True
        logger.warning("%s", errand.error)
        return False

    def _next(self, server: Server) -> _Errand | None:
        for errand in self._again:
            if server not in errand.failed_at:
                self._again.remove(errand)
                errand.server = server
                return errand
        row = next(self._rows, None)
        return None if row is None else _Errand(row, server)

    def _drop_if_down(self, errand: _Errand, error: ServerError) -> None:
        """Drop a server that is gone, denies access, or fails many prompts in a row."""
        server = errand.server
        self.failed[server] = 0 if isinstance(error, PromptRefused) else self.failed[server] + 1
        is_down = not isinstance(error, ServerFault | PromptRefused)
        is_down |= self.failed[server] >= GIVE_UP
        if not is_down or server not in self.up:
            return
        if self.up == [server]:
            raise error
        self.up.remove(server)
        dropped = "%s: %s; dropped until the next launch, %d other servers are left"
        logger.warning(dropped, server.url, errand.reason, len(self.up))
        for task, other in list(self.pending.items()):
            if other.server is server:
                task.cancel()
                del self.pending[task]
                self._again.append(other)
