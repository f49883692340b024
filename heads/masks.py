"""The attention masks that make a model follow a token tree, or keep packed documents apart.

Legend: B batch, T tokens, N tree nodes, S cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftheads.heads.base import Batch
from draftheads.heads.supported import slot_limit


class MaskBuilder:
    """Turns visibility into what a model's attention takes.

    Windows are cut by position, not by cache slot; hybrid models get one mask per layer type. Masks
    are additive (0, or the dtype's least number): eager attention *adds* whatever it gets, and sdpa
    would turn a bool mask into this in every layer again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        window = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            window = None
        self.window: int | None = window
        self.chunk: int | None = getattr(config, "attention_chunk_size", None)
        types = getattr(config, "layer_types", None) or [
            "sliding_attention" if window else "full_attention"
        ]
        self.types: tuple[str, ...] = tuple(dict.fromkeys(types))
        self.dtype = model.dtype
        self.slots = limit[0] if (limit := slot_limit(config)) else None

    def __call__(
        self, visible_BNS: Tensor, positions_BN: Tensor, key_positions_BS: Tensor
    ) -> Tensor | dict[str, Tensor]:
        if self.slots and visible_BNS.shape[2] > self.slots:
            raise ValueError(
                f"expected text and tree to take at most {self.slots} cache slots of this target, "
                f"got {visible_BNS.shape[2]}; use a smaller tree"
            )
        return self._build(visible_BNS, positions_BN, key_positions_BS)

    def packed(self, batch: Batch) -> Tensor | dict[str, Tensor]:
        """The mask of training rows: every token sees its own document up to itself."""
        documents_BT = batch.documents_BT
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        return self._build(same_BTT.tril(), batch.positions_BT, batch.positions_BT)

    def _build(self, visible_BNS: Tensor, q_BN: Tensor, k_BS: Tensor) -> Tensor | dict[str, Tensor]:
        rows = len(q_BN)  # a topology that rows share is one row; some models ask for each
        masks = {
            kind: self._finish(self._limit(kind, visible_BNS, q_BN, k_BS)).expand(rows, -1, -1, -1)
            for kind in self.types
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _limit(self, kind: str, visible_BNS: Tensor, q_BN: Tensor, k_BS: Tensor) -> Tensor:
        if kind == "sliding_attention" and self.window:
            return visible_BNS & (q_BN[:, :, None] - k_BS[:, None, :] < self.window)
        if kind == "chunked_attention" and self.chunk:
            return visible_BNS & (q_BN[:, :, None] // self.chunk == k_BS[:, None, :] // self.chunk)
        return visible_BNS

    def _finish(self, visible_BNS: Tensor) -> Tensor:
        hidden_B1NS = ~visible_BNS[:, None]
        zeros = torch.zeros(hidden_B1NS.shape, dtype=self.dtype, device=hidden_B1NS.device)
        return zeros.masked_fill_(hidden_B1NS, torch.finfo(self.dtype).min)
