"""What an examination of a head finds."""

from __future__ import annotations

from dataclasses import dataclass

WORTH = 0.05
"""Tokens per step below which a finding explains nothing that anyone would notice."""


@dataclass(frozen=True)
class Finding:
    """check: what was examined. explains: tokens per step that mending it may bring. shown: the
    numbers. normal: what they are where nothing is wrong. advice: the next step.
    """

    check: str
    explains: float
    shown: str
    normal: str
    advice: str

    @property
    def matters(self) -> bool:
        """Whether it costs tokens that can be noticed; otherwise it is a remark."""
        return self.explains >= WORTH


@dataclass(frozen=True)
class Diagnosis:
    """findings: sorted, the one that explains most first. measured: tokens per step of greedy
    decoding in `steps` steps. predicted: by the observed `positions`, for the best fixed tree.
    expected: what training recorded for that, None where nothing was.
    """

    findings: list[Finding]
    remarks: list[Finding]
    measured: float
    steps: int
    predicted: float
    positions: int
    expected: float | None

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings
