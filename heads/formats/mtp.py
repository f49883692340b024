"""A target's checkpoint with a head as its MTP layer, as engines load it: `convert --to mtp`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from draftheads.heads.files import CONFIG, read_json, staged, write_json
from draftheads.heads.mtp.checkpoint import BLOCK, NoLayer, aliases_in, in_model, shape_in
from draftheads.heads.mtp.families import FAMILIES, Family, family_of
from draftheads.heads.mtp.head import MtpHead
from draftheads.heads.target.model import Target
from draftheads.heads.target.skeleton import tensor_files
from draftheads.heads.tensors import differences


def write_target(head: MtpHead, target: Target, out: Path) -> None:
    """Write the target's folder with this head as its MTP layer, in the place of the one that it
    has, else in its last file. Its tensors keep their dtype.

    Raises ValueError for a target that is quantised or whose layers no engine expects, and for a
    head that is not like them.
    """
    if target.quantisation:
        raise ValueError(
            f"{target.title}: expected a target that is not quantised, got {target.quantisation}; "
            "pass the model as it was trained"
        )
    source = Path(str(target.name)).expanduser()
    if not source.is_dir():
        source = Path(snapshot_download(str(target.name), revision=target.revision))
    files = tensor_files(str(source), None)
    family, aliases = _family(files, target)
    model, prefix, inner, stored = in_model(head, head.layer_tensors())
    for name, tensor in revert_weight_conversion(model, inner).items():  # each expert alone, say
        stored[BLOCK + name.removeprefix(f"{prefix}.")] = tensor
    _check(head, target, aliases, stored)
    last = max(files.values())
    by_file: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        theirs = aliases.get(name) or family.theirs(name, target.layers)
        file = files.setdefault(theirs, last)
        by_file.setdefault(file, {})[theirs] = tensor.cpu().contiguous()
    with staged(out) as folder:
        for path in source.iterdir():
            if path.is_file() and path.name not in by_file:
                shutil.copyfile(path, folder / path.name)
        for file, changed in by_file.items():
            tensors = load_file(source / file) | changed
            save_file(tensors, folder / file, metadata={"format": "pt"})
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        if index.exists():
            write_json(index, {"metadata": {}, "weight_map": files})
        config = read_json(source / CONFIG)
        config.get("text_config", config)[family.count] = 1
        write_json(folder / CONFIG, config)


def _family(files: Iterable[str], target: Target) -> tuple[Family, dict[str, str]]:
    """The layout to write: that of the layer in the checkpoint, with its names, or of the model's
    type. Raises ValueError for another type.
    """
    try:
        return aliases_in(files, target)
    except NoLayer as error:
        kind = target.config.model_type
        family = family_of(kind)
        if family is None:
            kinds = sorted(kind for family in FAMILIES for kind in family.types)
            raise ValueError(
                f"target {target.name}: expected a target whose MTP layer engines know (of type "
                f"{', '.join(kinds)}, or with one in its checkpoint), got {kind}; decode with the "
                "head's own folder: --head"
            ) from error
        return family, {}


def _check(
    head: MtpHead, target: Target, aliases: dict[str, str], stored: dict[str, Tensor]
) -> None:
    """Raise ValueError unless engines read a layer of this head's shape in this place, which
    replaces all but the copies of the target's own.
    """
    wanted = shape_in(target, aliases or head.layer_tensors())
    its = wanted.design
    mine = head.design
    faults = []
    for what, expected, got in (
        ("model type", its.origin.config["model_type"], mine.origin.config["model_type"]),
        ("state before embedding", its.states_first, mine.states_first),
    ):
        if expected != got:
            faults.append(f"{what}: expected {expected}, got {got}")
    faults += differences(wanted.layer_tensors(), head.layer_tensors())
    old = {name for name in aliases if not name.startswith(("lm_head.", "embed_tokens."))}
    faults += [f"{name}: in the checkpoint alone" for name in sorted(old - stored.keys())]
    if faults:
        raise ValueError(
            f"target {target.name}: expected a head like the MTP layer of its family, got "
            f"{'; '.join(faults[:3])}; train one with head.from=target"
        )
