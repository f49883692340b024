"""Published draft models that this project cannot run, by what their config says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftheads.heads.formats.stored import Stored

Config = dict[str, Any]


def _scaling(config: Config) -> Config:
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _architecture(config: Config) -> str:
    return str((config.get("architectures") or [""])[0])


LLAMA_LIKE = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
)
"""Architectures of EAGLE heads whose layers are Llama's."""

DESIGNS: list[tuple[str, Callable[[Config], bool]]] = [
    (
        "a block-diffusion drafter (DFlash, DSpark, Domino)",
        lambda config: (
            "dflash_config" in config
            or _architecture(config).startswith(("DFlash", "DSpark", "Domino"))
        ),
    ),
    (
        "a parallel drafter (P-EAGLE)",
        lambda config: (
            _architecture(config).startswith("PEagle") or bool(config.get("parallel_drafting"))
        ),
    ),
    (
        "one with multi-head latent attention (MLA)",
        lambda config: "kv_lora_rank" in config,
    ),
    (
        "one with positions in three dimensions (mrope)",
        lambda config: "mrope_section" in _scaling(config),
    ),
    (
        "one with norms of queries and keys",
        lambda config: (
            bool(config.get("use_qk_norm")) or _architecture(config) == "Eagle3Qwen3ForCausalLM"
        ),
    ),
    (
        "one with biases in its attention",
        lambda config: bool(config.get("qkv_bias") or config.get("attention_bias")),
    ),
    (
        "one with another activation than SiLU",
        lambda config: config.get("hidden_act", "silu") not in ("silu", "swish"),
    ),
]
"""What a draft model may be that ours are not."""


def check_design(stored: Stored) -> None:
    """Raise ValueError, with what it has that ours have not, for a head that cannot be read."""
    for what, has in DESIGNS:
        if has(stored.config):
            raise stored.refuse(
                f"expected a Medusa, Hydra or EAGLE head, got {what}; this project does not run "
                "such heads, train one with it instead"
            )
    architecture = _architecture(stored.config)
    is_eagle = any("self_attn.q_proj" in name for name in stored.tensors)
    if is_eagle and architecture and architecture not in LLAMA_LIKE:
        raise stored.refuse(
            f"expected a head of one of the architectures {', '.join(LLAMA_LIKE)}, got "
            f"{architecture}; such heads are not read, train one here instead"
        )
