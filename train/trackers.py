"""Trackers, through accelerate: who else gets a run's numbers, and as which run of theirs.

A run that goes on goes on there too: what they called it stands in its folder's trackers.json.
Tried with TensorBoard, Weights & Biases, MLflow and trackio; others get numbers, and a new run of
theirs for every launch. Where they keep all this is for their own environment variables to say.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType
from pydantic import TypeAdapter, ValidationError

from draftheads.train.recipe import Recipe

PROJECT, RECORD = "draftheads", "trackers.json"
FAULTS = {"wandb": "wandb.errors:Error", "mlflow": "mlflow.exceptions:MlflowException"}
"""What they raise where there is no account, no server or no such run."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for trackers that accelerate does not know or that are not installed."""
    known = [str(name) for name in LoggerType.list() if name != str(LoggerType.ALL)]
    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise ValueError(f"run.trackers: expected some of {', '.join(known)}, got {name!r}")
        if name not in available:
            raise ValueError(
                f"run.trackers: {name} is not installed; `pip install {name}`, or leave it out"
            )


def start_trackers(accelerator: Accelerator, recipe: Recipe, step: int) -> None:
    """Begin a run with every tracker, or go on with it after `step` steps; the recipe is its
    configuration. The first process alone does so.

    Raises ValueError where one of them cannot.
    """
    names, output = recipe.run.trackers, recipe.run.output
    if not names or not accelerator.is_main_process:
        return
    record = output / RECORD
    runs = _recorded(record)
    title = output.resolve().name
    begun = {name: _arguments(name, title, runs.get(name), step) for name in names}
    faults = [resolve_name(FAULTS[name]) for name in names if name in FAULTS]
    try:
        accelerator.init_trackers(PROJECT, init_kwargs=begun)
    except (ValueError, OSError, *faults) as error:  # nothing has been trained yet
        accelerator.trackers.clear()  # what has not begun cannot be ended
        continued = f"; to begin anew there, delete {record}" if runs else ""
        raise ValueError(
            f"run.trackers: cannot begin with {', '.join(names)} ({error}){continued}; "
            "to go without, run.trackers=[]"
        ) from error
    choices = {
        key: value for key, value in _flat(recipe.model_dump(mode="json")) if value is not None
    }
    for tracker in accelerator.trackers:
        tracker.store_init_configuration(_new(tracker, choices))
        if run := _name_of_run(tracker):
            runs[tracker.name] = run
    part = record.with_name(f".{RECORD}")
    part.write_text(json.dumps(runs, indent=2) + "\n")
    part.replace(record)


def _recorded(record: Path) -> dict[str, str]:
    """What trackers called this run."""
    if not record.is_file():
        return {}
    try:
        return TypeAdapter(dict[str, str]).validate_json(record.read_bytes())
    except ValidationError:  # no checkpoint depends on it
        print(f"note: {record} is damaged: trackers begin a new run")
        return {}


def log_numbers(accelerator: Accelerator, values: Mapping[str, Any], step: int) -> None:
    """Send what trackers can draw: numbers, those of a list as name/1, name/2, ..."""
    numbers = {key: value for key, value in _flat(values) if isinstance(value, int | float)}
    if numbers:
        accelerator.log(numbers, step=step)


def _arguments(name: str, title: str, run: str | None, step: int) -> dict[str, Any]:
    """What accelerate begins a tracker with. run: what the tracker called it before."""
    match name:
        case "tensorboard":  # hides what an interrupted launch wrote of steps that are repeated
            return {"purge_step": step + 1} if step else {}
        case "wandb":
            return {"name": title, **({"id": run, "resume": "allow"} if run else {})}
        case "mlflow":
            return {"run_id": run} if run else {"run_name": title}
        case "trackio":  # knows runs by their names alone
            new = f"{title}-{uuid.uuid4().hex[:6]}"
            return {"name": run, "resume": "allow"} if run else {"name": new}
    return {}


def _name_of_run(tracker: GeneralTracker) -> str | None:
    """By which a later launch finds it."""
    run: Any = tracker.tracker
    match tracker.name:
        case "wandb":
            return str(run.id)
        case "mlflow":
            return str(run.info.run_id)
        case "trackio":
            return str(run.name)
    return None


def _new(tracker: GeneralTracker, choices: dict[str, Any]) -> dict[str, Any]:
    """MLflow refuses another value for what a run began with, such as a greater run.steps."""
    known = tracker.tracker.data.params if tracker.name == "mlflow" else {}
    return {key: value for key, value in choices.items() if key not in known}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Scalars under slash-joined names; lists are numbered from 1 (the depth)."""
    for key, value in values.items():
        if isinstance(value, list | tuple):
            value = dict(enumerate(value, start=1))
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
