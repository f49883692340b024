"""Block heads in DeepSpec's and z-lab's layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from layouts import folder_of
from tiny_targets import VOCABULARY, tiny_target
from torch import Tensor
from trained_heads import trained

from draftheads.heads.base import DraftHead
from draftheads.heads.block import BlockHead

HEAD = {"feature_layers": [1, 2], "mask": 7, "rank": 6, "block_size": 5, "conditioning": "markov"}
PLAIN = {"conditioning": "none", "sample_from_anchor": False}
LAYER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "hidden_act": "silu",
    "rope_theta": 10000.0, "model_type": "qwen3",
}  # fmt: skip
SHARED = {"mask_token_id": 7, "target_layer_ids": [0, 1]}
DEEPSPEC = {
    **LAYER, **SHARED, "architectures": ["Qwen3DSparkModel"], "block_size": 5,
    "num_target_layers": 3, "markov_rank": 6, "markov_head_type": "vanilla", "num_anchors": 512,
    "enable_confidence_head": False, "confidence_head_with_markov": False,
    "tie_word_embeddings": False, "layer_types": ["full_attention"] * 2, "sliding_window": None,
}  # fmt: skip
ZLAB = {
    **LAYER, "architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": 3,
    "dflash_config": SHARED,
}  # fmt: skip


def kept(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def tensors_of(head: BlockHead, prefix: str = "") -> dict[str, Tensor]:
    """As published, with copies of the target's matrices and tables that nobody reads."""
    model = tiny_target().model
    copies = {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach(),
        "lm_head.weight": model.get_output_embeddings().weight.detach(),
        "rotary_emb.inv_freq": torch.ones(4),
    }
    return {f"{prefix}{name}": each for name, each in kept({**copies, **head.state_dict()}).items()}


def head_of(choices: dict[str, Any]) -> Any:
    return trained("block", **{**HEAD, "intermediate_size": 48, **choices})


BLOCK_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": 32,
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_target_layers": 3, "block_size": 5,
    "mask_token_id": 7, "target_layer_ids": [0, 1], "rope_theta": 1e4, "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "markov_rank": 6,
    "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip


def block_of(path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    if tensors is None:
        tensors = dict(block().state_dict())
    return folder_of(path / "head", "model.safetensors", tensors, {**BLOCK_CONFIG, **config})


def block(**choices: Any) -> DraftHead:
    given = {"feature_layers": [1, 2], "mask": 7, "rank": 6, "block_size": 5, "confidence": True}
    return trained("block", **{**given, "conditioning": "markov", **choices})
