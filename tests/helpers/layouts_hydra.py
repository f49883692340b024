"""Hydra heads as their authors publish them."""

from __future__ import annotations

import torch
from plain_drafting import DEPTH
from tiny_targets import VOCABULARY

WIDTH, LAYERS = 32, 3
CONFIG = {
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


def published(architecture: str) -> dict[str, torch.Tensor]:
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
