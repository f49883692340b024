"""The promise: what training prints fits 80 columns, and says what to do next."""

from __future__ import annotations

import re
import sys

from tiny_training import run

from draftheads.train.checkpoint import BEST, read_state
from draftheads.train.metrics import LEGEND, sparkline

DECODING = ["eval.every=3", "eval.prompts=2", "eval.new_tokens=8", "run.save_every=3"]


def test_a_sparkline_has_a_bar_per_depth_and_two_numbers():
    assert sparkline([1.0, 0.5, 0.0]) == "█▅▁ 1.00 to 0.00"


def test_evaluations_are_an_aligned_table_with_one_header(made, tmp_path, capsys):
    for steps in (6, 9):  # the second launch resumes
        assert run(made, tmp_path / "run", *DECODING, f"run.steps={steps}") == 0
        lines = capsys.readouterr().out.splitlines()
        [at] = [number for number, line in enumerate(lines) if "τ simulated" in line]
        header = lines[at]
        assert lines[at - 1] == LEGEND
        rows = [line for line in lines[at + 1 :] if re.match(r" +\d+ +\d", line)]
        assert len(rows) == (2 if steps == 6 else 1)
        for row in rows:
            assert row.index(" to ") < len(row) <= 80
            end = header.index("τ decoded") + len("τ decoded")
            assert re.search(r"\d\.\d\d ± \d\.\d\d$", row[:end])
        assert max(map(len, [lines[at - 1], header])) <= 80


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
