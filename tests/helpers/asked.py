"""Jobs for a scheduler, and what they were delivered."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from draftheads.infer.accept import Greedy
from draftheads.infer.rows import Step
from draftheads.infer.serve.jobs import Job


class Asked:
    """A job and what it was delivered."""

    def __init__(self, prompt: list[int], rule: Any = None, new: int = 12, **options: Any) -> None:
        self.events: SimpleQueue[Step | Exception] = SimpleQueue()
        self.job = Job(prompt, self.events.put, rule or Greedy(), new, **options)

    def answer(self) -> list[int]:
        """The tokens, once all are there. Raises what ended it early."""
        tokens: list[int] = []
        while True:
            event = self.events.get(timeout=20)
            if isinstance(event, Exception):
                raise event
            tokens += event.tokens
            if event.finish:
                return tokens
