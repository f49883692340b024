"""Benchmark of heads against this engine without a drafter and transformers' own `generate`.

All candidates run in one process on the same prompts, in rotating order, so that a machine that
slows down slows all of them alike.

Legend: P prompts, R bootstrap resamples.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain, cycle, product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from draftheads.heads.base import Drafter
from draftheads.heads.files import write_text
from draftheads.heads.target import Target
from draftheads.heads.tree import Tree
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.engine import (
    Baseline,
    DrafterSource,
    Speculator,
    Statistics,
    Step,
    without_defaults,
)

GENERATE, PLAIN = "generate", "plain"
"""Candidates of every bench: transformers' own, and this engine without a drafter."""
COMPILED = "{} compiled"
"""Name of a candidate whose steps are compiled."""
BASELINES = (GENERATE, PLAIN, COMPILED.format(GENERATE), COMPILED.format(PLAIN))
PROFILED_PROMPTS = 4

Drafts = DrafterSource | Callable[[], Drafter]
Entry = Drafts | tuple[Drafts, Tree] | Baseline


@dataclass(frozen=True)
class BenchOptions:
    """Settings of a bench; each number is at least 1."""

    max_new_tokens: int = 128
    sampling: Acceptance = field(default_factory=Greedy)
    repetitions: int = 1  # runs per prompt and candidate
    nodes: Sequence[int] = ()  # draft nodes to cut each head's own tree to; empty: the whole tree
    seed: int = 0  # of sampling and of the bootstrap
    resamples: int = 5000  # of the bootstrap
    compile: bool = False  # every candidate once more, compiled


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt, its number in the caller's list, and the new tokens that fit after it."""

    number: int
    prompt: Sequence[int]
    limit: int


@dataclass(frozen=True)
class Candidate:
    """An engine to time. nodes: draft nodes of its tree, None if that is not fixed."""

    name: str
    nodes: int | None
    engine: Speculator | Baseline
    rule: Acceptance

    def generate(self, prompt: Sequence[int], limit: int) -> Iterator[Step]:
        """Continue a prompt by at most `limit` tokens."""
        return self.engine.generate(prompt, sampling=self.rule, max_new_tokens=limit)


@dataclass(frozen=True)
class Run:
    """One timed generation."""

    steps: list[Step]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [token for step in self.steps for token in step.tokens]


Runs = Mapping[str, list[list[Run]]]
"""Name of a candidate -> for each prompt, its repetitions."""


@dataclass(frozen=True)
class Divergence:
    """The first difference from `generate`'s output, in the first prompt that differs."""

    prompts: int  # number of prompts that differ
    prompt: int  # number of the first
    token: int  # index in its output
    expected: int | None  # token ids, None where one output has ended
    got: int | None
    top2_margin: float  # best logit minus second best; near zero, rounding decides


LONGEST = 64
"""Draft lengths among which the best one is sought."""


@dataclass(frozen=True)
class Analysis:
    """What the model of speculative decoding with a chain (Leviathan et al., arXiv 2211.17192,
    section 3) says of a candidate.
    """

    alpha: float  # share of the draft tokens after accepted ones that are accepted, any of a level
    gamma: int  # levels drafted per step
    c: float  # time to draft one level, over that of a plain step
    predicted: float  # speed over plain decoding, if a verification takes as long as a plain step
    measured: float  # the same, as timed
    best_gamma: int  # with the highest predicted speed, at the same alpha and c

    @classmethod
    def of(
        cls, acceptance: Sequence[float], gamma: int, c: float, measured: float
    ) -> Analysis | None:
        """From the share of steps with 1, 2, ... accepted drafts; None if nothing is drafted."""
        if not gamma:
            return None
        alpha = sum(acceptance) / sum([1.0, *acceptance][:gamma])
        best = max(range(LONGEST + 1), key=lambda length: walltime_factor(alpha, length, c))
        return cls(alpha, gamma, c, walltime_factor(alpha, gamma, c), measured, best)


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """(1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)), as a sum; theorem 3.8 there."""
    return sum(alpha**accepted for accepted in range(gamma + 1)) / (gamma * c + 1.0)


@dataclass(frozen=True)
class Result:
    """Measurements of one candidate; seconds are means per step."""

    name: str
    nodes: int | None
    lossless: bool | None  # every output equals generate's; None if they are not comparable
    lossless_reason: str | None
    first_divergence: Divergence | None
    tokens_per_step: float  # includes the target's bonus token
    acceptance_by_depth: list[float]  # [d]: share of steps with d + 1 or more drafts accepted
    tokens_per_second: float
    baseline_tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float  # over generate
    speedup_ci95: list[float]
    speedup_over_best: float  # over the fastest baseline
    speedup_over_best_ci95: list[float]
    draft_seconds: float
    verify_seconds: float
    steps: int
    tokens: int  # includes the prefill's
    analysis: Analysis | None  # None without drafts


@dataclass(frozen=True)
class BenchReport:
    """plain: the engine without a drafter. heads: one Result per head and tree."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    plain: Result
    heads: list[Result]

    def result(self, name: str) -> Result:
        """The result with this name."""
        return {result.name: result for result in (self.plain, *self.heads)}[name]


def bench(
    target: Target,
    heads: Mapping[str, Entry],
    prompts: Sequence[Sequence[int]],
    options: BenchOptions | None = None,
    *,
    console: Console | None = None,
) -> BenchReport:
    """Measure heads, and the engine without a drafter, against transformers' own `generate`.

    heads: name -> head or other source of drafters, or function that returns a new drafter per
    generation, or (either, tree), or a baseline. prompts: token ids. console: for the progress bar
    (default: stderr). A prompt with less room than max_new_tokens in the context gets what is left;
    one that fills the context is skipped.
    Raises ValueError if no prompt fits or a head has the name of a baseline.
    """
    options = options or BenchOptions()
    fitting = fitting_prompts(target, prompts, options.max_new_tokens)
    rule = options.sampling
    candidates = [Candidate(GENERATE, None, Baseline(target), rule)]
    candidates.append(Candidate(PLAIN, 0, Speculator(target), rule))
    if options.compile:
        engines: list[Speculator | Baseline] = [Baseline(target, compile=True)]
        engines.append(Speculator(target, compile=True))
        for each, engine in zip(candidates[:], engines, strict=True):
            candidates.append(Candidate(COMPILED.format(each.name), each.nodes, engine, rule))
    candidates += _candidates(target, heads, options)
    accelerator = [target.device] if target.device.type == "cuda" else []
    with without_defaults(target), torch.random.fork_rng(devices=accelerator):
        runs = race(candidates, fitting, options, console)
        profiles = {
            c.name: _profile(c, fitting)
            for c in candidates
            if accelerator and isinstance(c.engine, Speculator)
        }
    plain, *others = (
        summarize(each, target, fitting, runs, options, profiles.get(each.name))
        for each in candidates[1:]
    )
    settings = {
        **vars(options),
        "target": target.name,
        "sampling": "greedy" if isinstance(rule, Greedy) else repr(rule),
        "nodes": list(options.nodes),
        "prompts": len(fitting),
        "prompts_shortened": sum(each.limit < options.max_new_tokens for each in fitting),
        "prompts_skipped": len(prompts) - len(fitting),
    }
    return BenchReport(describe_machine(target), settings, plain, others)


def fitting_prompts(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[BenchPrompt]:
    """The prompts that leave room in the context. Raises ValueError if there are none."""
    rooms = [min(max_new_tokens, target.context - len(prompt)) for prompt in prompts]
    numbered = enumerate(zip(prompts, rooms, strict=True))
    fitting = [BenchPrompt(number, prompt, room) for number, (prompt, room) in numbered if room > 0]
    if not fitting:
        raise ValueError(
            f"expected a prompt shorter than the context of {target.name} ({target.context} "
            f"tokens), found none among {len(prompts)}; pass shorter prompts"
        )
    return fitting


def _candidates(
    target: Target, heads: Mapping[str, Entry], options: BenchOptions
) -> Iterator[Candidate]:
    for name, entry in heads.items():
        if name in BASELINES:
            raise ValueError(f"{name!r} is reserved for a baseline; rename this head")
        if isinstance(entry, Baseline):
            yield Candidate(name, None, entry, options.sampling)
            continue
        drafts, tree = entry if isinstance(entry, tuple) else (entry, None)
        trees = {name: tree}
        if tree is None and isinstance(drafts, DrafterSource):
            sizes = sorted({min(nodes, drafts.tree.draft_nodes) for nodes in options.nodes})
            cut: dict[str, Tree | None] = {f"{name}@{n}": drafts.tree.head(n) for n in sizes}
            trees = cut or {name: drafts.tree}
        for label, shape in trees.items():
            nodes = shape.draft_nodes if shape else None  # a drafter with a tree of its own
            for compile in (False, True)[: 1 + options.compile]:
                engine = Speculator(target, drafts, tree=shape, compile=compile)
                shown = COMPILED.format(label) if compile else label
                yield Candidate(shown, nodes, engine, options.sampling)


def race(
    candidates: Sequence[Candidate],
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    console: Console | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Runs:
    """Warm up, then time every candidate on every prompt; the order rotates by one each time.

    Seeds torch's global random stream. console: for the progress bar (default: stderr). clock: of
    `Run.seconds`.
    """
    console = console or Console(stderr=True)
    runs: dict[str, list[list[Run]]] = {each.name: [[] for _ in prompts] for each in candidates}
    sizes = [len(each.prompt) + each.limit for each in prompts]
    # compiled code may know one length only, and transformers compiles again for a longer cache
    first, second = sizes.index(max(sizes)), sizes.index(min(sizes))
    for each, place in product(candidates, (first, second)):
        timed(each, prompts[place])
    for turn in track(
        range(options.repetitions * len(prompts)),
        "decoding",
        console=console,
        auto_refresh=False,  # no thread that draws during the measurement
        transient=True,
        disable=not console.is_terminal,
    ):
        place, first = turn % len(prompts), turn % len(candidates)
        for each in (*candidates[first:], *candidates[:first]):
            torch.manual_seed(options.seed + turn)
            options.sampling.seed(options.seed + turn)
            runs[each.name][place].append(timed(each, prompts[place], clock))
    return runs


def timed(
    candidate: Candidate, prompt: BenchPrompt, clock: Callable[[], float] = perf_counter
) -> Run:
    """Time one generation, with Python's garbage collector off, as in `timeit`.

    Token ids end up on the CPU in every step, so no device work is left when the clock is read.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:  # the process needs its collector after an error or Ctrl-C
        start = clock()
        steps = list(candidate.generate(prompt.prompt, prompt.limit))
        return Run(steps, clock() - start)
    finally:
        if was_enabled:
            gc.enable()


def _profile(candidate: Candidate, prompts: Sequence[BenchPrompt]) -> Statistics:
    """Draft and verify times on an accelerator, in separate runs: they cost synchronization."""
    if isinstance(candidate.engine, Baseline):
        return Statistics()
    candidate.engine.profile = True
    runs = [candidate.generate(each.prompt, each.limit) for each in prompts[:PROFILED_PROMPTS]]
    total = Statistics.of(chain.from_iterable(runs))
    candidate.engine.profile = False
    return total


def summarize(
    candidate: Candidate,
    target: Target,
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    options: BenchOptions,
    profile: Statistics | None = None,
) -> Result:
    """Compare one candidate with the baselines. profile: source of the draft and verify times
    (default: the timed runs).
    """
    name = candidate.name
    baselines = [each for each in BASELINES if each in runs]
    sums_P2 = {each: _sums(runs[each]) for each in (*baselines, name)}
    speeds = {each: float(sums[:, 0].sum() / sums[:, 1].sum()) for each, sums in sums_P2.items()}
    best = max(baselines, key=speeds.__getitem__)
    steps = [step for run in chain.from_iterable(runs[name]) for step in run.steps]
    statistics = Statistics.of(steps)
    profile = profile or statistics
    draft_seconds = profile.draft_seconds / max(profile.steps, 1)
    engine, gamma = candidate.engine, 0
    if (
        isinstance(engine, Speculator) and not engine.compile
    ):  # which would not tell what drafts take
        gamma = max(engine.tree.depth, len(statistics.accepted))
    plain = Statistics.of(step for run in chain.from_iterable(runs[PLAIN]) for step in run.steps)
    plain_seconds = (plain.draft_seconds + plain.verify_seconds) / max(plain.steps, 1)
    cost = draft_seconds / max(gamma, 1) / (plain_seconds or 1.0)
    reason = _why_not_comparable(target, options.sampling)
    divergence = None
    if isinstance(options.sampling, Greedy):
        divergence = _divergence(target, prompts, runs, name)
    return Result(
        name=name,
        nodes=candidate.nodes,
        lossless=None if reason else divergence is None,
        lossless_reason=reason,
        first_divergence=divergence,
        tokens_per_step=statistics.tokens_per_step,
        acceptance_by_depth=statistics.acceptance_by_depth,
        tokens_per_second=speeds[name],
        baseline_tokens_per_second=speeds[GENERATE],
        plain_tokens_per_second=speeds[PLAIN],
        speedup=speeds[name] / speeds[GENERATE],
        speedup_ci95=speedup_interval(sums_P2[name], sums_P2[GENERATE], options),
        speedup_over_best=speeds[name] / speeds[best],
        speedup_over_best_ci95=speedup_interval(sums_P2[name], sums_P2[best], options),
        draft_seconds=draft_seconds,
        verify_seconds=profile.verify_seconds / max(profile.steps, 1),
        steps=statistics.steps,
        tokens=sum(len(step.tokens) for step in steps),
        analysis=Analysis.of(
            statistics.acceptance_by_depth, gamma, cost, speeds[name] / speeds[PLAIN]
        ),
    )


def _sums(runs: list[list[Run]]) -> Tensor:
    """float64 (P, 2): tokens and seconds of each prompt, summed over repetitions."""
    tokens = [sum(len(run.tokens) for run in repeated) for repeated in runs]
    seconds = [sum(run.seconds for run in repeated) for repeated in runs]
    return torch.tensor([tokens, seconds], dtype=torch.float64).T


def _divergence(
    target: Target, prompts: Sequence[BenchPrompt], runs: Runs, name: str
) -> Divergence | None:
    """Compare every repetition with generate's first run of the prompt."""
    differing = []
    for prompt, references, repeated in zip(prompts, runs[GENERATE], runs[name], strict=True):
        expected = references[0].tokens
        outputs = [run.tokens for run in repeated if run.tokens != expected]
        if outputs:
            differing.append((prompt, expected, outputs[0]))
    if not differing:
        return None
    prompt, expected, got = differing[0]
    pairs = enumerate(zip(expected, got, strict=False))
    token = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))
    return Divergence(
        prompts=len(differing),
        prompt=prompt.number,
        token=token,
        expected=expected[token] if token < len(expected) else None,
        got=got[token] if token < len(got) else None,
        top2_margin=top2_margin(target, [*prompt.prompt, *expected[:token]]),
    )


def _why_not_comparable(target: Target, rule: Acceptance) -> str | None:
    if not rule.lossless:
        return "lossless: n/a, this acceptance rule is lossy."
    if not isinstance(rule, Greedy):
        return "lossless: n/a when sampling, two random streams do not draw the same tokens."
    if target.dtype != torch.float32:
        return (
            f"lossless: n/a in {str(target.dtype).removeprefix('torch.')}, where a tree of tokens "
            "rounds differently from a single token and near-ties change; compare in float32."
        )
    return None


def top2_margin(target: Target, tokens: Sequence[int]) -> float:
    """The target's best logit minus its second best after `tokens`."""
    cache = target.new_cache(1, len(tokens))
    best = target.prefill([tokens], cache, ()).logits_BNV[0, 0].float().topk(2).values
    return float(best[0] - best[1])


def speedup_interval(ours_P2: Tensor, baseline_P2: Tensor, options: BenchOptions) -> list[float]:
    """95 % interval [low, high] of the ratio of tokens per second: a paired bootstrap over prompts.

    ours_P2, baseline_P2: float64 tokens and seconds of the same prompts. Each resample draws P
    prompts with replacement, the same for both sides, and takes the ratio of the sums.
    """
    prompts = len(ours_P2)
    generator = torch.Generator().manual_seed(options.seed)
    drawn_RP = torch.randint(prompts, (options.resamples, prompts), generator=generator)
    ours_R2, baseline_R2 = ours_P2[drawn_RP].sum(1), baseline_P2[drawn_RP].sum(1)
    ratio_R = (ours_R2[:, 0] / ours_R2[:, 1]) / (baseline_R2[:, 0] / baseline_R2[:, 1])
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    interval: list[float] = torch.quantile(ratio_R, bounds).tolist()
    return interval


def describe_machine(target: Target) -> dict[str, Any]:
    """Hardware and versions that affect the times."""
    device, cpuinfo = target.device, Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.is_file() else "")
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    return {
        "cpu": named[1].strip() if named else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "draftheads": version("draftheads"),
        "dtype": str(target.dtype).removeprefix("torch."),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """The output of `describe_machine` in one line."""
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads"
    return (
        f"{machine['gpu'] or cpu}, {machine['dtype']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {machine['date'][:10]}"
    )


def write_json(report: BenchReport, path: str | Path) -> None:
    """Write the report as JSON, atomically."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), json.dumps(asdict(report), indent=2, allow_nan=False) + "\n")


FACTS = ["nodes", "lossless", "tokens_per_step", "acceptance_by_depth", "speedup", "speedup_ci95"]
FACTS += ["speedup_over_best", "tokens_per_second", "baseline_tokens_per_second"]
FACTS += ["plain_tokens_per_second"]


def measured_facts(report: BenchReport, name: str) -> dict[str, Any]:
    """The entries of a head's config.json and model card for the result with this name."""
    result = vars(report.result(name))
    return {
        **{key: result[key] for key in FACTS},
        **{key: report.settings[key] for key in ("sampling", "prompts", "max_new_tokens")},
        "machine": machine_line(report.machine),
    }


COLUMNS: dict[str, Callable[[Result], str]] = {
    "τ": lambda result: f"{result.tokens_per_step:.2f}" if result.steps else "",
    "tok/s": lambda result: f"{result.tokens_per_second:.0f}",
    "speedup": lambda result: f"{result.speedup:.2f}",
    "95 %": lambda result: "{:.2f}-{:.2f}".format(*result.speedup_ci95),
    "vs best": lambda result: f"{result.speedup_over_best:.2f}",
    "draft": lambda result: f"{result.draft_seconds * 1e3:.2f}" if result.steps else "",
    "verify": lambda result: f"{result.verify_seconds * 1e3:.2f}" if result.steps else "",
    "lossless": lambda result: {True: "yes", False: "NO", None: "n/a"}[result.lossless],
}


def print_report(report: BenchReport, console: Console | None = None) -> None:
    """Print the table, `generate` first, and its footnotes."""
    console = console or Console()
    title = f"{report.settings['target']}: {report.settings['sampling']}"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("candidate", overflow="fold", min_width=10)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    generate = report.plain.baseline_tokens_per_second
    rows = (report.plain, *report.heads)
    others = [result.tokens_per_second for result in rows if result.name in BASELINES]
    over_best = generate / max(generate, *others)
    table.add_row(GENERATE, "", f"{generate:.0f}", "1.00", "", f"{over_best:.2f}")
    for result in rows:
        style = "bold red" if result.lossless is False else None
        table.add_row(result.name, *[show(result) for show in COLUMNS.values()], style=style)
    console.print(table)
    analysed = [(result.name, result.analysis) for result in report.heads if result.analysis]
    if analysed:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("chain model", overflow="fold", min_width=10)
        for name in ("α", "γ", "c", "predicted", "measured", "best γ"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, model in analysed:
            shares = f"{model.alpha:.2f}", str(model.gamma), f"{model.c:.2f}"
            factors = f"{model.predicted:.2f}", f"{model.measured:.2f}", str(model.best_gamma)
            table.add_row(name, *shares, *factors)
        console.print(table)
    console.print("\n".join(footnotes(report)), style="dim", markup=False, highlight=False)


def footnotes(report: BenchReport) -> list[str]:
    """Explanations of the table's numbers."""
    settings, plain = report.settings, report.plain
    notes = [
        "generate: transformers' own. plain: this engine without a drafter. name@N: N draft nodes.",
        "τ: tokens per target forward, bonus token counted. draft, verify: milliseconds per step.",
        "speedup: tokens per second over generate's, prompt included; 95 % bootstrap interval over "
        f"{settings['prompts']} prompts, runs interleaved in one process. vs best: over the "
        "fastest of generate and plain, compiled or not.",
        "α: acceptance per draft level. γ: levels. c: time per level over a plain step. predicted, "
        "measured: times plain's speed, see docs/tuning.md.",
        plain.lossless_reason or "lossless: all output equals generate's, token for token.",
    ]
    for result in (plain, *report.heads):
        if found := result.first_divergence:
            notes.append(
                f"{result.name}: differs from generate in {found.prompts} prompts, first in prompt "
                f"{found.prompt} at token {found.token}, where the target's top two logits are "
                f"{found.top2_margin:.2g} apart."
            )
    if settings["prompts_shortened"] or settings["prompts_skipped"]:
        notes.append(
            f"{settings['prompts_shortened']} prompts got fewer new tokens, for lack of context; "
            f"{settings['prompts_skipped']} prompts fill the context and were skipped."
        )
    if settings["compile"]:
        notes.append(
            "compiled: by torch.compile, before the measurement (generate: with a static cache); a "
            "step is one function, whose time is under verify."
        )
    return [*notes, f"machine: {machine_line(report.machine)}."]


COLOURS = ("#8a8f98", "#2f6fb0", "#d9822b", "#3a9a5b", "#a23b72", "#7a5fb5", "#6b6b2f")
MUTED = "#444444"


def plot(report: BenchReport, path: str | Path) -> None:
    """Write a PNG, or the format of the suffix. Raises ImportError without matplotlib."""
    families = {PLAIN: [report.plain]}  # name of a head -> one result per tree
    for head in report.heads:
        families.setdefault(head.name.removesuffix(f"@{head.nodes}"), []).append(head)
    figure = new_figure(11, 2.6 + 0.38 * (1 + len(report.heads)))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for colour, (name, results) in zip(cycle(COLOURS), families.items(), strict=False):
        names = [result.name for result in results]
        bars = left.barh(names, [result.speedup for result in results], color=colour)
        left.bar_label(bars, fmt="%.2f×", label_type="center", color="white")
        left.hlines(names, *zip(*[r.speedup_ci95 for r in results], strict=True), color=MUTED)
        sized = [result for result in results if result.nodes is not None]
        taus = [result.tokens_per_step for result in sized]
        right.plot([r.nodes for r in sized], taus, marker="o", label=name, color=colour)
    left.axvline(1.0, color=MUTED, linestyle="--")
    left.invert_yaxis()
    left.set_xlabel("speedup over transformers' generate, 95 % interval over prompts")
    right.set(xlabel="draft nodes", ylabel="tokens per step, bonus token counted", ylim=(0.0, None))
    right.legend(frameon=False)
    tidy(left)
    tidy(right)
    settings = report.settings
    figure.suptitle(
        f"{settings['target']}: {settings['sampling']}, {settings['prompts']} prompts, "
        f"{settings['max_new_tokens']} new tokens"
    )
    figure.supxlabel(machine_line(report.machine), fontsize=7.5, color=MUTED)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure, in inches. Raises ImportError without matplotlib."""
    try:  # an optional dependency
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib; pip install matplotlib, or leave out the plot"
        ) from error
    # no pyplot: it would choose a global backend
    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def tidy(axes: Any) -> None:
    """Remove the frame at the top and right."""
    axes.spines[["top", "right"]].set_visible(False)
