"""The folder that distillation writes and training reads.

    manifest.json                           target, prompts, options, counts, shards
    answers-DIGEST-00000-of-00003.arrow     documents in the order of prompts (`data.shards`)
    rest-0123456789abcdef.arrow             prompts without an answer, and why; removed prompts
    README.md                               a card, for `datasets.load_dataset(FOLDER)` and the Hub
    prompts-0123456789ab.txt                the ids of the prompts in order, one per line
and until all prompts are answered
    answers-00000-of-00002.jsonl            the newest answers, a line per prompt; one per process
A line is one of
    {"id": "7f3a...", "tokens": [...], "learn": [[start, end), ...], "turns": 2, "finish": "eos"}
    {"id": "80c1...", "skipped": reason}        {"id": "94d2...", "failed": reason}
or, if the chat template rewrites earlier turns, has several documents
    {"id": "a5e0...", "documents": [{"tokens", "learn", "turns", "finish"}, ...]}
`learn` spans what the target wrote, end token included, and never position 0. `finish` is how the
document's last answer ended, "eos" or "length"; "stopped" is the reason why later turns were not
asked; "retokenized" counts answers that a server returned as text without ids.

An id is a hash of the prompt, so answers stay valid when other prompts are added or removed; those
of removed prompts are kept and ignored. A last line without a newline, left by a killed process, is
ignored, and cut off by the next run.

A file gets its name when it is whole, the manifest after the shards that it lists, and what they
replace is deleted after that. So whatever a killed process leaves holds each answer at least once,
and the first one of an id counts. A shard's name contains the digest of the data, the name of the
rest a hash of its ids: equal names mean equal content. The manifest has the size and the SHA-256 of
each file. A file that differs is not trained on, and its prompts are answered again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from draftheads.arguments import expected
from draftheads.heads.files import naming, sweep, write_json, write_text
from draftheads.train.data.shards import (
    SCHEMA,
    Array,
    Shard,
    digest,
    read_batch,
    rows_of,
    to_batch,
    write_batch,
    write_error,
)
from draftheads.train.data.shards import Record as Record

FORMAT: Literal[3] = 3
MANIFEST = "manifest.json"
LOCK_SECONDS = 1800.0
"""Longest wait for another process that brings answers into shards."""
PROBE_SECONDS = 0.2
"""A lock that is held for longer is no other process's `is_open`."""
ID = re.compile(rb'\{\s*"id":\s*"([^"\\]+)"\s*[,}]')
COLUMNS = re.compile(r"(answers-[0-9a-f]{16}-\d{5}-of-\d{5}|rest-[0-9a-f]{16})\.arrow")
LINES = re.compile(r"answers-\d{5,}-of-\d{5,}\.jsonl")
CARD = "README.md"
CARD_TEXT = """---
configs:
- config_name: default
  data_files: answers-*.arrow
tags:
- draftheads
---

# Answers of {name}

Token ids to train draft heads on. `learn` holds the half-open spans of `tokens` that the model
wrote; manifest.json says how many and how they were made.
"""
REPAIR = "copy it again, or run the same `draftheads distill` again, which answers its prompts anew"
PACKAGES = ("draftheads", "torch", "transformers", "tokenizers")
SHARD_TOKENS = 1 << 25
"""Tokens of a shard: 128 MB."""
BATCH_BYTES = 1 << 26
"""Bytes of lines that become columns together."""

logger = logging.getLogger("draftheads")

Entry = dict[str, Any]
"""A part of a new manifest."""


@dataclass(frozen=True)
class Answer:
    """Token ids of one document, and the half-open spans of them to learn: what the target wrote.

    follows: continues the conversation of the previous document.
    """

    tokens: list[int]
    learn: list[tuple[int, int]]
    follows: bool = False


Size = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    """A part of a manifest. What was set or read is written, defaults are not."""

    model_config = ConfigDict(strict=True, extra="allow")


class Counts(_Section):
    """Summary counts of a folder."""

    done: Size = 0  # prompts answered
    documents: Size = 0
    skipped: Size = 0
    failed: Size = 0
    tokens: Size = 0
    learned_tokens: Size = 0
    turns: Size = 0  # answers
    cut: Size = 0  # documents whose last answer ended by length
    retokenized: Size = 0  # answers whose ids were made from text
    reasons: Counter[str] = Field(default_factory=Counter)

    def lines(self) -> list[str]:
        """For people: what there is to learn, then why some is not."""
        mean = self.learned_tokens / max(1, self.turns)
        lines = [
            f"{self.documents:,} documents of {self.tokens:,} tokens, {self.learned_tokens:,} to "
            f"learn in {self.turns:,} answers, {mean:.1f} on average; {self.cut:,} cut by length",
            f"{self.skipped:,} prompts skipped, {self.failed:,} failed",
        ]
        if self.documents > self.done:
            lines.append(
                f"{self.done:,} conversations became {self.documents:,} documents, because the "
                "chat template rewrites earlier turns. They have "
                f"{self.tokens / self.learned_tokens:.1f} tokens for each that is learned; "
                "training reads the prefixes that they share once"
            )
        return lines + [f"  {number:,} {why}" for why, number in self.reasons.most_common()]


class _Served(_Section):
    urls: list[str] = []
    model: str
    context: Size


class _Target(_Section):
    name: str
    revision: str | None = None
    lora: str | None = None
    fingerprint: str | None = None
    dtype: str | None = None
    server: _Served | None = None


class _Sampling(_Section):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    template_args: dict[str, Any] = {}
    reasoning: str | None = None


class _Prompts(_Section):
    source: str = ""
    count: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{12,}$")]  # part of a file's name


class _File(_Section):
    name: Annotated[str, Field(pattern=f"^{COLUMNS.pattern}$")]
    bytes: Size
    sha256: str
    documents: Size = 0
    tokens: Size = 0
    learned_tokens: Size = 0
    largest_token: Size


class Manifest(_Section):
    """The record that a folder has of itself, as in its file."""

    format: Literal[3] = FORMAT
    target: _Target
    sampling: _Sampling
    prompts: _Prompts
    complete: bool
    counts: Counts
    versions: dict[str, str] = {}
    seed: int | None = None
    batch_size: int | None = None
    text: dict[str, str] = {}  # what makes token ids, as digests
    imported: dict[str, Any] | None = None  # whether the answers of an import were checked
    digest: str = ""
    shards: list[_File] = []
    rest: list[_File] = []

    @property
    def has_shards(self) -> bool:
        """True if the answers are in shards: the folder is finished."""
        return "shards" in self.model_fields_set

    @property
    def files(self) -> list[_File]:
        """All that it lists."""
        return [*self.shards, *self.rest]

    def as_written(self) -> Entry:
        """The content of its file."""
        return self.model_dump(exclude_unset=True)

    @model_validator(mode="after")
    def _is_whole(self) -> Manifest:
        fields = {"digest", "shards", "rest"} & self.model_fields_set
        if len(fields) not in (0, 3):
            raise ValueError(f"expected digest, shards and rest, got {' and '.join(fields)} alone")
        return self


def has_answers(folder: Path) -> bool:
    """True if training can read this folder."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: str | Path) -> Manifest:
    """A folder's manifest. Raises ValueError if it is missing, damaged or of another format."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder}: expected a distillation folder with {MANIFEST}, found none; "
            "give the folder that `draftheads distill --out` wrote"
        )
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path}: {_complaint(error)}") from error


def _complaint(error: Exception) -> str:
    """Says what is wrong with a manifest, and what to do."""
    reason = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        if first["type"] == "literal_error":  # of `format`, the only literal
            return f"expected format {FORMAT}, got {first['input']!r}; distil again"
        reason = (
            f"{'.'.join(map(str, first['loc']))}: {expected(first['msg'])}, got {first['input']!r}"
        )
    return (
        f"expected format {FORMAT} as `draftheads distill` writes it, got a damaged file "
        f"({' '.join(reason.split())[:120]}); copy the folder again, or distill into another one"
    )


def new_manifest(target: Entry, sampling: Entry, prompts: Entry, **more: Any) -> Manifest:
    """The manifest of an empty folder. prompts: source, count, sha256. more: further entries."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    return Manifest(
        format=FORMAT,
        target=_Target(**target),
        sampling=_Sampling(**sampling),
        prompts=_Prompts(**prompts),
        complete=False,
        counts=Counts(),
        versions=versions,
        **more,
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest atomically."""
    write_json(folder / MANIFEST, manifest.as_written())


def open_shards(folder: str | Path) -> tuple[list[Shard], Manifest]:
    """The documents of a folder in the order of their prompts, and its manifest.

    A finished folder is memory-mapped, others are read. Raises ValueError for a damaged folder; an
    incomplete one only logs a warning.
    """
    manifest = read_manifest(folder)
    if manifest.has_shards:
        _compare(folder, manifest.shards, by_content=False)
        return [Shard.open(Path(folder) / file.name) for file in manifest.shards], manifest
    contents = _Contents.read(folder, manifest)
    prompts = manifest.prompts.count
    seen = contents.answered + len(contents.refused)
    if not manifest.complete:
        logger.warning(
            "%s is incomplete: %d of %d prompts (%.0f%%) are done; "
            "run the same `draftheads distill` again to resume, or train on these answers",
            *(folder, seen, prompts, 100 * seen / max(1, prompts)),
        )
    return [Shard(batch) for batch in contents.batches(contents.documents)], manifest


def verify(folder: str | Path, manifest: Manifest) -> None:
    """Compare the files of a finished folder with size and checksum in its manifest. Raises
    ValueError naming those that differ.
    """
    _compare(folder, manifest.files)


def _compare(folder: str | Path, files: Sequence[_File], *, by_content: bool = True) -> None:
    faults = _faults(folder, files, by_content=by_content)
    if listed := "; ".join(f"{path}: {fault}" for path, fault in faults):
        raise ValueError(f"{listed}; {REPAIR}")


def check(folder: str | Path) -> Counts:
    """Compare all that a folder says of itself: sizes, checksums, spans, token ids, and the digest
    of the data. Returns its counts. Raises ValueError for the first thing that differs.
    """
    manifest = read_manifest(folder)
    verify(folder, manifest)
    shards, _ = open_shards(folder)
    if manifest.has_shards and (actual := digest(shards)) != manifest.digest:
        raise ValueError(
            f"{folder}: expected data of digest {manifest.digest}, got {actual}; {REPAIR}"
        )
    return count(folder, manifest)


def set_aside(folder: Path, manifest: Manifest) -> None:
    """Rename the damaged files of a finished folder, so that their prompts are answered again."""
    with _locked(folder):
        for path, fault in _faults(folder, manifest.files):
            if path.is_file():  # another process of this launch may have come first
                path.replace(path.with_name(f"{path.name}.damaged"))
                logger.warning("%s: %s; set aside, its prompts are answered again", path, fault)


def delete_records(folder: Path) -> None:
    """Remove the records of a folder without answers that no living process writes to."""
    with _locked(folder):
        for path in [*journals(folder), *columns(folder)]:
            if not is_open(path):
                path.unlink()


def _faults(
    folder: str | Path, files: Sequence[_File], *, by_content: bool = True
) -> Iterator[tuple[Path, str]]:
    """The files that are not as they were written, and what is wrong. by_content: not only sizes
    are compared.
    """
    for file in files:
        path = Path(folder) / file.name
        size = path.stat().st_size if path.is_file() else "no file"
        if size != file.bytes:
            yield path, f"expected {file.bytes} bytes, got {size}"
        elif by_content and (actual := _checksum(path)) != file.sha256:
            yield path, f"expected SHA-256 {file.sha256[:12]}, got {actual[:12]}"


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_answers(folder: str | Path) -> Iterator[Answer]:
    """Yield the answers of a folder in the order of their prompts; errors as `open_shards`."""
    for shard in open_shards(folder)[0]:
        for number, follows in enumerate(shard.follows_D.tolist()):
            tokens_T = shard.read(*shard.bounds_D1[number : number + 2].tolist())
            learn_S2 = shard.learn_S2[slice(*shard.spans_D1[number : number + 2])]
            spans = [(start, end) for start, end in learn_S2.tolist()]
            yield Answer(tokens_T.tolist(), spans, follows)


def count(folder: str | Path, manifest: Manifest) -> Counts:
    """Summary counts of a folder; those of a finished one are in its manifest."""
    if manifest.has_shards:
        return manifest.counts
    return _Contents.read(folder, manifest).counts()


def journals(folder: str | Path) -> list[Path]:
    """The files of lines of a folder."""
    return [path for path in sorted(Path(folder).iterdir()) if LINES.fullmatch(path.name)]


def columns(folder: str | Path) -> list[Path]:
    """The files of columns of a folder."""
    return [path for path in sorted(Path(folder).iterdir()) if COLUMNS.fullmatch(path.name)]


def read_ids(folder: str | Path, manifest: Manifest) -> Sequence[str]:
    """The ids of a folder's prompts, in order."""
    prompts = manifest.prompts.count
    path = ids_file(folder, manifest)
    ids = path.read_text(errors="replace").split() if path.is_file() else []
    if len(ids) != prompts:
        raise ValueError(
            f"{path}: expected the ids of {prompts} prompts, got {len(ids)}; copy the folder "
            "again, or run the same `draftheads distill` again"
        )
    return ids


def ids_file(folder: str | Path, manifest: Manifest) -> Path:
    """The file with the ids of a folder's prompts."""
    return Path(folder) / f"prompts-{manifest.prompts.sha256[:12]}.txt"


def answered(folder: str | Path, ids: Sequence[str]) -> list[int]:
    """Places of the prompts in `ids` that have a record, ascending. Lines are not parsed."""
    names = set[str]()
    for path in journals(folder):
        for number, line in _lines(path):
            start = ID.match(line)  # much faster than parsing the whole line
            if start is None:
                raise _damaged(path, number, line)
            names.add(start[1].decode())
    for path in columns(folder):
        batch = read_batch(path)
        names.update(batch["id"].filter(pc.invert(batch["follows"])).to_pylist())
    return [place for place, name in enumerate(ids) if name in names]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a file, without a last one that a killed process began."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _parse(path: Path) -> Iterator[pa.RecordBatch]:
    """The lines of a file as columns, in batches of bounded size."""
    rows: list[Record] = []
    size = 0
    for number, line in _lines(path):
        try:
            rows += rows_of(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise _damaged(path, number, line) from error
        size += len(line)
        if size > BATCH_BYTES:
            yield to_batch(rows)
            rows = []
            size = 0
    if rows:
        yield to_batch(rows)


def _damaged(path: Path, number: int, line: bytes) -> ValueError:
    return ValueError(
        f"{path} line {number}: expected an answer as JSON, got {line[:40]!r}; "
        "delete this line and run the same `draftheads distill` again"
    )


def is_open(path: Path) -> bool:
    """True if a living process has this file of lines open to append to it."""
    lock = _lock(path)
    _unlock(lock)
    return lock is None


class _Contents:
    """All rows of a folder: in columns, some of them mapped from files.

    documents, refused: rows of the folder's prompts in the order of `ids`, with an answer and
    without. others: rows of prompts that are not asked any more. A row is counted over all batches.
    The first record of an id holds: one row, and those that follow it. Rows that follow one of a
    file that was set aside are no record.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], ids: Sequence[str]) -> None:
        self._table = pa.Table.from_batches(batches, SCHEMA)
        follows = self._table["follows"].to_numpy()
        names = self._table["id"]
        is_other = pc.not_equal(names[1:], names[: len(names) - 1]).to_numpy()
        starts = np.flatnonzero(~follows | np.append(True, is_other)[: len(follows)])
        stops = np.append(starts, len(follows))[1:]
        first: dict[str, int] = {}
        for record, name in enumerate(names.take(pa.array(starts)).to_pylist()):
            if not follows[starts[record]]:
                first.setdefault(name, record)

        def rows(records: Iterable[int]) -> Array:
            spans = [np.arange(starts[record], stops[record]) for record in records]
            return np.concatenate([np.zeros(0, np.int64), *spans])

        self._asked = rows([first.pop(name) for name in ids if name in first])
        self.others = rows(first.values())
        has_answer = self._table["turns"].to_numpy()[self._asked] > 0
        self.documents = self._asked[has_answer]
        self.refused = self._asked[~has_answer]
        self._follows = follows
        self.answered = int((~follows[self.documents]).sum())  # prompts
        self._sizes = pc.list_value_length(self._table["tokens"]).to_numpy().astype(np.int64)

    @classmethod
    def read(cls, folder: str | Path, manifest: Manifest) -> _Contents:
        """Read the contents of an unfinished folder. Lines are read before columns: another process
        may be moving them there.
        """
        lines = [batch for path in journals(folder) for batch in _parse(path)]
        return cls([*map(read_batch, columns(folder)), *lines], read_ids(folder, manifest))

    def counts(self) -> Counts:
        """Summary counts, of the folder's prompts."""
        reasons = self._table["reason"].take(pa.array(self._asked)).drop_null().value_counts()
        why = Counter({entry["values"]: entry["counts"] for entry in reasons.to_pylist()})
        skipped = sum(number for reason, number in why.items() if reason.startswith("skipped: "))
        learned = [shard.learned_D for shard in map(Shard, self._table.to_batches())]

        def total(values: Array) -> int:
            return int(values[self.documents].sum())

        return Counts(
            done=self.answered,
            documents=len(self.documents),
            skipped=skipped,
            failed=len(self.refused) - skipped,
            tokens=total(self._sizes),
            learned_tokens=total(np.concatenate([np.zeros(0, np.int64), *learned])),
            turns=total(self._table["turns"].to_numpy()),
            cut=total(pc.equal(self._table["finish"], "length").to_numpy()),
            retokenized=total(self._table["retokenized"].to_numpy()),
            reasons=why,
        )

    def batches(self, rows: Array) -> Iterator[pa.RecordBatch]:
        """These rows in batches of at most SHARD_TOKENS tokens, or one record: a damaged file has
        no part of a record whose other part is in another file.
        """
        ends = self._sizes[rows].cumsum()
        edges = np.append(np.flatnonzero(~self._follows[rows]), len(rows))
        start = used = 0
        while start < len(rows):
            later = edges[edges > start]
            fitting = later[ends[later - 1] <= used + SHARD_TOKENS]
            stop = int(fitting[-1] if len(fitting) else later[0])
            yield self._take(rows[start:stop])
            start = stop
            used = int(ends[stop - 1])

    def _take(self, rows: Array) -> pa.RecordBatch:
        """These rows as one batch. `pa.Table.take` would first copy all columns into one piece."""
        batches = self._table.to_batches()
        bounds = np.cumsum([0, *map(len, batches)])
        origin = np.searchsorted(bounds, rows, side="right") - 1
        parts = [
            batches[b].take(pa.array(rows[origin == b] - bounds[b])) for b in np.unique(origin)
        ]
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.argsort(origin, kind="stable"))  # from the order of batches
        return pa.concat_batches(parts).take(pa.array(back))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time. Raises TimeoutError if another one does not leave."""
    path = folder / "folder"
    lock = _lock(path)
    if lock is None:
        logger.warning(
            "%s: another process has it; waiting for at most %.0f minutes; end that one, or give "
            "another folder",
            *(folder, LOCK_SECONDS / 60),
        )
        lock = _lock(path, LOCK_SECONDS)
    if lock is None:
        raise TimeoutError(
            f"{folder}: expected other processes to leave it, got one that has held it for "
            f"{LOCK_SECONDS / 60:.0f} minutes; end that one, then run the command again"
        )
    try:
        yield
    finally:
        _unlock(lock)


def _lock(path: Path, seconds: float = PROBE_SECONDS) -> FileLock | None:
    """A lock that this process now holds, and loses when it ends, however it ends. None: another
    one has had it for this long. The lock is a file beside the path, which all can still read on
    Windows.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"), thread_local=False)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return None
    return lock


def _unlock(lock: FileLock | None) -> None:
    """Release a lock and leave no file: who waits for one that is gone makes a new one."""
    if lock is None:
        return
    with suppress(OSError):  # Windows removes no open file
        os.unlink(lock.lock_file)
    lock.release()


def finished(folder: Path, manifest: Manifest) -> bool:
    """True if the folder on disk already holds the answers to this manifest's prompts as shards."""
    if not (folder / MANIFEST).is_file():
        return False
    old = read_manifest(folder)
    if not old.has_shards or old.prompts.sha256 != manifest.prompts.sha256:
        return False
    return all((folder / file.name).is_file() for file in old.shards)


def finish(folder: Path, manifest: Manifest) -> Counts:
    """Count the answers and write the manifest; if none is missing, bring all into shards.

    manifest: of the folder; counts and shards are written into it.
    """
    with _locked(folder):
        if finished(folder, manifest):
            manifest = read_manifest(folder)
        else:
            contents = _Contents.read(folder, manifest)
            counts = contents.counts()
            done = counts.done + counts.skipped + counts.failed
            manifest.complete = done == manifest.prompts.count
            manifest.counts = counts
            if not manifest.complete or not counts.done:
                write_manifest(folder, manifest)
                return counts
            _store(folder, manifest, contents)
        current = {file.name for file in manifest.files}
        for path in [*journals(folder), *columns(folder), *folder.glob(".draft-*.arrow")]:
            if path.name not in current:
                path.unlink()
        sweep(folder, "*.arrow")
    return count(folder, manifest)


def _store(folder: Path, manifest: Manifest, contents: _Contents) -> None:
    """Write the contents as shards, then the manifest, which lists them."""
    drafts = []
    for number, batch in enumerate(contents.batches(contents.documents)):
        drafts.append(folder / f".draft-{number:05d}.arrow")
        write_batch(drafts[-1], batch)
    shards = [Shard(read_batch(draft)) for draft in drafts]
    name = digest(shards)
    files = []
    for number, (draft, shard) in enumerate(zip(drafts, shards, strict=True)):
        path = folder / f"answers-{name}-{number:05d}-of-{len(drafts):05d}.arrow"
        os.replace(draft, path)
        files.append(_described(path, shard))
    rest = []
    for batch in contents.batches(np.append(contents.refused, contents.others)):
        ids = hashlib.sha256("".join(batch["id"].to_pylist()).encode())
        path = folder / f"rest-{ids.hexdigest()[:16]}.arrow"
        write_batch(path, batch)
        rest.append(_described(path, Shard(batch)))
    manifest.digest = name
    manifest.shards = files
    manifest.rest = rest
    if not (folder / CARD).exists():
        write_text(folder / CARD, CARD_TEXT.format(name=manifest.target.name))
    write_manifest(folder, manifest)


def store_batch(folder: Path, manifest: Manifest, batch: pa.RecordBatch) -> Counts:
    """Write a whole folder at once. batch: the rows of all prompts, in their order."""
    contents = _Contents([batch], batch["id"].unique().to_pylist())
    manifest.complete = True
    manifest.counts = contents.counts()
    _store(folder, manifest, contents)
    return manifest.counts


def _described(path: Path, shard: Shard) -> _File:
    return _File(
        name=path.name,
        bytes=path.stat().st_size,
        sha256=_checksum(path),
        documents=len(shard.follows_D),
        tokens=len(shard.tokens_N),
        learned_tokens=int(shard.sizes_S.sum()),
        largest_token=int(shard.tokens_N.max(initial=0)),
    )


class Journal:
    """The answer file of one process, open for appending; a context manager.

    A line survives the process as soon as it is appended, and the machine as soon as the system has
    written it to disk. others: processes that were still writing to the folder when this one left.

    Raises OSError for a folder that cannot be written, and ValueError if another launch writes to
    the same file.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self._path = folder / f"answers-{rank:05d}-of-{world:05d}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        self._lock = _lock(self._path)
        if self._lock is None:
            self._file.close()
            raise ValueError(
                f"{folder}: expected to be the only launch that writes to it, found another one; "
                "wait for it, or give another --out"
            )
        self._file.seek(0)
        self._file.truncate(sum(len(line) for line in self._file if line.endswith(b"\n")))
        self.others = 0

    def append(self, records: Iterable[Record]) -> None:
        """Write lines."""
        try:
            self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
            self._file.flush()
        except OSError as error:
            raise write_error(self._path, error) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, fault: object, *_: object) -> None:
        with _locked(self._path.parent):  # so that one process of a launch is the last
            # what was not written is written once more, and must not hide that it could not be
            with suppress(OSError) if fault else naming(self._path), self._file:
                os.fsync(self._file.fileno())
            _unlock(self._lock)
            self.others = sum(map(is_open, journals(self._path.parent)))
