"""Block heads: DSpark, DFlash, DFlash 2 and Domino, in the layouts of DeepSpec, z-lab, SpecForge,
NeMo Automodel, vLLM, SGLang and llama.cpp, which differ by the place of keys, and of the
speculators library.

Legend: v draft vocabulary, V vocabulary of the target, D width.
Sources: deepspec/modeling/dspark of deepseek-ai/DeepSpec; dflash/model.py of z-lab/dflash;
domino_core.py, draft_qwen3.py and draft_qwen3_dflash2.py of NVIDIA-NeMo/Automodel; qwen3_dspark.py,
qwen3_dflash.py and qwen3_dflash2.py of vLLM 0.33; models/dspark.py, models/dflash.py and
speculative/domino_utils.py of SGLang 0.5.23; models/dspark, models/dflash and models/dflash2 of
speculators 0.9; conversion/qwen.py of llama.cpp.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.block import feature_layers, layer_ids
from draftheads.heads.formats.eagle import (
    LAYER,
    LEFT_OUT,
    NO,
    ONE,
    complete_maps,
    is_copy,
    is_windowed,
    layer_sizes,
    speculators_config,
    unnested,
    with_sections,
)
from draftheads.heads.formats.stored import Stored, check_values, renamed, target_name
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import matrix, needed, require

ONE_AND_N = re.compile(r"(Qwen3)?DFlash2?DraftModel|DFlashSpeculator")
"""Architectures whose anchor's slot does not predict, unless config.json says otherwise."""
KNOWN = re.compile(
    rf"{ONE_AND_N.pattern}|DominoDraftModel|(DFlash)?Qwen3DSparkModel|DSpark(DraftModel|Speculator)"
)
"""Architectures of heads with Qwen3's layers."""
DESIGN: dict[str, tuple[Any, ...]] = {
    **LAYER,
    "speculators_model_type": (None, "dspark", "dflash", "dflash2"),
    "model_type": (None, "qwen3", "dflash"),
    "projector_type": (None, "dflash", "dspark", "domino"),
    "attention_mode": (None, "gqa"),
    "add_swa_attention_sink_bias": NO,
    "attention_value_scale": ONE,
    "input_embedding_scale": ONE,
    "output_multiplier": ONE,
}
"""Keys of config.json, its sections and its RoPE, with the values that our heads implement."""
DOMINO: dict[str, tuple[Any, ...]] = {
    "shift_label": (True, False),
    "pure_draft_prefix_len": (1,),
}
"""The same of Domino's heads, which must have these keys. The first prediction alone has no
correction, as in SGLang.
"""
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of DFlash 2's convolutions and selector."""
COPIED = (
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "projector_type",
    "rope_theta",
    "rope_scaling",
    *DFLASH2,
)
"""Keys that ours have, too."""
KEPT = (
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "num_target_layers",
    "dtype",
    "sample_from_anchor",
)
"""Keys that speculators and we have at the top level."""
DSPARK = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
"""The same, of DSpark alone."""
ALIGNED = 8
"""Rank of a Markov head of zeros, whose rows are then as long as kernels like them."""


def sectioned(config: dict[str, Any]) -> dict[str, Any]:
    """Config.json with the keys of DSpark's and DFlash's sections, which have precedence."""
    return {
        **config,
        **(config.get("dspark_config") or {}),
        **(config.get("dflash_config") or {}),
    }


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """Config.json without sections."""
    config = sectioned(unnested(config))
    aux = config.get("aux_hidden_state_layer_ids")
    return {**config, "target_layer_ids": layer_ids(aux)} if aux else config


def from_block(stored: Stored, target: Target | None) -> Stored:
    """Copies of the target's embeddings and lm_head are dropped, others are the head's own."""
    config = flat(stored.config)
    tensors = renamed(stored.tensors, LEFT_OUT)
    for architecture in config.get("architectures") or ["none"]:
        if not KNOWN.fullmatch(architecture):
            raise ValueError(
                f"expected a DSpark or DFlash head with Qwen3's layers, got {architecture}"
            )
    whole = with_sections(config)
    check_values(whole, DESIGN)
    needed(whole, "rope_theta", "mask_token_id", "block_size", "target_layer_ids")
    vocab_size, _ = complete_maps(tensors, config, target)
    _drop_copies(tensors, target)
    if "confidence_head.proj.weight" in tensors:
        zero_1 = tensors["confidence_head.proj.weight"].new_zeros(1)
        tensors.setdefault("confidence_head.proj.bias", zero_1)
    markov = [each for name, each in tensors.items() if name.startswith("markov_head.")]
    is_silent = not any(each.any() for each in markov)  # as in our exports of heads without one
    if is_silent and not config.get("confidence_head_with_markov"):
        tensors = renamed(tensors, [(r"^markov_head\..*", "")])
    norm_W = tensors.get("layers.0.self_attn.q_norm.weight")
    if norm_W is None or norm_W.ndim != 1 or not len(norm_W):
        raise ValueError("expected norms of queries and keys, as Qwen3 has, got none in layer 0")
    facts = {"target": {"name": target_name(config)}, **stored.facts.json, "kind": "block"}
    ours = {
        **{key: config.get(key) for key in (*COPIED, "rope_parameters")},
        **layer_sizes(tensors, len(norm_W)),
        "rms_norm_eps": config.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": config.get("max_position_embeddings") or 32768,
        "vocab_size": vocab_size,
        "num_target_layers": config.get("num_target_layers")
        or require(target, "config.json does not say how many layers it has").layers,
        "sample_from_anchor": _samples_from_anchor(config),
        "sliding_window": _window(config),
        "draftheads": facts,
    }
    return Stored(ours, tensors)


def _drop_copies(tensors: dict[str, Tensor], target: Target | None) -> None:
    """Drop what is the target's, unless the target scales its embeddings otherwise."""
    if "d2t" in tensors:
        matrix(tensors, "lm_head.weight")  # of the draft vocabulary, which the target's is not
    for name, get in (
        ("embed_tokens.weight", "get_input_embeddings"),
        ("lm_head.weight", "get_output_embeddings"),
    ):
        if target is not None and name in tensors and not ("d2t" in tensors and "lm_" in name):
            theirs_VD = getattr(target.model, get)().weight.detach().cpu()
            ours_VD = matrix(tensors, name)
            is_same = is_copy(ours_VD, theirs_VD)
            if is_same and "embed" in name:  # by the first few tokens
                tokens = torch.arange(min(len(ours_VD), 8), device=target.device)
                is_same = is_copy(ours_VD[:8], target.embed(tokens).cpu())
            if is_same:
                del tensors[name]


def _samples_from_anchor(config: dict[str, Any]) -> bool:
    if config.get("projector_type") == "domino":
        shift_label, _ = needed(config, *DOMINO)
        check_values(config, DOMINO)
        return bool(shift_label)
    said = config.get("sample_from_anchor")
    kind = config.get("markov_head_type")
    said = config.get("query_zero_predicts_next") if said is None else said  # vLLM's name
    if said is None and config.get("speculators_model_type") == "dspark":
        raise ValueError(
            "expected sample_from_anchor in config.json, got none, for which the speculators "
            "library assumes true and vLLM false; add the value that it was trained with"
        )
    if said is False and "speculators_model_type" in config and kind == "rnn":
        raise ValueError(
            "expected an rnn that begins after the anchor's slot, got one of the speculators "
            "library with sample_from_anchor false, whose first step is that slot"
        )
    return not ONE_AND_N.fullmatch(config["architectures"][0]) if said is None else bool(said)


def _window(config: dict[str, Any]) -> int | None:
    """The window of all layers. Layers with one are causal in their block unless config.json says
    otherwise, and those of our heads never are.
    """
    has_window = is_windowed(config)
    uses = bool(config.get("use_swa"))
    two_ways = [not config[key] for key in ("is_causal", "causal") if config.get(key) is not None]
    two_ways.append(not has_window or bool(config.get("sliding_window_non_causal")))
    if not two_ways[0]:
        raise ValueError(
            "expected blocks whose slots see each other both ways, got causal ones (is_causal, "
            "dflash_config.causal, or a sliding window that does not say otherwise)"
        )
    if not has_window and not uses:
        return None
    size: int = config.get("swa_window_size") or needed(config, "sliding_window")[0]
    return size


def chain(config: dict[str, Any]) -> int:
    """Returns the number of tokens that a block drafts. vLLM's have as many slots as it is told to
    draft tokens, and with others than in training they draft other tokens.
    """
    return int(config["block_size"]) - (not config["sample_from_anchor"])


def to_engine(stored: Stored, target: Target | None) -> Stored:
    """Our layout is DSpark's and DFlash's. Engines need a Markov head in DSpark's: one of zeros."""
    config = stored.config
    tensors = dict(stored.tensors)
    if config["architectures"] != ["Qwen3DSparkModel"] or config["markov_rank"]:
        return stored
    for name, size in (("w1", config["vocab_size"]), ("w2", config["draft_vocab_size"])):
        tensors[f"markov_head.markov_{name}.weight"] = tensors["fc.weight"].new_zeros(size, ALIGNED)
    return Stored({**config, "markov_rank": ALIGNED, "markov_head_type": "vanilla"}, tensors)


def to_mlx(stored: Stored, target: Target | None) -> Stored:
    """mlx-vlm finds DSpark by a section as DFlash's, counts the anchor's slot as one that does not
    predict, and shortens blocks of up to 8 slots only if told that it may.
    """
    stored = to_engine(stored, target)
    config = stored.config
    if config["architectures"] != ["Qwen3DSparkModel"]:
        return stored
    section = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": config["target_layer_ids"],
        "projector_type": "dspark",
        "runtime_block_size": chain(config) + 1,
        "prefer_requested_block_size": True,
    }
    config = {
        **config,
        "dflash_config": section,
        "dspark_bonus_anchor": not config["sample_from_anchor"],
    }
    return Stored(config, stored.tensors)


def to_speculators(stored: Stored, target: Target | None) -> Stored:
    """The keys of the layers move to a nested config; embeddings, and an lm_head of all tokens,
    are read from the target.
    """
    stored = to_engine(stored, target)
    ours = flat(stored.config)
    kind = "dflash" if ours["architectures"] == ["DFlashDraftModel"] else "dspark"
    more = DSPARK if kind == "dspark" else ()
    config = {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        **speculators_config(ours, kind, chain(ours)),
        **{key: ours[key] for key in (*KEPT, *more)},
        "aux_hidden_state_layer_ids": list(feature_layers(ours["target_layer_ids"])),
        "sliding_window_non_causal": True,  # vLLM takes it for all layers
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "draftheads": ours["draftheads"],
    }
    return Stored(config, stored.tensors)
