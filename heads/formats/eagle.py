"""EAGLE-1 and EAGLE-3 heads in the layouts of SafeAILab, SpecForge, ModelOpt, vLLM and SGLang,
which differ by prefixes and omissions, and of the speculators library.

Legend: v draft vocabulary, V vocabulary of the target, D width.
Sources: eagle/model/cnets1.py and cnets.py of SafeAILab/EAGLE; llama_eagle.py and llama_eagle3.py
of vLLM 0.33 and SGLang 0.5.23; src/speculators/models/eagle3 of vllm-project/speculators; vLLM
transformers_utils/configs/speculators; exporters/openvino/model_patcher.py of optimum-intel 2.2.0;
pytorch/models/llama_eagle3.py of LMDeploy 0.18; NeMo AutoModel's documentation of
speculative/eagle/eagle4 and export_eagle4.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from draftheads.heads.eagle import SWITCHES, low_middle_high
from draftheads.heads.formats.facts import HeadFacts
from draftheads.heads.formats.stored import (
    MERGED,
    Stored,
    check_values,
    renamed,
    target_name,
)
from draftheads.heads.layers import KEYS
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import integers, matrix, needed, require
from draftheads.heads.vocabulary import t2d

LEFT_OUT = [
    (r"^model\.", ""),
    (r".*rotary_emb\.inv_freq$", ""),
    (r"^verifier_(norm|lm_head)\..*", ""),
]
"""A prefix, angles, and the target's own matrices."""
RENAMES = [
    *LEFT_OUT,
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
]
LLAMA_LIKE = re.compile(
    r"(Eagle3?)?(Llama|Qwen[23])ForCausalLM(Eagle3?)?|Eagle3(Speculator|DraftModel)|Qwen3Eagle3Model"
)
"""Architectures of heads with Llama's or Qwen3's layers."""
NO = (None, False)
YES = (None, True)
ONE = (None, 1, 1.0)
ACTIVATIONS = (None, "silu", "swish")
LAYER: dict[str, tuple[Any, ...]] = {
    "kv_lora_rank": (None,),
    "mrope_section": (None,),
    "partial_rotary_factor": ONE,
    "is_neox_style": YES,
    "rope_is_neox_style": YES,
    "attention_bias": NO,
    "mlp_bias": NO,
    "attention_sink_bias": NO,
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "logit_scale": ONE,
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "quantization_config": (None,),
    "use_aux_hidden_state": YES,
}
"""Keys of config.json, its sections and its RoPE, with the values that our layers implement."""
DESIGN = {
    **LAYER,
    "embed_requires_grad": NO,
    "use_qk_norm": NO,
    "qkv_bias": NO,
    "eh_proj_before_attn": NO,
}
LEFT_OVER = ("num_attention_heads", "rms_norm_eps", "vocab_size")
"""Keys that speculators does not write where they have the default of the layers' model."""
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
KEPT = ("draft_vocab_size", AUX_LAYERS, "draftheads", *SWITCHES)
"""Keys that speculators and we have at the top level."""
OF_LAYERS = f"""
{" ".join(KEYS.values())} model_type num_hidden_layers vocab_size layer_types hidden_act
attention_bias rope_theta rope_scaling sliding_window use_sliding_window tie_word_embeddings
""".split()
"""Our keys that describe the layers, of both kinds."""
OF_EAGLE4 = f"""
fc_norm norm_output num_aux_hidden_states draft_vocab_size target_hidden_size torch_dtype
{AUX_LAYERS} {" ".join(OF_LAYERS)}
""".split()
"""Keys of an EAGLE-4 head that Llama's config does not have, or no longer has."""
CANDIDATE_HEAD = r"^(efficient_lm_head|candidate_head|num_candidates)"
"""How names of its keys and tensors begin."""


def from_eagle(stored: Stored, target: Target | None) -> Stored:
    """EAGLE-3 if layer 0 has a norm for features, else EAGLE-1."""
    config = _flat(stored.config)
    tensors = renamed(stored.tensors, RENAMES)
    whole = with_sections(config)
    if str(config.get("model_type")).startswith("llama4"):
        whole["use_qk_norm"] = None  # of its target; engines make Llama's layer
    norm_D = tensors.get("layers.0.hidden_norm.weight")
    is_alone = whole.get("use_aux_hidden_state") is False and "fc.weight" not in tensors
    if is_alone and norm_D is not None:  # it reads the last state, after the final norm, as it is
        tensors["fc.weight"] = torch.eye(len(norm_D), dtype=norm_D.dtype)
        config = {**config, AUX_LAYERS: [-1]}
        whole["use_aux_hidden_state"] = None
    check_values(whole, {**DESIGN, "target_hidden_size": (None, len(matrix(tensors, "fc.weight")))})
    for architecture in config.get("architectures") or []:
        if not LLAMA_LIKE.fullmatch(architecture):
            raise ValueError(
                f"expected an EAGLE head with Llama's or Qwen3's layers, got {architecture}"
            )
    _drop_embeddings(tensors, target)
    tensors = {n: t for n, t in tensors.items() if not n.endswith(".bias") or t.any()}
    ours = config | _sizes(tensors, config)
    if "layers.0.hidden_norm.weight" in tensors:
        kind = "eagle3"
        ours |= _features(tensors, config, target)
        ours["vocab_size"], ids_v = complete_maps(tensors, config, target)
        if "lm_head.weight" not in tensors:
            weight_VD = require(target, "this head uses its lm_head").unembed_weight().detach()
            ids_v = ids_v[ids_v < len(weight_VD)]  # all, unless it is another target's
            tensors["lm_head.weight"] = weight_VD.to("cpu", tensors["fc.weight"].dtype)[ids_v]
        if not any(name.startswith("layers.1.") for name in tensors):
            tensors = renamed(tensors, [(r"^layers\.0\.", "midlayer.")])
    else:
        kind = "eagle"
        ours["vocab_size"] = _vocab_size(config, target)
        tensors.setdefault("fc.bias", tensors["fc.weight"].new_zeros(ours["hidden_size"]))
    facts = {"target": {"name": target_name(config)}, **stored.facts.json, "kind": kind}
    return Stored({**ours, "draftheads": facts}, tensors)


def from_eagle4(stored: Stored, target: Target | None) -> Stored:
    """EAGLE-3.1 with a window and the whole vocabulary, as NeMo AutoModel exports it. Its candidate
    head is left out: that only finds tokens, which the lm_head then scores.

    Raises ValueError for keys whose meaning is not public.
    """
    config = {key: stored.config[key] for key in stored.config if not re.match(CANDIDATE_HEAD, key)}
    if unknown := config.keys() - {*AutoConfig.for_model("llama").to_dict(), *OF_EAGLE4}:
        raise ValueError(
            "expected the keys that NeMo AutoModel documents for EAGLE-4, got "
            f"{', '.join(sorted(unknown)[:3])}; remove them if they change no layer, or get "
            "another head"
        )
    tensors = renamed(stored.tensors, [(f"{CANDIDATE_HEAD}.*", "")])
    vocabulary = len(matrix(tensors, "lm_head.weight"))
    sizes = {"vocab_size": (vocabulary,), "draft_vocab_size": (None, vocabulary)}
    design = {"model_type": ("llama",), "num_hidden_layers": (1,), "fc_norm": (True,)}
    check_values(config, {**sizes, **design, "norm_output": (True,)})
    third = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "layer_types": config.get("layer_types") or ["sliding_attention"],
        AUX_LAYERS: _usual_layers(config.get(AUX_LAYERS), target),
    }
    return from_eagle(Stored(third, tensors), target)


def _usual_layers(ids: list[int] | None, target: Target | None) -> list[int]:
    """The layers that EAGLE-3 reads by default. EAGLE-4's ids may count hidden states or outputs of
    layers, and only for these layers it is clear which.
    """
    known = require(target, "its number of layers determines which states this head reads")
    layers = list(low_middle_high(known.layers))
    outputs = [layer - 1 for layer in layers]
    if ids not in (None, layers, outputs):
        raise ValueError(
            f"expected {AUX_LAYERS} to be {layers}, or {outputs} if they count outputs of layers, "
            f"got {ids}: what EAGLE-4 counts is not public; get a head of these layers"
        )
    return layers


def with_sections(config: dict[str, Any]) -> dict[str, Any]:
    """Config.json with the keys of `eagle_config` and of its RoPE, of all types of layers."""
    whole = {**(config.get("eagle_config") or {}), **config}
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name) or {}
        for part in (rope, *rope.values()):
            if isinstance(part, dict):
                whole |= part
    return whole


def unnested(config: dict[str, Any]) -> dict[str, Any]:
    """A config of the speculators library without its section for the layers."""
    layer = config.get("transformer_layer_config")
    if layer is None:
        return config
    kind = layer.get("model_type") or "qwen3"
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"expected layers of model_type llama or qwen3, got {kind!r:.60}")
    default = AutoConfig.for_model(kind)
    return {**{key: getattr(default, key) for key in LEFT_OVER}, **layer, **config}


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the speculators library without its section, any other as it is."""
    if "speculators_model_type" not in config:
        return config
    check_values(config, {"speculators_model_type": ("eagle3",)})
    if "norm_before_residual" not in config:
        raise ValueError(
            "expected norm_before_residual in config.json, got none, for which the speculators "
            "library assumes false and vLLM true; add the value that it was trained with"
        )
    needed(config, "transformer_layer_config")
    return unnested(config)


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
    """True if these are the same rows, rounded; one of them may be padded."""
    rows = min(len(theirs_VD), len(ours_VD))
    return theirs_VD.shape[1] == ours_VD.shape[1] and torch.allclose(
        theirs_VD[:rows].float(), ours_VD[:rows].float(), rtol=1e-2, atol=1e-3
    )


def _sizes(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Any]:
    norm_W = tensors.get("layers.0.self_attn.q_norm.weight")
    if norm_W is not None and norm_W.ndim == 1 and len(norm_W):
        head_dim = len(norm_W)
    else:
        queries = len(matrix(tensors, "layers.0.self_attn.q_proj.weight"))
        head_dim = max(1, queries // needed(config, "num_attention_heads")[0])
    return layer_sizes(tensors, head_dim) | {
        "sliding_window": needed(config, "sliding_window")[0] if is_windowed(config) else None,
    }


def layer_sizes(tensors: dict[str, Tensor], head_dim: int) -> dict[str, Any]:
    """The sizes of a layer, read from the tensors, as configs can be wrong or leave them out."""
    q, k = (len(matrix(tensors, f"layers.0.self_attn.{each}_proj.weight")) for each in "qk")
    return {
        "hidden_size": len(matrix(tensors, "fc.weight")),
        "head_dim": head_dim,
        "num_attention_heads": max(1, q // head_dim),
        "num_key_value_heads": max(1, k // head_dim),
        "intermediate_size": len(matrix(tensors, "layers.0.mlp.gate_proj.weight")),
    }


def is_windowed(config: dict[str, Any]) -> bool:
    """True if all layers have the window; sliding_window alone may be left over. Raises ValueError
    where config.json does not say it of each layer, or says it of some.
    """
    kinds = config.get("layer_types")
    uses = config.get("use_sliding_window")
    if kinds is None and uses and config.get("sliding_window"):
        raise ValueError(
            f"expected layer_types in config.json, got use_sliding_window without them; add "
            f'"layer_types": ["sliding_attention"] for layers with the window of '
            f'{config["sliding_window"]}, ["full_attention"] for others'
        )
    kinds = kinds or ["full_attention"]
    if len(set(kinds)) > 1:
        raise ValueError(f"expected layers that all have a window or all have none, got {kinds}")
    check_values(
        {"layer_types": kinds[0]}, {"layer_types": ("full_attention", "sliding_attention")}
    )
    if kinds[0] == "sliding_attention" and uses is False:
        raise ValueError(
            "expected use_sliding_window and layer_types to agree, got false and "
            "sliding_attention; correct the one that is not as the head was trained"
        )
    return bool(kinds[0] == "sliding_attention")


def _features(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target | None
) -> dict[str, Any]:
    """The keys that only EAGLE-3 has. Nested layer ids, and `target_layer_ids`, count outputs of
    layers, as in SGLang and ModelOpt; all others, and ours, are indices into the hidden states.
    """
    nested = config.get("eagle_config") or {}
    layers = config.get(AUX_LAYERS) or [layer + 1 for layer in nested.get(AUX_LAYERS) or ()]
    layers = layers or nested.get("layer_ids")
    layers = layers or [layer + 1 for layer in config.get("target_layer_ids") or ()]  # DeepSpec's
    if not layers:
        known = require(target, "its number of layers determines which states this head reads")
        layers = list(low_middle_high(known.layers))
    switches = {name: bool(config.get(name, nested.get(name))) for name in SWITCHES}
    switches["norm_output"] |= bool(nested.get("return_hidden_post_norm"))  # ModelOpt's name
    return {
        AUX_LAYERS: layers,
        **switches,
        "fc_norm": switches["fc_norm"] or "fc_norm.0.weight" in tensors,
        "norm_before_fc": switches["norm_before_fc"] or "input_norm.weight" in tensors,
    }


def _vocab_size(config: dict[str, Any], target: Target | None) -> int:
    size = config.get("vocab_size")
    return int(size or require(target, "config.json has no vocab_size").vocab_size)


def complete_maps(
    tensors: dict[str, Tensor], config: dict[str, Any], target: Target | None
) -> tuple[int, Tensor]:
    """Leave both maps of a draft vocabulary or none; returns V and the target ids (v,)."""
    offsets_v = integers(tensors, "d2t")
    known_V = integers(tensors, "t2d")
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
    elif "lm_head.weight" in tensors:
        rows = len(matrix(tensors, "lm_head.weight"))
        if rows < vocab_size:
            raise ValueError(
                f"expected d2t, which maps the {rows} draft tokens to the target's, got none; the "
                "file is incomplete"
            )
    return vocab_size, ids_v


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


def to_lmdeploy(stored: Stored, target: Target | None) -> Stored:
    """With d2t for a full vocabulary, too: without it, all drafts are token 0. LMDeploy prefixes
    the name with "Eagle3".
    """
    return to_vllm(to_openvino(stored, target), target)


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
    config: dict[str, Any], kind: str = "eagle3", chain: int = 0
) -> dict[str, Any]:
    """The keys that the speculators library adds to a config of ours. chain: its draft tokens,
    default: as many as the tree is deep.

    Raises ValueError where the target is not recorded.
    """
    facts = HeadFacts(config["draftheads"])
    loaded = MERGED if facts.target.lora else facts.target.name
    name = require(loaded, "speculators' config names it")
    layer = {key: value for key, value in config.items() if key in OF_LAYERS}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": chain or max(1, facts.tree.depth),
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": name,
                "architectures": [facts.target.architecture] if facts.target.architecture else [],
            },
        },
    }
