"""Token trees: what a drafter proposes and the target verifies in one forward pass.

Legend: B batch, N tree nodes, K draft depth, R ranks, M observed continuations. Node 0 is the root
(the last committed token, depth 0); parents precede their children, so a path in node order is also
in depth order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

Path = tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """Who is whose parent. parents_BN: int64 of shape (B, N), or (1, N) when all rows share it;
    parents[:, 0] = -1.
    """

    parents_BN: Tensor

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """bool (B|1, N, N): [b, i, j] is True where j is i itself or an ancestor of i. The tree's
        attention mask.

        Computed by repeated squaring of the parent relation, log2(depth) small products, no loop
        over nodes.
        """
        nodes = self.parents_BN.shape[1]
        reach = torch.zeros(*self.parents_BN.shape, nodes, device=self.parents_BN.device)
        reach.scatter_(2, self.parents_BN.clamp(min=0)[..., None], 1.0)
        reach[:, 0] = 0.0
        reach += torch.eye(nodes, device=reach.device)
        steps = max(nodes - 1, 1).bit_length()
        for _ in range(steps):
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
        """The ancestors without the root: the draft tokens on the way to each node."""
        return self.ancestors_BNN & (self.parents_BN >= 0)[:, None, :]

    @cached_property
    def asked_BN(self) -> Tensor:
        """int64 (B|1, N): the node whose prediction judges each node; 0 for the root."""
        return self.parents_BN.clamp(min=0)


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens on a topology. tokens_BN: int64; tokens_BN[:, 0] are the last committed
    tokens.
    """

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
class TreeShape:
    """A fixed tree as the set of its root-to-node paths of *ranks*: (0, 2) is "the third guess of
    head 2 after the best guess of head 1". Paths are prefix-closed and distinct. Their order is
    kept where parents precede children (builders put the most useful path first, so `head` cuts
    well); otherwise they are sorted by depth.

    Raises ValueError when a prefix is missing or a path stands twice.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        paths = tuple(tuple(map(int, path)) for path in self.paths)
        place = {path: number for number, path in enumerate(paths)}
        if any(place.get(path[:-1], -1) > number for number, path in enumerate(paths)):
            paths = tuple(sorted(paths, key=_by_depth))
        known = set(paths)
        if len(known) != len(paths):
            twice = next(path for path, count in Counter(paths).items() if count > 1)
            raise ValueError(f"tree path {list(twice)} stands twice; siblings must be distinct")
        for path in paths:
            if not path or min(path) < 0:
                raise ValueError(
                    f"tree path {list(path)}: expected one or more ranks, each 0 or greater"
                )
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(
                    f"tree path {list(path)} has no parent; add {list(path[:-1])} to the tree"
                )
        object.__setattr__(self, "paths", paths)

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> TreeShape:
        """The full expansion <k1, k2, ...>: every node at depth d - 1 has the k_d best children."""
        if any(width < 1 for width in widths):
            raise ValueError(f"tree widths {list(widths)}: each must be 1 or more")
        levels = (
            product(*(range(width) for width in widths[:depth]))
            for depth in range(1, len(widths) + 1)
        )
        return cls(tuple(path for level in levels for path in level))

    @classmethod
    def best_first(cls, accuracies_KR: Sequence[Sequence[float]], nodes: int) -> TreeShape:
        """The `nodes` draft nodes of greatest probability if depths were independent.

        accuracies_KR[k][r] is the probability that the r-th guess of head k + 1 is right (the
        search of Medusa's code). Prefer `most_frequent` where joint
        observations exist.
        """
        if not accuracies_KR or nodes < 1:
            raise ValueError(
                "a best-first tree needs accuracies of one depth or more and one node or more"
            )
        order = [sorted(range(len(row)), key=lambda r, row=row: -row[r]) for row in accuracies_KR]  # type: ignore[misc]
        best: list[Path] = []
        # heap of (-probability, path, place of its last rank in `order`, probability of its parent)
        first = accuracies_KR[0][order[0][0]]
        heap: list[tuple[float, Path, int, float]] = [(-first, (order[0][0],), 0, 1.0)]
        while heap and len(best) < nodes:
            negative, path, place, parent = heapq.heappop(heap)
            best.append(path)
            depth = len(path)
            if place + 1 < len(order[depth - 1]):
                rank = order[depth - 1][place + 1]
                chance = parent * accuracies_KR[depth - 1][rank]
                heapq.heappush(heap, (-chance, (*path[:-1], rank), place + 1, parent))
            if depth < len(accuracies_KR):
                rank = order[depth][0]
                chance = -negative * accuracies_KR[depth][rank]
                heapq.heappush(heap, (-chance, (*path, rank), 0, -negative))
        return cls(tuple(best))

    @classmethod
    def most_frequent(cls, ranks_MK: Tensor, nodes: int) -> TreeShape:
        """The `nodes` paths that were right most often: the best static tree for the observed
        continuations.

        ranks_MK: int64, the rank at each depth of the token that really came; -1 where it was
        outside the ranks kept. A path is right as often as its parent or less, so the choice is
        prefix-closed by itself.
        """
        counts = path_counts(ranks_MK)
        if not counts:
            raise ValueError(
                "no draft was right in the observed continuations: no tree can be built from them"
            )
        best = sorted(counts, key=lambda path: (-counts[path], _by_depth(path)))[:nodes]
        return cls(tuple(best))

    def head(self, nodes: int) -> TreeShape:
        """The tree of the first `nodes` paths: of a best-first or most-frequent tree, the best
        smaller one.
        """
        return TreeShape(self.paths[:nodes])

    @property
    def depth(self) -> int:
        """The longest path, in draft tokens."""
        return max((len(path) for path in self.paths), default=0)

    @property
    def width(self) -> int:
        """How many ranks of a head the tree uses: one more than the greatest rank."""
        return max((max(path) for path in self.paths), default=-1) + 1

    @property
    def nodes(self) -> int:
        """Tokens verified per step, root included."""
        return len(self.paths) + 1

    def check_depth(self, depth: int) -> None:
        """Raise ValueError when the tree is deeper than `depth`, the number of tokens a head can
        guess.
        """
        if self.depth > depth:
            raise ValueError(
                f"the tree is {self.depth} deep, the head guesses only {depth} tokens ahead; "
                "use a shallower tree or a head with more depth"
            )

    def parents(self) -> list[int]:
        """The parent of each node; -1 for the root (node 0)."""
        index = {path: node for node, path in enumerate(self.paths, start=1)}
        return [-1] + [index[path[:-1]] if len(path) > 1 else 0 for path in self.paths]

    def topology(self, device: torch.device | str | None = None) -> Topology:
        """The shape as a topology shared by all rows."""
        return Topology(torch.tensor([self.parents()], device=device))

    def expected_tokens(self, ranks_MK: Tensor) -> float:
        """Mean tokens per step, the target's own token included, had this tree met the observed
        continuations.
        """
        counts = path_counts(ranks_MK)
        return 1.0 + sum(counts[path] for path in self.paths) / max(len(ranks_MK), 1)


def path_counts(ranks_MK: Tensor) -> Counter[Path]:
    """How often each path of ranks was right; ranks_MK as in `TreeShape.most_frequent`."""
    counts: Counter[Path] = Counter()
    for path, count in Counter(map(tuple, ranks_MK.tolist())).items():
        for depth in range(1, len(path) + 1):
            if path[depth - 1] < 0:
                break
            counts[path[:depth]] += count
    return counts


def parse_tree(text: str) -> TreeShape:
    """A tree from the command line: "4,2,1" is the expansion <4, 2, 1>, "[[0],[0,0],[1]]" a list of
    paths.
    """
    import json

    try:
        value = json.loads(text if text.lstrip().startswith("[") else f"[{text}]")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"tree {text!r}: expected widths like 4,2,1 or paths like [[0],[0,0]]; {error.msg}"
        ) from error
    return TreeShape.from_widths(value) if _is_flat(value) else TreeShape(tuple(map(tuple, value)))


def _is_flat(value: Iterable[object]) -> bool:
    return all(isinstance(item, int) for item in value)


def _by_depth(path: Path) -> tuple[int, Path]:
    return len(path), path
