"""Random models of all architectures whose layers run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tiny_targets import CONFIGS, random_model, scaled_up
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def changed(kind: str, like: str, **changes: Any) -> Any:
    """A random model of a type, with the sizes of one of `CONFIGS`."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**CONFIGS[like][1], **changes})
    return scaled_up(AutoModelForCausalLM.from_config(config))


ONNX_MODELS: dict[str, Callable[[], Any]] = {
    **{
        name: partial(random_model, name)
        for name in ("llama", "mistral-window", "phi3", "qwen2", "qwen3", "gemma3-window")
    },
    "smollm3": partial(changed, "smollm3", "llama", num_hidden_layers=4),  # one has no RoPE
    "phi3-half": partial(changed, "phi3", "phi3", head_dim=16, rope_parameters=HALF_ROTATED),
    "gemma3-wide": partial(changed, "gemma3_text", "gemma3-window", head_dim=256),
    "one-group": partial(changed, "llama", "llama", num_key_value_heads=4),
    "biases": partial(changed, "llama", "llama", attention_bias=True, mlp_bias=True),
}
