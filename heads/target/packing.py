"""The forward pass of training: packed documents are kept apart.

Legend: B rows of a batch, R documents that run together, T tokens, D feature width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftheads.heads.batch import Batch
from draftheads.heads.target.longrope import LongRope, document_lengths
from draftheads.heads.target.masks import Masks, known_packing
from draftheads.heads.target.pretrained import chosen_states, decoder, states_argument

PIECE = 8192
"""Training tokens per forward pass of a row, unless a document is longer."""
SIMILAR = 0.75
"""Documents run together if they are at least so many times as long as the longest of them."""

Packing = Literal["resets", "mask", "alone"]
"""What keeps packed documents apart: position resets, a mask, or a row for each document, which
recurrent layers need, and which takes a CPU less than half of the time.
"""
Span = tuple[int, int, int]
"""Documents of a batch: row, start, stop."""


@dataclass(frozen=True)
class TrainingPass:
    """Hidden states of packed rows, of which no document sees another."""

    model: PreTrainedModel
    masks: Masks
    rope: LongRope
    packing: Packing

    def states(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        """Features (B, T, D) by the alignment law.

        Long rows are computed in pieces of whole documents, as a mask of all their tokens would be
        large; those of a sharded target are not, because all processes must run as many forwards.
        """
        sharded = is_sharded(self.model)
        is_short = batch.tokens_BT.shape[1] <= PIECE and batch.reach_BT is None
        if self.packing == "alone":
            passes = groups(batch, PIECE)
        elif self.packing == "mask" or sharded or is_short:
            return self._forward(batch, layers)
        else:
            passes = [[span] for span in _spans(batch, PIECE)]
        if sharded:  # all processes must run as many
            most = torch.tensor(len(passes), device=self.model.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            passes += passes[-1:] * (int(most) - len(passes))
        width = len(layers) * self.model.config.get_text_config(decoder=True).hidden_size
        states_BTD = torch.zeros(
            *batch.tokens_BT.shape, width, dtype=self.model.dtype, device=self.model.device
        )
        for spans in passes:
            rows = unpacked_rows(batch, spans) if self.packing == "alone" else batch.part(*spans[0])
            parts_RTD = self._forward(rows, layers)
            for part_TD, (row, start, stop) in zip(parts_RTD, spans, strict=True):
                states_BTD[row, start:stop] = part_TD[: stop - start]
        return states_BTD

    def _forward(self, batch: Batch, layers: Sequence[int]) -> Tensor:
        lengths_BT = document_lengths(batch.positions_BT)
        has_mask = self.packing == "mask" or batch.reach_BT is not None
        with self.rope.factors(lengths_BT), known_packing(batch):
            out = decoder(self.model)(
                batch.tokens_BT,
                attention_mask=self.masks.packed(batch) if has_mask else None,
                position_ids=batch.positions_BT,
                use_cache=False,
                output_hidden_states=states_argument(layers),
            )
        states_BTD = chosen_states(out, layers, self.model.device)
        if batch.reach_BT is not None:
            return states_BTD.take_along_dim(batch.before()[:, :, None], 1)
        return torch.cat([torch.zeros_like(states_BTD[:, :1]), states_BTD[:, :-1]], dim=1)


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether all processes must run as many forwards."""
    return isinstance(decoder(model), FSDPModule)


def _spans(batch: Batch, tokens: int) -> Iterator[Span]:
    """The pieces of a batch: at most `tokens` tokens, or one document."""
    for row, cuts in enumerate(batch.pieces(tokens)):
        for start, stop in pairwise(cuts):
            yield row, start, stop


def groups(batch: Batch, tokens: int) -> list[list[Span]]:
    """The documents of a batch, those of similar length together: the longest first, and at most
    `tokens` tokens or one document in a group.
    """
    together: list[list[Span]] = []
    for span in sorted(_spans(batch, 1), key=_length, reverse=True):
        group = together[-1] if together else []
        longest = _length(group[0]) if group else 0
        fits = (len(group) + 1) * longest <= tokens
        if group and fits and _length(span) >= SIMILAR * longest:
            group.append(span)
        else:
            together.append([span])
    return together


def unpacked_rows(batch: Batch, spans: Sequence[Span]) -> Batch:
    """Documents as rows of their own. Padding is on the right, where no causal layer sees it."""
    source = batch.host or batch
    tokens = [source.tokens_BT[row, start:stop] for row, start, stop in spans]
    tokens_RT = pad_sequence(tokens, batch_first=True)
    positions_RT = torch.arange(tokens_RT.shape[1]).expand_as(tokens_RT)
    rows = Batch(tokens_RT, tokens_RT >= 0, positions_RT, torch.zeros_like(tokens_RT))
    return rows.to(batch.tokens_BT.device)


def _length(span: Span) -> int:
    return span[2] - span[1]
