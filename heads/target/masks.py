"""Attention masks of a target: who sees whom in token trees and in packed training rows.

Legend: B batch, T tokens, N tree nodes, S cache slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    PreTrainedModel,
    masking_utils,
)

from draftheads.heads.batch import Batch
from draftheads.heads.target.pretrained import ATTENTION_LAYERS

ASKED = "find_packed_sequence_indices"
"""The function of transformers that asks the device whether rows hold several documents."""


class Masks:
    """Turns visibility into the masks that a model's attention takes, one per layer type.

    Windows count positions, not cache slots. Masks are additive (0, or the minimum of the dtype):
    eager attention *adds* its mask, and sdpa would convert a bool mask in every layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        windowed = getattr(config, "use_sliding_window", True)
        self.window: int | None = getattr(config, "sliding_window", None) if windowed else None
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        default = "sliding_attention" if self.window else "full_attention"
        types = getattr(config, "layer_types", None) or [default]
        attending = [kind for kind in types if kind in ATTENTION_LAYERS]
        self.types: tuple[str, ...] = tuple(dict.fromkeys(attending)) or (default,)
        self.others = set(types) - {*attending}  # recurrent ones, which take none
        self.others |= {"linear_attention", "conv"} if self.others else set()
        self._model = model  # it may be moved to another dtype

    def __call__(
        self, visible_BNS: Tensor, positions_BN: Tensor, key_positions_BS: Tensor
    ) -> Tensor | dict[str, Tensor | None]:
        q_BN1 = positions_BN[:, :, None]
        k_B1S = key_positions_BS[:, None, :]
        dtype = self._model.dtype
        masks: dict[str, Tensor] = {}
        for kind in self.types:
            # `visible` says who is whose ancestor. Windows and chunks look at positions, of which
            # branches share some: a node as deep as another one is as far from the text.
            seen_BNS = visible_BNS
            if kind == "sliding_attention" and self.window:
                seen_BNS = visible_BNS & (q_BN1 - k_B1S < self.window)
            elif kind == "chunked_attention" and self.chunk:
                seen_BNS = visible_BNS & (q_BN1 // self.chunk == k_B1S // self.chunk)
            hidden_B1NS = ~seen_BNS[:, None]
            zeros = torch.zeros(hidden_B1NS.shape, dtype=dtype, device=hidden_B1NS.device)
            mask = zeros.masked_fill_(hidden_B1NS, torch.finfo(dtype).min)
            masks[kind] = mask.expand(len(positions_BN), -1, -1, -1)  # some models need all rows
        if len(masks) == 1 and not self.others:
            return next(iter(masks.values()))
        return {**masks, **dict.fromkeys(self.others)}

    def packed(self, batch: Batch) -> Tensor | dict[str, Tensor | None]:
        """The mask of training rows: each token sees its own document up to itself."""
        return self(batch.visible(), batch.positions_BT, batch.positions_BT)


@contextmanager
def known_packing(batch: Batch) -> Iterator[None]:
    """A context in which transformers does not ask the device whether rows hold several documents:
    the host knows. Other threads are answered as ever.
    """
    answer = getattr(masking_utils, ASKED)

    def known(positions_BT: Tensor) -> Tensor | None:
        if positions_BT is batch.positions_BT:
            return numbers_BT
        other: Tensor | None = answer(positions_BT)
        return other

    resets_BT = (batch.host or batch).positions_BT.diff() != 1
    numbers_BT = None
    if resets_BT.numpy().any():
        numbers_BT = F.pad(batch.positions_BT.diff() != 1, (1, 0)).cumsum(1)
    with mock.patch.object(masking_utils, ASKED, known):
        yield
