"""Medusa and Hydra heads in the layouts of vLLM, FasterDecoding, TensorRT-LLM, ModelOpt and
zankner/Hydra.

Legend: D width, V vocabulary; k counts heads, j the blocks of a head. There are two layouts of
Medusa, each with or without lm_heads of its own:

    blocks.{k}.layers.{j}.weight | .bias    lm_heads.{k}.weight    vLLM; ours
    {k}.{j}.linear.weight | .bias           {k}.{blocks}.weight    the others

Sources: FasterDecoding/Medusa medusa/model; vLLM model_executor/models/medusa.py; Hydra (arXiv
2402.05109) hydra/model/hydra_heads.
"""

from __future__ import annotations

from torch import Tensor

from draftheads.heads.choices import LayerSizes
from draftheads.heads.formats.stored import (
    Stored,
    check_values,
    renamed,
    target_name,
)
from draftheads.heads.layers import LayerShape
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import matrix, require

VLLM = [(r"^medusa_heads?\.", "")]
NUMBERED = [
    *VLLM,
    (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
    (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
]
HYDRA = [
    (r"^hydra_lm_head\.(\d+)(\.1)?\.weight$", r"lm_heads.\1.weight"),
    (r"^hydra_lm_head\.(\d+)(\.1)?\.bias$", r"biases.\1"),
    (r"^hydra_mlp\.(\d+)\.\d+\.res_connection\.", r"blocks.\1.residual."),
    (r"^prefix_embeding_layer\.embed_tokens\.weight$", ""),  # unused; the layer reads states
    (r".*rotary_emb\.inv_freq$", ""),
    (r"^prefix_embeding_layer\.layers\.0\.", "prefix.layer."),
    (r"^prefix_embeding_layer\.norm\.", "prefix.norm."),
]
HYDRA_DESIGN = {
    "hydra_head_arch": (None, "mlp", "prefix-mlp"),
    "grounded_heads": (None, True),
    "hidden_state_offset": (None, 0),
}


def from_vllm(stored: Stored, target: Target | None) -> Stored:
    """With `original_lm_head`, the lm_head is the target's."""
    config = stored.config
    tensors = renamed(stored.tensors, VLLM)
    whole = (None, config.get("vocab_size"))
    check_values(config, {"logit_scale": (None, 1.0), "truncated_vocab_size": whole})
    tensors.pop("token_map", None)  # vLLM ignores it without truncated_vocab_size
    if tensors.pop("lm_head.weight", None) is None and config.get("original_lm_head"):
        tensors.pop("lm_heads.0.weight", None)
    return _ours(stored, tensors, target)


def from_numbered(stored: Stored, target: Target | None) -> Stored:
    """Only names differ."""
    return _ours(stored, renamed(stored.tensors, NUMBERED), target)


def _ours(stored: Stored, tensors: dict[str, Tensor], target: Target | None) -> Stored:
    own = next((name for name in tensors if name.startswith("lm_heads.")), None)
    vocab_size = stored.config.get("vocab_size")
    if own:
        vocab_size = len(matrix(tensors, own))
    elif not vocab_size:
        vocab_size = require(target, "config.json has no vocab_size").vocab_size
    if not any(name.endswith(".bias") for name in tensors):
        for name in [name for name in tensors if name.startswith("blocks.")]:
            weight_DD = matrix(tensors, name)
            tensors[name.replace("weight", "bias")] = weight_DD.new_zeros(len(weight_DD))
    facts = {"target": {"name": target_name(stored.config)}, **stored.facts.json, "kind": "medusa"}
    return Stored({"vocab_size": vocab_size, "draftheads": facts}, tensors)


def from_hydra(stored: Stored, target: Target | None) -> Stored:
    """A prefix layer has the target's sizes. In heads with a prefix layer, a dropout module without
    tensors precedes every other module.
    """
    check_values(stored.config, HYDRA_DESIGN)
    has_prefix = any(name.startswith("prefix_embeding_layer") for name in stored.tensors)
    stride = 2 if has_prefix else 1
    pattern = r"^hydra_mlp\.(\d+)\.(\d+)\.linear\."
    block = (pattern, lambda m: f"blocks.{m[1]}.layers.{int(m[2]) // stride}.")
    tensors = renamed(stored.tensors, [*HYDRA, block])
    name = stored.config.get("base_model_name_or_path")
    layer = None
    if has_prefix:
        known = require(target, f"the prefix layer has the sizes of {name}")
        rope = getattr(known.config, "rope_parameters", None) or {}
        layer = LayerShape.of(known, LayerSizes()).config()
        layer["rope_parameters"] = rope.get("full_attention", rope)
    facts = {"kind": "sequential", "target": {"name": name or "its target"}}
    return Stored({"norm_embeddings": False, "prefix_layer": layer, "draftheads": facts}, tensors)


def to_vllm(stored: Stored, target: Target | None) -> Stored:
    """Our own layout, plus the target's lm_head where the heads share it."""
    tensors = dict(stored.tensors)
    if "lm_heads.0.weight" not in tensors:
        known = require(target, "vLLM requires its lm_head with heads that share it")
        dtype = tensors["blocks.0.layers.0.weight"].dtype
        tensors["lm_head.weight"] = known.unembed_weight().detach().to("cpu", dtype)
    return Stored(stored.config, tensors)
