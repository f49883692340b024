"""Drafting with an autoregressive head: commit what the target wrote, then grow a tree level by
level.

Legend: B batch, A newly committed pairs, F nodes that are expanded together, P nodes expanded so
far, H hidden width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.autoregressive import AutoregressiveHead
from draftheads.heads.base import Committed
from draftheads.heads.cache import SlotCache, SlotLayer
from draftheads.heads.growth import Growth, planner
from draftheads.heads.shape import Tree
from draftheads.heads.target import PREFILL_CHUNK, Target
from draftheads.heads.tree import TokenTree

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
        growth, level = self._new_growth(), Level(self.target.device)
        while growth.add(self._logits(hidden_BFH)):
            hidden_BFH = self._expand(growth, level, hidden_BFH)
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
        length, table = tokens_BA.shape[1], self._table
        depths_1A = torch.arange(length, device=tokens_BA.device)[None]
        chain_1AA = torch.ones(1, length, length, dtype=torch.bool, device=tokens_BA.device).tril_()
        table.reserve(length)
        hidden_BAH = self.head.fuse(features_BAD.to(self.dtype))
        hidden_BAH = self._advance(tokens_BA, hidden_BAH, chain_1AA, depths_1A)
        table.advance(counts)
        return hidden_BAH

    def _expand(self, growth: Growth, level: Level, hidden_BFH: Tensor) -> Tensor:
        """States after the frontier's nodes, from those of their parents."""
        index_BFH = growth.parents_BF[:, :, None].expand(-1, -1, hidden_BFH.shape[2])
        hidden_BFH = hidden_BFH.gather(1, index_BFH)
        before = level.depths_1P.shape[1]
        level.descend(growth.parents_BF)
        self._table.reserve(level.depths_1P.shape[1] - before, after=before)
        return self._advance(growth.tokens_BF, hidden_BFH, level.seen_BFP, level.depths_1P)

    def _advance(
        self, tokens_BF: Tensor, hidden_BFH: Tensor, seen_BFP: Tensor, depths_1P: Tensor
    ) -> Tensor:
        table = self._table
        visible_BFS, key_positions_BS = table.visibility(seen_BFP, depths_1P)
        positions_BF = table.lengths_B[:, None] + depths_1P[:, -tokens_BF.shape[1] :]
        if self.head.window is not None:
            distance_BFS = positions_BF[:, :, None] - key_positions_BS[:, None, :]
            visible_BFS = visible_BFS & (distance_BFS < self.head.window)
        for memory in self.memories:
            memory.visible_B1FS = visible_BFS[:, None]
        embedded_BFD = self.target.embed(tokens_BF).to(self.dtype)
        return self.head.advance(
            embedded_BFD, hidden_BFH, self.head.rope(positions_BF), self.memories
        )

    def _logits(self, hidden_BFH: Tensor) -> Tensor:
        states_BFD = self.head.states(hidden_BFH).to(self.weight_vD.dtype)
        return F.linear(states_BFD, self.weight_vD).float()

    @property
    def _table(self):  # type: ignore[no-untyped-def]
        assert self._cache is not None
        return self._cache.table

    def _allocate(self, rows: int, length: int) -> None:
        self._cache = SlotCache(self.head.layer_count, rows, length + ROOM, self.target.device)
        for memory, layer in zip(self.memories, self._cache.layers, strict=True):
            memory.layer = layer


class Level:
    """Which nodes of a growing tree see which: those expanded so far, P, seen by the newest F.

    depths_1P: how far behind the newest committed pair each of them stands.
    """

    def __init__(self, device: torch.device) -> None:
        self.depths_1P = torch.zeros(1, 0, dtype=torch.long, device=device)
        self.seen_BFP = torch.zeros(1, 1, 0, dtype=torch.bool, device=device)
        self.number = 0

    def descend(self, parents_BF: Tensor) -> None:
        """The next level: a node sees what its parent saw, and itself."""
        seen_BFP = self.seen_BFP.expand(len(parents_BF), -1, -1)
        index_BFP = parents_BF[:, :, None].expand(-1, -1, seen_BFP.shape[2])
        nodes = parents_BF.shape[1]
        own_FF = torch.eye(nodes, dtype=torch.bool, device=parents_BF.device)
        own_BFF = own_FF.expand(len(parents_BF), -1, -1)
        self.seen_BFP = torch.cat([seen_BFP.gather(1, index_BFP), own_BFF], dim=2)
        self.depths_1P = F.pad(self.depths_1P, (0, nodes), value=self.number)
        self.number += 1


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
