"""`draftheads merge`: a target and the adapter of its heads, as one model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftheads.scripts.commands import MaybeTarget

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
