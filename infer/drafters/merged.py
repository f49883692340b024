"""Merges the trees of several drafters into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftheads.heads.base import DraftHead
from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, TokenTree, Tree
from draftheads.infer.drafters.draft_model import ModelDrafter
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.paths import TokenPath, refuse_fixed, row_paths, stacked
from draftheads.infer.sources import DrafterSource, NoDraft


@dataclass(frozen=True)
class Merged(DrafterSource):
    """Merges the trees of several drafters (SpecInfer, arXiv 2305.09781, section 3), each path
    once. If they propose more nodes than the limit, the parts take turns.

    parts: heads and other sources of drafters; n-grams are moved to the beginning, heads to the
    end. Raises TypeError for anything else or no part.
    """

    parts: Sequence[DrafterSource]

    def __post_init__(self) -> None:
        by_cost = sorted(
            self.parts, key=lambda part: (isinstance(part, DraftHead), not isinstance(part, NGram))
        )
        object.__setattr__(self, "parts", tuple(by_cost))
        wrong = [part for part in self.parts if isinstance(part, type)]
        if wrong or not self.parts:
            raise TypeError(
                f"expected draft heads and other sources of drafters, got {self.parts!r:.80}; "
                "load_head and load_pair load heads by name"
            )

    @property
    def tree(self) -> DynamicTree:
        """A tree with room for the nodes of the largest part."""
        trees = [part.tree for part in self.parts]
        nodes = max(tree.draft_nodes for tree in trees)
        return DynamicTree(nodes, max(tree.depth for tree in trees), top_k=nodes)

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a fixed tree."""
        refuse_fixed(tree, "merged drafters")

    def drafter(self, target: Target, tree: Tree | None = None) -> MergedDrafter:
        """A new drafter, for one generation. Of `tree`, only the number of nodes counts."""
        nodes = (tree or self.tree).draft_nodes
        drafters = []
        for part in self.parts:
            own = min(nodes, part.tree.draft_nodes)
            drafters.append(part.drafter(target, part.tree.resized(own)))
        return MergedDrafter(drafters, nodes)


class MergedDrafter:
    """Merges the trees of its parts. In each row, parts that were right lately get more of the
    nodes. If an earlier part other than a head was right most and proposes again, models and heads
    do not draft for that row, and do not run if this holds for all rows: copies of repeated text
    cost nothing to draft.

    parts: heads, the only ones that read features, come last.
    """

    cache = None  # each part has its own

    def __init__(self, parts: Sequence[Drafter], nodes: int) -> None:
        self.parts = parts
        self.nodes = nodes
        self.feature_layers = sum((part.feature_layers for part in parts), ())
        self.rows: list[tuple[list[TokenPath], ...]] = []  # the newest paths of each row and part
        self.weights: list[list[float]] = []  # of each row and part

    def propose(self, committed: Committed) -> TokenTree:
        # a weight is half a token plus the mean number of correct tokens over recent drafts
        written = zip(committed.tokens_BC.tolist(), committed.counts, strict=True)
        for trees, weights, (tokens, count) in zip(self.rows, self.weights, written, strict=False):
            for place, paths in enumerate(trees):
                if count and paths:
                    weights[place] += (agreed(paths, tokens[:count]) + 0.5 - weights[place]) / 2
        self.weights = self.weights or [[1.5] * len(self.parts) for _ in committed.counts]
        features_BCD = committed.features_BCD
        width = features_BCD.shape[-1] // max(len(self.feature_layers), 1)
        proposed: list[list[list[TokenPath]]] = []
        end = 0
        for part in self.parts:
            start = end
            end += width * len(part.feature_layers)
            is_led = [False] * len(committed.counts)
            if part.feature_layers or isinstance(part, ModelDrafter):
                is_led = self._are_led(proposed, committed.counts)
            if all(is_led):
                if isinstance(part, ModelDrafter):
                    part.skip(committed)
                part = NoDraft(part if part.feature_layers else None)
            tree = part.propose(replace(committed, features_BCD=features_BCD[:, :, start:end]))
            # the draft of a row does not depend on other rows
            pairs = zip(row_paths(tree), is_led, strict=True)
            proposed.append([[] if led else own for own, led in pairs])
        self.rows = list(zip(*proposed, strict=True))
        rows = [
            union(paths, weights)[: self.nodes]
            for paths, weights in zip(self.rows, self.weights, strict=True)
        ]
        roots_B = committed.last_tokens_B()
        return stacked(roots_B.tolist(), rows, roots_B.device)

    def _are_led(self, proposed: Sequence[list[list[TokenPath]]], counts: list[int]) -> list[bool]:
        """For each row: True if it has ended, or if the part with the largest weight (the first of
        equals) is not a head and has already proposed.
        """
        led = []
        for row, weights in enumerate(self.weights):
            leader = weights.index(max(weights))
            is_late = self.parts[leader].feature_layers or leader >= len(proposed)
            led.append(not counts[row] or not is_late and bool(proposed[leader][row]))
        return led

    def rewind(self, length: int) -> None:
        # start like a new drafter, so that a seed gives the same text again
        self.rows = []
        self.weights = []
        for part in self.parts:
            part.rewind(length)


def agreed(paths: Sequence[TokenPath], tokens: Sequence[int]) -> int:
    """The number of these tokens that lie on one path from the root, up to the first that does not.
    If a path is in the tree, so are the paths to its parents.
    """
    tree = set(paths)
    path = tuple(tokens)
    return sum(path[:depth] in tree for depth in range(1, len(path) + 1))


def union(parts: Sequence[Sequence[TokenPath]], weights: Sequence[float]) -> list[TokenPath]:
    """All paths of these trees, each once. The trees take turns, in proportion to their weights;
    each gives its paths from the root down.
    """
    turns = sorted(
        (turn / weights[part], part, path)
        for part, paths in enumerate(parts)
        for turn, path in enumerate(sorted(paths, key=len), start=1)
    )
    return list(dict.fromkeys(path for _, _, path in turns))
