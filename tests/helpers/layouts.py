"""Other projects' checkpoint layouts, as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_targets import VOCABULARY
from torch import Tensor
from trained_heads import trained

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import load_head
from draftheads.heads.target.model import Target

BASE = {"base_model_name_or_path": "tiny-llama"}
V01 = {**BASE, "medusa_num_heads": 2, "medusa_num_layers": 1}  # as published; there are 5 heads
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "hidden_act": "silu",
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
HEADLESS = {"eagle_aux_hidden_state_layer_ids": [1, 2]}


def folder_of(path: Path, file: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(tensors, path / file)
    else:
        torch.save(tensors, path / file)
    return path


def refusal(folder: Path, target: Target | None = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is the test
        load_head(folder, target=target)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def numbered(head: DraftHead, layers: int, prefix: str = "") -> dict[str, Tensor]:
    """The state dict of FasterDecoding's module list."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        kind, k, *rest = name.split(".")
        last = f"{k}.{layers}.weight"
        theirs = last if kind == "lm_heads" else f"{k}.{rest[1]}.linear.{rest[2]}"
        tensors[prefix + theirs] = tensor
    return tensors


VLLM = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 32,
        "vocab_size": VOCABULARY, "num_heads": 9, "num_hidden_layers": 1}  # fmt: skip


def eagle3(**choices: Any) -> DraftHead:
    return trained("eagle3", feature_layers=[1, 2], intermediate_size=48, **choices)


def renamed(head: DraftHead, old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): each for name, each in head.state_dict().items()}


SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
    "norm_before_residual": True, "transformer_layer_config": LLAMA, **HEADLESS,
    "speculators_config": {"verifier": {"name_or_path": "tiny-llama", "architectures": []}},
}  # fmt: skip
