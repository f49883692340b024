"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends well, and is
    deleted otherwise.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        staging.chmod(0o755)
        yield staging
        for path in staging.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            folder.rename(old / "head")
            staging.rename(folder)
            shutil.rmtree(old)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already when the rename went well
