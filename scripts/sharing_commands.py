"""`draftheads publish`: what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def publish(
    folder: Annotated[Path, typer.Argument(help="a head folder or a run folder")],
    repo_id: Annotated[str, typer.Argument(help="user/name on the Hub")],
    public: Annotated[bool, typer.Option("--public", help="make a new repository public")] = False,
) -> None:
    """Upload a checked head folder to the Hub (private unless --public)."""
    from draftheads.scripts.publish import publish as run

    print(run(folder, repo_id, public=public))
