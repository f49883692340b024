"""Atomic writes of folders and files."""

from __future__ import annotations

import glob
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder next to `folder` that replaces it when the block succeeds, and is deleted
    otherwise. Its files get the mode that the umask gives new ones.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent, glob.escape(folder.name))
    staging = own_name(folder)
    staging.mkdir()
    mode = staging.stat().st_mode & 0o666
    try:
        yield staging
        for path in staging.rglob("*"):
            if path.is_file():
                path.chmod(mode)  # safetensors writes 0600, which no other user could serve
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        if folder.exists():
            old = staging.with_name(f"{staging.name}.old")
            folder.rename(old)
            staging.rename(folder)
            shutil.rmtree(old)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # it no longer exists after the rename


def write_text(path: Path, text: str) -> None:
    """Write a small UTF-8 file under a temporary name, then rename it to `path`."""
    part = own_name(path)
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def own_name(path: Path) -> Path:
    """A hidden name next to `path`, unique to this process."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def sweep(folder: Path, pattern: str) -> None:
    """Remove the temporary files of killed processes of this machine, for paths in `folder` that
    match `pattern`.
    """
    for left in folder.glob(f".{pattern}.{socket.gethostname()}.*"):
        process = left.name.rpartition(".")[2]
        if process.isdecimal() and not _is_running(int(process)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    if process == os.getpid():  # in a container, often the id of the previous launch
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
