"""Finds the tree with the most tokens per second on this machine.

The cost of a step is measured in the decoding loop, for trees of a few sizes and depths. The
correct drafts of the head are observed along texts of the target, all depths jointly, and replayed
for every candidate tree. The best few candidates then race against the present tree, on other
prompts than those to which trees and costs were fitted.

Legend: P prompts, T new tokens of a text, K draft depth.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree, Tree
from draftheads.infer.costs import (
    FINALISTS,
    NONE,
    Costs,
    Trial,
    finalists,
    fitted_costs,
    predict,
    search,
)
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.bench import sums_of
from draftheads.infer.race import (
    BenchPrompt,
    Candidate,
    RaceOptions,
    describe_machine,
    fitting_prompts,
    machine_line,
    own_randomness,
    race,
    rule_name,
    speed,
    speedup_interval,
    steps_of,
)
from draftheads.infer.rows import Statistics
from draftheads.infer.threads import fair_clock
from draftheads.infer.turns import TimedRun, Turns

SIZES = (1, 3, 7, 15, 31, 63)
"""Numbers of draft nodes whose verification is timed. 7 nodes and the root are as many rows as an
int8 product takes together; one more costs a quarter of the products.
"""
COST_PROMPTS, COST_TOKENS = 4, 32
"""Number of prompts on which costs are measured, and of new tokens for each."""
COSTS_END, FIT_END, HELD_END = 0.4, 0.5, 0.6
"""Shares of the minutes at which the measurement of costs ends, then that of texts to fit trees to,
then that of texts to predict on.
"""


@dataclass(frozen=True, kw_only=True)
class TuneOptions(RaceOptions):
    """Settings of a search; each number is at least 1."""

    max_new_tokens: int = 64
    nodes: int = 64  # draft nodes of the largest tree


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`. trials: the present tree first, then decoding without drafts."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    costs: Costs
    trials: list[Trial]
    best: Trial

    @property
    def plain(self) -> Trial:
        """Decoding without drafts."""
        return next(each for each in self.trials if each.tree == NONE)

    @property
    def drafted(self) -> Trial | None:
        """The fastest trial with drafts."""
        trials = [each for each in self.trials if each.tree.draft_nodes]
        return max(trials, key=lambda each: each.measured, default=None)

    def facts(self) -> dict[str, Any]:
        """The facts about the search that a head's config.json records."""
        return {
            "machine": machine_line(self.machine),
            "dtype": self.machine["dtype"],
            **self.settings,
            "tokens_per_step": self.best.tau,
            "break_even_tokens_per_step": self.costs.break_even(self.best.tree),
            "predicted_tokens_per_second": self.best.predicted,
            "measured_tokens_per_second": self.best.measured,
            "previous_tokens_per_second": self.trials[0].measured,
            "plain_tokens_per_second": self.plain.measured,
        }


def tune(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    options: TuneOptions,
    *,
    others: Sequence[Tree] = (),
    turns: Turns | None = None,
) -> Tuned:
    """Find the tree of `head` with the most tokens per second; decoding without drafts is a
    candidate, too.

    Costs and trees are fitted on every second prompt; the finalists race on the others. The present
    tree stays unless the 95 % interval of the gain excludes it. others: more trees whose prefixes
    are candidates. turns: as in `race`; trees and costs take three fifths of the minutes. If the
    race is stopped, the trees are compared by the turns that have ended. Raises ValueError unless
    two prompts fit into the context.
    """
    fitting = fitting_prompts(target, prompts, options.max_new_tokens)
    fit = fitting[::2]
    held = fitting[1::2]
    if not held:
        raise ValueError("expected two or more prompts to tune with, got one; pass more prompts")
    track = Track(target, head, options, turns or Turns())
    finals = (FINALISTS + 2) * len(held)
    track.turns.runs = len(fitting) + finals  # besides those for costs
    with own_randomness(target):
        costs = track.costs(fit)
        seen = track.observe(fit, FIT_END)
        heldout = track.observe(held, HELD_END)
        own = [tree for tree in (head.tree, *others) if isinstance(tree, StaticTree)]
        fitted = StaticTree.unfitted(head.depth).fitted(torch.cat(seen), options.nodes)
        orders = [*own, fitted, StaticTree.from_widths([1] * head.depth)]
        best = finalists(search(orders, heldout, costs, options.nodes))
        present = Trial(head.tree)  # a dynamic tree is not predicted
        if isinstance(head.tree, StaticTree):
            present = predict(head.tree, heldout, costs)
        trials = track.trials([present, predict(NONE, heldout, costs), *best], held)
    settings = {
        "sampling": rule_name(options.sampling),
        "prompts": len(fitting),
        "max_new_tokens": options.max_new_tokens,
        "turns_left_out": track.turns.left_out,
    }
    return Tuned(describe_machine(target), settings, costs, trials, winner(trials))


def winner(trials: Sequence[Trial]) -> Trial:
    """The fastest of the present tree, which is the first, and those that surely beat it."""
    better = [each for each in trials if each.gain_ci95[0] > 1.0]
    return max([trials[0], *better], key=lambda each: each.measured)


@dataclass
class Track:
    """The conditions under which trees are timed."""

    target: Target
    head: DraftHead
    options: TuneOptions
    turns: Turns

    def race(
        self, trees: Sequence[Tree], prompts: Sequence[BenchPrompt], share: float
    ) -> tuple[list[BenchPrompt], dict[Tree, list[TimedRun]]]:
        """Time every tree on every prompt, in turns, until this share of the minutes is over. A
        single thread is timed by CPU seconds, so other processes hardly matter. Returns the prompts
        that were decoded, and the runs of each tree.
        """
        self.turns.share = share
        candidates = {
            tree: Candidate(
                json.dumps(tree.to_json()), Speculator(self.target, self.head, tree=tree)
            )
            for tree in trees
        }
        reached, runs = race(
            [*candidates.values()],
            prompts,
            self.options,
            fair_clock(self.target.device),
            turns=self.turns,
        )
        return reached, {tree: runs[candidate.name] for tree, candidate in candidates.items()}

    def costs(self, prompts: Sequence[BenchPrompt]) -> Costs:
        """Measures the costs of steps with fixed trees."""
        trees = cost_trees(self.head.depth, self.options.nodes)
        chosen = [
            replace(each, limit=min(each.limit, COST_TOKENS)) for each in prompts[:COST_PROMPTS]
        ]
        self.turns.runs += len(trees) * len(chosen)
        _, runs = self.race(trees, chosen, COSTS_END)
        self.turns.check()
        return fitted_costs({tree: runs[tree] for tree in trees})

    @torch.no_grad()
    def observe(self, prompts: Sequence[BenchPrompt], share: float) -> list[Tensor]:
        """ranks_TK of the target's tokens after each prompt: row i belongs to the draft whose root
        is new token i. share: as in `race`.
        """
        reached, runs = self.race([self.head.tree], prompts, share)
        self.turns.check()
        texts = []
        for each, run in zip(reached, runs[self.head.tree], strict=True):
            tokens_1T = torch.tensor([[*each.prompt, *run.tokens]], device=self.target.device)
            positions_1T = torch.arange(tokens_1T.shape[1], device=self.target.device)[None]
            learned_1T = positions_1T >= len(each.prompt)
            batch = Batch(tokens_1T, learned_1T, positions_1T, torch.zeros_like(tokens_1T))
            features_1TD = self.target.features(batch, self.head.training_layers)
            texts.append(self.head.token_ranks(batch, features_1TD, self.target).cpu())
        return texts

    def trials(self, chosen: Sequence[Trial], prompts: Sequence[BenchPrompt]) -> list[Trial]:
        """Race the chosen trees; intervals are over the speed of the first. The pace of a machine
        drifts, so predictions are scaled to that of plain decoding, which is among them.
        """
        trials = {each.tree: each for each in chosen}
        present = chosen[0].tree
        _, runs = self.race([*trials], prompts, 1.0)
        sums_P2 = {tree: sums_of(each) for tree, each in runs.items()}
        pace = speed(sums_P2[NONE]) / trials[NONE].predicted
        results = []
        for tree, trial in trials.items():
            result = replace(
                trial,
                predicted=trial.predicted * pace,
                tau=Statistics.of(steps_of(runs[tree])).tokens_per_step,
                measured=speed(sums_P2[tree]),
                gain_ci95=speedup_interval(sums_P2[tree], sums_P2[present]),
            )
            results.append(result)
        return results


def cost_trees(depth: int, nodes: int) -> list[StaticTree]:
    """Trees of the shapes that searches typically find, of all `SIZES` up to `nodes` and all
    depths.
    """
    sizes = sorted({0, *(size for size in SIZES if size < nodes), nodes})
    depths = sorted({1, 2, (depth + 1) // 2, depth})
    trees = [
        likely(levels, size)
        for levels, size in product(depths, sizes)
        if levels == depth or size in sizes[3::2]
    ]
    return list(dict.fromkeys([*trees, StaticTree.from_widths([1] * depth)]))


def likely(depth: int, nodes: int) -> StaticTree:
    """A tree of a common shape."""
    chances = [0.7 * 0.5**rank for rank in range(10)]
    return StaticTree.best_first([chances] * depth, nodes)
