"""Checkpoints: their content, whether they are intact, whether a launch may resume from one.

A step folder is a head folder plus `trainer/`, written atomically:

    out/step-001000/{config.json, model.safetensors, README.md}    read by the Hub and by engines
    out/step-001000/trainer/{state.json, optimizer.safetensors}    read when the run is resumed
    out/best -> step-001000                                        by the recipe's `eval.best`

Data order and randomness are functions of (seed, step), the learning rate of the step or of the
seconds: none of them is stored. The full optimizer state is stored by parameter name (see
`train.engines`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from filelock import FileLock, Timeout
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftheads.arguments import nearest, takes_files
from draftheads.heads.base import DraftHead
from draftheads.heads.files import read_json, remedy, remove, staged, write_json
from draftheads.heads.formats.hub import CARD, CONFIG, read_config, step_folders, write_head
from draftheads.heads.tables import flat
from draftheads.heads.target.model import Target
from draftheads.train.data.answers import has_answers, read_manifest
from draftheads.train.launch import Log, agreeing, main_process_log
from draftheads.train.origin import Origin
from draftheads.train.recipe import Recipe, differences

TRAINER, STATE, OPTIMIZER = "trainer", "state.json", "optimizer.safetensors"
BEST, LOCK = "best", ".lock"
FORMAT = 4
"""Version of state.json."""
PATIENCE = 3
"""Evaluations without improvement after which training that continues a head ends."""
SEAL = "crc32"
"""The key of its checksum, over all other values."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run after `step` steps, as in state.json."""

    step: int = 0  # optimizer steps done
    steps: int  # of the whole run; with run.minutes, by its pace so far
    tokens: int = 0  # trained on, without padding
    seconds: float = 0.0  # of steps and evaluations, over all launches
    reserved: float = 0.0  # for the last evaluation of a run of minutes
    loss: float | None = None
    tokens_per_step: float = 1.0  # simulated
    skipped: int = 0  # consecutive non-finite steps, up to this one
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
    lacks_evaluation: bool = False  # of this step, which comes before the next one
    origin: Origin | None = None  # the head that the run continues
    files: dict[str, dict[str, int]] = field(default_factory=dict)  # "bytes", "crc32" by name

    @property
    def worth(self) -> float | None:
        """The recipe's measure, more is better; None if it was not evaluated or the adapted target
        has drifted too far.
        """
        adapter = self.recipe.adapter
        if adapter and self.drift and self.drift["agreement"] < adapter.agreement:
            return None
        measure = self.recipe.measure
        if measure == "simulated":
            return self.tokens_per_step
        return self.measured[measure] if self.measured else None

    def evaluated(self, figures: dict[str, Any]) -> RunState:
        """This state with the figures of an evaluation, which counts if it was due; of two equal
        ones the later is the best.
        """
        simulated, measured = figures["heldout_tokens_per_step"], figures.get("measured")
        origin = self.origin
        if origin and origin.tokens_per_step is None:
            tau = measured["tokens_per_step"] if measured else simulated
            origin = replace(origin, tokens_per_step=tau)
        state = replace(
            self,
            tokens_per_step=simulated,
            measured=measured,
            drift=figures.get("drift"),
            lacks_evaluation=False,
            origin=origin,
        )
        worth = state.worth
        if not self.is_due:
            return state
        if worth is None or (self.best is not None and worth < self.best):
            return replace(state, waited=self.waited + 1)
        waited = self.waited + 1 if worth == self.best else 0
        return replace(state, best=worth, best_step=self.step, waited=waited)

    def after_step(self, tokens: int, seconds: float) -> RunState:
        """This state after one more step, with its tokens and seconds."""
        state = replace(self, step=self.step + 1, tokens=self.tokens + tokens)
        return state.at(self.seconds + seconds)

    def at(self, seconds: float) -> RunState:
        """This state after so many seconds in all."""
        state = replace(self, seconds=seconds)
        if self.recipe.run.minutes:
            state = replace(state, steps=max(self.step, math.ceil(self.step / state.done)))
        return state

    @property
    def place(self) -> tuple[float, float]:
        """The place and the length of the run: in steps, or in seconds where it has minutes. At
        least half of these are for training.
        """
        if self.recipe.run.minutes:
            whole = 60 * self.recipe.run.minutes
            return self.seconds, max(whole - self.reserved, whole / 2)
        return self.step, self.steps

    @property
    def done(self) -> float:
        """The share of the run that is over."""
        now, end = self.place
        return now / end

    @property
    def exhausted(self) -> bool:
        """True if `eval.patience` evaluations have passed without improvement."""
        patience = self.recipe.eval.patience
        if self.recipe.head.source:
            patience = patience or PATIENCE
        return patience is not None and self.waited >= patience

    @property
    def has_steps(self) -> bool:
        """True if the run goes on."""
        return self.done < 1 and not self.exhausted

    @property
    def is_due(self) -> bool:
        """True if this step is evaluated: not where no time would be left to train."""
        every = self.recipe.eval.every or self.recipe.run.save_every
        now, end = self.place
        return now >= end or (self.step % every == 0 and now + self.reserved < end)

    @property
    def saves(self) -> bool:
        """True if the run saves after this step."""
        return self.is_due or self.step % self.recipe.run.save_every == 0

    @property
    def early_end(self) -> str:
        """A line about a run that is exhausted."""
        return (
            f"ended at step {self.step} of {self.steps}, after {self.tokens:,} tokens: "
            f"{self.waited} evaluations without better {self.recipe.measure}; the best was at step "
            f"{self.best_step}"
        )

    def planned_steps(self, recipe: Recipe) -> int | None:
        """Steps of this run under a new recipe; None if its epochs have changed."""
        steps = self.steps if recipe.run.epochs == self.recipe.run.epochs else None
        return recipe.run.steps or steps


_STATE = TypeAdapter(RunState)


class Saved(NamedTuple):
    """An intact checkpoint."""

    folder: Path
    state: RunState


class Content(NamedTuple):
    """The content of a checkpoint, in host memory; nothing changes it any more."""

    head: DraftHead
    optimizer_state: dict[str, Tensor]
    state: RunState
    target: Target  # with a copy of its adapter
    facts: dict[str, Any]  # about the training, for the head's config.json


def read_state(folder: Path) -> RunState:
    """The state in a checkpoint. Raises ValueError if it is damaged or of another format."""
    try:
        values = read_json(folder / TRAINER / STATE)
        version = values.get("format")
        if version == FORMAT:
            if values.pop(SEAL) != _crc32(values):
                raise ValueError(f"{SEAL}: expected that of the other values")
            return _STATE.validate_python(values)
    except (OSError, ValueError, LookupError, RecursionError) as error:
        raise ValueError(f"{folder.name}: {TRAINER}/{STATE} is missing or damaged") from error
    raise ValueError(f"{folder.name}: {TRAINER}/{STATE} has format {version}, expected {FORMAT}")


def write_state(folder: Path, values: dict[str, Any]) -> None:
    """Write a checkpoint's state.json, with a checksum of these values."""
    sealed = {**values, SEAL: _crc32(values)}
    write_json(folder / TRAINER / STATE, sealed)


def _crc32(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def newest(output: Path) -> tuple[Saved | None, list[str]]:
    """The newest intact checkpoint of a run, if any, and the faults of those after it.

    Raises ValueError if there are checkpoints but none is intact: starting over would overwrite
    what the user may be able to restore.
    """
    faults: list[str] = []
    for folder in reversed(_steps(output)):
        try:
            return Saved(folder, intact_state(folder)), faults
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError(
            f"{output}: no checkpoint is intact ({'; '.join(faults)}); restore one, or delete "
            "them to start over"
        )
    return None, []


def resume_point(recipe: Recipe, accelerator: Accelerator) -> Saved | None:
    """The newest intact checkpoint, if any; the same on all processes, as is the recipe."""
    with agreeing(accelerator) as values:
        if accelerator.is_main_process:
            check_writable(recipe.run.output)  # before minutes of loading
        saved, damaged = newest(recipe.run.output)
        if saved:
            refuse_changes(saved, "choices", differences(saved.state.recipe, recipe))
            path = recipe.data.path  # what a finished run has learned from may be gone
            if has_answers(path) and (digest := read_manifest(path).digest):
                check_data(saved, path, digest)
        values["checkpoint"] = saved.folder.name if saved else "none"
        values.update(flat(recipe.model_dump(mode="json")))
        for key in ("target", "data.path", "data.cache_gb", "features.path", "run.output"):
            values.pop(key, None)  # paths and memory may differ between machines
    log = main_process_log(accelerator)
    for fault in damaged:
        log(f"warning: skipped and set aside {recipe.run.output}/{fault}")
    return saved


def is_over(state: RunState, recipe: Recipe, log: Log) -> bool:
    """True if a run has no step left under this recipe."""
    if state.lacks_evaluation:
        return False
    steps = state.planned_steps(recipe) or state.step + 1
    state = replace(state, recipe=recipe, steps=steps)
    if state.done >= 1:
        return True
    if state.exhausted:
        log(f"{state.early_end}; raise eval.patience to resume")
    return state.exhausted


def load_optimizer_state(folder: Path) -> dict[str, Tensor]:
    """The optimizer state in a checkpoint, on the CPU."""
    return load_file(folder / TRAINER / OPTIMIZER)


def check_data(saved: Saved, path: Path, digest: str) -> None:
    """Raise ValueError if the run began with data of another digest."""
    before = saved.state.data.get("digest")
    if before != digest:
        refuse_changes(saved, f"data in {path}", [f"digest: {before} -> {digest}"])


def refuse_changes(saved: Saved, what: str, changes: list[str]) -> None:
    """Raise ValueError if there are `changes` since the run began."""
    if changes:
        raise ValueError(
            f"{saved.folder.parent} holds a run with other {what} ({'; '.join(changes)}); restore "
            "them, or set another run.output"
        )


class Checkpoints:
    """The checkpoints of a run. The first process writes them, in a thread beside the training;
    `wait` raises its errors on all processes.

    last: the checkpoint that the run resumes from; later ones, which are damaged, are set aside.
    size: bytes of a checkpoint. Raises ValueError if there is no room for one, or if another
    process trains into the same folder.
    """

    def __init__(
        self, recipe: Recipe, accelerator: Accelerator, last: Path | None, size: int
    ) -> None:
        self.output = output = recipe.run.output
        self.keep = recipe.run.keep
        self.accelerator = accelerator
        self._lock = FileLock(output / LOCK, thread_local=False)
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None  # the checkpoint of the last `save`
        with agreeing(accelerator):
            if accelerator.is_main_process:
                free = shutil.disk_usage(nearest(output)).free
                if free < size:
                    raise ValueError(
                        f"{output}: expected room for a checkpoint of {size / 1e9:.3g} GB, got "
                        f"{free / 1e9:.3g} GB free; free space, or set another run.output"
                    )
                output.mkdir(parents=True, exist_ok=True)
                try:  # the system lets go of it, however this process ends
                    self._lock.acquire(blocking=False)
                except Timeout:
                    raise ValueError(
                        f"{output}: another process trains into it; set another run.output"
                    ) from None
                self._tidy(last)

    def folder(self, step: int) -> Path:
        """The checkpoint after `step` steps."""
        return self.output / f"step-{step:06d}"

    def save(self, content: Content) -> None:
        """Begin to write a checkpoint and to delete old ones after it; on the first process, after
        `wait`.
        """
        self._written = self._writer.submit(self._write, content)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; a collective. Raises OSError if the disk is
        full.
        """
        with agreeing(self.accelerator):
            if self._written is not None:
                self._written.result()

    @property
    def failed(self) -> bool:
        """True if this process already knows that `wait` will raise an error."""
        written = self._written
        return written is not None and written.done() and written.exception() is not None

    def close(self) -> None:
        """Let the writer end, then release the lock on the folder."""
        self._writer.shutdown()
        self._lock.release()

    def _write(self, content: Content) -> None:
        head, optimizer_state, state, target, facts = content
        folder = self.folder(state.step)
        try:
            with staged(folder) as staging:
                write_head(head, staging, target=target, training=facts)
                (staging / TRAINER).mkdir()
                save_file(optimizer_state, staging / TRAINER / OPTIMIZER)
                files = [path for path in sorted(staging.rglob("*")) if path.is_file()]
                sums = {str(path.relative_to(staging)): _checksum(path) for path in files}
                values = _STATE.dump_python(replace(state, files=sums), mode="json")
                write_state(staging, {"format": FORMAT, **values})
            self._rotate()
        except OSError as error:
            names = [step.name for step in _steps(self.output)] or ["none"]
            raise OSError(
                f"{folder} was not written: {error}; the newest checkpoint is {names[-1]}; "
                f"{remedy(error)} and run the same command again"
            ) from error

    def _tidy(self, last: Path | None) -> None:
        """Remove what a killed process left, set damaged checkpoints aside, delete old ones."""
        for folder in self.output.glob(".step-[0-9]*.*"):
            remove(folder)
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
        worths: dict[Path, float] = {}  # of intact steps, the newest first
        for step in reversed(_steps(self.output)):
            with suppress(ValueError):
                worth = intact_state(step, contents=False).worth
                worths[step] = -math.inf if worth is None else worth
        best = max(worths, key=worths.__getitem__)  # of two equal ones the later
        link = self.output / f".{BEST}"
        place = self.output / BEST
        if place.is_dir() and not place.is_symlink():  # the run was copied without its links
            self._set_aside(place)
        link.unlink(missing_ok=True)
        link.symlink_to(best.name, target_is_directory=True)
        os.replace(link, place)  # in one step: `best` is there at all times
        for step in worths.keys() - {*list(worths)[: self.keep], best}:
            gone = self.output / f".{step.name}.gone"  # never half a checkpoint under its name
            step.rename(gone)
            remove(gone)


def check_writable(output: Path) -> None:
    """Raise ValueError if no checkpoint can be created in `output`."""
    place = nearest(output)
    if not takes_files(place):
        problem = "may not be written to" if place.is_dir() else "is a file"
        raise ValueError(
            f"run.output: expected a folder to write to, got {output}, but {place} {problem}; "
            "change that, or set another run.output"
        )


def _steps(output: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return [folder for folder in step_folders(output) if (folder / TRAINER).is_dir()]


def intact_state(folder: Path, *, contents: bool = True) -> RunState:
    """The state in a checkpoint. contents: compare checksums of its files, not only sizes. Raises
    ValueError if it is damaged.
    """
    state = read_state(folder)
    for name, expected in state.files.items():
        if not _is_intact(folder / name, expected, contents=contents):
            raise ValueError(f"{folder.name}: {name} is missing or damaged")
    return state


def _is_intact(path: Path, expected: dict[str, int], *, contents: bool) -> bool:
    if not path.is_file():
        return False
    if path.name == CARD:  # `tune` edits it, and config.json
        return True
    if path.name == CONFIG:
        try:
            read_config(path.parent)
        except ValueError:
            return False
        return True
    if contents:
        return _checksum(path) == expected
    return path.stat().st_size == expected["bytes"]


def _checksum(path: Path) -> dict[str, int]:
    """The entry of a file in `RunState.files`."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return {"bytes": path.stat().st_size, "crc32": value}
