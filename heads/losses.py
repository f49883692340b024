"""lm_head and loss in one: logits are computed, scored and turned into gradients chunk by chunk. So
neither all logits nor a second pass over them is ever needed.

Legend: R rows with a loss, C rows of a chunk, U target states, D width, V target vocabulary,
v draft vocabulary, r width of a low-rank term, p target distribution, q draft distribution.
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
"""Logits per chunk: 8 MiB stay in a CPU's cache, 512 MiB keep a GPU busy."""
CHUNK_ROWS = 256
"""Minimum rows per chunk; fewer would make matrix products too thin."""

LowRank = tuple[Tensor, Tensor]
"""Rows (R, r) and a matrix (v, r) whose product is added to the logits."""
Scored = tuple[Tensor, Tensor, Tensor]
"""For each row of a chunk: loss (C,), its gradient by logits (C, v), the weight of both (C,)."""
Objective = Literal["ce", "kl", "tv", "lk", "hybrid"]
"""ce: cross-entropy. kl: ce less the entropy of p. The others depend on the acceptance
a = sum min(p, q). tv: 1 - a. lk: -log a. hybrid: s ce + (1 - s) tv, where s = exp(-3 a) falls as
the head improves (LK losses, arXiv 2602.23881).
"""


@dataclass(frozen=True)
class Teacher:
    """The target's distribution as labels. Rows whose most probable token is outside the draft
    vocabulary have no loss.
    """

    states_R: Tensor
    """int64, the target state of each row; equal neighbours are computed once."""
    logits: Callable[[Tensor], Tensor]
    """From states (U,) to the target's logits (U, V)."""
    token_map: Tensor | None = None
    """int64 (v,), target ids of the draft vocabulary, over which p is normalised; None: all."""
    objective: Objective = "ce"
    vocab_size: int = 0
    """V, which limits the rows of a chunk; 0: only v does."""


def linear_cross_entropy(
    hidden_RD: Tensor,
    weight_vD: Tensor,
    labels_R: Tensor,
    plus: LowRank | None = None,
    *,
    weights_R: Tensor | None = None,
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of logits `hidden @ weight.T`, summed over rows (scalar, float32), and the rank of
    each label (int64 (R,), 0 = best, RANKS for all worse ranks).

    plus: a second product, added to the logits. labels_R: int64 draft indices; -1 for tokens
    outside the draft vocabulary, which have rank RANKS and, without a teacher, no loss. weights_R:
    the weight of each row's loss, default 1.
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


class _LinearLoss(torch.autograd.Function):
    """Gradients are computed in the forward pass, while the logits exist; the backward pass only
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
                scored = _hard(logits_Cv, labels_R[part], weights_R[part])
            else:
                scored = _soft(logits_Cv, teacher, part, weights_R[part])
            loss_C, grad_Cv, weights_C = scored
            loss += loss_C @ weights_C
            _add_gradients(gradients, factors, grad_Cv, weights_C, part)
        ctx.save_for_backward(*gradients)
        ranks_R = torch.cat(ranks)
        ctx.mark_non_differentiable(ranks_R)
        return loss, ranks_R

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            grad if grad is None else grad * scale.to(grad.dtype) for grad in ctx.saved_tensors
        ]
        return None, None, None, *scaled


def _chunks(rows: Tensor, vocab_size: int) -> list[slice]:
    size = max(CHUNK_ROWS, CHUNK_LOGITS.get(rows.device.type, 1 << 25) // vocab_size)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def _logits(factors: Sequence[Tensor], part: slice) -> Tensor:
    """float32 (C, v): the products of factors 0 and 1, and of 2 and 3, for some rows."""
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
    """Add the gradients of the factors. Weights are applied to rows, which are narrower than the
    gradient of the logits.
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
            if torch.is_autocast_enabled(grad_vD.device.type):  # which does not cover `out=`
                grad_vD += grad_Cv.T @ rows_CD
            else:  # in place
                torch.addmm(grad_vD, grad_Cv.T, rows_CD, out=grad_vD)


def _hard(logits_Cv: Tensor, labels_C: Tensor, weights_C: Tensor) -> Scored:
    """Cross-entropy with the true tokens; overwrites the logits."""
    weights_C = weights_C * (labels_C >= 0)
    index_C1 = labels_C.clamp(min=0)[:, None]
    label_C1 = logits_Cv.gather(1, index_C1)
    q_Cv, normaliser_C1 = _softmax(logits_Cv)
    loss_C = (normaliser_C1 - label_C1)[:, 0]
    minus_one_C1 = label_C1.new_full((), -1.0).expand_as(label_C1)
    return loss_C, q_Cv.scatter_add_(1, index_C1, minus_one_C1), weights_C


def _soft(logits_Cv: Tensor, teacher: Teacher, part: slice, weights_C: Tensor) -> Scored:
    """The teacher's objective; overwrites the logits."""
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
    """Probabilities, in place because new memory costs more than a pass over it, and the log of the
    normaliser.
    """
    top_C1 = logits_Cv.amax(1, keepdim=True)
    q_Cv = logits_Cv.sub_(top_C1).exp_()
    total_C1 = q_Cv.sum(1, keepdim=True)
    return q_Cv.div_(total_C1), total_C1.log() + top_C1


def _acceptance(
    q_Cv: Tensor, p_Cv: Tensor, entropy_C: Tensor, objective: Objective
) -> tuple[Tensor, Tensor]:
    """Loss of each row and its gradient by the logits, for objectives that depend on acceptance;
    entropy_C: the cross-entropy of each row.
    """
    accepted_C = torch.minimum(p_Cv, q_Cv).sum(1)
    short_Cv = (q_Cv < p_Cv).float()  # where more probability increases acceptance
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
    """p_Cv, and bool (C,): whether the target's best token is in the draft vocabulary."""
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
    """The number of logits above the label's; equal ones of lower index count too."""
    label_C1 = logits_Cv.gather(1, labels_C.clamp(min=0)[:, None])
    ahead_Cv = logits_Cv > label_C1
    lower_Cv = torch.arange(logits_Cv.shape[1], device=labels_C.device) < labels_C[:, None]
    ahead_Cv |= (logits_Cv == label_C1) & lower_Cv
    ahead_C = ahead_Cv.sum(1, dtype=torch.int32)  # the default, int64, is several times slower
    return torch.where(labels_C >= 0, ahead_C.clamp(max=RANKS), RANKS).long()
