"""Answers as columns: Arrow record batches, in files that are memory-mapped, one row per document.

    id           string             of the prompt
    tokens       list<int32>
    learn        list<list<int32>>  half-open spans that the target wrote, ordered and disjoint
    turns        int32              answers in the document; 0: the prompt was not answered
    finish       string             how the last answer ended, "eos" or "length"
    follows      bool               continues the conversation of the previous row
    hash         uint64             of the tokens: equal documents are found without reading them
    reason       string or null     "skipped: ...", "failed: ..." or "stopped: ..."
    retokenized  int32              answers that a server returned as text

The last two are in the first row of an id.

Legend: N tokens, D documents, S spans to learn; of a shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from draftheads.heads.files import remedy, replacing

Record = dict[str, Any]
Array = NDArray[Any]

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "learn": pa.list_(pa.list_(pa.int32())),
        "turns": pa.int32(),
        "finish": pa.string(),
        "follows": pa.bool_(),
        "hash": pa.uint64(),
        "reason": pa.string(),
        "retokenized": pa.int32(),
    }
)
REASONS = ("skipped", "failed", "stopped")


def documents_of(record: Record) -> list[Record]:
    """The documents of a line; empty if nothing was answered."""
    documents: list[Record] = record.get("documents", [record] if "tokens" in record else [])
    return documents


def rows_of(record: Record) -> list[Record]:
    """The rows of a line. Raises ValueError for spans that are not ordered, disjoint and inside."""
    reason = [f"{kind}: {record[kind]}" for kind in REASONS if kind in record]
    once = {"reason": "; ".join(reason) or None, "retokenized": record.get("retokenized", 0)}
    refused = {"tokens": [], "learn": [], "turns": 0, "finish": ""}
    rows = []
    for place, document in enumerate(documents_of(record) or [refused]):
        tokens = np.asarray(document["tokens"], np.int32)
        end = 0
        for start, stop in document["learn"]:
            if not end <= start <= stop <= len(tokens):
                raise ValueError("spans to learn overlap or exceed the tokens")
            end = stop
        row = {name: document[name] for name in ("learn", "turns", "finish")}
        row |= {"id": str(record["id"]), "tokens": tokens, "follows": place > 0}
        rows.append(row | {"hash": content_hash(tokens), "reason": None, "retokenized": 0})
    rows[0] |= once
    return rows


def content_hash(tokens: Array) -> int:
    """64 bits: among 10 M documents, two different ones share it with a probability of 3e-6."""
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


def to_batch(rows: Sequence[Record]) -> pa.RecordBatch:
    """Rows as columns."""
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def write_batch(path: Path, batch: pa.RecordBatch) -> None:
    """Write a file of one batch: whole and on disk, or not at all."""
    try:
        with replacing(path) as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            writer.write_batch(batch)
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path, error: OSError) -> OSError:
    """The error of a file that cannot be written, with the file's name and what to do."""
    advice = f"{remedy(error)}, then run the command again"
    return OSError(error.errno, f"{path}: {error.strerror}; {advice}")


def read_batch(path: Path) -> pa.RecordBatch:
    """The batch of a file; its pages are read when they are touched, and shared by processes."""
    return _mapped(path)[0]


def _mapped(path: Path) -> tuple[pa.RecordBatch, int]:
    """The batch of a file, and the address at which the file begins."""
    try:
        content = pa.memory_map(str(path)).read_buffer()
        with pa.ipc.open_stream(content) as reader:
            batch = reader.read_next_batch()
        if not batch.schema.equals(SCHEMA):
            raise pa.ArrowInvalid(", ".join(batch.schema.names))
        batch.validate(full=True)  # offsets beyond the columns
        _check_spans(batch)
        return batch, content.address
    except (OSError, pa.ArrowInvalid, StopIteration) as error:
        reason = " ".join(str(error).split()) or "an empty file"
        raise ValueError(
            f"{path}: expected answers as Arrow columns, got a damaged file ({reason[:80]}); copy "
            "it again, or delete it and run the same `draftheads distill` again"
        ) from error


def _check_spans(batch: pa.RecordBatch) -> None:
    """Raises ArrowInvalid for missing values, and for spans to learn that are not ordered,
    disjoint and inside of their document, which it names.
    """
    for name in SCHEMA.names:
        if name != "reason" and batch[name].null_count:
            raise pa.ArrowInvalid(f"{name} without a value")
    pairs = batch["learn"].flatten()
    if pairs.flatten().null_count or batch["tokens"].flatten().null_count:
        raise pa.ArrowInvalid("a token or span without a value")
    if pc.any(pc.not_equal(pc.list_value_length(pairs), 2)).as_py():
        raise pa.ArrowInvalid("spans that are no pairs")
    shard = Shard(batch)
    documents_S = np.repeat(np.arange(len(batch)), np.diff(shard.spans_D1))
    firsts_S = shard.bounds_D1[documents_S]
    lasts_S = shard.bounds_D1[documents_S + 1]
    starts_S = shard.starts_S
    stops_S = starts_S + shard.sizes_S
    earliest_S = np.maximum(firsts_S, np.append(0, stops_S[:-1]))
    bad_S = (starts_S < earliest_S) | (stops_S < starts_S) | (stops_S > lasts_S)
    if bad_S.any():
        span = int(bad_S.argmax())
        raise pa.ArrowInvalid(
            f"document {documents_S[span]}: span {shard.learn_S2[span].tolist()} of "
            f"{lasts_S[span] - firsts_S[span]} tokens"
        )


class Shard:
    """Views of a batch, nothing is copied. path: of its file, if it has one; offset: bytes before
    the first token in this file.
    """

    def __init__(self, batch: pa.RecordBatch, path: Path | None = None, offset: int = 0) -> None:
        tokens = batch["tokens"]
        learn = batch["learn"]
        self.batch = batch
        self.path = path
        self._file = pa.OSFile(str(path)) if path else None
        self._offset = offset
        self.tokens_N: Array = tokens.flatten().to_numpy()
        self.bounds_D1: Array = tokens.offsets.to_numpy() - tokens.offsets[0].as_py()
        self.follows_D: Array = batch["follows"].to_numpy(zero_copy_only=False)
        self.learn_S2: Array = learn.flatten().flatten().to_numpy().reshape(-1, 2)
        """Spans, counted from the start of their document."""
        self.spans_D1: Array = learn.offsets.to_numpy() - learn.offsets[0].as_py()
        """Document d has the spans spans_D1[d] to spans_D1[d + 1]."""

    @classmethod
    def open(cls, path: Path) -> Shard:
        """The shard of a file. Raises ValueError if it is damaged."""
        batch, address = _mapped(path)
        values = batch["tokens"].flatten()
        return cls(batch, path, values.buffers()[1].address + 4 * values.offset - address)

    def read(self, start: int, stop: int) -> Array:
        """int32: the tokens of a span of the shard. Raises ValueError if the file was cut.

        Those of a file are read, not mapped: a run reads them for days, and mapped pages that are
        cut from their file kill the process with SIGBUS. The system's cache is shared all the same.
        """
        if self._file is None:
            return self.tokens_N[start:stop]
        content = read_at(self._file, self.path, 4 * (stop - start), self._offset + 4 * start)
        tokens_N: Array = np.frombuffer(content, np.int32)
        return tokens_N

    @property
    def starts_S(self) -> Array:
        """First token of each span, int64, counted from the start of the shard."""
        return (
            np.repeat(self.bounds_D1[:-1].astype(np.int64), np.diff(self.spans_D1))
            + (self.learn_S2[:, 0])
        )

    @property
    def sizes_S(self) -> Array:
        """Tokens of each span."""
        return np.diff(self.learn_S2)[:, 0]

    @property
    def learned_D(self) -> Array:
        """Tokens to learn of each document."""
        totals = np.append(0, self.sizes_S.cumsum())
        return np.diff(totals[self.spans_D1])

    def written(self) -> Array:
        """bool (N): the target wrote this token."""
        steps = np.zeros(len(self.tokens_N) + 1, np.int8)
        starts_S = self.starts_S
        np.add.at(steps, starts_S, 1)
        np.subtract.at(steps, starts_S + self.sizes_S, 1)
        np.cumsum(steps, out=steps)
        return steps[:-1].view(np.bool_)


def read_at(file: pa.NativeFile, path: Path | None, size: int, offset: int) -> bytes:
    """Bytes of a file, which is not mapped. Raises ValueError if it was cut since it was opened."""
    content: bytes = file.read_at(size, offset)
    if len(content) < size:
        raise ValueError(
            f"{path}: expected the file that was opened, got one that was cut since; copy it "
            "again, then run the same command again"
        )
    return content


def digest(shards: Sequence[Shard]) -> str:
    """Hash of tokens, loss mask, documents and conversations, as 16 hex digits."""
    state = hashlib.sha256()
    for shard in shards:
        state.update(shard.tokens_N.data)
    for shard in shards:
        state.update(shard.written().data)
    bounds_D1 = bounds_of(shards)
    state.update(np.stack([bounds_D1[:-1], bounds_D1[1:]], 1).data)
    state.update(np.flatnonzero(np.concatenate([shard.follows_D for shard in shards])).data)
    return state.hexdigest()[:16]


def bounds_of(shards: Iterable[Shard]) -> Array:
    """int64: document d of all has the tokens bounds[d] to bounds[d + 1]."""
    sizes = [np.diff(shard.bounds_D1) for shard in shards]
    return np.concatenate([[0], np.concatenate(sizes).cumsum(dtype=np.int64)])
