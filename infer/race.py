"""Runs contestants side by side: same process, same prompts, interleaved in an order that rotates,
so that a machine that slows down slows all of them alike.

The clock runs around one generation and nothing else, with Python's garbage collector off, as
`timeit` has it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import Progress

from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.engine import Speculator, Statistics, Step

GENERATE, PLAIN = "generate", "plain"
"""Contestants of every race: transformers' own, and this engine without a drafter."""

PROFILED_JOBS = 4


@dataclass(frozen=True)
class BenchOptions:
    """sampling: the acceptance rule, and how `generate` samples. repetitions: runs per prompt and
    contestant. nodes: draft nodes of the trees that every head is measured with, cut from its own
    tree; empty: its own tree as it is. seed: of sampling and of the bootstrap, which draws
    `resamples` times.
    """

    max_new_tokens: int = 128
    sampling: Acceptance = field(default_factory=Greedy)
    repetitions: int = 1
    nodes: Sequence[int] = ()
    seed: int = 0
    resamples: int = 5000

    def __post_init__(self) -> None:
        if min(self.max_new_tokens, self.repetitions, self.resamples, *self.nodes) < 1:
            raise ValueError(
                "max_new_tokens, repetitions, resamples and nodes: expected 1 or more, got "
                f"{self.max_new_tokens}, {self.repetitions}, {self.resamples}, {list(self.nodes)}"
            )


@dataclass(frozen=True)
class Job:
    """A prompt, its number in the caller's list, and the new tokens that there is room for."""

    number: int
    prompt: Sequence[int]
    limit: int


@dataclass(frozen=True)
class Run:
    """One timed generation."""

    steps: list[Step]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """What was written."""
        return [token for step in self.steps for token in step.tokens]


@dataclass(frozen=True)
class Contestant:
    """generate: (prompt, limit) -> what was written, in steps. nodes: draft nodes of its tree, None
    where it has no fixed one. engine: None for transformers' own generate.
    """

    name: str
    nodes: int | None
    generate: Callable[[Sequence[int], int], list[Step]]
    engine: Speculator | None = None


Results = dict[str, list[list[Run]]]
"""Contestant's name -> for each job, its repetitions."""


def race(
    contestants: Sequence[Contestant],
    jobs: Sequence[Job],
    options: BenchOptions,
    console: Console | None = None,
) -> Results:
    """Warm up, then time every contestant on every job; the order rotates by one each time.

    Seeds torch's global random stream. console: of the progress bar, default stderr.
    """
    console = console or Console(stderr=True)
    results: Results = {contestant.name: [[] for _ in jobs] for contestant in contestants}
    turns = [place for _ in range(options.repetitions) for place in range(len(jobs))]
    with Progress(
        console=console,
        auto_refresh=False,  # no thread that draws while the clock runs
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("warming up", total=len(contestants) * (1 + len(turns)))
        for contestant in contestants:
            timed(contestant, jobs[0])
            progress.update(task, advance=1, refresh=True)
        for turn, place in enumerate(turns):
            first = turn % len(contestants)
            for contestant in (*contestants[first:], *contestants[:first]):
                _seed(options, turn)
                results[contestant.name][place].append(timed(contestant, jobs[place]))
                progress.update(task, advance=1, description=contestant.name, refresh=True)
    return results


def profiled(contestant: Contestant, jobs: Sequence[Job]) -> Statistics:
    """Statistics of a few jobs, run with a wait around each half of a step.

    On an accelerator only this tells drafting from verifying, and it costs time: hence runs of
    their own.
    """
    total = Statistics()
    assert contestant.engine is not None
    contestant.engine.profile = True
    for job in jobs[:PROFILED_JOBS]:
        for step in contestant.generate(job.prompt, job.limit):
            total.add(step)
    contestant.engine.profile = False
    return total


def timed(contestant: Contestant, job: Job) -> Run:
    """One generation under the clock."""
    with _no_garbage_collection():
        start = _clock()
        steps = contestant.generate(job.prompt, job.limit)
        seconds = _clock() - start
    return Run(steps, seconds)


def _seed(options: BenchOptions, turn: int) -> None:
    torch.manual_seed(options.seed + turn)
    options.sampling.seed(options.seed + turn)


def _clock() -> float:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return perf_counter()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:  # the process goes on after an error or Ctrl-C, and needs its collector
        yield
    finally:
        if enabled:
            gc.enable()
