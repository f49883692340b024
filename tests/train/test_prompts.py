"""The promise: prompts are read from every layout; what is wrong is named with file, record and
next step.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from draftheads.train.data.prompts import (
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


@needs_data
def test_stories_give_paragraphs_or_lines():
    paragraphs = read_prompts(DATA / "tinystories/train.txt")
    assert len(paragraphs) > 4000
    assert (
        len(read_prompts(DATA / "tinystories/valid.txt")) == 19
    )  # no blank line: a story per line


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
        if name == "gsm8k":
            card = (
                "configs:\n- config_name: main\n  data_files:\n  - {split: test, path: main/test-*}"
            )
            (folder.parent / "README.md").write_text(f"---\n{card}\n---\n")
    turns = user("hi", "again") if name in ("spec-bench", "mt-bench") else user("hi")
    expected = [Prompt(0, turns, category=record.get("category"))]
    assert read_prompts(name, limit=1) == read_prompts(name) == expected


def test_a_misspelt_set_has_a_hint():
    with pytest.raises(ValueError, match=r"did you mean spec-bench\?"):
        read_prompts("spec-benhc")


@pytest.mark.parametrize("name", ["openai/gsm8k", "openai/openai_humaneval", "openai/gsm8k:main"])
def test_a_data_set_named_like_a_set_is_not_a_misspelt_one(name):
    assert check_source(name) == Path(name)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(**kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="gsm8k .test.: expected .* got: Couldn't reach the Hub"):
        read_prompts("gsm8k")


def test_a_category_is_text(tmp_path):
    path = lines(
        tmp_path / "p.jsonl", {"text": "a", "category": "qa"}, {"text": "b", "category": 3}
    )
    assert [prompt.category for prompt in read_prompts(path)] == ["qa", None]


# ---------------------------------------------------------------- what is refused


def test_half_a_character_in_an_answer_is_refused_with_its_line(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\udfff"}]
    (tmp_path / "p.json").write_text(json.dumps([{"messages": turns}]))
    with pytest.raises(ValueError, match="expected text in Unicode, got .*surrogates not allowed"):
        read_conversations(tmp_path / "p.json")
    assert len(read_prompts(tmp_path / "p.json")) == 1  # which leaves the answer out


def test_empty_records_are_left_out_and_counted(tmp_path, caplog):
    answer = {"messages": [{"role": "assistant", "content": "a"}]}
    empty = ({"conversations": []}, {"text": " "}, answer)
    path = lines(tmp_path / "p.jsonl", {"text": "a"}, *empty)
    with caplog.at_level("WARNING"):
        assert read_prompts(path) == [Prompt(0, text="a")]
    assert "left out: 3 empty records" in caplog.text


def test_broken_json_is_named_by_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 16 + b'{"text": "a\n')
    with pytest.raises(ValueError, match=r"p\.jsonl line 17: expected JSON .*fix or remove it"):
        read_prompts(path)
    path.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl line 1: expected JSON in UTF-8"):
        read_prompts(path)


def test_json_must_hold_a_list(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r'p\.json: expected a list .*"data".* got keys rows'):
        read_prompts(path)


def test_missing_file_is_named(tmp_path):
    lines(tmp_path / "prompts.jsonl", {"text": "a"})
    for name in ("nowhere/x.txt", "data"):
        with pytest.raises(ValueError, match=rf"{name}: .* found none; check the path"):
            read_prompts(str(tmp_path / name))
    near = re.escape(str(tmp_path / "prompts.jsonl"))
    with pytest.raises(ValueError, match=rf"promts\.jsonl: .* found none; did you mean {near}\?"):
        read_prompts(tmp_path / "promts.jsonl")


def test_a_misspelt_file_is_not_looked_up_on_the_hub(monkeypatch, tmp_path):
    lines(tmp_path / "ok.jsonl", {"text": "a"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("ok.jsnl", "ok.json.gz", "./ok.jsn"):
        with pytest.raises(ValueError, match=r"found none; did you mean ok\.jsonl\?$"):
            read_prompts(name)
    with pytest.raises(ImportError, match="import of datasets"):
        read_prompts("them/okay")


@pytest.mark.mend("a misspelt demo-prompts asked the Hub for 77 s")
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("demo-prompt", r"did you mean demo-prompts\?$"),
        ("gsm8k:socratic", "give a Hub data set as owner/name$"),
        ("alpaca", "give a Hub data set as owner/name$"),
    ],
)
def test_a_name_without_an_owner_is_not_looked_up_on_the_hub(name, meant, monkeypatch, tmp_path):
    """Which took 77 seconds without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=f"found none; .*{meant}"):
        read_prompts(name)


def test_reading_the_hub_without_datasets_is_one_line(monkeypatch, capsys):
    """About the package: the name of the data set may be right."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit) as ended, mistakes_in_one_line():
        read_prompts("owner/name")
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.endswith("; pip install 'draftheads[train]'")


def test_unknown_hub_data_set(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError("not on the Hub")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"owner/name .*: expected a file.* got: not on the Hub"):
        read_prompts("owner/name")


def test_unsupported_suffix_names_the_supported(tmp_path):
    (tmp_path / "p.xls").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"p\.xls: expected prompts .*; pass a folder of \.json, "):
        read_prompts(tmp_path / "p.xls")
    with pytest.raises(ValueError, match=r"expected a folder with \.json, .* files, found none"):
        read_prompts(tmp_path)


def test_no_prompt_at_all(tmp_path):
    (tmp_path / "p.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"p\.txt: expected at least one prompt, found none"):
        read_prompts(tmp_path / "p.txt")


def test_text_must_be_utf8(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"caf\xe9")
    with pytest.raises(
        ValueError, match=r"p\.txt: expected a complete \.txt file.*'utf-8' codec.*conv"
    ):
        read_prompts(tmp_path / "p.txt")


RECORDS = b"".join(b'{"text": "%d"}\n' % number for number in range(2000))
PACKED = gzip.compress(RECORDS, mtime=0)
NESTED = b"[" * 100_000


def table() -> bytes:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": [str(number) for number in range(2000)]}), out)
    return out.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("cut.jsonl.gz", lambda: PACKED[: len(PACKED) // 2]),
        ("tail.jsonl.gz", lambda: PACKED[:-4]),
        ("sum.jsonl.gz", lambda: PACKED[:-8] + bytes(4) + PACKED[-4:]),
        ("bits.jsonl.gz", lambda: PACKED[:99] + b"\xff" * 99 + PACKED[198:]),
        ("plain.jsonl.gz", lambda: RECORDS),
        ("cut.parquet", lambda: table()[:999]),
        ("empty.parquet", lambda: b""),
        ("text.parquet", lambda: RECORDS),
        ("foot.parquet", lambda: b"PAR1" + bytes(99) + b"PAR1"),
        ("page.parquet", lambda: table()[:50] + b"\xff" * 500 + table()[550:]),
        ("wide.csv", lambda: b"text,a\nb,c,d\n"),
        ("cut.csv", lambda: b'text\n"b'),
        ("deep.jsonl", lambda: b'{"text": ' + NESTED),
        ("deep.json", lambda: NESTED),
        ("cut.json", lambda: b'[{"text": "a"}, {"te'),
        ("utf16.jsonl", lambda: RECORDS.decode().encode("utf-16")),
        ("utf16.txt", lambda: "a\nb\n".encode("utf-16")),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, name, damaged):
    path = tmp_path / name
    path.write_bytes(damaged())
    for read in (read_prompts, read_conversations):
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}\b.*: expected .*, .*; .*"):
            read(path)
    (tmp_path / "a.txt").write_text("fine")
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        read_prompts(tmp_path)
    assert "\n" not in str(caught.value)


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


def test_an_empty_name_is_not_the_working_directory(monkeypatch, tmp_path):
    (tmp_path / "p.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="empty name: expected a file"):
        read_prompts("")


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


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"messages": [{"role": "user", "content": [{"text": 3}]}]}, "turn 1: expected a string"),
        ({"messages": [{"role": "system", "content": 0}]}, "turn 1: expected a string, got int"),
        ({"instruction": "add", "input": [1, 2]}, "input: expected a string, got int '1'"),
        ({"prompt": "hi", "system": {"a": 1}}, "system: expected a string, got keys a"),
        ({"messages": [{"role": "tool_call", "content": "[" * 100_000}]}, "a tool call as JSON"),
    ],
)
def test_what_cannot_be_kept_is_not_dropped_in_silence(tmp_path, record, complaint):
    path = lines(tmp_path / "p.jsonl", record)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} line 1, .*{complaint}"):
        read_prompts(path, tools="keep")


def test_a_blank_system_turn_is_left_out(tmp_path):
    turns = [{"role": "system", "content": " "}, {"role": "user", "content": "hi"}]
    assert read_prompts(lines(tmp_path / "p.jsonl", {"messages": turns}))[0].messages == user("hi")


def test_a_hub_data_set_that_breaks_midway(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        yield {"text": "a"}
        raise datasets.exceptions.DatasetGenerationError("at\nshard 7")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"owner/name \[train\]: expected .*: at shard 7; give"):
        read_prompts("owner/name")


def test_a_limit_of_none_is_refused(tmp_path):
    path = lines(tmp_path / "p.jsonl", {"text": "a"})
    with pytest.raises(ValueError, match="limit: expected a positive number, got 0"):
        read_prompts(path, limit=0)
