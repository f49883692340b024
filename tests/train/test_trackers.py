"""The promise: what metrics.jsonl says can be read in every tracker, as one run of theirs with the
run's name and recipe, however many launches and processes it took.

TensorBoard comes with the project; the others are tried where they are installed.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import CPU, ROOT, forks
from tiny_training import run, tiny_recipe

from draftheads.heads.target.model import Target
from draftheads.train.metrics import read_metrics

pytestmark = pytest.mark.slow

CHOICES = {"head/kind": "medusa", "head/depth": "3", "optim/betas/2": "0.95"}


@dataclass
class Tracked:
    """A run as a tracker has it. numbers: by name and step, all that were logged."""

    title: str
    choices: dict[str, str] = field(default_factory=dict)
    numbers: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, name: str, step: int, value: float) -> None:
        self.numbers.setdefault((name, step), []).append(value)


def read_tensorboard(output: Path) -> list[Tracked]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    folder = output / "logs" / "draftheads"
    events = EventAccumulator(str(folder)).Reload()
    choices = yaml.safe_load(next(folder.glob("*/hparams.yml")).read_text())
    found = Tracked(output.name, {key: str(value) for key, value in choices.items()})
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.add(name, event.step, event.value)
    return [found]


def read_wandb(output: Path) -> list[Tracked]:
    """An offline run is a file per launch, which belong together by the run's id."""
    runs: dict[str, Tracked] = {}
    for path in sorted(output.parent.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                found = runs.setdefault(record.run.run_id, Tracked(record.run.display_name))
            for item in record.config.update:
                found.choices["/".join(item.nested_key) or item.key] = item.value_json.strip('"')
            for item in record.history.item:
                name = "/".join(item.nested_key) or item.key
                if not name.startswith("_"):
                    found.add(name, record.history.step.num, float(item.value_json))
    return list(runs.values())


def wandb_records(path: Path) -> Iterator[Any]:
    """Of LevelDB's log format, behind a header of seven bytes: blocks of 32 kB, and in them records
    or parts of them, each behind a checksum, its size and whether more follows.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""


def read_mlflow(output: Path) -> list[Tracked]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output.parent}/mlflow.db")
    [project] = [each for each in client.search_experiments() if each.name == "draftheads"]
    runs = []
    for each in client.search_runs([project.experiment_id]):
        found = Tracked(each.info.run_name, each.data.params)
        for name in each.data.metrics:
            for point in client.get_metric_history(each.info.run_id, name):
                found.add(name, point.step, point.value)
        runs.append(found)
    return runs


def read_trackio(output: Path) -> list[Tracked]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = []
    for each in trackio.Api().runs("draftheads"):
        found = Tracked(each.name, {key: str(value) for key, value in each.config.items()})
        for row in SQLiteStorage.get_logs("draftheads", each.name):
            for name in row.keys() - {"step", "timestamp"}:
                found.add(name, row["step"], row[name])
        runs.append(found)
    return runs


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            yield from ((f"{prefix}{key}/{n}", each) for n, each in enumerate(value, start=1))
        else:
            yield prefix + key, value


def said(output: Path) -> dict[tuple[str, int], Any]:
    """The numbers of metrics.jsonl."""
    lines = read_metrics(output)
    return {
        (name, line["step"]): value
        for line in lines
        for name, value in flat(line)
        if name not in ("step", "skipped")
    }


def launch(made: Path, output: Path, *overrides: str, processes: int = 1) -> tuple[int, str]:
    """Exit status and last line of a training script in processes of its own: trackers keep
    threads.
    """
    recipe = tiny_recipe(made, output=str(output), save_every=2)
    recipe["eval"] = {"every": 2, "prompts": 2, "new_tokens": 12}
    recipe["optim"]["schedule"] = "constant"
    (output.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    told = CPU | {"WANDB_MODE": "offline"}
    words = [str(ROOT / "train" / "medusa.py"), str(output.parent / "recipe.yaml"), *overrides]
    [(status, says), *_] = forks(output.parent, *words, told=told, processes=processes)
    return int(status or 0), says.strip().split("\n")[-1]


@pytest.fixture(params=READERS)
def tracker(request, monkeypatch, tmp_path) -> str:
    """Each tracker that is installed, with a place of its own."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if request.param != "tensorboard":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(request.param)
    return request.param


@pytest.mark.filterwarnings("ignore")  # reading imports trackers, which warn
def test_a_run_and_its_continuation_are_one_run_of_a_tracker(tracker, made, tmp_path):
    output = tmp_path / "folder"
    for steps in (4, 6):
        status, says = launch(made, output, f"run.trackers=[{tracker}]", f"run.steps={steps}")
        assert status == 0, says
    found, *others = READERS[tracker](output)
    for other in others:  # MLflow has a run per launch
        assert tracker == "mlflow" and other.title == found.title
        found.numbers |= other.numbers
    assert found.title.startswith("folder")
    assert CHOICES.items() <= found.choices.items()
    expected = said(output)
    assert {step for _, step in expected} == {1, 2, 3, 4, 5, 6}
    assert found.numbers.keys() == expected.keys()
    for key, value in expected.items():
        assert found.numbers[key] == [pytest.approx(value)], key


@pytest.mark.filterwarnings("ignore")
def test_two_processes_log_once(tracker, made, tmp_path):
    output = tmp_path / "folder"
    choices = [f"run.trackers=[{tracker}]", "data.rows_per_batch=1"]
    status, says = launch(made, output, *choices, processes=2)
    assert status == 0, says
    [found] = READERS[tracker](output)
    assert found.numbers.keys() == said(output).keys()
    assert {len(values) for values in found.numbers.values()} == {1}


def test_steps_that_an_interrupted_launch_wrote_are_hidden(made, tmp_path):
    """TensorBoard appends: without a purge, step 3 would be drawn twice."""
    output = tmp_path / "folder"
    choices = ["run.trackers=[tensorboard]", "run.save_every=2"]
    assert run(made, output, *choices, "run.steps=4") == 0
    for part in ("step-000004", "best"):  # as if step 4 had never been saved
        path = output / part
        path.rename(tmp_path / part) if path.is_dir() and not path.is_symlink() else path.unlink()
    assert run(made, output, *choices, "run.steps=4") == 0
    [found] = read_tensorboard(output)
    assert {step for name, step in found.numbers if name == "loss"} == {1, 2, 3, 4}
    assert {len(values) for values in found.numbers.values()} == {1}


def test_a_skipped_step_has_no_numbers_to_draw(made, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(
        "accelerate.Accelerator.log", lambda self, values, step: logged.append(step)
    )
    output = tmp_path / "run"
    assert run(made, output, "optim.lr=8e12", "head.layers=4", "run.max_skipped=2") == 2
    skipped = [line["step"] for line in read_metrics(output) if "skipped" in line]
    assert skipped
    assert not set(skipped) & set(logged)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("foo", "run.trackers: expected some of tensorboard"),
        ("all", "got 'all'"),
        ("clearml", "got 'clearml'; install the package of this tracker, or leave it out"),
    ],
)
def test_a_tracker_that_is_not_there_is_one_line_before_anything_is_loaded(
    made, tmp_path, capfd, monkeypatch, name, says
):
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("it loads the target"))
    assert run(made, tmp_path / "run", f"run.trackers=[{name}]") == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_a_tracker_that_cannot_begin_is_one_line(made, tmp_path):
    """TensorBoard's folder is a file here."""
    output = tmp_path / "run"
    output.mkdir()
    (output / "logs").write_text("")
    status, line = launch(made, output, "run.trackers=[tensorboard]")
    assert status == 2
    assert line.startswith("error: run.trackers: cannot start tensorboard (")
    assert line.endswith("; to train without, set run.trackers=[]")
