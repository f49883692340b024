"""Answers of protocols that divide them into blocks: reasoning, text and calls, each of which is
opened, grows and is closed. A whole answer is made of the same blocks as a stream.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from draftheads.infer.serve.jobs import Job
from draftheads.infer.serve.parts import REASONING_KEYS
from draftheads.infer.serve.protocol import Json
from draftheads.infer.serve.reply import Piece, Reply

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer. number: its place in the answer. text: of a call, its arguments. call:
    its id and name.
    """

    kind: Kind
    number: int
    call: Json
    text: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)


class BlockReply(Reply):
    """The answer to a request in blocks. Subclasses say what its events are."""

    end = ""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        [self.choice] = self.choices
        self.id = uuid4().hex
        self.blocks: list[Block] = []

    @abstractmethod
    def begun(self) -> Iterator[Json]:
        """The events at the start of a stream."""

    @abstractmethod
    def opened(self, block: Block) -> Iterator[Json]:
        """The events of a new block."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> Json:
        """The event of more text of a block."""

    @abstractmethod
    def closed(self, block: Block) -> Iterator[Json]:
        """The events after the last text of a block."""

    @abstractmethod
    def ended(self, jobs: Sequence[Job]) -> Iterator[Json]:
        """The events at the end of a stream."""

    @abstractmethod
    def answer(self, jobs: Sequence[Job]) -> Json:
        """The answer as far as it has grown."""

    def waiting(self) -> Json | None:
        """What is sent while nothing is decoded; None: a comment."""
        return None

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
            for event in self.begun():
                yield event
            async for piece in pieces:
                if piece is None:
                    yield self.waiting()
                    continue
                for event in self._add(piece.parts):
                    yield event
        for block in self.blocks[-1:]:
            for event in self.closed(block):
                yield event
        for event in self.ended(jobs):
            yield event

    def _add(self, parts: Json) -> Iterator[Json]:
        """Add what a step adds to the answer, and yield its events."""
        yield from self._extend("reasoning", parts[REASONING_KEYS[0]])
        yield from self._extend("text", parts["content"])
        for call in parts["tool_calls"]:
            yield from self._extend("call", call["function"]["arguments"], call)

    def _extend(self, kind: Kind, text: str, call: Json | None = None) -> Iterator[Json]:
        is_new_call = call is not None and "id" in call
        last = self.blocks[-1] if self.blocks else None
        if is_new_call or (text and (last is None or last.kind != kind)):
            if last is not None:
                yield from self.closed(last)
            last = Block(kind, len(self.blocks), call or {})
            self.blocks.append(last)
            yield from self.opened(last)
        if text and last is not None:
            last.text += text
            yield self.grown(last, text)
