"""Training-time test: a head is unrolled over its own output, as it will be used (EAGLE-3, arXiv
2503.01840, section 3.1).

Legend: B batch, T tokens, Q roots of a row (positions that learn something), D width, H query
heads, G key/value heads, W head width, J steps so far.

Step 0 runs over whole rows, with the target's features. Step j runs over the roots alone: root i
reads token i + j and the head's own output of step j - 1, at position i + j. It sees what a drafter
would see there: the target's features up to i, and its own entries of the steps 1..j, nobody
else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.base import RANKS
from draftheads.heads.batch import Batch
from draftheads.heads.target import Target

if TYPE_CHECKING:
    from draftheads.heads.eagle import AutoregressiveHead

SPARE = 8
"""Columns added to each head for the merge: two are used, and kernels like widths to be a multiple
of eight.
"""


class UnrolledMemory:
    """One layer's keys and values: those of step 0, and one entry per root and later step.

    step: the one that attends next. Where it is set back, because what a step made was not kept,
    that step finds again what it found at first.

    Attention over both kinds of entry is one call of torch's fused attention, over the keys of
    step 0 and *one key more*: it stands for all of a root's own entries. Its score is their
    log-sum-exp, handed in through a spare column of query and key, and a spare column of the values
    brings back the weight that it got. So no (T, T J) matrix is made, and autograd does the rest.
    """

    def __init__(self, visible_BTT: Tensor, roots_BQ: Tensor, window: int | None) -> None:
        self.mask_B1TT = _additive(visible_BTT)
        self.roots_BQ, self.window = roots_BQ, window
        self.step = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._first: tuple[Tensor, Tensor, Tensor] | None = None

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        """Step 0 at the first call, the next step at every other."""
        step, self.step = self.step, self.step + 1
        if step == 0:
            mask_B1TT = self.mask_B1TT.to(q_BHQW.dtype)
            # one key per query head: kernels that take a mask and groups of heads fall back to
            # making all scores on some devices
            times = q_BHQW.shape[1] // k_BGQW.shape[1]
            k_BHTW, v_BHTW = (each.repeat_interleave(times, dim=1) for each in (k_BGQW, v_BGQW))
            extended = self._extend(k_BHTW, v_BHTW, mask_B1TT)
            self._first = self._first or extended
            return F.scaled_dot_product_attention(q_BHQW, k_BHTW, v_BHTW, attn_mask=mask_B1TT)
        # copies: as views they would hold on to the queries beside them
        k_BGQW, v_BGQW = k_BGQW.contiguous(), v_BGQW.contiguous()
        if step > len(self.keys):
            self.keys.append(k_BGQW)
            self.values.append(v_BGQW)
        q_BHQW = q_BHQW * q_BHQW.shape[-1] ** -0.5
        return self._merged(q_BHQW, self.keys[:step], self.values[:step])

    def _extend(self, k: Tensor, v: Tensor, mask_B1TT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of step 0, the additional key before them, and what each root sees."""
        extra = F.pad(torch.zeros_like(k[:, :, :1]), (0, SPARE))
        key, value = extra.clone(), extra.clone()
        key[..., k.shape[-1] : k.shape[-1] + 2] = 1.0
        value[..., v.shape[-1]] = 1.0
        keys = torch.cat([key, F.pad(k, (0, SPARE))], dim=2)
        values = torch.cat([value, F.pad(v, (0, SPARE))], dim=2)
        index = self.roots_BQ[:, None, :, None].expand(-1, 1, -1, mask_B1TT.shape[-1])
        mask_B1QT = F.pad(mask_B1TT.gather(2, index), (1, 0))
        return keys, values, mask_B1QT

    def _merged(self, q_BHQW: Tensor, keys_J: list[Tensor], values_J: list[Tensor]) -> Tensor:
        assert self._first is not None
        keys, values, mask_B1QT = self._first
        if self.window is not None:  # each step is one position further away
            places_T = torch.arange(mask_B1QT.shape[-1] - 1, device=mask_B1QT.device)
            distance_BQT = self.roots_BQ[:, :, None] + len(keys_J) - places_T
            gone_BQT = F.pad(distance_BQT >= self.window, (1, 0))
            mask_B1QT = mask_B1QT.masked_fill(gone_BQT[:, None], -torch.inf)
        own_BHQW, score_BHQ1 = self._own(q_BHQW, keys_J, values_J)
        high = score_BHQ1.to(q_BHQW.dtype)  # in two parts, so that bfloat16 keeps its digits
        low = (score_BHQ1 - high.float()).to(q_BHQW.dtype)
        query = torch.cat([q_BHQW, high, low], dim=-1)
        query = F.pad(query, (0, SPARE - 2))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask_B1QT, scale=1.0)
        width = q_BHQW.shape[-1]
        return out[..., :width] + out[..., width : width + 1] * own_BHQW

    def _own(
        self, q_BHQW: Tensor, keys_J: list[Tensor], values_J: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Attention to a root's own entries alone: (its output, the log-sum-exp of its scores)."""
        first = max(0, len(keys_J) - (self.window or len(keys_J)))
        groups = keys_J[0].shape[1]
        grouped = q_BHQW.view(len(q_BHQW), groups, -1, *q_BHQW.shape[2:])  # (B, G, H / G, Q, W)
        scores = [
            (grouped * key[:, :, None]).sum(-1, dtype=torch.float32) for key in keys_J[first:]
        ]
        scores_J = torch.stack(scores)
        weights_J = torch.softmax(scores_J, dim=0).to(q_BHQW.dtype)
        parts = zip(weights_J, values_J[first:], strict=True)
        out = sum(weight[..., None] * value[:, :, None] for weight, value in parts)
        assert isinstance(out, Tensor)
        return out.flatten(1, 2), scores_J.logsumexp(0).flatten(1, 2)[..., None]


@dataclass(frozen=True)
class Unrolled:
    """What a head says at the roots of a batch, all steps in one list of R rows.

    hidden_RH: its hidden states. steps_R: int64, the step of each row, from 0. places_R: int64, the
    place, in the flattened batch (B T), of the token that the row guesses; it rises, so that rows
    that guess the same token stand side by side.
    """

    hidden_RH: Tensor
    steps_R: Tensor
    places_R: Tensor

    def counts(self, ranks_R: Tensor, steps: int) -> Tensor:
        """ranks_KR of `HeadLoss`, from the rank of each row's token."""
        columns = RANKS + 1
        cells_R = self.steps_R * columns + ranks_R
        return torch.bincount(cells_R, minlength=steps * columns).view(steps, columns)

    def token_ranks_of(self, ranks_R: Tensor, steps: int, batch: Batch) -> Tensor:
        """ranks_MK as `DraftHead.token_ranks` returns them, from the rank of each row's token."""
        ranks_PK = ranks_R.new_full((batch.tokens_BT.numel(), steps), -1)
        roots_R = self.places_R - self.steps_R - 1
        ranks_PK[roots_R, self.steps_R] = torch.where(ranks_R < RANKS, ranks_R, -1)
        return ranks_PK[batch.loss_mask_BT.flatten()]


def unroll(
    head: AutoregressiveHead, batch: Batch, hidden_BTH: Tensor, target: Target, steps: int
) -> Unrolled:
    """Unroll `head` for `steps` steps; hidden_BTH: of the target's features, from `head.fuse`."""
    masks = list(batch.roots(steps))
    roots_BQ, real_BQ = _packed(masks[0])
    visible_BTT = visible(batch, head.window)
    memories = [UnrolledMemory(visible_BTT, roots_BQ, head.window) for _ in range(head.layer_count)]
    dtype = next(head.parameters()).dtype  # of the residual stream, under autocast as well

    def advance(step: int, tokens_BQ: Tensor, positions_BQ: Tensor, hidden_BQH: Tensor) -> Tensor:
        embedded_BQD = target.embed(tokens_BQ).to(dtype)
        for memory in memories:
            memory.step = step
        return head.advance(embedded_BQD, hidden_BQH, head.rope(positions_BQ), memories)

    hidden_BTH = head.checkpointed(
        advance, 0, batch.tokens_BT, batch.positions_BT, hidden_BTH.to(dtype)
    )
    hidden_BQH = hidden_BTH.gather(1, roots_BQ[:, :, None].expand(-1, -1, hidden_BTH.shape[-1]))
    start_BQ = batch.positions_BT.gather(1, roots_BQ)
    hidden, places = [], []
    for step, mask_BT in enumerate(masks):
        if step:
            next_BQ = (roots_BQ + step).clamp(max=batch.tokens_BT.shape[1] - 1)
            tokens_BQ = batch.tokens_BT.gather(1, next_BQ)
            hidden_BQH = head.checkpointed(advance, step, tokens_BQ, start_BQ + step, hidden_BQH)
        judged_BQ = real_BQ & mask_BT.gather(1, roots_BQ)
        hidden.append(hidden_BQH[judged_BQ])
        places.append(mask_BT.flatten().nonzero()[:, 0] + step + 1)
    steps_R = torch.cat([torch.full_like(each, step) for step, each in enumerate(places)])
    places_R, order_R = torch.cat(places).sort(stable=True)
    return Unrolled(torch.cat(hidden)[order_R], steps_R[order_R], places_R)


def step_weights(steps: int, decay: float) -> Tensor:
    """float32 (steps,): decay^k divided by their sum, so that the learning rate does not depend on
    the number of steps.
    """
    weights_K = decay ** torch.arange(steps, dtype=torch.float32)
    return weights_K / weights_K.sum()


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


def _additive(visible_BTT: Tensor) -> Tensor:
    mask = torch.zeros(visible_BTT.shape, device=visible_BTT.device)
    return mask.masked_fill_(~visible_BTT, -torch.inf)[:, None]
