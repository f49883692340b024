"""What a benchmark found: as JSON, as a table with footnotes, as facts for a model card."""

from __future__ import annotations

import gc
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from draftheads.heads.base import Drafter, DraftHead
from draftheads.heads.target import Target
from draftheads.heads.tree import Tree
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.engine import Baseline, Speculator, Statistics, Step, without_defaults


@dataclass(frozen=True)
class Divergence:
    """Where an output first differs from `generate`'s, in the first prompt in which it does.

    prompts: how many prompts differ. prompt: number of the first, token: place in its output.
    expected, got: token ids, None where one output ended. top2_margin: the target's best logit
    minus its second best at that place; near zero means that rounding decided.
    """

    prompts: int
    prompt: int
    token: int
    expected: int | None
    got: int | None
    top2_margin: float


@dataclass(frozen=True)
class Result:
    """One contestant's measurements.

    nodes: draft nodes of its tree, None where its drafter has no fixed tree. lossless: True when
    the output equals `generate`'s token for token for every prompt, None with `lossless_reason`
    where that cannot be asked. tokens_per_step counts the target's bonus token;
    acceptance_by_depth[d] is the share of steps with d + 1 or more draft tokens accepted.
    speedup: tokens per second over `generate`'s; speedup_over_best: over the faster of `generate`
    and this engine without drafts. draft_seconds, verify_seconds: means per step. steps and tokens:
    sums over prompts and repetitions, the prefill's token included in tokens.
    """

    name: str
    nodes: int | None
    lossless: bool | None
    lossless_reason: str | None
    first_divergence: Divergence | None
    tokens_per_step: float
    acceptance_by_depth: list[float]
    tokens_per_second: float
    baseline_tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    speedup_ci95: tuple[float, float]
    speedup_over_best: float
    speedup_over_best_ci95: tuple[float, float]
    draft_seconds: float
    verify_seconds: float
    steps: int
    tokens: int


@dataclass(frozen=True)
class BenchReport:
    """plain: the engine without a drafter. heads: one Result per head and tree size."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    plain: Result
    heads: list[Result]

    def result(self, name: str) -> Result:
        """The result called `name`. Raises ValueError when there is none."""
        for result in (self.plain, *self.heads):
            if result.name == name:
                return result
        names = ", ".join(result.name for result in (self.plain, *self.heads))
        raise ValueError(f"no result is called {name!r}; expected one of {names}")


def describe_machine(target: Target) -> dict[str, Any]:
    """What a reader needs to judge the times."""
    device = target.device
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "draftheads": version("draftheads"),
        "dtype": str(target.dtype).removeprefix("torch."),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def as_dict(report: BenchReport) -> dict[str, Any]:
    """The report as plain values, ready for JSON."""
    return asdict(report)


def write_json(report: BenchReport, path: str | Path) -> None:
    """Write the report as JSON; a reader sees the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(as_dict(report), indent=2, allow_nan=False) + "\n")
    os.replace(part, path)


def measured_facts(report: BenchReport, name: str) -> dict[str, Any]:
    """What a head's config.json and model card say about the result called `name`."""
    result, settings = asdict(report.result(name)), report.settings
    keys = (
        "nodes",
        "lossless",
        "tokens_per_step",
        "acceptance_by_depth",
        "speedup",
        "speedup_ci95",
        "speedup_over_best",
        "tokens_per_second",
        "baseline_tokens_per_second",
        "plain_tokens_per_second",
    )
    return {
        **{key: result[key] for key in keys},
        "speedup_ci95": list(result["speedup_ci95"]),
        "sampling": settings["sampling"],
        "prompts": settings["prompts"],
        "max_new_tokens": settings["max_new_tokens"],
        "machine": machine_line(report.machine),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads"
    return (
        f"{machine['gpu'] or cpu}, {machine['dtype']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {machine['date'][:10]}"
    )


def print_report(report: BenchReport, console: Console | None = None) -> None:
    """The table and its footnotes."""
    console = console or Console()
    console.print(table(report))
    for note in footnotes(report):
        console.print(note, style="dim", markup=False, highlight=False)


def table(report: BenchReport) -> Table:
    """One row per contestant, `generate` first."""
    title = f"{report.settings['target']}: {report.settings['sampling']}"
    made = Table(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True
    )
    made.add_column("contestant", overflow="fold", min_width=10)
    columns = ("τ", "tok/s", "speedup", "95 %", "vs best", "draft", "verify", "lossless")
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True)
    plain = report.plain
    generate = plain.baseline_tokens_per_second
    over_best = generate / max(generate, plain.tokens_per_second)
    made.add_row("generate", "", f"{generate:.0f}", "1.00", "", f"{over_best:.2f}")
    for result in (plain, *report.heads):
        low, high = result.speedup_ci95
        made.add_row(
            result.name,
            f"{result.tokens_per_step:.2f}",
            f"{result.tokens_per_second:.0f}",
            f"{result.speedup:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{result.speedup_over_best:.2f}",
            f"{result.draft_seconds * 1e3:.2f}",
            f"{result.verify_seconds * 1e3:.2f}",
            _yes_no(result),
            style="bold red" if result.lossless is False else None,
        )
    return made


def _yes_no(result: Result) -> str:
    if result.lossless is None:
        return "n/a"
    return "yes" if result.lossless else "NO"


def footnotes(report: BenchReport) -> list[str]:
    """What the table's numbers mean, in plain words."""
    settings, plain = report.settings, report.plain
    notes = [
        "generate: transformers' own. plain: this engine without a drafter, so that its own gain "
        "and the heads' can be told apart.",
        "name@N: a tree of N draft nodes. τ: tokens per forward of the target, its own "
        "bonus token counted; 1.00 is no gain. draft, verify: milliseconds per step.",
        f"speedup: tokens per second over generate's, prompt included; 95 % bootstrap interval "
        f"over {settings['prompts']} prompts, runs interleaved in one process. vs best: over the "
        "faster of generate and plain.",
        plain.lossless_reason
        or "lossless: the output equals generate's, token for token, for every prompt.",
        *(_divergence_note(result) for result in (plain, *report.heads) if result.first_divergence),
        f"machine: {machine_line(report.machine)}.",
    ]
    if settings["prompts"] == 1:
        notes.append("One prompt has no spread: measure more of them before trusting the interval.")
    if settings["prompts_shortened"]:
        notes.append(
            f"{settings['prompts_shortened']} prompts had no room for "
            f"{settings['max_new_tokens']} new tokens and got what the context leaves."
        )
    if settings["prompts_skipped"]:
        notes.append(f"{settings['prompts_skipped']} prompts fill the context and were skipped.")
    return notes


def _divergence_note(result: Result) -> str:
    found = result.first_divergence
    assert found is not None
    return (
        f"{result.name}: differs from generate in {found.prompts} prompts, first in prompt "
        f"{found.prompt} at token {found.token}, where the target's two best logits are "
        f"{found.top2_margin:.2g} apart."
    )


# Runs contestants side by side: same process, same prompts, interleaved in an order that rotates,
# so that a machine that slows down slows all of them alike.
#
# The clock runs around one generation and nothing else, with Python's garbage collector off, as
# `timeit` has it.


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
class BenchPrompt:
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
class Candidate:
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
    contestants: Sequence[Candidate],
    jobs: Sequence[BenchPrompt],
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


def profiled(contestant: Candidate, jobs: Sequence[BenchPrompt]) -> Statistics:
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


def timed(contestant: Candidate, job: BenchPrompt) -> Run:
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


# From the runs of a race to results: speed, its interval, losslessness.
#
# Legend: P prompts, R bootstrap resamples.


class Summary:
    """Turns the runs of a race into results."""

    def __init__(
        self, target: Target, jobs: Sequence[BenchPrompt], results: Results, options: BenchOptions
    ) -> None:
        self.target, self.jobs, self.results, self.options = target, jobs, results, options
        self.unasked = _why_not_lossless(target, options.sampling)
        self.best_plain = max(GENERATE, PLAIN, key=self._speed)

    def result(self, contestant: Candidate, halves: Statistics | None) -> Result:
        """halves: whose draft and verify times to report, default the timed runs' own."""
        statistics = Statistics()
        for step in (
            step for runs in self.results[contestant.name] for run in runs for step in run.steps
        ):
            statistics.add(step)
        halves = halves or statistics
        speed, speed_of_generate = self._speed(contestant.name), self._speed(GENERATE)
        sums = self._sums(contestant.name)
        divergence = self._divergence(contestant.name)
        return Result(
            name=contestant.name,
            nodes=contestant.nodes,
            lossless=None if self.unasked else divergence is None,
            lossless_reason=self.unasked,
            first_divergence=divergence,
            tokens_per_step=statistics.tokens_per_step,
            acceptance_by_depth=statistics.acceptance_by_depth,
            tokens_per_second=speed,
            baseline_tokens_per_second=speed_of_generate,
            plain_tokens_per_second=self._speed(PLAIN),
            speedup=speed / speed_of_generate,
            speedup_ci95=speedup_interval(sums, self._sums(GENERATE), self.options),
            speedup_over_best=speed / self._speed(self.best_plain),
            speedup_over_best_ci95=speedup_interval(
                sums, self._sums(self.best_plain), self.options
            ),
            draft_seconds=halves.draft_seconds / max(halves.steps, 1),
            verify_seconds=halves.verify_seconds / max(halves.steps, 1),
            steps=statistics.steps,
            tokens=sum(len(run.tokens) for runs in self.results[contestant.name] for run in runs),
        )

    def _sums(self, name: str) -> Tensor:
        """float64 (P, 2): tokens and seconds of each prompt, summed over repetitions."""
        sums = [
            [sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)]
            for runs in self.results[name]
        ]
        return torch.tensor(sums, dtype=torch.float64)

    def _speed(self, name: str) -> float:
        tokens, seconds = self._sums(name).sum(0).tolist()
        return float(tokens / seconds)

    def _divergence(self, name: str) -> Divergence | None:
        """Against generate's first run of each prompt; every repetition counts."""
        if not isinstance(self.options.sampling, Greedy):
            return None
        differing = []
        for job, runs, references in zip(
            self.jobs, self.results[name], self.results[GENERATE], strict=True
        ):
            expected = references[0].tokens
            got = next((run.tokens for run in runs if run.tokens != expected), None)
            if got is not None:
                differing.append((job, expected, got))
        if not differing:
            return None
        job, expected, got = differing[0]
        place = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
            min(len(expected), len(got)),
        )
        return Divergence(
            prompts=len(differing),
            prompt=job.number,
            token=place,
            expected=expected[place] if place < len(expected) else None,
            got=got[place] if place < len(got) else None,
            top2_margin=top2_margin(self.target, [*job.prompt, *expected[:place]]),
        )


def _why_not_lossless(target: Target, rule: Acceptance) -> str | None:
    if not rule.lossless:
        return "lossless: n/a, this acceptance rule is lossy: its output is not the target's own."
    if not isinstance(rule, Greedy):
        return "lossless: n/a when sampling: two random streams never write the same tokens."
    if target.dtype != torch.float32:
        kind = str(target.dtype).removeprefix("torch.")
        return (
            f"lossless: n/a in {kind}, where one token and a tree of tokens round differently and "
            "near-ties fall either way; compare in float32."
        )
    return None


def top2_margin(target: Target, tokens: Sequence[int]) -> float:
    """The target's best logit minus its second best after `tokens`."""
    cache = target.new_cache(1, len(tokens))
    best = target.prefill([tokens], cache, ()).logits_BNV[0, 0].float().topk(2).values
    return float(best[0] - best[1])


def speedup_interval(
    ours_P2: Tensor, baseline_P2: Tensor, options: BenchOptions
) -> tuple[float, float]:
    """The 95 % interval of the ratio of tokens per second, by a paired bootstrap over prompts.

    ours_P2, baseline_P2: float64 tokens and seconds of the same prompts. A resample draws P prompts
    with replacement, the same ones for both sides, and takes the ratio of the sums.
    """
    prompts = len(ours_P2)
    generator = torch.Generator().manual_seed(options.seed)
    drawn_RP = torch.randint(prompts, (options.resamples, prompts), generator=generator)
    ours_R2, baseline_R2 = ours_P2[drawn_RP].sum(1), baseline_P2[drawn_RP].sum(1)
    ratio_R = (ours_R2[:, 0] / ours_R2[:, 1]) / (baseline_R2[:, 0] / baseline_R2[:, 1])
    low, high = torch.quantile(ratio_R, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


# How much faster is a head? `generate`, this engine without a drafter, and heads, side by side.


Drafts = DraftHead | Callable[[], Drafter]
Entry = Drafts | tuple[Drafts, Tree]

__all__ = ["BenchOptions", "Entry", "bench"]


def bench(
    target: Target,
    heads: Mapping[str, Entry],
    prompts: Sequence[Sequence[int]],
    options: BenchOptions | None = None,
    *,
    console: Console | None = None,
) -> BenchReport:
    """Measure heads, and the engine without any, against transformers' own `generate`.

    heads: name -> head, or function that makes a fresh drafter per generation, or (either, tree).
    prompts: token ids. console: where the progress bar goes (default: stderr, when a terminal).
    A prompt whose new tokens exceed the context gets what is left of it; one that fills the context
    is skipped. Raises ValueError when that leaves no prompt, or when a name is taken.
    """
    options = options or BenchOptions()
    jobs = _jobs(target, prompts, options)
    contestants = [
        _baseline(target, jobs, options),
        _engine(PLAIN, 0, Speculator(target), options),
        *_heads(target, heads, options),
    ]
    accelerator = [target.device] if target.device.type == "cuda" else []
    with without_defaults(target), torch.random.fork_rng(devices=accelerator):
        results = race(contestants, jobs, options, console)
        halves = {c.name: profiled(c, jobs) for c in contestants[1:]} if accelerator else {}
    summary = Summary(target, jobs, results, options)
    plain, *others = (summary.result(c, halves.get(c.name)) for c in contestants[1:])
    settings = _settings(target, options, jobs, skipped=len(prompts) - len(jobs))
    return BenchReport(describe_machine(target), settings, plain, others)


def _jobs(
    target: Target, prompts: Sequence[Sequence[int]], options: BenchOptions
) -> list[BenchPrompt]:
    jobs = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: expected one token or more")
        room = target.context - len(prompt)
        if room > 0:
            jobs.append(BenchPrompt(number, prompt, min(options.max_new_tokens, room)))
    if not jobs:
        raise ValueError(
            f"expected a prompt shorter than the context of {target.name} ({target.context} "
            f"tokens), found none among {len(prompts)}; pass shorter prompts"
        )
    return jobs


def _baseline(target: Target, jobs: Sequence[BenchPrompt], options: BenchOptions) -> Candidate:
    generate = Baseline(target, options.sampling, {job.limit for job in jobs})
    return Candidate(
        GENERATE,
        None,
        lambda prompt, limit: [Step(generate(prompt, limit), -1, None, 0.0, 0.0)],
    )


def _engine(name: str, nodes: int | None, engine: Speculator, options: BenchOptions) -> Candidate:
    def generate(prompt: Sequence[int], limit: int) -> list[Step]:
        return list(engine.generate(prompt, sampling=options.sampling, max_new_tokens=limit))

    return Candidate(name, nodes, generate, engine)


def _heads(
    target: Target, heads: Mapping[str, Entry], options: BenchOptions
) -> Iterator[Candidate]:
    for name, entry in heads.items():
        if name in (GENERATE, PLAIN):
            raise ValueError(
                f"a head is called {name!r}, as a contestant of every bench; rename it"
            )
        drafts, tree = entry if isinstance(entry, tuple) else (entry, None)
        if isinstance(drafts, DraftHead) and tree is None:
            tree = drafts.tree
            if options.nodes:
                for nodes in sorted({min(nodes, tree.draft_nodes) for nodes in options.nodes}):
                    engine = Speculator(target, drafts, tree=tree.head(nodes))
                    yield _engine(f"{name}@{nodes}", nodes, engine, options)
                continue
        fixed = tree.draft_nodes if tree else None  # a function's drafter keeps its own tree
        yield _engine(name, fixed, Speculator(target, drafts, tree=tree), options)


def _settings(
    target: Target, options: BenchOptions, jobs: Sequence[BenchPrompt], *, skipped: int
) -> dict[str, object]:
    greedy = isinstance(options.sampling, Greedy)
    return {
        "target": target.name,
        "sampling": "greedy" if greedy else repr(options.sampling),
        "prompts": len(jobs),
        "prompts_shortened": sum(job.limit < options.max_new_tokens for job in jobs),
        "prompts_skipped": skipped,
        "max_new_tokens": options.max_new_tokens,
        "repetitions": options.repetitions,
        "nodes": list(options.nodes),
        "seed": options.seed,
        "resamples": options.resamples,
    }
