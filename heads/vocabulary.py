"""Draft vocabularies: the part of the target's tokens that a head can draft.

Legend: v draft vocabulary, V vocabulary of the target, M tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftheads.heads.cpu.linear import pack_like
from draftheads.heads.layers import Cached
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import integers


class Vocabulary(nn.Module):
    """The draft vocabulary of a head, stored as in published checkpoints: `d2t` holds target id
    minus draft index, `t2d` whether the head can draft each of the target's tokens.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def add_vocabulary(self, size: int, vocab_size: int) -> None:
        """Create the buffers, unless the vocabulary is the target's."""
        ids_v = torch.arange(size) if size < vocab_size else None
        self.register_buffer("d2t", None if ids_v is None else torch.zeros_like(ids_v))
        self.register_buffer("t2d", None if ids_v is None else t2d(ids_v, vocab_size))

    @property
    def token_map(self) -> Tensor | None:
        """int64 (v,): target ids of the draft vocabulary, rising; None: all."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @token_map.setter
    def token_map(self, ids_v: Tensor | None) -> None:
        if ids_v is not None:
            assert self.d2t is not None and self.t2d is not None
            self.d2t.copy_(ids_v - torch.arange(len(ids_v)))
            self.t2d.copy_(t2d(ids_v, len(self.t2d)))

    @staticmethod
    def sizes_in(tensors: dict[str, Tensor]) -> tuple[int, int] | None:
        """v and V of stored tensors; None without maps. Raises ValueError where they disagree."""
        offsets_v = integers(tensors, "d2t")
        mask_V = integers(tensors, "t2d")
        if offsets_v is None or mask_V is None:  # if one is missing, loading fails
            return None
        ids_v = offsets_v + torch.arange(len(offsets_v), device=offsets_v.device)
        if ids_v.sort().values.tolist() != mask_V.nonzero()[:, 0].tolist():
            raise ValueError(
                "expected d2t to hold target id minus draft index for each token in t2d, got "
                f"{len(ids_v)} ids from {int(ids_v.min())} to {int(ids_v.max())} for "
                f"{int(mask_V.sum())} tokens; were absolute ids stored?"
            )
        return len(offsets_v), len(mask_V)


def token_map(vocabulary: Sequence[int] | None, vocab_size: int) -> Tensor | None:
    """int64 (v,): the target id of each draft index, rising; None for the full vocabulary.

    Raises ValueError for ids outside the target's vocabulary.
    """
    if vocabulary is None or len(vocabulary) >= vocab_size:
        return None
    ids = sorted(set(vocabulary))
    check_ids(ids, vocab_size)
    return torch.tensor(ids)


def lm_head_rows(target: Target, token_map: Tensor | None) -> Tensor:
    """The target's lm_head for the draft vocabulary, float32 (v, D) on the CPU: where heads with
    their own start from.
    """
    weight_VD: Tensor = target.model.get_output_embeddings().weight.detach().float().cpu()
    return weight_VD if token_map is None else weight_VD[token_map]


class SharedRows:
    """The target's own lm_head for a draft vocabulary. A copy of rows is made once."""

    def __init__(self) -> None:
        self._rows: Cached[Tensor] = Cached()

    def of(self, target: Target, token_map: Tensor | None) -> Tensor:
        """The weight (v, D), packed as the target's. Raises as `Target.unembed_weight`."""
        weight_VD = target.unembed_weight()
        if token_map is None:
            return weight_VD

        def rows() -> Tensor:
            return pack_like(weight_VD, weight_VD[token_map])

        return self._rows.get([token_map], rows, [weight_VD])


def draft_index(tokens_M: Tensor, token_map: Tensor | None) -> Tensor:
    """int64: the draft index of each target id; -1 if the draft vocabulary lacks it."""
    if token_map is None:
        return tokens_M
    place_M = torch.searchsorted(token_map, tokens_M).clamp(max=len(token_map) - 1)
    return torch.where(token_map[place_M] == tokens_M, place_M, -1)


def t2d(token_map: Tensor, vocab_size: int) -> Tensor:
    """bool (V,): the target ids that are in the draft vocabulary."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=token_map.device)
    mask_V[token_map] = True
    return mask_V


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for duplicate or unknown target ids of a draft vocabulary. With two equal
    children of one node, sampling would not be exact.
    """
    distinct = sorted(set(ids))
    if len(distinct) < len(ids) or distinct[0] < 0 or distinct[-1] >= vocab_size:
        raise ValueError(
            f"draft vocabulary: expected distinct target ids from 0 to {vocab_size - 1}, got "
            f"{len(distinct)} distinct of {len(ids)}, from {distinct[0]} to {distinct[-1]}"
        )
