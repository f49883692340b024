"""Random-weight targets whose layers mix attention with recurrent ones: tiny configs by family."""

from __future__ import annotations

from typing import Any

import torch
from tiny_targets import CONTEXT, VOCABULARY, scaled_up
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EVERY_FOURTH = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_DELTA = {
    "head_dim": 16,
    "layer_types": _EVERY_FOURTH,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_CONV = ["conv", "conv", "full_attention", "conv"]

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", {**TINY, **_DELTA}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**TINY, **_DELTA, **_EXPERTS}),
    "qwen3-next": ("qwen3_next", {**TINY, **_DELTA, **_EXPERTS}),
    "olmo-hybrid": (
        "olmo_hybrid",
        {**TINY, **_DELTA, "linear_num_key_heads": 4, "num_key_value_heads": 4},
    ),
    "lfm2": ("lfm2", {**TINY, "layer_types": _CONV, "block_multiple_of": 8}),
    "lfm2-moe": (
        "lfm2_moe",
        {
            **TINY,
            "layer_types": _CONV,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            **TINY,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "sliding_window": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "granite4": (
        "granitemoehybrid",
        {
            **TINY,
            **_MAMBA,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {**TINY, **_MAMBA, "mamba_d_ssm": 64, "embedding_multiplier": 4.0},
    ),
    "bamba": ("bamba", {**TINY, **_MAMBA, "attn_layer_indices": [2]}),
    "nemotron-h": (
        "nemotron_h",
        {
            **{key: TINY[key] for key in TINY if key != "num_hidden_layers"},
            "layers_block_type": ["mamba", "moe", "mamba", "attention"],
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "zamba": (
        "zamba",
        {
            **TINY,
            "num_key_value_heads": 4,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            **TINY,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "chunk_size": 8,
            "adapter_rank": 4,
        },
    ),
    "jamba": (
        "jamba",
        {
            **TINY,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            **TINY,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": _EVERY_FOURTH,
        },
    ),
    "bailing-hybrid": (
        "bailing_hybrid",
        {
            **TINY,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "layer_types": _EVERY_FOURTH,
        },
    ),
}
for recent in ("lfm3", "bailing-hybrid"):  # than the oldest transformers that is supported
    if HYBRIDS[recent][0] not in CONFIG_MAPPING:
        del HYBRIDS[recent]

_TEXT = {key: TINY[key] for key in TINY if key not in ("bos_token_id", "eos_token_id")}
_EYES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
_LAYERS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": HYBRIDS["qwen3.5"][1],
        "vision_config": {**_EYES, "out_hidden_size": 32},
    },
    "qwen3_5_moe": {
        "text_config": HYBRIDS["qwen3.5-moe"][1],
        "vision_config": {**_EYES, "out_hidden_size": 32},
    },
    "gemma3": {
        "text_config": {**_TEXT, "head_dim": 8},
        "vision_config": {**_LAYERS, "intermediate_size": 16, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "vision_config": {**_LAYERS, "intermediate_size": 16, "head_dim": 8},
        "audio_config": None,
    },
}


def multimodal_model(kind: str) -> Any:
    """A random model of text and pictures, as such checkpoints are published."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**MULTIMODAL[kind])
    return scaled_up(AutoModelForImageTextToText.from_config(config))


def hybrid_model(name: str, **changes: Any) -> Any:
    """A random model, as `tiny_targets.random_model`. changes: of its config."""
    kind, options = HYBRIDS[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**options, **changes})
    return scaled_up(AutoModelForCausalLM.from_config(config))
