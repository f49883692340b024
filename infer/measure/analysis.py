"""The chain model of speculative decoding (Leviathan et al., arXiv 2211.17192, section 3): what it
predicts for a candidate of a bench, beside what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 64
"""Draft lengths among which the best one is sought."""
COLUMNS = ("chain model", "α", "γ", "c", "predicted", "measured", "best γ")
LEGEND = "chain model: predicted and measured speed over plain; see docs/tuning.md."


@dataclass(frozen=True)
class Analysis:
    """The chain model's view of a candidate."""

    alpha: float  # share of the draft tokens after accepted ones that are accepted, any of a level
    gamma: int  # levels drafted per step
    c: float  # time to draft one level, over that of a plain step
    predicted: float  # speed over plain decoding, if a verification takes as long as a plain step
    measured: float  # the same, as timed
    best_gamma: int  # with the highest predicted speed, at the same alpha and c

    @classmethod
    def of(cls, acceptance: Sequence[float], gamma: int, c: float, measured: float) -> Analysis:
        """acceptance: share of steps with 1, 2, ... accepted drafts. gamma: at least 1."""
        levels_tried = [1.0, *acceptance][:gamma]
        alpha = sum(acceptance) / sum(levels_tried)
        best = max(range(LONGEST + 1), key=lambda length: walltime_factor(alpha, length, c))
        return cls(alpha, gamma, c, walltime_factor(alpha, gamma, c), measured, best)

    def row(self, name: str) -> list[str]:
        """Cells of `COLUMNS`."""
        figures = (self.c, self.predicted, self.measured)
        shown = [f"{figure:.2f}" for figure in figures]
        return [name, f"{self.alpha:.2f}", str(self.gamma), *shown, str(self.best_gamma)]


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """(1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)), as a sum; theorem 3.8 there."""
    return sum(alpha**accepted for accepted in range(gamma + 1)) / (gamma * c + 1.0)
