"""Benchmark of heads against this engine without a drafter and transformers' own `generate`.

All candidates run in one process on the same prompts, in rotating order, so that a machine that
slows down slows all of them alike. `report.py` shows what was measured.

Legend: P prompts.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.target.model import Target
from draftheads.heads.tree import Tree
from draftheads.infer.accept import Acceptance
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.baseline import Baseline, without_defaults
from draftheads.infer.measure.llamacpp import RIVAL, LlamaServer
from draftheads.infer.race import (
    GENERATE,
    PLAIN,
    BenchPrompt,
    Candidate,
    RaceOptions,
    Runs,
    describe_machine,
    fitting_prompts,
    own_randomness,
    race,
    rule_name,
    speed,
    speedup_interval,
    steps_of,
)
from draftheads.infer.rows import Statistics
from draftheads.infer.sources import DrafterSource
from draftheads.infer.threads import fair_clock
from draftheads.infer.turns import TimedRun, Turns

COMPILED = " compiled"
"""At the end of the names of candidates whose steps are compiled."""
BASELINES = (GENERATE, PLAIN, GENERATE + COMPILED, PLAIN + COMPILED)

Entry = DrafterSource | tuple[DrafterSource, Tree]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RaceOptions):
    """Settings of a bench; each number is at least 1."""

    max_new_tokens: int = 128
    nodes: Sequence[int] = ()  # draft nodes of each head's own tree, resized; empty: as it is
    # of llama.cpp by name, with the same weights, for one prompt at a time; first without drafts
    rivals: Mapping[str, LlamaServer] = field(default_factory=dict)
    categories: Sequence[str] = ()  # of the prompts


@dataclass(frozen=True)
class Divergence:
    """The first difference from `generate`'s output, in the first prompt that differs."""

    prompts: int  # number of prompts that differ
    prompt: int  # number of the first
    token: int  # index in its output
    expected: int | None  # token ids, None where one output has ended
    got: int | None
    top2_margin: float  # best logit minus second best; near zero, rounding decides


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
    quality: dict[str, float] | None  # of a lossy rule's text, as of `text_quality`
    steps: int
    tokens: int  # includes the prefill's

    @property
    def step_seconds(self) -> float:
        """A mean step."""
        return self.draft_seconds + self.verify_seconds


@dataclass(frozen=True)
class BenchReport:
    """plain: the engine without a drafter. heads: one Result per head and tree. rivals: llama.cpp
    without drafts, and then with each head; their texts are not compared, and their steps take what
    its own clock says. over_rival: name of such a head's -> how much faster it is than llama.cpp
    without drafts, and the 95 % interval. categories: the same results of the prompts of each
    category, if there are several. int8: what the target's int8 weights cost, as of `int8_cost`.
    """

    machine: dict[str, Any]
    settings: dict[str, Any]
    plain: Result
    heads: list[Result]
    rivals: list[Result]
    over_rival: dict[str, tuple[float, list[float]]]
    categories: dict[str, list[Result]]
    int8: dict[str, float] | None = None

    def result(self, name: str) -> Result:
        """The result with this name."""
        return next(result for result in (self.plain, *self.heads) if result.name == name)


def bench(
    target: Target,
    heads: Mapping[str, Entry],
    prompts: Sequence[Sequence[int]],
    options: BenchOptions | None = None,
    *,
    turns: Turns | None = None,
) -> BenchReport:
    """Measure heads, and the engine without a drafter, against transformers' own `generate`.

    heads: name -> head or other source of drafters, or (such, tree). prompts: token
    ids. A prompt with less room than max_new_tokens in the context gets what is left; one that
    fills the context is skipped. turns: as of `race`; the report is of what it reached.
    Raises ValueError if no prompt fits or a head has the name of a baseline.
    """
    options = options or BenchOptions()
    turns = turns or Turns()
    fitting = fitting_prompts(target, prompts, options.max_new_tokens)
    candidates = list(_candidates(target, heads, options))
    with without_defaults(target), own_randomness(target):
        clock = fair_clock(target.device)
        skipped = len(prompts) - len(fitting)
        fitting, runs = race(candidates, fitting, options, clock, turns=turns)
        measured = [each for each in candidates if each.name != GENERATE]
        results = [summarize(each, target, fitting, runs, options) for each in measured]
        categories = {
            category: [summarize(each, target, *part, options) for each in measured]
            for category, part in by_category(fitting, runs, options.categories).items()
        }
    ours = [each for each in results if each.name not in options.rivals]
    rivals = [each for each in results if each.name in options.rivals]
    over_rival = {
        each.name: compared(sums_of(runs[each.name]), sums_of(runs[RIVAL])) for each in rivals[1:]
    }
    settings = {
        **_settings(options),
        "target": target.title,
        "prompts": len(fitting),
        "turns_left_out": turns.left_out,
        "prompts_shortened": sum(each.limit < options.max_new_tokens for each in fitting),
        "prompts_skipped": skipped,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    machine = describe_machine(target)
    return BenchReport(machine, settings, ours[0], ours[1:], rivals, over_rival, categories)


def by_category(
    prompts: Sequence[BenchPrompt], runs: Runs, categories: Sequence[str]
) -> dict[str, tuple[list[BenchPrompt], Runs]]:
    """The prompts of each category, and their runs; none if there is one category. categories: of
    all prompts that the caller has, by number.
    """
    if len({*categories}) < 2:
        return {}
    places: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        places.setdefault(categories[prompt.number], []).append(place)
    return {
        category: (
            [prompts[place] for place in chosen],
            {name: [each[place] for place in chosen] for name, each in runs.items()},
        )
        for category, chosen in places.items()
    }


def _settings(options: BenchOptions) -> dict[str, Any]:
    """The settings as a report has them."""
    return {
        "sampling": rule_name(options.sampling),
        "seed": options.seed,
        "compile": options.compile,
        "minutes": options.minutes,
        "max_new_tokens": options.max_new_tokens,
        "nodes": options.nodes,
        "rivals": [*options.rivals],
    }


def _candidates(
    target: Target, heads: Mapping[str, Entry], options: BenchOptions
) -> Iterator[Candidate]:
    endings = {"": False, COMPILED: True} if options.compile else {"": False}
    for ending, compile in endings.items():
        generate = Baseline(target, compile=compile)
        yield Candidate(GENERATE + ending, generate)
        plain = Speculator(target, compile=compile, profile=True)
        yield Candidate(PLAIN + ending, plain, 0)
    for name, entry in heads.items():
        if name in (*BASELINES, *options.rivals):
            raise ValueError(f"{name!r} is reserved for a baseline; rename this head")
        drafts, tree = entry if isinstance(entry, tuple) else (entry, None)
        for label, shape in _trees(name, drafts, tree, options.nodes).items():
            for ending, compile in endings.items():
                engine = Speculator(target, drafts, tree=shape, compile=compile, profile=True)
                yield Candidate(label + ending, engine, shape.draft_nodes)
    clock = fair_clock(target.device)
    for name, server in options.rivals.items():
        yield Candidate(name, server, clock=clock if clock is perf_counter else server.clock)


def _trees(
    name: str, drafts: DrafterSource, tree: Tree | None, nodes: Sequence[int]
) -> dict[str, Tree]:
    """The trees to try with these drafts, by the names of their candidates."""
    if tree or not nodes:
        return {name: tree or drafts.tree}
    resized = [drafts.tree.resized(size) for size in nodes]
    trees = {each.draft_nodes: each for each in resized}
    return {f"{name}@{size}": trees[size] for size in sorted(trees)}


def summarize(
    candidate: Candidate,
    target: Target,
    prompts: Sequence[BenchPrompt],
    runs: Runs,
    options: BenchOptions,
) -> Result:
    """Compare one candidate with the baselines."""
    name = candidate.name
    baselines = [each for each in BASELINES if each in runs]
    sums_P2 = {each: sums_of(runs[each]) for each in (*baselines, name)}
    speeds = {each: speed(sums) for each, sums in sums_P2.items()}
    ours_P2 = sums_P2[name]
    best = max(baselines, key=lambda each: speeds[each])
    speedup, speedup_ci95 = compared(ours_P2, sums_P2[GENERATE])
    over_best, over_best_ci95 = compared(ours_P2, sums_P2[best])
    statistics = Statistics.of(steps_of(runs[name]))
    reason = _why_not_comparable(target, options.sampling, name)
    divergence = None
    if name in options.rivals:
        reason = "lossless: n/a, llama.cpp rounds otherwise."
    elif not _is_sampled(options.sampling):
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
        speedup_over_best=over_best,
        speedup_over_best_ci95=over_best_ci95,
        draft_seconds=statistics.draft_seconds / max(statistics.steps, 1),
        verify_seconds=statistics.verify_seconds / max(statistics.steps, 1),
        quality=None if options.sampling.lossless else text_quality(target, prompts, runs[name]),
        steps=statistics.steps,
        tokens=int(ours_P2[:, 0].sum()),
    )


def sums_of(runs: Sequence[TimedRun]) -> Tensor:
    """float64 (P, 2): tokens and seconds of each prompt."""
    sums = [[len(run.tokens), run.seconds] for run in runs]
    return torch.tensor(sums, dtype=torch.float64)


def compared(ours_P2: Tensor, baseline_P2: Tensor) -> tuple[float, list[float]]:
    """The ratio of tokens per second, and its interval."""
    return speed(ours_P2) / speed(baseline_P2), speedup_interval(ours_P2, baseline_P2)


def _divergence(
    target: Target, prompts: Sequence[BenchPrompt], runs: Runs, name: str
) -> Divergence | None:
    """Compare each output with generate's."""
    differing = [
        (prompt, expected.tokens, run.tokens)
        for prompt, expected, run in zip(prompts, runs[GENERATE], runs[name], strict=True)
        if run.tokens != expected.tokens
    ]
    if not differing:
        return None
    prompt, expected, got = differing[0]
    token = len(commonprefix([expected, got]))
    return Divergence(
        prompts=len(differing),
        prompt=prompt.number,
        token=token,
        expected=expected[token] if token < len(expected) else None,
        got=got[token] if token < len(got) else None,
        top2_margin=top2_margin(target, [*prompt.prompt, *expected[:token]]),
    )


@torch.inference_mode()
def text_quality(
    target: Target, prompts: Sequence[BenchPrompt], runs: Sequence[TimedRun]
) -> dict[str, float]:
    """Reads all new tokens again: the share that are the target's likeliest, and the mean
    log-probability, in nats.
    """
    likeliest, total, count = 0, 0.0, 0
    for prompt, run in zip(prompts, runs, strict=True):
        tokens = torch.tensor(run.tokens, device=target.device)
        ids = torch.tensor([[*prompt.prompt, *run.tokens]], device=target.device)
        logits_TV = target.model(ids, use_cache=False).logits[0, len(prompt.prompt) - 1 : -1]
        logp_TV = logits_TV.float().log_softmax(-1)
        likeliest += int((logp_TV.argmax(-1) == tokens).sum())
        total += float(logp_TV.gather(1, tokens[:, None]).sum())
        count += len(tokens)
    return {"likeliest": likeliest / count, "log_probability": total / count}


@torch.inference_mode()
def int8_cost(
    target: Target, whole: Target, prompts: Sequence[Sequence[int]], tokens: int = 2000
) -> dict[str, float]:
    """Measures how int8 weights change the next token after each of the first `tokens` of the
    prompts. whole: the same target in float32. agreement: share of places with the same likeliest
    token. kl: mean Kullback-Leibler divergence from float32, in nats.
    """
    agreement, kl, count = 0, 0.0, 0
    for prompt in prompts:
        ids = torch.tensor([prompt[: tokens - count]])
        if ids.numel():
            exact_TV, logp_TV = (
                each.model(ids, use_cache=False).logits[0].float().log_softmax(-1)
                for each in (whole, target)
            )
            agreement += int((exact_TV.argmax(-1) == logp_TV.argmax(-1)).sum())
            kl += float((exact_TV.exp() * (exact_TV - logp_TV)).sum())
            count += ids.numel()
    return {"agreement": agreement / count, "kl": kl / count, "tokens": count}


def top2_margin(target: Target, tokens: Sequence[int]) -> float:
    """The target's best logit minus its second best after `tokens`."""
    cache = target.new_cache(1, len(tokens))
    best = target.prefill([tokens], cache, ()).logits_BNV[0, 0].float().topk(2).values
    return float(best[0] - best[1])


def _is_sampled(rule: Acceptance) -> bool:
    """True if its output is drawn, in `generate`, too."""
    return bool((rule.as_generate() or {}).get("do_sample"))


def _why_not_comparable(target: Target, rule: Acceptance, name: str) -> str | None:
    if not rule.lossless:
        return "lossless: n/a, this acceptance rule is lossy."
    if _is_sampled(rule):
        return "lossless: n/a when sampling, two random streams do not draw the same tokens."
    if target.bits and name.endswith(COMPILED):
        return "lossless: n/a for int8 compiled, whose kernels round otherwise than generate's."
    if target.precision not in ("float32", "int8"):
        return (
            f"lossless: n/a in {target.precision}, where a tree of tokens rounds differently from "
            "a single token and near-ties change; compare with --dtype float32."
        )
    return None
