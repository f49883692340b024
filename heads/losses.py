"""Cross-entropy that never holds all logits: chunked over learned positions, recomputed in the
backward pass.

Legend: M learned positions, C positions of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftheads.heads.base import RANKS

CHUNK_LOGITS = 1 << 25
"""Logits held at a time (128 MiB in float32), whatever batch, sequence length and vocabulary
are.
"""


def chunked_cross_entropy(
    hidden_MD: Tensor,
    labels_M: Tensor,
    unembed: Callable[[Tensor], Tensor],
    *,
    vocab_size: int,
    teacher: Callable[[slice], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy (scalar, float32) and the rank of each label, int64 (M,), 0 = best.

    unembed maps (C, D) to logits (C, V). labels_M: int64. With `teacher`, which gives target logits
    (C, V) of a slice of positions, the loss is the soft cross-entropy against their softmax; the
    ranks are the labels' all the same. Ranks are exact up to RANKS - 1; RANKS stands for every
    worse one.
    """
    loss = hidden_MD.new_zeros((), dtype=torch.float32)
    ranks: list[Tensor] = []
    size = max(1, CHUNK_LOGITS // vocab_size)
    for start in range(
        0, max(len(hidden_MD), 1), size
    ):  # once even for no position: DDP wants every gradient
        part = slice(start, start + size)
        chunk_loss, chunk_ranks = checkpoint(
            _chunk, hidden_MD[part], labels_M[part], unembed, teacher, part, use_reentrant=False
        )
        loss = loss + chunk_loss
        ranks.append(chunk_ranks)
    return loss, torch.cat(ranks)


def chunked_ranks(
    hidden_MD: Tensor, labels_M: Tensor, unembed: Callable[[Tensor], Tensor], *, vocab_size: int
) -> Tensor:
    """The rank of each label, as in `chunked_cross_entropy`, without loss or gradient; label -1 has
    rank RANKS.
    """
    size = max(1, CHUNK_LOGITS // vocab_size)
    parts = [
        _ranks(unembed(hidden_MD[start : start + size]), labels_M[start : start + size])
        for start in range(0, max(len(hidden_MD), 1), size)
    ]
    return torch.cat(parts)


def _chunk(
    hidden_CD: Tensor,
    labels_C: Tensor,
    unembed: Callable[[Tensor], Tensor],
    teacher: Callable[[slice], Tensor] | None,
    part: slice,
) -> tuple[Tensor, Tensor]:
    logits_CV = unembed(hidden_CD).float()
    if teacher is None:
        loss = F.cross_entropy(logits_CV, labels_C, reduction="sum")
    else:
        with torch.no_grad():
            p_CV = torch.softmax(teacher(part).float(), dim=-1)
        loss = F.cross_entropy(logits_CV, p_CV, reduction="sum")
    return loss, _ranks(logits_CV.detach(), labels_C)


def _ranks(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    best_CR = logits_CV.topk(min(RANKS, logits_CV.shape[1])).indices
    right_CR = best_CR == labels_C[:, None]
    return torch.where(right_CR.any(1), right_CR.int().argmax(1), RANKS)


def rank_counts(ranks_M: Tensor) -> Tensor:
    """int64 (RANKS + 1,): how often each rank occurs."""
    return torch.bincount(ranks_M, minlength=RANKS + 1)
