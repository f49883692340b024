"""Growing a tree level by level, on tensors alone (no loop over nodes, no wait for the device).

Legend: B batch, F nodes of a level that are expanded (the frontier), E candidates of a level,
k children of a node, N tree nodes, v draft vocabulary, P draft nodes after the text, X any width.
Level 0 is the root alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Topology, Tree, by_depth


def gather_nodes(x_BFX: Tensor, nodes_BE: Tensor) -> Tensor:
    """(B, E, X): x[b, nodes[b, e]] for each b and e."""
    if x_BFX.shape[1] == 1:
        return x_BFX.expand(-1, nodes_BE.shape[1], -1)
    return x_BFX.gather(1, nodes_BE[:, :, None].expand(-1, -1, x_BFX.shape[2]))


def target_ids(columns_BE: Tensor, ids_Bv: Tensor | None, token_map: Tensor | None) -> Tensor:
    """The target's ids of columns of logits. ids_Bv, token_map: as of the builders."""
    if ids_Bv is not None:
        return ids_Bv.gather(1, columns_BE)
    return columns_BE if token_map is None else token_map[columns_BE]


class DynamicTreeBuilder:
    """Expansion and reranking of EAGLE-2 (arXiv 2406.16858, section 4): call `start`, then `add`
    until it returns False, then `tree`. token_map: target ids of the draft
    vocabulary.

    The score of a candidate is the sum of log-probabilities on its path from the root. Among equal
    scores the earlier candidate wins, so a parent always precedes its children.
    """

    tokens_BF: Tensor  # int64, the nodes to expand next
    parents_BF: Tensor  # int64, the index of the parent of each in the previous frontier
    scores_BF: Tensor

    def __init__(self, limits: DynamicTree, token_map: Tensor | None) -> None:
        self.limits = limits
        self.token_map = token_map
        self.start()

    def start(self) -> None:
        self.tokens: list[Tensor] = []  # of candidates, (B, E) for each level
        self.scores: list[Tensor] = []
        self.parents: list[Tensor] = []  # candidate numbers; -1 is the root
        self.frontier_BF: Tensor | None = None  # candidate numbers
        self.candidates = 0

    def add(self, logits_BFv: Tensor, ids_Bv: Tensor | None = None) -> bool:
        """Add a level from the logits after each node of the frontier; False when the tree is
        complete. The `top_k` best children of each node are candidates, and the `top_k` best of
        these are the next frontier. ids_Bv: the target ids of the logits; None: of the draft
        vocabulary.
        """
        children = min(self.limits.top_k, logits_BFv.shape[-1])
        top = torch.log_softmax(logits_BFv, dim=-1).topk(children)
        # NaN scores would put children before their parents
        scores_BFk = top.values.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        if self.frontier_BF is None:
            self.parents.append(top.indices.new_full((len(logits_BFv), children), -1))
        else:
            scores_BFk = scores_BFk + self.scores_BF[:, :, None]
            self.parents.append(self.frontier_BF[:, :, None].expand(-1, -1, children).flatten(1))
        tokens_BE = target_ids(top.indices.flatten(1), ids_Bv, self.token_map)
        scores_BE = scores_BFk.flatten(1)
        self.tokens.append(tokens_BE)
        self.scores.append(scores_BE)
        if len(self.tokens) == self.limits.depth:
            return False
        self.scores_BF, chosen_BF = scores_BE.topk(min(self.limits.top_k, scores_BE.shape[1]))
        self.tokens_BF = tokens_BE.gather(1, chosen_BF)
        self.parents_BF = chosen_BF // children
        self.frontier_BF = self.candidates + chosen_BF
        self.candidates += tokens_BE.shape[1]
        return not self._is_settled()

    def _is_settled(self) -> bool:
        """True if no deeper candidate can be among the best, as scores fall along a path. On a CPU
        alone, because other devices would have to be waited for, and never in compiled steps.
        """
        most = self.limits.draft_nodes
        is_quick = self.scores_BF.device.type == "cpu" and not torch.compiler.is_compiling()
        if not is_quick or self.candidates < most:
            return False
        least_B = torch.cat(self.scores, dim=1).topk(most).values[:, -1]
        return bool((self.scores_BF[:, 0] <= least_B).all())

    def tree(self, roots_B: Tensor) -> TokenTree:
        """The root and the best `draft_nodes` candidates."""
        scores_BE = torch.cat(self.scores, dim=1)
        nodes = min(self.limits.draft_nodes, scores_BE.shape[1])
        order_BE = scores_BE.sort(dim=1, descending=True, stable=True).indices
        kept_BN = order_BE[:, :nodes].sort(dim=1).values
        node_BE = torch.zeros_like(order_BE)  # from candidate to node number
        numbers_N = torch.arange(1, nodes + 1, device=kept_BN.device)
        node_BE.scatter_(1, kept_BN, numbers_N.expand_as(kept_BN))
        parents_BN = torch.cat(self.parents, dim=1).gather(1, kept_BN)
        nodes_BN = node_BE.gather(1, parents_BN.clamp(min=0)).masked_fill(parents_BN < 0, 0)
        tokens_BN = torch.cat(self.tokens, dim=1).gather(1, kept_BN)
        root_B1 = torch.full_like(roots_B, -1)[:, None]
        return TokenTree(
            torch.cat([roots_B[:, None], tokens_BN], dim=1),
            Topology(torch.cat([root_B1, nodes_BN], dim=1), self.limits.depth),
        )


class StaticTreeBuilder:
    """Fills a fixed tree; the interface is that of `DynamicTreeBuilder`."""

    tokens_BF: Tensor
    parents_BF: Tensor

    def __init__(self, tree: StaticTree, token_map: Tensor | None, device: torch.device) -> None:
        self.token_map = token_map
        self.start()
        paths = sorted(tree.paths, key=by_depth)
        self.topology = StaticTree(tuple(paths)).topology(device)
        # for each level: ranks needed of each frontier node; which of them become nodes; which of
        # these are the next frontier; places of their parents in this one
        self.levels: list[tuple[int, Tensor, Tensor, Tensor]] = []
        inner = {path[:-1] for path in paths}
        frontier = [tuple[int, ...]()]
        for depth in range(1, tree.depth + 1):
            index = {path: number for number, path in enumerate(frontier)}
            nodes = [path for path in paths if len(path) == depth]
            frontier = [path for path in nodes if path in inner]
            width = 1 + max(path[-1] for path in nodes)
            picks = [index[path[:-1]] * width + path[-1] for path in nodes]
            expanded = [number for number, path in enumerate(nodes) if path in inner]
            parents = [index[path[:-1]] for path in frontier]
            tensor = partial(torch.tensor, dtype=torch.long, device=device)
            self.levels.append((width, tensor(picks), tensor(expanded), tensor(parents)))

    def start(self) -> None:
        self.tokens: list[Tensor] = []  # (B, E) for each level

    def add(self, logits_BFv: Tensor, ids_Bv: Tensor | None = None) -> bool:
        if not self.levels:
            return False
        width, picks_E, expanded_F, parents_F = self.levels[len(self.tokens)]
        columns_BE = logits_BFv.topk(width).indices.flatten(1)
        if columns_BE.shape[1] > len(picks_E):
            columns_BE = columns_BE.index_select(1, picks_E)
        tokens_BE = target_ids(columns_BE, ids_Bv, self.token_map)
        self.tokens.append(tokens_BE)
        self.tokens_BF = tokens_BE
        if tokens_BE.shape[1] > len(expanded_F):
            self.tokens_BF = tokens_BE.index_select(1, expanded_F)
        self.parents_BF = parents_F.expand_as(self.tokens_BF)
        return len(self.tokens) < len(self.levels)

    def tree(self, roots_B: Tensor) -> TokenTree:
        return TokenTree(torch.cat([roots_B[:, None], *self.tokens], dim=1), self.topology)


TreeBuilder = DynamicTreeBuilder | StaticTreeBuilder


def tree_builder(tree: Tree, token_map: Tensor | None, device: torch.device) -> TreeBuilder:
    """The builder for `tree`; it can build any number of them."""
    if isinstance(tree, DynamicTree):
        return DynamicTreeBuilder(tree, token_map)
    return StaticTreeBuilder(tree, token_map, device)


def grow(
    builder: TreeBuilder,
    roots_B: Tensor,
    logits_BFv: Tensor,
    advance: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> TokenTree:
    """A tree whose nodes pass through a model level by level. logits_BFv: those after the roots.
    advance: returns those after the next nodes, from tokens_BF, which of all P draft nodes so far
    each one sees (seen_BFP), and their distances from the root's first child (depths_1P).
    """
    builder.start()
    level = 0
    device = roots_B.device
    depths_1P = torch.zeros(1, 0, dtype=torch.long, device=device)
    seen_BFP = torch.zeros(len(roots_B), 1, 0, dtype=torch.bool, device=device)
    while builder.add(logits_BFv):
        rows, nodes = builder.parents_BF.shape
        own_FF = torch.eye(nodes, dtype=torch.bool, device=device)
        seen_BFP = gather_nodes(seen_BFP, builder.parents_BF)  # those of the parent, and itself
        seen_BFP = torch.cat([seen_BFP, own_FF.expand(rows, -1, -1)], dim=2)
        depths_1P = F.pad(depths_1P, (0, nodes), value=level)
        logits_BFv = advance(builder.tokens_BF, seen_BFP, depths_1P)
        level += 1
    return builder.tree(roots_B)
