"""The folder that distillation writes and training reads.

    manifest.json                   which target answered which prompts, how, and how far it got
    answers-00000-of-00002.jsonl    one line per prompt, whole batches only, one file per process

A line is one of
    {"id": 7, "tokens": [...], "learn": [[start, end), ...], "turns": 2, "finish": "eos" | "length"}
    {"id": 8, "skipped": reason}        {"id": 9, "failed": reason}
or, where a chat template rewrites earlier turns, of several documents
    {"id": 10, "documents": [{"tokens", "learn", "turns", "finish"}, ...]}
`learn` spans what the target wrote, its end token included; position 0 is never in it. `finish`
is how the document's last answer ended; "stopped" is added when later turns could not be asked, and
says why; "retokenized" counts answers that a server gave as text alone.

A batch counts only when all of its lines are there: what a killed process left behind it is
ignored by readers and cut off by the next run.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
MANIFEST = "manifest.json"
Record = dict[str, Any]

logger = logging.getLogger("draftheads")


@dataclass(frozen=True)
class Answer:
    """Token ids of one document and the half-open spans of them that are learned: what the target
    wrote. A conversation is one, or several where its chat template rewrites earlier turns.
    follows: it is of the same conversation as the document before it.
    """

    tokens: list[int]
    learn: list[tuple[int, int]]
    follows: bool = False


@dataclass
class Counts:
    """What a folder holds. done: prompts answered, in so many documents; learned_tokens: the
    target's; turns: answers; cut: documents whose last answer ended by length; retokenized: answers
    whose ids were made from text.
    """

    done: int = 0
    documents: int = 0
    skipped: int = 0
    failed: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    turns: int = 0
    cut: int = 0
    retokenized: int = 0
    batches: set[int] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)

    def numbers(self) -> dict[str, Any]:
        """All but the batches, for the manifest."""
        numbers = {name: value for name, value in vars(self).items() if name != "batches"}
        return numbers | {"reasons": dict(self.reasons)}

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
    """Of a line: the line itself where it is one, none where nothing was answered."""
    documents: list[Record] = record.get("documents", [record] if "tokens" in record else [])
    return documents


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder; ValueError when there is none or it is of another format."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder}: expected a distillation folder with {MANIFEST}, found none; "
            "give the folder that `draftheads distill --out` wrote"
        )
    manifest: dict[str, Any] = json.loads(path.read_bytes())
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected format {FORMAT}, got {manifest.get('format')}; "
            "distill again with this version of draftheads"
        )
    return manifest


def read_answers(folder: str | Path) -> Iterator[Answer]:
    """Yield a folder's answers in the order of their prompts, however many processes wrote it.

    Raises ValueError for a folder without a manifest; a distillation that did not end only logs a
    warning.
    """
    manifest = read_manifest(folder)
    prompts = manifest["prompts"]["count"]
    if not manifest["complete"]:
        counts = count(folder, manifest)
        seen = counts.done + counts.skipped + counts.failed
        logger.warning(
            "%s is incomplete: %d of %d prompts (%.0f%%) are done; "
            "run the same `draftheads distill` again to go on, or train on what is there",
            *(folder, seen, prompts, 100 * seen / prompts),
        )
    return _answers(Path(folder), manifest)


def _answers(folder: Path, manifest: dict[str, Any]) -> Iterator[Answer]:
    streams = [_lines(path, manifest) for path in journals(folder)]
    found = 0
    for record in heapq.merge(*streams, key=lambda record: record["id"]):
        documents = documents_of(record)
        found += bool(documents)
        for place, document in enumerate(documents):
            learn = [(start, end) for start, end in document["learn"]]
            yield Answer(document["tokens"], learn, follows=place > 0)
    if manifest["complete"] and found != manifest["counts"]["done"]:
        raise ValueError(
            f"{folder}: expected {manifest['counts']['done']} answered prompts, got {found}; an "
            "answer file is missing or cut: copy it again, or distill again to fill the gap"
        )


def _lines(path: Path, manifest: dict[str, Any]) -> Iterator[Record]:
    for _, records, _ in complete_batches(path, manifest):
        yield from records


def journals(folder: str | Path) -> list[Path]:
    """All answer files of a folder."""
    return sorted(Path(folder).glob("answers-*-of-*.jsonl"))


def complete_batches(
    path: Path, manifest: dict[str, Any]
) -> Iterator[tuple[int, list[Record], int]]:
    """Yield (batch number, its lines, offset in bytes behind it) up to one that is not whole."""
    size, prompts = manifest["batch_size"], manifest["prompts"]["count"]
    pending: list[Record] = []
    end = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return  # the process was killed while it wrote this line
            end += len(line)
            pending.append(_load(path, number, line))
            batch, place = divmod(pending[-1]["id"], size)
            if place != len(pending) - 1 or batch != pending[0]["id"] // size:
                raise ValueError(
                    f"{path} line {number}: expected the answers of a batch in order, "
                    f"got id {pending[-1]['id']}; delete this file and distill again"
                )
            if len(pending) == min(size, prompts - batch * size):
                yield batch, pending, end
                pending = []


def _load(path: Path, number: int, line: bytes) -> Record:
    try:
        record: Record = json.loads(line)
    except ValueError as error:  # it does not know which file it is in
        raise ValueError(
            f"{path} line {number}: expected an answer as JSON, got {line[:40]!r}; "
            "delete this file and distill again"
        ) from error
    return record


def count(folder: str | Path, manifest: dict[str, Any]) -> Counts:
    """Count what the answer files of a folder hold, whole batches only."""
    counts = Counts()
    for path in journals(folder):
        for batch, records, _ in complete_batches(path, manifest):
            counts.batches.add(batch)
            for record in records:
                counts.add(record)
    return counts


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest so that at every moment a whole one, old or new, is there."""
    temporary = folder / f".{MANIFEST}.{secrets.token_hex(4)}"  # other processes write it too
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)


class Journal:
    """One process's answer file, open for appending whole batches; a context manager."""

    def __init__(self, folder: Path, rank: int, world: int, manifest: dict[str, Any]) -> None:
        path = folder / f"answers-{rank:05d}-of-{world:05d}.jsonl"
        path.touch()
        ends = [end for _, _, end in complete_batches(path, manifest)]
        self._file = path.open("r+b")
        self.cut(ends[-1] if ends else 0)

    def cut(self, offset: int) -> None:
        """Forget everything behind `offset` bytes."""
        self._file.truncate(offset)
        self._file.seek(offset)

    def tell(self) -> int:
        """The offset, in bytes, behind the last batch."""
        return self._file.tell()

    def append(self, records: Iterable[Record]) -> None:
        """Write a batch in one go and see it onto the disk."""
        try:
            self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:  # it does not say of which file it speaks
            reason = f"{error.strerror}; free space and run the same command again"
            raise OSError(error.errno, f"{self._file.name}: {reason}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()
        except OSError:  # it tries once more to write what could not be written
            if kind is None:
                raise
