"""The promise: --head takes every drafter by its name, and the table has transformers' own beside
it; --limit is spread over categories.
"""

from __future__ import annotations

import json
import warnings
from io import StringIO

import pytest
from tiny_chat import llama
from tiny_heads import make_head
from typed_commands import questions

from draftheads.heads.formats.hub import save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.infer.prompt import encode_prompt
from draftheads.scripts.cli import app
from draftheads.scripts.openings import opening_ids


@pytest.fixture
def heads(tmp_path):
    """A head, and one in a folder with a plus in its name."""
    for name in ("medusa", "a+b"):
        save_head(make_head(MedusaHead, llama(), depth=2), tmp_path / name, target=llama())
    return tmp_path


@pytest.mark.slow
def test_all_drafters_in_one_table(run, target, heads):
    texts = f"retrieve:{questions(heads)}"
    sources = ["ngram", texts, f"model:{target}", heads / "a+b"]
    sources += [f"{heads}/medusa+ngram"]
    code, table, _ = run(
        *["bench", "--target", target, "--prompts", questions(heads), "--limit", 2],
        *["--max-new-tokens", 12, "--nodes", 4],
        *(word for source in sources for word in ("--head", source)),
        *["--json", heads / "bench.json"],
    )
    assert code == 0 and "generate" in table
    rows = json.loads((heads / "bench.json").read_text())["heads"]
    assert all(row["lossless"] for row in rows)
    own, named = f"model:{target.name}", f"retrieve:{questions(heads).name}"
    assert [(row["name"], row["nodes"]) for row in rows] == [
        (f"{name}@4", 4) for name in ("ngram", named, own, "a+b", "medusa+ngram")
    ]
    by_name = {row["name"]: row["tokens_per_step"] for row in rows}
    assert by_name[f"{own}@4"] > 1, "the target drafts for itself"


def test_a_chat_without_a_head(run, target, monkeypatch):
    monkeypatch.setattr("sys.stdin", StringIO("hello\n"))
    code, said, _ = run("chat", "--head", "ngram", "--target", target, "--max-new-tokens", 8)
    assert code == 0 and "tokens/step" in said


@pytest.mark.parametrize("fault", [None, "no compiler"])
def test_a_chat_says_that_it_compiles_where_it_does(fault, target, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", StringIO(""))
    monkeypatch.setattr("draftheads.infer.fixed.maker.why_not", lambda target: fault)
    with warnings.catch_warnings(record=True) as refused:
        warnings.simplefilter("always")
        words = ["chat", "--head", "ngram", "--target", str(target), "--compile"]
        app(words, standalone_mode=False)
    assert ("compiling takes" in capsys.readouterr().err) is (fault is None)
    said = [str(each.message) for each in refused if "without compilation" in str(each.message)]
    assert [line.endswith("no compiler") for line in said] == ([True] if fault else [])


def test_prompts_are_taken_evenly_from_all_categories(tmp_path):
    """Spec-Bench's layout. Only first turns are decoded."""
    names = ["writing"] * 5 + ["qa"] * 2 + ["rag"]
    records = [
        {"question_id": n, "category": name, "turns": [f"question {n}", "and then?"]}
        for n, name in enumerate(names)
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    tiny = llama()
    in_turns = [
        encode_prompt(tiny, [{"role": "user", "content": f"question {n}"}])
        for n in (0, 5, 7, 1, 6, 2)
    ]
    assert opening_ids(tiny, str(path), 6) == in_turns
    assert len(opening_ids(tiny, str(path), 99)) == len(names)
