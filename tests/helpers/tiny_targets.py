"""Random-weight targets of many architectures, small enough to compare thousands of tokens in
seconds.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from draftheads.heads.cpu.linear import PackedLinear
from draftheads.heads.target.model import Target

VOCABULARY = 19  # so small that token id 0, Medusa's padding, is a frequent right answer
CONTEXT = 128

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "intermediate_size": 48}
_SHARED = ["sliding_attention", "full_attention", "full_attention"]
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_VISION = {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 16}),
    "mistral-window": ("mistral", {**_GROUPED, "head_dim": 16, "sliding_window": 8}),
    "gemma2-window": ("gemma2", {**_GROUPED, "head_dim": 16, "sliding_window": 8}),
    "gemma3-window": (
        "gemma3_text",
        {**_GROUPED, "head_dim": 16, "sliding_window": 8, "layer_types": _SLIDING},
    ),
    "gpt-neox": ("gpt_neox", {**_COMMON, "intermediate_size": 48}),
    "phi3": ("phi3", {**_GROUPED, "sliding_window": None}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("olmo2", _GROUPED),
    "opt": ("opt", {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": (
        "gpt2",
        {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": VOCABULARY,
            "n_positions": CONTEXT,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}

UNEVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        {
            **_GROUPED,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": 8,
            "layer_types": _SHARED,
        },
    ),
    "modernbert-decoder": (
        "modernbert-decoder",
        {**_COMMON, "intermediate_size": 48, "local_attention": 16, "layer_types": _SLIDING},
    ),
}
"""As these, but of layers that differ in their parameters."""
OTHER_LOGITS = ("gemma2-window", "modernbert-decoder")
"""Targets whose logits are not lm_head(last state)."""

_SPARSE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MASKLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": CONFIGS["opt"],
    "gpt-oss": (
        "gpt_oss",
        {**_GROUPED, **_SPARSE, "head_dim": 16, "sliding_window": 8, "layer_types": _SLIDING},
    ),
    "falcon": ("falcon", {**_COMMON, "alibi": False}),
    "biogpt": ("biogpt", {**_COMMON, "intermediate_size": 48}),
    "xglm": (
        "xglm",
        {**_COMMON, "d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48},
    ),
    "qwen2-vl": ("qwen2_vl", {"text_config": {**_GROUPED, "rope_parameters": _MROPE}, **_VISION}),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {"text_config": {**_GROUPED, "rope_parameters": _MROPE}, **_VISION},
    ),
    "afmoe": (
        "afmoe",
        {
            **_GROUPED,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
            "sliding_window": 8,
            "layer_types": _SLIDING,
        },
    ),
}
"""Models that tell their mask no positions, so that packed documents would see each other."""

_SEES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
_SEES |= {"intermediate_size": 32, "image_size": 28}
_SEES_FAR = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
_SEES_FAR |= {"intermediate_size": 32, "out_hidden_size": 32, "fullatt_block_indexes": [0]}
_M_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_VL = {
    "text_config": {**_GROUPED, "rope_parameters": _M_ROPE},
    "vision_config": _SEES_FAR,
    "image_token_id": 18,
    "video_token_id": 17,
    "vision_start_token_id": 16,
    "vision_end_token_id": 15,
}
_WINDOWED = {**_GROUPED, "head_dim": 16, "sliding_window": 8, "layer_types": _SLIDING}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _WINDOWED,
        "vision_config": {**_SEES, "model_type": "siglip_vision_model"},
        "image_token_index": 18,
        "boi_token_index": 17,
        "eoi_token_index": 16,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {"text_config": _WINDOWED, "image_token_id": 18},
    "llava": {
        "text_config": {**_GROUPED, "model_type": "llama"},
        "vision_config": {**_SEES, "model_type": "clip_vision_model"},
        "image_token_index": 18,
    },
    "mistral3": {
        "text_config": {**_GROUPED, "model_type": "mistral", "head_dim": 8},
        "vision_config": {**_SEES, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": 18,
    },
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "paligemma": {
        "text_config": {**_GROUPED, "model_type": "gemma", "head_dim": 8},
        "vision_config": {**_SEES, "model_type": "siglip_vision_model", "projection_dim": 32},
        "image_token_index": 18,
        "projection_dim": 32,
    },
}
"""Models that see; the last of them counts positions from 1."""

UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}),
    "mpt": (
        "mpt",
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "max_seq_len": 64},
    ),
    "falcon-alibi": (
        "falcon",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "alibi": True,
        },
    ),
}


def random_model(name: str) -> Any:
    """A random model whose weights are scaled up, so that its greedy text does not run in
    circles.
    """
    kind, options = {**CONFIGS, **UNEVEN, **MASKLESS, **UNSUPPORTED}[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**options)
    mapping = (
        AutoModelForCausalLM
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        else AutoModelForImageTextToText
    )
    return scaled_up(mapping.from_config(config))


def scaled_up(model: Any) -> Any:
    """The model with greater weights, and without end token, so that runs have a known length."""
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8.0)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def random_multimodal(name: str) -> Any:
    """As `random_model`, of those that see."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**copy.deepcopy(MULTIMODAL[name]))  # they change what they get
    return scaled_up(AutoModelForImageTextToText.from_config(config))


@cache
def tiny_target(name: str = "llama") -> Target:
    """A target to share between tests; do not change it."""
    target = Target(random_model(name), name=f"tiny-{name}")
    SHARED.append(target)
    return target


@cache
def one_layer_target() -> Target:
    """Another to share: a compiler takes seconds for each further layer."""
    torch.manual_seed(0)
    kind, options = CONFIGS["llama"]
    config = CONFIG_MAPPING[kind](**{**options, "num_hidden_layers": 1})
    target = Target(scaled_up(AutoModelForCausalLM.from_config(config)), name="one-layer")
    SHARED.append(target)
    return target


SHARED: list[Target] = []


def greedy(target: Target, prompt: list[int], new: int) -> list[int]:
    """What transformers' own generate writes; targets that tests share write it once."""
    if any(target is shared for shared in SHARED):
        return list(text_of_shared(target, tuple(prompt), new))
    return generated(target, prompt, new)


@cache
def text_of_shared(target: Target, prompt: tuple[int, ...], new: int) -> list[int]:
    return generated(target, list(prompt), new)


def generated(target: Target, prompt: list[int], new: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt], device=target.device)
    out = target.model.generate(  # without a mask, it would take token 0 for padding
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()


def some_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def is_packed(model: torch.nn.Module) -> bool:
    """Whether some of its matrices are laid out for this CPU."""
    return any(isinstance(module, PackedLinear) for module in model.modules())
