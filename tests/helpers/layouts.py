"""Other projects' checkpoint layouts, as published: Medusa's, EAGLE's, those of block heads of
DeepSpec and z-lab, Hydra's, and EAGLE-4's as NeMo AutoModel documents its export.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_drafting import DEPTH
from safetensors.torch import save_file
from tiny_targets import VOCABULARY, tiny_target
from torch import Tensor
from trained_heads import trained

from draftheads.heads.base import DraftHead
from draftheads.heads.block import BlockHead
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
CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 16}
SELECTOR = {"selector_rank": 6, "selector_top_k": 5}
ZLAB2 = {
    **ZLAB, "architectures": ["DFlash2DraftModel"],
    "dflash_config": {**SHARED, **CONVOLUTIONS, **SELECTOR},
}  # fmt: skip

SHIFTED = {
    **SHARED, "projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 6,
    "gru_hidden_dim": 24, "shift_label": True,
}  # fmt: skip
SPECFORGES_DOMINO = {
    **LAYER, "architectures": ["DominoDraftModel"], "block_size": 5, "num_target_layers": 3,
    "emb_dim": 6, "tie_word_embeddings": True, "dflash_config": SHIFTED,
}  # fmt: skip
NEMOS_DOMINO = {
    **LAYER, "architectures": ["Qwen3DFlashDraftModel"], "num_target_layers": 3,
    "dflash_config": {**SHIFTED, "block_size": 5, "shift_label": False},
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


WIDTH, LAYERS = 32, 3
HYDRA_CONFIG = {
    "base_model_name_or_path": "base/model",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "hydra_num_heads": DEPTH + 4,  # published configs are wrong about both
    "hydra_num_layers": LAYERS + 2,
    "transformers_version": "4.33.2",
}
PREFIX = "prefix_embeding_layer"


def places(architecture: str) -> list[int]:
    """Of the residual blocks in a head: behind a prefix layer, dropout stands before each."""
    return [1, 3, 5] if architecture == "prefix-mlp" else [0, 1, 2]


def last_matrix(architecture: str, k: int) -> str:
    return f"hydra_lm_head.{k}.1" if architecture == "prefix-mlp" else f"hydra_lm_head.{k}"


def published_hydra(architecture: str) -> dict[str, torch.Tensor]:
    """The state dict of a random head."""
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(DEPTH):
        first, *others = places(architecture)
        wide = (WIDTH, (k + 2) * WIDTH)
        shapes[f"hydra_mlp.{k}.{first}.linear.weight"] = wide
        shapes[f"hydra_mlp.{k}.{first}.res_connection.weight"] = wide
        shapes |= {f"hydra_mlp.{k}.{j}.linear.weight": (WIDTH, WIDTH) for j in others}
        shapes[f"{last_matrix(architecture, k)}.weight"] = (VOCABULARY, WIDTH)
    shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    if architecture == "prefix-mlp":
        layer = f"{PREFIX}.layers.0"
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qo"}
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (WIDTH // 2, WIDTH) for part in "kv"}
        shapes |= {f"{layer}.mlp.{part}_proj.weight": (24, WIDTH) for part in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, 24)
        norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
        shapes |= {f"{PREFIX}.{norm}.weight": (WIDTH,) for norm in norms}
        shapes[f"{PREFIX}.embed_tokens.weight"] = (VOCABULARY, WIDTH)
        shapes[f"{layer}.self_attn.rotary_emb.inv_freq"] = (4,)
    torch.manual_seed(3)
    return {name: 2 * torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}


EAGLE4: dict[str, Any] = {
    **LLAMA, "architectures": ["LlamaForCausalLMEagle4"], "sliding_window": 5, "fc_norm": True,
    "norm_output": True, "target_hidden_size": WIDTH, "num_aux_hidden_states": 3,
    "efficient_lm_head_rank": 4, "num_candidates": 6,
}  # fmt: skip


def candidate_head() -> dict[str, Tensor]:
    """A low-rank lm_head beside the whole one."""
    return {
        "efficient_lm_head.weight": torch.randn(VOCABULARY, 4),
        "efficient_lm_head_down_proj.weight": torch.randn(4, WIDTH),
    }


def published_eagle4(embeddings_VD: Tensor) -> dict[str, Tensor]:
    """The tensors of a random head, with a copy of its target's embeddings."""
    wide = (WIDTH, 3 * WIDTH)
    layer = "layers.0"
    shapes = {"fc.weight": wide, "norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    shapes |= {f"fc_norm.{number}.weight": (WIDTH,) for number in range(3)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes |= {f"{layer}.{norm}.weight": (WIDTH,) for norm in norms}
    shapes[f"{layer}.self_attn.q_proj.weight"] = (WIDTH, 2 * WIDTH)
    shapes |= {f"{layer}.self_attn.{part}_proj.weight": (WIDTH // 2, 2 * WIDTH) for part in "kv"}
    shapes[f"{layer}.self_attn.o_proj.weight"] = (WIDTH, WIDTH)
    shapes |= {f"{layer}.mlp.{part}_proj.weight": (48, WIDTH) for part in ("gate", "up")}
    shapes[f"{layer}.mlp.down_proj.weight"] = (WIDTH, 48)
    torch.manual_seed(4)
    tensors = {name: 2 * torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    for tensor in tensors.values():
        if tensor.ndim == 1:
            torch.nn.init.normal_(tensor, mean=1.0, std=0.3)
    return {**tensors, **candidate_head(), "embed_tokens.weight": embeddings_VD.clone()}
