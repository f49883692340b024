"""`draftheads convert`: a head folder in the words of another program.

What others cannot be told is an error; nothing is left out in silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftheads.scripts.commands import Device, Dtype, load_target

if TYPE_CHECKING:
    from draftheads.heads.base import DraftHead
    from draftheads.heads.formats.stored import Stored
    from draftheads.heads.target import Target

HELP = "draftheads, vllm, sglang, tgi, speculators, fasterdecoding, eagle or specforge"


def convert(
    source: Annotated[str, typer.Argument(help="a head: folder, run folder or Hub id, any layout")],
    folder: Annotated[Path, typer.Argument(help="folder to write; it must not be there yet")],
    to: Annotated[str, typer.Option("--to", help=HELP)],
    target: Annotated[str | None, typer.Option(help="the head's target, if it is needed")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Write a head as vLLM, SGLang, TGI and others read it, or read theirs; weights stay as they
    are, bit by bit. --target is needed where a layout leaves something to the target.
    """
    print(converted(source, folder, to, load_target(target, dtype, device) if target else None))


def converted(source: str | Path, folder: Path, to: str, target: Target | None = None) -> Path:
    """Write `folder` for the program `to`; it appears whole or not at all.

    Raises ValueError for what `to` cannot be told and what cannot be read, FileExistsError where
    there is something at `folder`.
    """
    from draftheads.heads.card import render_card, write_remote_code
    from draftheads.heads.files import staged
    from draftheads.heads.formats.table import written
    from draftheads.heads.hub import CARD, open_head

    if folder.exists():
        raise FileExistsError(f"{folder} is there already; choose another folder, or remove it")
    head, stored = open_head(source).read(target)
    ours = in_our_words(head, stored, target)
    theirs = written(ours, to, target)
    with staged(folder) as staging:
        theirs.save(staging)
        (staging / CARD).write_text(render_card(ours.config) + "\n")
        if theirs.with_tokenizer and target is not None and target.tokenizer is not None:
            target.tokenizer.save_pretrained(staging)
        if to == "draftheads":
            write_remote_code(staging)
    return folder


def in_our_words(head: DraftHead, stored: Stored, target: Target | None) -> Stored:
    """What `save_head` would write of this head, with what is known of its target and training."""
    from draftheads.heads.hub import FORMAT, about_target

    facts: dict[str, Any] = {
        "training": {},
        "measured": [],
        **stored.facts,
        "tree": head.tree.to_json(),
        "format": FORMAT,
        "kind": head.kind,
        "target": {"name": None, "revision": None, **stored.facts.get("target", {})},
        "feature_layers": list(head.feature_layers),
    }
    if stored.facts.get("adapter"):
        raise stored.refuse(
            "expected a head on a target as it was published, got one with an adapter, which no "
            "layout but ours has; `draftheads merge` writes the adapted target and its heads first"
        )
    if target is not None:
        facts["target"] = about_target(target)
    dtypes = {tensor.dtype for tensor in stored.tensors.values() if tensor.is_floating_point()}
    config = {
        "architectures": [head.architecture],
        **head.config(),
        "dtype": str(dtypes.pop()).removeprefix("torch."),
        "draftheads": facts,
    }
    tensors = {name: tensor.contiguous() for name, tensor in stored.tensors.items()}
    return stored.having(config, tensors)
