"""The forward pass of training: packed documents are kept apart.

Legend: B rows of a batch, R documents that run together, T tokens, D feature width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from draftheads.heads.batch import Batch
from draftheads.heads.target.longrope import document_lengths
from draftheads.heads.target.masks import known_packing
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


def packed_states(target: Any, batch: Batch, layers: Sequence[int], packing: Packing) -> Tensor:
    """Features (B, T, D) of packed rows, of which no document sees another, by the alignment law.
    target: a `Target`, whose module imports this one.

    Long rows are computed in pieces of whole documents, as a mask of all their tokens would be
    large; those of a sharded target are not, because all processes must run as many forwards.
    """
    sharded = is_sharded(target.model)
    is_short = batch.tokens_BT.shape[1] <= PIECE and batch.reach_BT is None
    if packing == "alone":
        if batch.reach_BT is not None:
            return _continued_states(target, batch, layers)
        passes = groups(batch, PIECE)
    elif packing == "mask" or sharded or is_short:
        return _forward(target, batch, layers, packing)
    else:
        passes = [[span] for span in spans(batch, PIECE)]
    if sharded:  # all processes must run as many
        most = torch.tensor(len(passes), device=target.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        passes += passes[-1:] * (int(most) - len(passes))
    states_BTD = _empty_states(target, batch, layers)
    for group in passes:
        rows = unpacked_rows(batch, group) if packing == "alone" else batch.part(*group[0])
        parts_RTD = _forward(target, rows, layers, packing)
        for part_TD, (row, start, stop) in zip(parts_RTD, group, strict=True):
            states_BTD[row, start:stop] = part_TD[: stop - start]
    return states_BTD


def shares_prefixes(target: Any) -> bool:
    """True if packed documents of a `Target` may share prefixes: with LongRoPE, states depend on
    the length of a text. Documents that run alone are read from a cache, without gradients, in as
    many passes as they need.
    """
    ways = target.ways
    is_bound = target.adapter or is_sharded(target.model) or ways.mixing == "tokens"
    return not (target.has_long_rope or (ways.packing == "alone" and is_bound))


def _empty_states(target: Any, batch: Batch, layers: Sequence[int]) -> Tensor:
    shape = (*batch.tokens_BT.shape, len(layers) * target.hidden_size)
    return torch.zeros(shape, dtype=target.dtype, device=target.device)


def _forward(target: Any, batch: Batch, layers: Sequence[int], packing: Packing) -> Tensor:
    lengths_BT = document_lengths(batch.positions_BT)
    has_mask = packing == "mask" or batch.reach_BT is not None
    with target.longrope.factors(lengths_BT), known_packing(batch):
        out = decoder(target.model)(
            batch.tokens_BT,
            attention_mask=target.masks.packed(batch) if has_mask else None,
            position_ids=batch.positions_BT,
            use_cache=False,
            output_hidden_states=states_argument(layers),
        )
    return _shifted(chosen_states(out, layers, target.device), batch)


def _continued_states(target: Any, batch: Batch, layers: Sequence[int]) -> Tensor:
    """`packed_states` of documents that run alone and begin with a part of an earlier one: each
    goes on from the cache of that part, without gradients.
    """
    host = batch.host or batch
    states_BTD = _empty_states(target, batch, layers)
    visible_BTT = host.visible()
    for row, documents_T in enumerate(host.documents_BT):
        cache = target.new_cache(1, len(documents_T))
        positions_T = F.pad(host.positions_BT[row], (0, 1))
        for number in range(int(documents_T.max()) + 1):
            own_P = (documents_T == number).nonzero()[:, 0]
            path_P = visible_BTT[row, own_P[-1]].nonzero()[:, 0]
            start = cache.rewind(int(positions_T[own_P[0]]))
            # the next document may go on from a place within this one
            for stop in (int(positions_T[own_P[-1] + 1]), len(path_P)):
                if start < stop:
                    places_P = path_P[start:stop]
                    tokens = host.tokens_BT[row, places_P].tolist()
                    out = target.prefill([tokens], cache, layers)
                    states_BTD[row, places_P] = out.features_BND[0]
                    start = stop
    return _shifted(states_BTD, batch)


def _shifted(states_BTD: Tensor, batch: Batch) -> Tensor:
    """Features from states: of each token, the state at the token before it. Those of first tokens
    are read by nobody.
    """
    if batch.reach_BT is None:
        return torch.cat([torch.zeros_like(states_BTD[:, :1]), states_BTD[:, :-1]], dim=1)
    seen_BTT = batch.visible().tril(-1)
    from_end_BT = seen_BTT.flip(-1).byte().argmax(-1)  # the newest of the tokens that one sees
    before_BT = seen_BTT.shape[-1] - 1 - from_end_BT
    return states_BTD.take_along_dim(before_BT[:, :, None], 1)


def is_sharded(model: PreTrainedModel) -> bool:
    """True if all processes must run as many forwards."""
    return isinstance(decoder(model), FSDPModule)


def spans(batch: Batch, tokens: int) -> Iterator[Span]:
    """The pieces of a batch, cut between documents: at most `tokens` tokens, or one longer document
    with its branches. Without padding.
    """
    on_host = batch.host or batch
    pairs = zip(on_host.documents_BT.numpy(), on_host.positions_BT.numpy(), strict=True)
    for row, (documents_T, positions_T) in enumerate(pairs):
        end = int((documents_T >= 0).sum())
        starts = np.flatnonzero(positions_T[:end] == 0).tolist()
        cut = 0
        for start, following in pairwise([*starts, end]):
            if following - cut > tokens and start > cut:
                yield row, cut, start
                cut = start
        yield row, cut, end


def groups(batch: Batch, tokens: int) -> list[list[Span]]:
    """The documents of a batch, those of similar length together: the longest first, and at most
    `tokens` tokens or one document in a group.
    """
    together: list[list[Span]] = []
    for span in sorted(spans(batch, 1), key=_length, reverse=True):
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
