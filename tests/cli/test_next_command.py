"""The promise: what a command prints as the next one is a command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main
from tiny_chat import llama
from tiny_heads import make_head
from typed_commands import questions

from draftheads.heads.formats.hub import record_tuned, save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.tree import StaticTree
from draftheads.scripts import demo
from draftheads.scripts.cli import app
from draftheads.scripts.data import say_init
from draftheads.scripts.measuring import after_bench
from draftheads.scripts.options import say_next, target_options


@pytest.fixture
def folder(tmp_path, target) -> Path:
    return save_head(make_head(MedusaHead, llama(), depth=2), tmp_path / "head", target=llama())


def write_config(head: Path) -> None:
    """What is read of a head before it is loaded."""
    head.mkdir(exist_ok=True)
    (head / "config.json").write_text('{"draftheads": {}}')


def following(capsys) -> list[str]:
    """The words of the next command, which the command line takes."""
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next: ")]
    program, command, *words = shlex.split(line.removeprefix("next: "))
    assert program == "draftheads"
    typer.main.get_group(app).commands[command].make_context(command, list(words))
    return [command, *words]


def test_answers_are_followed_by_a_recipe(capsys, target, tmp_path):
    say_init(str(target), tmp_path / "data")
    assert following(capsys)[:3] == ["init", "--target", str(target)]
    say_init(str(target), tmp_path / "data", "me/lora")
    assert following(capsys)[3:5] == ["--adapter", "me/lora"]


@pytest.mark.parametrize(
    ("winner", "is_tuned", "command", "head"),
    [
        ("head@8", False, "tune", "folder"),
        ("head", False, "tune", "folder"),
        ("head@8", True, "chat", "folder"),
        ("head", True, "chat", "folder"),
        ("ngram", False, "chat", "ngram"),
        ("head+ngram", False, "chat", "folder+ngram"),
        ("", False, "tune", "folder"),
    ],
)
def test_a_bench_is_followed_by_its_winner(
    capsys, target, folder, tmp_path, winner, is_tuned, command, head
):
    if is_tuned:
        record_tuned(folder, StaticTree.from_widths([1]), {"machine": "this one"})
    sources = {"head": f"{folder}", "ngram": "ngram", "head+ngram": f"{folder}+ngram"}
    result = SimpleNamespace(name=winner) if winner else None
    after_bench(target_options(str(target), None), str(questions(tmp_path)), sources, result)
    words = following(capsys)
    assert words[0] == command
    assert words[words.index("--head") + 1] == head.replace("folder", str(folder))


def test_where_nothing_pays_the_plain_model_chats(capsys, target, tmp_path):
    after_bench(target_options(str(target), None), "x", {"ngram": "ngram"}, None)
    assert following(capsys) == ["chat", "--target", str(target)]


def test_names_with_spaces_are_quoted(capsys, tmp_path, target):
    say_next("chat", "--target", target, "--system", "Be brief.")
    assert following(capsys)[-1] == "Be brief."


def test_the_demo_types_commands(monkeypatch, tmp_path):
    typed = []

    def command(words: list[str]) -> None:
        typed.append(words[0])
        typer.main.get_group(app).commands[words[0]].make_context(words[0], words[1:])
        rows = [{"name": "medusa@4", "speedup": 2.0}, {"name": "eagle3@8", "speedup": 3.0}]
        (tmp_path / "bench.json").write_text(json.dumps({"heads": rows}))

    for kind in demo.KINDS:
        write_config(tmp_path / kind)
    monkeypatch.setattr(demo, "load", lambda head: SimpleNamespace(engine=head))
    monkeypatch.setattr(demo, "sample_chat", lambda engine, *_, **__: typed.append(engine))
    demo.demo(tmp_path, command)
    journey = ["distill", "train", "train", "train", "bench", "tune", "report"]
    assert typed == [*journey, tmp_path / "eagle3"]
