"""The promise: what a run needs is said before anything is loaded, and it is what the run takes,
with an adapter of the target before it begins to learn and after.
"""

from __future__ import annotations

import math
import os
import re
import socket
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from launching import exit_code_of_a_fork
from safetensors.torch import load_file
from tiny_training import (
    HIDDEN,
    VOCABULARY,
    random_answers,
    recipe_of,
    run,
    tiny_recipe,
    tiny_target,
    write_answers,
)
from transformers import LlamaConfig

from draftheads.heads.formats.hub import HEADS
from draftheads.scripts import cli
from draftheads.scripts.printing import print_counts, print_trial
from draftheads.train.advice import plan as planning
from draftheads.train.advice.plan import Plan, Shapes, make_plan
from draftheads.train.batches import Documents
from draftheads.train.data.answers import Answer
from draftheads.train.medusa import main
from draftheads.train.recipe import Recipe
from draftheads.train.setup import create_head


def recipe_file(made: Path, folder: Path, kind: str = "medusa", **run_choices) -> Path:
    path = folder / "recipe.yaml"
    values = tiny_recipe(made, kind, output=str(folder / "run"), **run_choices)
    path.write_text(yaml.safe_dump(values))
    return path


def command(monkeypatch, *arguments: object) -> int:
    """`draftheads plan ...` in this process."""
    monkeypatch.setattr("sys.argv", ["draftheads", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def printed(plan: Plan) -> str:
    with redirect_stdout(StringIO()) as said, mock.patch.dict(os.environ, COLUMNS="400"):
        print_counts(plan)
        print_trial(plan)
    return said.getvalue()


CHOICES = [
    *((kind, {}) for kind in HEADS),
    ("medusa", {"layers": 2, "vocabulary": 40, "labels": "soft"}),
    ("medusa", {"lm_head": "shared"}),
    ("sequential", {"conditioning": "hydra", "rank": None, "vocabulary": 40}),
    ("sequential", {"lm_head": "shared"}),
    ("eagle3", {"layers": 2, "vocabulary": None, "fc_norm": True, "feature_layers": [0, 1]}),
    ("eagle3", {"labels": "hard", "heads": 2, "head_dim": 24, "norm_before_fc": True}),
    ("eagle", {"layers": 2, "intermediate_size": 40}),
    ("block", {"vocabulary": 40, "lm_head": "own", "labels": "soft", "feature_layers": [0, 2]}),
    ("block", {"conditioning": "none", "mask": "learned", "confidence": True, "heads": 2}),
    ("block", {"conditioning": "markov", "confidence": True, "mask": 3, "embeddings": "own"}),
]


@pytest.mark.parametrize(("kind", "choices"), CHOICES)
def test_shapes_count_what_real_modules_hold(made, kind, choices):
    values = tiny_recipe(made, kind)
    values["head"] |= choices
    recipe = recipe_of(values)
    counted, target = Shapes(recipe), tiny_target()
    head = create_head(recipe, target, Documents.read(random_answers(60)))
    state = head.state_dict()
    assert counted.head == sum(p.numel() for p in head.parameters())
    moments = 2 * counted.trained
    assert counted.checkpoint == moments + sum(x.nbytes for x in state.values())
    assert counted.states == len(head.training_layers)


def test_the_target_is_counted_by_part(made):
    values = tiny_recipe(made)
    sizes, model = Shapes(recipe_of(values)), tiny_target().model
    assert sizes.frozen == sum(p.numel() for p in model.parameters())
    assert sizes.layers == 2
    assert sizes.per_layer == sum(p.numel() for p in model.model.layers[0].parameters())
    assert sizes.target_bytes() == 4 * sizes.frozen
    outside = 4 * (2 * VOCABULARY * HIDDEN + HIDDEN)  # the last norm, too
    four_bits = Shapes(recipe_of({**values, "target_bits": 4}))
    assert four_bits.target_bytes() - outside == sizes.per_layer
    assert sizes.target_bytes(shards=2) - outside == 4 * sizes.per_layer


def test_tied_embeddings_are_counted_once(tmp_path, made):
    LlamaConfig(
        vocab_size=50, hidden_size=32, num_attention_heads=4, tie_word_embeddings=True
    ).save_pretrained(tmp_path / "tied")
    sizes = Shapes(recipe_of({**tiny_recipe(made), "target": str(tmp_path / "tied")}))
    assert sizes.frozen - sizes.layers * sizes.per_layer == 50 * 32 + 32


@pytest.mark.mend("nothing said before the training that convert would refuse the head")
def test_plan_and_run_say_who_will_refuse_the_head(made, tmp_path, capsys):
    learned = tiny_recipe(made, "block")
    masked = {**learned, "head": {**learned["head"], "mask": 7, "conditioning": "markov"}}
    lines = []
    for values in (learned, masked):
        plan = make_plan(recipe_of(values), probe=False)
        [line] = [each for each in printed(plan).splitlines() if each.startswith("refused by: ")]
        lines.append(line.removeprefix("refused by: "))
    assert "vllm" in lines[0] and "a learned mask vector" in lines[0]
    assert lines[1] == "openvino: slots or heads of DSpark"
    assert run(made, tmp_path / "run", "run.steps=1", "eval.every=0", kind="block") == 0
    assert f"convert will refuse this head for {lines[0]}\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", HEADS)
def test_the_tensors_of_a_checkpoint_are_counted(made, tmp_path, kind):
    values = tiny_recipe(made, kind, output=str(tmp_path / "run"))
    plan = make_plan(recipe_of(values), probe=False)
    assert list(tmp_path.iterdir()) == [], "a plan touches no output"
    assert run(made, tmp_path / "run", "run.steps=1", kind=kind) == 0
    files = (tmp_path / "run" / "step-000001").rglob("*.safetensors")
    stored = sum(x.nbytes for path in files for x in load_file(path).values())
    assert plan.shapes.checkpoint == pytest.approx(stored, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "weights", "gradients", "optimizer"),
    [
        ("ddp", 1, 1, 2),
        ("zero1", 1, 1, 3 / 4),  # two moments, and the weights of its part once more
        ("zero2", 1, 1 / 4, 3 / 4),
        ("zero3", 1 / 4, 1 / 4, 2 / 4),
        ("fsdp2", 1 / 4, 1 / 4, 2 / 4),
    ],
)
def test_engines_divide_the_trained_state(made, engine, weights, gradients, optimizer):
    recipe = recipe_of(tiny_recipe(made, tokens_per_step=512))
    plan = make_plan(recipe, 4, engine, probe=False)
    size = plan.shapes.trained
    got = plan.memory["weights"], plan.memory["gradients"], plan.memory["optimizer"]
    assert got == pytest.approx((weights * size, gradients * size, optimizer * size))
    assert plan.work.micro_batches == 1
    alone = make_plan(recipe, probe=False)
    assert alone.work.micro_batches == 4
    assert alone.memory["gradients"] == size


@pytest.mark.mend('a plan said "1 processes"')
def test_a_plan_of_few_data_says_what_the_run_will_do(made, tmp_path, capsys):
    choices = {"epochs": 2, "steps": None, "tokens_per_step": None}
    values = tiny_recipe(made, output=str(tmp_path / "run"), **choices)
    values["data"]["rows_per_batch"] = 8
    plan = make_plan(recipe_of(values), probe=False)
    print_counts(plan)
    assert "frozen; one process" in " ".join(capsys.readouterr().out.split())
    assert plan.work.epochs == 2
    assert plan.recipe.data.rows_per_batch == plan.work.rows_per_step == 1, (
        "memory and time are of these"
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    said = capsys.readouterr().out
    assert f"done: {plan.work.steps} steps" in said
    assert all(line in said.splitlines() for line in plan.work.note.split("; ", 1))


@pytest.mark.mend("temporary folders of killed plans")
@pytest.mark.parametrize(
    "choices", [{}, {"data": {"cache_gb": 1e-6}}, {"features": {"mode": "cached"}}]
)
def test_the_probe_trains_and_leaves_nothing(made, tmp_path, monkeypatch, choices):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = f".draftheads-plan-x.{socket.gethostname()}.{os.getpid()}"  # with the same id, earlier
    (tmp_path / killed).mkdir()
    values = tiny_recipe(made, output=str(tmp_path / "run"))
    for section, more in choices.items():
        values[section] = values.get(section, {}) | more
    plan = make_plan(recipe_of(values))
    assert plan.reason == ""
    assert plan.time
    assert min(plan.trial.load, plan.trial.save, plan.time["step"]) > 0
    assert plan.time["total"] > 6 * plan.time["step"]
    assert plan.peak > plan.memory["libraries"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mend("a plan that tried batches of a billion rows")
def test_nothing_is_tried_without_answers_or_memory(made, tmp_path, monkeypatch):
    values = tiny_recipe(made)
    monkeypatch.setattr(planning, "start", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr(planning, "device_memory", lambda: 1_000_000)
    assert "memory cannot hold" in make_plan(recipe_of(values)).reason
    values["data"] |= {"rows_per_batch": 10**9, "path": str(tmp_path / "none")}
    plan = make_plan(recipe_of(values))
    assert plan.trial is None and f"no answers in {tmp_path / 'none'}" in plan.reason


def free_much() -> None:
    """In a fork, in which nothing else takes or keeps memory."""
    planning.forget_peak()
    before = planning.peak_memory()
    block = torch.ones(1 << 26)  # 256 MiB, float32
    del block
    assert planning.peak_memory() - before > 200 << 20
    planning.forget_peak()
    assert planning.peak_memory() - before < 100 << 20


@pytest.mark.mend("a plan took the memory of the process that started it for its own")
@pytest.mark.skipif(not planning.CLEAR.exists(), reason="this system counts no peak")
def test_memory_that_was_freed_is_in_the_peak():
    assert exit_code_of_a_fork(free_much) == 0


def test_one_process_tries_for_several_and_prints_nothing(made, capfd):
    plan = make_plan(recipe_of(tiny_recipe(made, tokens_per_step=512)), 4)
    assert plan.time, plan.reason
    assert capfd.readouterr() == ("", "")


def test_what_does_not_fit_is_said_in_one_line(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planning, "device_memory", lambda: 1_000_000)
    assert command(monkeypatch, recipe_file(made, tmp_path), "--no-probe") == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("does not fit")]
    assert len(lines) == 1
    assert re.search(r"expected at most 1.0 MB, needs [\d.]+ .B of memory; lower", lines[0])
    assert "data.rows_per_batch" in lines[0]
    assert "unknown: --no-probe was given" in said
    assert "without activations" not in said and "activations" not in said


def test_missing_data_leaves_the_number_of_steps_open(made, tmp_path, monkeypatch, capsys):
    recipe = recipe_file(made, tmp_path, steps=None, epochs=2)
    missing = f"data.path={tmp_path / 'missing'}"
    assert command(monkeypatch, recipe, missing, "--no-probe") == 0
    said = capsys.readouterr().out
    assert "no data found" in said
    assert "steps: unknown" in said
    assert command(monkeypatch, recipe, "--no-probe") == 0
    assert "epochs of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target_placement=sharded"], "target_placement=sharded: expected several"),
        (["target_placement=sharded", "data.cache_gb=1"], "data.cache_gb"),
        (["data.path=SMALL"], "expected token ids below 97"),
        (["head.dept=3"], "did you mean 'head.depth'"),
        (["target=/nowhere/at/all"], "target /nowhere/at/all"),
        (["head.kind=eagle3", "head.feature_layers=[9]"], "expected indices from 0"),
        (["--engine", "zero9"], "expected one of ddp, zero1"),
    ],
)
def test_a_plan_refuses_what_training_refuses(
    made, tmp_path, monkeypatch, capsys, overrides, message
):
    larger = [Answer([token + 1000 for token in x.tokens], x.learn) for x in random_answers(9)]
    write_answers(tmp_path / "larger", larger)
    overrides = [text.replace("SMALL", str(tmp_path / "larger")) for text in overrides]
    capsys.readouterr()
    assert command(monkeypatch, recipe_file(made, tmp_path), *overrides, "--no-probe") == 2
    planned = capsys.readouterr().err.strip()
    assert planned.startswith("error: ") and message in planned and "\n" not in planned
    if overrides[0] != "--engine":  # which a launch decides
        assert run(made, tmp_path / "run", *overrides) == 2
        assert message in capsys.readouterr().err


def test_the_peak_is_the_sum_of_what_is_known(made):
    plan = make_plan(recipe_of(tiny_recipe(made)), probe=False)
    assert plan.time == {}
    assert "activations" not in plan.memory, "they are measured or unknown"
    assert plan.peak == sum(plan.memory.values())


def joint_recipe(made: Path, **adapter: Any) -> Recipe:
    return recipe_of({**tiny_recipe(made), "adapter": {"rank": 4, **adapter}})


@pytest.mark.parametrize(
    "choices", [{}, {"layers": 1}, {"modules": ["q_proj", "down_proj"]}, {"rank": 7}]
)
def test_shapes_count_what_a_real_adapter_holds(made, choices):
    sizes = Shapes(joint_recipe(made, **choices))
    adapter = tiny_target().adapt(**{"rank": 4, "alpha": 16.0, **choices})
    assert sizes.adapter == sum(tensor.numel() for tensor in adapter.state().values())


def test_what_an_adapter_learns_with_is_in_memory(made):
    alone = make_plan(recipe_of(tiny_recipe(made)), probe=False)
    joint = make_plan(joint_recipe(made), probe=False)
    size = 4 * joint.shapes.adapter
    parts = ("weights", "gradients", "optimizer")
    more = [joint.memory[x] - alone.memory[x] for x in parts]
    assert more == [size, size, 2 * size]
    with pytest.raises(ValueError, match="ddp, zero1 or zero2 with an adapter, got zero3"):
        make_plan(joint_recipe(made), 2, "zero3", probe=False)


def test_what_is_known_is_said_before_the_trial(made, tmp_path, monkeypatch, capsys):
    def read(*_: object) -> None:
        out, err = capsys.readouterr()
        said = " ".join(out.split())
        assert "parameters trained" in said and "steps: 6, of" in said
        assert "two or three steps" in err and "two or three steps" not in said
        raise ValueError("seen")

    monkeypatch.setattr(planning, "start", read)
    assert command(monkeypatch, recipe_file(made, tmp_path)) == 0
    assert "time: unknown: a trial failed: seen" in capsys.readouterr().out


def test_minutes_hold_a_slow_first_epoch_and_later_ones_from_memory(made):
    values = tiny_recipe(made, minutes=1.0, steps=None)
    values["data"]["cache_gb"] = 1
    plan = make_plan(recipe_of(values), probe=False)
    trial = planning.StepTrial(0, 0, load=5.0, save=0.5, features=1.0, rest=0.5)
    epoch = plan.work.rows / plan.work.rows_per_step
    plan = replace(plan, trial=trial)
    assert 1.5 * epoch < 60, "else this tests nothing"
    assert plan.time["steps"] == math.ceil(epoch + (60 - 1.5 * epoch) / 0.5)
    assert plan.time["total"] == pytest.approx(5 + 60 + 2 * 0.5)
    assert plan.memory["cache"] == plan.shapes.feature_bytes(plan.work.tokens)
    assert "steps: as many as 1 minutes hold" in printed(plan)


def test_an_adapter_is_probed_and_shown(made):
    plan = make_plan(joint_recipe(made))
    assert plan.reason == "" and plan.time
    assert f"and {plan.shapes.adapter:,} of an adapter trained" in printed(plan)
