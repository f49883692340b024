"""`draftheads convert`: a head folder in the layout of another program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftheads.scripts.commands import Device, Dtype, load_target

if TYPE_CHECKING:  # slow to import
    from draftheads.heads.target import Target


def convert(
    source: Annotated[str, typer.Argument(help="a head: folder, run folder or Hub id, any layout")],
    folder: Annotated[Path, typer.Argument(help="folder to write; it must not be there yet")],
    to: Annotated[str, typer.Option("--to", help="draftheads, vllm, sglang, tgi or speculators")],
    target: Annotated[str | None, typer.Option(help="the head's target, if it is needed")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Write a head as vLLM, SGLang, TGI and others read it, or read theirs; weights stay as they
    are, bit by bit. --target is needed where a layout leaves something to the target.
    """
    print(converted(source, folder, to, load_target(target, dtype, device) if target else None))


def converted(source: str | Path, folder: Path, to: str, target: Target | None = None) -> Path:
    """Write `folder` for the program `to`; it appears complete or not at all.

    Raises ValueError for what `to` cannot express and what cannot be read, FileExistsError where
    there is something at `folder`.
    """
    from draftheads.heads.card import render_card, write_remote_code
    from draftheads.heads.files import staged
    from draftheads.heads.formats.stored import Stored, named
    from draftheads.heads.formats.table import written
    from draftheads.heads.hub import CARD, FORMAT, about_target, head_config, open_head

    if folder.exists():
        raise FileExistsError(f"{folder} is there already; choose another folder, or remove it")
    found = open_head(source)
    head, stored = found.read(target)
    recorded = {"name": None, "revision": None, **(stored.facts.get("target") or {})}
    facts = {
        "training": {},
        "measured": [],
        **stored.facts,
        "tree": head.tree.to_json(),
        "format": FORMAT,
        "kind": head.kind,
        "target": about_target(target) if target else recorded,
        "feature_layers": list(head.feature_layers),
    }
    dtypes = [each.dtype for each in stored.tensors.values() if each.is_floating_point()]
    ours = head_config(head, dtypes[0], facts)
    tensors = {name: tensor.contiguous() for name, tensor in stored.tensors.items()}
    with named(found.path):
        if found.facts.get("adapter"):
            raise ValueError(
                "this head was trained with an adapter, which no other layout has; `draftheads "
                "merge` writes the adapted target and its heads first"
            )
        theirs = written(Stored(ours, tensors), to, target)
    with staged(folder) as staging:
        theirs.save(staging)
        (staging / CARD).write_text(render_card(ours) + "\n")
        if to == "tgi" and target is not None and target.tokenizer is not None:
            target.tokenizer.save_pretrained(staging)  # which TGI looks for there
        if to == "draftheads":
            write_remote_code(staging)
    return folder
