"""EAGLE-1 and EAGLE-3 heads in the layouts of SafeAILab, SpecForge, ModelOpt, vLLM and SGLang,
which differ by prefixes and omissions, and of the speculators library.

Legend: v draft vocabulary, V vocabulary of the target, D width.
Sources: eagle/model/cnets1.py and cnets.py of SafeAILab/EAGLE; llama_eagle.py and llama_eagle3.py
of vLLM 0.33 and SGLang 0.5.23; src/speculators/models/eagle3 of vllm-project/speculators; vLLM
transformers_utils/configs/speculators; exporters/openvino/model_patcher.py of optimum-intel 2.2.0.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.eagle import SWITCHES, default_features
from draftheads.heads.formats.config import needed
from draftheads.heads.formats.stored import (
    Stored,
    check_values,
    integers,
    matrix,
    renamed,
    require,
    target_name,
)
from draftheads.heads.layers import t2d
from draftheads.heads.target import Target
from draftheads.heads.tree import tree_from_json

RENAMES = [
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r".*rotary_emb\.inv_freq$", ""),
    (r"^verifier_(norm|lm_head)\..*", ""),
]
LLAMA_LIKE = re.compile(r"(Eagle3?)?(Llama|Qwen2)ForCausalLM(Eagle3?)?|Eagle3Speculator")
"""Architectures of heads with Llama's layers."""
NO = (None, False)
DESIGN: dict[str, tuple[Any, ...]] = {
    "parallel_drafting": NO,
    "embed_requires_grad": NO,
    "kv_lora_rank": (None,),
    "mrope_section": (None,),
    "use_qk_norm": NO,
    "qkv_bias": NO,
    "attention_bias": NO,
    "hidden_act": (None, "silu", "swish"),
}
"""Keys of config.json and its RoPE, with the values that our heads implement."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
KEPT = ("draft_vocab_size", AUX_LAYERS, "draftheads", *SWITCHES)
"""Keys that speculators and we have at the top level."""
OUTSIDE = {*KEPT, "architectures", "eagle_config", "num_aux_hidden_states", "dtype"}
OUTSIDE |= {"target_hidden_size"}
"""Our keys that do not describe the layer."""


def from_eagle(stored: Stored, target: Target | None) -> Stored:
    """EAGLE-3 if layer 0 has a norm for features, else EAGLE-1."""
    config, tensors = stored.config, renamed(stored.tensors, RENAMES)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    check_values({**config, **rope}, DESIGN)
    for architecture in config.get("architectures") or []:
        if not LLAMA_LIKE.fullmatch(architecture):
            raise ValueError(f"expected an EAGLE head with Llama layers, got {architecture}")
    _drop_embeddings(tensors, target)
    tensors = {n: t for n, t in tensors.items() if not n.endswith(".bias") or t.any()}
    ours = config | _sizes(tensors, config)
    if "layers.0.hidden_norm.weight" in tensors:
        kind = "eagle3"
        ours |= _features(tensors, config, target)
        ours["vocab_size"] = _complete_vocabulary(tensors, config, target)
        if not any(name.startswith("layers.1.") for name in tensors):
            tensors = renamed(tensors, [(r"^layers\.0\.", "midlayer.")])
    else:
        kind = "eagle"
        ours["vocab_size"] = _vocab_size(config, target)
        tensors.setdefault("fc.bias", tensors["fc.weight"].new_zeros(ours["hidden_size"]))
    facts = {"target": {"name": target_name(config)}, **stored.facts, "kind": kind}
    return Stored({**ours, "draftheads": facts}, tensors)


def from_speculators(stored: Stored, target: Target | None) -> Stored:
    """Like any other EAGLE-3 head, once the nested config is flattened."""
    config = stored.config
    check_values(config, {"speculators_model_type": ("eagle3",)})
    if "norm_before_residual" not in config:
        raise ValueError(
            "expected norm_before_residual in config.json, got none, for which the speculators "
            "library assumes false and vLLM true; add the value that it was trained with"
        )
    (layer,) = needed(config, "transformer_layer_config")
    return from_eagle(Stored({**layer, **config}, stored.tensors), target)


def _drop_embeddings(tensors: dict[str, Tensor], target: Target | None) -> None:
    """A copy of the target's embeddings is redundant; a head with others is refused."""
    if "embed_tokens.weight" not in tensors:
        return
    theirs_VD = matrix(tensors, "embed_tokens.weight")
    del tensors["embed_tokens.weight"]
    if target is None:
        return
    if not is_copy(theirs_VD, target.model.get_input_embeddings().weight.detach().cpu()):
        raise ValueError(
            "expected the embeddings of the target, got other ones in embed_tokens.weight, which "
            "are not supported; pass the target this head was trained for"
        )


def is_copy(theirs_VD: Tensor, ours_VD: Tensor) -> bool:
    """Whether these are the same rows, rounded; one of them may be padded."""
    rows = min(len(theirs_VD), len(ours_VD))
    return theirs_VD.shape[1] == ours_VD.shape[1] and torch.allclose(
        theirs_VD[:rows].float(), ours_VD[:rows].float(), rtol=1e-2, atol=1e-3
    )


def _sizes(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a layer, read from the tensors, as configs can be wrong."""
    (heads,) = needed(config, "num_attention_heads")
    q, k = (len(matrix(tensors, f"layers.0.self_attn.{each}_proj.weight")) for each in "qk")
    head_dim = max(1, q // heads)
    kinds = config.get("layer_types") or ["full_attention"]  # sliding_window may be left over
    if len(set(kinds)) > 1:
        raise ValueError(f"expected layers that all have a window or all have none, got {kinds}")
    is_windowed = kinds[0] == "sliding_attention"
    return {
        "hidden_size": len(matrix(tensors, "fc.weight")),
        "head_dim": head_dim,
        "num_key_value_heads": k // head_dim,
        "intermediate_size": len(matrix(tensors, "layers.0.mlp.gate_proj.weight")),
        "sliding_window": needed(config, "sliding_window")[0] if is_windowed else None,
    }


def _features(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target | None
) -> dict[str, Any]:
    """The keys that only EAGLE-3 has. Nested layer ids count outputs of layers, as in SGLang and
    ModelOpt; all others, and ours, are indices into the hidden states.
    """
    nested = config.get("eagle_config") or {}
    layers = config.get(AUX_LAYERS) or [layer + 1 for layer in nested.get(AUX_LAYERS) or ()]
    layers = layers or nested.get("layer_ids")
    if not layers:
        known = require(target, "its number of layers determines which states this head reads")
        layers = list(default_features(known.layers))
    return {
        AUX_LAYERS: layers,
        **{name: bool(config.get(name, nested.get(name))) for name in SWITCHES},
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_before_fc": "input_norm.weight" in tensors,
    }


def _vocab_size(config: dict[str, Any], target: Target | None) -> int:
    size = config.get("vocab_size")
    return int(size or require(target, "config.json has no vocab_size").vocab_size)


def complete_maps(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target | None
) -> tuple[int, Tensor]:
    """Leave both maps of a draft vocabulary or none; returns V and the target ids (v,)."""
    offsets_v, known_V = integers(tensors, "d2t"), integers(tensors, "t2d")
    vocab_size = _vocab_size(config, target) if known_V is None else len(known_V)
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    ids_v = torch.arange(vocab_size)
    if offsets_v is not None and len(offsets_v) < vocab_size:
        ids_v = offsets_v + torch.arange(len(offsets_v))
        if not (ids_v.diff() > 0).all() or ids_v[0] < 0 or ids_v[-1] >= vocab_size:
            raise ValueError(
                "expected d2t to hold target id minus draft index, rising, got ids from "
                f"{int(ids_v.min())} to {int(ids_v.max())}; were absolute ids stored?"
            )
        tensors["d2t"] = offsets_v
        tensors["t2d"] = t2d(ids_v, vocab_size) if known_V is None else known_V
    elif (
        "lm_head.weight" in tensors
        and (rows := len(matrix(tensors, "lm_head.weight"))) < vocab_size
    ):
        raise ValueError(
            f"expected d2t, which maps the {rows} draft tokens to the target's, got none; the file "
            "is incomplete"
        )
    return vocab_size, ids_v


def _complete_vocabulary(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target | None
) -> int:
    """Complete the maps, add an lm_head that the file leaves to the target, and return V."""
    vocab_size, ids_v = complete_maps(tensors, config, target)
    if "lm_head.weight" not in tensors:
        weight_VD = require(target, "this head uses its lm_head").unembed_weight().detach()
        ids_v = ids_v[ids_v < len(weight_VD)]  # all, unless it is another target's
        tensors["lm_head.weight"] = weight_VD.to("cpu", tensors["fc.weight"].dtype)[ids_v]
    return vocab_size


def to_vllm(stored: Stored, target: Target | None) -> Stored:
    """EAGLE-1 without the zero bias that only others require, under the name that vLLM prefixes
    with "Eagle".
    """
    tensors = {name: each for name, each in stored.tensors.items() if name != "fc.bias"}
    return Stored({**stored.config, "architectures": ["LlamaForCausalLM"]}, tensors)


def to_openvino(stored: Stored, target: Target | None) -> Stored:
    """With d2t for a full vocabulary, too: the exporter leaves what is missing as memory was."""
    none_v = torch.zeros(len(stored.tensors["lm_head.weight"]), dtype=torch.int64)
    return Stored(stored.config, {"d2t": none_v, **stored.tensors})


def to_speculators(stored: Stored, target: Target | None) -> Stored:
    """Sizes move to a nested config. The target's embeddings are stored too: speculators
    initialises missing ones at random.
    """
    known = require(target, "speculators requires its embeddings in the file")
    ours = stored.config
    config = {
        "architectures": ["Eagle3Speculator"],
        **speculators_config(ours),
        **{key: ours[key] for key in KEPT},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": ours.get("dtype"),
    }
    tensors = renamed(stored.tensors, [(r"^midlayer\.", "layers.0.")])
    weight_VD = known.model.get_input_embeddings().weight.detach()
    tensors["embed_tokens.weight"] = weight_VD.to("cpu", tensors["fc.weight"].dtype)
    return Stored(config, tensors)


def speculators_config(
    config: dict[str, Any], kind: str = "eagle3", model_type: str = "llama", chain: int = 0
) -> dict[str, Any]:
    """The keys that the speculators library adds to a config of ours. model_type: of the layers;
    chain: its draft tokens, default: as many as the tree is deep.

    Raises ValueError where the target is not recorded.
    """
    name = target_name(config)
    if name is None:
        raise ValueError("exporting to speculators needs the target model; pass --target")
    target = config["draftheads"]["target"]
    layer = {key: value for key, value in config.items() if key not in OUTSIDE}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": chain or max(1, tree_from_json(config["draftheads"]["tree"]).depth),
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": {**layer, "model_type": model_type},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": name,
                "architectures": [target["architecture"]] if "architecture" in target else [],
            },
        },
    }
