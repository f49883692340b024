"""The folder that distillation writes and training reads.

    manifest.json                   which target answered which prompts, how, and how many so far
    prompts-0123456789ab.txt        the ids of these prompts in order, one a line
    answers-00000-of-00002.jsonl    one line per prompt, one file per process

A line is one of
    {"id": "7f3a...", "tokens": [...], "learn": [[start, end), ...], "turns": 2, "finish": "eos"}
    {"id": "80c1...", "skipped": reason}        {"id": "94d2...", "failed": reason}
or, if the chat template rewrites earlier turns, holds several documents
    {"id": "a5e0...", "documents": [{"tokens", "learn", "turns", "finish"}, ...]}
`learn` spans what the target wrote, end token included; position 0 is never in it. `finish` is how
the document's last answer ended, "eos" or "length"; "stopped" says why later turns were not asked;
"retokenized" counts answers that a server gave as text alone.

An id is a hash of the prompt, so answers stay valid when other prompts are added or removed; lines
of prompts that are no longer asked are kept and not read. In folders of format 1 (old
distillations, imported answers) ids are the numbers 0, 1, ... A line without its newline, written
by a killed process, is ignored, and cut off by the next run.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftheads.heads.files import write_text

FORMAT, BY_CONTENT = 1, 2
"""Formats of a folder: ids are numbers, or hashes."""
MANIFEST = "manifest.json"
ID = re.compile(rb'\{\s*"id":\s*(?:"([^"\\]+)"|([0-9]+))\s*[,}]')
OUTAGE = re.compile(rb'\{"id": [0-9]+, "failed": "(HTTP 40[13]\b|.*tried [0-9]+ times"\}$)')
"""Early versions blamed the prompt when the server had failed; such a line is no answer."""
PACKAGES = ("draftheads", "torch", "transformers", "tokenizers")

Record = dict[str, Any]
Id = str | int

logger = logging.getLogger("draftheads")


@dataclass(frozen=True)
class Answer:
    """Token ids of one document, and the half-open spans of them to learn: what the target wrote.

    follows: part of the same conversation as the document before it.
    """

    tokens: list[int]
    learn: list[tuple[int, int]]
    follows: bool = False


@dataclass
class Counts:
    """What a folder holds."""

    done: int = 0  # prompts answered
    documents: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    turns: int = 0  # answers
    cut: int = 0  # documents whose last answer ended by length
    retokenized: int = 0  # answers whose ids were made from text
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        """Count one line."""
        for kind in ("skipped", "failed", "stopped"):
            if kind in record:
                self.reasons[f"{kind}: {record[kind]}"] += 1
        documents = documents_of(record)
        if not documents:
            self.skipped += "skipped" in record
            self.failed += "failed" in record
            return
        self.done += 1
        self.documents += len(documents)
        self.retokenized += record.get("retokenized", 0)
        for document in documents:
            self.tokens += len(document["tokens"])
            self.learned_tokens += sum(end - start for start, end in document["learn"])
            self.turns += document["turns"]
            self.cut += document["finish"] == "length"


def documents_of(record: Record) -> list[Record]:
    """The documents of a line, none where nothing was answered."""
    documents: list[Record] = record.get("documents", [record] if "tokens" in record else [])
    return documents


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder. Raises ValueError if there is none that this version reads."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder}: expected a distillation folder with {MANIFEST}, found none; "
            "give the folder that `draftheads distill --out` wrote"
        )
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        known = manifest["format"] in (FORMAT, BY_CONTENT)
        range(manifest["prompts"]["count"]), manifest["complete"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected what `draftheads distill` wrote, got a damaged file; copy the "
            "folder again, or distill into another one"
        ) from error
    if not known:
        raise ValueError(
            f"{path}: expected format {FORMAT} or {BY_CONTENT}, got {manifest['format']}; "
            "distill again with this version of draftheads"
        )
    return manifest


def new_manifest(
    target: dict[str, Any], sampling: dict[str, Any], prompts: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """A manifest of answers that begin. prompts: source, count, sha256. more: further entries."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "format": BY_CONTENT,
        "target": target,
        "sampling": sampling,
        "prompts": prompts,
        "complete": False,
        "counts": {},
        "threads": torch.get_num_threads(),
        "versions": versions,
        **more,
    }


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest; at every moment a whole one is there."""
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def read_answers(folder: str | Path) -> Iterator[Answer]:
    """Yield a folder's answers in the order of their prompts.

    Raises ValueError for a damaged folder; one that is incomplete only logs a warning.
    """
    manifest = read_manifest(folder)
    seen = answered = 0
    for record in _records(folder, manifest):
        documents = documents_of(record)
        seen += 1
        answered += bool(documents)
        for place, document in enumerate(documents):
            learn = [(start, end) for start, end in document["learn"]]
            yield Answer(document["tokens"], learn, follows=place > 0)
    prompts = manifest["prompts"]["count"]
    if not manifest["complete"]:
        logger.warning(
            "%s is incomplete: %d of %d prompts (%.0f%%) are done; "
            "run the same `draftheads distill` again to resume, or train on what is there",
            *(folder, seen, prompts, 100 * seen / prompts),
        )
    elif answered != manifest["counts"]["done"]:
        raise ValueError(
            f"{folder}: expected {manifest['counts']['done']} answered prompts, got {answered}; an "
            "answer file is missing or cut: copy it again, or distill again to fill the gap"
        )


def count(folder: str | Path, manifest: dict[str, Any]) -> Counts:
    """Count what the answer files of a folder hold."""
    counts = Counts()
    for record in _records(folder, manifest):
        counts.add(record)
    return counts


def journals(folder: str | Path) -> list[Path]:
    """All answer files of a folder."""
    return sorted(Path(folder).glob("answers-*-of-*.jsonl"))


def read_ids(folder: str | Path, manifest: dict[str, Any]) -> Sequence[Id]:
    """The ids of a folder's prompts, in order."""
    prompts: int = manifest["prompts"]["count"]
    if manifest["format"] == FORMAT:
        return range(prompts)
    path = _ids_file(Path(folder), manifest)
    ids = path.read_text().split() if path.is_file() else []
    if len(ids) != prompts:
        raise ValueError(
            f"{path}: expected the ids of {prompts} prompts, got {len(ids)}; copy the folder "
            "again, or run the same `draftheads distill` again"
        )
    return ids


def write_ids(folder: Path, manifest: dict[str, Any], ids: Sequence[Id]) -> None:
    """Write the ids of the prompts that a manifest of format 2 counts; call it before the manifest
    is written.
    """
    path = _ids_file(folder, manifest)
    if manifest["format"] == BY_CONTENT and not path.is_file():
        write_text(path, "".join(f"{name}\n" for name in ids))


def _ids_file(folder: Path, manifest: dict[str, Any]) -> Path:
    return folder / f"prompts-{manifest['prompts']['sha256'][:12]}.txt"


def locate(folder: str | Path, ids: Sequence[Id]) -> dict[int, tuple[Path, int]]:
    """Where the answers are: index of the prompt in `ids` -> (file, offset in bytes)."""
    indices = {name: index for index, name in enumerate(ids)}
    found: dict[int, tuple[Path, int]] = {}
    for path in journals(folder):
        offset = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break  # the process was killed while it wrote this line
                start = ID.match(line)  # much faster than to parse all of the line
                if start is None:
                    raise _damaged(f"{path} line {number}", line)
                name, index = start.groups()
                place = indices.get(name.decode() if name else int(index))
                if place is not None and not OUTAGE.match(line):
                    found.setdefault(place, (path, offset))
                offset += len(line)
    return found


def _records(folder: str | Path, manifest: dict[str, Any]) -> Iterator[Record]:
    """The lines of the prompts that are asked, in their order."""
    found = locate(folder, read_ids(folder, manifest))
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb")) for path in journals(folder)}
        for _, (path, offset) in sorted(found.items()):
            files[path].seek(offset)
            line = files[path].readline()
            try:
                record: Record = json.loads(line)
            except ValueError as error:
                raise _damaged(f"{path} byte {offset}", line) from error
            yield record


def _damaged(where: str, line: bytes) -> ValueError:
    return ValueError(
        f"{where}: expected an answer as JSON, got {line[:40]!r}; "
        "delete this line and run the same `draftheads distill` again"
    )


class Journal:
    """One process's answer file, open for appending; a context manager.

    Raises ValueError if another launch writes into the folder.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        path = folder / f"answers-{rank:05d}-of-{world:05d}.jsonl"
        path.touch()
        self._file = path.open("r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for other in journals(folder):  # of a launch with another number of processes
                if not other.name.endswith(f"-of-{world:05d}.jsonl"):
                    with other.open("rb") as file:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(
                f"{folder}: another process distils into it; wait for it, or give another --out"
            ) from error
        self.cut(sum(len(line) for line in self._file if line.endswith(b"\n")))

    def cut(self, offset: int) -> None:
        """Forget everything after `offset` bytes."""
        self._file.truncate(offset)
        self._file.seek(offset)

    def tell(self) -> int:
        """The offset, in bytes, after the last line."""
        return self._file.tell()

    def append(self, records: Iterable[Record]) -> None:
        """Write lines and flush them to the disk."""
        try:
            self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:  # it does not name the file
            reason = f"{error.strerror}; free space and run the same command again"
            raise OSError(error.errno, f"{self._file.name}: {reason}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
