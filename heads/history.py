"""What a draft head's own layers remember of the text that the target has written.

Legend: B batch, A newly committed pairs, Q positions that ask, P draft nodes behind the text, D
feature width, H hidden width.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.base import Committed
from draftheads.heads.cache import ROOM, SlotCache, SlotLayer, SlotTable
from draftheads.heads.decoder import Memory, Rope
from draftheads.heads.target import PREFILL_CHUNK


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


class History:
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
