"""Predicts the cost of a step with any tree, and the number of steps that a tree needs for a text.

Costs are fitted to timed runs of a few trees. The steps of a tree are replayed along texts of the
target on which a head was observed at all depths jointly, so no product of marginals is needed.

Legend: T new tokens of a text, K draft depth, N trees.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul

import numpy as np
import torch
from torch import Tensor

from draftheads.heads.tree import DynamicTree, StaticTree, Tree
from draftheads.infer.race import steps_of
from draftheads.infer.turns import TimedRun

FINALISTS = 4
"""Number of trees that race."""
SPREAD = 1.5
"""The larger of two finalists has at least this many times the nodes of the smaller one."""
ORDINARY = 2.0
"""Tokens per step that any trained head reaches."""
NONE = StaticTree(())
"""The tree of decoding without drafts."""


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine, for one target, head, dtype and length of context."""

    verify: dict[int, float]  # draft nodes -> one verification, acceptance included; 0: plain
    draft: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # one draft, and each unit of `work`
    prompt: float = 0.0  # seconds besides the steps, mostly the prefill

    def verify_seconds(self, nodes: int) -> float:
        """Linear between the sizes that were measured, constant beyond them."""
        sizes = sorted(self.verify)
        return float(np.interp(nodes, sizes, [self.verify[size] for size in sizes]))

    def step_seconds(self, tree: Tree) -> float:
        """Seconds of one step with this tree."""
        draft = sum(map(mul, self.draft, (1, *work(tree)))) if tree.draft_nodes else 0.0
        return self.verify_seconds(tree.draft_nodes) + max(draft, 0.0)

    def break_even(self, tree: Tree) -> float:
        """Tokens per step at which decoding with this tree is as fast as without drafts."""
        return self.step_seconds(tree) / self.verify_seconds(0)


def too_slow(tau: float, break_even: float, dtype: str) -> str:
    """One line of advice if drafts cost more time than they save; "" if they pay."""
    if tau >= break_even:
        return ""
    other = ", --dtype bfloat16" if dtype == "float32" else ""
    return (
        f"slower than without drafts: a step costs {break_even:.2f} plain ones (break-even τ) and "
        f"brings τ {tau:.2f}; try fewer --nodes{other}, or draftheads tune"
    )


def work(tree: Tree) -> tuple[int, int, int]:
    """Levels, expanded nodes and draft nodes, on which the time of a draft depends."""
    if isinstance(tree, DynamicTree):
        return tree.depth, 1 + (tree.depth - 1) * tree.top_k, tree.draft_nodes
    return tree.depth, len({path[:-1] for path in tree.paths}), tree.draft_nodes


@dataclass(frozen=True)
class Trial:
    """A candidate tree; tau in tokens per step, speeds in tokens per second, prompt included. The
    predicted speed of dynamic trees is 0: unknown.
    """

    tree: Tree
    predicted_tau: float = 0.0
    predicted: float = 0.0
    tau: float = 0.0
    measured: float = 0.0
    gain_ci95: Sequence[float] = (1.0, 1.0)  # measured speed over that of the present tree


TreeRuns = Mapping[StaticTree, Sequence[TimedRun]]
"""Tree -> its run of each prompt."""


def fitted_costs(runs: TreeRuns) -> Costs:
    """Fits costs to typical steps of these runs: verification by size, drafting by least squares
    over all trees. Raises ValueError if a tree made no step, or if the times contradict each other,
    so that part of a step would take negative time.
    """
    steps = {tree: _halves(each) for tree, each in runs.items()}
    prompt = _prompt_seconds(runs, steps)
    # noise only adds: no tree takes longer to verify than a larger one
    verify = {
        size: min(seconds for tree, (_, seconds) in steps.items() if tree.draft_nodes >= size)
        for size in sorted({tree.draft_nodes for tree in steps})
    }
    if verify[0] <= 0:
        raise ValueError(
            "expected times that add up, got steps of no time; nothing was written: leave the "
            "machine alone and tune again"
        )
    drafted = {tree: each for tree, each in steps.items() if tree.paths}
    return Costs(verify, _least_squares(drafted), prompt)


def _prompt_seconds(runs: TreeRuns, halves: Mapping[StaticTree, tuple[float, float]]) -> float:
    """Seconds of a prompt besides its steps: the prefill, and the extra time of its first draft
    over a typical one.
    """
    seconds = []
    for tree, own in runs.items():
        drafting, _ = halves[tree]
        for run in own:
            if len(run.steps) > 1:
                prefill, first = run.steps[:2]
                seconds.append(prefill.verify_seconds + first.draft_seconds - drafting)
    return max(typical(seconds), 0.0)


def _halves(runs: Sequence[TimedRun]) -> tuple[float, float]:
    """Seconds of drafting and of verifying in a typical step."""
    steps = list(steps_of(runs))
    if not steps:
        raise ValueError(
            "expected answers of several tokens, got none longer than one; pass other prompts"
        )
    drafting = typical([step.draft_seconds for step in steps])
    return drafting, typical([step.verify_seconds for step in steps])


def typical(seconds: Sequence[float]) -> float:
    """The lower quartile, because other processes only ever add to times."""
    return sorted(seconds)[len(seconds) // 4]


def _least_squares(steps: Mapping[StaticTree, tuple[float, float]]) -> tuple[float, ...]:
    """The non-negative coefficients of 1 and `work` that fit the seconds of drafting with the least
    relative error of whole steps.
    """
    seconds_N2 = torch.tensor(list(steps.values()), dtype=torch.float64)
    whole_N1 = seconds_N2.sum(1, keepdim=True)
    work_N4 = torch.tensor([(1, *work(tree)) for tree in steps], dtype=torch.float64)
    scaled_N4 = work_N4 / whole_N1
    share_N1 = seconds_N2[:, :1] / whole_N1
    best = torch.zeros(4)
    least = float(share_N1.norm())
    # the best non-negative solution is the best one with some coefficients set to 0
    for chosen in product([0.0, 1.0], repeat=4):
        mask_4 = torch.tensor(chosen, dtype=torch.float64)
        solution_41 = torch.linalg.lstsq(scaled_N4 * mask_4, share_N1, driver="gelsd").solution
        solved_4 = solution_41[:, 0] * mask_4  # removes the rest of rounding
        error = float((scaled_N4 @ solved_4 - share_N1[:, 0]).norm())
        if solved_4.min() >= 0 and error < least:
            best = solved_4
            least = error
    return tuple(best.tolist())


def search(
    orders: Sequence[StaticTree], texts: Sequence[Tensor], costs: Costs, nodes: int
) -> list[Trial]:
    """Predict, on texts, the speed of all prefixes of up to `nodes` nodes of these trees and of
    their parts down to each depth. texts: ranks_TK of each, see `Track.observe` of tune.py.

    Among trees of the same size and depth, the prefix of an order by frequency is right most often:
    each path adds its own frequency, whatever else is in the tree.
    """
    trials: dict[StaticTree, Trial] = {}
    for order in orders:
        for depth in range(1, order.depth + 1):
            family = StaticTree(tuple(path for path in order.order if len(path) <= depth))
            places = [_places(family, ranks_TK) for ranks_TK in texts]
            for size in range(1, min(nodes, family.draft_nodes) + 1):
                tree = family.resized(size)
                if tree not in trials:
                    trials[tree] = _predicted(tree, places, costs)
    return list(trials.values())


def predict(tree: StaticTree, texts: Sequence[Tensor], costs: Costs) -> Trial:
    """Predicts the speed of one tree, as `search` does."""
    return _predicted(tree, [_places(tree, ranks_TK) for ranks_TK in texts], costs)


def _predicted(tree: StaticTree, texts: Sequence[list[list[int]]], costs: Costs) -> Trial:
    tokens = sum(map(len, texts))
    steps = sum(replayed_steps(places, tree.draft_nodes) for places in texts)
    seconds = len(texts) * costs.prompt + steps * costs.step_seconds(tree)
    return Trial(tree, (tokens - len(texts)) / max(steps, 1), tokens / seconds)


def _places(tree: StaticTree, ranks_TK: Tensor) -> list[list[int]]:
    """For each row, the numbers of the nodes on the longest correct path of the tree. They ascend,
    because parents precede their children.
    """
    numbers = {path: number for number, path in enumerate(tree.paths)}
    rows = []
    for ranks in map(tuple, ranks_TK.tolist()):
        paths = [ranks[:depth] for depth in range(1, len(ranks) + 1)]
        rows.append([numbers[path] for path in paths if path in numbers])  # its parents precede it
    return rows


def replayed_steps(places: Sequence[Sequence[int]], nodes: int) -> int:
    """The number of steps that the first `nodes` nodes of a tree need to write a text after its
    first token. Each step begins where the one before ended.
    """
    at = 0
    steps = 0
    while at < len(places) - 1:
        at += bisect_left(places[at], nodes) + 1
        steps += 1
    return steps


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with the best predictions; their sizes differ by SPREAD or more."""
    best: list[Trial] = []
    for each in sorted(trials, key=lambda trial: -trial.predicted):
        sizes = [(each.tree.nodes, other.tree.nodes) for other in best]
        if all(SPREAD * min(pair) <= max(pair) for pair in sizes):
            best.append(each)
    return best[:FINALISTS]
