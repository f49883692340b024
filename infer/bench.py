"""How much faster is a head? Heads, this engine without a drafter, and transformers' `generate`.

All run in one process on the same prompts, in an order that rotates, so that a machine that slows
down slows all of them alike.

Legend: P prompts, R bootstrap resamples.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain, cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from draftheads.heads.base import Drafter, DraftHead
from draftheads.heads.files import write_text
from draftheads.heads.target import Target
from draftheads.heads.tree import Tree
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.engine import Baseline, Speculator, Statistics, Step, without_defaults

GENERATE, PLAIN = "generate", "plain"
"""Candidates of every bench: transformers' own, and this engine without a drafter."""
PROFILED_PROMPTS = 4

Drafts = DraftHead | Callable[[], Drafter]
Entry = Drafts | tuple[Drafts, Tree]


@dataclass(frozen=True)
class BenchOptions:
    """sampling: the acceptance rule, and how `generate` samples. repetitions: runs per prompt and
    candidate. nodes: draft nodes of the trees that every head is measured with, cut from its own
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
class Candidate:
    """generate: (prompt, limit) -> what is written, in steps. nodes: draft nodes of its tree, None
    where it has no fixed one. engine: None for transformers' own generate.
    """

    name: str
    nodes: int | None
    generate: Callable[[Sequence[int], int], Iterable[Step]]
    engine: Speculator | None = None


@dataclass(frozen=True)
class Run:
    """One timed generation."""

    steps: list[Step]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """What was written."""
        return [token for step in self.steps for token in step.tokens]


Runs = Mapping[str, list[list[Run]]]
"""Candidate's name -> for each prompt, its repetitions."""


@dataclass(frozen=True)
class Divergence:
    """Where an output first differs from `generate`'s, in the first prompt in which it does."""

    prompts: int  # how many differ
    prompt: int  # number of the first
    token: int  # place in its output
    expected: int | None  # token ids, None where one output has ended
    got: int | None
    top2_margin: float  # best logit minus second best there; near zero, rounding has decided


@dataclass(frozen=True)
class Result:
    """One candidate's measurements; seconds are means per step."""

    name: str
    nodes: int | None
    lossless: bool | None  # equal to generate's, every prompt; None where that cannot be asked
    lossless_reason: str | None
    first_divergence: Divergence | None
    tokens_per_step: float  # the target's bonus token included
    acceptance_by_depth: list[float]  # [d]: share of steps with d + 1 or more drafts accepted
    tokens_per_second: float
    baseline_tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float  # over generate
    speedup_ci95: tuple[float, float]
    speedup_over_best: float  # over the faster of generate and plain
    speedup_over_best_ci95: tuple[float, float]
    draft_seconds: float
    verify_seconds: float
    steps: int
    tokens: int  # the prefill's included


@dataclass(frozen=True)
class BenchReport:
    """plain: the engine without a drafter. heads: one Result per head and tree."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    plain: Result
    heads: list[Result]

    def result(self, name: str) -> Result:
        """The result called `name`. Raises ValueError when there is none."""
        results = {result.name: result for result in (self.plain, *self.heads)}
        if name not in results:
            raise ValueError(f"no result is called {name!r}; expected one of {', '.join(results)}")
        return results[name]


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
    fitting = _fitting(target, prompts, options.max_new_tokens)
    generate = Baseline(target, options.sampling, {each.limit for each in fitting})
    candidates = [
        Candidate(GENERATE, None, lambda *asked: [Step(generate(*asked), -1, None, 0.0, 0.0)]),
        engine_candidate(PLAIN, 0, Speculator(target), options.sampling),
        *_candidates(target, heads, options),
    ]
    accelerator = [target.device] if target.device.type == "cuda" else []
    with without_defaults(target), torch.random.fork_rng(devices=accelerator):
        runs = race(candidates, fitting, options, console)
        halves = {c.name: _profile(c, fitting) for c in candidates[1:]} if accelerator else {}
    summary = Summary(target, fitting, runs, options)
    plain, *others = (summary.result(c, halves.get(c.name)) for c in candidates[1:])
    settings = {
        **vars(options),
        "target": target.name,
        "sampling": "greedy" if isinstance(options.sampling, Greedy) else repr(options.sampling),
        "nodes": list(options.nodes),
        "prompts": len(fitting),
        "prompts_shortened": sum(each.limit < options.max_new_tokens for each in fitting),
        "prompts_skipped": len(prompts) - len(fitting),
    }
    return BenchReport(describe_machine(target), settings, plain, others)


def _fitting(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[BenchPrompt]:
    fitting = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: expected one token or more")
        room = target.context - len(prompt)
        if room > 0:
            fitting.append(BenchPrompt(number, prompt, min(max_new_tokens, room)))
    if not fitting:
        raise ValueError(
            f"expected a prompt shorter than the context of {target.name} ({target.context} "
            f"tokens), found none among {len(prompts)}; pass shorter prompts"
        )
    return fitting


def engine_candidate(
    name: str, nodes: int | None, engine: Speculator, rule: Acceptance
) -> Candidate:
    """An engine that samples as `rule` does."""
    return Candidate(
        name,
        nodes,
        lambda prompt, limit: engine.generate(prompt, sampling=rule, max_new_tokens=limit),
        engine,
    )


def _candidates(
    target: Target, heads: Mapping[str, Entry], options: BenchOptions
) -> Iterator[Candidate]:
    for name, entry in heads.items():
        if name in (GENERATE, PLAIN):
            raise ValueError(f"{name!r} is reserved for a baseline; rename this head")
        drafts, tree = entry if isinstance(entry, tuple) else (entry, None)
        if tree is None and isinstance(drafts, DraftHead):
            tree = drafts.tree
            for nodes in sorted({min(nodes, tree.draft_nodes) for nodes in options.nodes}):
                engine = Speculator(target, drafts, tree=tree.head(nodes))
                yield engine_candidate(f"{name}@{nodes}", nodes, engine, options.sampling)
            if options.nodes:
                continue
        fixed = tree.draft_nodes if tree else None  # a function's drafter keeps its own tree
        yield engine_candidate(name, fixed, Speculator(target, drafts, tree=tree), options.sampling)


def race(
    candidates: Sequence[Candidate],
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    console: Console | None = None,
) -> Runs:
    """Warm up, then time every candidate on every prompt; the order rotates by one each time.

    Seeds torch's global random stream. console: of the progress bar, default stderr.
    """
    console = console or Console(stderr=True)
    runs: dict[str, list[list[Run]]] = {each.name: [[] for _ in prompts] for each in candidates}
    for each in candidates:
        timed(each, prompts[0])
    for turn in track(
        range(options.repetitions * len(prompts)),
        "decoding",
        console=console,
        auto_refresh=False,  # no thread that draws while the clock runs
        transient=True,
        disable=not console.is_terminal,
    ):
        place, first = turn % len(prompts), turn % len(candidates)
        for each in (*candidates[first:], *candidates[:first]):
            torch.manual_seed(options.seed + turn)
            options.sampling.seed(options.seed + turn)
            runs[each.name][place].append(timed(each, prompts[place]))
    return runs


def timed(candidate: Candidate, prompt: BenchPrompt) -> Run:
    """One generation under the clock, without Python's garbage collector, as `timeit` has it."""
    collects = gc.isenabled()
    gc.disable()
    try:  # the process needs its collector after an error or Ctrl-C
        start = _clock()
        steps = list(candidate.generate(prompt.prompt, prompt.limit))
        return Run(steps, _clock() - start)
    finally:
        if collects:
            gc.enable()


def _clock() -> float:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return perf_counter()


def _profile(candidate: Candidate, prompts: Sequence[BenchPrompt]) -> Statistics:
    """Statistics of a few prompts with a wait around each half of a step: on an accelerator only
    this tells drafting from verifying, and it costs time, hence runs of their own.
    """
    assert candidate.engine is not None
    candidate.engine.profile = True
    runs = [candidate.generate(each.prompt, each.limit) for each in prompts[:PROFILED_PROMPTS]]
    total = Statistics.of(chain.from_iterable(runs))
    candidate.engine.profile = False
    return total


class Summary:
    """From the runs of a race to results: speed, its interval, losslessness."""

    def __init__(
        self, target: Target, prompts: Sequence[BenchPrompt], runs: Runs, options: BenchOptions
    ) -> None:
        self.target, self.prompts, self.runs, self.options = target, prompts, runs, options
        self.unasked = _why_not_lossless(target, options.sampling)
        self.best = max(GENERATE, PLAIN, key=self._speed)

    def result(self, candidate: Candidate, halves: Statistics | None = None) -> Result:
        """halves: whose draft and verify times to report, default the timed runs' own."""
        name = candidate.name
        steps = [step for run in chain.from_iterable(self.runs[name]) for step in run.steps]
        statistics = Statistics.of(steps)
        halves = halves or statistics
        divergence = self._divergence(name)
        return Result(
            name=name,
            nodes=candidate.nodes,
            lossless=None if self.unasked else divergence is None,
            lossless_reason=self.unasked,
            first_divergence=divergence,
            tokens_per_step=statistics.tokens_per_step,
            acceptance_by_depth=statistics.acceptance_by_depth,
            tokens_per_second=self._speed(name),
            baseline_tokens_per_second=self._speed(GENERATE),
            plain_tokens_per_second=self._speed(PLAIN),
            speedup=self._speed(name) / self._speed(GENERATE),
            speedup_ci95=self._interval(name, GENERATE),
            speedup_over_best=self._speed(name) / self._speed(self.best),
            speedup_over_best_ci95=self._interval(name, self.best),
            draft_seconds=halves.draft_seconds / max(halves.steps, 1),
            verify_seconds=halves.verify_seconds / max(halves.steps, 1),
            steps=statistics.steps,
            tokens=sum(len(step.tokens) for step in steps),
        )

    def _sums(self, name: str) -> Tensor:
        """float64 (P, 2): tokens and seconds of each prompt, summed over repetitions."""
        sums = [
            [sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)]
            for runs in self.runs[name]
        ]
        return torch.tensor(sums, dtype=torch.float64)

    def _speed(self, name: str) -> float:
        tokens, seconds = self._sums(name).sum(0).tolist()
        return float(tokens / seconds)

    def _interval(self, name: str, baseline: str) -> tuple[float, float]:
        return speedup_interval(self._sums(name), self._sums(baseline), self.options)

    def _divergence(self, name: str) -> Divergence | None:
        """Against generate's first run of each prompt; every repetition counts."""
        if not isinstance(self.options.sampling, Greedy):
            return None
        differing = []
        for place, prompt in enumerate(self.prompts):
            expected = self.runs[GENERATE][place][0].tokens
            outputs = [run.tokens for run in self.runs[name][place]]
            differing += [(prompt, expected, got) for got in outputs if got != expected][:1]
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
            top2_margin=top2_margin(self.target, [*prompt.prompt, *expected[:token]]),
        )


def _why_not_lossless(target: Target, rule: Acceptance) -> str | None:
    if not rule.lossless:
        return "lossless: n/a, this acceptance rule is lossy: its output is not the target's own."
    if not isinstance(rule, Greedy):
        return "lossless: n/a when sampling: two random streams never write the same tokens."
    if target.dtype != torch.float32:
        return (
            f"lossless: n/a in {str(target.dtype).removeprefix('torch.')}, where one token and a "
            "tree of tokens round differently and near-ties fall either way; compare in float32."
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


def describe_machine(target: Target) -> dict[str, Any]:
    """What a reader needs to judge the times."""
    device, cpuinfo = target.device, Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.is_file() else "")
    return {
        "cpu": named[1].strip() if named else platform.processor() or platform.machine(),
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


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads"
    return (
        f"{machine['gpu'] or cpu}, {machine['dtype']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {machine['date'][:10]}"
    )


def write_json(report: BenchReport, path: str | Path) -> None:
    """Write the report as JSON; a reader sees the old file or the whole new one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), json.dumps(asdict(report), indent=2, allow_nan=False) + "\n")


def measured_facts(report: BenchReport, name: str) -> dict[str, Any]:
    """What a head's config.json and model card say about the result called `name`."""
    result, settings = asdict(report.result(name)), report.settings
    shown = ["nodes", "lossless", "tokens_per_step", "acceptance_by_depth", "speedup"]
    shown += ["speedup_ci95", "speedup_over_best", "tokens_per_second"]
    shown += ["baseline_tokens_per_second", "plain_tokens_per_second"]
    return {
        **{key: result[key] for key in shown},
        "speedup_ci95": list(result["speedup_ci95"]),
        **{key: settings[key] for key in ("sampling", "prompts", "max_new_tokens")},
        "machine": machine_line(report.machine),
    }


COLUMNS: dict[str, Callable[[Result], str]] = {
    "τ": lambda result: f"{result.tokens_per_step:.2f}",
    "tok/s": lambda result: f"{result.tokens_per_second:.0f}",
    "speedup": lambda result: f"{result.speedup:.2f}",
    "95 %": lambda result: "{:.2f}-{:.2f}".format(*result.speedup_ci95),
    "vs best": lambda result: f"{result.speedup_over_best:.2f}",
    "draft": lambda result: f"{result.draft_seconds * 1e3:.2f}",
    "verify": lambda result: f"{result.verify_seconds * 1e3:.2f}",
    "lossless": lambda result: {True: "yes", False: "NO", None: "n/a"}[result.lossless],
}


def print_report(report: BenchReport, console: Console | None = None) -> None:
    """The table, `generate` first, and its footnotes."""
    console = console or Console()
    table = Table(
        title=f"{report.settings['target']}: {report.settings['sampling']}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("candidate", overflow="fold", min_width=10)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    generate = report.plain.baseline_tokens_per_second
    over_best = generate / max(generate, report.plain.tokens_per_second)
    table.add_row(GENERATE, "", f"{generate:.0f}", "1.00", "", f"{over_best:.2f}")
    for result in (report.plain, *report.heads):
        is_wrong = result.lossless is False
        cells = [show(result) for show in COLUMNS.values()]
        table.add_row(result.name, *cells, style="bold red" if is_wrong else None)
    console.print(table)
    for note in footnotes(report):
        console.print(note, style="dim", markup=False, highlight=False)


def footnotes(report: BenchReport) -> list[str]:
    """What the table's numbers mean, in plain words."""
    settings, plain = report.settings, report.plain
    notes = [
        "generate: transformers' own. plain: this engine without a drafter. name@N: N draft nodes.",
        "τ: tokens per forward of the target, its own bonus token counted. draft, verify: "
        "milliseconds per step.",
        f"speedup: tokens per second over generate's, prompt included; 95 % bootstrap interval "
        f"over {settings['prompts']} prompts, runs interleaved in one process. vs best: over the "
        "faster of generate and plain.",
        plain.lossless_reason
        or "lossless: the output equals generate's, token for token, for every prompt.",
    ]
    for result in (plain, *report.heads):
        found = result.first_divergence
        if found:
            notes.append(
                f"{result.name}: differs from generate in {found.prompts} prompts, first in prompt "
                f"{found.prompt} at token {found.token}, where the target's two best logits are "
                f"{found.top2_margin:.2g} apart."
            )
    if settings["prompts_shortened"]:
        notes.append(
            f"{settings['prompts_shortened']} prompts had no room for "
            f"{settings['max_new_tokens']} new tokens and got what the context leaves."
        )
    if settings["prompts_skipped"]:
        notes.append(f"{settings['prompts_skipped']} prompts fill the context and were skipped.")
    return [*notes, f"machine: {machine_line(report.machine)}."]


COLOURS = ("#2f6fb0", "#d9822b", "#3a9a5b", "#a23b72", "#7a5fb5", "#6b6b2f")
GREY, MUTED = "#8a8f98", "#444444"


def plot(report: BenchReport, path: str | Path) -> None:
    """Write a PNG (or what the suffix of `path` says). Raises ImportError without matplotlib."""
    families: dict[str, list[Result]] = {}  # a head's name -> its trees
    for head in report.heads:
        families.setdefault(head.name.removesuffix(f"@{head.nodes}"), []).append(head)
    figure = new_figure(11, 2.6 + 0.38 * (1 + len(report.heads)))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bar(left, report.plain, GREY)
    for colour, (name, results) in zip(cycle(COLOURS), families.items(), strict=False):
        for result in results:
            _bar(left, result, colour)
        sized = [result for result in results if result.nodes is not None]
        taus = [result.tokens_per_step for result in sized]
        right.plot([r.nodes for r in sized], taus, marker="o", label=name, color=colour)
    left.axvline(1.0, color=MUTED, linewidth=1, linestyle="--", zorder=0)
    left.invert_yaxis()
    left.margins(x=0.18)
    left.set_xlim(left=0.0)
    left.set_xlabel("speedup over transformers' generate (= 1), 95 % interval over prompts")
    right.axhline(1.0, color=MUTED, linewidth=1, linestyle="--", zorder=0)
    right.set(xlabel="draft nodes verified per step", xlim=(0.0, None), ylim=(0.0, None))
    right.set_ylabel("tokens per step (bonus token counted)")
    if families:
        right.legend(frameon=False, fontsize=9)
    tidy(left)
    tidy(right)
    settings = report.settings
    figure.suptitle(
        f"{settings['target']}: {settings['sampling']}, {settings['prompts']} prompts, "
        f"{settings['max_new_tokens']} new tokens",
        fontsize=11,
    )
    figure.supxlabel(machine_line(report.machine), fontsize=7.5, color=MUTED)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _bar(axes: Any, result: Result, colour: str) -> None:
    low, high = result.speedup_ci95
    # a bootstrap of few prompts may leave the point estimate outside by a hair
    error = [[max(0.0, result.speedup - low)], [max(0.0, high - result.speedup)]]
    bar = axes.barh(result.name, result.speedup, xerr=error, color=colour, capsize=3, height=0.62)
    axes.bar_label(bar, fmt="%.2f×", padding=6, fontsize=9)


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure, in inches. Raises ImportError without matplotlib."""
    try:  # an extra: people who only decode do not need it
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib; pip install matplotlib, or leave out the plot"
        ) from error
    # a Figure of its own, with its own canvas: no pyplot, no global backend is touched
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Any) -> None:
    """Small letters, and no frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
