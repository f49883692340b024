"""An MTP head put back into its target: a copy of the target's checkpoint with the head's tensors
under the names of its family, which engines load as one model.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from draftheads.heads.files import CONFIG, read_json, staged
from draftheads.heads.formats.stored import Stored
from draftheads.heads.mtp import MtpDesign
from draftheads.heads.mtp_checkpoint import DECODER, FAMILIES, Family, as_stored, layers_in
from draftheads.heads.pretrained import describe
from draftheads.heads.skeleton import checkpoint_file, tensor_files
from draftheads.heads.target import Target

SHARD = "model-mtp.safetensors"
"""The file of the head's tensors."""
RENAMED = "model-target.safetensors"
"""The new name of a single file, which an index would not be read beside."""


def family_of(kind: str) -> Family | None:
    """The layout in which engines read an MTP layer of models of this type; None without one."""
    return next((family for family in FAMILIES if kind in family.models), None)


def write_into(stored: Stored, target: Target, out: Path, link: bool) -> None:
    """Write the target's folder with an MTP head of ours, completely or not at all. link: hard
    links instead of copies of files that stay as they are.

    Raises ValueError for a target that is quantised or has a LoRA, whose family has no MTP layers
    or others than this one, and where links are not possible.
    """
    if target.quantisation or target.lora:
        raise ValueError(
            f"expected a target in safetensors as it was trained, got {target.title} "
            f"({target.quantisation or 'with a LoRA'}); pass the original model, or `draftheads "
            "merge` the LoRA first"
        )
    files = tensor_files(str(target.name), target.revision)
    family, layers = layers_in(files, target)
    family = family or family_of(target.config.model_type)
    design = MtpDesign.read(stored.config, stored.tensors)
    _check_family(family, design, target)
    assert family is not None
    base = next(match[1] for name in files if (match := re.match(rf"({DECODER})layers\.", name)))
    tensors = {
        family.theirs(name, target.layers, base): tensor
        for name, tensor in as_stored(design, stored.tensors).items()
    }
    replaced = {name for layer in layers.values() for name in layer.values()}
    place = checkpoint_file(str(target.name), CONFIG, target.revision)
    assert place is not None
    with staged(out) as staging:
        places = _write_others(Path(place).parent, staging, files, replaced, link)
        save_file(tensors, staging / SHARD, metadata={"format": "pt"})
        _write_index(staging, places | dict.fromkeys(tensors, SHARD))
        config = counted(read_json(Path(place)), target.config.model_type, family)
        (staging / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _check_family(family: Family | None, design: MtpDesign, target: Target) -> None:
    """Raise ValueError unless engines can read such a layer in this target."""
    kind = target.config.model_type
    if family is None:
        kinds = sorted({kind for each in FAMILIES for kind in each.models})
        raise ValueError(
            f"{describe(target.model)}: expected a target whose MTP layer engines know "
            f"({', '.join(kinds)}, or any with one in its checkpoint), got {kind}; decode with the "
            "head's own folder: --head"
        )
    states_first = getattr(target.config, "mtp_hidden_states_first", family.states_first)
    theirs = (kind, states_first, family.has_norm, False)
    other = design.origin.config["model_type"]
    ours = (other, design.states_first, design.norm_output, design.bias)
    if theirs != ours:
        raise ValueError(
            "expected a head like the MTP layer of its target (model type, state before embedding, "
            f"norm after the layer, bias: {theirs}), got {ours}; train one with head.from=target"
        )


def _write_others(
    folder: Path, out: Path, files: Mapping[str, str], replaced: set[str], link: bool
) -> dict[str, str]:
    """Write the target's files, without these tensors. Returns the file of each other tensor."""
    places: dict[str, str] = {}
    changed = {files[name] for name in replaced}
    for file in sorted(each for each in folder.iterdir() if each.is_file()):
        if file.name in (CONFIG, SAFE_WEIGHTS_INDEX_NAME):
            continue
        name = RENAMED if file.name == SAFE_WEIGHTS_NAME else file.name
        kept = [each for each in files if files[each] == file.name and each not in replaced]
        places |= dict.fromkeys(kept, name)
        if file.name not in changed:
            _place(file.resolve(), out / name, link)  # files of a Hub cache are symbolic links
        elif kept:
            with safe_open(file, framework="pt") as stored:
                tensors = {each: stored.get_tensor(each) for each in kept}
            save_file(tensors, out / name, metadata={"format": "pt"})
    return places


def _place(file: Path, place: Path, link: bool) -> None:
    if not link:
        shutil.copyfile(file, place)
        return
    try:
        os.link(file, place)
    except OSError as error:
        raise ValueError(
            f"--link: expected a disk on which {place.parent.parent} can link to {file} "
            f"({error.strerror}); leave --link out, which copies"
        ) from error


def _write_index(folder: Path, places: dict[str, str]) -> None:
    """The index of a checkpoint, after its files."""
    size = sum((folder / name).stat().st_size for name in set(places.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def counted(config: dict[str, Any], kind: str, family: Family) -> dict[str, Any]:
    """A target's config.json that tells of one MTP layer."""
    key = "mtp_num_hidden_layers" if kind.startswith("qwen3_5") else "num_nextn_predict_layers"
    if family is FAMILIES[0]:
        key = "num_mtp_layers"
    section = "text_config" if "text_config" in config else None
    text = config[section] if section else config
    text = {**text, key: 1}
    return {**config, section: text} if section else text
