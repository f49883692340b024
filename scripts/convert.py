"""`draftheads convert` brings heads into the layout of another program, or into ours; `draftheads
merge` makes one model of a target and the adapter of its heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftheads.scripts.commands import Device, Dtype, MaybeTarget, load_target

if TYPE_CHECKING:
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


DTYPES = ("auto", "float32", "bfloat16", "float16")


def merge(
    head: Annotated[str, typer.Argument(help="head folder, run folder or Hub id, with an adapter")],
    out: Annotated[Path, typer.Argument(help="folder to write: the model, and heads/ in it")],
    target: MaybeTarget = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="of the written model; auto: the target's own")
    ] = "auto",
) -> None:
    """Write the adapted target of Medusa-2 heads as a plain model, with its heads beside it.

    The model is one that any engine loads; its heads are in OUT/heads.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    print(merged(head, out, target, dtype))


def merged(head: str, out: Path, target: str | None, dtype: str) -> Path:
    """Write both; returns the folder of the heads.

    Raises ValueError for heads without an adapter, an existing folder and an unknown dtype.
    """
    import torch
    from transformers import AutoConfig

    from draftheads.heads.files import staged
    from draftheads.heads.hub import open_head, save_head
    from draftheads.heads.target import Target

    folder = open_head(head)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: expected {', '.join(DTYPES)}, got {dtype!r}")
    if folder.adapter is None:
        raise ValueError(f"{head}: expected heads with an adapter/, found none; nothing to merge")
    if out.exists():
        raise ValueError(f"{out} exists already; give a folder that does not")
    name, revision = (target, None) if target else folder.target
    if dtype == "auto":
        own = AutoConfig.from_pretrained(name, revision=revision).get_text_config(decoder=True)
        dtype = str(own.dtype or torch.float32).removeprefix("torch.")
    # float32, so that the sum is rounded once
    model = Target.load(name, dtype="float32", revision=revision).attach(folder.adapter)
    heads = folder.load(model)
    with staged(out) as staging:
        model.model.to(getattr(torch, dtype)).save_pretrained(staging)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(staging)
        facts = folder.facts
        training = {**facts.get("training", {}), "merged_adapter": facts.get("adapter")}
        plain = Target(model.model, name=str(out))
        save_head(heads, staging / "heads", target=plain, training=training)
    return out / "heads"
