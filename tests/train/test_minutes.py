"""The promise: the clock ends a run of minutes, however long its steps and evaluations take, and
learning rates follow it. It stands still between launches, and is the same on all processes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_training import assert_same, in_step, run, weights

from draftheads.train import loop
from draftheads.train import run as running
from draftheads.train.checkpoint import RunState, load_optimizer_state, newest
from draftheads.train.engines import learning_rate
from draftheads.train.evaluate import Evaluator
from draftheads.train.metrics import read_metrics


def state_of(output: Path) -> RunState:
    """The state of a finished run."""
    saved, _ = newest(output)
    assert saved is not None and saved.state.step == saved.state.steps
    return saved.state


@pytest.fixture
def clock(monkeypatch):
    """A clock by which every step takes two seconds, and every save three."""
    clock = SimpleNamespace(now=0.0, seconds=2.0, saving=3.0)
    train_step, evaluate = loop.train_step, running.Run.evaluate

    def slow_step(*parts):
        clock.now += clock.seconds
        return train_step(*parts)

    def slow_evaluation(run):
        clock.now += clock.saving
        return evaluate(run)

    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(loop, "train_step", slow_step)
    monkeypatch.setattr(running.Run, "evaluate", slow_evaluation)
    return clock


def test_the_clock_ends_the_run_and_sets_learning_rates(made, tmp_path, clock):
    output = tmp_path / "run"
    assert run(made, output, "run.minutes=0.5", "run.save_every=4", "eval.every=0") == 0
    state = state_of(output)
    assert (state.step, state.seconds) == (12, 33.0), "of which three follow the last step"
    rates = [line["lr"] for line in read_metrics(output) if "lr" in line]
    optim = state.recipe.optim
    times = [2.0 * step + 3.0 * (step // 4) for step in range(12)]
    assert rates == [learning_rate(optim, time, 30.0) for time in times]
    assert 0 < rates[0] < max(rates) > rates[-1] > 0


def test_a_machine_that_becomes_busy_takes_fewer_steps(made, tmp_path, clock, monkeypatch):
    record = running.Run.record

    def busy(run, *rest):
        record(run, *rest)
        clock.seconds += 1

    monkeypatch.setattr(running.Run, "record", busy)
    assert run(made, tmp_path / "run", "run.minutes=0.2") == 0
    state = state_of(tmp_path / "run")
    assert (state.step, state.seconds) == (4, 17.0), "2, 3, 4 and 5 seconds, and a save"


@pytest.mark.mend("a run of two minutes took five, as evaluations were not counted")
def test_an_evaluation_has_its_time(made, tmp_path, clock, monkeypatch, capsys):
    """The last one ends the run in time, and none takes the time that is left to train."""
    monkeypatch.setattr(Evaluator, "seconds", lambda self: 10.0)
    saved = []
    monkeypatch.setattr(running.Run, "_write", lambda run, *_: saved.append(run.state.step))
    output = tmp_path / "run"
    assert run(made, output, "run.minutes=0.5", "eval.every=3") == 0
    assert "an evaluation, of about 10 s, is part of it" in capsys.readouterr().out
    assert saved == [3, 9], "after 6 steps, five of twenty seconds are left to train"


def test_no_budget_is_too_short_for_a_step(made, tmp_path, clock):
    assert run(made, tmp_path / "run", "run.minutes=1e-4") == 0
    assert state_of(tmp_path / "run").step == 1


ADAPTER = ["adapter.rank=4", "adapter.lr=0.02", "adapter.start=0.3"]


@pytest.mark.parametrize("choices", [[], ADAPTER])
def test_a_resumed_run_has_the_time_that_is_left(made, tmp_path, clock, choices):
    clock.saving = 0.0
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, parts = (tmp_path / name / "run" for name in ("whole", "parts"))
    assert run(made, whole, "run.minutes=0.2", *choices) == 0
    with pytest.MonkeyPatch.context() as patch:
        in_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run(made, parts, "run.minutes=0.2", *choices) == 130
    clock.now += 1000.0
    assert run(made, parts, "run.minutes=0.2", *choices) == 0
    assert state_of(parts).seconds == state_of(whole).seconds == 12.0
    assert_same(weights(whole, 6), weights(parts, 6))
    assert_same(*(load_optimizer_state(output / "step-000006") for output in (whole, parts)))


def test_a_finished_run_goes_on_to_another_length(made, tmp_path, capsys, clock):
    clock.saving = 0.0
    output = tmp_path / "run"
    for length, steps in [("steps=2", 2), ("minutes=0.2", 6), ("minutes=0.3", 9), ("steps=11", 11)]:
        assert run(made, output, f"run.{length}") == 0
        assert state_of(output).step == steps
    capsys.readouterr()
    assert run(made, output, "run.minutes=0.1") == 0
    assert "this run is finished" in capsys.readouterr().out
    assert run(made, output, "run.epochs=4") == 0
    assert state_of(output).step > 11
