"""The promise: prompts are read from every layout, up to the limit and no further; what is wrong is
named with file, record and next step.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_chat import byte_tokenizer, files, llama, on_call, options, records

from draftheads.scripts.cli import app
from draftheads.train.data.distill import distill
from draftheads.train.data.prompts import (
    ELSEWHERE,
    SETS,
    Prompt,
    check_source,
    read_conversations,
    read_prompts,
)
from draftheads.train.entry import mistakes_in_one_line

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data folder at {DATA}")


def user(*contents: str) -> tuple[dict[str, str], ...]:
    return tuple({"role": "user", "content": content} for content in contents)


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


# ---------------------------------------------------------------- what is read


@needs_data
@pytest.mark.parametrize(
    ("file", "count", "turns"),
    [
        ("conversations/dummy_conversation.json", 500, 1000),
        ("conversations/synthetic_conversations_1k.jsonl", 1000, 1100),
        ("conversations/glaive_toolcall_en_demo.json", 300, 746),
        ("conversations", 1800, 2846),
        ("spec-bench/question.jsonl", 480, 560),
        ("mt-bench/question.jsonl", 80, 160),
        ("humaneval/HumanEval.jsonl.gz", 164, 164),
        ("humaneval", 164, 164),
    ],
)
def test_real_files_are_read_completely(file, count, turns):
    prompts = read_prompts(DATA / file)
    assert [prompt.index for prompt in prompts] == list(range(count))
    roles = [message["role"] for prompt in prompts for message in prompt.messages or ()]
    assert roles.count("user") == turns
    assert set(roles) <= {"user", "system"}


def test_answers_of_the_source_are_dropped(tmp_path):
    roles = ["developer", "user", "assistant", "tool", "user", "assistant"]
    record = {"messages": [{"role": role, "content": role} for role in roles]}
    [prompt] = read_prompts(lines(tmp_path / "p.jsonl", record))
    assert [message["role"] for message in prompt.messages or ()] == ["system", "user", "user"]


def test_files_of_every_kind_in_a_folder(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (tmp_path / "a.json").write_text(json.dumps({"data": [{"text": "a"}, {"text": "b"}]}))
    (tmp_path / "b.json").write_text('{"text": "c"}\n{"text": "d"}\n')  # JSON lines in disguise
    lines(tmp_path / "c.jsonl", {"text": "e"}, {"turns": ["f"]})
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write('{"text": "g"}\n')
    parquet.write_table(pyarrow.table({"text": ["h", "i"]}), tmp_path / "e.parquet")
    (tmp_path / "f.txt").write_text("first line\nsecond line\n\nj\n\n\nk\n")
    (tmp_path / "g.md").write_text("l\nm\n")
    (tmp_path / "README.md").write_text("about the data")
    (tmp_path / "weights.bin").write_bytes(b"\0")
    prompts = read_prompts(tmp_path)
    texts = [prompt.text or (prompt.messages or ())[0]["content"] for prompt in prompts]
    assert texts == [*"abcdefghi", "first line\nsecond line", *"jklm"]
    assert read_prompts(tmp_path, limit=3) == prompts[:3]


def test_hub_data_set(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(**kwargs: Any) -> list[dict[str, str]]:
        calls.append(kwargs)
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(read_prompts("owner/name:main", split="test", limit=1)) == 1
    assert len(read_prompts("owner/name")) == 2
    for source, split in {
        "gsm8k": "train",
        "openai/gsm8k:socratic": None,
        "humaneval": None,
    }.items():
        read_prompts(source, split=split)
    named = {"path": "owner/name", "name": None}
    assert calls == [
        {**named, "name": "main", "split": "test", "streaming": True},
        {**named, "split": "train", "streaming": False},
        {"path": "openai/gsm8k", "name": "main", "split": "train", "streaming": False},
        {"path": "openai/gsm8k", "name": "socratic", "split": "train", "streaming": False},
        {"path": "openai/openai_humaneval", "split": "test", "streaming": False},
    ]


SET_RECORDS = {  # the columns of each set
    "spec-bench": {"question_id": 81, "category": "writing", "turns": ["hi", "again"]},
    "mt-bench": {"prompt": ["hi", "again"], "prompt_id": 8, "category": "math", "reference": []},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "hi",
        "canonical_solution": "pass",
        "test": "",
        "entry_point": "f",
    },
    "gsm8k": {"question": "hi", "answer": "5"},
    "math500": {
        "problem": "hi",
        "solution": "5, so 5",
        "answer": "5",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/5.json",
    },
    "mbpp": {
        "source_file": "a.ipynb",
        "task_id": 2,
        "prompt": "hi",
        "code": "pass",
        "test_imports": [],
        "test_list": ["assert f() == 1"],
    },
    "speed-bench": {
        "question_id": "a1",
        "category": "coding",
        "sub_category": "python",
        "turns": ["hi", "again"],
        "source": "own",
        "src_id": "1",
        "difficulty": "easy",
        "multiturn": True,
    },
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_by_its_name(name, monkeypatch, tmp_path, hub):
    """`datasets` reads them from folders named like those of the Hub, Spec-Bench from a server."""
    pytest.importorskip("datasets")
    record = SET_RECORDS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    if name == "spec-bench":
        pytest.importorskip("aiohttp", reason="datasets reads addresses with it")
        hub.repos["me/spec"] = {"files": {"question.jsonl": json.dumps(record).encode()}}
        address = f"{hub.url}/me/spec/resolve/main/question.jsonl"
        monkeypatch.setitem(SETS[name], "data_files", address)
    else:
        folder = tmp_path / SETS[name]["path"] / SETS[name].get("name", "")
        folder.mkdir(parents=True)
        lines(folder / f"{SETS[name]['split']}-00000-of-00001.jsonl", record)
        if config := SETS[name].get("name"):
            card = (
                f"configs:\n- config_name: {config}\n  data_files:\n"
                f"  - {{split: test, path: {config}/test-*}}"
            )
            (folder.parent / "README.md").write_text(f"---\n{card}\n---\n")
    turns = user("hi", "again") if name.endswith("-bench") else user("hi")
    expected = [Prompt(0, turns, category=record.get("category"))]
    assert read_prompts(name, limit=1) == read_prompts(name) == expected


def test_a_session_without_turns_has_no_answers(tmp_path):
    path = lines(tmp_path / "odd.jsonl", {"type": "x", "payload": 5}, {"type": "y", "uuid": "1"})
    with pytest.raises(ValueError, match=f"{path}: expected at least one answer .* found none"):
        read_conversations(str(path))


def test_questions_that_are_elsewhere_are_left_out(tmp_path, caplog):
    records = [{"turns": [ELSEWHERE, ELSEWHERE]}, {"turns": ["hi"]}, {"turns": [ELSEWHERE]}]
    assert len(read_prompts(str(lines(tmp_path / "p.jsonl", *records)))) == 1
    assert "2 questions that only NVIDIA's specdec_bench fetches" in caplog.text


@pytest.mark.parametrize("name", ["openai/gsm8k", "openai/openai_humaneval", "openai/gsm8k:main"])
def test_a_data_set_named_like_a_set_is_not_a_misspelt_one(name):
    assert check_source(name) == Path(name)


def test_a_category_is_text(tmp_path):
    path = lines(
        tmp_path / "p.jsonl", {"text": "a", "category": "qa"}, {"text": "b", "category": 3}
    )
    assert [prompt.category for prompt in read_prompts(path)] == ["qa", None]


# ---------------------------------------------------------------- what is refused


def test_empty_records_are_left_out_and_counted(tmp_path, caplog):
    answer = {"messages": [{"role": "assistant", "content": "a"}]}
    empty = ({"conversations": []}, {"text": " "}, answer)
    path = lines(tmp_path / "p.jsonl", {"text": "a"}, *empty)
    with caplog.at_level("WARNING"):
        assert read_prompts(path) == [Prompt(0, text="a")]
    assert "left out: 3 empty records" in caplog.text


@pytest.mark.mend("a misspelt demo-prompts asked the Hub for 77 s")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "empty name: expected a file"),
        ("nowhere/x.txt", "found none; check the path"),
        ("./data", "found none; check the path"),
        *(
            (name, r"found none; did you mean ok\.jsonl\?$")
            for name in ("ok.jsnl", "ok.json.gz", "./ok.jsn")
        ),
        ("spec-benhc", r"did you mean spec-bench\?"),
        ("demo-prompt", r"found none; .*did you mean demo-prompts\?$"),
        ("gsm8k:socratic", "found none; .*give a Hub data set as owner/name$"),
        ("alpaca", "found none; .*give a Hub data set as owner/name$"),
    ],
)
def test_a_name_that_is_not_there_is_not_looked_up_on_the_hub(monkeypatch, tmp_path, name, said):
    """Which took 77 seconds without a network. Nor is an empty one the working directory."""
    lines(tmp_path / "ok.jsonl", {"text": "a"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=said):
        read_prompts(name)


def test_reading_the_hub_without_datasets_is_one_line(monkeypatch, capsys):
    """About the package: the name of the data set may be right."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit) as ended, mistakes_in_one_line():
        read_prompts("owner/name")
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.endswith("; pip install 'draftheads[train]'")


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [
        ("gsm8k", ConnectionError("no Hub"), "gsm8k .test.: expected .* got: no Hub"),
        ("owner/name", FileNotFoundError("not there"), "owner/name .*: expected a file.* got: not"),
        ("owner/name", None, r"owner/name \[train\]: expected .*: at shard 7; give"),
    ],
)
def test_a_hub_data_set_that_fails_or_breaks_midway_is_one_line(
    monkeypatch, tmp_path, name, fault, said
):
    datasets = pytest.importorskip("datasets")

    def load_dataset(**_: Any) -> Any:
        if fault:
            raise fault
        return midway()

    def midway() -> Any:
        yield {"text": "a"}
        raise datasets.exceptions.DatasetGenerationError("at\nshard 7")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=said):
        read_prompts(name)


RECORDS = b"".join(b'{"text": "%d"}\n' % number for number in range(2000))
PACKED = gzip.compress(RECORDS, mtime=0)
NESTED = b"[" * 100_000
TALK = b'{"prompt": "a", "completion": "b"}\n'


def table() -> bytes:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": [str(number) for number in range(2000)]}), out)
    return out.getvalue().to_pybytes()


def with_turn(**turn: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user"} | turn]}).encode()


ANY = "expected .*, .*; .*"
DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut.jsonl.gz": (lambda: PACKED[: len(PACKED) // 2], ANY),
    "tail.jsonl.gz": (lambda: PACKED[:-4], ANY),
    "sum.jsonl.gz": (lambda: PACKED[:-8] + bytes(4) + PACKED[-4:], ANY),
    "bits.jsonl.gz": (lambda: PACKED[:99] + b"\xff" * 99 + PACKED[198:], ANY),
    "plain.jsonl.gz": (lambda: RECORDS, ANY),
    "cut.parquet": (lambda: table()[:999], ANY),
    "empty.parquet": (lambda: b"", ANY),
    "text.parquet": (lambda: RECORDS, ANY),
    "foot.parquet": (lambda: b"PAR1" + bytes(99) + b"PAR1", ANY),
    "page.parquet": (lambda: table()[:50] + b"\xff" * 500 + table()[550:], ANY),
    "wide.csv": (lambda: b"text,a\nb,c,d\n", ANY),
    "cut.csv": (lambda: b'text\n"b', ANY),
    "deep.jsonl": (lambda: b'{"text": ' + NESTED, ANY),
    "deep.json": (lambda: NESTED, ANY),
    "cut.json": (lambda: b'[{"text": "a"}, {"te', ANY),
    "utf16.jsonl": (lambda: RECORDS.decode().encode("utf-16"), ANY),
    "utf16.txt": (lambda: "a\nb\n".encode("utf-16"), ANY),
    "latin.txt": (lambda: b"caf\xe9", r"expected a complete \.txt file.*'utf-8' codec.*conv"),
    "broken.jsonl": (
        lambda: TALK * 16 + b'{"text": "a\n', "line 17: expected JSON .*fix or remove it"
    ),
    "latin.jsonl": (lambda: b'{"text": "\xff"}\n', "line 1: expected JSON in UTF-8"),
    "five.json": (lambda: b'{"data": 5}', 'a list of records or .*"data".* got keys data'),
    "keys.json": (lambda: b'{"rows": []}', "record 1: expected an object .* got keys rows"),
    "cut.jsonl": (lambda: TALK * 2 + b'{"text": "a', "line 3: expected JSON .*fix or remove it"),
    "log.jsonl": (lambda: b'{"type": "log", "message": "up"}\n', ANY),
    "session.jsonl": (
        lambda: b'{"type": "session_meta", "payload": {}}\n{"ty\n{}', "line 2: expected JSON"
    ),
    "table.xls": (lambda: b"a,b\n", r"expected prompts .*; pass a folder of \.json, "),
    "text.jsonl": (lambda: with_turn(content=[{"text": 3}]), "turn 1: expected a string"),
    "zero.jsonl": (
        lambda: with_turn(role="system", content=0), "turn 1: expected a string, got int"
    ),
    "input.jsonl": (
        lambda: b'{"instruction": "add", "input": [1, 2]}',
        "input: expected a string, got int '1'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line(tmp_path, name):
    path, (content, said) = tmp_path / name, DAMAGED[name]
    path.write_bytes(content())
    for read in (read_prompts, read_conversations):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}\b.*{said}") as caught:
            read(path)
        assert "\n" not in str(caught.value)
    (tmp_path / "a.txt").write_text("fine")
    if not name.endswith(".xls"):  # which a folder may hold beside prompts
        with pytest.raises(ValueError, match=re.escape(name)):
            read_prompts(tmp_path)


def test_what_only_some_read_is_refused_by_them(tmp_path):
    """Half a character in an answer, a tool call that is none, a folder or a file of nothing."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\udfff"}]
    half = lines(tmp_path / "half.jsonl", {"messages": turns})
    with pytest.raises(ValueError, match="expected text in Unicode, got .*surrogates not allowed"):
        read_conversations(half)
    assert len(read_prompts(half)) == 1  # which leaves the answer out
    call = {"messages": [{"role": "tool_call", "content": "[" * 100_000}]}
    with pytest.raises(ValueError, match="line 1, .*a tool call as JSON"):
        read_prompts(lines(tmp_path / "call.jsonl", call), tools="keep")
    with pytest.raises(ValueError, match="system: expected a string, got keys a"):
        read_prompts(lines(tmp_path / "system.jsonl", {"prompt": "hi", "system": {"a": 1}}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "p.xls").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"expected a folder with \.json, .* files, found none"):
        read_prompts(tmp_path / "folder")
    (tmp_path / "p.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"p\.txt: expected at least one prompt, found none"):
        read_prompts(tmp_path / "p.txt")
    with pytest.raises(ValueError, match="limit: expected a positive number, got 0"):
        read_prompts(half, limit=0)


@pytest.mark.parametrize("text", [json.dumps([{"text": "a"}]), '{"text": "a"}\n{"text": "b"}\n'])
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path, text):
    (tmp_path / "p.json").write_text(text, encoding="utf-8-sig")
    assert read_prompts(tmp_path / "p.json")[0].text == "a"


def test_hidden_files_and_folders_are_not_prompts(tmp_path):
    folder = tmp_path / ".data"  # given by name, it may be hidden itself
    for name in (".git/a.txt", ".cache/b.json", "deep/.ipynb_checkpoints/c.txt", ".d.txt", "e.TXT"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text of " + name)
    assert [prompt.text for prompt in read_prompts(folder)] == ["text of e.TXT"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": None}, {"type": "text", "text": "a"}], "a"),
        (["a", {"type": "input_text", "text": "b"}], "ab"),
    ],
)
def test_content_parts(tmp_path, content, text):
    record = {"messages": [{"role": "user", "content": content}]}
    assert read_prompts(lines(tmp_path / "p.jsonl", record))[0].messages == user(text)


def test_what_is_not_text_is_counted_and_said_once(tmp_path, caplog):
    picture = {"type": "image_url", "image_url": {"url": "x"}}
    content = [picture, {"type": "input_audio"}, picture, {"type": "text", "text": "what?"}]
    talk = {"messages": [{"role": "user", "content": content}]}
    llava = {"conversations": [{"from": "human", "value": "and this?"}], "image": "a.png"}
    path = lines(tmp_path / "p.jsonl", talk, llava, {"prompt": "hi", "image": None})
    assert len(read_prompts(path)) == 3
    (said,) = caplog.messages
    assert said == "left out: 2 image_url, 1 input_audio, 1 image"
    caplog.clear()
    read_prompts(lines(path, {"prompt": "hi"}))
    assert not caplog.messages


def test_a_blank_system_turn_is_left_out(tmp_path):
    turns = [{"role": "system", "content": " "}, {"role": "user", "content": "hi"}]
    assert read_prompts(lines(tmp_path / "p.jsonl", {"messages": turns}))[0].messages == user("hi")


# ---------------------------------------------------------------- up to a limit

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
    """The same first prompts are read again."""

    def interrupt(call: int, rows: int) -> None:
        if call == 1:
            raise KeyboardInterrupt

    target = llama()
    distill(target, read_prompts("owner/name", limit=10), options(tmp_path / "whole"))
    on_call(target, interrupt)
    with pytest.raises(KeyboardInterrupt):
        distill(target, read_prompts("owner/name", limit=10), options(tmp_path / "o"))
    kept = len(records(tmp_path / "o"))
    calls = on_call(target, lambda call, rows: None)
    distill(target, read_prompts("owner/name", limit=10), options(tmp_path / "o"))
    assert sum(calls) == 10 - kept and files(tmp_path / "o") == files(tmp_path / "whole")
    assert mirror.rows == 30


def test_a_limit_on_the_command_line_streams(mirror: Mirror, tmp_path: Path) -> None:
    target = tmp_path / "target"
    llama().model.save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    words = ["distill", "--target", target, "--prompts", "owner/name", "--out", tmp_path / "o"]
    words += ["--limit", 3, "--max-new-tokens", 4]
    app([str(word) for word in words], standalone_mode=False)
    assert len(records(tmp_path / "o")) == 3 and mirror.rows == 3


@pytest.mark.parametrize("name", ["p.jsonl", "p.json"])
def test_local_file_is_read_up_to_the_limit(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n{"text": "b"}\n{\n')
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
