"""Times candidates that decode the same prompts in turns, so that a slow moment of the machine
slows all of them alike.

Legend: P prompts, R bootstrap resamples.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from draftheads.heads.target.model import Target
from draftheads.heads.terminal import said_if_long
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.rows import Step
from draftheads.infer.turns import TimedRun, Turns

GENERATE, PLAIN = "generate", "plain"
"""Candidates of every bench: transformers' own `generate`, and this engine without a drafter."""

RESAMPLES = 5000
"""Number of resamples of the bootstrap."""
TICK_S = 0.01
"""Of the CPU time of other processes; what they do in less may be measured as nothing."""
WARM_TOKENS = 2
"""New tokens of an untimed run: one of the prefill, one of a step."""


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """Settings of a race."""

    sampling: Acceptance = field(default_factory=Greedy)
    seed: int = 0  # of sampling
    compile: bool = False  # of a bench: every candidate once more, compiled
    minutes: float | None = None  # since `Turns` began, in which turns end


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt, its index in the caller's list, and the new tokens that fit after it."""

    number: int
    prompt: Sequence[int]
    limit: int


class Decoder(Protocol):
    """Continues a prompt: a `Speculator`, transformers' own `generate`, or llama.cpp."""

    def generate(
        self, prompt: Sequence[int], *, sampling: Acceptance, max_new_tokens: int
    ) -> Iterator[Step]:
        """See `Speculator.generate`."""
        ...


@dataclass(frozen=True)
class Candidate:
    """An engine to time. nodes: draft nodes of its tree; None if their number varies. clock:
    measures an engine in another process, instead of the clock that times the others.
    """

    name: str
    engine: Decoder
    nodes: int | None = None
    clock: Callable[[], float] | None = None


Runs = Mapping[str, list[TimedRun]]
"""Name of a candidate -> its run of each prompt."""


def steps_of(runs: Sequence[TimedRun]) -> Iterator[Step]:
    """All steps of a candidate but the prefills."""
    for run in runs:
        yield from (step for step in run.steps if step.accepted >= 0)


def rule_name(rule: Acceptance) -> str:
    """The name of a rule with its values, for settings and titles."""
    return "greedy" if isinstance(rule, Greedy) else repr(rule)


def own_randomness(target: Target) -> AbstractContextManager[None]:
    """A context that may seed torch's random streams freely, and restores the caller's streams at
    its end.
    """
    devices = [target.device] if target.device.type == "cuda" else []
    return torch.random.fork_rng(devices=devices)


def fitting_prompts(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[BenchPrompt]:
    """The prompts that leave room for new tokens in the context. Raises ValueError if there are
    none.
    """
    fitting = [
        BenchPrompt(number, prompt, min(max_new_tokens, target.context - len(prompt)))
        for number, prompt in enumerate(prompts)
        if len(prompt) < target.context
    ]
    if not fitting:
        raise ValueError(
            f"expected a prompt shorter than the context of {target.name} ({target.context} "
            f"tokens), found none among {len(prompts)}; pass shorter prompts"
        )
    return fitting


def race(
    candidates: Sequence[Candidate],
    prompts: Sequence[BenchPrompt],
    options: RaceOptions,
    clock: Callable[[], float] = perf_counter,
    turns: Turns | None = None,
) -> tuple[list[BenchPrompt], Runs]:
    """Warm up, then time every candidate on every prompt; the order rotates by one each time.

    Seeds torch's global random stream. clock: of `TimedRun.seconds`. turns: where a race goes on,
    and where it ends early. Once one turn has ended, Ctrl-C and SIGTERM are left to `turns`.
    Returns the prompts that it reached, with their runs.
    """
    turns = turns or Turns()
    names = sorted(each.name for each in candidates)
    keys = [json.dumps([turn, prompt.number, names]) for turn, prompt in enumerate(prompts)]
    if not turns.ended.keys() >= {*keys}:
        timings = len(keys) * len(candidates)
        with said_if_long(f"warming up; then {timings} timed runs, with the time that is left"):
            warm_up(candidates, prompts, options)
    turns.open(keys, len(candidates), options.minutes)
    try:
        for turn, key in enumerate(keys):
            if key in turns.ended:
                continue
            if not turns.has_time():
                break
            first = turn % len(candidates)
            times = {}
            for each in (*candidates[first:], *candidates[:first]):
                torch.manual_seed(options.seed + turn)
                options.sampling.seed(options.seed + turn)
                times[each.name] = timed(each, prompts[turn], options.sampling, clock)
                turns.tick()
            turns.keep(key, times)
    except (KeyboardInterrupt, SystemExit) as stop:
        turns.stop = stop
    turns.left_out += sum(key not in turns.ended for key in keys)
    reached = [prompt for key, prompt in zip(keys, prompts, strict=True) if key in turns.ended]
    if not reached:
        turns.check()
    ended = [turns.ended[key] for key in keys if key in turns.ended]
    return reached, {each.name: [times[each.name] for times in ended] for each in candidates}


def warm_up(
    candidates: Sequence[Candidate], prompts: Sequence[BenchPrompt], options: RaceOptions
) -> None:
    """Decode the shortest prompt by a step. Compiled code may know one length only, and
    transformers compiles again for a longer cache: it decodes the longest, too, as long as in the
    race. On a GPU so does this engine, as each length is recorded.
    """
    ordered = sorted(prompts, key=lambda each: len(each.prompt) + each.limit)
    shortest = replace(ordered[0], limit=min(ordered[0].limit, WARM_TOKENS))
    chosen = [ordered[-1], shortest] if options.compile or torch.cuda.is_available() else [shortest]
    for each, prompt in product(candidates, chosen):
        timed(each, prompt, options.sampling)


def timed(
    candidate: Candidate,
    prompt: BenchPrompt,
    rule: Acceptance,
    clock: Callable[[], float] = perf_counter,
) -> TimedRun:
    """Time one generation, with Python's garbage collector off, as in `timeit`. clock: unless the
    candidate has its own.

    Token ids reach the CPU in every step, so no device work is left when the clock is read.
    """
    clock = candidate.clock or clock
    was_enabled = gc.isenabled()
    gc.disable()
    try:  # turn the collector on again after an error or Ctrl-C
        start = clock()
        steps = candidate.engine.generate(prompt.prompt, sampling=rule, max_new_tokens=prompt.limit)
        return TimedRun(list(steps), clock() - start or TICK_S / 2)
    finally:
        if was_enabled:
            gc.enable()


def speed(sums_P2: Tensor) -> float:
    """Tokens per second. sums_P2: float64 tokens and seconds."""
    tokens, seconds = sums_P2.sum(0).tolist()
    return float(tokens / seconds)


def speedup_interval(ours_P2: Tensor, baseline_P2: Tensor) -> list[float]:
    """95 % interval [low, high] of the ratio of tokens per second: a paired bootstrap over prompts.

    ours_P2, baseline_P2: as of `speed`, of the same prompts. Each resample draws P
    prompts with replacement, the same for both sides, and takes the ratio of the sums.
    """
    prompts = len(ours_P2)
    generator = torch.Generator().manual_seed(0)
    drawn_RP = torch.randint(prompts, (RESAMPLES, prompts), generator=generator)
    ours_R2 = ours_P2[drawn_RP].sum(1)
    baseline_R2 = baseline_P2[drawn_RP].sum(1)
    ratio_R = (ours_R2[:, 0] / ours_R2[:, 1]) / (baseline_R2[:, 0] / baseline_R2[:, 1])
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    interval: list[float] = torch.quantile(ratio_R, bounds).tolist()
    return interval


def describe_machine(target: Target) -> dict[str, Any]:
    """Hardware and versions that affect the times."""
    device = target.device
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.is_file() else "")
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    return {
        "cpu": named[1].strip() if named else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "draftheads": version("draftheads"),
        "dtype": target.precision,
        "engine": target.engine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """The output of `describe_machine` in one line."""
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads"
    engine = " in ONNX Runtime" if machine.get("engine") == "onnx" else ""
    return (
        f"{machine['gpu'] or cpu}, {machine['dtype']}{engine}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, draftheads {machine['draftheads']}, "
        f"{machine['date'][:10]}"
    )
