"""Tiny targets whose checkpoints contain a multi-token prediction layer, as their families publish
it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from hybrid_targets import HYBRIDS, TINY
from safetensors.torch import load_file, save_file
from tiny_targets import scaled_up
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from draftheads.heads.mtp.head import MtpHead
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import decoder_layers

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
