"""EAGLE-1 and EAGLE-3 heads as SafeAILab, SpecForge, ModelOpt, vLLM and SGLang write them: one set
of names, which differ by prefixes and by what is left out.

Legend: D width, v draft vocabulary, V vocabulary of the target.
Sources: eagle/model/cnets1.py and cnets.py of SafeAILab/EAGLE; vLLM and SGLang llama_eagle3.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.eagle3 import SWITCHES, default_features
from draftheads.heads.formats.head_config import needed
from draftheads.heads.formats.stored import Stored, integers, matrix, target_name
from draftheads.heads.target import Target
from draftheads.heads.vocabulary import t2d

RENAMED = [
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
]
UNUSED = re.compile(r"rotary_emb\.inv_freq$|^verifier_(norm|lm_head)\.")
"""Made from the config, or the target's own, to train with."""
KEPT = (
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
"""Keys whose values no tensor tells."""


def is_eagle(stored: Stored) -> bool:
    """Whether it has a matrix that joins features, in front of decoder layers."""
    names = _plain_names(stored)
    return "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names


def from_eagle(stored: Stored, target: Target | None) -> Stored:
    """EAGLE-3 where layer 0 has a norm for features, else EAGLE-1. Sizes are those of the tensors;
    embeddings must be the target's, which the file may repeat.
    """
    tensors = _plain_names(stored)
    if "embed_tokens.weight" in tensors:
        _check_embeddings(stored, matrix(tensors, "embed_tokens.weight"), target)
        del tensors["embed_tokens.weight"]
    is_third = _is_third(tensors)
    tensors = _without_zero_biases(stored, tensors)
    width = len(matrix(tensors, "fc.weight"))
    config = _sizes(stored, tensors, width)
    if is_third:
        config |= _third(stored, tensors, target)
        tensors = _with_vocabulary(stored, tensors, config["vocab_size"], target)
    else:
        config["vocab_size"] = _vocab_size(stored, target)
        tensors.setdefault("fc.bias", tensors["fc.weight"].new_zeros(width))
    kind = "eagle3" if is_third else "eagle"
    facts = {"target": {"name": target_name(stored.config)}, **stored.facts, "kind": kind}
    return stored.having({**config, "draftheads": facts}, tensors)


def _is_third(tensors: dict[str, Tensor]) -> bool:
    return "layers.0.hidden_norm.weight" in tensors


def _plain_names(stored: Stored) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in stored.tensors.items():
        for pattern, ours in RENAMED:
            name = pattern.sub(ours, name)
        if not UNUSED.search(name):
            tensors[name] = tensor
    return tensors


def _without_zero_biases(stored: Stored, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our layers have no biases, and those that are zero add nothing; fc of EAGLE-1 may have
    one.
    """
    kept = set() if _is_third(tensors) else {"fc.bias"}
    biases = [name for name in tensors if name.endswith(".bias") and name not in kept]
    for name in biases:
        if tensors[name].any():
            raise stored.refuse(
                f"expected no biases but fc.bias of EAGLE-1, got {name} that is not zero; such "
                "heads are not read, train one here instead"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in biases}


def _check_embeddings(stored: Stored, theirs_VD: Tensor, target: Target | None) -> None:
    """A copy of the target's embeddings is not needed, other embeddings would be lost."""
    changed = bool(stored.config.get("embed_requires_grad"))
    if target is not None and not changed:
        ours_VD = target.model.get_input_embeddings().weight.detach()
        rows = min(len(theirs_VD), len(ours_VD))  # one of them may be padded
        changed = theirs_VD.shape[1:] != ours_VD.shape[1:] or not torch.allclose(
            theirs_VD[:rows].float(), ours_VD[:rows].cpu().float(), rtol=1e-2, atol=1e-3
        )
    if changed:
        raise stored.refuse(
            "expected embeddings that are the target's, got embed_tokens.weight of its own; such "
            "heads are not read, or is this another target's head?"
        )


def _sizes(stored: Stored, tensors: dict[str, Tensor], width: int) -> dict[str, Any]:
    """What `LayerShape.read` and `read_rope` want."""
    config = stored.config
    (heads,) = needed(config, "num_attention_heads")
    if config.get("target_hidden_size") not in (None, width):
        raise stored.refuse(
            f"expected a head as wide as its target, got {width} and target_hidden_size "
            f"{config['target_hidden_size']}; such heads are not read"
        )
    q, k = (len(matrix(tensors, f"layers.0.self_attn.{each}_proj.weight")) for each in "qk")
    head_dim = q // heads
    if not head_dim or q % heads or k % head_dim:
        raise stored.refuse(
            f"expected queries and keys of {heads} heads (num_attention_heads), got {q} and {k} "
            "rows, which these do not divide"
        )
    return {
        **{key: config[key] for key in KEPT if config.get(key) is not None},
        "hidden_size": width,
        "head_dim": head_dim,
        "num_key_value_heads": k // head_dim,
        "intermediate_size": len(matrix(tensors, "layers.0.mlp.gate_proj.weight")),
        "sliding_window": _window(stored),
    }


def _window(stored: Stored) -> int | None:
    """Of all layers or none; the key alone is often left over from the target."""
    kinds = set(stored.config.get("layer_types") or ())
    if kinds <= {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise stored.refuse(
            f"expected layers that all have a window or all have none, got {sorted(kinds)}"
        )
    (window,) = needed(stored.config, "sliding_window")
    return int(window)


def _vocab_size(stored: Stored, target: Target | None) -> int:
    size = stored.config.get("vocab_size") or (target.vocab_size if target else None)
    if size is None:
        raise stored.refuse("expected vocab_size in config.json, got none; pass the target")
    return int(size)


def _third(stored: Stored, tensors: dict[str, Tensor], target: Target | None) -> dict[str, Any]:
    """What is EAGLE-3's alone."""
    config = stored.config
    nested = config.get("eagle_config") or {}
    switches = {
        **{name: bool(config.get(name, nested.get(name))) for name in SWITCHES},
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_before_fc": "input_norm.weight" in tensors,
    }
    count = tensors["fc.weight"].shape[1] // len(tensors["fc.weight"])
    layers = _feature_layers(stored, target)
    if len(layers) != count:
        raise stored.refuse(
            f"expected fc.weight to join {len(layers)} states of the target ({layers}), got {count}"
        )
    known_V = integers(tensors, "t2d")
    return {
        "vocab_size": _vocab_size(stored, target) if known_V is None else len(known_V),
        "eagle_aux_hidden_state_layer_ids": layers,
        **switches,
    }


def _feature_layers(stored: Stored, target: Target | None) -> list[int]:
    """As indices into the hidden states: those of the top level; the nested ones count outputs of
    layers, as SGLang and ModelOpt do; without either, the field's default.
    """
    config, nested = stored.config, stored.config.get("eagle_config") or {}
    if layers := config.get("eagle_aux_hidden_state_layer_ids"):
        return list(layers)
    if layers := nested.get("eagle_aux_hidden_state_layer_ids"):
        return [layer + 1 for layer in layers]
    if layers := config.get("layer_ids") or nested.get("layer_ids"):
        return list(layers)
    if target is None:
        raise stored.refuse(
            "expected the target, whose number of layers tells which states this head reads, got "
            f"none; load {target_name(config) or 'it'} and pass it: load_head(..., target=target) "
            "or --target"
        )
    return list(default_features(target.layers))


def _with_vocabulary(
    stored: Stored, tensors: dict[str, Tensor], vocab_size: int, target: Target | None
) -> dict[str, Tensor]:
    """Names of ours, with both maps of a draft vocabulary, and the last matrix that a file may
    leave to the target.
    """
    offsets_v, known_V = integers(tensors, "d2t"), integers(tensors, "t2d")
    tensors = {name: each for name, each in tensors.items() if name not in ("d2t", "t2d")}
    rows = len(matrix(tensors, "lm_head.weight")) if "lm_head.weight" in tensors else vocab_size
    if offsets_v is not None and len(offsets_v) < vocab_size:
        ids_v = offsets_v + torch.arange(len(offsets_v))
        is_rising = bool((ids_v.diff() > 0).all())
        if not is_rising or not 0 <= int(ids_v[0]) <= int(ids_v[-1]) < vocab_size:
            raise stored.refuse(
                "expected d2t to hold target id minus draft index, rising, got ids from "
                f"{int(ids_v.min())} to {int(ids_v.max())}; were absolute ids stored?"
            )
        tensors["d2t"] = offsets_v
        tensors["t2d"] = t2d(ids_v, vocab_size) if known_V is None else known_V
    elif rows < vocab_size:
        raise stored.refuse(
            f"expected d2t, which says what the {rows} draft tokens are, got none; the file is not "
            "whole"
        )
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = _rows_of(stored, tensors, target)
    if not any(name.startswith("layers.1.") for name in tensors):
        first = re.compile(r"^layers\.0\.")
        tensors = {first.sub("midlayer.", name): tensor for name, tensor in tensors.items()}
    return tensors


def _rows_of(stored: Stored, tensors: dict[str, Tensor], target: Target | None) -> Tensor:
    if target is None:
        raise stored.refuse(
            "expected the target, whose last matrix this head uses, got none; pass it: "
            "load_head(..., target=target) or --target"
        )
    weight_VD = target.unembed_weight().detach().to("cpu", tensors["fc.weight"].dtype)
    if "d2t" not in tensors:
        return weight_VD
    ids_v = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    return weight_VD[ids_v[ids_v < len(weight_VD)]]  # all, unless it is another target's
