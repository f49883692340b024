"""Continuous batching: prompts of any lengths are decoded together, and the place of a finished one
is given to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from draftheads.infer.accept import Acceptance
from draftheads.infer.engine import Decoding, Row, Speculator

REFILL = 8
"""Finished rows wait until they are one in so many, because reading prompts costs a forward pass.
At the end, as many are dropped together.
"""
RESERVED = 256
"""Slots reserved for the answers of the first rows; the cache grows."""


@dataclass(eq=False)
class Request:
    """A prompt to continue. seed: of its own random numbers, for a rule that has such."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: str = ""


class ContinuousBatch:
    """Decodes requests, up to `rows` at a time.

    most_slots: limit of rows x (longest prompt + its new tokens + tree), as far as more than one
    row is decoded; None: no limit. Rows that need more memory than there is are decoded again, in
    a batch half as large.

    Raises ValueError for drafters other than heads, whose texts cannot be replaced.
    """

    def __init__(
        self,
        engine: Speculator,
        accept: Acceptance,
        rows: int,
        most_slots: int | None = None,
    ) -> None:
        if not engine.drops_rows:
            raise ValueError("expected draft heads or none, got other drafts; pass a head")
        self.engine, self.accept = engine, accept
        self.rows, self.most_slots = rows, most_slots
        self.steps = self.row_steps = 0  # forward passes after the prompts; rows that took part
        self._limit = self._ceiling = rows
        self._held: deque[Request] = deque()  # taken, but not decoded

    @property
    def useful(self) -> float:
        """Share of the places that decoded a token, over all forward passes after the prompts."""
        return self.row_steps / max(1, self.steps * self.rows)

    @torch.inference_mode()
    def run(
        self, take: Callable[[], Request | None]
    ) -> Iterator[tuple[Request, list[int], Exception | None]]:
        """Decode what `take` returns, until it returns None while no row is left. Yields requests
        as they finish, with their new tokens, or with the error of one that fails alone.
        """
        decoding: Decoding | None = None
        active: dict[Row, Request] = {}
        while True:
            new = lost = self._taken(active, take)
            if not (new or active):
                return
            try:
                if new:
                    started = self._prefilled(new, is_first=not active)
                    lost = [*active.values(), *new]  # an error while they join ends all
                    if active and decoding is not None:
                        decoding.join(started)
                    else:
                        decoding = started
                    active |= zip(started.rows, new, strict=True)
                elif decoding is not None:
                    lost = list(active.values())
                    self.steps, self.row_steps = self.steps + 1, self.row_steps + len(active)
                    decoding.step()
            except RuntimeError as error:  # usually out of memory
                torch.cuda.empty_cache()
                if lost is not new:
                    active, decoding = {}, None
                if len(lost) > 1 or active:
                    self._shrink(len(lost) + len(active), lost, error)
                else:
                    yield lost[0], [], error
                continue
            for row in [row for row in active if row.finish]:
                self._limit = min(self._ceiling, self._limit + 1)
                fault = None
                if row.finish == "failed":
                    fault = RuntimeError("the target's logits are not finite")
                yield active.pop(row), row.text[row.prompt :], fault
            if decoding is not None and len(decoding.rows) - len(active) > self._few(active):
                decoding.drop_finished()

    def _taken(
        self, active: dict[Row, Request], take: Callable[[], Request | None]
    ) -> list[Request]:
        """Requests for the free places, if there are enough of them."""
        free, new = self._limit - len(active), list[Request]()
        if active and free < self._few(active):
            return new
        longest = max(map(self._slots, active.values()), default=0)
        while len(new) < free:
            request = self._held.popleft() if self._held else take()
            if request is None:
                break
            longest, count = max(longest, self._slots(request)), len(active) + len(new)
            if count and self.most_slots and (count + 1) * longest > self.most_slots:
                self._held.appendleft(request)
                break
            new.append(request)
        return new

    def _few(self, active: dict[Row, Request]) -> int:
        """Places that are not worth a forward pass over new prompts."""
        return max(1, min(self._limit, len(active)) // REFILL)

    def _slots(self, request: Request) -> int:
        return len(request.prompt) + request.max_new_tokens + self.engine.tree.nodes

    def _prefilled(self, new: Sequence[Request], is_first: bool) -> Decoding:
        decoding = Decoding(self.engine, self.accept)
        rows = [Row(self.engine.target, r.prompt, r.max_new_tokens, seed=r.seed) for r in new]
        longest = max(request.max_new_tokens for request in new)
        reserved = longest if self.most_slots else min(RESERVED, longest)
        decoding.begin(rows, reserved if is_first else 0)  # the others' are copied
        return decoding

    def _shrink(self, rows: int, again: Sequence[Request], error: Exception) -> None:
        """Decode requests again, in a smaller batch."""
        self._limit = max(1, rows // 2)
        if isinstance(error, torch.OutOfMemoryError):
            self._ceiling = self._limit
        self._held.extendleft(reversed(again))
