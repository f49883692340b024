"""One tree out of several drafters' trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.target import Target
from draftheads.heads.tree import DynamicTree, TokenTree, Tree
from draftheads.infer.drafters.rows import RowTree, _refuse_fixed, stacked
from draftheads.infer.engine import DrafterSource


@dataclass(frozen=True)
class Merged(DrafterSource):
    """One tree out of several drafters' trees (SpecInfer, arXiv 2305.09781, section 3): each path
    once. With fewer nodes than they propose, the parts take turns.

    parts: heads and other sources of drafters.
    """

    parts: Sequence[DrafterSource]

    @property
    def tree(self) -> DynamicTree:
        """Room for all nodes of all parts."""
        trees = [part.tree for part in self.parts]
        nodes = sum(tree.draft_nodes for tree in trees)
        return DynamicTree(nodes, max(tree.depth for tree in trees), top_k=nodes)

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a fixed tree."""
        _refuse_fixed(tree, "merged drafters")

    def drafter(self, target: Target, tree: Tree | None = None) -> MergedDrafter:
        """A new drafter, for one generation. tree: only its number of nodes counts."""
        nodes = (tree or self.tree).draft_nodes
        drafters = [part.drafter(target, part.tree.head(nodes)) for part in self.parts]
        return MergedDrafter(drafters, nodes)


class MergedDrafter:
    """Asks all its parts in each step, and merges what they propose. In each row, parts that were
    right lately have more of the nodes.
    """

    cache = None  # each part has its own

    def __init__(self, parts: Sequence[Drafter], nodes: int) -> None:
        self.parts, self.nodes = parts, nodes
        self.feature_layers = sum((part.feature_layers for part in parts), ())
        self.rows: list[tuple[RowTree, ...]] = []  # of each part, the newest
        self.weights: list[list[float]] = []  # of each row and part

    def propose(self, committed: Committed) -> TokenTree:
        self._learn(committed)
        features_BAD, proposed, end = committed.features_BAD, [], 0
        width = features_BAD.shape[-1] // max(len(self.feature_layers), 1)
        for part in self.parts:
            start, end = end, end + width * len(part.feature_layers)
            tree = part.propose(replace(committed, features_BAD=features_BAD[:, :, start:end]))
            tokens, parents = tree.tokens_BN, tree.topology.parents_BN.expand_as(tree.tokens_BN)
            proposed.append(map(RowTree.of, tokens.tolist(), parents.tolist()))
        self.rows = list(zip(*proposed, strict=True))
        self.weights = self.weights or [[1.5] * len(self.parts) for _ in self.rows]
        each = zip(self.rows, self.weights, strict=True)
        rows = [union(trees, self.nodes, weights) for trees, weights in each]
        return stacked(rows, committed.tokens_BA.device)

    def rewind(self, length: int) -> None:
        self.rows = []
        for part in self.parts:
            part.rewind(length)

    def _learn(self, committed: Committed) -> None:
        """Weights are half a token more than a mean, over recent drafts, of the tokens that were
        right.
        """
        written = zip(committed.tokens_BA.tolist(), committed.counts, strict=True)
        for trees, weights, (tokens, count) in zip(self.rows, self.weights, written, strict=False):
            for part, tree in enumerate(trees):
                if count and len(tree.tokens) > 1:
                    weights[part] += (tree.agreed(tokens[:count]) + 0.5 - weights[part]) / 2


def union(trees: Sequence[RowTree], nodes: int, weights: Sequence[float] = ()) -> RowTree:
    """All paths of these trees, each once. Up to `nodes` nodes, the trees take turns, one of twice
    the weight twice as often; each gives its nodes from the root down.
    """
    whole, places = RowTree(trees[0].tokens[0]), [{0: 0} for _ in trees]
    queue = []
    for part, tree in enumerate(trees):
        order = sorted(range(1, len(tree.tokens)), key=tree.depths.__getitem__)
        weight = weights[part] if weights else 1.0
        queue += [(turn / weight, part, node) for turn, node in enumerate(order, start=1)]
    for _, part, node in sorted(queue, key=lambda entry: entry[:2]):
        if len(whole.tokens) <= nodes:
            parent = places[part][trees[part].parents[node]]
            places[part][node] = whole.add(parent, trees[part].tokens[node])
    return whole
