"""The promise: whatever becomes of a folder's files, nothing damaged is learned: it is said in one
line, and distilling again mends it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tiny_chat import options, prompts, shuffled
from tiny_training import VOCABULARY, random_answers, tiny_recipe, write_answers, write_target

from draftheads.scripts.cli import main
from draftheads.train.batches import Documents, Order, Rows, Verification
from draftheads.train.data import answers, shards
from draftheads.train.data.answers import check, open_shards, read_answers, read_manifest
from draftheads.train.data.distill import distill
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe

COUNT = 40


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Forty documents in some shards."""
    monkeypatch.setattr(answers, "SHARD_TOKENS", 300)
    return write_answers(tmp_path / "data", random_answers(COUNT))


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("answers-*.arrow"))[number]


def rewrite(path: Path, change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
    """Change a shard as a faulty tool would: the result is a valid file of columns."""
    batch = change(shards.read_batch(path))
    with path.open("wb") as file, pa.ipc.new_stream(file, shards.SCHEMA) as writer:
        writer.write_batch(batch)


def with_column(name: str, value: Any) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Another value in document 2."""

    def change(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = batch.to_pylist()
        rows[2][name] = value
        return pa.RecordBatch.from_pylist(rows, schema=shards.SCHEMA)

    return change


def trusted(folder: Path) -> None:
    """Bring sizes and checksums up to date, as a faulty tool would that also wrote the manifest."""
    manifest = read_manifest(folder)
    for file in manifest.shards:
        content = (folder / file.name).read_bytes()
        file.bytes = len(content)
        file.sha256 = hashlib.sha256(content).hexdigest()
    answers.write_manifest(folder, manifest)


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------- checksums


@pytest.fixture
def recipe(folder):
    write_target(folder.parent / "target")
    values = tiny_recipe(folder.parent, steps=6, tokens_per_step=128, save_every=2)
    path = folder.parent / "recipe.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.mend("answers are compared with their checksums")
def test_shuffled_tokens_end_training_before_a_checkpoint(folder, recipe, tmp_path):
    """A shard of equal size whose token ids were shuffled used to be trained on, and resumed as the
    same data.
    """
    shuffled(shard(folder))
    trained = load_recipe(recipe, [f"run.output={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match=f"{shard(folder).name}: expected SHA-256") as error:
        fit(trained)
    assert "run the same `draftheads distill` again" in one_line(error)
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.mend("answers are compared beside the first steps")
def test_a_run_compares_once_and_goes_on_beside_it(folder, recipe, tmp_path, monkeypatch):
    read: list[Path] = []
    checksum = answers._checksum
    monkeypatch.setattr(answers, "_checksum", lambda path: read.append(path) or checksum(path))
    assert fit(load_recipe(recipe, [f"run.output={tmp_path / 'run'}"])).finished
    assert sorted(read) == sorted(folder.glob("*.arrow"))


def test_a_difference_is_known_before_the_first_save(folder):
    manifest = read_manifest(folder)
    whole = Verification(folder, manifest)
    whole.wait()
    assert not whole.failed
    shuffled(shard(folder))
    damaged = Verification(folder, manifest)
    with pytest.raises(ValueError, match="expected SHA-256"):
        damaged.wait()
    assert damaged.failed


def test_a_folder_can_be_checked(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draftheads", "data-preview", "--check", str(folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    counts = read_manifest(folder).counts
    tokens = f"40 documents of {counts.tokens} tokens, {counts.learned_tokens} to learn"
    said = f"{folder}: all as it was written: {tokens}"
    assert not ended.value.code and said in capsys.readouterr().out
    shuffled(shard(folder, 0))
    shuffled(shard(folder, 2))
    with pytest.raises(SystemExit) as ended:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.count("expected SHA-256") == 2


def test_checking_finds_what_sizes_cannot(folder):
    """Nor checksums that were written with the damage: the digest of the data tells."""
    shuffled(shard(folder))
    trusted(folder)
    with pytest.raises(ValueError, match="expected data of digest [0-9a-f]{16}, got") as error:
        check(folder)
    one_line(error)


# ---------------------------------------------------------------- what is in a shard


@pytest.mark.mend("spans outside their document")
@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("learn", [[1, 999]], r"document 2: span \[1, 999\] of \d+ tokens"),
        ("learn", [[-3, 2]], r"document 2: span \[-3, 2\]"),
        ("learn", [[1, 3], [2, 4]], r"document 2: span \[2, 4\]"),
        ("learn", [[3, 4], [1, 2]], r"document 2: span \[1, 2\]"),
        ("learn", [[3, 2]], r"document 2: span \[3, 2\]"),
        ("learn", [[1]], "spans that are no pairs"),
        ("learn", [[1, None]], "a token or span without a value"),
        ("learn", None, "learn without a value"),
        ("tokens", None, "tokens without a value"),
        ("tokens", [1, None, 3], "a token or span without a value"),
        ("hash", None, "hash without a value"),
        ("follows", None, "follows without a value"),
    ],
)
def test_spans_and_values_are_checked_when_they_are_read(folder, name, value, complaint):
    rewrite(shard(folder), with_column(name, value))
    trusted(folder)
    with pytest.raises(ValueError, match=f"{shard(folder).name}: .*{complaint}") as error:
        Documents.open(folder, VOCABULARY, "tiny")
    one_line(error)


@pytest.mark.mend("token ids outside the vocabulary")
@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_name_shard_and_document(folder, token):
    before = [answer.tokens for answer in read_answers(folder)]
    first = len(shards.read_batch(shard(folder, 0)))
    rewrite(shard(folder), with_column("tokens", [*before[first + 2][:-1], token]))
    trusted(folder)
    documents = Documents.open(folder, VOCABULARY, "tiny")
    rows = Rows(documents, documents.spans, 64, pack=True, seed=0)
    said = f"{shard(folder).name}: expected token ids from 0 to 96, got {token} in document "
    said += f"{first + 2};"
    with pytest.raises(ValueError, match=said) as error:
        rows.batch(range(len(rows)))
    one_line(error)


def test_offsets_beyond_the_columns_are_refused(folder):
    path = shard(folder)
    batch = shards.read_batch(path)
    offsets = batch["tokens"].offsets.to_numpy().tobytes()
    content = bytearray(path.read_bytes())
    at = bytes(content).index(offsets)
    content[at + 8 : at + 12] = np.int32(1 << 30).tobytes()
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected answers as Arrow columns, got a damaged file"):
        open_shards(folder)


@pytest.mark.mend("a shard cut while it is read")
@pytest.mark.parametrize("kept", [0, 900])
def test_a_shard_that_is_cut_while_a_run_reads_it_is_one_line(folder, kept):
    """Mapped pages would kill the process with SIGBUS, without a word."""
    documents = Documents.open(folder, VOCABULARY, "tiny")
    rows = Rows(documents, documents.spans, 64, pack=True, seed=0)
    whole = [rows.batch([row]).tokens_BT.tolist() for row in range(len(rows))]
    os.truncate(shard(folder), kept)
    with pytest.raises(ValueError, match="expected the file that was opened, got one that was cut"):
        for row in Order(len(rows), 1, 0).step(0) + list(range(len(rows))):
            rows.batch([row])
    assert whole


def test_a_shard_that_is_deleted_while_a_run_reads_it_is_still_there_for_it(folder):
    documents = Documents.open(folder, VOCABULARY, "tiny")
    rows = Rows(documents, documents.spans, 64, pack=True, seed=0)
    before = rows.batch(range(len(rows))).tokens_BT
    for path in folder.iterdir():
        path.unlink()
    assert rows.batch(range(len(rows))).tokens_BT.equal(before)


# ---------------------------------------------------------------- the manifest


def test_reading_needs_a_manifest(tmp_path):
    with pytest.raises(ValueError, match=r"expected a distillation folder with manifest\.json"):
        list(read_answers(tmp_path))


OTHERS = {json.dumps({"format": x}): x for x in (1, 2, 99, "3", None)}
BROKEN = ["", "{", "[" * 200_000, "[]", '{"format": 3}', "\ufeff{}", "7"]


@pytest.mark.parametrize("text", [*OTHERS, *BROKEN])
def test_a_manifest_of_another_format_or_of_none_is_one_line(target, tmp_path, text):
    """By reading and by resuming."""
    (tmp_path / "manifest.json").write_text(text)
    said = r".*, got a damaged file \(.*\); copy"
    if text in OTHERS:
        said = f"expected format 3, got {OTHERS[text]!r}; distil again$"
    for read in (read_manifest, lambda out: distill(target, prompts(1), options(out))):
        with pytest.raises(ValueError, match=rf"manifest\.json: {said}") as error:
            read(tmp_path)
        one_line(error)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every entry of a JSON value."""
    if at:
        yield at
    if isinstance(value, dict):
        inside = list(value.items())
    else:
        inside = list(enumerate(value)) if isinstance(value, list) else []
    for key, inner in inside:
        yield from places(inner, (*at, key))


JUNK = (None, "x", "", -1, 1.5, 10**40, True, [], [[]], {}, {"a": 1}, "../x", float("nan"))
MISSING = object()


@pytest.mark.mend("a damaged manifest")
@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_manifest_damaged_anywhere_is_one_line(target, tmp_path, monkeypatch, every):
    """Every entry is replaced by all kinds of junk, or left out: each reader takes what is there,
    or raises one line that names the file.
    """
    monkeypatch.setattr(answers, "SHARD_TOKENS", 40)
    out = tmp_path / "o"
    distill(target, prompts(4), options(out))
    manifest = json.loads((out / "manifest.json").read_text())
    files = {path: path.read_bytes() for path in out.iterdir()}
    readers: list[Callable[[], Any]] = [
        lambda: list(read_answers(out)),
        lambda: answers.count(out, read_manifest(out)),
        lambda: Documents.open(out, 259, "tiny"),
        lambda: check(out),
        lambda: distill(target, prompts(4), options(out)),
    ]
    refused = 0
    # each entry with all junk, and a reader for each of these: they take turns
    turns = itertools.cycle(readers)
    damages = itertools.product(places(manifest), (*JUNK, MISSING))
    for at, junk in itertools.islice(damages, 0, None, every):
        damaged = json.loads(json.dumps(manifest))
        inner = damaged
        for key in at[:-1]:
            inner = inner[key]
        if junk is MISSING:
            del inner[at[-1]]
        else:
            inner[at[-1]] = junk
        (out / "manifest.json").write_text(json.dumps(damaged))
        try:
            next(turns)()
        except ValueError as error:
            assert "\n" not in str(error)
            refused += 1
        for path in set(out.iterdir()) - files.keys():
            path.unlink()
        for path, content in files.items():
            path.write_bytes(content)
    assert refused > 200 // every


# ---------------------------------------------------------------- what stands in the way


def test_a_process_that_holds_a_folder_for_ever_is_named(folder, monkeypatch):
    monkeypatch.setattr(answers, "LOCK_SECONDS", 0.2)
    with answers._locked(folder), pytest.raises(TimeoutError, match="got one that has held it"):
        answers.set_aside(folder, read_manifest(folder))


@pytest.mark.mend("a second distill waited 30 minutes in silence")
def test_who_holds_a_folder_is_said_at_once(folder, monkeypatch, caplog):
    monkeypatch.setattr(answers, "LOCK_SECONDS", 0.2)
    ours, theirs = os.pipe()
    if not (holder := os.fork()):
        with answers._locked(folder):
            os.write(theirs, b"!")
            time.sleep(60)
    os.read(ours, 1)
    try:
        with pytest.raises(TimeoutError):
            answers.set_aside(folder, read_manifest(folder))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert "another process has it; waiting" in caplog.text


@pytest.mark.parametrize(
    ("number", "advice"),
    [(28, "; free space there, then run"), (13, "; make it writable, then run")],
)
def test_advice_follows_the_reason(folder, monkeypatch, number, advice):
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    batch = shards.read_batch(shard(folder))
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=f"new.arrow: {os.strerror(number)}{advice}") as error:
        shards.write_batch(folder / "new.arrow", batch)
    assert error.value.errno == number and not (folder / "new.arrow").exists()
