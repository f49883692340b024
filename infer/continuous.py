"""Continuous batching: prompts of any lengths are decoded together, and the place of a finished one
is given to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.engine import Speculator
from draftheads.infer.rows import NOT_FINITE, Decoding, Row

REFILL = 8
"""Finished rows wait until they are one in so many, because reading prompts costs a forward pass.
At the end, when no prompts are left, as many are dropped together: to drop some copies the caches.
"""
RESERVED = 256
"""Slots reserved for the answers of the first rows; the cache grows."""


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


class ContinuousBatch:
    """Decodes requests, up to `rows` at a time.

    Rows that need more memory than there is are decoded again, in a batch half as large.

    Raises ValueError for drafters other than heads, whose texts cannot be replaced.
    """

    def __init__(self, engine: Speculator, accept: Acceptance, rows: int) -> None:
        if not engine.rows_may_leave:
            raise ValueError("expected draft heads or none, got other drafts; pass a head")
        self.engine = engine
        self.accept = accept
        self._limit = self._ceiling = rows
        self._waiting: deque[Request] = deque()  # taken, but not decoded
        self._is_dry = False  # nothing was left to take the last time
        self._decoding: Decoding | None = None
        self._active: dict[Row, Request] = {}

    @torch.inference_mode()
    def run(
        self,
        take: Callable[[], Request | None],
        note: Callable[[list[int]], None] = lambda lengths: None,
    ) -> Iterator[Outcome]:
        """Decode what `take` returns, until it returns None while no row is left. Yields requests
        as they finish. note: called after each pass with the numbers of new tokens of the others.
        """
        while True:
            new = self._taken(take)
            if not (new or self._active):
                self._decoding = None
                return
            try:
                started = self._prefilled(new) if new else None
            except RuntimeError as error:  # usually out of memory
                yield from self._failed(new, error)
                continue
            try:
                if started is None:
                    assert self._decoding is not None
                    if not self.engine.compile:  # which takes a minute for each number of rows
                        self.engine.maker.fix(self._decoding)
                    self.engine.step(self._decoding)
                elif self._active and self._decoding is not None:
                    self._decoding.join(started)
                else:
                    self._decoding = started
            except RuntimeError as error:  # also while rows join: then none of them is whole
                lost = [*self._active.values(), *new]
                self._active = {}
                self._decoding = None
                yield from self._failed(lost, error)
                continue
            if started is not None:
                self._active |= zip(started.rows, new, strict=True)
            yield from self._finished()
            note([row.new_tokens for row in self._active])

    def _finished(self) -> Iterator[Outcome]:
        """The answers that are finished, whose places are then free."""
        for row in [row for row in self._active if row.finish]:
            self._limit = min(self._ceiling, self._limit + 1)
            fault = None
            if row.finish == "failed":
                fault = RuntimeError(NOT_FINITE)
            yield self._active.pop(row), row.answer, fault
        if self._decoding is not None and self._is_dry:  # else their places are taken
            free = len(self._decoding.rows) - len(self._active)
            if free > self._few():
                self._decoding.drop_finished()

    def _failed(self, requests: Sequence[Request], error: Exception) -> Iterator[Outcome]:
        """Decode these again, in a smaller batch, or give up the only one."""
        torch.cuda.empty_cache()
        rows = len(requests) + len(self._active)
        if rows == 1:
            yield requests[0], [], error
            return
        self._limit = max(1, rows // 2)
        if isinstance(error, torch.OutOfMemoryError):
            self._ceiling = self._limit
        self._waiting.extendleft(reversed(requests))

    def _taken(self, take: Callable[[], Request | None]) -> list[Request]:
        """Requests for the free places, if there are enough of them."""
        new: list[Request] = []
        free = self._limit - len(self._active)
        if self._active and free < self._few():
            return new
        while len(new) < free:
            request = self._waiting.popleft() if self._waiting else take()
            self._is_dry = request is None
            if request is None:
                break
            new.append(request)
        return new

    def _few(self) -> int:
        """Places that are not worth a forward pass over new prompts."""
        return max(1, min(self._limit, len(self._active)) // REFILL)

    def _prefilled(self, new: Sequence[Request]) -> Decoding:
        rows = [Row(self.engine.target, r.prompt, r.max_new_tokens, seed=r.seed) for r in new]
        reserved = min(RESERVED, max(request.max_new_tokens for request in new))
        if self._active:
            reserved = 0  # what is read now is copied into the caches of the others
        *_, decoding = self.engine.prefill(rows, self.accept, reserved)
        assert decoding is not None  # the last one
        return decoding
