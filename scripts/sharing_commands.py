"""`draftheads publish`: what it takes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def publish(
    folder: Annotated[Path, typer.Argument(help="a head folder or a run folder")],
    repo_id: Annotated[str, typer.Argument(help="user/name on the Hub")],
    public: Annotated[bool, typer.Option("--public", help="make a new repository public")] = False,
    revision: Annotated[str, typer.Option("--revision", help="branch to write to")] = "main",
    licence: Annotated[
        str | None, typer.Option("--license", help="of the heads, e.g. apache-2.0")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the files and the card; send nothing")
    ] = False,
) -> None:
    """Upload a checked head folder to the Hub (private unless --public)."""
    from draftheads.scripts.publish import prepare
    from draftheads.scripts.publish import publish as send

    upload = prepare(folder, repo_id, licence=licence)
    for note in upload.notes:
        print(f"note: {note}", file=sys.stderr)
    if dry_run:
        kind = "public" if public else "private"
        print(f"{upload.folder} -> {repo_id} ({kind} if new), branch {revision}; nothing is sent")
        print(f"{upload.listing()}\n\n{upload.card}")
    else:
        print(upload.listing())
        print(send(upload, public=public, revision=revision))
