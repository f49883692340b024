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
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.base import Committed
from draftheads.heads.cache import ROOM, SlotCache, SlotLayer, SlotTable
from draftheads.heads.layers import Memory, Rope
from draftheads.heads.target import PREFILL_CHUNK
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Topology, Tree


class TreeBuilder(Protocol):
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


def tree_builder(
    tree: Tree, token_map: Tensor | None, device: torch.device
) -> Callable[[], TreeBuilder]:
    """Makes a fresh growth of `tree` for each step. token_map: target ids of the draft
    vocabulary.
    """
    if isinstance(tree, DynamicTree):
        return partial(DynamicTreeBuilder, tree, token_map)
    return partial(StaticTreeBuilder, StaticTreePlan(tree, device), token_map)


class DynamicTreeBuilder:
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


class StaticTreePlan:
    """Which ranks a fixed tree takes at each level; its nodes stand level by level."""

    def __init__(self, shape: StaticTree, device: torch.device) -> None:
        paths = sorted(shape.paths, key=lambda path: (len(path), path))
        inner = {path[:-1] for path in paths}
        self.topology = StaticTree(tuple(paths)).topology(device)
        self.levels: list[StaticTreeLevel] = []
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
            self.levels.append(StaticTreeLevel(width, *tensors))


@dataclass(frozen=True)
class StaticTreeLevel:
    """width: guesses needed of each expanded node. picks_C: the places among all those guesses that
    become nodes. expanded_F: which nodes are expanded next; parents_F: the places of their parents
    among the nodes expanded before.
    """

    width: int
    picks_C: Tensor
    expanded_F: Tensor
    parents_F: Tensor


class StaticTreeBuilder:
    """Fills a fixed tree of ranks; the same nodes are expanded in every step."""

    def __init__(self, plan: StaticTreePlan, token_map: Tensor | None) -> None:
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


# What a draft head's own layers remember of the text that the target has written.
#
# Legend: B batch, A newly committed pairs, Q positions that ask, P draft nodes behind the text, D
# feature width, H hidden width.


class Reader(Protocol):
    """A head, or the part of it, that reads the text. window: positions that a layer sees, itself
    included; None: all.
    """

    layer_count: int
    rope: Rope
    window: int | None

    def read(
        self,
        tokens_BQ: Tensor,
        features_BQD: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: list[Memory],
    ) -> Tensor:
        """The hidden states (B, Q, H) after these pairs of token and feature."""
        ...


class DraftCache:
    """One entry per committed pair, made of the target's own features. Nodes of a tree may be
    written behind them, to be forgotten.
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self.reader, self.device = reader, device
        self.memories = [CachedMemory() for _ in range(reader.layer_count)]
        self._cache: SlotCache | None = None

    @property
    def table(self) -> SlotTable:
        """Which slots are in use; known once something was committed."""
        assert self._cache is not None
        return self._cache.table

    def commit(self, committed: Committed) -> Tensor:
        """Append the new pairs; (B, 1, H), the state after each row's newest one."""
        tokens_BA, features_BAD = committed.tokens_BA, committed.features_BAD
        counts = committed.counts
        if self._cache is None:  # a text's first token has no feature and makes no pair
            tokens_BA, features_BAD = tokens_BA[:, 1:], features_BAD[:, 1:]
            counts = [count - 1 for count in counts]
            self._allocate(*tokens_BA.shape)
        hidden = [
            self._append(
                tokens_BA[:, start : start + PREFILL_CHUNK],
                features_BAD[:, start : start + PREFILL_CHUNK],
                [max(0, min(count - start, PREFILL_CHUNK)) for count in counts],
            )
            for start in range(0, tokens_BA.shape[1], PREFILL_CHUNK)
        ]
        hidden_BAH = torch.cat(hidden, dim=1) if len(hidden) > 1 else hidden[0]
        if min(counts) == hidden_BAH.shape[1]:
            return hidden_BAH[:, -1:]
        last_B = torch.tensor([max(count, 1) - 1 for count in counts], device=hidden_BAH.device)
        return hidden_BAH.gather(1, last_B[:, None, None].expand(-1, 1, hidden_BAH.shape[2]))

    def look(self, seen_BQP: Tensor, depths_1P: Tensor) -> list[Memory]:
        """The memories, for Q positions of which each sees the text and some of the P nodes behind
        it; depths_1P: how far each of these stands behind the newest pair. The Q are the last of
        the P.
        """
        visible_BQS = self.table.visible(seen_BQP)
        if self.reader.window is not None:
            asking_BQ = self.table.lengths_B[:, None] + depths_1P[:, -seen_BQP.shape[1] :]
            distance_BQS = asking_BQ[:, :, None] - self.table.positions(depths_1P)[:, None, :]
            visible_BQS = visible_BQS & (distance_BQS < self.reader.window)
        for memory in self.memories:
            memory.visible_B1QS = visible_BQS[:, None]
        return list(self.memories)

    def angles(self, count: int) -> tuple[Tensor, Tensor]:
        """RoPE of the `count` positions behind each row's newest pair."""
        lengths_B1 = self.table.lengths_B[:, None]
        return self.reader.rope(lengths_B1 + torch.arange(count, device=lengths_B1.device))

    def _append(self, tokens_BA: Tensor, features_BAD: Tensor, counts: list[int]) -> Tensor:
        """One chunk of pairs, of which `counts` are real in each row; the states after them."""
        length = tokens_BA.shape[1]
        chain_1AA = torch.ones(1, length, length, dtype=torch.bool, device=self.device).tril_()
        self.table.reserve(length)
        memories = self.look(chain_1AA, torch.arange(length, device=self.device)[None])
        hidden_BAH = self.reader.read(tokens_BA, features_BAD, self.angles(length), memories)
        self.table.advance(counts)
        return hidden_BAH

    def _allocate(self, rows: int, length: int) -> None:
        self._cache = SlotCache(self.reader.layer_count, rows, length + ROOM, self.device)
        for memory, layer in zip(self.memories, self._cache.layers, strict=True):
            memory.layer = layer


class CachedMemory:
    """One layer's committed keys and values, and those of the tree behind them."""

    layer: SlotLayer
    visible_B1QS: Tensor

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        """Attention to everything that is visible, the new entries included."""
        keys, values = self.layer.update(k_BGQW, v_BGQW)
        return F.scaled_dot_product_attention(
            q_BHQW, keys, values, attn_mask=self.visible_B1QS, enable_gqa=True
        )
