"""GGUF files as ordinary model folders. What was dequantised is kept in the user's cache, so that
only the first start reads the file itself:

~/.cache/draftheads/gguf/
    4f1c.../          a file's: config, tokenizer, float32 weights
        kept.json     the digest of each of them, written last

An entry is found by what its file contains, not by where it is. Only folders with a kept.json are
ever removed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from shlex import quote

from huggingface_hub.utils import WeakFileLock

from draftheads import __version__
from draftheads.heads.files import read_json, staged, sweep, write_json

logger = logging.getLogger("draftheads")

MOST_BYTES = 20 * 10**9
"""Of all entries."""
KEPT = "kept.json"
SAMPLES = 64
BLOCK = 1 << 16
"""Places at which a large file is read to compare it, and bytes at each; a small one is whole."""


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/draftheads/gguf. Raises RuntimeError for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "draftheads" / "gguf"


def unpacked(file: Path, name: str, unpack: Callable[[Path], None]) -> Path | None:
    """The folder of a GGUF file; None where it cannot be kept: without a home, on a full or
    read-only disk, or beyond MOST_BYTES. unpack: writes what is in the file, once `make_room` has
    returned. name: for people.
    """
    try:
        root = cache_folder()
        folder = root / _key(file)
        if not is_whole(folder):
            logger.warning("%s: reading %s for the first time", name, file.name)
            root.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(root / ".lock"):
                if not is_whole(folder):  # another process may have written it meanwhile
                    sweep(root, "*")
                    _write(folder, unpack)
                    logger.warning(
                        "%s: %.2f GB for the next start in %s (at most %d GB; rm -r %s deletes it)",
                        *(name, _size(folder) / 1e9, root, MOST_BYTES / 1e9, quote(str(root))),
                    )
        if os.access(folder, os.W_OK):
            os.utime(folder)  # the one that was used last is removed last
        return folder
    except (OSError, RuntimeError) as error:
        logger.warning("%s: not kept for the next start: %s", name, error)
        return None


def _write(folder: Path, unpack: Callable[[Path], None]) -> None:
    with staged(folder) as staging:
        unpack(staging)
        write_json(staging / KEPT, {path.name: digest(path) for path in staging.iterdir()})


def make_room(needed: int) -> None:
    """Remove what was used least recently until `needed` bytes fit. Raises OSError where they never
    will, or if the disk is full.
    """
    root = cache_folder()
    entries = [path.parent for path in root.glob(f"*/{KEPT}")]
    entries.sort(key=lambda entry: entry.stat().st_mtime)
    total = sum(map(_size, entries))
    free = shutil.disk_usage(root).free
    if needed > min(MOST_BYTES, free):
        sizes = f"{needed / 1e9:.2f} GB, at most {MOST_BYTES / 1e9:.0f}, {free / 1e9:.2f} free"
        raise OSError(f"{root} has no room for it ({sizes})")
    for entry in entries:
        if total + needed > MOST_BYTES:
            total -= _size(entry)
            shutil.rmtree(entry)


def is_whole(folder: Path) -> bool:
    """Whether an entry is there, with all of its files as they were written."""
    try:
        files = read_json(folder / KEPT)
        return all(digest(folder / name) == value for name, value in files.items())
    except (OSError, ValueError):
        return False


def digest(file: Path) -> str:
    """Hex digits of a file's size and content; of a large one, of its SAMPLES."""
    size = file.stat().st_size
    hashed = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for start in range(0, size, max(BLOCK, size // SAMPLES)):
            opened.seek(start)
            hashed.update(opened.read(BLOCK))
    return hashed.hexdigest()


def _key(file: Path) -> str:
    """The name of a file's entry; another one as soon as other code reads it."""
    facts = [digest(file), file.stat().st_mtime_ns, version("transformers"), __version__]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
