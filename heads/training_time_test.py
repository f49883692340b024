"""Training-time test: a head is trained on its own output, as it will be used (EAGLE-3, arXiv
2503.01840, section 3.1).

Step 0 runs over whole rows, on the target's features. Step j runs over the roots alone: root i
reads token i + j and the head's own output of step j - 1, at position i + j. It sees what a drafter
would see there: the target's features up to i, and its own entries of steps 1..j, but not those of
other roots.

Legend: B batch, T tokens, Q roots of a row (positions with a loss), R rows of the result, D width,
H query heads (in states: hidden width), G key/value heads, W head width, J steps so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.batch import Batch
from draftheads.heads.layers import Rope
from draftheads.heads.target import Target

SPARE = 8
"""Columns added to each head for the merge. Two are used, but kernels need multiples of eight."""


class RowMemory:
    """Attention within rows, by a mask (B, T, T)."""

    def __init__(self, visible_BTT: Tensor) -> None:
        self.visible_B1TT = visible_BTT[:, None]

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        k_BHQW, v_BHQW = per_query_head(q_BHQW.shape[1], k_BGQW, v_BGQW)
        return F.scaled_dot_product_attention(q_BHQW, k_BHQW, v_BHQW, attn_mask=self.visible_B1TT)


class UnrolledMemory:
    """Keys and values of one layer: those of step 0, and one entry per root and later step.

    Attention over both is one call of torch's fused attention, over the keys of step 0 and *one
    more key*, which represents all own entries of a root. Its score is the log-sum-exp of theirs,
    passed in through a spare column of query and key; a spare column of the values returns the
    weight that it got. So no (T, T J) matrix is computed, and autograd does the rest.

    step: the next one to attend; `unroll` sets it, also when checkpointing repeats a step.
    """

    def __init__(self, visible_BTT: Tensor, roots_BQ: Tensor, window: int | None) -> None:
        mask_BTT = torch.zeros(visible_BTT.shape, device=visible_BTT.device)
        self.mask_B1TT = mask_BTT.masked_fill_(~visible_BTT, -torch.inf)[:, None]
        self.roots_BQ, self.window = roots_BQ, window
        self.step = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._first: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        if self.step == 0:
            mask_B1TT = self.mask_B1TT.to(q_BHQW.dtype)
            k_BHTW, v_BHTW = per_query_head(q_BHQW.shape[1], k_BGQW, v_BGQW)
            index = self.roots_BQ[:, None, :, None].expand(-1, 1, -1, mask_B1TT.shape[-1])
            mask_B1QT = F.pad(mask_B1TT.gather(2, index), (1, 0))
            first = *extended(k_BHTW, v_BHTW), mask_B1QT  # again, where checkpointing repeats it
            self._first = self._first or first
            return F.scaled_dot_product_attention(q_BHQW, k_BHTW, v_BHTW, attn_mask=mask_B1TT)
        # copies, because views would keep the queries alive
        k_BGQW, v_BGQW = k_BGQW.contiguous(), v_BGQW.contiguous()
        if self.step > len(self.keys):
            self.keys.append(k_BGQW)
            self.values.append(v_BGQW)
        q_BHQW = q_BHQW * q_BHQW.shape[-1] ** -0.5
        return self._merged(q_BHQW, self.keys[: self.step], self.values[: self.step])

    def _merged(self, q_BHQW: Tensor, keys_J: list[Tensor], values_J: list[Tensor]) -> Tensor:
        assert self._first is not None
        keys, values, mask_B1QT = self._first
        if self.window is not None:  # each step is one position further away
            places_T = torch.arange(mask_B1QT.shape[-1] - 1, device=mask_B1QT.device)
            distance_BQT = self.roots_BQ[:, :, None] + len(keys_J) - places_T
            gone_BQT = F.pad(distance_BQT >= self.window, (1, 0))
            mask_B1QT = mask_B1QT.masked_fill(gone_BQT[:, None], -torch.inf)
            keys_J, values_J = keys_J[-self.window :], values_J[-self.window :]
        return joined(q_BHQW, (keys, values), mask_B1QT, _own(q_BHQW, keys_J, values_J))


def extended(k_BHTW: Tensor, v_BHTW: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values after the additional one that `joined` needs."""
    key = F.pad(torch.zeros_like(k_BHTW[:, :, :1]), (0, SPARE))
    value = key.clone()
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
    width = q_BHQW.shape[-1]
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
    rope: Rope
    window: int | None

    def advance(self, *arguments: Any, **named: Any) -> Tensor:
        """The next hidden_BQH, from (embedded_BQD, hidden_BQH, angles, memories)."""

    def checkpointed(self, part: Callable[..., Tensor], *arguments: Any) -> Tensor: ...


class Unrolled(NamedTuple):
    """Outputs of a head at the roots of a batch, for all steps, in R rows. Rows that predict the
    same token are contiguous, because places rise.
    """

    hidden_RH: Tensor
    steps_R: Tensor  # int64, from 0
    places_R: Tensor  # int64, place of the predicted token in the flattened batch (B T)


def unroll(
    head: Unrollable, batch: Batch, hidden_BTH: Tensor, target: Target, steps: int
) -> Unrolled:
    """Unroll `head` for `steps` steps; hidden_BTH: its fused features, in the dtype of the residual
    stream.
    """
    masks = list(batch.roots(steps))
    roots_BQ, real_BQ = packed(masks[0])
    visible_BTT = visible(batch, head.window)
    memories = [UnrolledMemory(visible_BTT, roots_BQ, head.window) for _ in range(head.layer_count)]

    def advance(step: int, tokens_BQ: Tensor, positions_BQ: Tensor, hidden_BQH: Tensor) -> Tensor:
        for memory in memories:
            memory.step = step
        embedded_BQD = target.embed(tokens_BQ).to(hidden_BQH.dtype)
        return head.advance(embedded_BQD, hidden_BQH, head.rope(positions_BQ), memories)

    hidden_BTH = head.checkpointed(advance, 0, batch.tokens_BT, batch.positions_BT, hidden_BTH)
    hidden_BQH = hidden_BTH.gather(1, roots_BQ[:, :, None].expand(-1, -1, hidden_BTH.shape[-1]))
    start_BQ = batch.positions_BT.gather(1, roots_BQ)
    hidden, places = [], []
    for step, mask_BT in enumerate(masks):
        if step:
            next_BQ = (roots_BQ + step).clamp(max=batch.tokens_BT.shape[1] - 1)
            tokens_BQ = batch.tokens_BT.gather(1, next_BQ)
            hidden_BQH = head.checkpointed(advance, step, tokens_BQ, start_BQ + step, hidden_BQH)
        hidden.append(hidden_BQH[real_BQ & mask_BT.gather(1, roots_BQ)])
        places.append(mask_BT.flatten().nonzero()[:, 0] + step + 1)
    steps_R = torch.cat([torch.full_like(each, step) for step, each in enumerate(places)])
    places_R, order_R = torch.cat(places).sort(stable=True)
    return Unrolled(torch.cat(hidden)[order_R], steps_R[order_R], places_R)


def visible(batch: Batch, window: int | None) -> Tensor:
    """bool (B, T, T), the mask of step 0: causal within a document, without its first token, which
    forms no pair. It sees only itself, so that its row is not empty.
    """
    places_T = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
    distance_TT = places_T[:, None] - places_T
    near_TT = distance_TT >= 0 if window is None else (distance_TT >= 0) & (distance_TT < window)
    same_BTT = batch.documents_BT[:, :, None] == batch.documents_BT[:, None, :]
    paired_BT = batch.positions_BT > 0
    return (same_BTT & near_TT & paired_BT[:, None, :]) | (distance_TT == 0)


def packed(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The true places of each row, int64 (B, Q), rising, and bool (B, Q): False for padding."""
    count_B = mask_BT.sum(1)
    most = max(int(count_B.max()), 1)
    order_BT = torch.sort(mask_BT, dim=1, descending=True, stable=True).indices
    real_BQ = torch.arange(most, device=mask_BT.device) < count_B[:, None]
    return order_BT[:, :most], real_BQ
