"""Answers that are asked of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from draftheads.infer.accept import Acceptance
from draftheads.infer.constraint import Constraint
from draftheads.infer.continuous import ContinuousBatch
from draftheads.infer.reading import Reading, Session
from draftheads.infer.rows import Row, Step


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
    reused: int = 0  # tokens of the prompt that were in slots when its reading began
    cancelled: bool = False
    row: Row = field(init=False)  # once it is checked
    batch: ContinuousBatch = field(init=False)  # once it has a slot
    session: Session | None = None  # with drafts, from then on
    reading: Reading | None = None  # once it has begun, until the job has entered the batch
