"""Trackers, through accelerate: who else gets a run's numbers, and as which run of theirs.

A run that goes on goes on there too: what they called it stands in its folder's trackers.json.
Tried with TensorBoard, Weights & Biases, MLflow and trackio; others get numbers, and a new run of
theirs for every launch. Where they keep all this is for their own environment variables to say.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from tqdm import tqdm

from draftheads.train.evaluate import Evaluation
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


# What a run says while it runs: a bar, metrics.jsonl, trackers. Only the first process speaks.
#
# Legend: K draft depth, R ranks.


METRICS = "metrics.jsonl"


class Progress:
    """Counts steps, and every `log_every` of them writes what the training batches showed since the
    last time.

    chain: tokens per step that the heads' best guesses alone would bring, if depths were
    independent; a running estimate from training batches, while `heldout_tokens_per_step` is the
    prediction for the calibrated tree.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, start: int, steps: int) -> None:
        self.accelerator = accelerator
        self.log_every = recipe.run.log_every
        self.path = recipe.run.output / METRICS
        silent = not accelerator.is_main_process
        start_trackers(accelerator, recipe, start)
        self.bar = tqdm(total=steps, initial=start, desc="train", unit="step", disable=silent)
        if accelerator.is_main_process:
            _forget_after(self.path, start)
        self.losses: list[float] = []
        self.tokens = 0
        self.ranks_KR: Tensor | None = None
        self.since = time.monotonic()

    def log(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def step(
        self, step: int, loss: float, norm: float, ranks_KR: Tensor, tokens: int, lr: float
    ) -> None:
        """Count step number `step`. loss: of the whole step. norm: of the gradient before
        clipping. ranks_KR: of this process. tokens: of all processes.
        """
        self.bar.update()
        self.losses.append(loss)
        self.tokens += tokens
        self.ranks_KR = ranks_KR if self.ranks_KR is None else self.ranks_KR + ranks_KR
        if step % self.log_every:
            return
        shares_KR = _shares(self.accelerator.reduce(self.ranks_KR, "sum"))
        top1 = shares_KR[:, 0]
        values = {
            "loss": sum(self.losses) / len(self.losses),
            "gradient_norm": norm,
            "lr": lr,
            "tokens_per_second": self.tokens / (time.monotonic() - self.since),
            "top1": top1.tolist(),
            "top5": shares_KR[:, :5].sum(1).tolist(),
            "chain": 1.0 + float(top1.cumprod(0).sum()),
        }
        self.bar.set_postfix_str(
            f"loss {values['loss']:.3f}, chain {values['chain']:.2f}, "
            f"{values['tokens_per_second']:.0f} tokens/s",
            refresh=False,
        )
        self._write(step, values)
        self._start_window()

    def skipped(self, step: int, reason: str) -> None:
        """Count step number `step`, which changed nothing, and say why."""
        self.bar.update()
        self.log(f"step {step} skipped: {reason}")
        self._write(step, {"skipped": reason})

    def judged(self, step: int, verdict: Evaluation) -> None:
        """Say what the held-out documents showed."""
        self.log(f"step {step}: {verdict}")
        calibration, measured = verdict.calibration, verdict.measured
        values = {
            "heldout_tokens_per_step": calibration.tokens_per_step,
            "heldout_top1": calibration.top1,
            "heldout_top5": calibration.top5,
        }
        found = {"measured": measured, "drift": verdict.drift}
        self._write(step, values | {name: each.facts() for name, each in found.items() if each})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as training time."""
        start = time.monotonic()
        yield
        self.since += time.monotonic() - start

    def close(self) -> None:
        """Finish bar and trackers."""
        self.bar.close()

    def _start_window(self) -> None:
        self.losses, self.tokens, self.ranks_KR = [], 0, None
        self.since = time.monotonic()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        log_numbers(self.accelerator, values, step)


def read_metrics(output: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; those that are damaged are counted in a note."""
    path = Path(output) / METRICS
    *whole, _ = path.read_bytes().split(b"\n")  # a killed process leaves half of one
    read = [line for line in map(_load, whole) if line]
    if len(read) < len(whole):
        tqdm.write(f"note: {path}: passed over {len(whole) - len(read)} damaged lines")
    return read


def _load(line: bytes) -> dict[str, Any] | None:
    """None where it is damaged."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(values, dict) and isinstance(values.get("step"), int)
    return values if known else None


def _shares(ranks_KR: Tensor) -> Tensor:
    return ranks_KR.double().cpu() / ranks_KR.sum(1, keepdim=True).clamp(min=1).cpu()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a continued run repeats."""
    kept = read_metrics(path.parent) if path.exists() else []
    lines = [json.dumps(line) + "\n" for line in kept if line["step"] <= step]
    part = path.with_name(f".{path.name}")
    part.write_text("".join(lines))
    part.replace(path)
