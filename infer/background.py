"""Work on the answers of an engine, and in the time in which nothing is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draftheads.infer.engine import Speculator

QUIET = 0.5
"""Seconds without a request before the first piece of work."""
LONGEST_PAUSE = 3600.0
"""Seconds between two pieces, at most; a lock cannot wait for any time."""
COMPLETE = ("eos", "stop", "length")
"""How answers end that are given to a background."""


@dataclass(frozen=True)
class Point:
    """The quality of the served head at some time."""

    time: float  # Unix seconds
    version: int  # of the head
    tokens_per_step: float  # on what users asked lately
    tokens: int  # learned so far
    adopted: bool  # whether this version was served from then on


class Background(Protocol):
    """Works on the answers of an engine, and on its target while nothing is asked.

    An exception of `answered` or `work` ends it, and no request fails with it.
    """

    def answered(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take the token ids of a prompt and of its complete answer, its end token included. Called
        in the thread of the engine, so it must be quick. Answers that failed, or were stopped by
        the user before their end, are not given.
        """
        ...

    def work(self, engine: Speculator) -> tuple[Speculator, float]:
        """Do one short piece of work, while the engine is used for nothing else; requests wait for
        its end. Gradients are on.

        Returns the engine of all later requests, for the same target: the same one, unless its head
        has become better. And the seconds to wait before the next piece if nothing is asked.
        """
        ...

    def points(self) -> Sequence[Point]:
        """The quality over time, the oldest first. Called in any thread."""
        ...
