"""EAGLE-1 and EAGLE-3 heads as SafeAILab, SpecForge, ModelOpt, vLLM and SGLang write them: one set
of names, which differ by prefixes and by what is left out.

Legend: D width, v draft vocabulary, V vocabulary of the target.
Sources: eagle/model/cnets1.py and cnets.py of SafeAILab/EAGLE; vLLM and SGLang llama_eagle3.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.eagle import SWITCHES, default_features
from draftheads.heads.formats.config import needed
from draftheads.heads.formats.stored import (
    Stored,
    Written,
    check_design,
    integers,
    matrix,
    target_name,
)
from draftheads.heads.target import Target
from draftheads.heads.tree import tree_from_json
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


# EAGLE-3 heads of the speculators library, which vLLM also reads: a Llama config nested in one
# that names the target.
#
# Source: src/speculators/models/eagle3 of vllm-project/speculators; vLLM
# transformers_utils/configs/speculators.


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


def is_speculators(stored: Stored) -> bool:
    """Whether its config says so."""
    return "speculators_model_type" in stored.config


def from_speculators(stored: Stored, target: Target | None) -> Stored:
    """As any other EAGLE-3 head, once the nested config is spread out.

    Raises ValueError for other kinds, and where `norm_before_residual` is not said: the library and
    vLLM take opposite things for granted.
    """
    config, kind = stored.config, stored.config["speculators_model_type"]
    if kind != "eagle3":
        raise stored.refuse(f"expected speculators_model_type eagle3, got {kind}; it is not read")
    if "norm_before_residual" not in config:
        raise stored.refuse(
            "expected norm_before_residual in config.json, got none: the speculators library takes "
            "it for false, vLLM for true; write the one it was trained with"
        )
    (layer,) = needed(config, "transformer_layer_config")
    spread = stored.having({**layer, **config}, stored.tensors)
    check_design(spread)
    return from_eagle(spread, target)


def names_of_speculators(name: str) -> str:
    """Of a tensor of ours."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def speculators_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that make a config of ours one of speculators'; `transformer_layer_config` stands
    for what a Llama config says. speculative_tokens: as deep as the head's tree.

    Raises ValueError where the target is not known.
    """
    name = target_name(config)
    if name is None:
        raise ValueError("speculators must be told the target, nothing names it; pass --target")
    target = config["draftheads"]["target"]
    architectures = [target["architecture"]] if "architecture" in target else []
    tree = tree_from_json(config["draftheads"]["tree"])
    layer = {key: value for key, value in config.items() if key not in OUTSIDE}
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {**layer, "model_type": "llama"},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tree.depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": name, "architectures": architectures},
        },
    }


# EAGLE heads of ours, written for others: what each reader cannot be told, and what it wants to be
# told otherwise.
#
# Sources: eagle/model/cnets.py, cnets1.py and configs.py of SafeAILab/EAGLE; llama_eagle.py and
# llama_eagle3.py of vLLM 0.33 and SGLang 0.5.23; specforge/modeling/draft/llama3_eagle.py.


WINDOW, SCALING, HEAD_DIM = "a sliding window", "RoPE scaling", "a head_dim of its own"
BIAS, SEVERAL = "a bias of fc that is not zero", "several layers"
RESIDUAL, BEFORE_FC, NORMS = "norm_before_residual", "norm_before_fc", "fc_norm or norm_output"
TWO_NORMS = "both fc_norm and norm_before_fc"
ONE, NOT_THREE, OTHERS = "one feature", "features that are not three", "features of its own choice"
EMBEDDING, LAST = "embeddings as a feature", "the last state as a feature"

CANNOT: dict[tuple[str, str], dict[str, str]] = {
    ("vllm", "eagle"): {
        BIAS: "vLLM drops fc.bias",
        WINDOW: "vLLM has none for EAGLE-1",
    },
    ("sglang", "eagle"): {WINDOW: "SGLang has none from a checkpoint"},
    ("eagle", "eagle"): {
        WINDOW: "EAGLE's code has none",
        SCALING: "EAGLE's code has no base beside a scaling",
        HEAD_DIM: "EAGLE's code divides the width by the heads",
    },
    ("vllm", "eagle3"): {LAST: "vLLM takes it before the final norm"},
    ("sglang", "eagle3"): {
        RESIDUAL: "SGLang adds to the state before the norm",
        SEVERAL: "SGLang reads their norms under other names than vLLM",
        WINDOW: "SGLang has none from a checkpoint",
        ONE: "SGLang leaves out fc where a feature is as wide as an embedding",
        EMBEDDING: "SGLang takes states after layers",
        LAST: "SGLang takes it before the final norm",
    },
    ("specforge", "eagle3"): {
        RESIDUAL: "SpecForge adds to the state before the norm",
        BEFORE_FC: "SpecForge has no input_norm",
        SEVERAL: "SpecForge has one layer",
        WINDOW: "SpecForge has none",
        NOT_THREE: "SpecForge joins three",
        EMBEDDING: "SpecForge takes states after layers",
        LAST: "SpecForge takes it before the final norm",
    },
    ("eagle", "eagle3"): {
        RESIDUAL: "EAGLE's code adds to the state before the norm",
        BEFORE_FC: "EAGLE's code has no input_norm",
        NORMS: "EAGLE's code has neither",
        SEVERAL: "EAGLE's code has one layer",
        WINDOW: "EAGLE's code has none",
        SCALING: "EAGLE's code has no base beside a scaling",
        HEAD_DIM: "EAGLE's code divides the width by the heads",
        NOT_THREE: "EAGLE's code joins three",
        OTHERS: "EAGLE's code takes [2, n // 2, n - 3] of n layers",
        LAST: "EAGLE's code takes it before the final norm",
    },
    ("speculators", "eagle3"): {
        TWO_NORMS: "speculators has one or the other",
        LAST: "speculators takes it before the final norm",
    },
}
"""(reader, kind) -> what a head may have that the reader cannot be told, and why."""


def check(to: str, stored: Stored) -> None:
    """Raise ValueError for what would be lost."""
    kind = stored.facts["kind"]
    if OTHERS in _traits(stored) and stored.facts["target"].get("layers") is None:
        raise stored.refuse(
            "expected a head that says how many layers its target has, so that features can be "
            "told from its last state, got none; pass --target"
        )
    if reason := loss(to, stored):
        raise stored.refuse(
            f"expected an {kind} head that {to} can be told, got one with {reason}; nothing was "
            "written, train one without it or choose another destination"
        )


def loss(to: str, stored: Stored) -> str | None:
    """What a reader cannot be told of a head, and why; None where it can be told all."""
    traits = set(_traits(stored))
    reasons = CANNOT[to, stored.facts["kind"]].items()
    return next((f"{trait}: {why}" for trait, why in reasons if trait in traits), None)


def _traits(stored: Stored) -> Iterator[str]:
    config, tensors = stored.config, stored.tensors
    traits = {
        WINDOW: bool(config["sliding_window"]),
        SCALING: bool(config["rope_scaling"]),
        HEAD_DIM: config["head_dim"] * config["num_attention_heads"] != config["hidden_size"],
        BIAS: "fc.bias" in tensors and bool(tensors["fc.bias"].any()),
        SEVERAL: config["num_hidden_layers"] > 1,
    }
    if stored.facts["kind"] == "eagle3":
        layers = config["eagle_aux_hidden_state_layer_ids"]
        depth = stored.facts.get("target", {}).get("layers")
        high = layers[-1]
        traits |= {
            RESIDUAL: config["norm_before_residual"],
            BEFORE_FC: config["norm_before_fc"],
            NORMS: config["fc_norm"] or config["norm_output"],
            TWO_NORMS: config["fc_norm"] and config["norm_before_fc"],
            ONE: len(layers) == 1,
            NOT_THREE: len(layers) != 3,
            OTHERS: layers != [2, (high + 3) // 2, high],
            EMBEDDING: 0 in layers,
            LAST: high == depth,
        }
    yield from (trait for trait, has in traits.items() if has)


def to_vllm(stored: Stored, target: Target | None) -> Written:
    """Our own words; of EAGLE-1 without the zero bias that only others want, and under the name
    that vLLM puts its own word before.
    """
    check("vllm", stored)
    if stored.facts["kind"] == "eagle3":
        return _folder(stored.config, stored)
    tensors = {name: each for name, each in stored.tensors.items() if name != "fc.bias"}
    config = {**stored.config, "architectures": ["LlamaForCausalLM"]}
    return _folder(config, stored.having(config, tensors))


def to_sglang(stored: Stored, target: Target | None) -> Written:
    """Our own words."""
    check("sglang", stored)
    return _folder(stored.config, stored)


def to_eagle(stored: Stored, target: Target | None) -> Written:
    """Without `target_hidden_size`: where it stands, EAGLE's code does not load the target's
    embeddings.
    """
    check("eagle", stored)
    theirs = {key: value for key, value in stored.config.items() if key != "target_hidden_size"}
    return _folder({**theirs, "architectures": ["LlamaForCausalLM"]}, stored)


def to_specforge(stored: Stored, target: Target | None) -> Written:
    """With maps of the vocabulary also where they change nothing: its exporter wants them."""
    check("specforge", stored)
    tensors, config = dict(stored.tensors), stored.config
    tensors.setdefault("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
    tensors.setdefault("t2d", torch.ones(config["vocab_size"], dtype=torch.bool))
    return _folder(config, stored.having(config, tensors))


def to_speculators(stored: Stored, target: Target | None) -> Written:
    """Sizes go into a nested config, the one layer is layer 0 of several, and the target's
    embeddings stand in the file: speculators draws those that it does not find.
    """
    check("speculators", stored)
    if target is None:
        raise stored.refuse(
            "expected the target, whose embeddings speculators wants beside a head, got none; pass "
            "--target"
        )
    ours = stored.config
    outside = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "draftheads")
    switches = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    config = {
        "architectures": ["Eagle3Speculator"],
        **speculators_config(ours),
        **{key: ours[key] for key in (*outside, *switches)},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": ours.get("dtype"),
    }
    tensors = {names_of_speculators(name): each for name, each in stored.tensors.items()}
    weight_VD = target.model.get_input_embeddings().weight.detach()
    tensors["embed_tokens.weight"] = weight_VD.to("cpu", tensors["fc.weight"].dtype)
    return _folder(config, stored.having(config, tensors))


def _folder(config: dict[str, Any], stored: Stored) -> Written:
    return Written(config, {"model.safetensors": stored.tensors})
