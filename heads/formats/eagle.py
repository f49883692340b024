"""EAGLE-1 and EAGLE-3 heads in the layouts of SafeAILab, SpecForge, ModelOpt, vLLM and SGLang,
which differ by prefixes and by what is left out, and of the speculators library.

Legend: D width, v draft vocabulary, V vocabulary of the target.
Sources: eagle/model/cnets1.py and cnets.py of SafeAILab/EAGLE; llama_eagle.py and llama_eagle3.py
of vLLM 0.33 and SGLang 0.5.23; src/speculators/models/eagle3 of vllm-project/speculators; vLLM
transformers_utils/configs/speculators.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.eagle import SWITCHES, default_features
from draftheads.heads.formats.config import needed
from draftheads.heads.formats.reading import check_values, renamed, require, vocabulary_of
from draftheads.heads.formats.stored import Stored, integers, matrix, target_name
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
"""Architectures of heads whose layers are Llama's."""
NO = (None, False)
DESIGN: dict[str, tuple[Any, ...]] = {
    "parallel_drafting": NO,
    "kv_lora_rank": (None,),
    "mrope_section": (None,),
    "use_qk_norm": NO,
    "qkv_bias": NO,
    "attention_bias": NO,
    "hidden_act": (None, "silu", "swish"),
}
"""Keys of config.json and its RoPE, with the values that our heads have."""
OUTSIDE = {
    "architectures",
    "draft_vocab_size",
    "eagle_config",
    "num_aux_hidden_states",
    "dtype",
    "draftheads",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    *SWITCHES,
}
"""Keys of ours that say nothing of the layer."""


def from_eagle(stored: Stored, target: Target | None) -> Stored:
    """EAGLE-3 where layer 0 has a norm for features, else EAGLE-1."""
    config, tensors = stored.config, renamed(stored.tensors, RENAMES)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    check_values({**config, **rope}, DESIGN)
    for architecture in config.get("architectures") or []:
        if not LLAMA_LIKE.fullmatch(architecture):
            raise ValueError(f"expected an EAGLE head with Llama layers, got {architecture}")
    is_third = "layers.0.hidden_norm.weight" in tensors
    _drop_embeddings(tensors, config, target)
    tensors = {n: t for n, t in tensors.items() if not n.endswith(".bias") or t.any()}
    ours = _layer(tensors, config)
    if is_third:
        ours |= _features(tensors, config, target)
        _complete_vocabulary(tensors, ours["vocab_size"], target)
        if not any(name.startswith("layers.1.") for name in tensors):
            tensors = renamed(tensors, [(r"^layers\.0\.", "midlayer.")])
    else:
        ours["vocab_size"] = vocabulary_of(config, target)
        tensors.setdefault("fc.bias", tensors["fc.weight"].new_zeros(ours["hidden_size"]))
    kind = "eagle3" if is_third else "eagle"
    facts = {"target": {"name": target_name(config)}, **stored.facts, "kind": kind}
    return Stored({**ours, "draftheads": facts}, tensors)


def from_speculators(stored: Stored, target: Target | None) -> Stored:
    """As any other EAGLE-3 head, once the nested config is spread out."""
    config = stored.config
    check_values(config, {"speculators_model_type": ("eagle3",)})
    if "norm_before_residual" not in config:
        raise ValueError(
            "expected norm_before_residual in config.json, got none: the speculators library takes "
            "it for false, vLLM for true; write the one it was trained with"
        )
    (layer,) = needed(config, "transformer_layer_config")
    return from_eagle(Stored({**layer, **config}, stored.tensors), target)


def _drop_embeddings(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target | None
) -> None:
    """A copy of the target's embeddings is not needed; other embeddings would be lost."""
    if "embed_tokens.weight" not in tensors:
        return
    theirs_VD = matrix(tensors, "embed_tokens.weight")
    del tensors["embed_tokens.weight"]
    own = bool(config.get("embed_requires_grad"))
    if target is not None and not own:
        ours_VD = target.model.get_input_embeddings().weight.detach().cpu()
        rows = min(len(theirs_VD), len(ours_VD))  # one of them may be padded
        own = theirs_VD.shape[1] != ours_VD.shape[1] or not torch.allclose(
            theirs_VD[:rows].float(), ours_VD[:rows].float(), rtol=1e-2, atol=1e-3
        )
    if own:
        raise ValueError(
            "expected the embeddings of the target, got embed_tokens.weight of its own; such heads "
            "are not read, or is this another target's head?"
        )


def _layer(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Any]:
    """The config with a layer of the sizes that the tensors have."""
    (heads,) = needed(config, "num_attention_heads")
    q, k = (len(matrix(tensors, f"layers.0.self_attn.{each}_proj.weight")) for each in "qk")
    head_dim = max(1, q // heads)
    kinds = config.get("layer_types") or ["full_attention"]  # sliding_window may be left over
    if len(set(kinds)) > 1:
        raise ValueError(f"expected layers that all have a window or all have none, got {kinds}")
    is_windowed = kinds[0] == "sliding_attention"
    return {
        **config,
        "hidden_size": len(matrix(tensors, "fc.weight")),
        "head_dim": head_dim,
        "num_key_value_heads": k // head_dim,
        "intermediate_size": len(matrix(tensors, "layers.0.mlp.gate_proj.weight")),
        "sliding_window": needed(config, "sliding_window")[0] if is_windowed else None,
    }


def _features(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target | None
) -> dict[str, Any]:
    """The config.json keys that only EAGLE-3 has. Nested layer ids count outputs of layers, as
    SGLang and ModelOpt do; all others, and ours, are indices into the hidden states.
    """
    nested = config.get("eagle_config") or {}
    nested_ids = nested.get("eagle_aux_hidden_state_layer_ids") or ()
    layers = (
        config.get("eagle_aux_hidden_state_layer_ids")
        or [layer + 1 for layer in nested_ids]
        or config.get("layer_ids")
        or nested.get("layer_ids")
    )
    if not layers:
        known = require(target, "whose number of layers tells which states this head reads")
        layers = list(default_features(known.layers))
    known_V = integers(tensors, "t2d")
    return {
        "vocab_size": vocabulary_of(config, target) if known_V is None else len(known_V),
        "eagle_aux_hidden_state_layer_ids": layers,
        **{name: bool(config.get(name, nested.get(name))) for name in SWITCHES},
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_before_fc": "input_norm.weight" in tensors,
    }


def _complete_vocabulary(
    tensors: dict[str, Tensor], vocab_size: int, target: Target | None
) -> None:
    """Both maps of a draft vocabulary or none, and the last matrix that a file may leave to the
    target.
    """
    offsets_v, known_V = integers(tensors, "d2t"), integers(tensors, "t2d")
    tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    rows = len(matrix(tensors, "lm_head.weight")) if "lm_head.weight" in tensors else vocab_size
    ids_v = torch.arange(vocab_size if offsets_v is None else len(offsets_v))
    if offsets_v is not None and len(offsets_v) < vocab_size:
        ids_v = ids_v + offsets_v
        if not (ids_v.diff() > 0).all() or not 0 <= int(ids_v[0]) <= int(ids_v[-1]) < vocab_size:
            raise ValueError(
                "expected d2t to hold target id minus draft index, rising, got ids from "
                f"{int(ids_v.min())} to {int(ids_v.max())}; were absolute ids stored?"
            )
        tensors["d2t"] = offsets_v
        tensors["t2d"] = t2d(ids_v, vocab_size) if known_V is None else known_V
    elif rows < vocab_size:
        raise ValueError(
            f"expected d2t, which says what the {rows} draft tokens are, got none; the file is not "
            "whole"
        )
    if "lm_head.weight" not in tensors:
        weight_VD = require(target, "whose last matrix this head uses").unembed_weight().detach()
        ids_v = ids_v[ids_v < len(weight_VD)]  # all, unless it is another target's
        tensors["lm_head.weight"] = weight_VD.to("cpu", tensors["fc.weight"].dtype)[ids_v]


def to_vllm(stored: Stored, target: Target | None) -> Stored:
    """EAGLE-1 without the zero bias that only others want; vLLM puts "Eagle" before its name."""
    tensors = {name: each for name, each in stored.tensors.items() if name != "fc.bias"}
    return Stored({**stored.config, "architectures": ["LlamaForCausalLM"]}, tensors)


def to_speculators(stored: Stored, target: Target | None) -> Stored:
    """Sizes go into a nested config, and the target's embeddings into the file: speculators draws
    those that it does not find.
    """
    known = require(target, "whose embeddings speculators wants with a head")
    ours = stored.config
    outside = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "draftheads", *SWITCHES)
    config = {
        "architectures": ["Eagle3Speculator"],
        **speculators_config(ours),
        **{key: ours[key] for key in outside},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": ours.get("dtype"),
    }
    tensors = renamed(stored.tensors, [(r"^midlayer\.", "layers.0.")])
    weight_VD = known.model.get_input_embeddings().weight.detach()
    tensors["embed_tokens.weight"] = weight_VD.to("cpu", tensors["fc.weight"].dtype)
    return Stored(config, tensors)


def speculators_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that make a config of ours one of speculators'.

    Raises ValueError where the target is not known.
    """
    name = target_name(config)
    if name is None:
        raise ValueError("exporting to speculators needs the target model; pass --target")
    target = config["draftheads"]["target"]
    layer = {key: value for key, value in config.items() if key not in OUTSIDE}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tree_from_json(config["draftheads"]["tree"]).depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {**layer, "model_type": "llama"},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": name,
                "architectures": [target["architecture"]] if "architecture" in target else [],
            },
        },
    }
