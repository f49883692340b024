"""The promise: a time budget is a number of steps, fixed before the first one by a trial without
a trace; all processes have the same, and a resumed run keeps it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml
from launching import ENGINES, outputs_of_two_forks
from tiny_training import assert_same, run, tiny_recipe, weights

from draftheads.heads.formats.hub import HEADS
from draftheads.train import loop
from draftheads.train.checkpoint import load_optimizer_state, newest
from draftheads.train.metrics import Progress, read_metrics

"""Choices that make a step random."""


def length(output: Path) -> int:
    """Steps of a finished run."""
    saved, _ = newest(output)
    assert saved is not None and saved.state.step == saved.state.steps
    return saved.state.steps


def assert_same_run(left: Path, right: Path, steps: int) -> None:
    assert_same(weights(left, steps), weights(right, steps))
    folders = [output / f"step-{steps:06d}" for output in (left, right)]
    assert_same(*map(load_optimizer_state, folders))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["data.cache_gb=0", "data.cache_gb=1"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_trial_leaves_no_trace(made, tmp_path, capsys, kind, cache):
    budget, counted = tmp_path / "budget" / "run", tmp_path / "counted" / "run"
    budget.parent.mkdir()
    counted.parent.mkdir()
    choices = [cache, "head.anchors=3" if kind == "block" else "head.depth=3"]
    assert run(made, budget, "run.minutes=0.003", *choices, kind=kind) == 0
    steps = length(budget)
    assert f"run.minutes=0.003: {steps} steps" in capsys.readouterr().out
    assert run(made, counted, f"run.steps={steps}", *choices, kind=kind) == 0
    assert_same_run(budget, counted, steps)
    losses = [[x["loss"] for x in read_metrics(o) if "loss" in x] for o in (budget, counted)]
    assert losses[0] == losses[1] and len(losses[0]) == steps


def test_a_trial_leaves_no_trace_in_an_adapter(made, tmp_path):
    choices = ["adapter.rank=4", "adapter.lr=0.02", "adapter.start=0.3"]
    for name in ("budget", "counted"):
        (tmp_path / name).mkdir()
    budget, counted = (tmp_path / name / "run" for name in ("budget", "counted"))
    assert run(made, budget, "run.minutes=0.003", *choices) == 0
    steps = length(budget)
    assert run(made, counted, f"run.steps={steps}", *choices) == 0
    assert_same_run(budget, counted, steps)


@pytest.fixture
def paced(monkeypatch):
    """Every trial finds two seconds per step, and one where features are in memory."""
    trials = []

    def seconds(run):
        trials.append(run)
        return 2.0, 1.0

    monkeypatch.setattr(loop, "trial_seconds", seconds)
    return trials


def test_steps_after_the_first_epoch_are_faster(made, tmp_path, capsys, paced):
    assert run(made, tmp_path / "run", "run.minutes=0.2", "run.tokens_per_step=256") == 0
    epoch = paced[0].order.steps(1)
    assert 2 * epoch < 12, "else this tests nothing"
    assert length(tmp_path / "run") == epoch + 12 - 2 * epoch
    assert "warning: few steps to learn from; raise run.minutes" in capsys.readouterr().out


def test_no_budget_is_too_short_for_a_step(made, tmp_path, paced):
    assert run(made, tmp_path / "run", "run.minutes=1e-4") == 0
    assert length(tmp_path / "run") == 1


def test_a_resumed_run_keeps_its_length_or_has_other_steps(made, tmp_path, capsys, paced):
    output = tmp_path / "run"
    original = Progress.step

    def interrupt(self, number, *rest):
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        original(self, number, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "step", interrupt)
        assert run(made, output, "run.minutes=0.2") == 130
    assert run(made, output, "run.minutes=0.2") == 0
    steps = length(output)
    assert len(paced) == 1, "a resumed run is not timed again"
    assert run(made, output, "run.minutes=0.4") == 2
    assert f"the run has {steps} steps" in capsys.readouterr().err
    assert run(made, output, f"run.steps={2 * steps + 1}") == 0
    assert length(output) == 2 * steps + 1


def test_minutes_for_a_run_that_began_with_steps_are_refused(made, tmp_path, capsys):
    assert run(made, tmp_path / "run") == 0
    capsys.readouterr()
    assert run(made, tmp_path / "run", "run.minutes=3") == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: run.minutes: expected run.steps") and "\n" not in error


WORKER = "tests/helpers/minutes_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_processes_agree_on_a_length_and_their_trial_leaves_no_trace(made, tmp_path, engine):
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    values = tiny_recipe(made)
    values["data"]["rows_per_batch"] = 1  # several micro batches
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    first, _ = outputs_of_two_forks(
        tmp_path, WORKER, str(recipe), str(tmp_path), told=ENGINES[engine]
    )
    steps = length(tmp_path / "budget")
    assert f"run.minutes=0.01: {steps} steps" in first
    assert_same_run(tmp_path / "budget", tmp_path / "counted", steps)
