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

ELSEWHERE = ("layers.", "visual.", "vision", "audio", "mtp.", "draft")
"""Parts of the names of tensors that are not the decoder's own."""


def load_skeleton(path: str, how: Loading) -> PreTrainedModel:
    """A causal LM whose layers were never loaded.

    Of a checkpoint on the Hub, only the files with these tensors are downloaded. Raises ValueError
    for a checkpoint that has not got them, or has them quantised or of other shapes.
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
    is_tied = lm_head.weight is embeddings.weight
    files = tensor_files(path, revision)
    with torch.no_grad():
        for module in (embeddings, norm) if is_tied else (embeddings, norm, lm_head):
            wanted = [names[id(parameter)] for parameter in module.parameters()]
            places = {name: checkpoint_name(name, files, path) for name in wanted}
            tensors = stored_tensors(path, revision, files, places)
            module.to_empty(device=device)
            model._initialize_weights(module)  # buffers, too, which are in no checkpoint
            for name, tensor in tensors.items():
                _fill(model.get_parameter(name), tensor, f"target {path}: expected {places[name]}")
    if is_tied:
        lm_head.weight = embeddings.weight
    return model.to(kind)


def _fill(parameter: Tensor, tensor: Tensor, expected: str) -> None:
    """Copy a stored tensor. Raises ValueError for one of another shape."""
    if tensor.shape != parameter.shape:
        raise ValueError(
            f"{expected} of shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}; download it "
            "again, or fix its config.json"
        )
    parameter.copy_(tensor)


def stored_tensors(
    path: str, revision: str | None, files: Mapping[str, str], places: Mapping[str, str]
) -> dict[str, Tensor]:
    """Tensors of a checkpoint by our names. files: of `tensor_files`; places: name there of each.
    Raises ValueError for quantised ones, and where a file is missing.
    """
    tensors = {}
    for file in {files[theirs] for theirs in places.values()}:
        with reading(path, revision):
            place = stored_file(path, file, revision)
        if place is None:
            raise ValueError(f"target {path}: expected {file}, found none; download it again")
        with reading(path, revision), safe_open(place, framework="pt") as stored:
            for name, theirs in places.items():
                if files[theirs] == file:
                    tensors[name] = stored.get_tensor(theirs)
    for name, tensor in tensors.items():
        scales = {f"{places[name]}_scale", f"{places[name]}_scale_inv"}
        if not tensor.is_floating_point() or tensor.itemsize < 2 or scales & files.keys():
            raise ValueError(
                f"target {path}: expected {places[name]} in floating point of 16 or 32 bits, got "
                "it quantised; use a checkpoint that does not quantise it"
            )
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
    end = name.removeprefix("model.").removeprefix("language_model.")
    found = [
        each
        for each in files
        if f".{each}".endswith(f".{end}")
        if not any(part in each for part in ELSEWHERE)
    ]
    if len(found) != 1:
        raise ValueError(
            f"target {path}: expected one tensor {name} in its safetensors, found "
            f"{', '.join(sorted(found)[:3]) or 'none'}; download it again"
        )
    return found[0]
