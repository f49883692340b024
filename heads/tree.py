"""Token trees: what a drafter proposes and the target verifies in one forward pass.

Node 0 is the root: the last committed token, at depth 0. Parents precede their children, so node
order is also depth order along every path.

Legend: B batch, N tree nodes, K draft depth, R ranks, M observed continuations.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, product
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Path = tuple[int, ...]
"""Ranks from the root to a node. (0, 2): the best token of depth 1, then the third best."""

NODES = 8
"""Draft nodes of a new head's tree. On CPUs, where it was measured, larger ones are seldom faster:
60 nodes cost 3.6 plain steps of a model of 0.6B in bfloat16, 8 nodes 1.3 (docs/tuning.md).
"""
ORDERED = 64
"""Paths that are known of a fixed tree, from which larger ones are cut."""
MOST_NODES = 1024
"""Larger trees never pay off, and their masks take minutes to make: a head of somebody else may ask
for one.
"""
MOST_DEPTH = 128
"""Likewise: some heads run once per level."""
MOST_CANDIDATES = 1 << 16
"""Likewise, of a search."""


@dataclass(eq=False)
class Topology:
    """The shape of a tree, without its tokens."""

    parents_BN: Tensor
    """int64 (B, N), or (1, N) when all rows share it. -1 for the root, and for nodes that nobody
    drafted: they come last, and pad a row to the size of others.
    """
    height: int | None = None
    """An upper bound on the depth, if known."""
    ancestors_BNN: Tensor = field(init=False)
    """The attention mask of the tree, bool (B|1, N, N): [b, i, j] is True if j is i or an ancestor
    of i.
    """
    below_root_BNN: Tensor = field(init=False)
    """bool (B|1, N, N): the same without the root."""
    is_drafted_BN: Tensor = field(init=False)
    """bool (B|1, N): neither the root nor padding."""
    levels_BN: Tensor = field(init=False)
    """int64 (B|1, N): number of nodes from the root to each node, both included."""
    depths_BN: Tensor = field(init=False)
    """int64 (B|1, N), 0 for the root. A node's position is its row's length plus its depth."""
    parent_or_root_BN: Tensor = field(init=False)
    """int64 (B|1, N): the parent of each node, at which the target predicts it; the root has none,
    and gets itself.
    """

    def __post_init__(self) -> None:
        nodes = self.parents_BN.shape[1]
        self.parent_or_root_BN = self.parents_BN.clamp(min=0)
        reach = torch.zeros(*self.parents_BN.shape, nodes, device=self.parents_BN.device)
        reach.scatter_(2, self.parent_or_root_BN[..., None], 1.0)
        reach[:, 0] = 0.0
        reach += torch.eye(nodes, device=reach.device)
        # squaring the parent relation doubles its reach: log2(depth) products, no loop over nodes
        for _ in range((self.height or max(nodes - 1, 1)).bit_length()):
            reach = (reach @ reach).clamp_(max=1.0)
        self.ancestors_BNN = reach > 0
        self.below_root_BNN = F.pad(self.ancestors_BNN[..., 1:], (1, 0))
        self.is_drafted_BN = self.parents_BN >= 0
        self.levels_BN = self.ancestors_BNN.sum(-1)
        self.depths_BN = self.levels_BN - 1

    def select(self, rows: Tensor) -> Topology:
        """The trees of these rows."""
        return self if len(self.parents_BN) == 1 else Topology(self.parents_BN[rows], self.height)


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens on a topology."""

    tokens_BN: Tensor
    """int64; column 0 holds the last committed token of each row."""
    topology: Topology

    def select(self, rows: Tensor) -> TokenTree:
        """The trees of these rows."""
        return TokenTree(self.tokens_BN[rows], self.topology.select(rows))

    def drafted(self) -> list[int]:
        """Counts the nodes of each row that were drafted."""
        rows, nodes = self.tokens_BN.shape
        if nodes == 1:  # the root: no device sync
            return [0] * rows
        counts: list[int] = self.topology.is_drafted_BN.sum(1).expand(rows).tolist()
        return counts


@dataclass(frozen=True, repr=False)
class StaticTree:
    """A fixed tree, as a prefix-closed set of paths of ranks.

    Paths are ordered from most to least useful, so that `resized` returns a good smaller tree. If
    a path precedes its parent, all paths are sorted by depth. Raises ValueError for duplicate or
    orphaned paths and for more than MOST_NODES or MOST_DEPTH.
    """

    paths: tuple[Path, ...]
    more: tuple[Path, ...] = field(default=(), compare=False, repr=False)
    """The next most useful paths, none of which is drafted: `resized` may add them."""

    def __post_init__(self) -> None:
        _check_size(len(self.paths), max(map(len, self.paths), default=0))
        paths = tuple(tuple(map(int, path)) for path in self.paths)
        index = {path: number for number, path in enumerate(paths)}
        if len(index) != len(paths):
            raise ValueError("expected distinct tree paths, got one twice; remove the duplicate")
        for path in paths:
            if not path or min(path) < 0:
                raise ValueError(f"tree path {list(path)}: expected one or more ranks from 0 on")
            if len(path) > 1 and path[:-1] not in index:
                raise ValueError(
                    f"tree path {list(path)} has no parent; add {list(path[:-1])} to the tree"
                )
        if any(index.get(path[:-1], -1) > number for path, number in index.items()):
            paths = tuple(sorted(paths, key=by_depth))
        object.__setattr__(self, "paths", paths)

    def __repr__(self) -> str:
        return f"StaticTree({self.draft_nodes} draft nodes, depth {self.depth})"

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> StaticTree:
        """The full expansion <k_1, k_2, ...>: nodes at depth d - 1 have their k_d best children."""
        if min(widths, default=1) < 1:
            raise ValueError(f"tree widths {list(widths)}: expected 1 or more at each depth")
        _check_size(sum(accumulate(widths, mul)), len(widths))
        paths: list[Path] = []
        for depth in range(1, len(widths) + 1):
            paths += product(*map(range, widths[:depth]))
        return cls(tuple(paths))

    @classmethod
    def best_first(cls, accuracies_KR: Sequence[Sequence[float]], nodes: int) -> StaticTree:
        """The `nodes` most probable draft nodes if depths were independent.

        `accuracies_KR[k][r]`: probability that the token of rank r at depth k + 1 is right. Use
        `most_frequent` if joint observations exist.
        """
        best: list[Path] = []
        heap: list[tuple[float, Path]] = [(-1.0, ())]  # negative probability
        while heap and len(best) <= nodes:
            negative, path = heapq.heappop(heap)
            best.append(path)
            if len(path) < len(accuracies_KR):
                for rank, accuracy in enumerate(accuracies_KR[len(path)]):
                    heapq.heappush(heap, (negative * accuracy, (*path, rank)))
        return cls(tuple(best[1:]))

    @classmethod
    def unfitted(cls, depth: int) -> StaticTree:
        """The most probable nodes for a head of which nothing is known yet."""
        chances = [0.6**power for power in range(1, depth + 10)]
        order = cls.best_first([chances[k : k + 10] for k in range(depth)], ORDERED)
        return order.resized(NODES)

    @classmethod
    def most_frequent(cls, ranks_MK: Tensor, nodes: int) -> StaticTree:
        """The `nodes` paths that were right most often: the best static tree for these
        continuations. It is prefix-closed, as no path is right more often than its parent.

        ranks_MK: int64, the rank of the true token at each depth; -1 if it is outside the ranks
        kept.
        """
        counts = path_counts(ranks_MK)
        best = sorted(counts, key=lambda path: (-counts[path], by_depth(path)))
        return cls(tuple(best[: max(nodes, ORDERED)])).resized(nodes)

    def resized(self, nodes: int) -> StaticTree:
        """The `nodes` most useful paths that are known, drafted or not."""
        return StaticTree(self.order[:nodes], self.order[nodes:])

    @property
    def order(self) -> tuple[Path, ...]:
        """All paths that are known, from most to least useful."""
        return self.paths + self.more

    def fitted(self, ranks_MK: Tensor, nodes: int) -> StaticTree:
        """`most_frequent`, or this tree if no first draft token was right."""
        has_ranks = bool((ranks_MK[:, 0] >= 0).any())
        return StaticTree.most_frequent(ranks_MK, nodes) if has_ranks else self

    def to_json(self) -> list[list[int]]:
        """The input of `tree_from_json`."""
        return [list(path) for path in self.paths]

    @property
    def draft_nodes(self) -> int:
        """Tokens proposed per step."""
        return len(self.paths)

    @property
    def nodes(self) -> int:
        """Tokens verified per step, root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Length of the longest path, in draft tokens."""
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """Number of ranks in use: the greatest one plus 1."""
        return max(map(max, self.paths), default=-1) + 1

    def topology(self, device: torch.device | str | None = None) -> Topology:
        """The topology, shared by all rows."""
        index = {path: node for node, path in enumerate(self.paths, start=1)}
        parents = [-1, *(index.get(path[:-1], 0) for path in self.paths)]
        return Topology(torch.tensor([parents], device=device), self.depth)

    def expected_tokens(self, ranks_MK: Tensor) -> float:
        """Mean tokens per step on the observed continuations, the target's own token included."""
        counts = path_counts(ranks_MK)
        return 1.0 + sum(counts[path] for path in self.paths) / max(len(ranks_MK), 1)


@dataclass(frozen=True)
class DynamicTree:
    """Limits of a tree that is rebuilt in each step from the drafter's probabilities (EAGLE-2,
    arXiv 2406.16858).

    Down to `depth`, the `top_k` most probable nodes of each level are expanded into their `top_k`
    best tokens. The `draft_nodes` most probable of all these candidates are verified. Raises
    ValueError if there are fewer candidates than that.
    """

    draft_nodes: int = NODES
    depth: int = 8
    top_k: int = 4

    def __post_init__(self) -> None:
        if min(self.draft_nodes, self.depth, self.top_k) < 1:
            raise ValueError(f"{self}: expected 1 or more of each")
        _check_size(max(self.draft_nodes, self.top_k), self.depth)
        if self.candidates > MOST_CANDIDATES:
            raise ValueError(
                f"{self}: expected a search among at most {MOST_CANDIDATES} candidates, got "
                f"{self.candidates}; lower depth or top_k"
            )
        if self.draft_nodes > self.candidates:
            raise ValueError(
                f"a dynamic tree of depth {self.depth} and top_k {self.top_k} has "
                f"{self.candidates} candidates, got {self.draft_nodes} draft nodes; use fewer, or "
                "raise top_k"
            )

    def __str__(self) -> str:
        return f"nodes={self.draft_nodes},depth={self.depth},top_k={self.top_k}"

    @property
    def nodes(self) -> int:
        """Tokens verified per step, root included."""
        return self.draft_nodes + 1

    @property
    def candidates(self) -> int:
        """Nodes among which the search chooses."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    def resized(self, nodes: int) -> DynamicTree:
        """The same search with more nodes, as far as it has candidates, or with fewer, which limit
        depth and top_k too.
        """
        nodes = min(nodes, self.candidates)
        return DynamicTree(nodes, min(self.depth, nodes), min(self.top_k, nodes))

    def fitted(self, ranks_MK: Tensor, nodes: int) -> DynamicTree:
        """This tree: it has nothing to fit."""
        return self

    def to_json(self) -> dict[str, int]:
        """The input of `tree_from_json`."""
        return asdict(self)


Tree = StaticTree | DynamicTree


def check_fits(tree: Tree, vocabulary: int, depth: int | None = None) -> None:
    """Raise ValueError for a tree that a head cannot fill.

    vocabulary: number of tokens that the head can draft. depth: how many tokens ahead it predicts;
    None: any number.
    """
    if depth is not None and tree.depth > depth:
        raise ValueError(
            f"the tree is {tree.depth} deep, the head predicts only {depth} tokens ahead; use a "
            "shallower tree, or a head with more depth"
        )
    if isinstance(tree, StaticTree) and tree.width > vocabulary:
        raise ValueError(
            f"the tree uses the {tree.width} best tokens, the head knows only {vocabulary}; use a "
            "narrower tree"
        )


def tree_from_json(value: Any) -> Tree:
    """The tree that `to_json` wrote. Raises ValueError for anything else."""
    if isinstance(value, dict):
        if value.keys() <= {"draft_nodes", "depth", "top_k"} and _are_ints([*value.values()]):
            return DynamicTree(**value)
    elif isinstance(value, list) and all(map(_are_ints, value)):
        return StaticTree(tuple(map(tuple, value)))
    raise ValueError(
        f"tree {value!r:.200}: expected widths like 4,2,1, paths like [[0],[0,0],[1]], or limits "
        "of a dynamic tree like nodes=16,depth=5,top_k=4"
    )


def parse_tree(text: str) -> Tree:
    """The tree of a command-line option.

    "4,2,1" is the expansion <4, 2, 1>, "[[0],[0,0],[1]]" a list of paths, and
    "nodes=16,depth=5,top_k=4" a dynamic tree, each part of which is optional. Raises ValueError.
    """
    value: Any = None
    try:
        if "=" in text:
            fields = dict(part.strip().split("=") for part in text.split(","))
            value = {name.replace("nodes", "draft_nodes"): int(fields[name]) for name in fields}
        else:
            value = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except (ValueError, RecursionError):
        pass  # refused below
    if value and _are_ints(value):
        return StaticTree.from_widths(value)
    return tree_from_json(value or text)


def _are_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _check_size(nodes: int, depth: int) -> None:
    if nodes > MOST_NODES:
        raise ValueError(f"expected a tree of at most {MOST_NODES} draft nodes, got {nodes}")
    if depth > MOST_DEPTH:
        raise ValueError(f"expected a tree of at most {MOST_DEPTH} levels, got {depth}")


def path_counts(ranks_MK: Tensor) -> Counter[Path]:
    """Counts how often each path of ranks was right; ranks_MK as in `StaticTree.most_frequent`."""
    counts: Counter[Path] = Counter()
    for path, count in Counter(map(tuple, ranks_MK.tolist())).items():
        for depth in range(1, len(path) + 1):
            if path[depth - 1] < 0:
                break
            counts[path[:depth]] += count
    return counts


def by_depth(path: Path) -> tuple[int, Path]:
    """A key to sort paths by: shallow ones first, then the most probable."""
    return len(path), path
