"""The promise: a folder of answers says the same in every form it takes, whatever moment it is
killed at, and training lays it out as the plain algorithm does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import VOCABULARY

from draftheads.heads.batch import Batch
from draftheads.train import batches
from draftheads.train.batches import Documents, Rows
from draftheads.train.data import answers, shards
from draftheads.train.data.answers import Journal, Record, read_answers, read_manifest

Spans = list[tuple[int, int]]


def drawn(seed: int, count: int = 40) -> list[Record]:
    """Records as distillation writes them: copies, several documents, refused and cut prompts."""
    draw = random.Random(seed)
    texts = [draw.choices(range(VOCABULARY), k=draw.randint(4, 60)) for _ in range(count)]

    def document() -> Record:
        tokens = draw.choice(texts)
        bounds = sorted(draw.sample(range(1, len(tokens) + 1), 2 * draw.randint(0, 1) + 2)[:4])
        learn = [list(pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        finish = draw.choice(["eos", "length"])
        return {"tokens": tokens, "learn": learn, "turns": len(learn), "finish": finish}

    records: list[Record] = []
    for number in range(count):
        name = hashlib.sha256(b"%d" % number).hexdigest()[:32]
        kind = draw.choice(["one", "one", "two", "stopped", "skipped", "failed", "text"])
        record: Record = {"id": name, **document()}
        if kind == "two":
            record = {"id": name, "documents": [document(), document()]}
        elif kind in ("skipped", "failed"):
            record = {"id": name, kind: draw.choice(["too long", "no turn"])}
        elif kind == "stopped":
            record[kind] = "context"
        elif kind == "text":
            record["retokenized"] = 2
        records.append(record)
    return records


def new_folder(folder: Path, records: list[Record]) -> answers.Manifest:
    """A folder whose prompts are those of the records, without answers; its manifest."""
    folder.mkdir(exist_ok=True)
    names = "".join(f"{record['id']}\n" for record in records)
    prompts = {"source": "", "count": len(records), "sha256": hashlib.sha256(b"p").hexdigest()}
    manifest = answers.new_manifest({"name": "tiny"}, {}, prompts)
    answers.ids_file(folder, manifest).write_text(names)
    answers.write_manifest(folder, manifest)
    return manifest


def answer_all(
    folder: Path, records: list[Record], written: set[int] | None = None
) -> answers.Counts:
    """Distill with two processes, or resume. written: gets what was appended."""
    manifest = read_manifest(folder)
    if not manifest.has_shards:
        known = answers.answered(folder, [record["id"] for record in records])
        missing = [n for n in range(len(records)) if n not in known]
        for rank in (1, 0):
            with Journal(folder, rank, 2) as journal:
                for number in missing[rank::2]:
                    journal.append([records[number]])
                    if written is not None:
                        written.add(number)
    return answers.finish(folder, manifest)


def counted(records: list[Record]) -> answers.Counts:
    """What a manifest says of these records, one by one."""
    counts = answers.Counts()
    for record in records:
        for kind in ("skipped", "failed", "stopped"):
            if kind in record:
                counts.reasons[f"{kind}: {record[kind]}"] += 1
        documents = shards.documents_of(record)
        counts.done += bool(documents)
        counts.skipped += not documents and "skipped" in record
        counts.failed += not documents and "failed" in record
        counts.documents += len(documents)
        counts.retokenized += record.get("retokenized", 0)
        for document in documents:
            counts.tokens += len(document["tokens"])
            counts.learned_tokens += sum(end - start for start, end in document["learn"])
            counts.turns += document["turns"]
            counts.cut += document["finish"] == "length"
    return counts


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(params=[(10**9, 10**9), (300, 700)], ids=["whole", "divided"])
def small(request, monkeypatch):
    """Shards of this many tokens, batches of lines of this many bytes."""
    monkeypatch.setattr(answers, "SHARD_TOKENS", request.param[0])
    monkeypatch.setattr(answers, "BATCH_BYTES", request.param[1])


@pytest.mark.parametrize("seed", range(3))
def test_a_finished_folder_says_what_was_answered(small, tmp_path, seed):
    records = drawn(seed)
    new_folder(tmp_path, records)
    expected = counted(records)
    assert answer_all(tmp_path, records) == expected
    manifest = read_manifest(tmp_path)
    assert answers.count(tmp_path, manifest) == expected
    found = [
        (a.tokens, [list(span) for span in a.learn], a.follows) for a in read_answers(tmp_path)
    ]
    documents = [(d, n > 0) for r in records for n, d in enumerate(shards.documents_of(r))]
    assert found == [(d["tokens"], d["learn"], follows) for d, follows in documents]
    assert sum(file.tokens for file in manifest.shards) == expected.tokens
    assert answers.answered(tmp_path, [r["id"] for r in records]) == [*range(40)]
    assert not answers.journals(tmp_path)
    firsts = [shards.read_batch(path)["follows"][0].as_py() for path in tmp_path.glob("*.arrow")]
    assert firsts and not any(firsts), "no record is divided"


@pytest.mark.mend("a damaged file left the rest of its last record to another prompt")
def test_the_rest_of_a_record_whose_file_is_lost_is_not_of_the_one_before(tmp_path):
    """Files of earlier versions divide records."""
    document = {"tokens": [1, 2], "learn": [[1, 2]], "turns": 1, "finish": "eos"}
    records = [
        {"id": name * 32, "documents": [document] * count}
        for name, count in zip("abc", (1, 2, 1), strict=True)
    ]
    manifest = new_folder(tmp_path, records)
    rows = [row for record in records for row in shards.rows_of(record)]
    for number, part in ((0, rows[:1]), (2, rows[2:])):
        path = tmp_path / f"answers-{'0' * 16}-{number:05d}-of-00003.arrow"
        shards.write_batch(path, shards.to_batch(part))
    assert answers.answered(tmp_path, [record["id"] for record in records]) == [0, 2]
    assert answers.count(tmp_path, manifest).documents == 2
    assert answer_all(tmp_path, records).documents == 4
    assert [answer.follows for answer in read_answers(tmp_path)] == [False, False, True, False]


class Killed(BaseException):
    """As kill -9: nothing is done after it."""


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die in front of change number `step` of the folder, and of all that would come after it."""
    count = itertools.count()

    def guarded(change: Any) -> Any:
        def change_or_die(*args: Any, **kwargs: Any) -> Any:
            if next(count) >= step:
                raise Killed
            return change(*args, **kwargs)

        return change_or_die

    for owner, name in ((os, "replace"), (os, "truncate"), (Path, "unlink"), (os, "fsync")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))


@pytest.mark.slow
def test_killed_at_any_moment_nothing_is_lost_and_nothing_is_there_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "SHARD_TOKENS", 300)
    monkeypatch.setattr(answers, "BATCH_BYTES", 900)
    records = drawn(0, 16)
    new_folder(tmp_path / "whole", records)
    counts = answer_all(tmp_path / "whole", records)
    for step in itertools.count():
        folder = tmp_path / f"{step}"
        new_folder(folder, records)
        written: set[int] = set()
        with monkeypatch.context() as patch:
            kill_at(step, patch)
            try:
                answer_all(folder, records, written)
            except Killed:
                pass
            else:
                break
        assert written <= {*answers.answered(folder, [r["id"] for r in records])}
        assert len(list(read_answers(folder))) <= counts.documents
        assert answer_all(folder, records) == counts
        assert content(folder) == content(tmp_path / "whole")
    assert step > 15, "many moments"


def test_a_finished_folder_is_not_read_again(tmp_path, monkeypatch):
    records = drawn(1)
    manifest = new_folder(tmp_path, records)
    counts = answer_all(tmp_path, records)
    monkeypatch.setattr(answers, "read_batch", None)
    assert answers.finished(tmp_path, manifest)
    assert answers.finish(tmp_path, manifest) == counts
    manifest.prompts.sha256 = "other"
    assert not answers.finished(tmp_path, manifest)


def test_prompts_may_be_added_removed_and_come_back(tmp_path):
    records = drawn(2)
    for part in (records[5:30], records[12:20], records[12:20], records[10:24]):
        new_folder(tmp_path / "o", part)
        answer_all(tmp_path / "o", part)
        ids = [record["id"] for record in records]
        assert answers.answered(tmp_path / "o", ids) == [*range(5, 30)]
        assert read_manifest(tmp_path / "o").counts.done == answered_in(part)
    new_folder(tmp_path / "o", records)
    answer_all(tmp_path / "o", records)
    new_folder(tmp_path / "whole", records)
    answer_all(tmp_path / "whole", records)
    assert content(tmp_path / "o") == content(tmp_path / "whole")


def answered_in(records: list[Record]) -> int:
    return sum(bool(shards.documents_of(record)) for record in records)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: path.unlink(), r"answers-.*expected \d+ bytes, got no file; copy it again"),
        (lambda path: os.truncate(path, 900), r"answers-.*expected \d+ bytes, got 900; copy it"),
        (
            lambda path: path.write_bytes(bytes(path.stat().st_size)),
            "answers-.*expected answers as Arrow columns, got a damaged file",
        ),
    ],
    ids=["missing", "cut", "overwritten"],
)
def test_a_damaged_shard_is_one_line(tmp_path, damage, complaint):
    records = drawn(4)
    new_folder(tmp_path, records)
    answer_all(tmp_path, records)
    damage(next(tmp_path.glob("answers-*.arrow")))
    with pytest.raises(ValueError, match=complaint) as error:
        list(read_answers(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("learn", [[[1, 4], [3, 5]], [[4, 2]], [[2, 9]], [[-1, 3]]])
def test_spans_that_overlap_or_lie_outside_are_refused(tmp_path, learn):
    new_folder(tmp_path, [{"id": "a"}])
    record = {"id": "a", "tokens": [1, 2, 3, 4, 5], "learn": learn, "turns": 1, "finish": "eos"}
    (tmp_path / "answers-00000-of-00001.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="line 1: expected an answer as JSON, got .*delete this"):
        list(read_answers(tmp_path))


@pytest.mark.slow
def test_datasets_load_the_folder_as_it_is(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(answers, "SHARD_TOKENS", 300)
    records = drawn(5)
    new_folder(tmp_path / "o", records)
    counts = answer_all(tmp_path / "o", records)
    loaded = datasets.load_dataset(str(tmp_path / "o"), cache_dir=str(tmp_path / "cache"))
    assert loaded["train"].num_rows == counts.documents
    expected = [answer.tokens for answer in read_answers(tmp_path / "o")]
    assert loaded["train"]["tokens"][:] == expected
    first = next(iter((tmp_path / "o").glob("answers-*.arrow")))
    assert datasets.Dataset.from_file(str(first)).column_names == shards.SCHEMA.names


# ---------------------------------------------------------------- the plain algorithm


class Plain:
    """Everything that training makes of answers, document by document."""

    def __init__(self, folder: Path) -> None:
        self.tokens: list[int] = []
        self.learn: list[bool] = []
        self.spans: Spans = []
        self.following: list[int] = []
        for answer in read_answers(folder):
            start = len(self.tokens)
            self.following += [len(self.spans)] if answer.follows else []
            self.tokens += answer.tokens
            self.learn += [
                any(a <= t < b for a, b in answer.learn) for t in range(len(answer.tokens))
            ]
            self.spans.append((start, len(self.tokens)))

    def digest(self) -> str:
        made = hashlib.sha256(torch.tensor(self.tokens, dtype=torch.int32).numpy().tobytes())
        made.update(bytes(self.learn))
        for numbers in (self.spans, self.following):
            made.update(torch.tensor(numbers, dtype=torch.int64).numpy().tobytes())
        return made.hexdigest()[:16]

    def split(self, heldout: float) -> tuple[Spans, Spans]:
        talks: list[Spans] = []
        for number, span in enumerate(self.spans):
            if number not in self.following:
                talks.append([])
            talks[-1].append(span)
        count = min(max(1, round(heldout * len(talks))), max(1, len(talks) - 1))
        generator = torch.Generator().manual_seed(batches.SPLIT_SEED)
        chosen = sorted(torch.randperm(len(talks), generator=generator).tolist()[:count])
        apart = [span for number in chosen for span in talks[number]]
        known = [self.tokens[start:stop] for start, stop in apart]
        train = [
            span
            for talk in talks
            if all(self.tokens[start:stop] not in known for start, stop in talk)
            for span in talk
        ]
        return train or apart, apart

    def rows(self, spans: Spans, length: int, pack: bool, seed: int) -> list[Spans]:
        pieces = [
            (first, min(first + length, stop))
            for start, stop in spans
            for first in range(start, stop, length)
            if any(self.learn[first + 1 : min(first + length, stop)])
        ]
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
        rows: list[Spans] = []
        room: dict[int, int] = {}
        for start, stop in (pieces[place] for place in order):
            fits = (row for row, free in room.items() if pack and free >= stop - start)
            row = next(fits, len(rows))
            if row == len(rows):
                rows.append([])
                room[row] = length
                if len(room) > batches.OPEN_ROWS:
                    del room[next(iter(room))]
            rows[row].append((start, stop))
            room[row] -= stop - start
        return rows

    def batch(self, rows: list[Spans]) -> Batch:
        width = max(sum(stop - start for start, stop in row) for row in rows)
        lines: list[list[tuple[int, bool, int, int]]] = []
        for row in rows:
            line = [
                (self.tokens[at], self.learn[at] and at > start, at - start, number)
                for number, (start, stop) in enumerate(row)
                for at in range(start, stop)
            ]
            lines.append(line + [(0, False, n, -1) for n in range(width - len(line))])
        return Batch(*torch.tensor(lines).unbind(-1))


@pytest.mark.parametrize("length", [16, 48, 200])
@pytest.mark.parametrize("pack", [True, False])
def test_training_sees_what_the_plain_algorithm_makes(small, tmp_path, length, pack, monkeypatch):
    monkeypatch.setattr(batches, "OPEN_ROWS", 3)
    monkeypatch.setattr(batches, "CHUNK", 50)
    records = drawn(length, 150)
    new_folder(tmp_path, records)
    answer_all(tmp_path, records)
    documents, plain = Documents.open(tmp_path, VOCABULARY, "tiny"), Plain(tmp_path)
    assert documents.digest() == plain.digest()
    assert Documents.read(read_answers(tmp_path)).digest() == plain.digest()
    assert (documents.size, documents.learned) == (len(plain.tokens), sum(plain.learn))
    parts = documents.split(0.07)
    assert [list(map(tuple, part.tolist())) for part in parts] == [*plain.split(0.07)]
    written = torch.tensor(plain.tokens)[torch.tensor(plain.learn)].bincount(minlength=VOCABULARY)
    frequent = written.argsort(descending=True, stable=True).tolist()
    assert documents.frequent_tokens(VOCABULARY, VOCABULARY) == frequent
    for part, expected in zip(parts, plain.split(0.07), strict=True):
        rows = Rows(documents, part, length, pack=pack, seed=5)
        made = plain.rows(expected, length, pack, 5)
        assert rows.cut == sum((stop - start - 1) // length for start, stop in expected)
        assert [rows.pieces(row) for row in range(len(rows))] == made
        assert list(rows.sizes) == [sum(b - a for a, b in row) for row in made]
        assert list(rows.learned) == [sum(sum(plain.learn[a + 1 : b]) for a, b in r) for r in made]
        starts = [start for row in made for start, _ in row]
        numbers = [max(n for n, (a, _) in enumerate(plain.spans) if a <= at) for at in starts]
        assert rows.document_numbers(range(len(rows))) == numbers
        whole, expected_batch = rows.batch(range(len(rows))), plain.batch(made)
        for name in ("tokens_BT", "loss_mask_BT", "positions_BT", "documents_BT"):
            tensor = getattr(whole, name)
            wanted = getattr(expected_batch, name)
            assert torch.equal(tensor, wanted.to(tensor.dtype)), name
