"""The promise: what training prints fits 80 columns, and says what to do next."""

from __future__ import annotations

import json
import math
import re
import sys

import pytest
from tiny_training import run

from draftheads.train.advice.bounds import Bounds
from draftheads.train.advice.gains import gains
from draftheads.train.checkpoint import BEST, read_state
from draftheads.train.metrics import more_tokens, rise_per_doubling

DECODING = ["eval.every=3", "eval.prompts=2", "eval.new_tokens=8", "run.save_every=3"]


def test_an_evaluation_is_a_line(made, tmp_path, capsys):
    assert run(made, tmp_path / "run", *DECODING) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.match(r"step \d: ", line)]
    assert [row[:6] for row in rows] == ["step 3", "step 6"]
    number = r"\d\.\d\d"
    pattern = f"τ {number} simulated, {number} ± {number} decoded, top-1 {number} to {number}$"
    for row in rows:
        assert re.search(pattern, row) and len(row) <= 80


@pytest.mark.mend("training called heads slower than none by a race without threads and packing")
def test_a_run_ends_with_what_its_best_step_is_worth(made, tmp_path, capsys):
    output = tmp_path / "run"
    assert run(made, output, *DECODING) == 0
    said = capsys.readouterr().out
    best = read_state(output / BEST)
    assert best.measured is not None
    assert f"best: step {best.step}, τ {best.measured['tokens_per_step']:.2f} decoded" in said
    assert "times plain" not in said and "slower" not in said, "threads and packing decide that"
    assert "finds the fastest tree, and says how fast it is" in said
    assert f"next: draftheads tune --head {output} --prompts PROMPTS" in said


def test_the_bar_has_room_for_itself_at_80_columns(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(made, tmp_path / "run") == 0
    bars = [part for part in re.split(r"[\r\n]", capsys.readouterr().err) if part[:6] == "train "]
    assert bars and all(len(bar.rstrip()) <= 80 for bar in bars)
    assert "█████" in bars[-1]


def test_what_a_doubling_of_tokens_brings_is_read_before_the_learning_rate_falls():
    """Not at the start, nor where evaluations do not rise any more; not from one evaluation."""
    steps = range(100, 1601, 100)
    taus = {step: 1 + 0.3 * math.log2(min(max(step, 600), 1200)) for step in steps}
    lines = [{"step": step, "heldout_tokens_per_step": tau} for step, tau in taus.items()]
    lines.insert(3, {"step": 700, "loss": 2.0})
    assert rise_per_doubling(lines) == pytest.approx(0.3)
    assert rise_per_doubling(lines[:5]) == pytest.approx(0.0)
    assert rise_per_doubling([line for line in lines if line["step"] in (800, 1600)]) is None
    assert rise_per_doubling([]) is None


def test_it_is_said_in_the_words_of_train_and_tune(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert more_tokens(tmp_path) == "" == more_tokens(tmp_path / "none")
    lines = [
        {"step": step, "heldout_tokens_per_step": 1 + 0.5 * math.log2(step)}
        for step in range(100, 901, 100)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert more_tokens(tmp_path) == "twice the tokens would bring 0.30 to 1.20 more τ\n"


BOUNDS = Bounds(nodes=8, tokens=500, tree=2.2, vocabulary=3.3, depths=2.21, oracle=5.0)
"""At a τ of 2, another tree brings a tenth, the vocabulary a half, later depths nothing."""


@pytest.mark.mend("passes over long prompts were counted by the answers alone")
@pytest.mark.parametrize(
    ("rise", "size", "expected"),
    [
        (0.0, 100, ["another tree", "more draft tokens"]),
        (2.0, 100, ["twice the tokens: run", "another tree", "more draft tokens"]),
        (2.0, 10, ["twice the tokens, from twice the prompts", "another tree"]),
    ],
)
def test_what_would_help_is_in_order_of_gain_per_effort(rise, size, expected):
    """A tenth for a tenth of the effort comes before a half; texts read more than four times are
    followed by new ones.
    """
    lines = [
        {"step": step, "heldout_tokens_per_step": 1 + rise * math.log2(step)}
        for step in range(100, 901, 100)
    ]
    training = {"tokens": 400, "data": {"tokens": size, "learned_tokens": 10}}
    found = gains(2.0, BOUNDS, lines, training)
    for each, start in zip(found, expected, strict=False):
        assert each.change.startswith(start)
    assert len(found) == (3 if rise else 2)
    assert all(each.high > 1 and each.low >= 1 for each in found)
    assert gains(2.0, None, [], {}) == gains(0.0, None, lines, training) == []


@pytest.mark.mend("what doctor reads of a run may be damaged")
@pytest.mark.parametrize(
    "training",
    [
        {"data": None},
        {"data": "x"},
        {"data": {"tokens": "9"}, "tokens": 9},
        {"tokens": None},
    ],
)
def test_damaged_records_of_a_run_are_as_none(training):
    lines = [
        {"step": step, "heldout_tokens_per_step": tau}
        for step, tau in ((-5, 2.0), (0, 2.0), (400, math.nan), (500, 2.0), (600, "2"), (800, 2.0))
    ]
    assert rise_per_doubling(lines) is None
    assert [each.change[:12] for each in gains(2.0, BOUNDS, lines, training)] == [
        "another tree", "more draft t"
    ]  # fmt: skip
