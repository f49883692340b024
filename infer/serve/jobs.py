"""Jobs, and the batch in which they are decoded together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from draftheads.infer.accept import Acceptance
from draftheads.infer.constraint import Constraint
from draftheads.infer.engine import Speculator
from draftheads.infer.rows import Decoding, Row, Session, Step
from draftheads.infer.serve.tree_sizes import TreeSizes

FEW = 1 / 4
"""Rows that have ended stay in the caches of a batch while they are at most this share of the
others: to remove them copies the caches.
"""
RECORDED = 8
"""So many may always stay where steps are recorded, as fewer rows would be recorded anew, and a GPU
computes hardly longer for them.
"""


@dataclass(eq=False)
class Job:
    """A prompt to continue. deliver: called in the engine's thread with each Step that has tokens,
    or with the exception that ends the job early.
    """

    prompt: list[int]
    deliver: Callable[[Step | Exception], None]
    sampling: Acceptance
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()  # tokens that end the answer, besides the target's own
    draft: bool = True  # False: with the plain model
    is_kept: bool = True  # False: not given to a background
    constraint: Constraint | None = None
    # what becomes of it
    seconds: float = 0.0  # of the engine, so far
    reused: int = 0  # tokens of the prompt that were not computed again
    cancelled: bool = False
    row: Row = field(init=False)  # once it is checked
    batch: JobBatch = field(init=False)  # once it has a slot
    session: Session | None = None
    prefill: Iterator[Decoding | None] = iter(())
    """Parts of its prompt, and the decoding that can join the batch."""
    decoding: Decoding | None = None  # of this row alone


class JobBatch:
    """Jobs of one engine that are decoded together, `most` at a time.

    After an error, such as the end of memory, fewer are decoded at a time, until some have ended.
    """

    def __init__(self, engine: Speculator, most: int) -> None:
        self.engine = engine
        self.jobs: list[Job] = []
        self._most = self._limit = most
        self._decoding: Decoding | None = None
        self._opened: Decoding | None = None  # of several jobs; kept if it was recorded
        self._sizes = TreeSizes(engine.tree)

    @property
    def has_room(self) -> bool:
        """Whether another job may join."""
        return len(self.jobs) < self._limit

    def join(self, job: Job) -> None:
        """Add a job whose prompt was read."""
        assert job.decoding is not None
        self.jobs.append(job)
        if self._decoding is None:
            self._decoding = job.decoding
            return
        if self._decoding is self.jobs[0].decoding:  # which keeps its own caches for itself
            if self._opened is None:
                self._opened = self.engine.open(self._decoding)
            else:
                self._opened.join(self._decoding)
            self._decoding = self._opened
        self._decoding.join(job.decoding)

    def step(self) -> list[tuple[Job, Step]]:
        """One forward pass for all jobs."""
        decoding = self._decoding
        assert decoding is not None
        few = FEW * len(self.jobs)
        if self.engine.maker.recorder:
            few = max(few, RECORDED)
        if len(decoding.rows) - len(self.jobs) > few:
            decoding.drop_finished()
        any_tree = not any(job.sampling.sees_drafts for job in self.jobs)
        rows = len(self.jobs) if any_tree else 1
        self.engine.use(decoding, self._sizes.choose(rows))
        start = self.engine.clock()
        if len(decoding.rows) == 1 or not self.engine.compile:  # which takes a minute for each size
            self.engine.maker.fix(decoding)
        steps = self.engine.step(decoding)
        tokens = sum(len(step.tokens) for step in steps.values())
        if not self.engine.maker.recorder or (decoding.fixed and not decoding.fixed.is_new):
            self._sizes.learn(rows, tokens, self.engine.clock() - start)
        return [(job, steps[job.row]) for job in self.jobs]

    def leave(self, job: Job) -> None:
        """Let a job end, with its caches in its session if it has one."""
        self.jobs.remove(job)
        self._limit = min(self._most, self._limit + 1)
        decoding = self._decoding
        if decoding is not None and decoding is not job.decoding:
            decoding.leave(job.row, job.decoding if job.session is not None else None)
        if not self.jobs:
            self._decoding = None
            if self._opened is not None and not self._opened.caches.recordings.made:
                self._opened = None

    def fail(self, error: Exception) -> list[Job]:
        """Give up all rows, and decode fewer from now on; returns the jobs."""
        jobs = self.jobs
        self.jobs = []
        self._decoding = self._opened = None
        self._limit = max(1, len(jobs) // 2)
        if isinstance(error, torch.OutOfMemoryError):
            self._most = self._limit
            torch.cuda.empty_cache()
        return jobs
