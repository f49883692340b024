"""Training-time test: a head is unrolled over its own output, as it will be used (EAGLE-3, arXiv
2503.01840, section 3.1).

Legend: B batch, T tokens, Q roots of a row (positions that learn something), R rows of the result,
D width, H query heads (of states: hidden width), G key/value heads, W head width, J steps so far.

Step 0 runs over whole rows, with the target's features. Step j runs over the roots alone: root i
reads token i + j and the head's own output of step j - 1, at position i + j. It sees what a drafter
would see there: the target's features up to i, and its own entries of the steps 1..j, nobody
else's.
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
"""Columns added to each head for the merge: two are used, and kernels like widths to be a multiple
of eight.
"""


class RowMemory:
    """Whole rows that attend to themselves, as the mask (B, T, T) allows."""

    def __init__(self, visible_BTT: Tensor) -> None:
        self.visible_B1TT = visible_BTT[:, None]

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        k_BHQW, v_BHQW = _per_query_head(q_BHQW, k_BGQW, v_BGQW)
        return F.scaled_dot_product_attention(q_BHQW, k_BHQW, v_BHQW, attn_mask=self.visible_B1TT)


class UnrolledMemory:
    """One layer's keys and values: those of step 0, and one entry per root and later step.

    step: the one that attends next; `unroll` sets it, also where a step is computed again because
    its intermediate results were not kept.

    Attention over both kinds of entry is one call of torch's fused attention, over the keys of
    step 0 and *one key more*: it stands for all of a root's own entries. Its score is their
    log-sum-exp, handed in through a spare column of query and key, and a spare column of the values
    brings back the weight that it got. So no (T, T J) matrix is made, and autograd does the rest.
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
            k_BHTW, v_BHTW = _per_query_head(q_BHQW, k_BGQW, v_BGQW)
            extended = self._extend(k_BHTW, v_BHTW, mask_B1TT)
            self._first = self._first or extended
            return F.scaled_dot_product_attention(q_BHQW, k_BHTW, v_BHTW, attn_mask=mask_B1TT)
        # copies: as views they would hold on to the queries beside them
        k_BGQW, v_BGQW = k_BGQW.contiguous(), v_BGQW.contiguous()
        if self.step > len(self.keys):
            self.keys.append(k_BGQW)
            self.values.append(v_BGQW)
        q_BHQW = q_BHQW * q_BHQW.shape[-1] ** -0.5
        return self._merged(q_BHQW, self.keys[: self.step], self.values[: self.step])

    def _extend(self, k: Tensor, v: Tensor, mask_B1TT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of step 0, the additional key before them, and what each root sees."""
        key = F.pad(torch.zeros_like(k[:, :, :1]), (0, SPARE))
        value = key.clone()
        key[..., k.shape[-1] : k.shape[-1] + 2] = 1.0
        value[..., v.shape[-1]] = 1.0
        keys = torch.cat([key, F.pad(k, (0, SPARE))], dim=2)
        values = torch.cat([value, F.pad(v, (0, SPARE))], dim=2)
        index = self.roots_BQ[:, None, :, None].expand(-1, 1, -1, mask_B1TT.shape[-1])
        return keys, values, F.pad(mask_B1TT.gather(2, index), (1, 0))

    def _merged(self, q_BHQW: Tensor, keys_J: list[Tensor], values_J: list[Tensor]) -> Tensor:
        assert self._first is not None
        keys, values, mask_B1QT = self._first
        if self.window is not None:  # each step is one position further away
            places_T = torch.arange(mask_B1QT.shape[-1] - 1, device=mask_B1QT.device)
            distance_BQT = self.roots_BQ[:, :, None] + len(keys_J) - places_T
            gone_BQT = F.pad(distance_BQT >= self.window, (1, 0))
            mask_B1QT = mask_B1QT.masked_fill(gone_BQT[:, None], -torch.inf)
            keys_J, values_J = keys_J[-self.window :], values_J[-self.window :]
        own_BHQW, score_BHQ1 = _own(q_BHQW, keys_J, values_J)
        high = score_BHQ1.to(q_BHQW.dtype)  # in two parts, so that bfloat16 keeps its digits
        low = (score_BHQ1 - high.float()).to(q_BHQW.dtype)
        query = F.pad(torch.cat([q_BHQW, high, low], dim=-1), (0, SPARE - 2))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask_B1QT, scale=1.0)
        width = q_BHQW.shape[-1]
        return out[..., :width] + out[..., width : width + 1] * own_BHQW


def _per_query_head(q_BHQW: Tensor, *of_groups_BGQW: Tensor) -> list[Tensor]:
    """Keys and values repeated for each query head: kernels that take a mask and groups of heads
    fall back to materialising all scores on some devices.
    """
    times = q_BHQW.shape[1] // of_groups_BGQW[0].shape[1]
    return [each.repeat_interleave(times, dim=1) for each in of_groups_BGQW]


def _own(q_BHQW: Tensor, keys_J: list[Tensor], values_J: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention to a root's own entries alone: (its output, the log-sum-exp of its scores)."""
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
    """What `unroll` needs of a head."""

    layer_count: int
    rope: Rope
    window: int | None

    def advance(self, *arguments: Any, **named: Any) -> Tensor:
        """(embedded_BQD, hidden_BQH, angles, memories of the layers) to the next hidden_BQH."""

    def checkpointed(self, part: Callable[..., Tensor], *arguments: Any) -> Tensor: ...


class Unrolled(NamedTuple):
    """The outputs of a head at the roots of a batch, all steps in one list of R rows. The places
    rise, so that rows that predict the same token are contiguous.
    """

    hidden_RH: Tensor
    steps_R: Tensor  # int64, from 0
    places_R: Tensor  # int64, of the token that is predicted, in the flattened batch (B T)


def unroll(
    head: Unrollable, batch: Batch, hidden_BTH: Tensor, target: Target, steps: int
) -> Unrolled:
    """Unroll `head` for `steps` steps; hidden_BTH: the hidden states that represent the target's
    features, in the dtype of the residual stream.
    """
    masks = list(batch.roots(steps))
    roots_BQ, real_BQ = _packed(masks[0])
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
    """bool (B, T, T): what each pair of step 0 sees. Causal within a document, without its first
    token, which makes no pair (and sees itself alone, so that its row is not empty).
    """
    places_T = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
    distance_TT = places_T[:, None] - places_T
    near_TT = distance_TT >= 0 if window is None else (distance_TT >= 0) & (distance_TT < window)
    same_BTT = batch.documents_BT[:, :, None] == batch.documents_BT[:, None, :]
    paired_BT = batch.positions_BT > 0
    return (same_BTT & near_TT & paired_BT[:, None, :]) | (distance_TT == 0)


def _packed(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The true places of each row, side by side: (int64 (B, Q), which of them are real)."""
    count_B = mask_BT.sum(1)
    most = max(int(count_B.max()), 1)
    order_BT = torch.sort(mask_BT, dim=1, descending=True, stable=True).indices
    real_BQ = torch.arange(most, device=mask_BT.device) < count_B[:, None]
    return order_BT[:, :most], real_BQ
