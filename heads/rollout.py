"""Drafting with an autoregressive head: commit what the target wrote, then grow a tree level by
level.

Legend: B batch, A newly committed pairs, F nodes that are expanded together, P nodes expanded so
far, H hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.base import Committed
from draftheads.heads.cache import SlotCache, SlotLayer, SlotTable
from draftheads.heads.growth import planner
from draftheads.heads.shape import Tree
from draftheads.heads.target import PREFILL_CHUNK, Target
from draftheads.heads.tree import TokenTree

if TYPE_CHECKING:
    from draftheads.heads.autoregressive import AutoregressiveHead

ROOM = 1024
"""Slots that a cache has behind its first commit, before it must grow."""


class Rollout:
    """A drafter for one generation. Its cache holds one entry per committed pair, made of the
    target's own features; the nodes of a tree are written behind them and forgotten.
    """

    def __init__(self, head: AutoregressiveHead, target: Target, tree: Tree) -> None:
        self.head, self.target, self.tree = head, target, tree
        self.feature_layers = head.feature_layers
        self.weight_vD = head.unembed_weight(target)
        self.dtype = next(head.parameters()).dtype
        self.memories = [CachedMemory() for _ in range(head.layer_count)]
        self._cache: SlotCache | None = None
        self._new_growth = planner(tree, head.token_map, target.device)

    def propose(self, committed: Committed) -> TokenTree:
        """The tree on each row's newest committed token."""
        hidden_BFH = self._commit(committed)
        growth, level = self._new_growth(), Level(self._angles(self.tree.depth))
        while growth.add(self._logits(hidden_BFH)):
            index_BFH = growth.parents_BF[:, :, None].expand(-1, -1, hidden_BFH.shape[2])
            before = level.seen_BFP.shape[2]
            level.descend(growth.parents_BF)
            self._table.reserve(growth.parents_BF.shape[1], after=before)
            hidden_BFH = self._advance(growth.tokens_BF, hidden_BFH.gather(1, index_BFH), level)
        return growth.tree(committed.last_tokens_B())

    def _commit(self, committed: Committed) -> Tensor:
        """Append the new pairs to the cache; (B, 1, H), the state after each row's newest one."""
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

    def _append(self, tokens_BA: Tensor, features_BAD: Tensor, counts: list[int]) -> Tensor:
        """One chunk of pairs, of which `counts` are real in each row; the states after them."""
        chunk = Chain(self._angles(tokens_BA.shape[1]))
        self._table.reserve(tokens_BA.shape[1])
        hidden_BAH = self.head.fuse(features_BAD.to(self.dtype))
        hidden_BAH = self._advance(tokens_BA, hidden_BAH, chunk)
        self._table.advance(counts)
        return hidden_BAH

    def _advance(self, tokens_BF: Tensor, hidden_BFH: Tensor, nodes: Level | Chain) -> Tensor:
        table = self._table
        visible_BFS = table.visible(nodes.seen_BFP)
        if self.head.window is not None:
            asking_BF = table.lengths_B[:, None] + nodes.depths_1P[:, -tokens_BF.shape[1] :]
            distance_BFS = asking_BF[:, :, None] - table.positions(nodes.depths_1P)[:, None, :]
            visible_BFS = visible_BFS & (distance_BFS < self.head.window)
        for memory in self.memories:
            memory.visible_B1FS = visible_BFS[:, None]
        embedded_BFD = self.target.embed(tokens_BF).to(self.dtype)
        return self.head.advance(embedded_BFD, hidden_BFH, nodes.angles, self.memories)

    def _angles(self, count: int) -> tuple[Tensor, Tensor]:
        """RoPE of the `count` positions behind each row's newest pair."""
        lengths_B1 = self._table.lengths_B[:, None]
        return self.head.rope(lengths_B1 + torch.arange(count, device=lengths_B1.device))

    def _logits(self, hidden_BFH: Tensor) -> Tensor:
        states_BFD = self.head.states(hidden_BFH).to(self.weight_vD.dtype)
        return F.linear(states_BFD, self.weight_vD).float()

    @property
    def _table(self) -> SlotTable:
        assert self._cache is not None
        return self._cache.table

    def _allocate(self, rows: int, length: int) -> None:
        self._cache = SlotCache(self.head.layer_count, rows, length + ROOM, self.target.device)
        for memory, layer in zip(self.memories, self._cache.layers, strict=True):
            memory.layer = layer


class Chain:
    """Pairs one behind the other: which see which, how far each stands behind the newest committed
    pair, and their angles.
    """

    def __init__(self, angles: tuple[Tensor, Tensor]) -> None:
        length, device = angles[0].shape[2], angles[0].device
        self.angles = angles
        self.depths_1P = torch.arange(length, device=device)[None]
        self.seen_BFP = torch.ones(1, length, length, dtype=torch.bool, device=device).tril_()


class Level:
    """The newest level of a growing tree: which of the P nodes expanded so far its F nodes see, how
    far each of the P stands behind the newest committed pair, and the angles of the F.
    """

    def __init__(self, angles_of_levels: tuple[Tensor, Tensor]) -> None:
        self.angles_of_levels, self.number = angles_of_levels, -1
        device = angles_of_levels[0].device
        self.depths_1P = torch.zeros(1, 0, dtype=torch.long, device=device)
        self.seen_BFP = torch.zeros(1, 1, 0, dtype=torch.bool, device=device)

    def descend(self, parents_BF: Tensor) -> None:
        """To the next level: a node sees what its parent saw, and itself."""
        self.number += 1
        rows, nodes = parents_BF.shape
        seen_BFP = self.seen_BFP.expand(rows, -1, -1)
        index_BFP = parents_BF[:, :, None].expand(-1, -1, seen_BFP.shape[2])
        own_FF = torch.eye(nodes, dtype=torch.bool, device=parents_BF.device)
        own_BFF = own_FF.expand(rows, -1, -1)
        self.seen_BFP = torch.cat([seen_BFP.gather(1, index_BFP), own_BFF], dim=2)
        self.depths_1P = F.pad(self.depths_1P, (0, nodes), value=self.number)
        cos, sin = (each[:, :, self.number : self.number + 1] for each in self.angles_of_levels)
        self.angles = cos, sin


class CachedMemory:
    """One layer's committed keys and values, and those of the tree behind them."""

    layer: SlotLayer
    visible_B1FS: Tensor

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        """Attention to everything that is visible, the new entries included."""
        keys, values = self.layer.update(k_BGQW, v_BGQW)
        return F.scaled_dot_product_attention(
            q_BHQW, keys, values, attn_mask=self.visible_B1FS, enable_gqa=True
        )
