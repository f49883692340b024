"""Which models can follow a token tree, and the attention masks that make them.

Legend: B batch, N tree nodes, S cache slots.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel


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

    def __call__(
        self, visible_BNS: Tensor, positions_BN: Tensor, key_positions_BS: Tensor
    ) -> Tensor | dict[str, Tensor]:
        masks = {
            kind: self._finish(self._limit(kind, visible_BNS, positions_BN, key_positions_BS))
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


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model whose attention cannot follow a tree."""
    config = model.config
    kind = f"{type(model).__name__} ({config.name_or_path or config.model_type})"
    if config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder; draft heads need a decoder-only causal LM")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{kind} keeps a recurrent state, which cannot be rolled back to the accepted tokens; "
            "draft heads need a target with attention only"
        )
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if getattr(config, "alibi", False) or not takes_positions:
        raise ValueError(
            f"{kind} derives positions from the attention mask (ALiBi); a token tree needs "
            "position_ids. Use a target with rotary or learned positions"
        )
