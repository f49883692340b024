"""lm_head and loss in one: logits are computed, scored and turned into gradients chunk by chunk. So
neither all logits nor a second pass over them is ever needed. A CPU scores the rows of a chunk a
few at a time, while they are in its cache, and overwrites the logits with their gradients.

Legend: R rows with a loss, C rows of a chunk, P rows of a piece of it, U target states, D width,
V target vocabulary, v draft vocabulary, r width of a low-rank term, p target distribution, q draft
distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

RANKS = 10
"""Ranks of the true token that training statistics distinguish."""
CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 27}
"""Logits per chunk: 512 MiB of float32 keep a GPU busy."""
CHUNK_ROWS = 512
"""Minimum rows per chunk; fewer would make matrix products too thin."""
PIECE_LOGITS = {"cpu": 1 << 18}
"""Logits scored at a time, in a dozen passes: 1 MiB of float32 stays in a core's cache. Other
devices score whole chunks.
"""
SLAB_ROWS = {"cpu": 2048}
"""Rows of a matrix whose gradient is added in lower precision at a time, for the same reason."""

LowRank = tuple[Tensor, Tensor]
"""Rows (R, r) and a matrix (v, r) whose product is added to the logits."""


Objective = Literal["ce", "kl"]
"""ce: cross-entropy. kl: ce less the entropy of p, which has the same gradient."""


class Scored(NamedTuple):
    """The rows of a piece."""

    loss_P: Tensor
    grad_Pv: Tensor  # of the loss, by the logits
    known_P: Tensor  # weight 0 or 1
    accepted_P: Tensor  # sum min(p, q); for hard labels, q(label)


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
    """Whether to compute the acceptance; without, it is 0."""


class TeacherChunk:
    """The target's distributions for the rows of a chunk.

    known_C: bool, whether the target's best token is in the draft vocabulary.
    """

    def __init__(self, teacher: Teacher, part: slice, device: torch.device) -> None:
        self.teacher = teacher
        new_C = np.diff(teacher.states_R[part], prepend=-1) != 0
        states_U = torch.from_numpy(teacher.states_R[part][new_C]).to(device, non_blocking=True)
        self.state_C = new_C.cumsum() - 1
        logits_UV = teacher.logits(states_U)
        if teacher.token_map is None:
            known_U = torch.ones_like(states_U, dtype=torch.bool)
            self.logits_Uv = logits_UV
        else:
            self.logits_Uv = logits_UV[:, teacher.token_map]
            known_U = self.logits_Uv.amax(1) == logits_UV.amax(1)
        self.known_C = known_U[self._upload(self.state_C)]

    def distribution(self, piece: slice) -> Tensor:
        """p_Pv, float32: that of a state is computed once in a piece."""
        state_P = self.state_C[piece]
        first = int(state_P[0])
        last = int(state_P[-1])
        p_Uv = torch.softmax(self.logits_Uv[first : last + 1].float(), dim=-1)
        if len(p_Uv) == len(state_P):
            return p_Uv
        return p_Uv.index_select(0, self._upload(state_P - first))

    def _upload(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.logits_Uv.device, non_blocking=True)


def linear_cross_entropy(
    hidden_RD: Tensor,
    weight_vD: Tensor,
    labels_R: Tensor,
    plus: LowRank | None = None,
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
    factors = (hidden_RD, weight_vD, *(plus or ()))
    result: tuple[Tensor, Tensor, Tensor] = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        labels_R, weights_R, teacher, *factors
    )
    return result


def histogram(numbers: Tensor, size: int) -> Tensor:
    """Counts how often each number from 0 to size - 1 occurs, (size,): `bincount` without waiting
    for the device. Greater ones count nowhere.
    """
    counts = torch.zeros(size + 1, dtype=torch.long, device=numbers.device)
    ones = torch.ones((), dtype=torch.long, device=numbers.device).expand(numbers.numel())
    return counts.scatter_add_(0, numbers.flatten().clamp(max=size), ones)[:size]


def rank_counts(depths_R: Tensor, ranks_R: Tensor, depth: int) -> Tensor:
    """`HeadLoss.ranks_KR` of rows at depths from 0 to depth - 1. Deeper rows count nowhere."""
    columns = RANKS + 1
    return histogram(depths_R * columns + ranks_R, depth * columns).view(depth, columns)


def chunked_ranks(
    hidden_RD: Tensor,
    weight_vD: Tensor,
    labels_R: Tensor,
    plus: LowRank | None = None,
    candidates: int = 0,
) -> Tensor:
    """The rank of each label, as in `linear_cross_entropy`, without loss or gradient. candidates:
    if not 0, only as many tokens with the best logits of the first product have ranks.
    """
    factors = (hidden_RD, weight_vD, *(plus or ()))
    ranks = [labels_R[:0]]
    for part in _chunks(hidden_RD, len(weight_vD)):
        products = _products(factors, part)
        if candidates:
            logits_Ck, best_Ck = products[0].topk(candidates)
            products[0] = torch.full_like(products[0], -torch.inf).scatter(1, best_Ck, logits_Ck)
        for piece in _pieces(products[0]):
            ranks.append(_ranks(_logits(products, piece), labels_R[part][piece]))
    return torch.cat(ranks)


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
        *factors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_RD, weight_vD = factors[:2]
        new = torch.empty_like if len(hidden_RD) else torch.zeros_like  # the first chunk fills it
        gradients = [
            new(factor) if wanted else None
            for factor, wanted in zip(factors, ctx.needs_input_grad[3:], strict=True)
        ]
        loss = hidden_RD.new_zeros((), dtype=torch.float32)
        ranks = [labels_R[:0]]
        accepted = [loss.new_zeros(0)]
        widest = max(teacher.vocab_size if teacher else 0, len(weight_vD))
        for part in _chunks(hidden_RD, widest):
            products = _products(factors, part)
            chunk = None if teacher is None else TeacherChunk(teacher, part, hidden_RD.device)
            weights = []
            for piece in _pieces(products[0]):
                logits_Pv = _logits(products, piece)
                labels_P = labels_R[part][piece]
                ranks.append(_ranks(logits_Pv, labels_P))
                scored = (
                    _hard(logits_Pv, labels_P) if chunk is None else _soft(logits_Pv, chunk, piece)
                )
                accepted.append(scored.accepted_P)
                weights_P = weights_R[part][piece] * scored.known_P
                loss += _dot(scored.loss_P, weights_P)
                for product_Cv in products:  # gradients take their place
                    product_Cv[piece] = scored.grad_Pv
                weights.append(weights_P)
            _add_gradients(gradients, factors, products, torch.cat(weights), part)
        ctx.save_for_backward(*gradients)
        ranks_R = torch.cat(ranks)
        accepted_R = torch.cat(accepted)
        ctx.mark_non_differentiable(ranks_R, accepted_R)
        return loss, ranks_R, accepted_R

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            grad if grad is None else grad * scale.to(grad.dtype) for grad in ctx.saved_tensors
        ]
        return None, None, None, *scaled


def _chunks(rows: Tensor, vocab_size: int) -> list[slice]:
    size = max(CHUNK_ROWS, CHUNK_LOGITS.get(rows.device.type, 1 << 25) // vocab_size)
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def _pieces(logits_Cv: Tensor) -> list[slice]:
    """Returns the number of a chunk's rows, at least one."""
    rows, width = logits_Cv.shape
    size = max(1, PIECE_LOGITS.get(logits_Cv.device.type, rows * width) // width)
    return [slice(start, start + size) for start in range(0, rows, size)]


def _products(factors: Sequence[Tensor], part: slice) -> list[Tensor]:
    """(C, v) each: the products of factors 0 and 1, and of 2 and 3, for some rows."""
    return [
        F.linear(rows_RD[part].to(weight_vD.dtype), weight_vD)
        for rows_RD, weight_vD in zip(factors[::2], factors[1::2], strict=True)
    ]


def _logits(products: list[Tensor], piece: slice) -> Tensor:
    """float32 (P, v): the sum of the products. In float32, those of the first product, in place."""
    logits_Pv = products[0][piece].float()
    for more_Cv in products[1:]:
        logits_Pv += more_Cv[piece]
    return logits_Pv


def _add_gradients(
    gradients: list[Tensor | None],
    factors: Sequence[Tensor],
    products: list[Tensor],
    weights_C: Tensor,
    part: slice,
) -> None:
    """Add the gradients of the factors; in the first chunk, set them. Weights are applied to rows,
    which are narrower than the gradient of the logits. products: overwritten by their gradients.
    """
    weights_C1 = weights_C[:, None]
    for index, grad_Cv in enumerate(products):
        rows_RD, weight_vD = factors[2 * index : 2 * index + 2]
        grad_RD, grad_vD = gradients[2 * index : 2 * index + 2]
        if grad_RD is not None:
            grad_RD[part] = (grad_Cv @ weight_vD) * weights_C1
        if grad_vD is not None:
            weighted_CD = (rows_RD[part] * weights_C1).to(grad_Cv.dtype)
            beta = float(part.start > 0)  # 0 ignores what the gradient holds
            if grad_Cv.dtype == grad_vD.dtype:
                torch.addmm(grad_vD, grad_Cv.T, weighted_CD, beta=beta, out=grad_vD)
                continue
            size = SLAB_ROWS.get(grad_vD.device.type, len(grad_vD))
            slabs = zip(torch.split(grad_vD, size), torch.split(grad_Cv.T, size), strict=True)
            for sum_SD, left_SC in slabs:
                product_SD = left_SC @ weighted_CD
                if beta:
                    sum_SD += product_SD
                else:
                    sum_SD.copy_(product_SD)


def _hard(logits_Pv: Tensor, labels_P: Tensor) -> Scored:
    """Cross-entropy with the true tokens; overwrites the logits."""
    known_P = (labels_P >= 0).float()
    index_P1 = labels_P.clamp(min=0)[:, None]
    label_P1 = logits_Pv.gather(1, index_P1)
    q_Pv, normaliser_P1 = _softmax(logits_Pv)
    loss_P = (normaliser_P1 - label_P1)[:, 0]
    minus_one_P1 = label_P1.new_full((), -1.0).expand_as(label_P1)
    grad_Pv = q_Pv.scatter_add_(1, index_P1, minus_one_P1)
    return Scored(loss_P, grad_Pv, known_P, torch.exp(-loss_P) * known_P)


def _soft(logits_Pv: Tensor, chunk: TeacherChunk, piece: slice) -> Scored:
    """The teacher's objective; overwrites the logits."""
    teacher, p_Pv, known_P = chunk.teacher, chunk.distribution(piece), chunk.known_C[piece]
    expected_P = _dot(p_Pv, logits_Pv)
    q_Pv, normaliser_P1 = _softmax(logits_Pv)
    entropy_P = normaliser_P1[:, 0] - expected_P
    accepted_P = torch.zeros_like(entropy_P)
    if teacher.acceptance:
        accepted_P = torch.minimum(p_Pv, q_Pv).sum(1)
    if teacher.objective == "kl":
        entropy_P = entropy_P - torch.special.entr(p_Pv).sum(1)
    return Scored(entropy_P, q_Pv.sub_(p_Pv), known_P, accepted_P)


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Over the last dimension; in float32, where autocast would narrow torch's own."""
    return (left * right).sum(-1)


def _softmax(logits_Pv: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities, in place because new memory costs more than a pass over it, and the log of the
    normaliser.
    """
    top_P1 = logits_Pv.amax(1, keepdim=True)
    q_Pv = logits_Pv.sub_(top_P1).exp_()
    total_P1 = q_Pv.sum(1, keepdim=True)
    return q_Pv.div_(total_P1), total_P1.log() + top_P1


def _ranks(logits_Pv: Tensor, labels_P: Tensor) -> Tensor:
    """The number of logits above the label's; equal ones of lower index count too. Labels with a
    logit of -inf have rank RANKS.
    """
    label_P1 = logits_Pv.gather(1, labels_P.clamp(min=0)[:, None])
    ahead_Pv = logits_Pv > label_P1
    lower_Pv = torch.arange(logits_Pv.shape[1], device=labels_P.device) < labels_P[:, None]
    ahead_Pv |= (logits_Pv == label_P1) & lower_Pv
    ahead_P = ahead_Pv.sum(1, dtype=torch.int32)  # the default, int64, is several times slower
    is_known_P = (labels_P >= 0) & (label_P1[:, 0] > -torch.inf)
    return torch.where(is_known_P, ahead_P.clamp(max=RANKS), RANKS).long()
