"""What would bring more tokens per step, in order of gain per effort."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftheads.train.advice.bounds import Bounds
from draftheads.train.metrics import Line, another_doubling

TUNING = 0.1
"""The effort of `draftheads tune`, in trainings."""
EPOCHS = 4
"""Passes over the same answers up to which they teach about as much as new ones would (arXiv
2305.16264).
"""
LEAST = 1.02
"""Factors up to this one are not worth a line."""


@dataclass(frozen=True)
class Gain:
    """low, high: times the present tokens per step, at least and at most. trainings: the effort,
    in trainings as long as that of the head.
    """

    low: float
    high: float
    change: str
    trainings: float

    @property
    def per_effort(self) -> float:
        """Of the middle of the interval, as a logarithm, so that small steps add up."""
        return math.log((self.low + self.high) / 2) / self.trainings


def passes(training: Mapping[str, Any]) -> float:
    """How often a head has read its texts, prompts included; 0 if its record does not say."""
    data = training.get("data")
    size = data.get("tokens") if isinstance(data, Mapping) else None
    tokens = training.get("tokens")
    if not (isinstance(size, int) and isinstance(tokens, int)):
        return 0.0
    return tokens / max(size, 1)


def gains(
    tau: float, bounds: Bounds | None, metrics: Sequence[Line], training: Mapping[str, Any]
) -> list[Gain]:
    """The changes that are worth it, the best first. tau: tokens per step now. metrics, training:
    what the head's run recorded, as far as it did.
    """
    found: list[Gain] = []
    if not tau:  # all answers ended at once
        return found
    if bounds:
        vocabulary, depths = bounds.vocabulary / bounds.tree, bounds.depths / bounds.tree
        found += [
            Gain(1.0, bounds.tree / tau, "another tree: draftheads tune", TUNING),
            Gain(1.0, vocabulary, "more draft tokens: head.vocabulary, and a new training", 1.0),
            Gain(1.0, depths, "a kind whose later depths are as good as the first", 1.0),
        ]
    if doubling := another_doubling(metrics):
        low, high = (1 + rise / tau for rise in doubling)
        change = "twice the tokens: run.steps, run.epochs or run.minutes"
        if passes(training) > EPOCHS:
            change = "twice the tokens, from twice the prompts: draftheads distill"
        found.append(Gain(low, high, change, 1.0))
    worthy = [each for each in found if each.high > LEAST]
    return sorted(worthy, key=lambda each: -each.per_effort)
