"""The promise: a report says all there is to know of a run, is made of what stands on disk, and
does without what is missing.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_training import run
from typer.testing import CliRunner

from draftheads.scripts.cli import app
from draftheads.train import report
from draftheads.train.checkpoint import read_state
from draftheads.train.progress import read_metrics
from draftheads.train.report import CURVES, REPORT, remarks, write_report

SECTIONS = [
    "What it shows",
    "Judged on held-out documents",
    "By depth",
    "Tree",
    "Skipped steps",
    "Use",
    "Recipe",
]
JUDGED = "Judged on held-out documents"
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def trained(made, tmp_path_factory) -> Path:
    """A run that was judged by decoding, and has its report."""
    output = tmp_path_factory.mktemp("trained") / "run"
    choices = ["eval.every=2", "eval.prompts=2", "eval.new_tokens=12", "eval.report=true"]
    assert run(made, output, *choices) == 0
    return output


@pytest.fixture
def finished(trained, tmp_path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))


def lines_of(text: str, section: str) -> list[str]:
    return text.partition(f"## {section}\n")[2].partition("\n## ")[0].strip().splitlines()


def test_a_report_is_complete(trained):
    text = (trained / REPORT).read_text()
    assert text.startswith("# Medusa heads for target\n")
    assert all(f"## {section}\n" in text for section in SECTIONS)
    best = (trained / "best").resolve()
    measured = json.loads((best / "trainer" / "state.json").read_text())["measured"]
    assert "| trained | 6 of 6 steps, trained to the end |" in text
    tau = f"**{measured['tokens_per_step']:.2f}** ± {measured['standard_error']:.2f}"
    assert f"{tau} measured by decoding" in text
    assert f"| best | step {int(best.name[5:])}, by tokens per step of decoding |" in text
    table = [line for line in lines_of(text, JUDGED) if line.startswith("|")][2:]
    judged = [line for line in read_metrics(trained) if "measured" in line]
    assert len(table) == len(judged) == 3
    for row, line in zip(table, judged, strict=True):
        assert f"| {line['heldout_tokens_per_step']:.2f} |" in row
        assert f"| {line['measured']['tokens_per_step']:.2f} ± " in row
    recipe = yaml.safe_load("\n".join(lines_of(text, "Recipe")[1:-1]))
    assert recipe == json.loads((best / "trainer" / "state.json").read_text())["recipe"]
    assert f"draftheads publish {trained}/best" in text
    assert "| torch | " in text and "| its fingerprint | " in text
    assert (trained / CURVES).read_bytes().startswith(PNG)
    assert not list(trained.glob(".report*"))


def test_shares_of_accepted_drafts_are_those_of_all_steps_and_of_those_so_far(trained):
    best = json.loads(((trained / "best").resolve() / "trainer" / "state.json").read_text())
    accepted = best["measured"]["acceptance"]
    rows = [line for line in lines_of((trained / REPORT).read_text(), "By depth") if "|" in line][
        2:
    ]
    for k, row in enumerate(rows):
        share, so_far = (cell.strip() for cell in row.strip("|").split("|")[3:])
        known = k < len(accepted)
        assert share == (f"{accepted[k]:.3f}" if known else "-")
        assert so_far == (f"{accepted[k] / (accepted[k - 1] if k else 1):.3f}" if known else "-")


def metrics_of(taus: dict[int, float], losses: dict[int, float]) -> list[dict[str, Any]]:
    """Lines that a run would have left which had these taus by decoding and these losses."""
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": loss, "top1": [0.875, 0.5]} for step, loss in losses.items()
    ]
    for step, tau in taus.items():
        found = {"tokens_per_step": tau, "standard_error": 0.1, "acceptance": [0.8, 0.25]}
        judged = {"heldout_tokens_per_step": 1.5, "heldout_top1": [0.625, 0.5]}
        lines.append({"step": step, **judged, "measured": found})
    return sorted(lines, key=lambda line: line["step"])


@pytest.mark.parametrize(
    ("taus", "losses", "says"),
    [
        (
            {10: 2.0, 20: 2.5, 30: 2.75, 40: 3.0},
            {10: 5.0, 20: 4.0, 30: 3.0, 40: 2.0},
            [
                "* It came from 2.00 tokens per step at step 10 to 3.00 (± 0.10) at its end, 0.25 "
                "of that since step 30.",
                "* The training loss was the lowest there too.",
            ],
        ),
        (
            {10: 2.0, 20: 3.0, 30: 2.75, 40: 2.5},
            {10: 5.0, 20: 4.0, 30: 3.0, 40: 3.5},
            [
                "* It came from 2.00 tokens per step at step 10 to 3.00 (± 0.10) at step 20, the "
                "best; of the 2 judgements after it the last found 2.50.",
                "* By training loss step 30 would have been the best, with 2.75.",
            ],
        ),
        (
            {40: 2.0},
            {10: 5.0},
            ["* Judged once, so whether it was still learning is not known (`eval.every`)."],
        ),
    ],
)
def test_a_report_says_in_words_what_was_learned(trained, taus, losses, says):
    best = max(taus, key=lambda step: taus[step])
    metrics = metrics_of(taus, losses)
    measured = next(x["measured"] for x in metrics if x["step"] == best and "measured" in x)
    state = replace(read_state((trained / "best").resolve()), step=best, measured=measured)
    assert remarks(metrics, state).splitlines() == [
        *says,
        "* At depth 1 the best guess was right for 88% of the tokens of the last training batches "
        "and for 62% of held-out ones.",
        "* 80% of the steps of decoding had a draft accepted, 25% had 2.",
    ]


def test_a_report_can_be_made_again(finished):
    said = [CliRunner().invoke(app, ["report", str(finished)]).output]
    first = (finished / REPORT).read_bytes()
    (finished / REPORT).unlink()
    said.append(CliRunner().invoke(app, ["report", str(finished)]).output)
    assert (finished / REPORT).read_bytes() == first
    assert [line.strip() for line in said] == [str(finished / REPORT)] * 2


def test_skipped_steps_are_listed(finished):
    lines = read_metrics(finished)
    reason = "loss nan, gradient norm nan; a | in it"
    lines[2] = {"step": 3, "skipped": reason}
    (finished / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report(finished).read_text()
    assert lines_of(text, "Skipped steps")[-1] == f"| 3 | {reason.replace('|', chr(92) + '|')} |"
    assert (finished / CURVES).read_bytes().startswith(PNG)


@pytest.mark.parametrize("left", [0, 1])
def test_a_report_needs_no_metrics(finished, left):
    path = finished / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))
    text = write_report(finished).read_text()
    assert "measured by decoding" in text
    assert lines_of(text, "Skipped steps") == ["None."]
    path.unlink()
    write_report(finished)


def test_without_matplotlib_a_report_has_no_curves_and_says_so(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = write_report(finished).read_text()
    assert "No curves: the plot needs matplotlib; pip install matplotlib" in text
    assert all(f"## {section}\n" in text for section in SECTIONS)
    assert not (finished / CURVES).exists()


def test_a_run_that_was_not_decoded_has_a_report(made, tmp_path):
    output = tmp_path / "run"
    assert run(made, output, "eval.report=true", "run.log_every=100", kind="eagle3") == 0
    text = (output / REPORT).read_text()
    assert "by simulated tokens per step" in text
    assert "measured by decoding" not in text
    assert "Chosen anew in each step" in text


def test_a_run_that_ended_early_says_so(made, tmp_path):
    output = tmp_path / "run"
    choices = ["run.save_every=1", "optim.lr=1e-9", "eval.patience=1", "eval.report=true"]
    assert run(made, output, *choices) == 0
    text = (output / REPORT).read_text()
    assert "of 6 steps, ended early by `eval.patience` |" in text


def test_a_long_run_shows_its_newest_judgements_and_the_best(finished, monkeypatch):
    monkeypatch.setattr(report, "MOST_ROWS", 1)
    best = finished / "best"
    best.unlink()
    best.symlink_to("step-000004")
    text = write_report(finished).read_text()
    rows = [line for line in lines_of(text, JUDGED) if line.startswith("|")][2:]
    assert [row.split("|")[1].strip() for row in rows] == ["4 (best)", "6"]
    assert "The newest of 3 and the best" in text


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: expected a training run .*, found none"):
        write_report(tmp_path)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_heads_that_learn_fewer_depths_than_they_draft_get_their_report(made, tmp_path, kind):
    """EAGLE-1 learns one step and drafts three: held-out documents know more depths."""
    choices = ["head.steps=1", "eval.report=true", "run.steps=2"]
    assert run(made, tmp_path / "run", *choices, kind=kind) == 0
    lines = read_metrics(tmp_path / "run")
    assert [len(line["top1"]) for line in lines if "top1" in line] == [1, 1]
    assert [len(line["heldout_top1"]) for line in lines if "heldout_top1" in line] == [3]
    assert (tmp_path / "run" / CURVES).read_bytes().startswith(PNG)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
