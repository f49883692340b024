"""Training-time test: a head is trained on its own output, as it will be used (EAGLE-3, arXiv
2503.01840, section 3.1).

Step 0 runs over whole rows, on the target's features. Step j runs over the roots alone: root i
reads token i + j and the head's own output of step j - 1, at position i + j. It sees what a drafter
would see there: the target's features up to i, and its own entries of steps 1..j, but not those of
other roots.

Legend: B batch, T tokens, Q roots of a row (positions with a loss), R rows of the result, D width,
H query heads (in states: hidden width), G key/value heads, W head width, J steps so far, C queries
of a chunk, S keys that it can see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftheads.heads.batch import Batch, at_places, packed
from draftheads.heads.layers import Positional
from draftheads.heads.target.model import Target

CHUNK = 1024
"""Queries of longer rows attend in chunks of so many, each to the keys that it can see."""
SPARE = 8
"""Columns added to each head for the merge. Two are used, but kernels need multiples of eight."""


class Sight:
    """Which keys of a row its queries see, in step 0: causal within a document, without its first
    token, which forms no pair. That one sees itself alone, so that its scores are not empty.

    places_BQ: of the queries, rising in each row, on the host; None: all. window: positions that a
    query sees, itself included; None: all.
    """

    def __init__(self, batch: Batch, window: int | None, places_BQ: np.ndarray | None = None):
        positions_BT = (batch.host or batch).positions_BT.numpy()
        self.batch = batch
        self.window = window
        if places_BQ is None:
            places_BQ = np.tile(np.arange(positions_BT.shape[1]), (len(positions_BT), 1))
        starts_BT = np.where(positions_BT == 0, np.arange(positions_BT.shape[1]), 0)
        starts_BT = np.maximum.accumulate(starts_BT, axis=1)
        self.first_BQ = np.take_along_axis(starts_BT, places_BQ, 1)
        self.last_BQ = places_BQ
        self.queries = places_BQ.shape[1]
        self.places_BQ = batch.upload(places_BQ)
        self._masks: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def keys(self, part: slice) -> slice:
        """The keys that some of these queries see."""
        return slice(int(self.first_BQ[:, part].min()), int(self.last_BQ[:, part].max()) + 1)

    def mask(self, part: slice, dtype: torch.dtype, later: int = 0) -> Tensor:
        """0 or -inf, (B, 1, C, S): which of `keys` these queries see, when they are `later`
        positions further away.
        """
        key = (part.start, later if self.window else 0, dtype)
        if key in self._masks:
            return self._masks[key]
        keys = self.keys(part)
        batch = self.batch
        places_BC = self.places_BQ[:, part]
        positions_BC = batch.positions_BT.gather(1, places_BC)
        positions_B1S = batch.positions_BT[:, None, keys]
        distance_BCS = positions_BC[:, :, None] - positions_B1S
        visible_BCS = batch.visible(places_BC, keys)
        seen_BCS = visible_BCS & (positions_B1S > 0)
        if self.window is not None:
            seen_BCS &= distance_BCS + later < self.window
        if later == 0:
            seen_BCS |= visible_BCS & (distance_BCS == 0)
        mask_BCS = torch.zeros(seen_BCS.shape, dtype=dtype, device=seen_BCS.device)
        mask_B1CS = mask_BCS.masked_fill_(~seen_BCS, -torch.inf)[:, None]
        if self.queries <= CHUNK:  # else too large to keep
            self._masks[key] = mask_B1CS
        return mask_B1CS

    def in_chunks(self, attend: Callable[[slice], Tensor]) -> Tensor:
        """Attention (B, H, Q, W) of all queries, from that of some. That of a long row is computed
        again in the backward pass, chunk by chunk, so that no scores and masks are kept.
        """
        if self.queries <= CHUNK:
            return attend(slice(0, self.queries))
        chunks = []
        for start in range(0, self.queries, CHUNK):
            part = slice(start, min(start + CHUNK, self.queries))
            if torch.is_grad_enabled():
                chunk = checkpoint(attend, part, use_reentrant=False, preserve_rng_state=False)
            else:
                chunk = attend(part)
            chunks.append(chunk)
        return torch.cat(chunks, dim=2)


class RowMemory:
    """Attention within rows."""

    def __init__(self, batch: Batch, window: int | None = None) -> None:
        self.sight = Sight(batch, window)

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        k_BHQW, v_BHQW = per_query_head(q_BHQW.shape[1], k_BGQW, v_BGQW)

        def attend(part: slice) -> Tensor:
            keys = self.sight.keys(part)
            mask_B1CS = self.sight.mask(part, q_BHQW.dtype)
            k_BHSW = k_BHQW[:, :, keys]
            v_BHSW = v_BHQW[:, :, keys]
            return F.scaled_dot_product_attention(
                q_BHQW[:, :, part], k_BHSW, v_BHSW, attn_mask=mask_B1CS
            )

        return self.sight.in_chunks(attend)


class UnrolledMemory:
    """Keys and values of one layer: those of step 0, and one entry per root and later step.

    Attention over both is one call of torch's fused attention, over the keys of step 0 and *one
    more key*, which represents all own entries of a root. Its score is the log-sum-exp of theirs,
    passed in through a spare column of query and key; a spare column of the values returns the
    weight that it got. So no (T, T J) matrix is computed, and autograd does the rest.

    rows, roots: what the queries of step 0, and of later steps, see. step: the next one to attend;
    `unroll` sets it, also when checkpointing repeats a step.
    """

    def __init__(self, rows: RowMemory, roots: Sight) -> None:
        self.rows, self.roots, self.window = rows, roots, roots.window
        self.step = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._first: tuple[Tensor, Tensor] | None = None

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        if self.step == 0:
            first = extended(*per_query_head(q_BHQW.shape[1], k_BGQW, v_BGQW))
            self._first = self._first or first  # again, where checkpointing repeats it
            return self.rows.attend(q_BHQW, k_BGQW, v_BGQW)
        # copies, because views would keep the queries alive
        k_BGQW = k_BGQW.contiguous()
        v_BGQW = v_BGQW.contiguous()
        if self.step > len(self.keys):
            self.keys.append(k_BGQW)
            self.values.append(v_BGQW)
        q_BHQW = q_BHQW * q_BHQW.shape[-1] ** -0.5
        keys_J = self.keys[: self.step]
        values_J = self.values[: self.step]
        if self.window is not None:
            keys_J = keys_J[-self.window :]
            values_J = values_J[-self.window :]
        assert self._first is not None
        first = self._first
        later = self.step
        own = _own(q_BHQW, keys_J, values_J)

        def attend(part: slice) -> Tensor:
            seen = self.roots.keys(part)
            keys, values = (_with_additional(each, seen) for each in first)
            mask_B1CS = F.pad(self.roots.mask(part, q_BHQW.dtype, later), (1, 0))
            mine = own[0][:, :, part], own[1][:, :, part]
            return joined(q_BHQW[:, :, part], (keys, values), mask_B1CS, mine)

        return self.roots.in_chunks(attend)


def _with_additional(entries_BHTW: Tensor, seen: slice) -> Tensor:
    """The additional entry, then those that are seen."""
    if seen.start == 0:
        return entries_BHTW[:, :, : seen.stop + 1]
    here = entries_BHTW[:, :, seen.start + 1 : seen.stop + 1]
    return torch.cat([entries_BHTW[:, :, :1], here], dim=2)


def extended(k_BHTW: Tensor, v_BHTW: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values after the additional one that `joined` needs."""
    key, value = (F.pad(torch.zeros_like(each[:, :, :1]), (0, SPARE)) for each in (k_BHTW, v_BHTW))
    key[..., k_BHTW.shape[-1] : k_BHTW.shape[-1] + 2] = 1.0
    value[..., v_BHTW.shape[-1]] = 1.0
    keys = torch.cat([key, F.pad(k_BHTW, (0, SPARE))], dim=2)
    values = torch.cat([value, F.pad(v_BHTW, (0, SPARE))], dim=2)
    return keys, values


def joined(
    q_BHQW: Tensor,
    memory: tuple[Tensor, Tensor],
    mask_B1QT: Tensor,
    own: tuple[Tensor, Tensor],
) -> Tensor:
    """Attention of scaled queries to T - 1 keys and, as one more key, to all own entries of each
    query; one call of torch's fused attention.

    memory: `extended` keys and values. mask_B1QT: 0 or -inf; the additional key is always seen.
    own: the attention to own entries alone, (B, H, Q, W), and the log-sum-exp of its scores,
    (B, H, Q, 1).
    """
    own_BHQW, score_BHQ1 = own
    high = score_BHQ1.to(q_BHQW.dtype)  # in two parts, to keep its precision in bfloat16
    low = (score_BHQ1 - high.to(score_BHQ1.dtype)).to(q_BHQW.dtype)
    query = F.pad(torch.cat([q_BHQW, high, low], dim=-1), (0, SPARE - 2))
    out = F.scaled_dot_product_attention(query, *memory, attn_mask=mask_B1QT, scale=1.0)
    width = own_BHQW.shape[-1]  # of the values, which may be narrower than keys
    return out[..., :width] + out[..., width : width + 1] * own_BHQW


def per_query_head(heads: int, *of_groups_BGQW: Tensor) -> list[Tensor]:
    """Repeat keys and values for each query head: with grouped heads and a mask, some devices
    materialise all scores.
    """
    times = heads // of_groups_BGQW[0].shape[1]
    return [each.repeat_interleave(times, dim=1) for each in of_groups_BGQW]


def _own(q_BHQW: Tensor, keys_J: list[Tensor], values_J: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to a root's own entries: output and log-sum-exp of the scores."""
    groups = keys_J[0].shape[1]
    grouped = q_BHQW.view(len(q_BHQW), groups, -1, *q_BHQW.shape[2:])  # (B, G, H / G, Q, W)
    scores = [(grouped * key[:, :, None]).sum(-1, dtype=torch.float32) for key in keys_J]
    scores_J = torch.stack(scores)
    weights_J = torch.softmax(scores_J, dim=0).to(q_BHQW.dtype)
    parts = zip(weights_J, values_J, strict=True)
    out = sum(weight[..., None] * value[:, :, None] for weight, value in parts)
    assert isinstance(out, Tensor)
    return out.flatten(1, 2), scores_J.logsumexp(0).flatten(1, 2)[..., None]


class Unrollable(Protocol):
    """The part of an EAGLE head that `unroll` needs."""

    layer_count: int
    rope: Positional
    window: int | None

    def advance(self, *arguments: Any, **named: Any) -> Tensor:
        """The next hidden_BQH, from (embedded_BQD, hidden_BQH, angles, memories)."""
        ...

    def checkpointed(self, part: Callable[..., Tensor], *arguments: Any) -> Tensor: ...


class Unrolled(NamedTuple):
    """Outputs of a head at the roots of a batch, for all steps, in R rows. Rows that predict the
    same token are contiguous, because places rise.
    """

    hidden_RH: Tensor
    steps_R: Tensor  # int64, from 0
    places_R: Tensor  # int64, place of the predicted token in the flattened batch (B T)
    on_host_R: np.ndarray  # the same


def unroll(
    head: Unrollable, batch: Batch, hidden_BTH: Tensor, target: Target, steps: int
) -> Unrolled:
    """Unroll `head` for `steps` steps; hidden_BTH: its fused features, in the dtype of the residual
    stream.
    """
    masks = batch.root_masks(steps)
    places_BQ, real_BQ = packed(masks[0])
    # padding repeats a root, so that places rise
    places_BQ = np.where(real_BQ, places_BQ, places_BQ.max(1, where=real_BQ, initial=0)[:, None])
    rows = RowMemory(batch, head.window)
    roots = Sight(batch, head.window, places_BQ)
    memories = [UnrolledMemory(rows, roots) for _ in range(head.layer_count)]
    roots_BQ = roots.places_BQ

    def advance(step: int, tokens_BQ: Tensor, positions_BQ: Tensor, hidden_BQH: Tensor) -> Tensor:
        for memory in memories:
            memory.step = step
        embedded_BQD = target.embed(tokens_BQ).to(hidden_BQH.dtype)
        return head.advance(embedded_BQD, hidden_BQH, head.rope(positions_BQ), memories)

    hidden_BTH = head.checkpointed(advance, 0, batch.tokens_BT, batch.positions_BT, hidden_BTH)
    hidden_BQH = hidden_BTH.gather(1, roots_BQ[:, :, None].expand(-1, -1, hidden_BTH.shape[-1]))
    start_BQ = batch.positions_BT.gather(1, roots_BQ)
    number_BT = np.zeros(masks[0].shape, dtype=np.int64)  # of each root among all queries
    number_BT[masks[0]] = np.flatnonzero(real_BQ)
    hidden = []
    places = []
    for step, mask_BT in enumerate(masks):
        if step:
            next_BQ = (roots_BQ + step).clamp(max=batch.tokens_BT.shape[1] - 1)
            tokens_BQ = batch.tokens_BT.gather(1, next_BQ)
            hidden_BQH = head.checkpointed(advance, step, tokens_BQ, start_BQ + step, hidden_BQH)
        hidden.append(at_places(hidden_BQH, batch.upload(number_BT[mask_BT])))
        places.append(np.flatnonzero(mask_BT) + step + 1)
    return _by_place(batch, hidden, places)


def _by_place(batch: Batch, hidden: list[Tensor], places: list[np.ndarray]) -> Unrolled:
    """The rows of all steps, in the order of the tokens that they predict."""
    steps_R = np.repeat(np.arange(len(places)), [len(each) for each in places])
    places_R = np.concatenate(places)
    order_R = np.argsort(places_R, kind="stable")
    return Unrolled(
        torch.cat(hidden).index_select(0, batch.upload(order_R)),
        batch.upload(steps_R[order_R]),
        batch.upload(places_R[order_R]),
        places_R[order_R],
    )
