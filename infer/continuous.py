"""Continuous batching: rows of any lengths are decoded together, and come and go between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.engine import Speculator
from draftheads.infer.rows import Row, Step
from draftheads.infer.slots import Slots
from draftheads.infer.tree_sizes import TreeSizes

REFILL = 8
"""Finished rows wait until they are one in so many, because reading prompts costs a forward pass.
"""
RESERVED = 256
"""Slots reserved for the answers of the first rows; the cache grows."""


class ContinuousBatch:
    """Rows of one engine that are decoded together, `most` at a time.

    After an error, such as the end of memory, fewer are decoded at a time, until some have ended.
    """

    def __init__(self, engine: Speculator, most: int) -> None:
        self.engine = engine
        self.rows: list[Row] = []
        self.slots: Slots | None = None
        self._sizes = TreeSizes(engine.tree)
        self._shared: Slots | None = None  # of several rows; kept if it was recorded
        self._most = self._limit = most

    @property
    def room(self) -> int:
        """The number of rows that may enter."""
        return self._limit - len(self.rows)

    def enter(self, read: Slots) -> None:
        """Add rows whose prompts were read. Rows that are alone stay in the slots that they have,
        which are empty when others join.
        """
        self.rows += read.rows
        read.is_open = True
        if self.slots is None:
            self.slots = read
            return
        if self.slots is not self._shared:
            shared = self._shared or self.engine.new_slots()
            shared.is_open = True
            shared.join(self.slots)
            self.slots = self._shared = shared
        self.slots.join(read)

    def step(self) -> dict[Row, Step]:
        """One forward pass for all rows, over trees of the size that is fastest for so many."""
        slots = self.slots
        assert slots is not None
        slots.drop_finished()
        sees_drafts = any(row.rule.sees_drafts for row in self.rows)
        rows = 1 if sees_drafts else len(self.rows)
        slots.use(self._sizes.choose(rows))
        start = self.engine.clock()
        steps = slots.step()
        if slots.runner.is_timed():
            tokens = sum(len(step.tokens) for step in steps.values())
            self._sizes.learn(rows, tokens, self.engine.clock() - start)
        return steps

    def leave(self, row: Row, kept: Slots | None = None) -> None:
        """Let a row go. kept: the slots in which its prompt was read take its text."""
        self.rows.remove(row)
        self._limit = min(self._most, self._limit + 1)
        slots = self.slots
        if not self.rows:
            self.slots = None
            if self._shared is not None and not self._shared.runner.was_recorded:
                self._shared = None
        # nothing is to be done where it was alone, nor for a finished row: it waits to be removed
        if slots is not None and slots is not kept and (kept is not None or not row.finish):
            slots.leave(row, kept)

    def give_up(self) -> None:
        """Forget all rows and their caches, after an error that may have spoiled them."""
        self.rows = []
        self.slots = self._shared = None

    def shrink(self, rows: int, error: Exception) -> None:
        """Decode half as many rows at a time as failed together. One that failed alone says
        nothing about the others.
        """
        torch.cuda.empty_cache()
        if rows > 1:
            self._limit = rows // 2
            if isinstance(error, torch.OutOfMemoryError):
                self._most = self._limit


@dataclass(eq=False)
class Request:
    """A prompt to continue. seed: of its own random numbers."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: str = ""


Outcome = tuple[Request, list[int], Exception | None]
"""A request with its new tokens, or with the error of one that fails alone."""


@dataclass(frozen=True)
class CheckedGreedy(Greedy):
    """`Greedy`, with -1, which ends a row as failed, where logits are not finite."""

    def choose(self, logits: Tensor) -> Tensor:
        """The argmax, or -1."""
        best = logits.max(-1)
        return torch.where(best.values.isfinite(), best.indices, -1)


def checked(temperature: float, top_p: float, top_k: int) -> Acceptance:
    """A rule whose token is -1 where logits are not finite; greedy at temperature 0."""
    if temperature == 0:
        return CheckedGreedy()
    return Sampled(temperature, top_p, top_k)


class RequestQueue:
    """Requests that are still to be decoded: those that failed with others first, then what `take`
    returns, until it returns None.
    """

    def __init__(self, take: Callable[[], Request | None]) -> None:
        self._take = take
        self._again: deque[Request] = deque()

    def next(self, room: int, active: int) -> list[Request]:
        """Requests for so many places, if they are enough for a pass over prompts."""
        if active and room < max(1, min(room + active, active) // REFILL):
            return []
        found: list[Request] = []
        while len(found) < room:
            request = self._again.popleft() if self._again else self._take()
            if request is None:
                break
            found.append(request)
        return found

    def again(self, requests: Sequence[Request]) -> None:
        """Decode these next."""
        self._again.extendleft(reversed(requests))


@torch.inference_mode()
def answer_all(
    engine: Speculator,
    rule: Acceptance,
    most: int,
    take: Callable[[], Request | None],
) -> Iterator[Outcome]:
    """Decode what `take` returns, up to `most` at a time, until it returns None while no row is
    left. Yields requests as they finish.

    Rows that need more memory than there is are decoded again, in a batch half as large. Raises
    ValueError for drafters other than heads, whose texts cannot be replaced.
    """
    if not engine.rows_may_leave:
        raise ValueError("expected draft heads or none, got other drafts; pass a head")
    engine.maker.compile_no_more()  # for each number of rows
    batch = ContinuousBatch(engine, most)
    queue = RequestQueue(take)
    requests: dict[Row, Request] = {}
    while True:
        new = queue.next(batch.room, len(requests))
        if not (new or requests):
            return
        failed = new
        try:
            if new:
                read = _read(engine, rule, new, reserved=0 if requests else RESERVED)
                failed = [*requests.values(), *new]  # none of them is whole while rows join
                batch.enter(read)
                requests |= zip(read.rows, new, strict=True)
            else:
                failed = [*requests.values()]
                batch.step()
        except RuntimeError as error:  # usually out of memory
            rows = len(new) + len(requests)
            batch.shrink(rows, error)
            if failed is not new:
                batch.give_up()
                requests = {}
            if rows == 1:
                yield failed[0], [], error
            else:
                queue.again(failed)
            continue
        for row in [row for row in requests if row.finish]:
            batch.leave(row)
            yield requests.pop(row), row.answer, row.fault


def _read(
    engine: Speculator, rule: Acceptance, requests: Sequence[Request], reserved: int
) -> Slots:
    rows = [Row(engine.target, r.prompt, r.max_new_tokens, seed=r.seed) for r in requests]
    reserved = min(reserved, max(request.max_new_tokens for request in requests))
    reading = engine.read(rows, rule, reserved=reserved)
    reading.finish()
    return reading.slots
