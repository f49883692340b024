"""A draft vocabulary: the target ids that a head can guess, in rising order.

Legend: M tokens, V target vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_map(vocabulary: Sequence[int] | None, vocab_size: int) -> Tensor | None:
    """int64 (v,): the target id of each draft index; None for the full vocabulary.

    Raises ValueError for ids outside the target's vocabulary.
    """
    if vocabulary is None or len(vocabulary) >= vocab_size:
        return None
    ids = sorted(set(vocabulary))
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"draft vocabulary: expected ids from 0 to {vocab_size - 1}, got {ids}")
    return torch.tensor(ids)


def draft_index(tokens_M: Tensor, token_map: Tensor | None) -> Tensor:
    """int64: the draft index of each target id, -1 where the draft vocabulary lacks it."""
    if token_map is None:
        return tokens_M
    place_M = torch.searchsorted(token_map, tokens_M).clamp(max=len(token_map) - 1)
    return torch.where(token_map[place_M] == tokens_M, place_M, -1)


def d2t(token_map: Tensor) -> Tensor:
    """int64 (v,): target id minus draft index, as published checkpoints store the map."""
    return token_map - torch.arange(len(token_map), device=token_map.device)


def t2d(token_map: Tensor, vocab_size: int) -> Tensor:
    """bool (V,): which target ids the draft vocabulary has."""
    known_V = torch.zeros(vocab_size, dtype=torch.bool, device=token_map.device)
    known_V[token_map] = True
    return known_V


def check_distinct(ids_v: Tensor) -> None:
    """Raise ValueError for an id that a draft vocabulary has twice: equal guesses after one token
    would make sampling inexact.
    """
    ids_v = ids_v.sort().values
    twice = ids_v[1:][ids_v.diff() == 0]
    if len(twice):
        raise ValueError(
            f"draft vocabulary: expected each target id once, got {int(twice[0])} twice; drop one "
            "of its rows"
        )


def check_map(d2t_v: Tensor, t2d_V: Tensor) -> None:
    """Raise ValueError unless offsets and mask name the same tokens."""
    ids_v = d2t_v + torch.arange(len(d2t_v), device=d2t_v.device)
    inside = bool(((ids_v >= 0) & (ids_v < len(t2d_V))).all())
    if not inside or not bool(t2d_V[ids_v].all()) or int(t2d_V.sum()) != len(ids_v):
        raise ValueError(
            f"expected d2t to hold target id minus draft index of the {int(t2d_V.sum())} tokens in "
            f"t2d, got ids from {int(ids_v.min())} to {int(ids_v.max())}; were absolute ids stored?"
        )
    check_distinct(ids_v)
