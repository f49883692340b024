"""The commands that bring a head to others: merge, convert and publish. Heavy imports wait until a
command runs, so that --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from draftheads.infer.pipeline.loading import Place, load_target
from draftheads.recipes import target_path
from draftheads.scripts.options import (
    HEAD_CHECK,
    NEW_CHECK,
    TARGET_CHECK,
    Device,
    Dtype,
    Dtypes,
    Lora,
    MaybeTarget,
    say_beside,
    say_next,
    target_options,
)
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.formats.facts import HeadFacts


def convert(
    source: Annotated[
        str, Argument(callback=HEAD_CHECK, help="a head: folder, run folder or Hub id, any layout")
    ],
    out: Annotated[Path, Argument(callback=NEW_CHECK, help="new folder, or GGUF file, to write")],
    to: Annotated[
        str,
        Option(
            help="draftheads, vllm, sglang, gguf, openvino, mlx, lmdeploy, speculators or mtp",
        ),
    ],
    target: Annotated[
        str | None, Option(callback=TARGET_CHECK, help="if it is needed; for gguf, its GGUF file")
    ] = None,
    lora: Lora = None,
    dtype: Annotated[
        Literal[Dtypes, "q8_0", "q4_0"],
        Option(help="of the written head; auto: as it is; q8_0 and q4_0 for gguf alone"),
    ] = "auto",
    device: Device = None,
) -> None:
    """Convert a head to or from the layout of vLLM, SGLang, llama.cpp and others, bit by bit.

    --target is needed where a layout leaves something to the target. mtp: the target's checkpoint
    with the head as its own MTP layer.
    """
    from draftheads.heads.formats.hub import CARD, open_head
    from draftheads.heads.formats.llamacpp import QUANTS, TargetFile
    from draftheads.scripts.convert import converted, with_mtp

    if to == "gguf":
        file = TargetFile.open(target_path(target)) if target else None
        say(converted(source, out, to, target_file=file, dtype=dtype))
        say_beside(f"next: the llama-server command in {open_head(source).path / CARD}")
        return
    if dtype in QUANTS:
        raise ValueError(f"--dtype {dtype}: expected --to gguf with it, got --to {to}; use another")
    loaded = None
    if target:
        place = Place(dtype, device, lora=lora)
        loaded = load_target(target, place)
    if to == "mtp":
        say(with_mtp(source, out, loaded, dtype))
        say_next("chat", "--target", out, "--head", "mtp")
        return
    say(converted(source, out, to, loaded, dtype=dtype))
    if to == "draftheads":
        words = target_options(target, lora) or local_options(open_head(source).facts)
        say_next("chat", "--head", out, *words)
    else:
        say_beside(f"next: the command in {out / CARD}")


def merge(
    head: Annotated[
        str,
        Argument(callback=HEAD_CHECK, help="heads with an adapter: folder, run folder or Hub id"),
    ],
    out: Annotated[
        Path, Argument(callback=NEW_CHECK, help="new folder to write: the model, with heads/ in it")
    ],
    target: MaybeTarget = None,
    lora: Lora = None,
    dtype: Dtype = "auto",
) -> None:
    """Write the adapted target of heads (Medusa-2's, or a LoRA's) as a plain model that any engine
    loads.

    Its heads are in OUT/heads. --dtype auto is the target's own.
    """
    from draftheads.scripts.convert import merged

    say(merged(head, out, target, dtype, lora))
    say_next("chat", "--target", out, "--head", out / "heads")


def publish(
    folder: Annotated[Path, Argument(callback=HEAD_CHECK, help="a head folder or a run folder")],
    repo_id: Annotated[str, Argument(help="user/name on the Hub")],
    public: Annotated[bool, Option("--public", help="make the repository public")] = False,
    revision: Annotated[str, Option(help="branch to write to")] = "main",
    licence: Annotated[str | None, Option("--license", help="e.g. apache-2.0")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace another model's files")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="print files and card only")] = False,
) -> None:
    """Upload a checked head folder to the Hub (private unless --public)."""
    from draftheads.heads.formats.hub import open_head
    from draftheads.scripts.publish import prepare
    from draftheads.scripts.publish import publish as upload_files

    upload = prepare(folder, repo_id, licence=licence)
    for note in upload.notes:
        say_beside(f"note: {note}")
    if dry_run:
        kind = "public" if public else "private"
        say(f"{upload.folder} -> {repo_id} ({kind}), branch {revision}; dry run")
        say(f"{upload.listing()}\n\n{upload.card}")
    else:
        say(upload.listing())
        say(upload_files(upload, public=public, revision=revision, overwrite=overwrite))
        head = repo_id if revision == "main" else f"{repo_id}@{revision}"
        say_next("chat", "--head", head, *local_options(open_head(upload.folder).facts))


def local_options(facts: HeadFacts) -> list[str]:
    """The options for a target on this machine, which a head that leaves it does not name."""
    from draftheads.scripts.public import is_local

    names = facts.target.name, facts.target.lora
    return target_options(*names) if any(map(is_local, names)) else []
