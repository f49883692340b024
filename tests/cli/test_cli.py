"""The promise: commands do what a user types, from prompts to a chat. Mistakes: `test_refusals`."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
import yaml
from tiny_chat import llama
from typed_commands import failed, questions

from draftheads.heads.formats.hub import HEADS as KINDS
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.infer import threads
from draftheads.scripts import cli, training
from draftheads.train.data.answers import count
from draftheads.train.recipe import AdapterChoices, Recipe

HEADS = {
    "medusa": {"kind": "medusa", "depth": 2, "nodes": 6},
    "eagle3": {"kind": "eagle3", "steps": 2, "depth": 2, "top_k": 3, "nodes": 6},
    "eagle": {"kind": "eagle", "depth": 2, "top_k": 3, "nodes": 6},
}


def recipe(folder: Path, target: Path, *, kind: str = "medusa", **run_choices: object) -> Path:
    path = folder / "recipe.yaml"
    choices = {
        "target": str(target),
        "data": {"path": str(folder / "data"), "sequence_length": 64, "rows_per_batch": 2},
        "head": HEADS[kind],
        "run": {
            "output": str(folder / "run"),
            "steps": 2,
            "tokens_per_step": 128,
            "save_every": 2,
            **run_choices,
        },
    }
    path.write_text(yaml.safe_dump(choices))
    return path


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.thorough] * (kind == "eagle")) for kind in HEADS]
)
def test_the_whole_journey(run, target, tmp_path, kind):
    """distill, train, bench, then chat, as a user types them."""
    source = questions(tmp_path)
    made = run("distill", "--target", target, "--prompts", source, "--out", tmp_path / "data",
               "--max-new-tokens", 40, "--temperature", 1.0, "--seed", 4)  # fmt: skip
    assert made[0] == 0
    assert "12 prompts = 12 done + 0 skipped + 0 failed" in made[1]
    assert run("train", recipe(tmp_path, target, kind=kind))[0] == 0
    report = tmp_path / "bench.json"
    bench = ["bench", "--target", target, "--head", tmp_path / "run", "--prompts", source]
    code, table, _ = run(*bench, "--limit", 3, "--max-new-tokens", 8,
                         "--nodes", "2,4", "--json", report)  # fmt: skip
    assert code == 0 and "run@4" in table
    heads = json.loads(report.read_text())["heads"]
    assert [(head["name"], head["lossless"]) for head in heads] == [
        ("run@2", True),
        ("run@4", True),
    ]
    assert load_head(tmp_path / "run").depth == 2


def test_trees_of_the_command_line(run, target, tmp_path):
    """A head with each tree."""
    tiny, source = llama(), questions(tmp_path)
    save_head(KINDS["eagle3"].create(tiny), tmp_path / "eagle3", target=tiny)
    bench = ["bench", "--target", target, "--prompts", source, "--limit", 1,
             "--max-new-tokens", 4, "--json", tmp_path / "bench.json"]  # fmt: skip
    trees = ["nodes=3,depth=2,top_k=2", "2,1"]
    options = ["--tree", trees[0], "--tree", trees[1]]
    assert run(*bench, "--head", tmp_path / "eagle3", *options)[0] == 0
    heads = json.loads((tmp_path / "bench.json").read_text())["heads"]
    assert [(head["name"], head["nodes"]) for head in heads] == [
        ("eagle3@nodes=3,depth=2,top_k=2", 3),
        ("eagle3@2,1", 4),
    ]


def test_data_without_a_learned_token(run, target, tmp_path, monkeypatch):
    source = questions(tmp_path)
    monkeypatch.setattr("draftheads.train.data.distill.finish", count)  # leaves lines
    run("distill", "--target", target, "--prompts", source, "--out", tmp_path / "data",
        "--max-new-tokens", 5)  # fmt: skip
    for path in (tmp_path / "data").glob("answers-*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**r, "learn": []}) + "\n" for r in records))
    failed(run("train", recipe(tmp_path, target)), "expected tokens written by the target")


@pytest.mark.mend(
    "warnings and a line of progress stood on stdout, in what a command was redirected to"
)
def test_stdout_has_results_alone(monkeypatch, capsys):
    """Warnings stood in what `draftheads ... > file` wrote."""

    def names() -> list[str]:
        logging.getLogger("draftheads.recipes").warning("this is no result")
        return []

    monkeypatch.setattr(training, "recipe_names", names)
    monkeypatch.setattr(sys, "argv", ["draftheads", "recipes"])
    with pytest.raises(SystemExit):
        cli.main()
    out, err = capsys.readouterr()
    assert out == "" and "this is no result" in err


@pytest.mark.parametrize("command", ["distill", "bench"])
def test_the_revision_is_the_targets(run, target, tmp_path, monkeypatch, command):
    seen = []

    def load(name: str, **options: object) -> None:
        seen.append((name, options["revision"]))
        raise ValueError("enough")

    monkeypatch.setattr("draftheads.heads.target.model.Target.load", load)
    save_head(MedusaHead.create(llama()), tmp_path / "head", target=llama())
    rest = ["--out", tmp_path / "data"] if command == "distill" else ["--head", tmp_path / "head"]
    run(command, "--target", target, "--prompts", questions(tmp_path), *rest, "--revision", "v2")
    assert seen == [(str(target), "v2")]


def test_all_keys_of_all_kinds_are_listed(run):
    """As long as each field says what it is, nothing else has to be kept up to date."""
    code, out, _ = run("keys")
    assert code == 0
    listed = dict(zip(out.splitlines()[::2], out.splitlines()[1::2], strict=True))
    assert all(described.strip() for described in listed.values())
    keys: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for line in listed:
        key, _, kinds = line.partition(" = ")[0].partition(" (")
        for kind in kinds.rstrip(")").split(", ") if kinds else KINDS:
            assert key not in keys[kind], "once"
            keys[kind].add(key)
    for kind, head in KINDS.items():
        model = head.Choices
        values = {"target": "t", "data": {"path": "d"}, "run": {"output": "o", "steps": 1}}
        head = {"kind": kind, "from": "a head"}  # which is dumped only where it is set
        dumped = Recipe(**values, head=head, adapter=None).model_dump()
        names = {field.alias or name for name, field in model.model_fields.items()}
        assert keys[kind] >= {f"head.{name}" for name in names} | {"adapter.rank"}
        flat = {k if not isinstance(v, dict) else f"{k}.{n}" for k, v in dumped.items()
                for n in (v if isinstance(v, dict) else [k])}  # fmt: skip
        assert keys[kind] - {f"adapter.{name}" for name in AdapterChoices.model_fields} == flat
    assert "run.save_every = 500 [int]" in listed
    assert "data.path = required [pathlib.Path]" in listed
    assert "optim.betas = [0.9, 0.95] [tuple[float, float]" in out


def test_help_waits_for_no_library():
    """What is slow to import is imported by the command that needs it."""
    slow = "{'torch', 'transformers', 'huggingface_hub', 'pydantic', 'draftheads.heads'}"
    line = f"import sys, draftheads.scripts.cli; sys.exit(repr({slow} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert ended.stderr.strip() == "set()"


def test_no_command_shows_the_help(run):
    code, out, errors = run()
    assert code == 2 and errors == [] and "Usage: draftheads" in out and "data-preview" in out
    assert run("--help")[0] == 0


@pytest.mark.parametrize("command", ["keys", "distill", "train"])
@pytest.mark.parametrize("raised", [KeyboardInterrupt, typer.Abort])
def test_ctrl_c_is_one_line_which_names_resuming_where_something_resumes(
    monkeypatch, capsys, raised, command
):
    def stop() -> None:
        raise raised

    monkeypatch.setattr(sys, "argv", ["draftheads", command])
    monkeypatch.setattr(cli, "app", typer.Typer())
    cli.app.command(command)(stop)
    cli.app.command("other")(stop)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    advice = "" if command == "keys" else "; run the same command again to resume"
    assert capsys.readouterr() == ("", f"interrupted by Ctrl-C{advice}\n")


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_spin_briefly_unless_the_user_has_chosen(chosen, spins):
    """It is said before torch, whose OpenMP reads it once, is loaded."""
    ours = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environment = {key: value for key, value in os.environ.items() if key not in ours} | chosen
    line = (
        "import atexit, os, sys; from draftheads.scripts import cli; assert 'torch' not in "
        "sys.modules; sys.argv = ['draftheads', '--version']; "
        "atexit.register(lambda: print(os.environ.get('GOMP_SPINCOUNT'))); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", line], env=environment, capture_output=True)
    assert done.stdout.decode().splitlines()[-1] == spins


@pytest.mark.parametrize(
    ("given", "seconds", "chosen"),
    [(None, {1: 1.0, 4: 1.0}, 1), (None, {1: 1.0, 4: 0.5}, 4), (3, {1: 1.0, 4: 1.0}, 3)],
)
def test_one_thread_decodes_where_more_gain_nothing(monkeypatch, given, seconds, chosen):
    """Measured on a clock of the test's own."""
    clock, count = [0.0], [4]

    def forward(tokens_B1, use_cache):
        clock[0] += 0.01 * seconds[count[0]]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: count.__setitem__(0, number))
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock[0])
    target = SimpleNamespace(model=forward, device=torch.device("cpu"), is_skeleton=False)
    threads.choose_threads(given, target)
    assert count == [chosen]
    count[0] = 4
    without = SimpleNamespace(device=torch.device("cpu"), is_skeleton=True)
    threads.choose_threads(None, without)
    assert count == [4], "a target without layers is not timed"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    count[0] = 4
    threads.choose_threads(None, target)
    assert count == [4], "the user has chosen"


def test_a_demo_that_is_interrupted_while_it_trains_ends(monkeypatch, run, tmp_path):
    from draftheads.scripts.demo import demo

    monkeypatch.setattr("draftheads.train.medusa.main", lambda *_: 130)
    typed = []
    (tmp_path / "data" / "theirs").mkdir(parents=True)

    def command(words: list[str]) -> int | None:
        typed.append(words[0])
        return run(*words)[0] if words[0] == "train" else None

    with pytest.raises(typer.Exit) as ended:
        demo(tmp_path, command)
    assert ended.value.exit_code == 130
    assert typed == ["distill", "train"]
