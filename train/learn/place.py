"""Where learning from use keeps a head's texts and versions, and what one process opens there.

NAME-1f2e3d4c/
    texts/        what was asked and answered
    heads/        what was learned from it
    target.json   the fingerprint of the target whose token ids they are
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import closing
from pathlib import Path

from filelock import FileLock, Timeout

from draftheads.heads.files import read_json, write_text
from draftheads.heads.formats.hub import HeadFolder
from draftheads.heads.pretrained import same_weights
from draftheads.heads.target import Target
from draftheads.train.learn.texts import Texts
from draftheads.train.learn.versions import Versions

TEXTS, HEADS, TARGET, LOCK = "texts", "heads", "target.json", ".lock"
WEIGHTS = (".safetensors", ".bin", ".pt")


def default_place() -> Path:
    """The folder of all heads that learn, in the user's data."""
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "draftheads" / "learned"


def place_of(folder: HeadFolder, root: Path | None = None) -> Path:
    """The folder of a head: another one once its weights change."""
    digest = hashlib.sha256()
    for path in sorted(folder.path.iterdir()):
        if path.suffix in WEIGHTS:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    name = Path(folder.name).expanduser().absolute().name
    return (root or default_place()) / f"{name}-{digest.hexdigest()[:8]}"


class Lock:
    """A folder that no other process has open. Raises ValueError if one has."""

    def __init__(self, folder: Path) -> None:
        self._file = FileLock(folder / LOCK, thread_local=False)
        try:
            self._file.acquire(blocking=False)
        except Timeout:
            raise ValueError(
                f"{folder}: another process learns there; end it, or choose another --learn-folder"
            ) from None

    def close(self) -> None:
        """Let other processes open it."""
        self._file.release()


class Place:
    """A head's folder, open in this process alone.

    Raises ValueError if another process has it open, if it is of another target, or damaged.
    """

    def __init__(self, path: Path, target: Target, *, most_mb: float, keep_days: float) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = Lock(path)
        try:
            check_target(path / TARGET, target)
            texts = path / TEXTS
            self.texts = Texts(texts, most_bytes=int(most_mb * 1e6), keep_days=keep_days)
            self.versions = Versions(path / HEADS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes open it."""
        self._lock.close()


def check_target(path: Path, target: Target) -> None:
    """Record a target's fingerprint. Raises ValueError for another one than is recorded."""
    if not path.exists():
        facts = {"name": str(target.name), "fingerprint": target.fingerprint()}
        facts["quantisation"] = target.quantisation or "none"
        write_text(path, json.dumps(facts, indent=2) + "\n")
        return
    facts = read_json(path)
    now = target.quantisation or "none"
    if not same_weights(facts.get("fingerprint"), target.fingerprint()):
        difference = f"{facts.get('name')} with other weights"
    elif facts.get("quantisation") != now:
        difference = f"{facts.get('name')} (quantisation: {facts.get('quantisation')})"
    else:
        return
    raise ValueError(
        f"{path.parent}: expected what was learned for {target.name} (quantisation: {now}), got "
        f"{difference}; choose another --learn-folder, or draftheads forget this one"
    )


def rollback(path: Path) -> int:
    """`Versions.rollback` of a folder that no other process has open."""
    if not (path / HEADS).is_dir():
        raise ValueError(f"{path}: expected a head that has learned, found none there")
    with closing(Lock(path)):
        return Versions(path / HEADS).rollback()


def forget(path: Path) -> int:
    """Delete texts and heads; returns the bytes. Raises ValueError if a process has them open."""
    if not path.is_dir():
        return 0
    with closing(Lock(path)):
        size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    shutil.rmtree(path)
    return size
