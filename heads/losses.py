"""lm_head and loss in one: logits are computed, scored and turned into gradients chunk by chunk. So
neither all logits nor a second pass over them is ever needed.

Legend: R rows with a loss, C rows of a chunk, U target states, D width, V target vocabulary,
v draft vocabulary, r width of a low-rank term, p target distribution, q draft distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.target import Target

RANKS = 10
"""Ranks of the true token that training statistics distinguish."""
CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Logits per chunk: 8 MiB stay in a CPU's cache, 512 MiB keep a GPU busy."""
CHUNK_ROWS = 256
"""Minimum rows per chunk; fewer would make matrix products too thin."""

LowRank = tuple[Tensor, Tensor]
"""Rows (R, r) and a matrix (v, r) whose product is added to the logits."""


class Capped(NamedTuple):
    """The logits are cap * tanh(logits / cap), before `plus` is added (Gemma)."""

    cap: float
    plus: LowRank | None


Objective = Literal["ce", "kl", "dspark"]
"""ce: cross-entropy. kl: ce less the entropy of p, which has the same gradient. dspark: 0.1 of the
cross-entropy with the true token and 0.9 of |p - q| = 2 (1 - sum min(p, q)).
"""


class Scored(NamedTuple):
    """The rows of a chunk."""

    loss_C: Tensor
    grad_Cv: Tensor  # of the loss, by the logits
    known_C: Tensor  # weight 0 or 1
    accepted_C: Tensor  # sum min(p, q); for hard labels, q(label)


@dataclass(frozen=True)
class Teacher:
    """The target's distribution as labels. Rows whose most probable token is outside the draft
    vocabulary have no loss.
    """

    states_R: np.ndarray
    """int64, on the host: the target state of each row; equal neighbours are computed once."""
    logits: Callable[[Tensor], Tensor]
    """From states (U,) to the target's logits (U, V)."""
    token_map: Tensor | None = None
    """int64 (v,), target ids of the draft vocabulary, over which p is normalised; None: all."""
    objective: Objective = "ce"
    vocab_size: int = 0
    """V, which limits the rows of a chunk; 0: only v does."""
    acceptance: bool = False
    """Whether to compute the acceptance with objectives ce and kl, too; without, it is 0."""

    @classmethod
    def of(
        cls,
        target: Target,
        states_UD: Tensor,
        places_R: np.ndarray,
        token_map: Tensor | None = None,
        objective: Objective = "ce",
        *,
        acceptance: bool = False,
    ) -> Teacher:
        """For row r, the target's logits of the last hidden state `states_UD[places_R[r]]`."""

        def logits(places_U: Tensor) -> Tensor:
            return target.unembed(states_UD[places_U])

        return cls(places_R, logits, token_map, objective, target.vocab_size, acceptance)


def linear_cross_entropy(
    hidden_RD: Tensor,
    weight_vD: Tensor,
    labels_R: Tensor,
    plus: LowRank | Capped | None = None,
    *,
    weights_R: Tensor | None = None,
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of logits `hidden @ weight.T`, summed over rows (scalar, float32); the rank of each
    label (int64 (R,), 0 = best, RANKS for all worse ranks); and the acceptance of each row (float32
    (R,), without gradient).

    plus: a second product, added to the logits. labels_R: int64 draft indices; -1 for tokens
    outside the draft vocabulary, which have rank RANKS and, without a teacher, no loss. weights_R:
    the weight of each row's loss, default 1.
    """
    if weights_R is None:
        weights_R = hidden_RD.new_ones((), dtype=torch.float32).expand(len(labels_R))
    cap, plus = plus if isinstance(plus, Capped) else (None, plus)
    factors = (hidden_RD, weight_vD, *(plus or ()))
    result: tuple[Tensor, Tensor, Tensor] = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        labels_R, weights_R, teacher, cap, *factors
    )
    return result


def chunked_ranks(
    hidden_RD: Tensor, weight_vD: Tensor, labels_R: Tensor, plus: LowRank | Capped | None = None
) -> Tensor:
    """The rank of each label, as in `linear_cross_entropy`, without loss or gradient."""
    cap, plus = plus if isinstance(plus, Capped) else (None, plus)
    factors = (hidden_RD, weight_vD, *(plus or ()))
    ranks = [labels_R[:0]]
    for part in _chunks(hidden_RD, len(weight_vD)):
        ranks.append(_ranks(_logits(factors, part, cap)[0], labels_R[part]))
    return torch.cat(ranks)


def capped(logits: Tensor, cap: float) -> Tensor:
    """Gemma's soft cap: logits between -cap and cap."""
    return cap * torch.tanh(logits / cap)


class _LinearLoss(torch.autograd.Function):
    """Gradients are computed in the forward pass, while the logits exist; the backward pass only
    scales them by the gradient of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        labels_R: Tensor,
        weights_R: Tensor,
        teacher: Teacher | None,
        cap: float | None,
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_RD, weight_vD = factors[:2]
        gradients = [
            torch.zeros_like(factor) if wanted else None
            for factor, wanted in zip(factors, ctx.needs_input_grad[4:], strict=True)
        ]
        loss = hidden_RD.new_zeros((), dtype=torch.float32)
        ranks, accepted = [labels_R[:0]], [loss.new_zeros(0)]
        widest = max(teacher.vocab_size if teacher else 0, len(weight_vD))
        for part in _chunks(hidden_RD, widest):
            logits_Cv, slope_Cv = _logits(factors, part, cap)
            ranks.append(_ranks(logits_Cv, labels_R[part]))
            if teacher is None:
                scored = _hard(logits_Cv, labels_R[part])
            else:
                scored = _soft(logits_Cv, labels_R[part], teacher, part)
            accepted.append(scored.accepted_C)
            weights_C = weights_R[part] * scored.known_C
            loss += scored.loss_C @ weights_C
            _add_gradients(gradients, factors, scored.grad_Cv, slope_Cv, weights_C, part)
        ctx.save_for_backward(*gradients)
        ranks_R, accepted_R = torch.cat(ranks), torch.cat(accepted)
        ctx.mark_non_differentiable(ranks_R, accepted_R)
        return loss, ranks_R, accepted_R

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            grad if grad is None else grad * scale.to(grad.dtype) for grad in ctx.saved_tensors
        ]
        return None, None, None, None, *scaled


def _chunks(rows: Tensor, vocab_size: int) -> list[slice]:
    size = max(CHUNK_ROWS, CHUNK_LOGITS.get(rows.device.type, 1 << 25) // vocab_size)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def _logits(
    factors: Sequence[Tensor], part: slice, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """float32 (C, v): the products of factors 0 and 1, and of 2 and 3, for some rows. If the first
    product is capped, also the derivative of its cap.
    """
    rows_RD, weight_vD, *plus = factors
    logits_Cv = F.linear(rows_RD[part].to(weight_vD.dtype), weight_vD).float()
    slope_Cv = None
    if cap is not None:
        logits_Cv = capped(logits_Cv, cap)
        slope_Cv = 1 - (logits_Cv / cap).square()
    if plus:
        rows_Rr, weight_vr = plus
        logits_Cv += F.linear(rows_Rr[part].to(weight_vr.dtype), weight_vr)
    return logits_Cv, slope_Cv


def _add_gradients(
    gradients: list[Tensor | None],
    factors: Sequence[Tensor],
    grad_Cv: Tensor,
    slope_Cv: Tensor | None,
    weights_C: Tensor,
    part: slice,
) -> None:
    """Add the gradients of the factors. Weights are applied to rows, which are narrower than the
    gradient of the logits. slope_Cv: from `_logits`.
    """
    weights_C1 = weights_C[:, None]
    for first in range(0, len(factors), 2):
        rows_RD, weight_vD = factors[first : first + 2]
        grad_RD, grad_vD = gradients[first : first + 2]
        grad_Cv = grad_Cv.to(weight_vD.dtype)
        own_Cv = grad_Cv
        if slope_Cv is not None and not first:  # the second product is added to what is capped
            own_Cv = grad_Cv * slope_Cv.to(grad_Cv.dtype)
        if grad_RD is not None:
            grad_RD[part] = (own_Cv @ weight_vD) * weights_C1
        if grad_vD is not None:
            rows_CD = (rows_RD[part] * weights_C1).to(weight_vD.dtype)
            if torch.is_autocast_enabled(grad_vD.device.type):  # which does not cover `out=`
                grad_vD += own_Cv.T @ rows_CD
            else:  # in place
                torch.addmm(grad_vD, own_Cv.T, rows_CD, out=grad_vD)


def _hard(logits_Cv: Tensor, labels_C: Tensor) -> Scored:
    """Cross-entropy with the true tokens; overwrites the logits."""
    known_C = (labels_C >= 0).float()
    index_C1 = labels_C.clamp(min=0)[:, None]
    label_C1 = logits_Cv.gather(1, index_C1)
    q_Cv, normaliser_C1 = _softmax(logits_Cv)
    loss_C = (normaliser_C1 - label_C1)[:, 0]
    minus_one_C1 = label_C1.new_full((), -1.0).expand_as(label_C1)
    grad_Cv = q_Cv.scatter_add_(1, index_C1, minus_one_C1)
    return Scored(loss_C, grad_Cv, known_C, torch.exp(-loss_C) * known_C)


def _soft(logits_Cv: Tensor, labels_C: Tensor, teacher: Teacher, part: slice) -> Scored:
    """The teacher's objective; overwrites the logits."""
    p_Cv, known_C = _distribution(teacher, part, logits_Cv.device)
    expected_C = torch.linalg.vecdot(p_Cv, logits_Cv)
    index_C1 = labels_C.clamp(min=0)[:, None]
    label_C = logits_Cv.gather(1, index_C1)[:, 0]
    q_Cv, normaliser_C1 = _softmax(logits_Cv)
    entropy_C = normaliser_C1[:, 0] - expected_C
    accepted_C = torch.zeros_like(entropy_C)
    if teacher.acceptance or teacher.objective == "dspark":
        accepted_C = torch.minimum(p_Cv, q_Cv).sum(1)
    if teacher.objective == "dspark":
        hard_C = normaliser_C1[:, 0] - label_C
        loss_C, grad_Cv = _dspark(q_Cv, p_Cv, accepted_C, labels_C, hard_C)
        return Scored(loss_C, grad_Cv, known_C, accepted_C)
    if teacher.objective == "kl":
        entropy_C = entropy_C - torch.special.entr(p_Cv).sum(1)
    return Scored(entropy_C, q_Cv.sub_(p_Cv), known_C, accepted_C)


def _softmax(logits_Cv: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, in place because new memory costs more than a pass over it, and the log of the
    normaliser.
    """
    top_C1 = logits_Cv.amax(1, keepdim=True)
    q_Cv = logits_Cv.sub_(top_C1).exp_()
    total_C1 = q_Cv.sum(1, keepdim=True)
    return q_Cv.div_(total_C1), total_C1.log() + top_C1


def _dspark(
    q_Cv: Tensor, p_Cv: Tensor, accepted_C: Tensor, labels_C: Tensor, hard_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of each row and its gradient by the logits; overwrites q. hard_C: the cross-entropy with
    the true token.
    """
    short_Cv = (q_Cv < p_Cv).float()  # where more probability increases acceptance
    grad_Cv = q_Cv * (torch.linalg.vecdot(q_Cv, short_Cv)[:, None] - short_Cv)
    share_C = 0.1 * (labels_C >= 0)
    loss_C = 1.8 * (1 - accepted_C) + share_C * hard_C
    grad_Cv = grad_Cv.mul_(1.8).addcmul_(share_C[:, None], q_Cv)
    grad_Cv.scatter_add_(1, labels_C.clamp(min=0)[:, None], -share_C[:, None])
    return loss_C, grad_Cv


def _distribution(teacher: Teacher, part: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """p_Cv, and bool (C,): whether the target's best token is in the draft vocabulary."""
    new_C = np.diff(teacher.states_R[part], prepend=-1) != 0
    states_U = torch.from_numpy(teacher.states_R[part][new_C]).to(device, non_blocking=True)
    row_C = torch.from_numpy(new_C.cumsum() - 1).to(device, non_blocking=True)
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
