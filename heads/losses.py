"""The last matrix and its loss in one: logits are made, judged and turned into gradients a chunk at
a time, so that neither all logits nor a second pass over them is ever needed.

Legend: R rows that are judged, C rows of a chunk, U target states, D width, V target vocabulary,
v draft vocabulary, r width of a low-rank term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.base import RANKS

CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Logits held at a time: 8 MiB stay in a CPU's cache, 512 MiB keep a GPU busy."""
CHUNK_ROWS = 256
"""Fewer would leave matrix products too thin, however large the vocabulary is."""

LowRank = tuple[Tensor, Tensor]
"""Rows (R, r) and a matrix (v, r) whose product is added to logits."""
Judged = tuple[Tensor, Tensor, Tensor]
"""For the rows of a chunk: loss (C,), its gradient by the logits (C, v), weights of both (C,)."""
Objective = Literal["ce", "kl", "tv", "lk", "hybrid"]
"""ce: cross-entropy. kl: the same, less the entropy of p. The others look at the acceptance a = sum
min(p, q) of a draft distribution q by the target's p: tv: 1 - a. lk: -log a. hybrid: s ce + (1 - s)
tv, where s = exp(-3 a) falls as the head improves (LK losses, arXiv 2602.23881).
"""


@dataclass(frozen=True)
class Teacher:
    """The target's own distribution as labels. A row whose most probable token is outside the draft
    vocabulary teaches nothing.
    """

    states_R: Tensor
    """int64, which target state judges each row; equal ones side by side are computed once."""
    logits: Callable[[Tensor], Tensor]
    """Maps states (U,) to the target's logits (U, V)."""
    token_map: Tensor | None = None
    """int64 (v,), target ids of the draft vocabulary, on which the softmax is taken; None: all."""
    objective: Objective = "ce"
    vocab_size: int = 0
    """V, which bounds the rows of a chunk; 0: v does."""


def linear_cross_entropy(
    hidden_RD: Tensor,
    weight_vD: Tensor,
    labels_R: Tensor,
    plus: LowRank | None = None,
    *,
    weights_R: Tensor | None = None,
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of the logits `hidden @ weight.T`, summed over rows (scalar, float32), and the rank of
    each row's label (int64 (R,), 0 = best, RANKS for every rank that is worse).

    plus: a second product, added to the logits. labels_R: int64 draft indices, -1 for tokens
    outside the draft vocabulary: they have rank RANKS and, without a teacher, no loss. weights_R:
    of each row's loss, default 1.
    """
    if weights_R is None:
        weights_R = hidden_RD.new_ones((), dtype=torch.float32).expand(len(labels_R))
    factors = (hidden_RD, weight_vD, *(plus or ()))
    loss, ranks_R = _LinearLoss.apply(labels_R, weights_R, teacher, *factors)  # type: ignore[no-untyped-call]
    return loss, ranks_R


def chunked_ranks(
    hidden_RD: Tensor, weight_vD: Tensor, labels_R: Tensor, plus: LowRank | None = None
) -> Tensor:
    """The rank of each label, as in `linear_cross_entropy`, without loss or gradient."""
    factors = (hidden_RD, weight_vD, *(plus or ()))
    ranks = [labels_R[:0]]
    for part in _chunks(hidden_RD, len(weight_vD)):
        ranks.append(_ranks(_logits(factors, part), labels_R[part]))
    return torch.cat(ranks)


def rank_counts(ranks_R: Tensor) -> Tensor:
    """int64 (RANKS + 1,): how often each rank occurs."""
    return torch.bincount(ranks_R, minlength=RANKS + 1)


class _LinearLoss(torch.autograd.Function):
    """Gradients are made in the forward pass, from logits that are at hand; the backward pass only
    scales them by the gradient of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any, labels_R: Tensor, weights_R: Tensor, teacher: Teacher | None, *factors: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden_RD, weight_vD = factors[:2]
        gradients = [
            torch.zeros_like(factor) if wanted else None
            for factor, wanted in zip(factors, ctx.needs_input_grad[3:], strict=True)
        ]
        loss = hidden_RD.new_zeros((), dtype=torch.float32)
        ranks = [labels_R[:0]]
        widest = max(teacher.vocab_size if teacher else 0, len(weight_vD))
        for part in _chunks(hidden_RD, widest):
            logits_Cv = _logits(factors, part)
            ranks.append(_ranks(logits_Cv, labels_R[part]))
            if teacher is None:
                judged = _hard(logits_Cv, labels_R[part], weights_R[part])
            else:
                judged = _soft(logits_Cv, teacher, part, weights_R[part])
            loss_C, grad_Cv, weights_C = judged
            loss += loss_C @ weights_C
            _add_gradients(gradients, factors, grad_Cv, weights_C, part)
        ctx.save_for_backward(*gradients)
        ranks_R = torch.cat(ranks)
        ctx.mark_non_differentiable(ranks_R)
        return loss, ranks_R

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        made = (each if each is None else each * scale.to(each.dtype) for each in ctx.saved_tensors)
        return None, None, None, *made


def _chunks(rows: Tensor, vocab_size: int) -> list[slice]:
    size = max(CHUNK_ROWS, CHUNK_LOGITS.get(rows.device.type, 1 << 25) // vocab_size)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def _logits(factors: Sequence[Tensor], part: slice) -> Tensor:
    """float32 (C, v): for these rows, the sum of the products of factors 0 and 1, 2 and 3."""
    rows_RD, weight_vD, *plus = factors
    logits_Cv = F.linear(rows_RD[part].to(weight_vD.dtype), weight_vD).float()
    if plus:
        rows_Rr, weight_vr = plus
        logits_Cv += F.linear(rows_Rr[part].to(weight_vr.dtype), weight_vr)
    return logits_Cv


def _add_gradients(
    gradients: list[Tensor | None],
    factors: Sequence[Tensor],
    grad_Cv: Tensor,
    weights_C: Tensor,
    part: slice,
) -> None:
    """Those of the factors, where they are wanted. The rows are weighted, not the logits' gradient:
    they are narrow.
    """
    weights_C1 = weights_C[:, None]
    for first in range(0, len(factors), 2):
        rows_RD, weight_vD = factors[first : first + 2]
        grad_RD, grad_vD = gradients[first : first + 2]
        grad_Cv = grad_Cv.to(weight_vD.dtype)
        if grad_RD is not None:
            grad_RD[part] = (grad_Cv @ weight_vD) * weights_C1
        if grad_vD is not None:
            rows_CD = (rows_RD[part] * weights_C1).to(weight_vD.dtype)
            if torch.is_autocast_enabled(grad_vD.device.type):  # which leaves `out=` alone
                grad_vD += grad_Cv.T @ rows_CD
            else:  # without a second matrix as large as the first
                torch.addmm(grad_vD, grad_Cv.T, rows_CD, out=grad_vD)


def _hard(logits_Cv: Tensor, labels_C: Tensor, weights_C: Tensor) -> Judged:
    """With the tokens that came; the logits are overwritten."""
    weights_C = weights_C * (labels_C >= 0)
    index_C1 = labels_C.clamp(min=0)[:, None]
    label_C1 = logits_Cv.gather(1, index_C1)
    q_Cv, normaliser_C1 = _softmax(logits_Cv)
    loss_C = (normaliser_C1 - label_C1)[:, 0]
    minus_one_C1 = label_C1.new_full((), -1.0).expand_as(label_C1)
    return loss_C, q_Cv.scatter_add_(1, index_C1, minus_one_C1), weights_C


def _soft(logits_Cv: Tensor, teacher: Teacher, part: slice, weights_C: Tensor) -> Judged:
    """With the teacher's distribution; the logits are overwritten."""
    p_Cv, known_C = _distribution(teacher, part)
    expected_C = torch.linalg.vecdot(p_Cv, logits_Cv)
    q_Cv, normaliser_C1 = _softmax(logits_Cv)
    entropy_C = normaliser_C1[:, 0] - expected_C
    if teacher.objective in ("ce", "kl"):
        known = torch.special.entr(p_Cv).sum(1) if teacher.objective == "kl" else 0.0
        loss_C, grad_Cv = entropy_C - known, q_Cv.sub_(p_Cv)
    else:
        loss_C, grad_Cv = _acceptance(q_Cv, p_Cv, entropy_C, teacher.objective)
    return loss_C, grad_Cv, weights_C * known_C


def _softmax(logits_Cv: Tensor) -> tuple[Tensor, Tensor]:
    """(probabilities, made in the logits' place, as fresh memory costs more than a pass over it;
    the logarithm of what they were divided by).
    """
    top_C1 = logits_Cv.amax(1, keepdim=True)
    q_Cv = logits_Cv.sub_(top_C1).exp_()
    total_C1 = q_Cv.sum(1, keepdim=True)
    return q_Cv.div_(total_C1), total_C1.log() + top_C1


def _acceptance(
    q_Cv: Tensor, p_Cv: Tensor, entropy_C: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """(loss of each row, its gradient by the logits) of the objectives that look at acceptance;
    entropy_C: cross-entropy of each row.
    """
    accepted_C = torch.minimum(p_Cv, q_Cv).sum(1)
    short_Cv = (q_Cv < p_Cv).float()  # where more probability would be accepted
    tv_Cv = q_Cv * (torch.linalg.vecdot(q_Cv, short_Cv)[:, None] - short_Cv)
    if objective == "tv":
        return 1 - accepted_C, tv_Cv
    if objective == "lk":
        floor_C = accepted_C.clamp(min=torch.finfo(torch.float32).tiny)
        return -floor_C.log(), tv_Cv / floor_C[:, None]
    share_C = torch.exp(-3 * accepted_C)
    loss_C = share_C * entropy_C + (1 - share_C) * (1 - accepted_C)
    return loss_C, share_C[:, None] * (q_Cv - p_Cv) + (1 - share_C[:, None]) * tv_Cv


def _distribution(teacher: Teacher, part: slice) -> tuple[Tensor, Tensor]:
    """(p_Cv, bool (C,): whether the target's best token is in the draft vocabulary)."""
    states_U, row_C = torch.unique_consecutive(teacher.states_R[part], return_inverse=True)
    logits_UV = teacher.logits(states_U)
    if teacher.token_map is None:
        known_U = torch.ones_like(states_U, dtype=torch.bool)
        draft_Uv = logits_UV
    else:
        draft_Uv = logits_UV[:, teacher.token_map]
        known_U = draft_Uv.amax(1) == logits_UV.amax(1)
    p_Uv = torch.softmax(draft_Uv.float(), dim=-1)
    return (p_Uv if len(p_Uv) == len(row_C) else p_Uv[row_C]), known_U[row_C]


def _ranks(logits_Cv: Tensor, labels_C: Tensor) -> Tensor:
    """How many logits come before the label's; of equal ones those of lower index do."""
    label_C1 = logits_Cv.gather(1, labels_C.clamp(min=0)[:, None])
    ahead_Cv = logits_Cv > label_C1
    lower_Cv = torch.arange(logits_Cv.shape[1], device=labels_C.device) < labels_C[:, None]
    ahead_Cv |= (logits_Cv == label_C1) & lower_Cv
    ahead_C = ahead_Cv.sum(1, dtype=torch.int32)  # the default, int64, is several times slower
    return torch.where(labels_C >= 0, ahead_C.clamp(max=RANKS), RANKS).long()
