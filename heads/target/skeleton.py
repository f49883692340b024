"""A target without its layers: embeddings, final norm and lm_head, read by name from a checkpoint
of any size. It trains heads from features that others computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from draftheads.heads.target.placement import (
    Loading,
    default_device,
    read_config,
    read_generation_config,
    reading,
    stored_file,
)
from draftheads.heads.target.pretrained import outside, release

ALIASES = {"lm_head.weight": "embed_out.weight", "embed_tokens.weight": "word_embeddings.weight"}
"""Names in checkpoints that transformers converts."""
ELSEWHERE = ("layers.", "visual.", "vision", "audio", "mtp.", "draft")
"""Parts of the names of tensors that are not the decoder's own."""


def load_skeleton(path: str, how: Loading) -> PreTrainedModel:
    """A causal LM whose layers were never loaded.

    Of a checkpoint on the Hub, only the files with these tensors are downloaded. Raises ValueError
    for a checkpoint that has not got them, or has them quantised.
    """
    revision = how.revision
    device = how.device or default_device()
    config = read_config(path, revision)
    saved = config.get_text_config(decoder=True).dtype or torch.float32
    kind = getattr(torch, how.dtype, torch.float32 if device == "cpu" else saved)
    with reading(path, revision), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=kind, trust_remote_code=False
        )
    generation = read_generation_config(path, revision)
    if generation is not None:
        model.generation_config = generation
    release(model, lm_head=False, layers=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embeddings, norm, lm_head = outside(model)
    is_tied = config.get_text_config(decoder=True).tie_word_embeddings
    with torch.no_grad():
        for module in (embeddings, norm) if is_tied else (embeddings, norm, lm_head):
            wanted = {names[id(parameter)]: parameter for parameter in module.parameters()}
            tensors = read_tensors(path, revision, wanted)
            module.to_empty(device=device)
            model._initialize_weights(module)  # buffers, too, which are in no checkpoint
            for name, tensor in tensors.items():
                module.get_parameter(name.rpartition(".")[2]).copy_(tensor)
    if is_tied:
        lm_head.weight = embeddings.weight
    return model.to(kind)


def read_tensors(
    path: str, revision: str | None, wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors by our names. Raises ValueError for missing and quantised ones, and for others than
    the config says.
    """
    files = tensor_files(path, revision)
    tensors = {}
    for name, like in wanted.items():
        theirs = checkpoint_name(name, files, path)
        with reading(path, revision):
            place = stored_file(path, files[theirs], revision)
            assert place is not None
            with safe_open(place, framework="pt") as file:
                tensor = file.get_tensor(theirs)
        scale = theirs.removesuffix("weight") + "weight_scale"
        if not tensor.is_floating_point() or tensor.itemsize < 2 or scale in files:
            raise ValueError(
                f"target {path}: expected {theirs} in floating point, which heads read, got it "
                "quantised; use a checkpoint that does not quantise it"
            )
        if tensor.shape != like.shape:
            raise ValueError(
                f"target {path}: expected {theirs} of shape {tuple(like.shape)}, got "
                f"{tuple(tensor.shape)}; download it again, or fix its config.json"
            )
        tensors[name] = tensor
    return tensors


def tensor_files(path: str, revision: str | None) -> dict[str, str]:
    """Which file of a checkpoint has which tensor. Raises ValueError where none is safetensors."""
    with reading(path, revision):
        if index := stored_file(path, SAFE_WEIGHTS_INDEX_NAME, revision):
            return dict(json.loads(Path(index).read_bytes())["weight_map"])
        if single := stored_file(path, SAFE_WEIGHTS_NAME, revision):
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    raise ValueError(
        f"target {path}: expected safetensors, got none; save it with save_pretrained first"
    )


def checkpoint_name(name: str, files: Mapping[str, str], path: str) -> str:
    """The checkpoint's name for our parameter: the same, or with another prefix, as multimodal
    checkpoints and those of the decoder alone have it.
    """
    if name in files:
        return name
    short = name.removeprefix("model.")
    ends = (short, ALIASES.get(short, short))
    found = [
        each
        for each in files
        if each in ends or each.endswith(tuple(f".{end}" for end in ends))
        if not any(part in each for part in ELSEWHERE)
    ]
    if len(found) != 1:
        raise ValueError(
            f"target {path}: expected one tensor {name} in its safetensors, found "
            f"{', '.join(sorted(found)[:3]) or 'none'}; download it again"
        )
    return found[0]
