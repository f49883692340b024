"""How much faster is a head? `generate`, this engine without a drafter, and heads, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from rich.console import Console

from draftheads.heads.base import Drafter, DraftHead
from draftheads.heads.shape import Tree
from draftheads.heads.target import Target
from draftheads.infer.accept import Greedy
from draftheads.infer.baseline import Baseline, without_defaults
from draftheads.infer.engine import Speculator, Step
from draftheads.infer.race import GENERATE, PLAIN, BenchOptions, Contestant, Job, profiled, race
from draftheads.infer.report import BenchReport, describe_machine
from draftheads.infer.summary import Summary

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


def _jobs(target: Target, prompts: Sequence[Sequence[int]], options: BenchOptions) -> list[Job]:
    jobs = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: expected one token or more")
        room = target.context - len(prompt)
        if room > 0:
            jobs.append(Job(number, prompt, min(options.max_new_tokens, room)))
    if not jobs:
        raise ValueError(
            f"expected a prompt shorter than the context of {target.name} ({target.context} "
            f"tokens), found none among {len(prompts)}; pass shorter prompts"
        )
    return jobs


def _baseline(target: Target, jobs: Sequence[Job], options: BenchOptions) -> Contestant:
    generate = Baseline(target, options.sampling, {job.limit for job in jobs})
    return Contestant(
        GENERATE,
        None,
        lambda prompt, limit: [Step(generate(prompt, limit), -1, None, 0.0, 0.0)],
    )


def _engine(name: str, nodes: int | None, engine: Speculator, options: BenchOptions) -> Contestant:
    def generate(prompt: Sequence[int], limit: int) -> list[Step]:
        return list(engine.generate(prompt, sampling=options.sampling, max_new_tokens=limit))

    return Contestant(name, nodes, generate, engine)


def _heads(
    target: Target, heads: Mapping[str, Entry], options: BenchOptions
) -> Iterator[Contestant]:
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
    target: Target, options: BenchOptions, jobs: Sequence[Job], *, skipped: int
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
