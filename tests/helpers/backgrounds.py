"""A background that does what a test says, and notes what it is given."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event

from draftheads.infer.background import Point
from draftheads.infer.engine import Speculator

Work = Callable[[Speculator], Speculator]


class Pieces:
    """Each piece waits for one `allow`, and does the next work of a list; without more, nothing is
    waited for or done.
    """

    def __init__(self, *works: Work) -> None:
        self.works = list(works)
        self.begun: SimpleQueue[Speculator] = SimpleQueue()
        self.answers: SimpleQueue[tuple[list[int], list[int]]] = SimpleQueue()
        self.number = 0
        self.curve: list[Point] = []
        self._gate = Event()

    def answered(self, prompt, answer) -> None:
        self.answers.put((list(prompt), list(answer)))

    def work(self, engine):
        if not self.works:
            return engine, 60.0
        self.number += 1
        self.begun.put(engine)
        assert self._gate.wait(20)
        self._gate.clear()
        return self.works.pop(0)(engine), 0.0

    def points(self):
        return self.curve

    def wait(self) -> Speculator:
        """Until a piece has begun; returns the engine that it works on."""
        return self.begun.get(timeout=20)

    def allow(self) -> None:
        """Let the piece end."""
        self._gate.set()


def same(engine: Speculator) -> Speculator:
    """Work that changes nothing."""
    return engine


def fails(engine: Speculator) -> Speculator:
    """Work that cannot be done."""
    raise RuntimeError("the disk is full")
