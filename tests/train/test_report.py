"""The promise: a report has the facts of a run, is made of what is on disk, and
does without what is missing.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from tiny_training import run
from typer.testing import CliRunner

from draftheads.scripts.cli import app
from draftheads.train.progress import CURVES, REPORT, duration, read_metrics, write_report

pytestmark = pytest.mark.slow

EVALUATIONS = "Evaluations on held-out documents"
SECTIONS = [EVALUATIONS, "Skipped steps", "Use", "Recipe"]
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
    assert "| trained | 6 of 6 steps |" in text
    assert f"| decoding.tokens_per_step | {measured['tokens_per_step']:.4g} |" in text
    assert f"| best | step {int(best.name[5:])}, by tokens_per_step |" in text
    table = [line for line in lines_of(text, EVALUATIONS) if line.startswith("|")][2:]
    judged = [line for line in read_metrics(trained) if "measured" in line]
    assert len(table) == len(judged) == 3
    for row, line in zip(table, judged, strict=True):
        assert f"| {line['heldout_tokens_per_step']:.4g} |" in row
        assert f"| {line['measured']['tokens_per_step']:.2f} ± " in row
    recipe = yaml.safe_load("\n".join(lines_of(text, "Recipe")[1:-1]))
    assert recipe == json.loads((best / "trainer" / "state.json").read_text())["recipe"]
    assert f"draftheads publish {trained}/best" in text
    assert ", torch " in text and ", fingerprint " in text
    assert (trained / CURVES).read_bytes().startswith(PNG)
    assert not list(trained.glob(".report*"))


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
    assert lines_of(text, "Skipped steps") == [f"* step 3: {reason}"]
    assert (finished / CURVES).read_bytes().startswith(PNG)


@pytest.mark.parametrize("left", [0, 1])
def test_a_report_needs_no_metrics(finished, left):
    path = finished / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))
    text = write_report(finished).read_text()
    assert "| decoding.tokens_per_step |" in text
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
    assert "by simulated |" in text
    assert "| decoding.tokens_per_step |" not in text


def test_a_run_that_ended_early_says_so(made, tmp_path):
    output = tmp_path / "run"
    choices = ["run.save_every=1", "optim.lr=1e-9", "eval.patience=1", "eval.report=true"]
    assert run(made, output, *choices) == 0
    text = (output / REPORT).read_text()
    assert "of 6 steps, ended early by `eval.patience` |" in text


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.834, "0.83 s"),
        (42.4, "42 s"),
        (59.7, "1 min 0 s"),
        (185.0, "3 min 5 s"),
        (3599.6, "1 h 0 min"),
        (96_000.0, "26 h 40 min"),
    ],
)
def test_a_time_is_said_in_units_that_fit(seconds, text):
    assert duration(seconds) == text
