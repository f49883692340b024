"""A target's checkpoint with a head as its MTP layer, as engines load it: `convert --to mtp`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from draftheads.heads.files import read_json, staged, write_text
from draftheads.heads.mtp import MtpHead
from draftheads.heads.mtp_checkpoint import BLOCK, FAMILIES, Family, NoLayer, places_of
from draftheads.heads.pretrained import decoder_layers
from draftheads.heads.skeleton import tensor_files
from draftheads.heads.target import Target
from draftheads.heads.target_layer import empty_model, text_config

NEW = "model-mtp.safetensors"
"""The file of a layer that the checkpoint did not have, beside others."""
CONFIG = "config.json"
STATES_FIRST = "mtp_hidden_states_first"


def write_target(head: MtpHead, target: Target, out: Path, *, link: bool = False) -> None:
    """Write the target's folder with this head as its MTP layer, in the place of the one that it
    has, if any. link: files that stay are hard links.

    Raises ValueError for a head of another shape than the layer in the checkpoint.
    """
    source = _folder(target)
    files = tensor_files(str(source), None)
    family, places = _family(files, target)
    dtype = target.model.get_input_embeddings().weight.dtype
    tensors = {
        places.get(name) or family.theirs(name, target.layers): x.to("cpu", dtype).contiguous()
        for name, x in _stored(head).items()
    }
    _check(target, files, places, tensors)
    new_file = SAFE_WEIGHTS_NAME if SAFE_WEIGHTS_NAME in files.values() else NEW
    by_file: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(files.get(name, new_file), {})[name] = tensor
    with staged(out) as folder:
        for path in source.iterdir():
            if path.is_file() and path.name not in by_file:
                _copy(path.resolve(), folder / path.name, link=link)
        for name, changed in by_file.items():
            old = load_file(source / name) if (source / name).exists() else {}
            save_file(old | changed, folder / name, metadata={"format": "pt"})
        _write_index(folder, files, by_file)
        _write_config(folder, family, head)


def _folder(target: Target) -> Path:
    """The target's files on this machine."""
    path = Path(str(target.name)).expanduser()
    if path.is_dir():
        return path
    return Path(snapshot_download(str(target.name), revision=target.revision))


def _family(files: Iterable[str], target: Target) -> tuple[Family, dict[str, str]]:
    """The layout to write: that of the layer in the checkpoint, with its names, or of the model's
    type; transformers' own for others.
    """
    try:
        return places_of(files, target)
    except NoLayer:
        kind = target.model.config.get_text_config(decoder=True).model_type
        others = (family for family in FAMILIES if kind in family.types)
        return next(others, FAMILIES[0]), {}


def _stored(head: MtpHead) -> dict[str, Tensor]:
    """The head's tensors as checkpoints keep them, each expert alone, say."""
    origin = head.design.origin
    model = empty_model(text_config(origin.config))
    layer = decoder_layers(model)[origin.number]
    prefix = next(name for name, module in model.named_modules() if module is layer)
    tensors = head.state_dict()
    inner = {
        f"{prefix}.{name.removeprefix(BLOCK)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(BLOCK)
    }
    block = revert_weight_conversion(model, inner)
    outer = {name: tensor for name, tensor in tensors.items() if not name.startswith(BLOCK)}
    return outer | {BLOCK + name.removeprefix(f"{prefix}."): x for name, x in block.items()}


def _check(
    target: Target, files: dict[str, str], places: dict[str, str], tensors: dict[str, Tensor]
) -> None:
    """Raise ValueError unless a layer of the checkpoint is replaced as a whole."""
    shared = ("lm_head.", "embed_tokens.")
    old = {theirs for ours, theirs in places.items() if not ours.startswith(shared)}
    faults = [f"{name} in the checkpoint alone" for name in sorted(old - tensors.keys())]
    faults += [f"{name} in the head alone" for name in sorted(tensors.keys() - old)]
    if places and faults:
        raise ValueError(
            f"target {target.name}: expected a head like the MTP layer of its checkpoint, got "
            f"{'; '.join(faults[:2])}; train one with head.from=target"
        )


def _copy(source: Path, place: Path, *, link: bool) -> None:
    if link:
        os.link(source, place)
    else:
        shutil.copyfile(source, place)


def _write_index(
    folder: Path, files: dict[str, str], by_file: dict[str, dict[str, Tensor]]
) -> None:
    """Add the new tensors to the index, if there is one."""
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    if not path.exists():
        return
    index: dict[str, Any] = read_json(path)
    for file, tensors in by_file.items():
        for name, tensor in tensors.items():
            if name not in files:
                index["weight_map"][name] = file
                size = index.setdefault("metadata", {}).get("total_size", 0)
                index["metadata"]["total_size"] = size + tensor.nbytes
    path.unlink()  # it may be a link
    write_text(path, json.dumps(index, indent=2) + "\n")


def _write_config(folder: Path, family: Family, head: MtpHead) -> None:
    """Say that there is a layer, and what its names do not show."""
    path = folder / CONFIG
    config: dict[str, Any] = read_json(path)
    text = config.get("text_config", config)
    before = dict(text)
    text[family.count] = text.get(family.count) or 1
    if head.design.states_first != text.get(STATES_FIRST, family.states_first):
        text[STATES_FIRST] = head.design.states_first
    if text != before:
        path.unlink()  # it may be a link
        write_text(path, json.dumps(config, indent=2) + "\n")
