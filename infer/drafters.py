"""Drafters without weights: continuations of the text's own repeats (`NGram`), and one tree out of
several drafters' (`Merged`); and the names of all drafters (`open_drafts`).

The two grow their trees on the host, row by row: a `RowTree` is the tree of one row, and `stacked`
makes one TokenTree out of those of a batch.

Legend: B batch, N tree nodes, A committed tokens of a step, D feature width.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch

from draftheads.heads.base import Committed, Drafter
from draftheads.heads.hub import HeadFolder, open_head
from draftheads.heads.target import Target
from draftheads.heads.tree import DynamicTree, TokenTree, Topology, Tree
from draftheads.infer.draft_model import DraftModel, EarlyExit
from draftheads.infer.engine import DrafterSource


class RowTree:
    """A growing tree of one row. Node 0 is the root; siblings have distinct tokens."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> RowTree:
        """The tree of these nodes, equal siblings once."""
        tree, places = cls(tokens[0]), [0]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            places.append(tree.add(places[parent], token))
        return tree

    def add(self, parent: int, token: int) -> int:
        """The child of `parent` that has this token, a new one if there is none."""
        child = self._children.setdefault((parent, token), len(self.tokens))
        if child == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
        return child

    def agreed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens lie on a path from the root, up to the first that does not."""
        node = 0
        for count, token in enumerate(tokens):
            node = self._children.get((node, token), -1)
            if node < 0:
                return count
        return len(tokens)

    def only(self, nodes: Iterable[int]) -> RowTree:
        """The tree of the root and these nodes, whose parents must be among them."""
        tree, places = RowTree(self.tokens[0]), {0: 0}
        for node in sorted(nodes):
            places[node] = tree.add(places[self.parents[node]], self.tokens[node])
        return tree


def stacked(rows: Sequence[RowTree], device: torch.device) -> TokenTree:
    """The trees of a batch as one. Smaller ones are padded with further copies of their first
    child: leaves after the original, so no acceptance rule prefers them.
    """
    nodes = max(len(row.tokens) for row in rows)
    tokens, parents = [], []
    for row in rows:
        padding = nodes - len(row.tokens)
        tokens.append(row.tokens + row.tokens[:2][-1:] * padding)
        parents.append(row.parents + [0] * padding)
    height = max(max(row.depths) for row in rows)
    topology = Topology(torch.tensor(parents, device=device), height)
    return TokenTree(torch.tensor(tokens, device=device), topology)


@dataclass(frozen=True)
class NGram:
    """Prompt lookup: drafts what followed the newest tokens where they occurred before, and nothing
    where they did not.

    tree: limits; `top_k` is the number of earlier places, the newest first, and `depth` that of
    tokens copied from each. longest, shortest: lengths of the suffix that is looked up; the longest
    that occurred before counts. Raises ValueError for lengths out of order.
    """

    tree: DynamicTree = DynamicTree(draft_nodes=16, depth=16, top_k=4)
    longest: int = 3
    shortest: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"n-grams: expected 1 <= shortest <= longest, got {self.shortest} and "
                f"{self.longest}; swap or raise them"
            )

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a fixed tree."""
        _refuse_fixed(tree, "n-grams")

    def drafter(self, target: Target, tree: Tree | None = None) -> NGramDrafter:
        """A new drafter, for one generation."""
        limits = self.tree if tree is None else tree
        assert isinstance(limits, DynamicTree)
        return NGramDrafter(limits, self.longest, self.shortest)


class NGramDrafter:
    """Looks up the end of each row's text in the text."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, limits: DynamicTree, longest: int, shortest: int) -> None:
        self.limits, self.lengths = limits, range(shortest, longest + 1)
        self.texts: list[_Text] = []

    def propose(self, committed: Committed) -> TokenTree:
        if not self.texts:
            self.texts = [_Text(self.lengths, self.limits.top_k) for _ in committed.counts]
        news = committed.tokens_BA.tolist()
        rows = []
        for text, new, count in zip(self.texts, news, committed.counts, strict=True):
            text.append(new[:count])
            found = text.continuations(self.limits.depth) if count else []
            rows.append(most_shared(text.tokens[-1], found, self.limits.draft_nodes))
        return stacked(rows, committed.tokens_BA.device)

    def rewind(self, length: int) -> None:
        kept = self.texts[0].tokens[:length]
        self.texts = [_Text(self.lengths, self.limits.top_k)]
        self.texts[0].append(kept)


class _Text:
    """The text of one row, and the newest places after each of its n-grams."""

    def __init__(self, lengths: range, places: int) -> None:
        self.tokens: list[int] = []
        self._lengths = lengths
        self._after: dict[tuple[int, ...], deque[int]] = defaultdict(lambda: deque(maxlen=places))

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for length in self._lengths:
                if length <= end:
                    self._after[tuple(self.tokens[end - length :])].append(end)
            self.tokens.append(token)

    def continuations(self, depth: int) -> list[list[int]]:
        """`depth` tokens from each place after the longest known suffix, newest place first.

        A copy that reaches the end of the text continues with what it has copied.
        """
        for length in reversed(self._lengths):
            if places := self._after.get(tuple(self.tokens[-length:])):
                copies = [self.tokens[place : place + depth] for place in reversed(places)]
                return [list(islice(cycle(copy), depth)) for copy in copies]
        return []


def most_shared(root: int, continuations: Sequence[Sequence[int]], nodes: int) -> RowTree:
    """The `nodes` nodes that most continuations pass through; of equals the shallower ones, then
    those of earlier continuations.
    """
    tree, shared = RowTree(root), [0]
    for tokens in continuations:
        node = 0
        for token in tokens:
            node = tree.add(node, token)
            shared += [0] * (node == len(shared))
            shared[node] += 1
    order = sorted(range(1, len(shared)), key=lambda node: (-shared[node], tree.depths[node]))
    return tree.only(order[:nodes])


@dataclass(frozen=True)
class Merged:
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


def _refuse_fixed(tree: Tree, what: str) -> None:
    if not isinstance(tree, DynamicTree):
        raise ValueError(
            f"{what}: expected limits of a tree, got a fixed tree; use one like "
            "nodes=8,depth=8,top_k=4"
        )


MERGED_NGRAM = NGram(longest=4, shortest=4)
"""Beside a head, only a long repeat is worth the nodes that the head would fill."""


@dataclass(frozen=True)
class NamedDrafts:
    """What a --head option names; so far, only the config.json of its heads has been read."""

    name: str
    folders: list[HeadFolder]
    load: Callable[[Target], DrafterSource]

    @property
    def target(self) -> tuple[str, str | None]:
        """Name and revision of the target that its heads record. Raises ValueError if none does."""
        if not self.folders:
            raise ValueError(
                f"--head {self.name} does not say which target it is for; pass --target"
            )
        return self.folders[0].target


def open_drafts(sources: Sequence[str]) -> dict[str, NamedDrafts]:
    """Find what each --head option names, by the shortest names that differ. Raises as `open_head`,
    and ValueError for an early exit without a number.
    """
    drafts = list(map(named_drafts, sources))
    names = [each.name for each in drafts]
    names = names if len(set(names)) == len(names) else list(sources)
    return dict(zip(names, drafts, strict=True))


def named_drafts(source: str) -> NamedDrafts:
    """Find what one --head option names; + joins parts, unless it belongs to the name of a folder.
    Raises as `open_drafts`.
    """
    if os.path.isdir(os.path.expanduser(source)) or "+" not in source:
        return _part(source, NGram())
    parts = [_part(text, MERGED_NGRAM) for text in source.split("+")]
    return NamedDrafts(
        "+".join(part.name for part in parts),
        [folder for part in parts for folder in part.folders],
        lambda target: Merged([part.load(target) for part in parts]),
    )


def _part(text: str, ngram: NGram) -> NamedDrafts:
    kind, _, value = text.partition(":")
    if text == "ngram":
        return NamedDrafts(text, [], lambda _: ngram)
    if kind == "model":
        return NamedDrafts(
            f"model:{Path(value).name}", [], lambda target: _draft_model(value, target)
        )
    if kind == "early-exit":
        if not value.isdecimal():
            raise ValueError(
                f"head {text}: expected a number of layers, as in early-exit:4, got {value!r}"
            )
        return NamedDrafts(text, [], lambda target: _checked(EarlyExit(int(value)), target))
    folder = open_head(text)
    return NamedDrafts(Path(text).name, [folder], folder.load)


def _draft_model(path: str, target: Target) -> DrafterSource:
    dtype = str(target.dtype).removeprefix("torch.")
    return _checked(DraftModel(Target.load(path, dtype=dtype, device=str(target.device))), target)


def _checked(drafts: DrafterSource, target: Target) -> DrafterSource:
    """The same. Raises ValueError for a target that it cannot draft for."""
    drafts.drafter(target)
    return drafts
