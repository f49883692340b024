"""Trees that grow on the host, row by row: a `RowTree` is the tree of one row, and `stacked` makes
one TokenTree out of those of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from draftheads.heads.tree import DynamicTree, TokenTree, Topology, Tree


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


def _refuse_fixed(tree: Tree, what: str) -> None:
    if not isinstance(tree, DynamicTree):
        raise ValueError(
            f"{what}: expected limits of a tree, got a fixed tree; use one like "
            "nodes=8,depth=8,top_k=4"
        )
