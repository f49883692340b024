"""The folder that distillation writes and training reads.

    manifest.json                   target, prompts, options and counts
    prompts-0123456789ab.txt        the ids of the prompts in order, one per line
    answers-00000-of-00002.jsonl    one line per prompt, one file per process

A line is one of
    {"id": "7f3a...", "tokens": [...], "learn": [[start, end), ...], "turns": 2, "finish": "eos"}
    {"id": "80c1...", "skipped": reason}        {"id": "94d2...", "failed": reason}
or, if the chat template rewrites earlier turns, has several documents
    {"id": "a5e0...", "documents": [{"tokens", "learn", "turns", "finish"}, ...]}
`learn` spans what the target wrote, end token included, and never position 0. `finish` is how the
document's last answer ended, "eos" or "length"; "stopped" is the reason why later turns were not
asked; "retokenized" counts answers that a server returned as text without ids.

An id is a hash of the prompt, so answers stay valid when other prompts are added or removed; lines
of removed prompts are kept and ignored. In folders of format 1 (imported answers, distillations by
earlier versions) ids are the numbers 0, 1, ... A last line without a newline, left by a killed
process, is ignored, and cut off by the next run.
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

BY_NUMBER, BY_CONTENT = 1, 2
"""Formats of a folder: ids are numbers, or hashes."""
MANIFEST = "manifest.json"
ID = re.compile(rb'\{\s*"id":\s*(?:"([^"\\]+)"|([0-9]+))\s*[,}]')
PACKAGES = ("draftheads", "torch", "transformers", "tokenizers")

Record = dict[str, Any]

logger = logging.getLogger("draftheads")


@dataclass(frozen=True)
class Answer:
    """Token ids of one document, and the half-open spans of them to learn: what the target wrote.

    follows: continues the conversation of the previous document.
    """

    tokens: list[int]
    learn: list[tuple[int, int]]
    follows: bool = False


@dataclass
class Counts:
    """Summary counts of a folder."""

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
    """The documents of a line; empty if nothing was answered."""
    documents: list[Record] = record.get("documents", [record] if "tokens" in record else [])
    return documents


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder. Raises ValueError if it is missing, damaged or too new."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder}: expected a distillation folder with {MANIFEST}, found none; "
            "give the folder that `draftheads distill --out` wrote"
        )
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        known = manifest["format"] in (BY_NUMBER, BY_CONTENT)
        range(manifest["prompts"]["count"]), manifest["complete"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected what `draftheads distill` wrote, got a damaged file; copy the "
            "folder again, or distill into another one"
        ) from error
    if not known:
        raise ValueError(
            f"{path}: expected format {BY_NUMBER} or {BY_CONTENT}, got {manifest['format']}; "
            "distill again with this version of draftheads"
        )
    return manifest


def new_manifest(
    target: dict[str, Any], sampling: dict[str, Any], prompts: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """The manifest of an empty folder. prompts: source, count, sha256. more: further entries."""
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
    """Replace the manifest atomically."""
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def read_answers(folder: str | Path) -> Iterator[Answer]:
    """Yield the answers of a folder in the order of their prompts.

    Raises ValueError for a damaged folder; an incomplete one only logs a warning.
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
            "run the same `draftheads distill` again to resume, or train on these answers",
            *(folder, seen, prompts, 100 * seen / prompts),
        )
    elif answered != manifest["counts"]["done"]:
        raise ValueError(
            f"{folder}: expected {manifest['counts']['done']} answered prompts, got {answered}; an "
            "answer file is missing or cut: copy it again, or distill again to fill the gap"
        )


def count(folder: str | Path, manifest: dict[str, Any]) -> Counts:
    """Summary counts of the answer files of a folder."""
    counts = Counts()
    for record in _records(folder, manifest):
        counts.add(record)
    return counts


def journals(folder: str | Path) -> list[Path]:
    """All answer files of a folder."""
    return sorted(Path(folder).glob("answers-*-of-*.jsonl"))


def read_ids(folder: str | Path, manifest: dict[str, Any]) -> Sequence[str | int]:
    """The ids of a folder's prompts, in order."""
    prompts: int = manifest["prompts"]["count"]
    if manifest["format"] == BY_NUMBER:
        return range(prompts)
    path = ids_file(folder, manifest)
    ids = path.read_text().split() if path.is_file() else []
    if len(ids) != prompts:
        raise ValueError(
            f"{path}: expected the ids of {prompts} prompts, got {len(ids)}; copy the folder "
            "again, or run the same `draftheads distill` again"
        )
    return ids


def ids_file(folder: str | Path, manifest: dict[str, Any]) -> Path:
    """The file with the ids of a folder's prompts."""
    return Path(folder) / f"prompts-{manifest['prompts']['sha256'][:12]}.txt"


def locate(folder: str | Path, ids: Sequence[str | int]) -> dict[int, tuple[Path, int]]:
    """Index of each answered prompt in `ids` -> (file, offset in bytes) of its line."""
    indices = {name: index for index, name in enumerate(ids)}
    found: dict[int, tuple[Path, int]] = {}
    for path in journals(folder):
        offset = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break  # the process was killed while it wrote this line
                start = ID.match(line)  # much faster than parsing the whole line
                if start is None:
                    raise _damaged(f"{path} line {number}", line)
                name, index = start.groups()
                place = indices.get(name.decode() if name else int(index))
                if place is not None:
                    found.setdefault(place, (path, offset))
                offset += len(line)
    return found


def _records(folder: str | Path, manifest: dict[str, Any]) -> Iterator[Record]:
    """The lines of the manifest's prompts, in their order."""
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
    """The answer file of one process, open for appending; a context manager.

    Raises OSError for a folder that cannot be written, and ValueError if another launch writes to
    it.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"answers-{rank:05d}-of-{world:05d}.jsonl").open("a+b")
        except OSError as error:
            raise OSError(
                f"--out: expected a folder that can be written, got {folder} ({error.strerror}); "
                "give another one"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for other in journals(folder):  # of a launch with another number of processes
                if not other.name.endswith(f"-of-{world:05d}.jsonl"):
                    with other.open("rb") as file:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(
                f"{folder}: expected to be the only launch that writes to it, found another one; "
                "wait for it, or give another --out"
            ) from error
        self._file.seek(0)
        self._file.truncate(sum(len(line) for line in self._file if line.endswith(b"\n")))

    def append(self, records: Iterable[Record]) -> None:
        """Write lines and flush them to disk."""
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
