"""The promise: where a CPU packs weights, every drafter drafts and every command decodes. The other
targets of the tests are too small to be packed.
"""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from asked import Asked
from hybrid_targets import write_mtp_target
from tiny_chat import END, byte_tokenizer
from tiny_heads import random_head
from tiny_targets import is_packed
from typed_commands import questions

from draftheads.heads.formats.hub import HEADS, save_head
from draftheads.heads.target.model import Target
from draftheads.infer.engine import Speculator
from draftheads.infer.pipeline.loading import Place, load_parts
from draftheads.infer.serve.scheduler import Scheduler

WIDTH = 512
"""Square matrices of this width are packed."""
NEW = 6
OTHERS = ["ngram", "mtp", "model:small", "model:small+ngram", "my-eagle3+ngram"]
NAMES = [*OTHERS, *(f"my-{kind}" for kind in HEADS)]
FEW = ["--dtype", "float32", "--threads", 1, "--max-new-tokens", NEW]
ONE = ["--prompts", "prompts.jsonl", "--limit", 2]
COMMANDS = {
    "bench": [*ONE, "--json", "bench.json"],
    "tune": [*ONE, "--nodes", 2, "--dry-run"],
    "chat": [],
    "distill": ["--prompts", "prompts.jsonl", "--out", "data"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target with an MTP layer, a smaller model, and a head of each kind."""
    folder = tmp_path_factory.mktemp("packed")
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "vocab_size": END + 1}
    for name, layers in (("small", 1), ("target", 2)):
        write_mtp_target(folder / name, "states-first", **sizes, num_hidden_layers=layers)
        byte_tokenizer().save_pretrained(folder / name)
    target = Target.load(folder / "target", dtype="float32")
    for kind in HEADS:
        save_head(random_head(kind, target), folder / f"my-{kind}", target=target)
    questions(folder, 2)
    return folder


@pytest.fixture(autouse=True)
def names_are_short(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.mend("a traceback for drafts by layers of the target on a CPU")
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_drafts_for_a_packed_target(name):
    """In chats, pipelines and servers, which load it so."""
    target, drafts = load_parts(name, "target", Place("float32", threads=1))
    assert is_packed(target.model)
    engine, texts = Speculator(target, drafts), []
    for decode in (Speculator(target), engine):
        steps = decode.generate([5, 6, 7, 8] * 3, max_new_tokens=NEW)
        texts.append([token for step in steps for token in step.tokens])
    scheduler = Scheduler(engine, slots=1)
    asked = Asked([5, 6, 7, 8] * 3, new=NEW)
    scheduler.submit(asked.job)
    assert texts[0] == texts[1] == asked.answer()
    scheduler.close()
    scheduler.join(20)


@pytest.mark.parametrize(
    ("command", "head"),
    [
        ("distill", "my-eagle3"),
        ("chat", "model:small"),
        pytest.param("tune", "my-block", marks=pytest.mark.slow),
    ],
)
def test_every_command_decodes_with_a_packed_target(run, monkeypatch, tmp_path, command, head):
    monkeypatch.setattr("sys.stdin", StringIO("hello\n"))
    options = [tmp_path if word == "data" else word for word in COMMANDS[command]]
    code, said, errors = run(command, "--target", "target", "--head", head, *FEW, *options)
    assert (code, errors) == (0, []) and said


@pytest.mark.slow
def test_all_drafters_of_a_packed_target_race(run):
    heads = [word for name in NAMES for word in ("--head", name)]
    code, _, errors = run("bench", "--target", "target", *heads, *FEW, *COMMANDS["bench"])
    assert (code, errors) == (0, [])
    rows = json.loads(Path("bench.json").read_text())["heads"]
    assert {row["name"].partition("@")[0] for row in rows} >= {*NAMES}
    assert all(row["lossless"] for row in rows)


@pytest.mark.slow
def test_a_head_of_a_packed_target_is_examined(run):
    code, _, errors = run(
        *["doctor", "--target", "target", "--head", "my-eagle3", "--prompts", "prompts.jsonl"],
        *["--dtype", "float32", "--threads", 1],
    )
    assert code in (0, 1) and errors == []
