"""A key/value cache that is allocated once, written in place and compacted in place.

Slot s of a row holds the token at position s of that row. Each row has its own length, so rows may
accept different numbers of tokens: a tree of N nodes is written after each row's length, the
accepted path is moved to the front of that place, and everything after the new length is free
again. There are no holes, no padding slots and no concatenation.

Legend: B batch, H key/value heads, S slots, Q nodes that ask, N pending nodes, A accepted nodes, D
head width, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

ROOM = 1024
"""Slots for new tokens where nobody knows how many there will be."""
GROWTH = 1.5
"""A cache that turns out too small grows by this factor."""


class SlotTable:
    """Which slots are in use, shared by all layers of a cache.

    lengths_B: int64, committed tokens of each row; `lengths`, `longest` and `uniform` say the same
    without asking the device.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device | str) -> None:
        self.capacity = capacity
        self.lengths = [0] * batch
        self.longest = 0
        self.uniform = True
        self.lengths_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.rows_B1 = torch.arange(batch, device=device)[:, None]
        self._slots_S = torch.arange(capacity, device=device)
        self.start = self.pending = 0

    def reserve(self, tokens: int, *, after: int = 0) -> None:
        """Announce that the next forward writes `tokens` tokens after each row's length, and after
        `after` pending tokens that were written there before.
        """
        self.start, self.pending = after, after + tokens
        if self.span > self.capacity:
            self.capacity = max(self.span, int(self.capacity * GROWTH))
            self._slots_S = torch.arange(self.capacity, device=self.lengths_B.device)

    @property
    def span(self) -> int:
        """How many slots the next forward can see, over all rows."""
        return self.longest + self.pending

    def slots_BA(self, offsets_BA: Tensor) -> Tensor:
        """The slots `offsets` after each row's length."""
        return self.lengths_B[:, None] + offsets_BA

    def advance(self, counts: list[int]) -> None:
        """Row b keeps its first `counts[b]` pending tokens."""
        self.set_lengths([old + new for old, new in zip(self.lengths, counts, strict=True)])

    def set_lengths(self, lengths: list[int]) -> None:
        """Set every row's number of committed tokens, and forget the pending ones."""
        self.lengths = lengths
        self.lengths_B.copy_(torch.tensor(lengths))
        self.longest = max(lengths)
        self.uniform = min(lengths) == self.longest
        self.start = self.pending = 0

    def visible(self, ancestors_BQN: Tensor) -> Tensor:
        """bool (B, Q, S): what the Q newest of N pending nodes see, every committed slot of their
        row, and of the pending ones their ancestors and themselves.
        """
        asking, nodes = ancestors_BQN.shape[1:]
        if self.uniform:  # one topology after one length: two blocks side by side, no gather
            committed = ancestors_BQN.new_ones(()).expand(len(ancestors_BQN), asking, self.longest)
            return torch.cat([committed, ancestors_BQN], dim=2)
        node_BS, index_BS = self._nodes(nodes)
        ancestors_BQS = ancestors_BQN.expand(len(node_BS), -1, -1).gather(
            2, index_BS[:, None, :].expand(-1, asking, -1)
        )
        in_tree_BS = (node_BS >= 0) & (node_BS < nodes)
        return (node_BS < 0)[:, None, :] | (ancestors_BQS & in_tree_BS[:, None, :])

    def positions(self, depths_BN: Tensor) -> Tensor:
        """int64 (B, S): the position that each slot holds; pending nodes are `depths` after the
        committed ones.
        """
        slots_S = self._slots_S[: self.span]
        if self.uniform:
            prefix = slots_S[None, : self.longest].expand(len(depths_BN), -1)
            return torch.cat([prefix, self.longest + depths_BN], dim=1)
        node_BS, index_BS = self._nodes(depths_BN.shape[1])
        depths_BS = depths_BN.expand(len(node_BS), -1).gather(1, index_BS)
        return torch.where(node_BS < 0, slots_S, self.lengths_B[:, None] + depths_BS)

    def _nodes(self, nodes: int) -> tuple[Tensor, Tensor]:
        """Each slot's node number (negative: committed; `nodes` or more: free), raw and clamped."""
        node_BS = self._slots_S[: self.span] - self.lengths_B[:, None]
        return node_BS, node_BS.clamp(0, nodes - 1)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, (B, H, capacity, D), allocated at the first write."""

    is_sliding = False
    is_croppable = False

    def __init__(self, table: SlotTable) -> None:
        super().__init__()
        self.table = table
        self._stores: list[Tensor] = []  # each (keys and/or values, B, H, capacity, D)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate, keys and values in one store where they are alike: one copy moves both."""
        self.dtype, self.device = key_states.dtype, key_states.device
        if key_states.shape == value_states.shape:
            self._stores = [self._allocate(2, key_states)]
        else:
            self._stores = [self._allocate(1, key_states), self._allocate(1, value_states)]
        self.keys, self.values = self._stores[0][0], self._stores[-1][-1]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write N tokens after each row's length; return a view of all that they may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self.table.capacity:
            self._grow()
        table, tokens = self.table, key_states.shape[2]
        if table.uniform:
            start = table.longest + table.start
            self.keys[:, :, start : start + tokens] = key_states
            self.values[:, :, start : start + tokens] = value_states
        else:
            offsets_1N = table.start + torch.arange(tokens, device=table.lengths_B.device)[None]
            slots_BN = table.slots_BA(offsets_1N).to(self.device)
            rows_B1 = table.rows_B1.to(self.device)
            self.keys[rows_B1, :, slots_BN] = key_states.transpose(1, 2)
            self.values[rows_B1, :, slots_BN] = value_states.transpose(1, 2)
        return self.keys[:, :, : table.span], self.values[:, :, : table.span]

    def move(self, source_BA: Tensor, target_BA: Tensor) -> None:
        """Copy slots within each row."""
        if self.table.uniform and len(source_BA) == 1:
            start = self.table.longest
            for store in self._stores:
                moved = store.index_select(3, source_BA[0])
                store[:, :, :, start : start + moved.shape[3]] = moved
            return
        rows_B1 = self.table.rows_B1.to(self.device)
        for store in self._stores:
            store[:, rows_B1, :, target_BA] = store[:, rows_B1, :, source_BA]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.table.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.table.longest

    def get_max_length(self) -> int:
        return -1  # it grows if it must

    def _allocate(self, count: int, states: Tensor) -> Tensor:
        batch, heads, _, width = states.shape
        return states.new_zeros(count, batch, heads, self.table.capacity, width)

    def _grow(self) -> None:
        old_stores = self._stores
        self.lazy_initialization(self.keys, self.values)
        for store, old in zip(self._stores, old_stores, strict=True):
            store[:, :, :, : old.shape[3]] = old


class SlotCache(Cache):  # type: ignore[misc]
    """The preallocated cache that `Target` and autoregressive heads write into.

    layers: attention layers. batch: rows. capacity: slots per row; prompt + new tokens + one tree
    is enough, and a cache that turns out too small grows.
    """

    def __init__(self, layers: int, batch: int, capacity: int, device: torch.device | str) -> None:
        self.table = SlotTable(batch, capacity, device)
        super().__init__(layers=[SlotLayer(self.table) for _ in range(layers)])

    def keep(self, path_BA: Tensor, counts: list[int], *, in_place: bool = False) -> None:
        """Commit, of the pending nodes, row b's `path_BA[b, :counts[b]]` (in depth order); forget
        the others.

        path_BA: int64 node numbers, padded with anything valid. in_place: every row's path is 0, 1,
        2, ..., so the nodes are already where they belong.
        """
        if not in_place:
            offsets_1A = torch.arange(path_BA.shape[1], device=path_BA.device)[None]
            source_BA = self.table.slots_BA(path_BA)
            target_BA = self.table.slots_BA(offsets_1A)
            for layer in self.layers:
                if layer.is_initialized:
                    layer.move(source_BA.to(layer.device), target_BA.to(layer.device))
        self.table.advance(counts)

    def copy_row(self, row: int, other: SlotCache) -> None:
        """Take what this row holds from the one row of `other`, which has the same text."""
        length = self.table.lengths[row]
        for layer, source in zip(self.layers, other.layers, strict=True):
            for store, copied in zip(layer._stores, source._stores, strict=True):
                store[:, row, :, :length] = copied[:, 0, :, :length]


class LongRope:
    """Targets (Phi-3 to Phi-4-mini) of which texts beyond a limit have RoPE factors of their own.

    transformers chooses the factors of a whole forward by its greatest position. A forward of ours
    may hold rows, chunks and tree nodes on both sides of the limit, so each token has a choice.

    limit: texts of more tokens have long factors; None where the model knows no such limit.
    crossing: the same where `generate` computes a text anew when it grows over the limit; None
    where it keeps what it has computed with short factors.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
        parameters = parameters or {}  # of the model, or of each type of layer
        limits = [
            each["original_max_position_embeddings"]
            for each in (parameters, *parameters.values())
            if isinstance(each, dict) and each.get("rope_type") == "longrope"
        ]
        self.limit: int | None = limits[0] if limits else None
        self.crossing = self.limit if limits and _drops_its_cache(model, limits[0]) else None
        self._ropes = [
            module
            for module in model.modules()
            if limits and "longrope" in str(getattr(module, "rope_type", ""))
        ]

    def factors(self, texts_B1: Tensor, more_BT: Tensor | int = 0) -> AbstractContextManager[None]:
        """Inside, each token gets the factors of a text of so many tokens and so many more."""
        return self._chosen(texts_B1 + more_BT) if self._ropes else nullcontext()

    @contextmanager
    def _chosen(self, texts_BT: Tensor) -> Iterator[None]:
        limit = self.limit or 0

        def choose(rope: nn.Module, args: Any, kwargs: Any, output: Any) -> tuple[Tensor, ...]:
            given = inspect.signature(rope.forward).bind(*args, **kwargs).arguments
            positions_BT = given.pop("position_ids")
            beyond_B1 = torch.full_like(positions_BT[:, :1], limit)
            short = rope.forward(position_ids=positions_BT.clamp(max=limit - 1), **given)
            long = rope.forward(position_ids=torch.cat([positions_BT, beyond_B1], 1), **given)
            is_long_BT1 = (texts_BT > limit).to(positions_BT.device)[:, :, None]
            pairs = zip(long, short, strict=True)
            return tuple(torch.where(is_long_BT1, a[:, :-1], b) for a, b in pairs)

        with ExitStack() as hooks:
            for rope in self._ropes:
                handle = rope.register_forward_hook(choose, with_kwargs=True)
                hooks.callback(handle.remove)
            yield


def document_lengths(positions_BT: Tensor) -> Tensor:
    """int64 (B, T): of each token of packed rows, how many tokens its document has."""
    numbers_BT = (positions_BT == 0).cumsum(1)
    lengths_BD = F.pad(torch.zeros_like(positions_BT), (0, 1))  # no row has more documents
    lengths_BD.scatter_reduce_(1, numbers_BT, positions_BT + 1, "amax")
    return lengths_BD.gather(1, numbers_BT)


def _drops_its_cache(model: PreTrainedModel, limit: int) -> bool:
    """Whether `generate` does, when a text grows beyond the limit."""
    cache = SlotCache(1, 1, 1, "cpu")
    cache.table.set_lengths([limit])
    prepared = model.prepare_inputs_for_generation(
        torch.zeros(1, limit + 1, dtype=torch.long), past_key_values=cache, next_sequence_length=1
    )
    return prepared.get("past_key_values") is None
