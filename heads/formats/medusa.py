"""Medusa heads in the words of vLLM, FasterDecoding, text-generation-inference, TensorRT-LLM and
ModelOpt.

Legend: K heads, L blocks of each, v draft vocabulary. Two layouts, each with or without last
matrices of its own:

    blocks.{k}.layers.{j}.weight | .bias    lm_heads.{k}.weight    vLLM; ours
    {k}.{j}.linear.weight | .bias           {k}.{L}.weight         the others

Sources: FasterDecoding/Medusa medusa/model; vLLM model_executor/models/medusa.py; TGI
layers/medusa.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.formats.stored import Stored, Written, count_of, integers, matrix, target_name
from draftheads.heads.layers import LayerShape
from draftheads.heads.target import Target

PREFIX = re.compile(r"^medusa_heads?\.")
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
LAST = re.compile(r"(\d+)\.(\d+)\.weight")


def plain_names(stored: Stored) -> dict[str, Tensor]:
    """Without what stands before every name."""
    return {PREFIX.sub("", name): each for name, each in stored.tensors.items()}


def is_vllm(stored: Stored) -> bool:
    """Whether its names are those of vLLM."""
    return "blocks.0.layers.0.weight" in plain_names(stored)


def is_numbered(stored: Stored) -> bool:
    """Whether its names are numbers, as FasterDecoding's module lists make them."""
    return any(BLOCK.fullmatch(name) for name in plain_names(stored))


def from_vllm(stored: Stored, target: Target | None) -> Stored:
    """K, L and last matrices are told by the names. A shared matrix is the target's
    (`original_lm_head`); full rows of a reduced vocabulary are cut.
    """
    config, tensors = stored.config, plain_names(stored)
    if config.get("logit_scale") not in (None, 1.0):
        raise stored.refuse(
            f"expected logit_scale 1.0, got {config['logit_scale']}; scale the lm_heads instead"
        )
    vocab_size = _vocabulary(stored, tensors, target)
    token_map = integers(tensors, "token_map")
    tensors.pop("token_map", None)
    if token_map is not None and config.get("truncated_vocab_size") in (None, vocab_size):
        token_map = None  # vLLM does not look at it then
    if token_map is not None:
        tensors = _reduced(stored, tensors, token_map)
    shared = [tensors.pop(name) for name in ("lm_head.weight",) if name in tensors]
    if config.get("original_lm_head") and not shared and "lm_heads.0.weight" in tensors:
        shared = [tensors.pop("lm_heads.0.weight")]
    for weight_vD in shared:
        _check_shared(stored, weight_vD, tensors.get("token_map"), target)
    return _ours(stored, tensors, vocab_size)


def from_numbered(stored: Stored, target: Target | None) -> Stored:
    """K, L and last matrices are told by the names."""
    ours: dict[str, Tensor] = {}
    for name, tensor in plain_names(stored).items():
        if match := BLOCK.fullmatch(name):
            ours[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif match := LAST.fullmatch(name):
            ours[f"lm_heads.{match[1]}.weight"] = tensor
        else:
            ours[name] = tensor  # which is then refused by this name
    return _ours(stored, ours, _vocabulary(stored, ours, target))


def _ours(stored: Stored, tensors: dict[str, Tensor], vocab_size: int) -> Stored:
    if not any(name.endswith(".bias") for name in tensors):
        weights = [name for name in tensors if name.startswith("blocks.")]
        tensors |= {
            name.replace("weight", "bias"): tensors[name].new_zeros(len(matrix(tensors, name)))
            for name in weights
        }
    facts = {"target": {"name": target_name(stored.config)}, **stored.facts, "kind": "medusa"}
    return stored.having({"vocab_size": vocab_size, "draftheads": facts}, tensors)


def _vocabulary(stored: Stored, tensors: dict[str, Tensor], target: Target | None) -> int:
    """Of the target."""
    last = [name for name in tensors if name.startswith("lm_heads.")]
    if last and "token_map" not in tensors:
        return len(matrix(tensors, last[0]))
    size = stored.config.get("vocab_size") or (target.vocab_size if target else None)
    if size is None:
        raise stored.refuse(
            "expected vocab_size in its config.json, got none, and these heads share the last "
            "matrix of their target; pass the target: load_head(..., target=target) or --target"
        )
    return int(size)


def _reduced(stored: Stored, tensors: dict[str, Tensor], token_map: Tensor) -> dict[str, Tensor]:
    """Last matrices with the rows of the draft vocabulary, in rising order."""
    ids_v, order_v = token_map.long().sort()
    if ids_v[0] < 0:
        raise stored.refuse(f"expected token_map to hold target ids, got {int(ids_v[0])}")
    cut = {}
    for name in tensors:
        if name.startswith("lm_head"):
            whole = matrix(tensors, name)
            if len(whole) != len(ids_v) and ids_v[-1] >= len(whole):
                raise stored.refuse(
                    f"expected {name} with a row for each of the {len(ids_v)} tokens in token_map, "
                    f"or for all of the target's, got {len(whole)} rows"
                )
            cut[name] = whole[order_v if len(whole) == len(ids_v) else ids_v]
    return {**tensors, **cut, "token_map": ids_v}


def _check_shared(
    stored: Stored, matrix_vD: Tensor, ids_v: Tensor | None, target: Target | None
) -> None:
    if target is None:
        return
    theirs_vD = target.unembed_weight()
    if ids_v is not None:
        theirs_vD = theirs_vD[ids_v[ids_v < len(theirs_vD)]]
    same = theirs_vD.shape == matrix_vD.shape and torch.allclose(
        theirs_vD.detach().cpu().float(), matrix_vD.float(), rtol=1e-2, atol=1e-3
    )
    if not same:
        raise stored.refuse(
            f"expected lm_head.weight to be the last matrix of {target.name} (original_lm_head), "
            "got another one; was the head made for another target?"
        )


def to_vllm(stored: Stored, target: Target | None) -> Written:
    """Our own words, and the target's last matrix where the heads share it: vLLM looks for it in
    the file.
    """
    if "token_map" in stored.tensors:
        raise stored.refuse(
            "expected heads that guess the target's whole vocabulary, got "
            f"{len(stored.tensors['token_map'])} of {stored.config['vocab_size']} tokens: vLLM "
            "(0.9.2 to 0.32) stops at an assertion; train without head.vocabulary"
        )
    tensors = dict(stored.tensors)
    if "lm_heads.0.weight" not in tensors:
        if target is None:
            raise stored.refuse(
                "expected the target, whose last matrix vLLM wants beside heads that share it, got "
                "none; pass --target"
            )
        dtype = tensors["blocks.0.layers.0.weight"].dtype
        tensors["lm_head.weight"] = target.unembed_weight().detach().to("cpu", dtype)
    return Written(stored.config, {"model.safetensors": tensors})


def to_tgi(stored: Stored, target: Target | None) -> Written:
    """TGI knows heads by a config without `architectures`. Where they share the target's last
    matrix (its "V2"), it reads one block for each.
    """
    config, tensors = _numbered("text-generation-inference", stored)
    if "version" in config and config["medusa_num_layers"] > 1:
        raise stored.refuse(
            "text-generation-inference reads one block for heads that share the target's last "
            f"matrix, got {config['medusa_num_layers']}; train with head.layers=1 or "
            "head.lm_head=own"
        )
    return Written(config, {"medusa_lm_head.safetensors": tensors}, with_tokenizer=True)


def to_fasterdecoding(stored: Stored, target: Target | None) -> Written:
    """The layout v0.1, or "version 2" without last matrices. Their code makes one block and uses it
    L times, so blocks that differ are refused; its newest class for v0.1 makes five heads, whatever
    the config says.
    """
    config, tensors = _numbered("FasterDecoding/Medusa", stored)
    for name, tensor in tensors.items():
        match = BLOCK.fullmatch(name)
        if match and not torch.equal(tensor, tensors[f"{match[1]}.0.linear.{match[3]}"]):
            raise stored.refuse(
                f"FasterDecoding/Medusa uses one block {config['medusa_num_layers']} times, these "
                "heads have blocks that differ; train with head.layers=1"
            )
    return Written(config, {"medusa_lm_head.pt": tensors})


def _numbered(reader: str, stored: Stored) -> tuple[dict[str, Any], dict[str, Tensor]]:
    ours, name = stored.config, target_name(stored.config)
    if "token_map" in stored.tensors:
        raise stored.refuse(
            f"{reader} has no draft vocabulary, these heads guess "
            f"{len(stored.tensors['token_map'])} of {ours['vocab_size']} tokens; train without "
            "head.vocabulary"
        )
    if name is None:
        raise stored.refuse(f"{reader} must be told the target, nothing names it; pass --target")
    config: dict[str, Any] = {
        "base_model_name_or_path": name,
        "medusa_num_heads": ours["num_heads"],
        "medusa_num_layers": ours["num_hidden_layers"],
        "hidden_size": ours["hidden_size"],
        "vocab_size": ours["vocab_size"],
        **({"version": "2"} if ours["original_lm_head"] else {}),
        "draftheads": ours["draftheads"],
    }
    tensors = {}
    for name, tensor in stored.tensors.items():
        part, k, *rest = name.split(".")
        last = f"{k}.{ours['num_hidden_layers']}.weight"
        tensors[last if part == "lm_heads" else f"{k}.{rest[1]}.linear.{rest[2]}"] = tensor
    return config, tensors


# Hydra and Hydra++ heads as they were published (arXiv 2402.05109; names as in
# github.com/zankner/Hydra, hydra/model/hydra_heads).
#
# Legend: K heads, L layers of each.


CONFIG = {
    "hydra_head_arch": ("mlp", "prefix-mlp"),
    "grounded_heads": (True,),
    "hidden_state_offset": (0,),
}
"""What we read of its config, and the values that heads of ours can have."""
HYDRA_PREFIX = "prefix_embeding_layer"  # as it is spelled
UNUSED = {
    f"{HYDRA_PREFIX}.embed_tokens.weight",  # the layer is fed with states
    f"{HYDRA_PREFIX}.layers.0.self_attn.rotary_emb.inv_freq",
}
LLAMA_LAYER = [
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
]


def is_hydra(stored: Stored) -> bool:
    """Whether this is a published Hydra head."""
    return any(name.startswith("hydra_") for name in (*stored.config, *stored.tensors))


def from_hydra(stored: Stored, target: Target | None) -> Stored:
    """K, L and whether there is a prefix layer are told by the names; the sizes of that layer are
    the target's.
    """
    for key, allowed in CONFIG.items():
        value = stored.config.get(key, allowed[0])
        if value not in allowed:
            raise stored.refuse(
                f"expected {key} to be {' or '.join(map(str, allowed))}, got {value!r}; such Hydra "
                "heads are not read, train one of kind sequential instead"
            )
    tensors = {name: each for name, each in stored.tensors.items() if name not in UNUSED}
    has_prefix = any(name.startswith(HYDRA_PREFIX) for name in tensors)
    ours = dict(_names(set(tensors), has_prefix))
    stored.having(stored.config, tensors).check_names(set(ours))
    config = {
        "norm_embeddings": False,
        "prefix_layer": _layer_of(stored, target) if has_prefix else None,
        "draftheads": {
            "kind": "sequential",
            "target": {"name": stored.config.get("base_model_name_or_path", "its target")},
        },
    }
    return stored.having(config, {ours[name]: each for name, each in tensors.items()})


def _names(got: set[str], has_prefix: bool) -> Iterator[tuple[str, str]]:
    """Each name that a file with the K and L of this one has, and ours for it. Heads behind a
    prefix layer have dropout, a module without tensors, in front of every other module.
    """
    step, first, last = (2, 1, ".1") if has_prefix else (1, 0, "")
    depth = count_of(got, r"hydra_\w+\.(\d+)\.")
    layers = count_of(got, r"hydra_mlp\.\d+\.(\d+)\.linear\.")
    for k in range(depth):
        yield f"hydra_lm_head.{k}{last}.weight", f"lm_heads.{k}.weight"
        yield f"hydra_lm_head.{k}{last}.bias", f"biases.{k}"
        for part in ("weight", "bias"):
            yield f"hydra_mlp.{k}.{first}.res_connection.{part}", f"blocks.{k}.residual.{part}"
            for j in range(layers):
                theirs = f"hydra_mlp.{k}.{first + step * j}.linear.{part}"
                yield theirs, f"blocks.{k}.layers.{j}.{part}"
    if has_prefix:
        yield f"{HYDRA_PREFIX}.norm.weight", "prefix.norm.weight"
        for part in LLAMA_LAYER:
            yield f"{HYDRA_PREFIX}.layers.0.{part}.weight", f"prefix.layer.{part}.weight"


def _layer_of(stored: Stored, target: Target | None) -> dict[str, Any]:
    """config.json keys of a layer like the target's own."""
    if target is None:
        name = stored.config.get("base_model_name_or_path", "the target")
        raise stored.refuse(
            "expected the target, whose sizes this head's prefix layer has, got none; load "
            f"{name} and pass it: load_head(..., target=target)"
        )
    rope = getattr(target.config, "rope_parameters", None) or {}
    shape = LayerShape.of(target, {}).config()
    return {**shape, "rope_parameters": rope.get("full_attention", rope)}
