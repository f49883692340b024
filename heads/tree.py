"""Token trees: what a drafter proposes and the target verifies in one forward pass.

Node 0 is the root (the last committed token, depth 0); parents precede their children, so a path in
node order is also in depth order.

Legend: B batch, N tree nodes, K draft depth, R ranks, M observed continuations.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import mul
from typing import Any

import torch
from torch import Tensor

Path = tuple[int, ...]
"""Ranks from the root to a node: (0, 2) is the third guess of depth 2 after the best of depth 1."""

MOST_NODES = 4096
"""More are never worth verifying, and would need gigabytes for the mask among them."""


@dataclass(frozen=True)
class Topology:
    """Who is whose parent. parents_BN: int64 of shape (B, N), or (1, N) when all rows share it;
    parents[:, 0] = -1. height: an upper bound of the depth, where one is known.
    """

    parents_BN: Tensor
    height: int | None = None

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """bool (B|1, N, N): [b, i, j] is True where j is i itself or an ancestor of i. The tree's
        attention mask.
        """
        nodes = self.parents_BN.shape[1]
        reach = torch.zeros(*self.parents_BN.shape, nodes, device=self.parents_BN.device)
        reach.scatter_(2, self.parents_BN.clamp(min=0)[..., None], 1.0)
        reach[:, 0] = 0.0
        reach += torch.eye(nodes, device=reach.device)
        # repeated squaring of the parent relation: log2(depth) products, no loop over nodes
        for _ in range((self.height or max(nodes - 1, 1)).bit_length()):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0

    @cached_property
    def depths_BN(self) -> Tensor:
        """int64 (B|1, N): 0 for the root. A node's position is its row's length plus its depth."""
        return self.levels_BN - 1

    @cached_property
    def levels_BN(self) -> Tensor:
        """int64 (B|1, N): nodes on the path from the root to here, both included."""
        return self.ancestors_BNN.sum(-1)

    @cached_property
    def drafted_BNN(self) -> Tensor:
        """bool (B|1, N, N): the ancestors without the root."""
        return self.ancestors_BNN & (self.parents_BN >= 0)[:, None, :]

    @cached_property
    def asked_BN(self) -> Tensor:
        """int64 (B|1, N): the node whose prediction judges each node; 0 for the root."""
        return self.parents_BN.clamp(min=0)


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens (int64) on a topology; tokens_BN[:, 0] are the last committed tokens."""

    tokens_BN: Tensor
    topology: Topology

    def parents(self) -> Tensor:
        """int64 (B|1, N)."""
        return self.topology.parents_BN

    def ancestors(self) -> Tensor:
        """bool (B|1, N, N), the attention mask among the nodes."""
        return self.topology.ancestors_BNN

    def depths(self) -> Tensor:
        """int64 (B|1, N)."""
        return self.topology.depths_BN


@dataclass(frozen=True)
class StaticTree:
    """A fixed tree as the set of its paths of ranks: prefix-closed, distinct, parents first.

    Builders put the most useful path first, so that `head` cuts well; paths that do not have their
    parents before them are sorted by depth. Raises ValueError for anything else.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        paths = tuple(tuple(map(int, path)) for path in self.paths)
        _check_size(len(paths))
        place = {path: number for number, path in enumerate(paths)}
        if len(place) != len(paths):
            raise ValueError("a tree path is given twice; siblings must be distinct")
        for path in paths:
            if not path or min(path) < 0:
                raise ValueError(f"tree path {list(path)}: expected one or more ranks from 0 on")
            if len(path) > 1 and path[:-1] not in place:
                raise ValueError(
                    f"tree path {list(path)} has no parent; add {list(path[:-1])} to the tree"
                )
        if any(place.get(path[:-1], -1) > number for path, number in place.items()):
            paths = tuple(sorted(paths, key=_by_depth))
        object.__setattr__(self, "paths", paths)

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> StaticTree:
        """The full expansion <k1, k2, ...>: every node at depth d - 1 has the k_d best children."""
        if min(widths, default=1) < 1:
            raise ValueError(f"tree widths {list(widths)}: each must be 1 or more")
        _check_size(sum(accumulate(widths, mul)))
        paths: list[Path] = []
        for depth in range(1, len(widths) + 1):
            paths += product(*map(range, widths[:depth]))
        return cls(tuple(paths))

    @classmethod
    def best_first(cls, accuracies_KR: Sequence[Sequence[float]], nodes: int) -> StaticTree:
        """The `nodes` draft nodes of greatest probability if depths were independent.

        accuracies_KR[k][r]: probability that the r-th guess at depth k + 1 is right. Prefer
        `most_frequent` where joint observations exist.
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
    def most_frequent(cls, ranks_MK: Tensor, nodes: int) -> StaticTree:
        """The `nodes` paths that were right most often: the best static tree for the observed
        continuations. A path is never right more often than its parent, so it is prefix-closed.

        ranks_MK: int64, the rank at each depth of the token that really came; -1 where it was
        outside the ranks kept.
        """
        counts = _path_counts(ranks_MK)
        best = sorted(counts, key=lambda path: (-counts[path], _by_depth(path)))[:nodes]
        return cls(tuple(best))

    def head(self, nodes: int) -> StaticTree:
        """The tree of the first `nodes` paths: the best smaller one, if the order says so."""
        return StaticTree(self.paths[:nodes])

    def fitted(self, ranks_MK: Tensor, nodes: int) -> StaticTree:
        """`most_frequent`, or this tree where no draft was right."""
        known = bool((ranks_MK[:, 0] >= 0).any())
        return StaticTree.most_frequent(ranks_MK, nodes) if known else self

    def to_json(self) -> list[list[int]]:
        """What `tree_from_json` reads."""
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
        """The longest path, in draft tokens."""
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """How many ranks of a head the tree uses: one more than the greatest rank."""
        return max(map(max, self.paths), default=-1) + 1

    def check_width(self, vocabulary: int) -> None:
        """Raise ValueError when the tree wants more guesses than a head has tokens."""
        if self.width > vocabulary:
            raise ValueError(
                f"the tree uses the {self.width} best guesses, the head knows only {vocabulary} "
                "words; use a narrower tree"
            )

    def check_depth(self, depth: int) -> None:
        """Raise ValueError when the tree is deeper than the `depth` tokens a head can guess."""
        if self.depth > depth:
            raise ValueError(
                f"the tree is {self.depth} deep, the head guesses only {depth} tokens ahead; "
                "use a shallower tree or a head with more depth"
            )

    def parents(self) -> list[int]:
        """The parent of each node; -1 for the root (node 0)."""
        index = {path: node for node, path in enumerate(self.paths, start=1)}
        return [-1] + [index.get(path[:-1], 0) for path in self.paths]

    def topology(self, device: torch.device | str | None = None) -> Topology:
        """The topology, shared by all rows."""
        return Topology(torch.tensor([self.parents()], device=device), self.depth)

    def expected_tokens(self, ranks_MK: Tensor) -> float:
        """Mean tokens per step on the observed continuations, the target's own token included."""
        counts = _path_counts(ranks_MK)
        return 1.0 + sum(counts[path] for path in self.paths) / max(len(ranks_MK), 1)


@dataclass(frozen=True)
class DynamicTree:
    """A tree that each step grows anew from the drafter's probabilities (EAGLE-2, arXiv
    2406.16858).

    The `top_k` most probable nodes of a level are expanded, each by its `top_k` best tokens, down
    to `depth` tokens; of all these candidates the `draft_nodes` most probable ones are verified.
    Raises ValueError for a tree that has fewer candidates.
    """

    draft_nodes: int = 59
    depth: int = 8
    top_k: int = 10

    def __post_init__(self) -> None:
        if min(self.draft_nodes, self.depth, self.top_k) < 1:
            raise ValueError(f"{self}: expected 1 or more of each")
        _check_size(max(self.draft_nodes, self.depth, self.top_k))
        candidates = self.top_k + (self.depth - 1) * self.top_k**2
        if self.draft_nodes > candidates:
            raise ValueError(
                f"a dynamic tree of depth {self.depth} and top_k {self.top_k} has {candidates} "
                f"candidates, got {self.draft_nodes} draft nodes; ask for fewer, or raise top_k"
            )

    def __str__(self) -> str:
        return f"nodes={self.draft_nodes},depth={self.depth},top_k={self.top_k}"

    @property
    def nodes(self) -> int:
        """Tokens verified per step, root included."""
        return self.draft_nodes + 1

    def head(self, nodes: int) -> DynamicTree:
        """The same search for fewer nodes, none of which can be deeper than `nodes`, or outside the
        best `nodes` of its level.
        """
        nodes = min(nodes, self.draft_nodes)
        return DynamicTree(nodes, min(self.depth, nodes), min(self.top_k, nodes))

    def fitted(self, ranks_MK: Tensor, nodes: int) -> DynamicTree:
        """Itself: nothing of it is fitted to observations."""
        return self

    def to_json(self) -> dict[str, int]:
        """What `tree_from_json` reads."""
        return asdict(self)


Tree = StaticTree | DynamicTree


def tree_from_json(value: Any) -> Tree:
    """A tree as `to_json` wrote it. Raises ValueError for anything else."""
    if isinstance(value, dict):
        if value.keys() <= {"draft_nodes", "depth", "top_k"} and _are_ints([*value.values()]):
            return DynamicTree(**value)
    elif _are_paths(value):
        return StaticTree(tuple(map(tuple, value)))
    raise ValueError(
        f"tree {value!r:.200}: expected paths of ranks like [[0],[0,0],[1]], or draft_nodes, depth "
        "and top_k, whole numbers"
    )


def parse_tree(text: str) -> Tree:
    """A tree from the command line.

    "4,2,1" is the expansion <4, 2, 1>, "[[0],[0,0],[1]]" a list of paths, and
    "nodes=16,depth=5,top_k=4" a dynamic tree, of which each part may be left out. Raises
    ValueError.
    """
    value: Any = None
    try:
        if "=" in text:
            given = dict(part.strip().split("=") for part in text.split(","))
            value = {name.replace("nodes", "draft_nodes"): int(given[name]) for name in given}
        else:
            value = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except (ValueError, RecursionError):
        pass
    if value and _are_ints(value):
        return StaticTree.from_widths(value)
    if value and (_are_paths(value) or isinstance(value, dict)):
        return tree_from_json(value)
    raise ValueError(
        f"tree {text!r:.200}: expected widths like 4,2,1, paths like [[0],[0,0]], or "
        "nodes=16,depth=5,top_k=4"
    )


def _are_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _are_paths(value: Any) -> bool:
    return isinstance(value, list) and all(map(_are_ints, value))


def _check_size(nodes: int) -> None:
    if nodes > MOST_NODES:
        raise ValueError(f"a tree of {nodes} draft nodes: expected {MOST_NODES} at the most")


def _path_counts(ranks_MK: Tensor) -> Counter[Path]:
    """How often each path of ranks was right; ranks_MK as in `StaticTree.most_frequent`."""
    counts: Counter[Path] = Counter()
    for path, count in Counter(map(tuple, ranks_MK.tolist())).items():
        for depth in range(1, len(path) + 1):
            if path[depth - 1] < 0:
                break
            counts[path[:depth]] += count
    return counts


def _by_depth(path: Path) -> tuple[int, Path]:
    return len(path), path
