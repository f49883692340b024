"""Bring heads into the layout of another program or into ours, and merge an adapter with its
target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftheads.arguments import check_new
from draftheads.heads.base import DraftHead
from draftheads.heads.files import staged
from draftheads.heads.formats.card import render_card, write_remote_code
from draftheads.heads.formats.hub import (
    CARD,
    FORMAT,
    about_target,
    open_head,
    save_head,
    stored_head,
    tree_facts,
)
from draftheads.heads.formats.llamacpp import QUANTS, TargetFile, write_gguf
from draftheads.heads.formats.mtp import write_target
from draftheads.heads.formats.stored import Stored, named
from draftheads.heads.formats.table import written
from draftheads.heads.mtp.head import MtpHead
from draftheads.heads.target.model import Target
from draftheads.heads.target.placement import save_model
from draftheads.scripts.public import public_config, public_facts


def converted(
    source: str | Path,
    out: Path,
    to: str,
    target: Target | None = None,
    target_file: TargetFile | None = None,
    dtype: str = "auto",
) -> Path:
    """Write a folder for the program `to`, or a GGUF file, completely or not at all, with what may
    leave of the head's metadata. target_file: the target, for GGUF. dtype: of the weights; auto: as
    they are; for GGUF also one of QUANTS.

    Raises ValueError for what `to` cannot express and what cannot be read, FileExistsError if
    `out` exists.
    """
    check_new(out)
    quant = dtype if to == "gguf" and dtype in QUANTS else None
    folder = open_head(source)
    head, stored = folder.read(target)
    facts = facts_of(head, stored, target, target_file)
    public = public_config(facts)
    # other programs look for a target on this machine by its path, in a key of their own
    known = public if to == "draftheads" else facts
    tensors = stored.tensors if quant else cast(stored.tensors, dtype)
    ours = stored_head(head, tensors, known)
    with named(folder.path):
        if folder.facts.adapter:
            raise ValueError(
                "this head was trained with an adapter, which no other layout has; `draftheads "
                "merge` writes the adapted target and its heads first"
            )
        theirs = written(ours, to, target)
        if to == "gguf":
            if target_file is None:
                raise ValueError("--to gguf needs --target FILE, the target that llama.cpp loads")
            write_gguf(theirs, target_file, out, quant)
            return out
    theirs.config["draftheads"] = {key: public[key] for key in theirs.config["draftheads"]}
    card = render_card({**ours.config, "draftheads": public_facts(facts)}, to)
    with staged(out) as staging:
        theirs.save(staging)
        (staging / CARD).write_text(card + "\n")
        if to == "draftheads":
            write_remote_code(staging)
    return out


def facts_of(
    head: DraftHead, stored: Stored, target: Target | None, target_file: TargetFile | None
) -> dict[str, Any]:
    """Our section of config.json for a head in any layout. Of the target it says what the loaded
    one says, else what was written, with the layers of a GGUF file where they are missing.
    """
    if target is not None:
        origin = about_target(target)
    else:
        origin = {"name": None, "revision": None, **(stored.facts.json.get("target") or {})}
        if target_file is not None:
            origin.setdefault("layers", target_file.layers)
    return {
        "training": {},
        **stored.facts.json,
        **tree_facts(head.tree),
        "format": FORMAT,
        "kind": head.kind,
        "target": origin,
        "feature_layers": list(head.feature_layers),
    }


def cast(tensors: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Weights in another dtype, or, with auto, as they are. Raises ValueError for numbers that it
    cannot hold.
    """
    if dtype == "auto":
        return tensors
    result = {}
    for name, x in tensors.items():
        result[name] = x.to(getattr(torch, dtype)) if x.is_floating_point() else x
        if not result[name].isfinite().all():
            raise ValueError(
                f"--dtype {dtype}: expected numbers that it can hold, got larger ones in {name}; "
                "choose bfloat16 or float32"
            )
    return result


def with_mtp(source: str | Path, out: Path, target: Target | None, dtype: str = "auto") -> Path:
    """Write the target's checkpoint with the head of `source` as its MTP layer. dtype: as for
    `converted`.

    Raises ValueError for a head of another kind and without a target, FileExistsError if `out`
    exists.
    """
    check_new(out)
    if target is None:
        raise ValueError("--to mtp needs --target, the model whose checkpoint gets the head")
    folder = open_head(source)
    if target.lora or folder.adapter:
        raise ValueError(
            "--to mtp: expected a target and a head without an adapter, got one; draftheads merge "
            "writes the adapted target and its heads"
        )
    head, stored = folder.read(target)
    if not isinstance(head, MtpHead):
        raise ValueError(f"--to mtp: expected a head of kind mtp, got {head.kind}")
    head.load_state_dict(cast(stored.tensors, dtype), assign=True)  # not in the target's dtype
    write_target(head, target, out)
    return out


def merged(head: str, out: Path, target: str | None, dtype: str, lora: str | None = None) -> Path:
    """Write the adapted target to `out` and its heads to out/heads, which is returned.

    Raises ValueError for heads whose target has no adapter, FileExistsError if `out` exists.
    """
    folder = open_head(head)
    lora = lora or folder.facts.target.lora
    if folder.adapter is None and lora is None:
        raise ValueError(
            f"{head}: expected heads with an adapter/, or of a target with a LoRA, found neither; "
            "nothing to merge"
        )
    check_new(out)
    name, revision = folder.target if target is None else (target, None)
    # float32, so that the sum is rounded once
    model = Target.load(name, dtype="float32", revision=revision, lora=lora)
    if folder.adapter is not None:
        model.attach(folder.adapter)
    heads = folder.load(model)
    with staged(out) as staging:
        saved = str(model.saved_dtype) if dtype == "auto" else dtype
        save_model(model.model.to(getattr(torch, saved)), model.tokenizer, staging)
        training = {**folder.facts.training, "merged_adapter": folder.facts.adapter}
        plain = Target(model.model, name=str(out))
        save_head(heads, staging / "heads", target=plain, training=public_facts(training))
    return out / "heads"
