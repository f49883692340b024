"""How trees grow level by level under an autoregressive drafter, on tensors alone: no loop over
nodes, no wait for the device.

Legend: B batch, F nodes of a level that are expanded (the frontier), C candidates, N tree nodes, v
draft vocabulary. Level 0 is the root alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from draftheads.heads.shape import DynamicTree, Tree, TreeShape
from draftheads.heads.tree import TokenTree, Topology


class Growth(Protocol):
    """A tree in the making."""

    tokens_BF: Tensor
    """int64, the nodes to be expanded next."""
    parents_BF: Tensor
    """int64, the place of each one's parent among the nodes expanded before."""

    def add(self, logits_BFv: Tensor) -> bool:
        """Take what the head says after each node of the frontier; False when the tree is
        complete.
        """
        ...

    def tree(self, roots_B: Tensor) -> TokenTree:
        """The tree on these roots."""
        ...


def planner(tree: Tree, token_map: Tensor | None, device: torch.device) -> Callable[[], Growth]:
    """Makes a fresh growth of `tree` for each step. token_map: target ids of the draft
    vocabulary.
    """
    if isinstance(tree, DynamicTree):
        return partial(DynamicGrowth, tree, token_map)
    return partial(FixedGrowth, FixedPlan(tree, device), token_map)


class DynamicGrowth:
    """EAGLE-2's expand and rerank (arXiv 2406.16858, section 4).

    A candidate's score is the sum of the log-probabilities on its way from the root. Of equal
    scores the earlier candidate wins, so a parent always comes before its children.
    """

    def __init__(self, limits: DynamicTree, token_map: Tensor | None) -> None:
        self.limits, self.token_map = limits, token_map
        self.tokens: list[Tensor] = []  # of all candidates, a tensor per level: (B, C)
        self.scores: list[Tensor] = []
        self.parents: list[Tensor] = []  # candidate numbers; -1 is the root
        self.frontier_BF: Tensor | None = None  # candidate numbers
        self.levels = self.candidates = 0

    def add(self, logits_BFv: Tensor) -> bool:
        """Every node of the frontier brings its `top_k` best children."""
        children = min(self.limits.top_k, logits_BFv.shape[-1])
        best = torch.log_softmax(logits_BFv, dim=-1).topk(children)
        # logits that are no numbers say nothing; as scores they would put children before parents
        scores_BFk = best.values.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if self.frontier_BF is None:
            self.parents.append(best.indices.new_full((len(logits_BFv), children), -1))
        else:
            scores_BFk = scores_BFk + self.scores_BF[:, :, None]
            self.parents.append(self.frontier_BF[:, :, None].expand(-1, -1, children).flatten(1))
        ids_BFk = best.indices if self.token_map is None else self.token_map[best.indices]
        self.tokens.append(ids_BFk.flatten(1))
        self.scores.append(scores_BFk.flatten(1))
        self.levels += 1
        if self.levels == self.limits.depth:
            return False
        self._choose(children)
        return True

    def _choose(self, children: int) -> None:
        """The best `top_k` candidates of the newest level are expanded."""
        tokens_BC, scores_BC = self.tokens[-1], self.scores[-1]
        width = min(self.limits.top_k, scores_BC.shape[1])
        self.scores_BF, chosen_BF = scores_BC.topk(width)
        self.tokens_BF = tokens_BC.gather(1, chosen_BF)
        self.parents_BF = chosen_BF // children
        self.frontier_BF = self.candidates + chosen_BF
        self.candidates += tokens_BC.shape[1]

    def tree(self, roots_B: Tensor) -> TokenTree:
        """Root and the best `draft_nodes` candidates."""
        scores_BC = torch.cat(self.scores, dim=1)
        nodes = min(self.limits.draft_nodes, scores_BC.shape[1])
        order_BC = scores_BC.sort(dim=1, descending=True, stable=True).indices
        kept_BN = order_BC[:, :nodes].sort(dim=1).values
        place_BC = torch.zeros_like(order_BC)  # the node that each kept candidate becomes
        numbers_N = torch.arange(1, nodes + 1, device=kept_BN.device)
        place_BC.scatter_(1, kept_BN, numbers_N.expand_as(kept_BN))
        parents_BN = torch.cat(self.parents, dim=1).gather(1, kept_BN)
        nodes_BN = place_BC.gather(1, parents_BN.clamp(min=0)).masked_fill(parents_BN < 0, 0)
        tokens_BN = torch.cat(self.tokens, dim=1).gather(1, kept_BN)
        root_B1 = torch.full_like(roots_B, -1)[:, None]
        return TokenTree(
            torch.cat([roots_B[:, None], tokens_BN], dim=1),
            Topology(torch.cat([root_B1, nodes_BN], dim=1), self.limits.depth),
        )


class FixedPlan:
    """Which ranks a fixed tree takes at each level; its nodes stand level by level."""

    def __init__(self, shape: TreeShape, device: torch.device) -> None:
        paths = sorted(shape.paths, key=lambda path: (len(path), path))
        inner = {path[:-1] for path in paths}
        self.topology = TreeShape(tuple(paths)).topology(device)
        self.levels: list[FixedLevel] = []
        frontier: list[tuple[int, ...]] = [()]
        for depth in range(1, shape.depth + 1):
            place = {path: number for number, path in enumerate(frontier)}
            nodes = [path for path in paths if len(path) == depth]
            frontier = [path for path in nodes if path in inner]
            width = 1 + max(path[-1] for path in nodes)
            numbers = (
                [place[path[:-1]] * width + path[-1] for path in nodes],
                [number for number, path in enumerate(nodes) if path in inner],
                [place[path[:-1]] for path in frontier],
            )
            tensors = (torch.tensor(each, dtype=torch.long, device=device) for each in numbers)
            self.levels.append(FixedLevel(width, *tensors))


@dataclass(frozen=True)
class FixedLevel:
    """width: guesses needed of each expanded node. picks_C: the places among all those guesses that
    become nodes. expanded_F: which nodes are expanded next; parents_F: the places of their parents
    among the nodes expanded before.
    """

    width: int
    picks_C: Tensor
    expanded_F: Tensor
    parents_F: Tensor


class FixedGrowth:
    """Fills a fixed tree of ranks; the same nodes are expanded in every step."""

    def __init__(self, plan: FixedPlan, token_map: Tensor | None) -> None:
        self.plan, self.token_map = plan, token_map
        self.tokens: list[Tensor] = []  # a tensor per level: (B, C)

    def add(self, logits_BFv: Tensor) -> bool:
        """Every node of the frontier brings the children that the shape has."""
        if not self.plan.levels:
            return False
        level = self.plan.levels[len(self.tokens)]
        ids_BC = logits_BFv.topk(level.width).indices.flatten(1)
        if ids_BC.shape[1] > len(level.picks_C):  # else every guess becomes a node
            ids_BC = ids_BC.index_select(1, level.picks_C)
        tokens_BC = ids_BC if self.token_map is None else self.token_map[ids_BC]
        self.tokens.append(tokens_BC)
        self.tokens_BF = tokens_BC
        if tokens_BC.shape[1] > len(level.expanded_F):
            self.tokens_BF = tokens_BC.index_select(1, level.expanded_F)
        self.parents_BF = level.parents_F.expand_as(self.tokens_BF)
        return len(self.tokens) < len(self.plan.levels)

    def tree(self, roots_B: Tensor) -> TokenTree:
        """Root and all nodes of the shape."""
        tokens_BN = torch.cat([roots_B[:, None], *self.tokens], dim=1)
        return TokenTree(tokens_BN, self.plan.topology)
