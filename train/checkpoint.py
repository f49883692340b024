"""Checkpoints: what they hold, whether they are intact, whether a launch may resume from one.

A step folder is a head folder plus `trainer/`, written whole or not at all:

    out/step-001000/{config.json, model.safetensors, README.md}    what Hub and engines load
    out/step-001000/trainer/{state.json, optimizer.safetensors}    what a resumed run needs
    out/best -> step-001000                                        by the recipe's `eval.best`

Data order and randomness are functions of (seed, step), the learning rate of the step: none of
them is stored. The optimizer's state is stored whole, by parameter name (see `train.engines`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.card import flat
from draftheads.heads.files import staged
from draftheads.heads.hub import CONFIG, WEIGHTS, step_folders, write_head
from draftheads.heads.pretrained import same_weights
from draftheads.heads.target import Target
from draftheads.train.recipe import Recipe, differences, recorded_recipe

TRAINER, STATE, OPTIMIZER = "trainer", "state.json", "optimizer.safetensors"
BEST, LOCK = "best", ".lock"
FORMAT = 2
"""Of state.json."""


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says about its run."""

    step: int  # optimizer steps done
    steps: int  # of the whole run
    tokens: int  # trained on, without padding
    seconds: float  # of training, over all launches
    loss: float | None
    tokens_per_step: float  # simulated
    skipped: int  # non-finite steps in a row, up to this one
    rows_per_step: int  # over all processes
    recipe: Recipe
    target: str  # its fingerprint
    data: dict[str, Any]  # counts and a digest of the token ids
    versions: dict[str, str]  # of the packages that affect results
    measured: dict[str, Any] | None = None  # by decoding (`Measured.facts`)
    drift: dict[str, Any] | None = None  # of an adapted target (`Drift`)
    best: float | None = None  # the greatest worth so far
    best_step: int = 0
    waited: int = 0  # evaluations since then
    files: dict[str, dict[str, int]] = field(default_factory=dict)  # "bytes", "crc32" by name

    @property
    def worth(self) -> float | None:
        """By the run's measure, more is better; None where that was not evaluated, or the target
        has drifted too far.
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
        """The same, this evaluation counted; of two equally good ones the later is the best."""
        worth = self.worth
        if worth is None or (self.best is not None and worth < self.best):
            return replace(self, waited=self.waited + 1)
        waited = self.waited + 1 if worth == self.best else 0
        return replace(self, best=worth, best_step=self.step, waited=waited)

    @property
    def exhausted(self) -> bool:
        """Whether `eval.patience` is at its end."""
        patience = self.recipe.eval.patience
        return patience is not None and self.waited >= patience

    def early(self) -> str:
        """Why the run has ended before its last step."""
        return (
            f"ended at step {self.step} of {self.steps}: {self.waited} evaluations without better "
            f"{self.recipe.measure}; the best was at step {self.best_step}"
        )


_STATE = TypeAdapter(RunState)


class DamagedState(ValueError):
    """A state.json that cannot be read, unlike one of another format."""


def read_state(folder: Path) -> RunState:
    """The state of a checkpoint. Raises DamagedState, and ValueError for another format."""
    try:
        values: dict[str, Any] = json.loads((folder / TRAINER / STATE).read_bytes())
        known = values.get("format", 1)
        if known == FORMAT:
            return _STATE.validate_python({**values, "recipe": recorded_recipe(values["recipe"])})
    except (OSError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedState(f"{folder.name}: {TRAINER}/{STATE} is missing or damaged") from error
    raise ValueError(
        f"{folder}: expected a checkpoint of format {FORMAT}, got {known}; resume with the version "
        "of draftheads that wrote it, or give another run.output"
    )


def newest(output: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint of a run, or None, and what is wrong with those after it.

    Raises ValueError when there are checkpoints and none is intact: starting over would overwrite
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
            f"{output}: no checkpoint is intact ({'; '.join(damaged)}); restore one, or delete "
            "them to start over"
        )
    return None, []


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The head's tensors of a checkpoint."""
    return load_file(folder / WEIGHTS)


def load_optimizer_state(folder: Path) -> dict[str, Tensor]:
    """The optimizer's state of a checkpoint, on the CPU."""
    return load_file(folder / TRAINER / OPTIMIZER)


def check_same_run(folder: Path, old: RunState, recipe: Recipe) -> None:
    """Refuse to resume with other choices than the run began with; its length may change."""
    if recipe.run.tokens_per_step is None:  # the run's step is as large as it was
        size = {"tokens_per_step": old.recipe.run.tokens_per_step}
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=size)})
    _refuse(folder, "choices", differences(old.recipe, recipe))


def check_same_parts(folder: Path, old: RunState, new: RunState) -> None:
    """Refuse to resume on another target or other data: step n would not mean the same."""
    if not same_weights(old.target, new.target):
        _refuse(folder, f"weights of {new.recipe.target}", [f"{old.target} -> {new.target}"])
    changed = [
        f"{key}: {old.data.get(key)} -> {value}"
        for key, value in new.data.items()
        if old.data.get(key) != value
    ]
    _refuse(folder, f"data in {new.recipe.data.path}", changed)


def _refuse(folder: Path, what: str, changed: list[str]) -> None:
    if changed:
        raise ValueError(
            f"{folder.parent} holds a run with other {what} ({'; '.join(changed)}); restore them, "
            "or give another run.output"
        )


def same_length(old: RunState, recipe: Recipe) -> bool:
    """Whether a run is meant to be as long as it was when it began."""
    began, now = old.recipe.run, recipe.run
    return (now.steps, now.epochs) == (began.steps, began.epochs)


def shared_choices(recipe: Recipe) -> dict[str, Any]:
    """What all processes must have been told alike, by key; folders may be elsewhere on each."""
    free = {"target", "data.path", "data.cache_gb", "features.path", "run.output"}
    values = dict(flat(recipe.model_dump(mode="json")))
    return {key: value for key, value in values.items() if key not in free}


def continuing(checkpoint: Path, old: RunState, new: RunState) -> str:
    """What a launch says that resumes from a checkpoint."""
    changed = [
        f"{name} {old.versions.get(name)} -> {version}"
        for name, version in new.versions.items()
        if old.versions.get(name) != version
    ]
    note = f"; not bit for bit, as versions changed: {', '.join(changed)}" if changed else ""
    return f"resuming {checkpoint} at step {old.step} of {new.steps}{note}"


class Checkpoints:
    """The checkpoints of a run. All processes call it; the first one writes, and a fault there is
    raised on all of them.

    last: what the run resumes from; later ones, which are damaged, are set aside. size: bytes that
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
        """Write step-*, then delete old ones. head, optimizer_state: whole, of the first process.
        facts: what the head's config.json says of its training. Raises OSError when the disk is
        full.
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
                    state = replace(state, files=_describe(staging))
                    values = {"format": FORMAT, **_STATE.dump_python(state, mode="json")}
                    (trainer / STATE).write_text(json.dumps(values, indent=2) + "\n")
                self._rotate()
            except (OSError, SafetensorError) as error:  # the other processes wait for a word
                kept = [step.name for step in _steps(self.output)] or ["none"]
                fault = (
                    f"{folder} was not written: {error}; the newest checkpoint is {kept[-1]}; free "
                    "space there and run the same command again"
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
        """Remove what a killed process left; set damaged checkpoints aside; delete old ones."""
        for folder in self.output.glob(".step-[0-9]*.*"):
            shutil.rmtree(folder)
        if last is not None:
            steps = _steps(self.output)
            for damaged in steps[steps.index(last) + 1 :]:
                self._set_aside(damaged)
            self._rotate()

    def _set_aside(self, folder: Path) -> None:
        aside = self.output / f"damaged-{folder.name}"
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)

    def _rotate(self) -> None:
        """Point `best` at the best step; delete all but it and the newest `keep`."""
        steps = [step for step in _steps(self.output) if _fault(step, contents=False) is None]
        worths = [read_state(step).worth for step in steps]
        # of two equal ones the later; one that was not evaluated is worse than any
        best = max(range(len(steps)), key=lambda n: (worths[n] is not None, worths[n] or 0.0, n))
        link, place = self.output / f".{BEST}", self.output / BEST
        if place.is_dir() and not place.is_symlink():  # the run was copied without its links
            self._set_aside(place)
        link.unlink(missing_ok=True)
        link.symlink_to(steps[best].name, target_is_directory=True)
        os.replace(link, place)
        for step in set(steps) - {*steps[-self.keep :], steps[best]}:
            gone = self.output / f".{step.name}.gone"  # never half a checkpoint under its name
            step.rename(gone)
            shutil.rmtree(gone)


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
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": _crc32(path)}
        for path in files
    }


def _fault(folder: Path, *, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. contents: whether to read the files, too."""
    try:
        files = read_state(folder).files
    except DamagedState as error:
        return str(error)
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if name in (CONFIG, "README.md"):  # `bench --card` writes into these
            intact = path.is_file()
        else:
            intact = size == expected.get("bytes")
            intact = intact and not (contents and _crc32(path) != expected.get("crc32"))
        if not intact:
            return f"{folder.name}: {name} is missing or damaged"
    return None


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
