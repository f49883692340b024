"""Benchmark of heads against this engine without a drafter and transformers' own `generate`.

All candidates run in one process on the same prompts, in rotating order, so that a machine that
slows down slows all of them alike. `infer/measure/report.py` shows what was measured.

Legend: P units of the bootstrap (prompts, or batches of them), R bootstrap resamples.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from draftheads.heads.base import Drafter
from draftheads.heads.target import Target
from draftheads.heads.tensors import dtype_name
from draftheads.heads.tree import StaticTree, TokenTree, Tree
from draftheads.infer.accept import Acceptance, Accepted, Greedy
from draftheads.infer.engine import DrafterSource, Speculator, Statistics
from draftheads.infer.measure.baseline import Baseline, without_defaults
from draftheads.infer.race import (
    GENERATE,
    PLAIN,
    BenchOptions,
    BenchPrompt,
    Candidate,
    Run,
    Runs,
    batched,
    describe_machine,
    fitting_prompts,
    race,
    speedup_interval,
    timed,
    top2_margin,
)

ALONE = "generate alone"
"""Reference of the outputs of batches, not timed: padding must not change an output."""
COMPILED = "{} compiled"
"""Name of a candidate whose steps are compiled."""
BASELINES = (GENERATE, PLAIN, COMPILED.format(GENERATE), COMPILED.format(PLAIN))
SAMPLED_PROMPTS = 8  # of the runs that are not timed

Drafts = DrafterSource | Callable[[], Drafter]
Entry = Drafts | tuple[Drafts, Tree] | Baseline


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
class CategoryResult:
    """Measurements of one candidate on the prompts of one category."""

    prompts: int
    tokens_per_step: float
    speedup: float  # over generate
    speedup_ci95: list[float]


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
    cpu_speedup: float  # over generate, by CPU seconds of all threads of the process
    cpu_speedup_ci95: list[float]
    speedup_over_best: float  # over the fastest baseline
    speedup_over_best_ci95: list[float]
    draft_seconds: float
    verify_seconds: float
    steps: int
    tokens: int  # includes the prefill's
    analysis: Analysis | None  # None without drafts
    categories: dict[str, CategoryResult]  # empty unless there are several
    tree: list[list[int]] | None = None  # paths of a fixed tree
    acceptance_by_node: list[float] | None = None  # share of a few prompts' steps that accepted it


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
    categories: Sequence[str | None] = (),
    console: Console | None = None,
) -> BenchReport:
    """Measure heads, and the engine without a drafter, against transformers' own `generate`.

    heads: name -> head or other source of drafters, or function that returns a new drafter per
    generation, or (either, tree), or a baseline. prompts: token ids. categories: of the prompts;
    batches have prompts of one category. console: for the progress bar (default: stderr). A prompt
    with less room than max_new_tokens in the context gets what is left; one that fills the context
    is skipped. Raises ValueError if no prompt fits or a head has the name of a baseline.
    """
    options = options or BenchOptions()
    fitting = fitting_prompts(target, prompts, options.max_new_tokens)
    fitting = _arranged(fitting, categories, options.batch)
    candidates = [*_baselines(target, options), *_candidates(target, heads, options)]
    sample = fitting[:: -(-len(fitting) // SAMPLED_PROMPTS)]
    accelerator = [target.device] if target.device.type == "cuda" else []
    with without_defaults(target), torch.random.fork_rng(devices=accelerator):
        runs = race(candidates, fitting, options, console)
        if options.batch > 1:
            runs = {**runs, ALONE: [timed(candidates[0], [each]) for each in fitting]}
        results = []
        for each in candidates[1:]:
            statistics, facts = _replayed(each, sample)
            result = summarize(each, target, fitting, runs, options, statistics)
            results.append(replace(result, **facts))
    settings = {
        **vars(options),
        "target": target.name,
        "sampling": "greedy" if isinstance(options.sampling, Greedy) else repr(options.sampling),
        "nodes": list(options.nodes),
        "prompts": len(fitting),
        "prompts_shortened": sum(each.limit < options.max_new_tokens for each in fitting),
        "prompts_skipped": len(prompts) - len(fitting),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    return BenchReport(describe_machine(target), settings, results[0], results[1:])


def _arranged(
    prompts: Sequence[BenchPrompt], categories: Sequence[str | None], batch: int
) -> list[BenchPrompt]:
    """The prompts by category; those of a batch have the same limit."""
    named = [replace(p, category=categories[p.number] or "other") for p in prompts if categories]
    arranged = sorted(named or prompts, key=lambda each: each.category or "")
    for unit in batched(arranged, batch):
        limit = min(arranged[place].limit for place in unit)
        for place in unit:
            arranged[place] = replace(arranged[place], limit=limit)
    return arranged


def _baselines(target: Target, options: BenchOptions) -> Iterator[Candidate]:
    for compile in (False, True)[: 1 + options.compile]:
        shown = COMPILED if compile else "{}"
        generate, plain = Baseline(target, compile=compile), Speculator(target, compile=compile)
        yield Candidate(shown.format(GENERATE), None, generate, options.sampling)
        yield Candidate(shown.format(PLAIN), 0, plain, options.sampling)


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
            sizes = sorted({min(nodes, drafts.tree.largest) for nodes in options.nodes})
            cut: dict[str, Tree | None] = {f"{name}@{n}": drafts.tree.resized(n) for n in sizes}
            trees = cut or {name: drafts.tree}
        for label, shape in trees.items():
            nodes = shape.draft_nodes if shape else None  # a drafter with a tree of its own
            for compile in (False, True)[: 1 + options.compile]:
                engine = Speculator(target, drafts, tree=shape, compile=compile)
                shown = COMPILED.format(label) if compile else label
                yield Candidate(shown, nodes, engine, options.sampling)


@dataclass(frozen=True)
class Recorder(Acceptance):
    """Another rule, and a record of the trees it saw and where the accepted paths end."""

    rule: Acceptance = field(default_factory=Greedy)
    ends: list[Tensor] = field(default_factory=list)  # last_B of each step
    parents: list[Tensor] = field(default_factory=list)  # parents_BN of each step

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        accepted = self.rule(logits_BNV, tree)
        self.ends.append(accepted.last_B)
        self.parents.append(tree.topology.parents_BN)
        return accepted

    def choose(self, logits: Tensor) -> Tensor:
        return self.rule.choose(logits)

    def facts(self, tree: Tree) -> dict[str, Any]:
        """The share of steps that accepted each path. Drafters order nodes in their own ways, but
        siblings by rank. Nothing if they proposed other trees.
        """
        shapes = {tuple(parents_BN[0].tolist()) for parents_BN in self.parents}
        if len(shapes) != 1 or not isinstance(tree, StaticTree):
            return {}
        children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for path in sorted(tree.paths, reverse=True):
            children.setdefault(path[:-1], []).append(path)
        paths: list[tuple[int, ...]] = [()]
        for parent in shapes.pop()[1:]:
            if not children.get(paths[parent]):
                return {}
            paths.append(children[paths[parent]].pop())
        accepted: Counter[tuple[int, ...]] = Counter()
        for node in torch.cat(self.ends).tolist():
            accepted.update(paths[node][:depth] for depth in range(1, len(paths[node]) + 1))
        shares = [accepted[path] / len(self.ends) for path in tree.paths]
        return {"tree": tree.to_json(), "acceptance_by_node": shares}


def _replayed(
    candidate: Candidate, prompts: Sequence[BenchPrompt]
) -> tuple[Statistics | None, dict[str, Any]]:
    """What separate runs tell: draft and verify times on an accelerator, which cost
    synchronization, and how often each node of a fixed tree is accepted.
    """
    engine, recorder = candidate.engine, Recorder(candidate.rule)
    if not isinstance(engine, Speculator):
        return None, {}
    on_cpu = engine.target.device.type != "cuda"
    has_fixed_tree = isinstance(engine.tree, StaticTree) and engine.tree.nodes > 1
    if on_cpu and (engine.compile or not has_fixed_tree):
        return None, {}
    engine.profile = True
    watched = candidate if engine.compile else replace(candidate, rule=recorder)
    statistics = _statistics([timed(watched, [each]) for each in prompts])
    engine.profile = False
    return None if on_cpu else statistics, recorder.facts(engine.tree)


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
    units = batched(prompts, options.batch)
    sums_P3 = {each: _sums(runs[each], units) for each in {*BASELINES, name} & runs.keys()}
    speeds = {each: float(sums[:, 0].sum() / sums[:, 1].sum()) for each, sums in sums_P3.items()}
    ours_P3, generate_P3 = sums_P3[name], sums_P3[GENERATE]
    best = max(sums_P3.keys() & BASELINES, key=speeds.__getitem__)
    speedup, speedup_ci95 = _compared(ours_P3, generate_P3, options)
    cpu_speedup, cpu_speedup_ci95 = _compared(ours_P3[:, ::2], generate_P3[:, ::2], options)
    over_best, over_best_ci95 = _compared(ours_P3, sums_P3[best], options)
    statistics = _statistics(runs[name])
    profile = profile or statistics
    draft_seconds = profile.draft_seconds / max(profile.steps, 1)
    engine, gamma = candidate.engine, 0
    if isinstance(engine, Speculator) and not engine.compile:  # compiled: drafts are not timed
        gamma = max(engine.tree.depth, len(statistics.accepted))
    plain = _statistics(runs[PLAIN])
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
        speedup=speedup,
        speedup_ci95=speedup_ci95,
        cpu_speedup=cpu_speedup,
        cpu_speedup_ci95=cpu_speedup_ci95,
        speedup_over_best=over_best,
        speedup_over_best_ci95=over_best_ci95,
        draft_seconds=draft_seconds,
        verify_seconds=profile.verify_seconds / max(profile.steps, 1),
        steps=statistics.steps,
        tokens=int(ours_P3[:, 0].sum()),
        analysis=Analysis.of(
            statistics.acceptance_by_depth, gamma, cost, speeds[name] / speeds[PLAIN]
        ),
        categories=_by_category(name, prompts, runs, options),
    )


def _by_category(
    name: str, prompts: Sequence[BenchPrompt], runs: Runs, options: BenchOptions
) -> dict[str, CategoryResult]:
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(prompt.category or "", []).append(place)
    results = {}
    for category, chosen in places.items() if len(places) > 1 else ():
        units = batched([prompts[place] for place in chosen], options.batch)
        ours, generate = ([runs[each][place] for place in chosen] for each in (name, GENERATE))
        compared = _compared(_sums(ours, units), _sums(generate, units), options)
        tau = _statistics(ours).tokens_per_step
        results[category] = CategoryResult(len(chosen), tau, *compared)
    return results


def _statistics(runs: Sequence[Sequence[Run]]) -> Statistics:
    return Statistics.of(step for run in chain.from_iterable(runs) for step in run.steps)


def _sums(runs: Sequence[Sequence[Run]], units: Sequence[Sequence[int]]) -> Tensor:
    """float64 (P, 3): tokens, seconds and CPU seconds of each batch, summed over repetitions."""
    sums = []
    for unit in units:
        together = [run for place in unit for run in runs[place]]
        seconds = sum(run.seconds for run in together), sum(run.cpu_seconds for run in together)
        sums.append([sum(len(run.tokens) for run in together), *seconds])
    return torch.tensor(sums, dtype=torch.float64)


def _compared(
    ours_P2: Tensor, baseline_P2: Tensor, options: BenchOptions
) -> tuple[float, list[float]]:
    """The ratio of tokens per second, and its interval."""
    ours, baseline = ours_P2.sum(0), baseline_P2.sum(0)
    ratio = float((ours[0] / ours[1]) / (baseline[0] / baseline[1]))
    return ratio, speedup_interval(ours_P2, baseline_P2, options)


def _divergence(
    target: Target, prompts: Sequence[BenchPrompt], runs: Runs, name: str
) -> Divergence | None:
    """Compare every repetition with generate's first run of the prompt, alone."""
    differing = []
    expected_P = runs.get(ALONE, runs[GENERATE])
    for prompt, references, repeated in zip(prompts, expected_P, runs[name], strict=True):
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
            f"lossless: n/a in {dtype_name(target.dtype)}, where a tree of tokens "
            "rounds differently from a single token and near-ties change; compare with "
            "--dtype float32."
        )
    return None
