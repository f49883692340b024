"""What a few steps of the trainer on a target of one depth took, read from a child's marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Trial:
    """What steps on a target of `layers` layers took.

    base: bytes of Python and its libraries. peaks: bytes, the highest of each phase. Seconds:
    features: of the target per micro batch; body: the head's part of one more micro batch; rest: of
    a step of `micro_batches`, features apart; load, observe and save: once. checkpoint: bytes.
    """

    layers: int
    micro_batches: int
    base: int
    peaks: dict[str, int]
    features: float
    body: float
    rest: float
    load: float
    observe: float
    save: float
    checkpoint: int

    def step(self, micro_batches: int, *, features: bool = True) -> float:
        """Seconds of a step of so many micro batches."""
        more = (micro_batches - self.micro_batches) * self.body
        return self.rest + more + (micro_batches * self.features if features else 0.0)


def read_trial(found: dict[str, Any], layers: int, calls: int, checkpoint: int) -> Trial:
    """What a child's marks say. calls: forwards of the target per micro batch."""
    marks: list[tuple[str, float]] = [(name, at) for name, at in found["marks"]]
    ends = [at for name, at in marks if name == "optimizer end"]
    heads = [at for name, at in marks if name == "head"]
    steps = list(pairwise(ends))
    micro = len(heads) // len(ends)
    forwards = _forwards(marks)
    inside = [stop - start for start, stop in forwards if ends[0] <= start < ends[-1]]
    before = [stop - start for start, stop in forwards if start < heads[0]]

    def apart(start: float, stop: float) -> float:
        """Seconds without the target's."""
        return stop - start - sum(b - a for a, b in forwards if start <= a < stop)

    bodies = [apart(a, b) for a, b in pairwise(heads) if not any(a < end < b for end in ends)]
    at = dict(marks)  # the last of each name
    observe = max(0.0, at["forward end"] - ends[-1])
    return Trial(
        layers=layers,
        micro_batches=micro,
        base=found["base"],
        peaks=found["peaks"],
        features=calls * median(inside or before),  # before: where they are written to files first
        body=median(bodies) if bodies else 0.0,
        rest=median(apart(a, b) for a, b in steps),
        load=apart(at["begin"], heads[0]),
        observe=observe,
        save=at["end"] - ends[-1] - observe,
        checkpoint=checkpoint,
    )


def _forwards(marks: Sequence[tuple[str, float]]) -> list[tuple[float, float]]:
    """(start, stop) of the target's outermost forwards."""
    spans, open_since = [], []
    for name, at in marks:
        if name == "target":
            open_since.append(at)
        elif name == "target end":
            start = open_since.pop()
            if not open_since:
                spans.append((start, at))
    return spans
