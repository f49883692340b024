"""Answers of protocols that divide them into blocks: reasoning, text and calls, each of which is
opened, grows and is closed. A whole answer is made of the same blocks as a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from draftheads.infer.serve.jobs import Job
from draftheads.infer.serve.parts import REASONING_KEYS
from draftheads.infer.serve.protocol import Json
from draftheads.infer.serve.reply import Piece, Reply


@dataclass
class Block:
    """A part of an answer. kind: "reasoning", "text" or "call". number: its place in the answer.
    id, name: of a call. text: of a call, its arguments.
    """

    kind: str
    number: int
    id: str
    name: str = ""
    text: str = ""


class BlockReply(Reply, ABC):
    """The answer to a request in blocks. Subclasses say what its events are."""

    end = ""
    waiting: Json | None = None  # sent while nothing is decoded; None: a comment

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        [self.choice] = self.choices
        self.id = uuid4().hex
        self.blocks: list[Block] = []

    @abstractmethod
    def start(self) -> Iterator[Json]:
        """The events at the start of a stream."""

    @abstractmethod
    def open(self, block: Block) -> Iterator[Json]:
        """The events of a new block."""

    @abstractmethod
    def delta(self, block: Block, text: str) -> Json:
        """The event of more text of a block."""

    @abstractmethod
    def close(self, block: Block) -> Iterator[Json]:
        """The events after the last text of a block."""

    @abstractmethod
    def finish(self, jobs: Sequence[Job]) -> Iterator[Json]:
        """The events at the end of a stream."""

    @abstractmethod
    def answer(self, jobs: Sequence[Job]) -> Json:
        """The answer as far as it has grown."""

    def whole(self, jobs: Sequence[Job]) -> Json:
        """The answer at once, after it is complete."""
        for _ in self._add(self.choice.parts):
            pass  # events are for streams
        return self.answer(jobs)

    async def chunks(
        self, pieces: AsyncGenerator[Piece | None], jobs: Sequence[Job]
    ) -> AsyncGenerator[Json | None]:
        """Yields the events of a stream."""
        async with aclosing(pieces):
            await anext(pieces)
            for event in self.start():
                yield event
            async for piece in pieces:
                if piece is None:
                    yield self.waiting
                    continue
                for event in self._add(piece.parts):
                    yield event
        for event in (*self._end(), *self.finish(jobs)):
            yield event

    def _add(self, parts: Json) -> Iterator[Json]:
        """Add what a step adds to the answer, and yield its events."""
        yield from self._extend("reasoning", parts[REASONING_KEYS[0]])
        yield from self._extend("text", parts["content"])
        for call in parts["tool_calls"]:
            if "id" in call:
                yield from self._begin("call", call["id"], call["function"]["name"])
            yield from self._extend("call", call["function"]["arguments"])

    def _extend(self, kind: str, text: str) -> Iterator[Json]:
        if not text:
            return
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._begin(kind, uuid4().hex)
        block = self.blocks[-1]
        block.text += text
        yield self.delta(block, text)

    def _begin(self, kind: str, *identity: str) -> Iterator[Json]:
        yield from self._end()
        block = Block(kind, len(self.blocks), *identity)
        self.blocks.append(block)
        yield from self.open(block)

    def _end(self) -> Iterator[Json]:
        for block in self.blocks[-1:]:
            yield from self.close(block)
