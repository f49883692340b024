"""What a checkpoint says about its run, and whether a launch may go on from it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.files import staged
from draftheads.heads.hub import CONFIG, WEIGHTS, step_folders, write_head
from draftheads.heads.target import Target
from draftheads.heads.weights import same_weights
from draftheads.train.recipe import Recipe, differences, recorded_recipe

TRAINER, STATE = "trainer", "state.json"
FORMAT = 2
"""Of state.json."""


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says about its run.

    step: optimizer steps done. steps: of the whole run. tokens: trained on, padding not counted.
    seconds: of training, over all its launches. tokens_per_step: simulated. skipped: steps in a
    row, up to this one, that were not finite. rows_per_step: over all processes.
    target: its fingerprint. data: counts and a digest of the token ids. versions: of what computes.
    measured: what decoding showed at this step (`Measured.facts`), or None. drift: of an adapted
    target (`Drift.facts`), or None. best, best_step: the
    greatest worth that was judged so far, and where. waited: judgements since it last rose.
    """

    step: int
    steps: int
    tokens: int
    seconds: float
    loss: float | None
    tokens_per_step: float
    skipped: int
    rows_per_step: int
    recipe: Recipe
    target: str
    data: dict[str, Any]
    versions: dict[str, str]
    measured: dict[str, Any] | None = None
    drift: dict[str, Any] | None = None
    best: float | None = None
    best_step: int = 0
    waited: int = 0

    @property
    def worth(self) -> float | None:
        """By the run's measure, more is better; None where that was not judged, or the target has
        drifted too far.
        """
        adapter, measure = self.recipe.adapter, self.recipe.measure
        if adapter and self.drift and self.drift["agreement"] < adapter.agreement:
            return None
        if measure == "simulated":
            return self.tokens_per_step
        if measure == "loss":
            return None if self.loss is None else -self.loss
        key = "speedup" if measure == "tokens_per_second" else measure
        return self.measured[key] if self.measured else None

    def judged(self) -> RunState:
        """The same, this judgement counted."""
        worth = self.worth
        if worth is None or (self.best is not None and worth < self.best):
            return replace(self, waited=self.waited + 1)
        rises = self.best is None or worth > self.best  # of equals the later one is kept
        waited = 0 if rises else self.waited + 1
        return replace(self, best=worth, best_step=self.step, waited=waited)

    @property
    def exhausted(self) -> bool:
        """Whether `eval.patience` is at its end."""
        patience = self.recipe.eval.patience
        return patience is not None and self.waited >= patience

    def early(self) -> str:
        """Why the run has ended before its last step."""
        return (
            f"ended at step {self.step} of {self.steps}: {self.waited} judgements without better "
            f"{self.recipe.measure}; the best was at step {self.best_step}"
        )


_STATE = TypeAdapter(RunState)
_FILES = TypeAdapter(dict[str, dict[str, int]])


class DamagedState(ValueError):
    """A state.json that cannot be read, unlike one of another format."""

    def __init__(self, folder: Path) -> None:
        self.fault = f"{folder.name}: its {TRAINER}/{STATE} is missing or damaged"
        super().__init__(f"{folder.parent}/{self.fault}; restore it, or delete this folder")


def read_state(folder: Path) -> RunState:
    """The state that a checkpoint was saved with. Raises DamagedState, and ValueError for another
    format's.
    """
    return read_checked(folder)[0]


def read_checked(folder: Path) -> tuple[RunState, dict[str, dict[str, int]]]:
    """The state of a checkpoint, and "bytes" and "crc32" of its files; errors: of `read_state`."""
    try:
        values: dict[str, Any] = json.loads((folder / TRAINER / STATE).read_bytes())
        known = values.get("format", 1)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedState(folder) from error
    if known != FORMAT:
        raise ValueError(
            f"{folder}: expected a checkpoint of format {FORMAT}, got {known}; "
            "it was written by another version of draftheads: continue with that one, or give "
            "another run.output"
        )
    try:
        values["recipe"] = recorded_recipe(values["recipe"])
        return _STATE.validate_python(values), _FILES.validate_python(values.get("files", {}))
    except (ValidationError, LookupError, AttributeError) as error:
        raise DamagedState(folder) from error


def check_same_run(folder: Path, old: RunState, recipe: Recipe) -> None:
    """Refuse to continue a run with other choices than it began with; its length may change."""
    if recipe.run.tokens_per_step is None:  # the run's step is as large as it was
        size = {"tokens_per_step": old.recipe.run.tokens_per_step}
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=size)})
    _refuse(folder, "choices", differences(old.recipe, recipe), "restore them")


def same_length(old: RunState, recipe: Recipe) -> bool:
    """Whether a run is meant to be as long as it was when it began."""
    began = old.recipe.run
    return (recipe.run.steps, recipe.run.epochs) == (began.steps, began.epochs)


def shared_choices(recipe: Recipe) -> dict[str, Any]:
    """What all processes must have been told alike, by key; folders may be elsewhere on each."""
    free = {"target", "data.path", "data.cache_gb", "features.path", "run.output"}
    values = recipe.model_dump(mode="json")
    sections = {name: part for name, part in values.items() if isinstance(part, dict)}
    inner = {f"{name}.{key}": part[key] for name, part in sections.items() for key in part}
    return {
        key: value for key, value in {**values, **inner}.items() if key not in free | {*sections}
    }


def check_same_parts(folder: Path, old: RunState, new: RunState) -> None:
    """Refuse to continue on another target or other data: step n would not mean the same."""
    if not same_weights(old.target, new.target):
        changed = [f"fingerprint: {old.target} -> {new.target}"]
        _refuse(folder, f"weights of {new.recipe.target}", changed, "restore the target")
    changed = [
        f"{key}: {old.data.get(key)} -> {value}"
        for key, value in new.data.items()
        if old.data.get(key) != value
    ]
    _refuse(folder, f"data in {new.recipe.data.path}", changed, "restore the data")


def continuing(checkpoint: Path, old: RunState, new: RunState) -> str:
    """What a launch says that goes on from a checkpoint."""
    changed = [
        f"{name} {old.versions.get(name)} -> {version}"
        for name, version in new.versions.items()
        if old.versions.get(name) != version
    ]
    note = f"; not bit for bit, as versions changed: {', '.join(changed)}" if changed else ""
    return f"continuing {checkpoint} at step {old.step} of {new.steps}{note}"


def _refuse(folder: Path, what: str, changed: list[str], remedy: str) -> None:
    if changed:
        raise ValueError(
            f"{folder.parent} holds a run with other {what} ({'; '.join(changed)}); "
            f"{remedy}, or give another run.output"
        )


# Checkpoints: a step folder is a head folder plus `trainer/`, written whole or not at all.
#
#     out/step-001000/{config.json, model.safetensors, README.md}    what Hub and engines load
#     out/step-001000/trainer/{state.json, optimizer.safetensors}    what a continued run needs
#     out/best -> step-001000                                        by the recipe's `eval.best`
#
# Data order and randomness are functions of (seed, step), the learning rate of the step: none of
# them is stored. The optimizer's state is stored whole, by parameter name (see `train.engines`).
# state.json names every other file of its folder with size and checksum; a folder where they do not
# agree is passed over.


OPTIMIZER, BEST, LOCK = "optimizer.safetensors", "best", ".lock"
ASIDE = "damaged-"
UNFINISHED = re.compile(r"\.{1,2}step-[0-9]{6,}\.")
"""Two dots: earlier versions staged the head in a staged checkpoint."""


def newest(output: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a run, or None, and what is wrong with those after it.

    Raises ValueError when there are checkpoints and none is whole: starting anew would overwrite
    what may still be saved by hand.
    """
    damaged: list[str] = []
    for folder in reversed(_steps(output)):
        fault = _fault(folder)
        if fault is None:
            return folder, damaged
        damaged.append(fault)
    if damaged:
        raise ValueError(
            f"{output}: expected a whole checkpoint to go on from, got {'; '.join(damaged)}; "
            "restore one, or delete them to start anew"
        )
    return None, []


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The head's tensors of a checkpoint."""
    return load_file(folder / WEIGHTS)


def load_optimizer_state(folder: Path) -> dict[str, Tensor]:
    """The optimizer's state of a checkpoint, on the CPU."""
    return load_file(folder / TRAINER / OPTIMIZER)


class Checkpoints:
    """The checkpoints of a run that is going on. All processes call it; the first one writes, and
    a fault there is raised on all of them.

    last: what the run goes on from; later ones, which are damaged, are put aside. size: bytes that
    one will have. Raises ValueError when there is no room for one, or when another process trains
    into the same folder.
    """

    def __init__(
        self,
        output: Path,
        keep: int,
        accelerator: Accelerator,
        last: Path | None = None,
        size: int = 0,
    ) -> None:
        self.output, self.keep, self.accelerator = output, keep, accelerator
        self._lock = None
        fault = None
        if accelerator.is_main_process:
            try:
                _check_room(output, size)
                output.mkdir(parents=True, exist_ok=True)
                self._lock = (output / LOCK).open("w")
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._tidy(last)
            except BlockingIOError:
                fault = f"{output}: another process trains into it; give another run.output"
            except (OSError, ValueError) as error:
                fault = f"{output}: {error}"
        self._agree(fault, ValueError)

    def save(
        self,
        head: DraftHead,
        optimizer_state: dict[str, Tensor],
        state: RunState,
        target: Target,
        facts: dict[str, Any],
    ) -> Path:
        """Write step-*, then forget old ones. head, moments: whole, of the first process. facts:
        what the head's config.json says of its training. Raises OSError, with what is still there,
        when the disk is full.
        """
        folder = self.output / f"step-{state.step:06d}"
        fault = None
        if self.accelerator.is_main_process:
            try:
                with staged(folder) as staging:
                    write_head(head, staging, target=target, training=facts)
                    trainer = staging / TRAINER
                    trainer.mkdir()
                    save_file(optimizer_state, trainer / OPTIMIZER)
                    saved = _STATE.dump_python(state, mode="json")
                    described = {"format": FORMAT, **saved, "files": _describe(staging)}
                    (trainer / STATE).write_text(json.dumps(described, indent=2) + "\n")
                self._rotate()
            except (OSError, SafetensorError) as error:  # the other processes wait for a word
                kept = _steps(self.output)
                fault = (
                    f"{folder} was not written: {error}; the newest checkpoint is "
                    f"{kept[-1].name if kept else 'none'}; free space there and run the same "
                    "command again"
                )
        self._agree(fault, OSError)
        return folder

    def close(self) -> None:
        """Let others train into this folder."""
        if self._lock is not None:
            self._lock.close()

    def _agree(self, fault: str | None, kind: type[Exception]) -> None:
        """Raise the first process's fault on every process."""
        said = [fault]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(said)
        if said[0] is not None:
            self.close()
            raise kind(said[0])

    def _tidy(self, last: Path | None) -> None:
        """Remove what a killed process left; put damaged checkpoints aside; forget old ones."""
        for folder in self.output.glob(".*step-*"):
            if UNFINISHED.match(folder.name):
                shutil.rmtree(folder)
        if last is None:
            return
        steps = _steps(self.output)
        for damaged in steps[steps.index(last) + 1 :]:
            self._put_aside(damaged)
        self._rotate()

    def _put_aside(self, folder: Path) -> None:
        aside = self.output / f"{ASIDE}{folder.name}"
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)

    def _rotate(self) -> None:
        """Point `best` at the best step; delete all but it and the newest `keep`."""
        steps = [step for step in _steps(self.output) if _fault(step, contents=False) is None]
        best = max(reversed(steps), key=_worth)  # of two equal ones the later
        link, place = self.output / f".{BEST}", self.output / BEST
        if place.is_dir() and not place.is_symlink():  # the run was copied without its links
            self._put_aside(place)
        link.unlink(missing_ok=True)
        link.symlink_to(best.name, target_is_directory=True)
        os.replace(link, place)
        for step in set(steps) - set(steps[-self.keep :]) - {best}:
            gone = self.output / f".{step.name}.gone"  # never half a checkpoint under its name
            step.rename(gone)
            shutil.rmtree(gone)


def _worth(step: Path) -> tuple[bool, float]:
    """None is worse than an unjudged one."""
    worth = read_state(step).worth
    return worth is not None, worth or 0.0


def _check_room(output: Path, size: int) -> None:
    place = output.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < size:
        raise ValueError(
            f"expected room for a checkpoint of {size / 1e9:.3g} GB, got {free / 1e9:.3g} GB free; "
            "free space, or give another run.output"
        )


def _steps(output: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return [folder for folder in step_folders(output) if (folder / TRAINER).is_dir()]


def _describe(folder: Path) -> dict[str, dict[str, int]]:
    """Size and checksum of every file in a folder."""
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": _crc32(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _fault(folder: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. contents: whether to read the files, too."""
    try:
        files = read_checked(folder)[1]
    except DamagedState as error:
        return error.fault
    for name, expected in files.items():
        path = folder / name
        if name in (CONFIG, "README.md"):  # `bench --card` writes into these
            if not path.is_file():
                return f"{folder.name}: {name} is missing"
            continue
        size = path.stat().st_size if path.is_file() else 0
        if size != expected.get("bytes"):
            return f"{folder.name}: {name} has {size} bytes, expected {expected.get('bytes')}"
        if contents and _crc32(path) != expected.get("crc32"):
            return f"{folder.name}: {name} is not what was written (its checksum differs)"
    return None


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
