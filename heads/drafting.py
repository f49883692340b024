"""The interface of a drafter: the tokens that it reads, and the key/value cache of its own layers.

Legend: B batch, C newly committed tokens, D feature width, Q queries, S slots, P draft nodes after
the text, H hidden width (before W: query heads), G key/value heads, W head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftheads.heads.cache import ROOM, SlotCache, SlotLayer, SlotTable
from draftheads.heads.cpu.attention import attend
from draftheads.heads.layers import Angles, Positional
from draftheads.heads.target.model import PREFILL_CHUNK
from draftheads.heads.tree import TokenTree
from draftheads.heads.tree_drafting import gather_nodes


@dataclass(frozen=True)
class Committed:
    """The tokens that a decoding step added to each row: all that a drafter ever sees."""

    tokens_BC: Tensor
    """int64; the new tokens of row b are `tokens_BC[b, :count_B[b]]`, the rest is padding."""
    features_BCD: Tensor
    """The target state from which each token was predicted."""
    count_B: Tensor
    """int64, at least 1 for a running row, 0 for a finished one, whose root is meaningless."""
    counts: list[int]
    """`count_B` on the host, so that no drafter has to wait for the device."""

    def last_tokens_B(self) -> Tensor:
        """The newest committed token of each row: the root of the next tree."""
        if self.tokens_BC.shape[1] == 1:
            return self.tokens_BC[:, 0]
        return self.tokens_BC.gather(1, self.last_B1())[:, 0]

    def last_features_BD(self) -> Tensor:
        """The feature of the newest committed token of each row."""
        return gather_nodes(self.features_BCD, self.last_B1())[:, 0]

    def select(self, rows: Sequence[int]) -> Committed:
        """Select the tokens of these rows."""
        counts = [self.counts[row] for row in rows]
        return Committed(self.tokens_BC[rows], self.features_BCD[rows], self.count_B[rows], counts)

    def since(self, place: int) -> Committed:
        """The same without the first `place` tokens of each row."""
        counts = [count - place for count in self.counts]
        tokens_BC = self.tokens_BC[:, place:]
        features_BCD = self.features_BCD[:, place:]
        return Committed(tokens_BC, features_BCD, self.count_B - place, counts)

    def divide(self) -> tuple[Committed, Committed]:
        """All but the newest token of each row, and that token alone."""
        counts = [max(count - 1, 0) for count in self.counts]
        earlier = Committed(self.tokens_BC, self.features_BCD, self.last_B1()[:, 0], counts)
        tokens_B1 = self.last_tokens_B()[:, None]
        features_B1D = self.last_features_BD()[:, None]
        counts = [min(count, 1) for count in self.counts]
        return earlier, Committed(tokens_B1, features_B1D, self.count_B.clamp(max=1), counts)

    def join(self, other: Committed, places: Sequence[int]) -> Committed:
        """The same, with row i of `other` at places[i]; places after the last row are new. Both
        are one token wide.
        """
        rows = max(len(self.counts), max(places) + 1)
        counts = self.counts + [0] * (rows - len(self.counts))
        for place, count in zip(places, other.counts, strict=True):
            counts[place] = count

        def merged(mine: Tensor, new: Tensor) -> Tensor:
            both = torch.cat([mine, new.new_zeros(rows - len(mine), *new.shape[1:])])
            both[places] = new
            return both

        return Committed(
            merged(self.tokens_BC, other.tokens_BC),
            merged(self.features_BCD, other.features_BCD),
            merged(self.count_B, other.count_B),
            counts,
        )

    def last_B1(self) -> Tensor:
        """int64: the place of the newest committed token of each row; 0 where there is none."""
        return (self.count_B - 1).clamp(min=0)[:, None]


@dataclass
class DraftCache:
    """Keys and values of a draft head's own layers: an entry for each committed pair of token and
    target feature, followed, until the next commit, by those of the nodes of a tree.
    """

    layers: int
    rope: Positional
    window: int | None  # positions that a layer sees, itself included; None: all
    read: Callable[[Tensor, Tensor, Angles], Tensor]
    """From tokens_BQ, features_BQD and angles to states (B, Q, H), with attention by `memories`."""
    device: torch.device
    memories: list[CachedMemory] = field(default_factory=list)  # one for each layer
    cache: SlotCache = field(init=False)
    table: SlotTable = field(init=False)

    def commit(self, committed: Committed) -> Tensor:
        """Append the new pairs; returns the state after the newest one of each row, (B, 1, H)."""
        if not self.memories:  # the first token of a text has no feature and forms no pair
            committed = committed.since(1)
            rows, length = committed.tokens_BC.shape
            self.start(rows, length + ROOM)
        tokens_BC = committed.tokens_BC
        features_BCD = committed.features_BCD
        counts = committed.counts
        if self.table.fixed_S is not None:
            hidden_BCH = self._append(tokens_BC, features_BCD, committed.count_B)
            return gather_nodes(hidden_BCH, committed.last_B1())
        hidden = []
        for start in range(0, tokens_BC.shape[1], PREFILL_CHUNK):
            part = slice(start, start + PREFILL_CHUNK)
            real = [max(0, min(count - start, PREFILL_CHUNK)) for count in counts]
            hidden.append(self._append(tokens_BC[:, part], features_BCD[:, part], real))
        hidden_BCH = torch.cat(hidden, dim=1) if len(hidden) > 1 else hidden[0]
        if min(counts) == hidden_BCH.shape[1]:
            return hidden_BCH[:, -1:]
        return gather_nodes(hidden_BCH, committed.last_B1())

    def extend(self, seen_BQP: Tensor, depths_1P: Tensor) -> None:
        """Prepare the memories for Q new nodes, after the text and P - Q earlier nodes. seen_BQP:
        the nodes that each new one sees. depths_1P: distances of all nodes from the newest pair.
        """
        table = self.table
        (queries, nodes) = seen_BQP.shape[1:]
        table.reserve(queries, after=nodes - queries)
        visible_BQS = table.visible(seen_BQP)
        if self.window is not None:
            positions_BQ = table.lengths_B[:, None] + depths_1P[:, -queries:]
            distance_BQS = positions_BQ[:, :, None] - table.positions(depths_1P)[:, None, :]
            visible_BQS = visible_BQS & (distance_BQS < self.window)
        for memory in self.memories:
            memory.visible_B1QS = visible_BQS[:, None]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows alone. Before the first pairs, whose rows the cache is made for, there
        are none to remove.
        """
        if self.memories:
            self.cache.select(rows)

    def join(self, other: DraftCache, places: Sequence[int]) -> None:
        """See `SlotCache.join`."""
        if not self.memories:
            self.start(0, other.table.longest)
        self.cache.join(other.cache, places)

    def rewind(self, length: int) -> None:
        """Keep the pairs of the only row's first `length` tokens alone."""
        self.table.rewind([length - 1])

    def angles(self, count: int) -> Angles:
        """RoPE angles of the `count` positions after the newest pair of each row."""
        lengths_B1 = self.table.lengths_B[:, None]
        return self.rope(lengths_B1 + torch.arange(count, device=lengths_B1.device))

    def start(self, rows: int, capacity: int) -> None:
        """Make the cache, without pairs."""
        self.cache = SlotCache(self.layers, rows, capacity, self.device)
        self.table = self.cache.table
        self.memories = [CachedMemory(each) for each in self.cache.layers]

    def _append(
        self, tokens_BC: Tensor, features_BCD: Tensor, counts: Sequence[int] | Tensor
    ) -> Tensor:
        """Append a chunk, with `counts` real pairs in each row; returns the states after them."""
        length = tokens_BC.shape[1]
        chain_1CC = torch.ones(1, length, length, dtype=torch.bool, device=self.device).tril_()
        self.extend(chain_1CC, torch.arange(length, device=self.device)[None])
        hidden_BCH = self.read(tokens_BC, features_BCD, self.angles(length))
        self.table.advance(counts)
        return hidden_BCH


class CachedMemory:
    """Attention of one layer to the text and the tree after it."""

    visible_B1QS: Tensor | None = None  # None: all slots

    def __init__(self, layer: SlotLayer) -> None:
        self.layer = layer

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        keys, values = self.layer.update(k_BGQW, v_BGQW)
        return attend(q_BHQW, keys, values, self.visible_B1QS)


class Drafter(Protocol):
    """Proposes a token tree for each step of one generation."""

    feature_layers: tuple[int, ...]
    """The hidden states of the target that `Committed.features_BCD` concatenates."""

    @property
    def cache(self) -> DraftCache | None:
        """Keys and values of its own layers; None if it has none."""
        ...

    def propose(self, committed: Committed) -> TokenTree:
        """A tree whose root is the newest committed token of each row."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` committed tokens, at least 1, of the only row."""
        ...
