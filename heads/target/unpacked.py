"""GGUF files as ordinary model folders. What was dequantised is kept in the user's cache, so that
only the first start reads the file itself:

~/.cache/draftheads/gguf/
    4f1c.../          a file's config, tokenizer and weights in float32
        kept.json     the digest of each of them, written last

A folder is found by what the file contains, not by where it is. Only folders with a kept.json are
ever removed.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from shlex import quote

from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from draftheads.heads.files import read_json, remove, staged, sweep, write_json

logger = logging.getLogger("draftheads")

MOST_BYTES = 20 * 10**9
"""Of all folders together."""
KEPT = "kept.json"
SAMPLES = 64
BLOCK = 1 << 16
"""Places at which a large file is compared, and bytes at each."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/draftheads/gguf. Raises RuntimeError for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "draftheads" / "gguf"


def unpacked(file: Path, name: str, unpack: Callable[[Path], None]) -> Path | None:
    """The folder of a GGUF file; None where none can be kept: without a home, on a read-only or
    full disk, or beyond MOST_BYTES.

    name: of the target, for people. unpack: writes what is in the file into a new folder, after
    `make_room`; what it raises besides OSError is raised here.
    """
    try:
        root = cache_folder()
        facts = [digest(file), file.stat().st_mtime_ns, version("transformers")]
        folder = root / hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
        if not is_whole(folder):
            logger.warning("%s: reading %s for the first time", name, file.name)
            root.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(root / ".lock"):
                if not is_whole(folder):  # another process may have written it meanwhile
                    sweep(root, "*")
                    with staged(folder) as staging:
                        unpack(staging)
                        files = {path.name: digest(path) for path in staging.iterdir()}
                        write_json(staging / KEPT, files)
            logger.warning(
                "%s: the next start reads %.2f GB in %s (%.0f GB at most; rm -r %s deletes them)",
                *(name, size_of(folder) / 1e9, root, MOST_BYTES / 1e9, quote(str(root))),
            )
        with suppress(OSError):  # its time says when it was used last; it may be read-only
            os.utime(folder)
        return folder
    except (OSError, RuntimeError) as error:
        logger.warning("%s: the next start will read the file again: %s", name, error)
        return None


def make_room(needed: int) -> None:
    """Remove the folders that were used least recently until `needed` bytes fit. Raises OSError
    where they never will, or do not fit on the disk.
    """
    root = cache_folder()
    if needed > min(MOST_BYTES, shutil.disk_usage(root).free):
        raise OSError(errno.ENOSPC, f"no room for {needed / 1e9:.2f} GB", str(root))
    folders = [path.parent for path in root.glob(f"*/{KEPT}")]
    folders.sort(key=lambda folder: folder.stat().st_mtime)
    while folders and needed + sum(map(size_of, folders)) > MOST_BYTES:
        remove(folders.pop(0))


def is_whole(folder: Path) -> bool:
    """True if a folder is there, with all of its files as they were written."""
    try:
        files = read_json(folder / KEPT)
        return all(digest(folder / name) == value for name, value in files.items())
    except (OSError, ValueError):
        return False


def digest(file: Path) -> str:
    """Hex digits of a file's size and content, of a large one at SAMPLES places."""
    size = file.stat().st_size
    hashed = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for start in range(0, size, max(BLOCK, size // SAMPLES)):
            opened.seek(start)
            hashed.update(opened.read(BLOCK))
    return hashed.hexdigest()


def size_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir())
