"""EAGLE heads of ours, written for others: what each reader cannot be told, and what it wants to be
told otherwise.

Sources: eagle/model/cnets.py, cnets1.py and configs.py of SafeAILab/EAGLE; llama_eagle.py and
llama_eagle3.py of vLLM 0.33 and SGLang 0.5.23; specforge/modeling/draft/llama3_eagle.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from draftheads.heads.formats.speculators_layout import names_of_speculators, speculators_config
from draftheads.heads.formats.stored import Stored, Written
from draftheads.heads.target import Target

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
