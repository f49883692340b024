"""What a few steps of the trainer on a target of one depth took, read from a child's marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

ALONE, JOINT = "alone", "joint"
"""Kinds of steps: heads learn alone, or together with an adapter of the target."""
Depth = tuple[int, int]
"""Layers of a target, and how many of them an adapter changes."""


@dataclass(frozen=True)
class Pace:
    """Seconds, the untouched target's features apart. body: of one more micro batch; rest: of a
    step of as many as the trial has.
    """

    body: float
    rest: float


@dataclass(frozen=True)
class Trial:
    """What steps on a target of some depth took.

    base: bytes of Python and its libraries. peaks: bytes, the highest of each phase. Seconds:
    features: of the untouched target per micro batch; paces: by kind of step; load, observe and
    save: once. checkpoint: bytes.
    """

    depth: Depth
    micro_batches: int
    base: int
    peaks: dict[str, int]
    features: float
    paces: dict[str, Pace]
    load: float
    observe: float
    save: float
    checkpoint: int

    def step(self, micro_batches: int, kind: str = ALONE) -> float:
        """Seconds of a step of so many micro batches, features apart."""
        pace = self.paces[kind]
        return pace.rest + (micro_batches - self.micro_batches) * pace.body


def read_trial(found: dict[str, Any], depth: Depth, calls: int, checkpoint: int) -> Trial:
    """What a child's marks say. calls: forwards of the untouched target per micro batch."""
    marks: list[tuple[str, float]] = [(name, at) for name, at in found["marks"]]
    ends = [at for name, at in marks if name == "optimizer end"]
    heads = [at for name, at in marks if name == "head"]
    steps: dict[str, list[tuple[float, float]]] = {}
    for start, stop in pairwise(ends):
        joint = any(name == "adapted" and start <= at < stop for name, at in marks)
        steps.setdefault(JOINT if joint else ALONE, []).append((start, stop))
    micro = len(heads) // len(ends)
    forwards = _forwards(marks)
    inside = [stop - start for start, stop in forwards if ends[0] <= start < ends[-1]]
    before = [stop - start for start, stop in forwards if start < heads[0]]

    def apart(start: float, stop: float) -> float:
        """Seconds without the untouched target's."""
        return stop - start - sum(b - a for a, b in forwards if start <= a < stop)

    def pace(of_kind: Sequence[tuple[float, float]]) -> Pace:
        bodies = [
            apart(a, b)
            for start, stop in of_kind
            for a, b in pairwise(head for head in heads if start <= head < stop)
        ]
        rest = median(apart(start, stop) for start, stop in of_kind)
        return Pace(median(bodies) if bodies else 0.0, rest)

    at = dict(marks)  # the last of each name
    observe = max(0.0, at["forward end"] - ends[-1])
    return Trial(
        depth=depth,
        micro_batches=micro,
        base=found["base"],
        peaks=found["peaks"],
        features=calls * median(inside or before),  # before: where they are written to files first
        paces={kind: pace(of_kind) for kind, of_kind in steps.items()},
        load=apart(at["begin"], heads[0]),
        observe=observe,
        save=at["end"] - ends[-1] - observe,
        checkpoint=checkpoint,
    )


def _forwards(marks: Sequence[tuple[str, float]]) -> list[tuple[float, float]]:
    """(start, stop) of the untouched target's outermost forwards."""
    spans, open_since = [], []
    for name, at in marks:
        if name == "target":
            open_since.append(at)
        elif name == "target end":
            start = open_since.pop()
            if not open_since:
                spans.append((start, at))
    return spans
