"""How packed documents are kept apart in a target whose recurrent layers read on across them.

Legend: B rows of a batch, R documents that run together, T tokens, D documents of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.batch import Batch

SIMILAR = 0.75
"""Documents run together if they are at least so many times as long as the longest of them."""

Span = tuple[int, int, int]
"""A document of a batch: row, start, stop."""


def groups(batch: Batch, tokens: int) -> list[list[Span]]:
    """The documents of a batch, those of similar length together: the longest first, and at most
    `tokens` tokens or one document in a group.
    """
    spans = [
        (row, start, stop)
        for row, cuts in enumerate(batch.pieces(1))
        for start, stop in pairwise(cuts)
    ]
    spans.sort(key=_length, reverse=True)
    together: list[list[Span]] = []
    for span in spans:
        group = together[-1] if together else []
        longest = _length(group[0]) if group else 0
        fits = (len(group) + 1) * longest <= tokens
        if group and fits and _length(span) >= SIMILAR * longest:
            group.append(span)
        else:
            together.append([span])
    return together


def rows_of(batch: Batch, spans: Sequence[Span]) -> Batch:
    """Documents as rows of their own. Padding is on the right, where no causal layer sees it."""
    source = batch.host or batch
    tokens = [source.tokens_BT[row, start:stop] for row, start, stop in spans]
    tokens_RT = pad_sequence(tokens, batch_first=True)
    positions_RT = torch.arange(tokens_RT.shape[1]).expand_as(tokens_RT)
    rows = Batch(tokens_RT, tokens_RT >= 0, positions_RT, torch.zeros_like(tokens_RT))
    return rows.to(batch.tokens_BT.device)


def document_ends(batch: Batch) -> dict[str, Any]:
    """Where the documents of a single row end, under the names that transformers' models hand on to
    kernels: sums of lengths for attention and gated delta nets, numbers for Mamba and convolutions.
    """
    starts_1T = (batch.host or batch).positions_BT == 0
    starts_D = starts_1T[0].nonzero()[:, 0]
    ends_D = F.pad(starts_D, (0, 1), value=starts_1T.shape[1]).int()
    longest = int(ends_D.diff().max())
    ends_D, numbers_1T = (
        tensor.int().to(batch.tokens_BT.device) for tensor in (ends_D, starts_1T.cumsum(1) - 1)
    )
    return {
        "cu_seq_lens_q": ends_D,
        "cu_seq_lens_k": ends_D,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": numbers_1T,
    }


def _length(span: Span) -> int:
    return span[2] - span[1]
