"""Atomic writes of folders and files."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from safetensors import SafetensorError

REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
}
"""What to do about a file that could not be written, by error number."""


OLD = ".old"
"""At the end of the name of a folder that is being replaced."""


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
        with naming(folder):
            yield staging
        for path in staging.rglob("*"):
            if path.is_file():
                path.chmod(mode)  # safetensors writes 0600, which no other user could serve
                with path.open("r+b") as file:  # Windows flushes no other
                    os.fsync(file.fileno())
        if folder.exists():
            old = staging.with_name(f"{staging.name}{OLD}")
            folder.rename(old)
            staging.rename(folder)
            remove(old)
        else:
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # it no longer exists after the rename


def remove(folder: Path) -> None:
    """Delete a folder that we made; of a symbolic link in its place, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file under a temporary name that is synced and renamed to `path` when the block succeeds,
    and deleted otherwise.
    """
    with renaming(path) as part, part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def renaming(path: Path) -> Iterator[Path]:
    """A temporary name, for a file that becomes `path` when the block succeeds, and is deleted
    otherwise.
    """
    sweep(path.parent, glob.escape(path.name))
    part = own_name(path)
    try:
        with naming(path):
            yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small UTF-8 file: whole, or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error of the block that names none, as those of a full disk. safetensors'
    become OSErrors.
    """
    try:
        yield
    except SafetensorError as error:
        if not (named := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        number = int(named[1])
        raise OSError(number, os.strerror(number), str(path)) from error
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def remedy(error: Exception) -> str:
    """Advice about a file that could not be written."""
    return REMEDIES.get(getattr(error, "errno", None) or 0, "check this disk")


def own_name(path: Path) -> Path:
    """A hidden name next to `path`, unique to this process."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def sweep(folder: Path, pattern: str) -> None:
    """Remove the temporary files of killed processes of this machine, for paths in `folder` that
    match `pattern`. A folder that was about to be replaced is put back.
    """
    host = socket.gethostname()
    for left in folder.glob(f".{pattern}.{host}.*"):
        name, _, process = left.name.removesuffix(OLD)[1:].rpartition(f".{host}.")
        if not process.isdecimal():
            continue
        # in a container, ours is often the id of the previous launch
        if int(process) != os.getpid() and psutil.pid_exists(int(process)):
            continue
        replaced = folder / name
        with suppress(OSError):  # it may be another user's
            if left.name.endswith(OLD) and not replaced.exists():
                left.rename(replaced)
            elif left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`write_text` of one JSON object."""
    write_text(path, json.dumps(value, indent=2) + "\n")


CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """A file with one JSON object. Raises ValueError for any other content."""
    try:
        value = json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no message names the file
        raise ValueError(
            f"{path}: expected a JSON object, got invalid JSON ({error}); get the folder again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{path}: expected a JSON object, got {str(value)[:60]!r}; get the folder again"
        )
    return value
