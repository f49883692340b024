"""The promise: no more of a data set is read than the limit asks for, and a distillation of it
goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import byte_tokenizer, files, llama, on_call, options, records

from draftheads.scripts.cli import app
from draftheads.train.data.distill import distill
from draftheads.train.data.prompts import Prompt, read_prompts

SHARDS, ROWS = 4, 50
"""Of a data set; a shard holds so many rows."""


def question(row: int) -> str:
    return f"question {row}?"


def texts(prompts: list[Prompt]) -> list[str]:
    return [(prompt.messages or ())[0]["content"] for prompt in prompts]


class Mirror:
    """A data set of the Hub whose shards `datasets` finds in a local folder. rows: how many it was
    asked for.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder / "shards"
        self.folder.mkdir()
        self.rows = 0
        for shard in range(SHARDS):
            rows = [{"prompt": question(shard * ROWS + row)} for row in range(ROWS)]
            self._write(self.path(shard, kind), rows)

    def path(self, shard: int, kind: str) -> Path:
        return self.folder / f"train-{shard:05d}-of-{SHARDS:05d}.{kind}"

    def load_dataset(
        self, path: str, name: str | None, *, split: str, streaming: bool
    ) -> Iterator[Any]:
        assert path == "owner/name" and name is None and streaming
        for row in self._load(str(self.folder), split=split, streaming=True):
            self.rows += 1
            yield row

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the Hub for this test."""
        import datasets

        self._load = datasets.load_dataset
        monkeypatch.setattr(datasets, "load_dataset", self.load_dataset)

    def _write(self, path: Path, rows: list[dict[str, str]]) -> None:
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            return
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture(params=["jsonl", "parquet"])
def mirror(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Mirror:
    """A data set whose last two shards cannot be read: who touches them fails."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    made = Mirror(tmp_path, request.param)
    for shard in (2, 3):
        made.path(shard, request.param).write_bytes(b"not to be touched\n")
    made.stand_in(monkeypatch)
    return made


@pytest.mark.parametrize("limit", [1, ROWS, ROWS + 7])
def test_stream_is_read_up_to_the_limit(mirror: Mirror, limit: int) -> None:
    prompts = read_prompts("owner/name", limit=limit)
    assert texts(prompts) == [question(row) for row in range(limit)]
    assert mirror.rows == limit


def test_distillation_of_a_stream_goes_on(mirror: Mirror, tmp_path: Path) -> None:
    """The same first prompts are read again; more of them are answered beside them, all other ones
    are refused.
    """

    def asked(limit: int = 10) -> list[Prompt]:
        return read_prompts("owner/name", limit=limit)

    def interrupt(call: int, rows: int) -> None:
        if call == 1:
            raise KeyboardInterrupt

    target = llama()
    distill(target, asked(), options(tmp_path / "whole"))
    on_call(target, interrupt)
    with pytest.raises(KeyboardInterrupt):
        distill(target, asked(), options(tmp_path / "o"))
    kept = len(records(tmp_path / "o"))
    calls = on_call(target, lambda call, rows: None)
    distill(target, asked(), options(tmp_path / "o"))
    assert sum(calls) == 10 - kept and files(tmp_path / "o") == files(tmp_path / "whole")
    assert mirror.rows == 30
    before = records(tmp_path / "o")
    changed = [Prompt(0, messages=({"role": "user", "content": "other?"},)), *asked(11)[1:]]
    assert distill(target, changed, options(tmp_path / "o")).complete
    assert sum(calls) == 12 - kept and records(tmp_path / "o")[1:10] == before[1:]
    others = [replace(prompt, text=f"other {prompt.index}", messages=None) for prompt in asked()]
    with pytest.raises(ValueError, match="expected some of the 11 prompts .* got 10 others; use"):
        distill(target, others, options(tmp_path / "o"))


def test_a_limit_on_the_command_line_streams(mirror: Mirror, tmp_path: Path) -> None:
    target = tmp_path / "target"
    llama().model.save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    words = ["distill", "--target", target, "--prompts", "owner/name", "--out", tmp_path / "o"]
    words += ["--limit", 3, "--max-new-tokens", 4]
    app([str(word) for word in words], standalone_mode=False)
    assert len(records(tmp_path / "o")) == 3 and mirror.rows == 3


@pytest.mark.parametrize(
    ("name", "start", "spoilt"),
    [
        ("p.jsonl", '{"text": "a"}\n{"text": "b"}\n', "{\n"),
        ("p.json", '{"text": "a"}\n{"text": "b"}\n', "{\n"),
    ],
)
def test_local_file_is_read_up_to_the_limit(
    tmp_path: Path, name: str, start: str, spoilt: str
) -> None:
    (tmp_path / name).write_bytes(f"{start}{spoilt}".encode("latin-1"))
    prompts = read_prompts(tmp_path / name, limit=2)
    assert [prompt.text for prompt in prompts] == ["a", "b"]
    with pytest.raises(ValueError, match="expected JSON|cannot be read"):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\nb\n\n", ["a\nb"]),
        ("a\nb\n \t\n\n  c", ["a\nb", "c"]),
        ("\ufeff\n a\n", ["a"]),
    ],
)
def test_paragraphs_or_lines(tmp_path: Path, text: str, prompts: list[str]) -> None:
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt")] == prompts
