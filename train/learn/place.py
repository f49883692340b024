"""Finds and opens the folder in which learning from use keeps the texts and versions of a head.

    NAME-1f2e3d4c/
        texts/        questions and answers
        heads/        heads that learned from them
        target.json   fingerprint of the target whose token ids they are; the head; days of texts

A folder without such a target.json was not made here, and is never changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import AcquireReturnProxy, FileLock, Timeout
from pydantic import PositiveFloat, TypeAdapter, ValidationError

from draftheads.heads.files import write_json
from draftheads.heads.formats.hub import HeadFolder
from draftheads.heads.target.model import Target
from draftheads.heads.target.pretrained import same_weights
from draftheads.train.learn.texts import Texts, delete_older
from draftheads.train.learn.versions import Versions

TEXTS, HEADS, TARGET, LOCK = "texts", "heads", "target.json", ".lock"
WEIGHTS = (".safetensors", ".bin", ".pt")


@dataclass(frozen=True)
class Facts:
    """The content of a target.json. name, fingerprint, quantisation: of the target. head: its
    `address`. keep_days: of texts.
    """

    name: str
    fingerprint: str
    quantisation: str
    head: str = ""
    keep_days: PositiveFloat = 30


_FACTS = TypeAdapter(Facts)


def place_of(folder: HeadFolder, root: Path) -> Path:
    """The folder of a head. If the head's weights change, it gets another folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.path.iterdir()):
        if path.suffix in WEIGHTS:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return root / f"{Path(address(folder)).name}-{digest.hexdigest()[:8]}"


def address(folder: HeadFolder) -> str:
    """The name of a head, which stays the same if its weights change."""
    path = Path(folder.name).expanduser()
    return str(path.absolute()) if path.exists() else folder.name


def hold(folder: Path) -> AcquireReturnProxy[Any]:
    """Locks the folder, so that no other process can open it in this context. Raises ValueError if
    one has it open.
    """
    try:
        return FileLock(folder / LOCK, thread_local=False).acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"{folder}: another process learns there; end it, or choose another --learn-folder"
        ) from None


class HeadStore:
    """A head's folder, open in this process only.

    head: its `address`. Raises ValueError if another process has the folder open, or if it belongs
    to another target or is damaged.
    """

    def __init__(
        self, path: Path, target: Target, *, head: str = "", most_mb: float, keep_days: float
    ) -> None:
        self.path = path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = hold(path).lock
        try:
            facts = Facts(
                str(target.name),
                target.fingerprint(),
                target.quantisation or "none",
                head=head,
                keep_days=keep_days,
            )
            check_facts(path / TARGET, facts)
            write_json(path / TARGET, asdict(facts))
            self.texts = Texts(
                path / TEXTS,
                vocabulary=target.vocab_size,
                most_bytes=int(most_mb * 1e6),
                keep_days=keep_days,
            )
            self.versions = Versions(path / HEADS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes open it."""
        self._lock.release()


def check_facts(path: Path, facts: Facts) -> None:
    """Raise ValueError if there is a record of another target, or a damaged one."""
    if not path.exists():
        return
    try:
        there = _FACTS.validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(
            f"{path}: expected the target of what was learned, got other content; delete "
            f"{path.parent}, or choose another --learn-folder"
        ) from error
    if not same_weights(there.fingerprint, facts.fingerprint):
        difference = f"{there.name} with other weights"
    elif there.quantisation != facts.quantisation:
        difference = f"{there.name} (quantisation: {there.quantisation})"
    else:
        return
    raise ValueError(
        f"{path.parent}: expected what was learned for {facts.name} (quantisation: "
        f"{facts.quantisation}), got {difference}; choose another --learn-folder, or draftheads "
        "forget this one"
    )


def places(root: Path) -> Iterator[tuple[Path, Facts]]:
    """The folders that `HeadStore` made in `root`, each with its target.json."""
    for path in sorted(root.glob(f"*/{TARGET}")):
        with suppress(ValidationError):  # a file of somebody else
            yield path.parent, _FACTS.validate_json(path.read_bytes())


def learning_root(root: Path | None) -> Path:
    """The folder of all heads that learn, by default in the user's data. Deletes expired texts in
    it, except those of a running process, which deletes them itself.
    """
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    root = root or Path(data).expanduser() / "draftheads" / "learned"
    for path, facts in places(root):
        with suppress(ValueError), hold(path):
            delete_older(path / TEXTS, facts.keep_days * 86400)
    return root


def rollback(path: Path) -> int:
    """`Versions.rollback` of a folder that no other process has open."""
    if not (path / HEADS).is_dir():
        raise ValueError(f"{path}: expected a head that has learned, found none there")
    with hold(path):
        return Versions(path / HEADS).rollback()


def delete(path: Path) -> None:
    """Delete the files that a `HeadStore` wrote; other files stay. Raises ValueError if a process
    has it open, and for a symbolic link to a folder of files, before anything is deleted.
    """
    with hold(path):
        folders = [path / TEXTS, path / HEADS]
        for folder in folders:
            if folder.is_symlink():
                raise ValueError(
                    f"{folder}: expected a folder that --learn made, got a symbolic link; delete "
                    "it, and what it leads to, by hand, then run the same command again"
                )
        for folder in folders:
            if folder.is_dir():
                shutil.rmtree(folder)
        (path / TARGET).unlink()  # last, so that an interrupted deletion can continue
    (path / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # it contains files of others
        path.rmdir()
