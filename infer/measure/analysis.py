"""What acceptance by depth says of drafts, by the analysis of speculative decoding (arXiv
2211.17192, section 3).

With a rate alpha that is the same for each draft token, a step of gamma tokens writes
(1 - alpha^(gamma + 1)) / (1 - alpha), and is fastest where this over 1 + gamma c is greatest, c
being the time of one draft token over that of a plain step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from draftheads.infer.measure.bench import BenchReport, Result
from draftheads.infer.measure.report import fastest


def tokens(rates: Sequence[float]) -> float:
    """Of a step. rates[d]: how often draft token d is right after right ones."""
    right = total = 1.0
    for rate in rates:
        right *= rate
        total += right
    return total


def rates(result: Result) -> list[float]:
    """Of each depth, of the steps in which the drafts before it were right."""
    reached = [1.0, *result.acceptance_by_depth]
    return [now / before for before, now in pairwise(reached) if before]


def best_depth(rates: Sequence[float], cost: float) -> int:
    """How many draft tokens are fastest; 0: none are worth it."""
    return max(range(len(rates) + 1), key=lambda depth: tokens(rates[:depth]) / (1 + depth * cost))


def analysed(report: BenchReport) -> list[str]:
    """A line for the fastest tree of each head."""
    lines = []
    for result in fastest(report):
        own = rates(result)
        if not own:
            continue
        same = own[:1] * len(own)
        cost = result.draft_seconds / len(own) / report.plain.step_seconds
        error = tokens(same) / result.tokens_per_step - 1
        verify = result.verify_seconds / report.plain.step_seconds
        lines.append(
            f"{result.name}: alpha by depth {', '.join(f'{rate:.2f}' for rate in own)}. With the "
            f"first everywhere a step would write {tokens(same):.2f} tokens, {error:+.0%} of what "
            f"it does. A draft token costs {cost:.2f} plain steps: fastest with "
            f"{best_depth(same, cost)} of them by the formula, with {best_depth(own, cost)} by the "
            f"rates of each depth, if verifying took a plain step; it takes {verify:.2f}."
        )
    return lines
