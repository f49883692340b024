"""Random-weight targets by family, tiny: layers that mix attention with recurrent ones, and
checkpoints that contain a multi-token prediction layer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_targets import CONTEXT, VOCABULARY, scaled_up
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_layers import MtpModel

from draftheads.heads.mtp.head import MtpHead
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import decoder_layers

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


_COMMON = {**TINY, "num_hidden_layers": 3}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}

DEEPSEEK = {
    r"^enorm": "model.layers.{n}.enorm",
    r"^hnorm": "model.layers.{n}.hnorm",
    r"^eh_proj": "model.layers.{n}.eh_proj",
    r"^post_norm": "model.layers.{n}.shared_head.norm",
    r"^lm_head": "model.layers.{n}.shared_head.head",
    r"^embed_tokens": "model.layers.{n}.embed_tokens",
    r"^mtp_block\.": "model.layers.{n}.",
}
QWEN = {
    r"^enorm": "mtp.pre_fc_norm_embedding",
    r"^hnorm": "mtp.pre_fc_norm_hidden",
    r"^eh_proj": "mtp.fc",
    r"^post_norm": "mtp.norm",
    r"^mtp_block\.": "mtp.layers.0.",
}
TRANSFORMERS = {r"^(?=enorm|hnorm|eh_proj|post_norm|mtp_block)": "mtp.layers.0."}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, str], int]] = {
    "deepseek-v3": ("deepseek_v3", {**_COMMON, **_ROUTED, **_LATENT}, DEEPSEEK, -1),
    "glm4-moe": ("glm4_moe", {**_COMMON, **_ROUTED, "head_dim": 16}, DEEPSEEK, -1),
    "qwen3-next": ("qwen3_next", HYBRIDS["qwen3-next"][1], QWEN, -1),
    "qwen3.5": ("qwen3_5_text", HYBRIDS["qwen3.5"][1], QWEN, -1),
    "qwen3.5-moe": ("qwen3_5_moe_text", HYBRIDS["qwen3.5-moe"][1], QWEN, -1),
    "states-first": ("qwen2", {**_COMMON, "mtp_hidden_states_first": True}, TRANSFORMERS, -1),
    "transformers": ("qwen3", {**_COMMON, "head_dim": 16}, TRANSFORMERS, -1),
}
"""Name -> model type, config, our names -> the checkpoint's, and the layer that its MTP is like."""


def write_mtp_target(folder: Path, name: str, **more: Any) -> dict[str, torch.Tensor]:
    """A random target with a random MTP layer. more: keys of its config. Returns the layer's
    tensors, by our names, as the model has them.
    """
    kind, options, names, number = FAMILIES[name]
    options = {**options, **more}
    torch.manual_seed(0)
    model = scaled_up(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options)))
    model.save_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    other = folder / "other"
    model.save_pretrained(other)  # another layer, in the layout of checkpoints
    stored, others = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    layers = options["num_hidden_layers"]
    prefix = f"model.layers.{number % layers}."
    block = {n.removeprefix(prefix): x for n, x in others.items() if n.startswith(prefix)}
    width = options["hidden_size"]
    tensors = {f"mtp_block.{name}": tensor for name, tensor in block.items()}
    tensors |= {f"{name}.weight": torch.randn(width) for name in ("enorm", "hnorm", "post_norm")}
    tensors["eh_proj.weight"] = torch.randn(width, 2 * width) / 4
    lm_head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
    tensors |= {"lm_head.weight": lm_head.clone()}
    tensors |= {"embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
    for ours, tensor in tensors.items():
        pattern = next((each for each in names if re.match(each, ours)), None)
        if pattern is not None:
            theirs = re.sub(pattern, names[pattern].replace("{n}", str(layers)), ours)
            stored[theirs] = tensor.contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    layer = decoder_layers(model)[number].state_dict()
    own = ("enorm.weight", "hnorm.weight", "post_norm.weight", "eh_proj.weight")
    truth = {name: tensors[name] for name in own}
    return truth | {f"mtp_block.{name}": tensor for name, tensor in layer.items()}


def load_mtp_target(folder: Path) -> Target:
    target = Target.load(folder, dtype="float32")
    target.model.generation_config.eos_token_id = None
    return target


def reference(target: Target, head: MtpHead) -> MtpModel:
    """transformers' own model of such a layer, with the weights of a head."""
    text = target.model.config.get_text_config()
    if not hasattr(text, "num_mtp_layers"):  # transformers knows it for some of these families
        text.num_mtp_layers = 1
        types = getattr(text, "layer_types", None)
        text.mtp_layer_types = types and types[-1:]
    text.mtp_hidden_states_first = head.design.states_first
    model = MtpModel(target.model, 1).to(target.dtype).eval()
    model.layers[0].load_state_dict(head.state_dict())
    return model
