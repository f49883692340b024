"""All layouts of head folders that this project reads and writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from draftheads.heads.formats import block, eagle, medusa
from draftheads.heads.formats.stored import Stored
from draftheads.heads.target.model import Target

Translates = Callable[[Stored, Target | None], Stored]


def as_is(stored: Stored, target: Target | None) -> Stored:
    """SGLang, and vLLM for EAGLE-3, read our layout."""
    return stored


def as_ours(stored: Stored) -> Stored:
    """Our layout; for EAGLE-3 with the keys by which `vllm serve FOLDER` finds the target."""
    config = stored.config
    if stored.facts.kind == "eagle3" and stored.facts.target.name:
        config = {**config, **eagle.speculators_config(config)}
    return Stored(config, stored.tensors)


FOREIGN = {
    r"P_?Eagle": "P-EAGLE, which drafts all tokens in one pass from learned states",
    r"LiLiCorr": "LiLiCorr, whose logits a correction of its own changes",
    r"Gemma4": "Gemma 4's layers, which our heads do not have",
}
"""Names of heads like EAGLE-3 and block heads -> what they are, and what we lack."""

READERS: list[tuple[str, str, Translates]] = [
    ("Hydra", r"^hydra_", medusa.from_hydra),
    ("EAGLE-4", "^LlamaForCausalLMEagle4$", eagle.from_eagle4),
    (
        "EAGLE-3",
        r"^(model\.)?(midlayer|layers\.0)\.hidden_norm\.weight$",
        eagle.from_eagle,
    ),
    (
        "DSpark, DFlash (1 and 2) and Domino",
        r"^(dflash_config|target_layer_ids|(model\.)?hidden_norm\.weight)$",
        block.from_block,
    ),
    ("speculators", r"^speculators_model_type$", eagle.from_eagle),
    ("vLLM Medusa", r"^(medusa_heads?\.)?blocks\.0\.layers\.0\.weight$", medusa.from_vllm),
    (
        "Medusa (FasterDecoding, TGI, TensorRT-LLM)",
        r"^(medusa_heads?\.)?\d+\.\d+\.linear\.weight$",
        medusa.from_numbered,
    ),
    ("EAGLE-1", r"^(model\.)?fc\.weight$", eagle.from_eagle),
]
"""Layouts in addition to our own: name, a config key, tensor name or architecture unique to it, its
reader.
"""

WRITERS: dict[str, dict[str, Translates]] = {
    "vllm": {
        "medusa": medusa.to_vllm,
        "eagle": eagle.to_vllm,
        "eagle3": as_is,
        "block": block.to_engine,
    },
    "sglang": {"eagle": as_is, "eagle3": as_is, "block": block.to_engine},
    "gguf": {"eagle3": as_is, "block": as_is},  # and then `llamacpp.write_gguf`
    "openvino": {"eagle3": eagle.to_openvino, "block": as_is},
    "mlx": {"eagle3": eagle.to_speculators, "block": block.to_mlx},
    "lmdeploy": {"eagle3": eagle.to_lmdeploy},
    "speculators": {"eagle3": eagle.to_speculators, "block": block.to_speculators},
}
"""Other programs -> kind of head -> its writer."""


RISING = "features in another order than the target's layers"
"""Engines gather features on their way through the layers, whatever config.json says."""

USUAL = "other features than [2, n // 2, n - 3]"

UNFOUND = "a target whose states the engine does not find"
UNFOUND_BY_ALL = {
    "GPT2LMHeadModel",  # layers without a gated product
    "GPTNeoXForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",  # a norm after the product
    "Glm4ForCausalLM",
    "MixtralForCausalLM",  # experts
}
UNFOUND_TARGETS = {
    "eagle3": {*UNFOUND_BY_ALL, "Qwen3MoeForCausalLM"},
    "block": UNFOUND_BY_ALL,
}
"""OpenVINO GenAI looks for sums with a gated feed-forward product, and stops where it finds none:
for EAGLE-3 at the first token, with a line about a missing port.
"""

DFLASH2 = "convolutions or a selector"
IN_PART = "one of convolutions and a selector, or slots or heads of DSpark beside them"
"""Engines make all of DFlash 2 or of DSpark."""

UNSUPPORTED: dict[tuple[str, str], list[str]] = {
    ("vllm", "medusa"): ["truncated_vocab_size"],  # vLLM stops at an assertion
    ("vllm", "eagle"): ["sliding_window", "a bias in fc"],
    ("sglang", "eagle"): ["sliding_window"],
    ("vllm", "eagle3"): [RISING, "the last state as a feature"],
    ("sglang", "eagle3"): [
        "norms of queries and keys",  # it would pass over their weights without a word
        "norm_before_residual",
        "more than one layer",
        "a single feature",  # for which SGLang omits fc
        RISING,
        "embeddings as a feature",  # features are outputs of layers
        "the last state as a feature",
    ],
    ("speculators", "eagle3"): ["fc_norm and norm_before_fc", "the last state as a feature"],
    ("openvino", "eagle3"): [
        "norms of queries and keys",
        "fc_norm",  # of these five, the exporter drops weights and keys without a word
        "norm_output",
        "norm_before_fc",
        "norm_before_residual",
        "more than one layer",
        "sliding_window",
        "other than three features",
        "the same feature twice",  # the engine stops
        UNFOUND,
        "embeddings as a feature",
        "the last state as a feature",
    ],
    ("openvino", "block"): [
        "slots or heads of DSpark",  # it is exported as a plain model
        "Domino's conditioning",
        "a learned mask vector",
        "an lm_head of its own",  # the exporter drops these without a word
        "embeddings of its own",
        DFLASH2,
        UNFOUND,
        RISING,
        "embeddings as a feature",
        "the last state as a feature",
    ],
    ("lmdeploy", "eagle3"): [
        "a target other than Llama",  # which gathers no states
        "the same feature twice",
        USUAL,
        "norms of queries and keys",
        "fc_norm",
        "norm_output",
        "norm_before_fc",
        "norm_before_residual",  # passed over without a word, as the window
        "more than one layer",
        "sliding_window",
    ],
    ("mlx", "eagle3"): [
        "norms of queries and keys",
        "fc_norm",
        "norm_output",  # of these three, the keys are passed over without a word
        "sliding_window",
        "a scaling of RoPE",
        "a reduced vocabulary",  # drafts are compared with the best of its tokens alone
        "other than three features",
        "the same feature twice",
        RISING,
        "embeddings as a feature",
        "the last state as a feature",
    ],
    ("mlx", "block"): [
        "a learned mask vector",
        "rnn conditioning",
        "Domino's conditioning",
        "sliding_window",  # the same keys for all slots
        "an lm_head of its own",
        "embeddings of its own",  # of a target with tied ones, they would be the lm_head, too
        DFLASH2,
        "the same feature twice",
        RISING,
        "embeddings as a feature",
        "the last state as a feature",
    ],
    ("vllm", "block"): [
        IN_PART,
        "a learned mask vector",
        "rnn conditioning",
        "Domino's conditioning",
        RISING,
        "the last state as a feature",
    ],
    ("sglang", "block"): [
        IN_PART,
        "a learned mask vector",
        "an lm_head of its own",  # only the target's are read
        "embeddings of its own",
        RISING,
        "embeddings as a feature",
        "the last state as a feature",
    ],
    ("gguf", "eagle3"): [
        "norms of queries and keys",
        "more than one layer",
        "sliding_window",
        "other than three features",
        "fc_norm",
        "norm_output",
        RISING,
        "the last state as a feature",
    ],
    ("gguf", "block"): [
        IN_PART,
        "a learned mask vector",
        "rnn conditioning",
        "Domino's conditioning",
        "embeddings of its own",  # without an lm_head, they would be that, too
        RISING,
        "the last state as a feature",
    ],
    ("speculators", "block"): [
        "a learned mask vector",
        "sliding_window",  # trained there from the anchor, and served from the slot
        "Domino's conditioning",
        "rnn conditioning of DFlash's slots",  # there, the anchor's slot is its first step
        "an lm_head of its own for all tokens",
        "embeddings of its own",
        DFLASH2,  # vLLM does not know it by that library's name
        "the last state as a feature",
    ],
}
"""(destination, kind) -> traits of heads that the destination does not support. Engines read the
last state before the final norm, and our heads after it.
"""


def destinations() -> tuple[str, ...]:
    """The layouts that `convert --to` writes: our own layout, of every kind, and those of other
    programs.
    """
    return ("draftheads", *WRITERS)


def loss(to: str, stored: Stored) -> str | None:
    """The traits of a head of ours that a destination does not support; None if it supports all."""
    has = traits(stored)
    unsupported = UNSUPPORTED.get((to, stored.facts.kind), [])
    return ", ".join(name for name in unsupported if has[name]) or None


def traits(stored: Stored) -> dict[str, Any]:
    """Which of the traits in UNSUPPORTED a head of ours has."""
    config = block.flat(stored.config)
    bias = stored.tensors.get("fc.bias")
    features = stored.facts.feature_layers or config.get(eagle.AUX_LAYERS) or [None]
    layers = config.get("num_target_layers") or stored.facts.target.layers
    architecture = stored.facts.target.architecture
    is_reduced = config.get("draft_vocab_size") != config.get("vocab_size")
    own_lm_head = config.get("has_own_lm_head")
    has_rnn = config.get("markov_head_type") == "rnn"
    parts = [bool(config.get(key)) for key in ("conv_kernel_size", "selector_rank")]
    is_dspark = config.get("sample_from_anchor") or config.get("enable_confidence_head")
    return {
        "truncated_vocab_size": config.get("truncated_vocab_size") is not None,
        "sliding_window": config.get("sliding_window") is not None,
        "norm_before_residual": config.get("norm_before_residual"),
        "fc_norm": config.get("fc_norm"),
        "norm_output": config.get("norm_output"),
        "norm_before_fc": config.get("norm_before_fc"),
        "norms of queries and keys": config.get("model_type") == "qwen3",
        "a bias in fc": bias is not None and bool(bias.any()),
        "more than one layer": config.get("num_hidden_layers") not in (None, 0, 1),
        "fc_norm and norm_before_fc": config.get("fc_norm") and config.get("norm_before_fc"),
        "a single feature": len(features) == 1,
        "other than three features": len(features) != 3,
        USUAL: layers is None or features != [2, layers // 2, layers - 3],
        "the same feature twice": len(set(features)) < len(features),
        RISING: None not in features and features != sorted(features),
        UNFOUND: architecture in UNFOUND_TARGETS.get(stored.facts.kind, ()),
        "a target other than Llama": architecture != "LlamaForCausalLM",
        "a scaling of RoPE": config.get("rope_scaling") is not None,
        "a reduced vocabulary": is_reduced,
        "embeddings as a feature": 0 in features,
        "the last state as a feature": -1 in features or layers in features,
        "slots or heads of DSpark": config.get("architectures") != ["DFlashDraftModel"],
        "a learned mask vector": config.get("mask_token_id") is None,
        "rnn conditioning": has_rnn,
        "Domino's conditioning": config.get("projector_type") == "domino",
        "rnn conditioning of DFlash's slots": has_rnn and not config.get("sample_from_anchor"),
        DFLASH2: any(parts),
        IN_PART: any(parts) and (is_dspark or not all(parts)),
        "an lm_head of its own": own_lm_head,
        "an lm_head of its own for all tokens": own_lm_head and not is_reduced,
        "embeddings of its own": config.get("has_embed_tokens"),
    }


def translated(stored: Stored, target: Target | None) -> Stored:
    """A head folder of any layout in our own. target: for layouts that leave parts to it.

    Raises ValueError for a folder without a head, or with one that is not supported.
    """
    if stored.facts.is_ours:
        return stored
    _check_foreign(stored)
    architectures = stored.config.get("architectures") or []
    names = [*stored.config, *stored.tensors, *architectures]
    for _, pattern, read in READERS:
        if any(re.search(pattern, name) for name in names):
            return read(stored, target)
    architecture = next(iter(architectures), "")
    if re.search("(ForCausalLM|LMHeadModel|ForConditionalGeneration)$", architecture):
        raise ValueError(
            f"expected a head, got a whole model ({architecture}); pass it as --target, or let it "
            "draft: --head model:PATH"
        )
    layouts = ", ".join(name for name, *_ in READERS)
    raise ValueError(
        f"expected a head in one of the layouts draftheads, {layouts}; got tensors "
        f"{sorted(stored.tensors)[:3]}; is this a head folder?"
    )


def _check_foreign(stored: Stored) -> None:
    """Raise ValueError for a head whose name says that it is of a kind that we do not have."""
    config = block.sectioned(stored.config)
    named = [*(config.get("architectures") or []), config.get("speculators_model_type")]
    named += [config.get("projector_type"), config.get("parallel_drafting") and "peagle"]
    for name in filter(None, named):
        for pattern, kind in FOREIGN.items():
            if re.search(pattern, str(name), re.IGNORECASE):
                raise ValueError(
                    f"expected an EAGLE-3, DSpark or DFlash head, got {str(name)[:60]!r}: {kind}; "
                    "these are not supported, train or get another head"
                )


def written(stored: Stored, to: str, target: Target | None) -> Stored:
    """A head of ours in the layout of `to`. Raises ValueError for what `to` does not support."""
    kind = stored.facts.kind
    if to not in destinations():
        raise ValueError(f"--to: expected one of {', '.join(destinations())}, got {to!r}")
    if to == "draftheads":
        return as_ours(stored)
    if kind not in WRITERS[to]:
        others = ", ".join(["draftheads", *(name for name in WRITERS if kind in WRITERS[name])])
        raise ValueError(
            f"expected a head of kind {' or '.join(WRITERS[to])} for {to}, got {kind}; use --to "
            f"{others}"
        )
    if kind == "eagle3" and stored.facts.target.layers is None:
        raise ValueError(
            "expected a head that records the number of layers of its target, got none; pass "
            "--target"
        )
    if unsupported := loss(to, stored):
        raise ValueError(
            f"{to} does not support this {kind} head: it has {unsupported}; nothing was written, "
            "choose another destination or train another head"
        )
    facts = {key: value for key, value in stored.facts.json.items() if key != "format"}
    return WRITERS[to][kind](Stored({**stored.config, "draftheads": facts}, stored.tensors), target)
