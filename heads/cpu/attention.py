"""Grouped-query attention of few queries on a CPU: all query heads that share a key head form one
matrix.

Without this, torch's kernel reads keys and values once per query head, and transformers copies them
for each query head when there is a mask.

torch sums one query and several of them in other orders. In float32 that last bit hardly ever
matters. Int8 products round what they read to 255 steps, and a value at the edge of two goes to
either, so their targets attend in float64: rounded to float32, sums of all orders are the same.

Legend: B batch, H query heads, G key heads, Q queries, S cache slots, W head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "draftheads_grouped"
"""Its name among the attention implementations of transformers."""
IN_FLOAT64 = "draftheads_float64"
"""That of the same in float64."""
UNSUPPORTED = ("position_bias", "softcap", "cache")
"""Options of a layer for which transformers' own function is called."""


def attend(
    q_BHQW: Tensor,
    k_BGSW: Tensor,
    v_BGSW: Tensor,
    mask_B1QS: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`scaled_dot_product_attention`, (B, H, Q, W). mask_B1QS: added, or what is visible as bool;
    None: all slots.
    """
    if q_BHQW.device.type != "cpu":
        return F.scaled_dot_product_attention(
            q_BHQW, k_BGSW, v_BGSW, attn_mask=mask_B1QS, scale=scale, enable_gqa=True
        )
    batch, heads, queries, width = q_BHQW.shape
    shared = heads // k_BGSW.shape[1]
    if mask_B1QS is not None and shared > 1:
        mask_B1QS = mask_B1QS.expand(-1, shared, -1, -1).flatten(1, 2)[:, None]
    q_BGPW = q_BHQW.reshape(batch, -1, shared * queries, width)
    out_BGPW = F.scaled_dot_product_attention(
        q_BGPW, k_BGSW, v_BGSW, attn_mask=mask_B1QS, scale=scale
    )
    return out_BGPW.reshape(batch, heads, queries, -1)


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of a target's layer, as transformers calls it; returns (B, Q, H, W)."""
    can_group = query.shape[2] == 1 if attention_mask is None else attention_mask.shape[1] == 1
    if not can_group or any(options.get(name) is not None for name in UNSUPPORTED):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    out_BHQW = attend(query, key, value, attention_mask, scaling)
    return out_BHQW.transpose(1, 2).contiguous(), None


def _forward_in_float64(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The same, for a target in int8."""
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.double()
    states = (query.double(), key.double(), value.double())
    out_BQHW, _ = _forward(module, *states, attention_mask, **options)
    return out_BQHW.to(query.dtype), None


for name, function in {IMPLEMENTATION: _forward, IN_FLOAT64: _forward_in_float64}.items():
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)


def use_grouped_attention(model: PreTrainedModel, bits: int | None) -> None:
    """Let a model on a CPU attend like this, if it uses `scaled_dot_product_attention`; with
    `bits`, those of its weights, in float64.
    """
    config = model.config.get_text_config(decoder=True)
    if model.device.type == "cpu" and config._attn_implementation in ("sdpa", IMPLEMENTATION):
        model.set_attn_implementation(IN_FLOAT64 if bits else IMPLEMENTATION)
