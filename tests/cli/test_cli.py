"""The promise: a mistake gets one clear line (expected, got, next step) and exit code 2."""

from __future__ import annotations

import importlib.metadata
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
from tiny_heads import make_head
from tiny_targets import random_model
from typed_commands import failed, prompt_file, questions

from draftheads.heads.formats.hub import HEADS as KINDS
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
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
    """Each head with each tree; a head that cannot fill one says so before anything is measured."""
    tiny, source = llama(), questions(tmp_path)
    for kind in ("eagle3", "medusa"):
        save_head(KINDS[kind].create(tiny), tmp_path / kind, target=tiny)
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
    answer = run(*bench, "--head", tmp_path / "medusa", "--tree", trees[0])
    failed(answer, "fixed tree", "nodes=3,depth=2,top_k=2", "4,2,1")


def test_broken_line_of_a_prompt_file(run, target, tmp_path):
    lines = [json.dumps({"prompt": f"question {n}"}) for n in range(20)]
    lines[16] = '{"prompt": "question'
    source = prompt_file(tmp_path, *lines)
    answer = run("distill", "--target", target, "--prompts", source, "--out", tmp_path / "data")
    failed(answer, "prompts.jsonl", "17")
    assert not (tmp_path / "data").exists()


def test_template_that_cannot_show_tool_calls(run, target, tmp_path):
    calls = [{"function": {"name": "add", "arguments": "{}"}}]
    talk = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "content": "3"}]  # fmt: skip
    source = prompt_file(tmp_path, json.dumps({"messages": talk}))
    distill = ["distill", "--target", target, "--prompts", source, "--max-new-tokens", 4,
               "--out", tmp_path / "data"]  # fmt: skip
    failed(run(*distill, "--tools", "keep"), "drops them", "leave them out with --tools drop")
    failed(run(*distill, "--tools", "some"), "--tools: expected keep, drop or a JSON file")
    assert not (tmp_path / "data").exists()
    failed(
        run(*distill, "--reasoning", "some"), "--reasoning: expected keep, drop or only, got 'some'"
    )
    assert run(*distill, "--tools", "drop")[0] == 0


@pytest.mark.parametrize("command", ["distill", "bench"])
def test_missing_prompt_file(run, target, tmp_path, command):
    questions(tmp_path)
    save_head(MedusaHead.create(llama()), tmp_path / "head", target=llama())
    rest = ["--out", tmp_path / "data"] if command == "distill" else ["--head", tmp_path / "head"]
    answer = run(command, "--target", target, "--prompts", tmp_path / "promts.jsonl", *rest)
    failed(answer, "promts.jsonl", "did you mean", "prompts.jsonl")


def test_empty_prompt(run, target, tmp_path):
    source = prompt_file(tmp_path, json.dumps({"prompt": "  "}))
    answer = run("distill", "--target", target, "--prompts", source, "--out", tmp_path / "data")
    failed(answer, "prompts.jsonl", "empty")


def test_misspelt_recipe_key(run, target, tmp_path):
    (tmp_path / "data" / "theirs").mkdir(parents=True)
    path = recipe(tmp_path, target, save_evry=3)
    failed(run("train", path), "save_evry", "run.save_every")
    failed(run("train", recipe(tmp_path, target), "head.from="), "head.from", "an empty one")
    failed(run("train", recipe(tmp_path, target), "optim.lrr=1"), "lrr", "optim.lr")


def test_missing_recipe_and_target(run, target, tmp_path):
    failed(run("train", tmp_path / "recip.yaml"), "recip.yaml")
    path = recipe(tmp_path, tmp_path / "nowhere")
    failed(run("train", path), "nowhere", "config.json")


def test_data_without_a_learned_token(run, target, tmp_path, monkeypatch):
    source = questions(tmp_path)
    monkeypatch.setattr("draftheads.train.data.distill.finish", count)  # leaves lines
    run("distill", "--target", target, "--prompts", source, "--out", tmp_path / "data",
        "--max-new-tokens", 5)  # fmt: skip
    for path in (tmp_path / "data").glob("answers-*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**r, "learn": []}) + "\n" for r in records))
    failed(run("train", recipe(tmp_path, target)), "expected tokens written by the target")


def test_head_of_another_target(run, target, tmp_path):
    other = tmp_path / "other"
    random_model("llama").save_pretrained(other)
    save_head(MedusaHead.create(llama()), tmp_path / "head", target=llama())
    answer = run(
        "bench", "--target", other, "--head", tmp_path / "head", "--prompts", questions(tmp_path)
    )
    failed(answer, "vocabulary 259", "19", "pass the target this head was trained for")


def test_target_with_a_recurrent_state(run, tmp_path):
    random_model("mamba").save_pretrained(tmp_path / "mamba")
    answer = run("distill", "--target", tmp_path / "mamba", "--prompts", questions(tmp_path),
                 "--out", tmp_path / "data")  # fmt: skip
    failed(answer, "recurrent")


def test_prompts_longer_than_the_context(run, target, tmp_path):
    source = prompt_file(tmp_path, json.dumps({"prompt": "long " * 200}))
    save_head(MedusaHead.create(llama()), tmp_path / "head", target=llama())
    answer = run("bench", "--target", target, "--head", tmp_path / "head", "--prompts", source)
    failed(answer, "context", "256", "shorter prompts")


@pytest.mark.parametrize("where", ["file/below", "/proc/draftheads"])
def test_folder_that_cannot_be_written(run, target, tmp_path, where):
    (tmp_path / "file").write_text("")
    answer = run(
        "distill", "--target", target, "--prompts", questions(tmp_path), "--out", tmp_path / where
    )
    failed(answer, "--out: expected a folder that can be written", str(tmp_path / where), "give")


def test_no_head_and_bad_trees(run, target, tmp_path):
    failed(run("chat", "--head", tmp_path / "nothing"), "nothing: expected a head, got nothing")
    failed(run("publish", tmp_path, "me/heads"), "expected a head, got an empty folder")
    save_head(make_head(MedusaHead, llama(), depth=2), tmp_path / "head", target=llama())
    bench = [
        "bench",
        "--target",
        target,
        "--head",
        tmp_path / "head",
        "--prompts",
        questions(tmp_path),
    ]
    failed(run(*bench, "--tree", "1,1,1"), "3 deep, the head predicts only 2")
    failed(run(*bench, "--tree", "4;2"), "expected widths like 4,2,1")


def test_figures_that_could_not_be_written_are_refused_before_measuring(
    run, target, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    bench = ["bench", "--target", target, "--head", "me/heads", "--prompts", questions(tmp_path)]
    failed(run(*bench, "--json", tmp_path / "file" / "a.json"), "a.json", "can be written")
    failed(run(*bench, "--json", "/proc/a.json"), "/proc/a.json", "can be written")  # not by root
    failed(run(*bench, "--json", tmp_path), "expected a file to write, got a folder")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("fifo", "link"):  # in whose place a file would stand
        failed(run(*bench, "--json", tmp_path / name), f"{name}: expected a file to write, got")
    failed(run(*bench, "--json", "-"), "expected a file to write, got -, and stdout has the table")
    assert run(*bench, "--seed", 2**63)[0] == 2


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


DEVICES = {
    "--device": ("cuda:99", "device: expected one of this machine, got 'cuda:99'"),
    "--dtype": ("fp32", "--dtype: expected auto, float32, bfloat16 or float16, got 'fp32'"),
}


@pytest.mark.parametrize("command", ["distill", "bench", "chat", "doctor", "convert"])
@pytest.mark.parametrize("option", DEVICES)
def test_a_device_or_dtype_that_is_not_there(run, target, tmp_path, command, option):
    save_head(MedusaHead.create(llama()), tmp_path / "head", target=llama())
    source, head = questions(tmp_path), ["--head", tmp_path / "head"]
    rest = {
        "distill": ["--prompts", source, "--out", tmp_path / "data"],
        "bench": [*head, "--prompts", source],
        "chat": head,
        "doctor": [*head, "--prompts", source],
        "convert": [tmp_path / "head", tmp_path / "vllm", "--to", "vllm"],
    }[command]
    value, complaint = DEVICES[option]
    failed(run(command, "--target", target, *rest, option, value), complaint)
    assert not (tmp_path / "data").exists() and not (tmp_path / "vllm").exists()


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "mps:7"])
def test_a_device_that_is_none(run, target, tmp_path, device):
    answer = run("distill", "--target", target, "--prompts", questions(tmp_path),
                 "--out", tmp_path / "data", "--device", device)  # fmt: skip
    failed(answer, f"device: expected one of this machine, got {device!r}; try ")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        ('{"tokenize": true}', "got tokenize, which is always set"),
        ('{"messages": []}', "got messages, which is always set"),
        ('{"add_generation_prompt": false}', "got add_generation_prompt, which is always set"),
    ],
)
def test_template_arguments_that_none_can_be(run, target, tmp_path, text, complaint):
    """They made every prompt of a distillation "skipped", and its exit code 0."""
    answer = run("distill", "--target", target, "--prompts", questions(tmp_path),
                 "--out", tmp_path / "data", "--template-args", text)  # fmt: skip
    failed(answer, "--template-args: ", complaint)
    assert not (tmp_path / "data").exists()


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


def test_the_version_is_the_packages(run):
    assert run("--version") == (0, f"draftheads {importlib.metadata.version('draftheads')}\n", [])


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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("frobnicate", "No such command 'frobnicate'; see `draftheads --help`"),
        ("distil", "Did you mean 'distill'?"),
        ("distill --temprature 1", "No such option: --temprature (Possible options: "),
        ("distill --target me/x", "Missing option '--prompts'; see `draftheads distill --help`"),
        ("chat --system", "Option '--system' requires an argument"),
        ("keys optim all", "Got unexpected extra argument(s) (all); see `draftheads keys --help`"),
        (
            "distill --tools maybe",
            "--tools: expected keep, drop or a JSON file of definitions, got ",
        ),
        ("distill --reasoning x", "--reasoning: expected keep, drop or only, got 'x'; see `draft"),
        ("bench --dtype fp", "--dtype: expected auto, float32, bfloat16 or float16, got 'fp'"),
        ("bench --nodes 4,x", "--nodes: expected numbers such as 4,8,16, got '4,x'"),
        ("distill --limit 0", "--limit: expected greater than or equal to 1, got '0'; see "),
        ("distill --limit few", "--limit: expected a valid integer, got 'few'; see `draftheads"),
    ],
)
def test_a_command_line_that_is_wrong(run, words, line):
    failed(run(*words.split()), line)


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
    "line",
    [
        "chat --head|",
        "chat --head=",
        "chat --target x --head|",
        "bench --target|  --head x --prompts y",
        "bench --target x --head y|  --prompts z",
        "bench --target x --head y --prompts|",
        "tune --head x --prompts|",
        "distill --target x --prompts y --out|",
        "distill --target x --prompts y --out= ",
        "distill --target x --prompts y --out o --server|",
        "serve --target x --name|",
        "distill --target x --prompts y --out o --device|",
        "doctor --target x --head y --data|",
        "bench --target x --head y --prompts z --json|",
        "report|",
        "publish| user/name",
        "convert x| --to vllm",
        "merge| x",
        "import-answers| --target x --out y",
        "data-preview|",
        "plan|",
        "train|",
        "train x.yaml|",
    ],
)
def test_an_empty_name_is_refused_and_never_read_as_the_working_directory(
    run, line, monkeypatch, tmp_path
):
    """As from `--head "$UNSET"`; | stands for an empty argument. The folder is full of files that
    the commands could take.
    """
    save_head(MedusaHead.create(llama()), tmp_path, target=llama())
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    words = line.replace("|", " | ").split()
    words = [word.replace("|", "") for word in words]
    code, out, errors = run(*words)
    option = words[words.index("") - 1] if "" in words else line.split()[-1].rstrip("=")
    named = option if option.startswith("--") else "an argument"
    assert (code, out) == (2, "")
    assert errors == [f"error: {named}: expected a value, got an empty one; {cli.NO_VALUE}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--head", "--nodes"])
@pytest.mark.parametrize("last", [[], ["--learn"]])
def test_an_option_without_its_value_is_not_left_out_in_silence(run, option, last):
    """As from `--head $UNSET`: the plain model chatted."""
    code, _, [error] = run("chat", "--target", "me/x", option, *last)
    assert code == 2
    assert (last or [option])[0] in error


@pytest.mark.parametrize("head", ["ngram+", "+", "model:"])
def test_a_part_of_a_name_that_is_empty_is_refused(run, head, target, monkeypatch, tmp_path):
    save_head(MedusaHead.create(llama()), tmp_path, target=llama())
    monkeypatch.chdir(tmp_path)
    code, _, [error] = run("chat", "--target", target, "--head", head)
    assert code == 2 and "expected a" in error and "got the empty name ''; pass a" in error


@pytest.mark.parametrize(
    "line",
    [
        "chat --target ~nobody-of-that-name/x",
        "chat --head ~nobody-of-that-name/x",
        "distill --target ~nobody-of-that-name/x --prompts PROMPTS --out o",
    ],
)
def test_the_home_of_an_unknown_user_is_one_line(run, line, tmp_path):
    """`Path.expanduser` raises RuntimeError for it."""
    code, _, errors = run(*line.replace("PROMPTS", str(questions(tmp_path))).split())
    assert code == 2 and len(errors) == 1 and "~nobody-of-that-name/x" in errors[0]


@pytest.mark.parametrize("value", [" ", ""])
def test_the_library_refuses_empty_names(value, monkeypatch, tmp_path):
    save_head(MedusaHead.create(llama()), tmp_path, target=llama())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a head, got the empty name"):
        load_head(value)
    with pytest.raises(FileNotFoundError, match="expected a target, got the empty name"):
        Target.load(value)


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
