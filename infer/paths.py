"""Trees of single rows, made on the host. A tree is a list of paths, one for each draft node: the
tokens from the root's child to the node. A parent comes before its children.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftheads.heads.tree import DynamicTree, TokenTree, Topology, Tree

TokenPath = tuple[int, ...]


def node_paths(tree: TokenTree) -> list[list[TokenPath]]:
    """The path to each node of each row, without padding; that to the root is empty."""
    parents_BN = tree.topology.parents_BN.expand_as(tree.tokens_BN)
    rows = []
    for tokens, parents, count in zip(
        tree.tokens_BN.tolist(), parents_BN.tolist(), tree.drafted(), strict=True
    ):
        paths: list[TokenPath] = [()]
        for node in range(1, count + 1):
            paths.append((*paths[parents[node]], tokens[node]))
        rows.append(paths)
    return rows


def row_paths(tree: TokenTree) -> list[list[TokenPath]]:
    """The paths of each row's draft nodes."""
    return [paths[1:] for paths in node_paths(tree)]


def stacked(
    roots: Sequence[int], rows: Sequence[Sequence[TokenPath]], device: torch.device
) -> TokenTree:
    """The trees of a batch as one. Smaller ones are padded."""
    nodes = max(map(len, rows))
    tokens = []
    parents = []
    for root, paths in zip(roots, rows, strict=True):
        padding = nodes - len(paths)
        numbers = {path: number for number, path in enumerate([(), *paths])}
        tokens.append([root, *(path[-1] for path in paths), *[0] * padding])
        parents.append([-1, *(numbers[path[:-1]] for path in paths), *[-1] * padding])
    height = max((len(path) for paths in rows for path in paths), default=0)
    topology = Topology(torch.tensor(parents, device=device), height)
    return TokenTree(torch.tensor(tokens, device=device), topology)


def refuse_fixed(tree: Tree, what: str) -> None:
    """Raise ValueError for a tree whose shape is fixed."""
    if not isinstance(tree, DynamicTree):
        raise ValueError(
            f"{what}: expected limits of a tree, got a fixed tree; use one like "
            "nodes=8,depth=8,top_k=4"
        )
