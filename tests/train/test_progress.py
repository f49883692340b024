"""The promise: what training prints fits 80 columns, and says what to do next."""

from __future__ import annotations

import math
import re
import sys

import pytest
from tiny_training import run

from draftheads.train.checkpoint import BEST, read_state
from draftheads.train.metrics import rise_per_doubling

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
