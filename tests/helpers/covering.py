"""Few combinations of several factors in which every pair of their values is met."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

Combination = tuple[Any, ...]
MOST = 50
"""Combinations that are compared before one is taken."""


def pairs(combination: Combination) -> list[tuple[tuple[int, Any], tuple[int, Any]]]:
    """The pairs of values that a combination meets, each with its factor."""
    return list(combinations(enumerate(combination), 2))


def covering(
    factors: Sequence[Iterable[Any]], is_possible: Callable[[Combination], bool], seed: int = 0
) -> list[Combination]:
    """Possible combinations that meet all pairs which any possible one meets, the rarest first."""
    draw = Random(seed)
    meeting = defaultdict(list)
    for combination in filter(is_possible, product(*factors)):
        for pair in pairs(combination):
            meeting[pair].append(combination)
    missing = dict.fromkeys(sorted(meeting, key=lambda pair: (len(meeting[pair]), pair)))
    taken = []
    while missing:
        rarest = meeting[next(iter(missing))]
        some = draw.sample(rarest, min(MOST, len(rarest)))
        best = max(some, key=lambda each: sum(pair in missing for pair in pairs(each)))
        taken.append(best)
        for pair in pairs(best):
            missing.pop(pair, None)
    return taken
