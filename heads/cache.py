"""A key/value cache that is written in place and compacted in place, and grows with its text.

Slot s of a row holds the token at position s of that row. Each row has its own length, so rows may
accept different numbers of tokens: a tree is written after each row's length, the accepted path is
moved to the front of these slots, and everything after the new length is free again. There are no
holes, no padding slots and no concatenation.

Legend: B batch, H key/value heads, S slots, Q query nodes, N pending nodes, C accepted nodes, D
head width, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftheads.heads.hybrid.states import States

ROOM = 1024
"""Slots reserved for new tokens, at most: few answers are as long as they may be."""
GROWTH = 1.5
"""Factor by which a full cache grows."""
SPARE = 4
"""A cache whose text is cut back keeps at most so many times the slots of a new one."""


# Who calls what of a SlotTable, and when. `lengths` are those of committed tokens.
#
#   a pass of the target  reserve(N)          before it: room for N tokens after each row's length
#                         visible, positions  its mask: (B, Q, S), and the position in each slot
#   SlotLayer.update      start, span         in each layer: writes N slots, returns those in sight
#   a head's own layers   reserve(N, after=M) level by level: M nodes of the tree are there already
#   SlotCache.keep        advance(counts)     a path is accepted: it was moved to the front before
#   prefill               advance(counts)     all tokens of a chunk, fewer in rows that ended
#   a compiled step       fix, note           before: shapes of the step; after: counts, on the host
#                         free                after the last one: any shapes again
#   a session             rewind([length])    back to a prefix; slots of a much longer text go
#   rows that come or go  join, select        with their lengths; `empty`: a place without a text
class SlotTable:
    """The slots in use, shared by all layers of a cache.

    lengths_B: int64, committed tokens of each row. `lengths`, `longest` and `uniform` (all rows are
    equally long) are the same on the host. After `fix`, passes have shapes that depend on no
    length, and read lengths from the device alone.
    """

    def __init__(
        self, batch: int, capacity: int, device: torch.device | str, growth: float = GROWTH
    ) -> None:
        self.capacity = capacity
        self._growth = growth
        self.lengths = [0] * batch
        self.longest = 0
        self.uniform = True
        self.lengths_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.rows_B1 = torch.arange(batch, device=device)[:, None]
        self._slots_S = torch.arange(capacity, device=device)
        self.start = self.pending = 0
        self.fixed_S: Tensor | None = None  # after `fix`: the slots that a pass can see

    def fix(self, room: int, bucket: int = 1) -> None:
        """Let the following passes see all committed slots and the next `room`; to be called before
        each step, as the slots are those of now. With a bucket above 1, passes see a multiple of
        it, and in long texts of more: so that a text of any length has few different spans.
        """
        span = self.longest + room
        if bucket > 1:
            # spans above a power of two are at most a quarter of the next one apart
            next_power = 1 << (span - 1).bit_length()
            bucket = max(bucket, next_power // 4)
            span = math.ceil(span / bucket) * bucket
        if span >= self.capacity:
            # a compiled step would treat a cache that is full as a case of its own
            self._grow(span + 1)
        self.uniform = False
        self.fixed_S = self._slots_S[:span]

    def free(self) -> None:
        """Undo `fix`."""
        self.fixed_S = None
        self.set_lengths(self.lengths)

    def rewind(self, lengths: list[int]) -> None:
        """Keep a prefix of each row, of so many tokens. Slots of much longer texts are given
        back.
        """
        self.fixed_S = None
        self.set_lengths(lengths)
        self._shrink()

    def reserve(self, tokens: int, *, after: int = 0) -> None:
        """Prepare for a forward pass that writes `tokens` tokens after each row's length and the
        `after` pending tokens there.
        """
        self.start = after
        self.pending = after + tokens
        if self.fixed_S is None:
            self._grow(self.span)

    @property
    def slots_S(self) -> Tensor:
        """int64: the slots that the next forward pass can see, over all rows."""
        return self._slots_S[: self.span] if self.fixed_S is None else self.fixed_S

    @property
    def span(self) -> int:
        """Number of `slots_S`."""
        return self.longest + self.pending if self.fixed_S is None else self.fixed_S.shape[0]

    def advance(self, counts: Sequence[int] | Tensor) -> None:
        """Commit the first `counts[b]` pending tokens of each row b. A tensor, after `fix`, is to
        be followed by `note` on the host.
        """
        if isinstance(counts, Tensor):
            self.lengths_B += counts
        else:
            self.set_lengths([old + new for old, new in zip(self.lengths, counts, strict=True)])

    def note(self, counts: Sequence[int]) -> None:
        """Repeat on the host what a tensor added to the lengths."""
        self.lengths = [old + new for old, new in zip(self.lengths, counts, strict=True)]
        self.longest = max(self.lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Set the number of committed tokens of each row; discard the pending ones."""
        self.lengths = lengths
        self.lengths_B.copy_(torch.tensor(lengths))
        self.longest = max(lengths)
        self.uniform = min(lengths) == self.longest
        self.start = self.pending = 0

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows alone."""
        self.lengths_B = self.lengths_B[rows]
        self.rows_B1 = self.rows_B1[: len(rows)]
        self.set_lengths([self.lengths[row] for row in rows])
        self._shrink()

    def empty(self, row: int) -> None:
        """Forget the text of a row, whose place stays."""
        self.set_lengths([*self.lengths[:row], 0, *self.lengths[row + 1 :]])

    def hold(self, length: int) -> None:
        """Let the only row have so many tokens, and no other slots."""
        self.set_lengths([length])
        self._resize(length)

    def join(self, lengths: Sequence[int], places: Sequence[int]) -> None:
        """Set the lengths of the rows at these places; those after the last row are new."""
        rows = max(len(self.lengths), max(places) + 1)
        if rows > len(self.lengths):
            self.lengths_B = self.lengths_B.new_zeros(rows)
            self.rows_B1 = torch.arange(rows, device=self.rows_B1.device)[:, None]
        joined = self.lengths + [0] * (rows - len(self.lengths))
        for place, length in zip(places, lengths, strict=True):
            joined[place] = length
        self.set_lengths(joined)
        self._grow(self.longest)
        self._shrink()

    def visible(self, ancestors_BQN: Tensor) -> Tensor:
        """bool (B, Q, S): the slots that the Q newest of N pending nodes see: all committed ones of
        their row, their ancestors and themselves.
        """
        queries, nodes = ancestors_BQN.shape[1:]
        if self.uniform:  # two blocks side by side, no gather
            committed = ancestors_BQN.new_ones(()).expand(len(ancestors_BQN), queries, self.longest)
            return torch.cat([committed, ancestors_BQN], dim=2)
        node_BS, index_BS = self._nodes(nodes)
        ancestors_BQS = ancestors_BQN.expand(len(node_BS), -1, -1).gather(
            2, index_BS[:, None, :].expand(-1, queries, -1)
        )
        in_tree_BS = (node_BS >= 0) & (node_BS < nodes)
        return (node_BS < 0)[:, None, :] | (ancestors_BQS & in_tree_BS[:, None, :])

    def positions(self, depths_BN: Tensor) -> Tensor:
        """int64 (B, S): the position in each slot; pending nodes are `depths` after the committed
        ones.
        """
        slots_S = self.slots_S
        if self.uniform:
            prefix = slots_S[None, : self.longest].expand(len(depths_BN), -1)
            return torch.cat([prefix, self.longest + depths_BN], dim=1)
        node_BS, index_BS = self._nodes(depths_BN.shape[1])
        depths_BS = depths_BN.expand(len(node_BS), -1).gather(1, index_BS)
        return torch.where(node_BS < 0, slots_S, self.lengths_B[:, None] + depths_BS)

    def _nodes(self, nodes: int) -> tuple[Tensor, Tensor]:
        """The node number of each slot (negative: committed; >= `nodes`: free), raw and clamped."""
        node_BS = self.slots_S - self.lengths_B[:, None]
        return node_BS, node_BS.clamp(0, nodes - 1)

    def _grow(self, span: int) -> None:
        """Have so many slots at least."""
        if span > self.capacity:
            self._resize(max(span, int(self.capacity * self._growth)))

    def _shrink(self) -> None:
        """Give back the slots of texts that were much longer."""
        if self.capacity > SPARE * (self.longest + ROOM):
            self._resize(self.longest + ROOM)

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots_S = torch.arange(capacity, device=self.lengths_B.device)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, (B, H, capacity, D), allocated at the first write."""

    is_sliding = False
    is_croppable = False

    def __init__(self, table: SlotTable) -> None:
        super().__init__()
        self.table = table

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for states of these shapes."""
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write tokens after each row's length; returns views of all slots that they may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.table.fixed_S is None:
            self.fit()
        table = self.table
        tokens = key_states.shape[2]
        if table.uniform:
            start = table.longest + table.start
            self.keys[:, :, start : start + tokens] = key_states
            self.values[:, :, start : start + tokens] = value_states
        else:
            offsets_1N = table.start + torch.arange(tokens, device=table.lengths_B.device)[None]
            slots_BN = (table.lengths_B[:, None] + offsets_1N).to(self.device)
            rows_B1 = table.rows_B1.to(self.device)
            self.keys[rows_B1, :, slots_BN] = key_states.transpose(1, 2)
            self.values[rows_B1, :, slots_BN] = value_states.transpose(1, 2)
        return self.keys[:, :, : table.span], self.values[:, :, : table.span]

    def move(self, source_BC: Tensor, target_BC: Tensor) -> None:
        """Copy slots within each row."""
        start = self.table.longest
        rows_B1 = self.table.rows_B1.to(self.device)
        for store in (self.keys, self.values):
            if self.table.uniform and len(source_BC) == 1:
                moved = store.index_select(2, source_BC[0])
                store[:, :, start : start + moved.shape[2]] = moved
            else:
                store[rows_B1, :, target_BC] = store[rows_B1, :, source_BC]

    def fit(self) -> None:
        """Follow the rows and the capacity of the table."""
        if not self.is_initialized:
            return
        rows, _, slots, _ = self.keys.shape
        if slots != self.table.capacity or rows < len(self.table.lengths):
            self.keys = self._resized(self.keys)
            self.values = self._resized(self.values)

    def join(self, other: SlotLayer, places: Sequence[int]) -> None:
        """Replace the rows at these places by those of `other`."""
        if not self.is_initialized:
            self.lazy_initialization(other.keys, other.values)
        self.fit()
        slots = other.table.longest
        for mine, new in ((self.keys, other.keys), (self.values, other.values)):
            mine[places] = 0  # what was there may not be finite, which no mask hides
            mine[places, :, :slots] = new[:, :, :slots]

    def empty(self) -> None:
        """Free the memory, until the next write."""
        del self.keys, self.values
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.table.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.table.longest

    def get_max_length(self) -> int:
        return -1  # it grows

    def _resized(self, states: Tensor) -> Tensor:
        resized = self._allocate(states)
        rows = len(states)
        slots = min(states.shape[2], resized.shape[2])
        resized[:rows, :, :slots] = states[:, :, :slots]
        return resized

    def _allocate(self, states: Tensor) -> Tensor:
        _, heads, _, width = states.shape
        return states.new_zeros(len(self.table.lengths), heads, self.table.capacity, width)


class SlotCache(Cache):  # type: ignore[misc]
    """The preallocated cache of a target or of a head's own layers.

    layers: attention layers. batch: rows. capacity: slots per row at first; the cache grows by
    `growth` when prompt, new tokens and one tree need more. states: of a hybrid target's other
    layers.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        device: torch.device | str,
        states: States | None = None,
        growth: float = GROWTH,
    ) -> None:
        self.table = SlotTable(batch, capacity, device, growth)
        self.states = states
        super().__init__(layers=[SlotLayer(self.table) for _ in range(layers)])

    def fix(self, room: int, bucket: int = 1) -> None:
        """See `SlotTable.fix`."""
        self.table.fix(room, bucket)
        if self.states is not None:
            self.states.fix()
        for layer in self.layers:
            layer.fit()

    def free(self) -> None:
        """Undo `fix`."""
        self.table.free()
        if self.states is not None:
            self.states.free()

    def keep(
        self, path_BC: Tensor, counts: Sequence[int] | Tensor, *, in_place: bool = False
    ) -> None:
        """Commit the pending nodes `path_BC[b, :counts[b]]` of each row b; discard the others.

        path_BC: int64 node numbers in depth order, padded with any valid ones. in_place: the path
        of each row is 0, 1, 2, ..., so nothing has to move.
        """
        if not in_place:
            offsets_1C = torch.arange(path_BC.shape[1], device=path_BC.device)[None]
            source_BC = self.table.lengths_B[:, None] + path_BC
            target_BC = self.table.lengths_B[:, None] + offsets_1C
            for layer in self.layers:
                if layer.is_initialized:
                    layer.move(source_BC.to(layer.device), target_BC.to(layer.device))
        if self.states is not None:
            count_B1 = torch.as_tensor(counts, device=path_BC.device)[:, None]
            last_B = path_BC.gather(1, (count_B1 - 1).clamp(min=0))[:, 0]
            self.states.keep(torch.where(count_B1[:, 0] > 0, last_B, -1))
        self.table.advance(counts)
        if self.states is not None and not isinstance(counts, Tensor):
            self.states.note(counts)

    def note(self, counts: Sequence[int]) -> None:
        """Repeat on the host what `keep` committed by a tensor."""
        self.table.note(counts)
        if self.states is not None:
            self.states.note(counts)

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[b]` pending tokens of each row b, which are its text."""
        if self.states is not None:
            self.states.commit()
        self.table.advance(counts)

    def rewind(self, length: int) -> int:
        """Cut the text of the only row back to `length` tokens, or to fewer if there are states,
        which must be those of its end. Returns to how many.
        """
        if self.states is not None:
            length = self.states.rewind(length)
        self.table.rewind([length])
        return length

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows alone."""
        self.table.select(rows)
        if self.states is not None:
            self.states.select(rows)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys = layer.keys[rows]
                layer.values = layer.values[rows]

    def join(self, other: SlotCache, places: Sequence[int]) -> None:
        """Row i of `other` becomes row places[i]; places after the last row add rows. `other`
        gives up its memory, until it takes a row back.
        """
        self.table.join(other.table.lengths, places)
        if self.states is not None and other.states is not None:
            self.states.join(other.states, places)
        for layer, new in zip(self.layers, other.layers, strict=True):
            if new.is_initialized:
                layer.join(new, places)
                new.empty()

    def take(self, other: SlotCache, place: int, most: int) -> None:
        """Copy the first `most` tokens of the row at this place of `other` here, where it is the
        only one. Recurrent states are those of all its tokens, until `rewind`.
        """
        whole = other.table.lengths[place]
        length = min(whole, most)
        self.table.hold(length)
        for layer, source in zip(self.layers, other.layers, strict=True):
            if source.is_initialized:
                layer.lazy_initialization(source.keys, source.values)
                layer.keys[0] = source.keys[place, :, :length]
                layer.values[0] = source.values[place, :, :length]
        if self.states is not None and other.states is not None:
            self.states.take(other.states, place, whole)
