"""What a checkpoint says about its run, and whether a launch may go on from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from draftheads.heads.weights import same_weights
from draftheads.train.judge_choices import measure_of
from draftheads.train.recipe import Recipe, differences

TRAINER, STATE = "trainer", "state.json"
FORMAT = 2
"""Of state.json."""


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says about its run.

    step: optimizer steps done. steps: of the whole run. tokens: trained on, padding not counted.
    seconds: of training, over all its launches. tokens_per_step: simulated. skipped: steps in a
    row, up to this one, that were not finite. rows_per_step: over all processes. recipe: as dumped.
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
    recipe: dict[str, Any]
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
        if self.drift and self.drift["agreement"] < self.recipe["adapter"]["agreement"]:
            return None
        measure = measure_of(self.recipe)
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
        """Whether `judge.patience` is at its end."""
        patience: int | None = self.recipe.get("judge", {}).get("patience")
        return patience is not None and self.waited >= patience

    def early(self) -> str:
        """Why the run has ended before its last step."""
        return (
            f"ended at step {self.step} of {self.steps}: {self.waited} judgements without better "
            f"{measure_of(self.recipe)}; the best was at step {self.best_step}"
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
        return _STATE.validate_python(values), _FILES.validate_python(values.get("files", {}))
    except ValidationError as error:
        raise DamagedState(folder) from error


def check_same_run(folder: Path, old: RunState, recipe: dict[str, Any]) -> None:
    """Refuse to continue a run with other choices than it began with; its length may change."""
    try:
        if recipe["run"]["tokens_per_step"] is None:  # the run's step is as large as it was
            size = {"tokens_per_step": old.recipe["run"]["tokens_per_step"]}
            recipe = {**recipe, "run": {**recipe["run"], **size}}
        changed = differences(old.recipe, recipe)
    except (LookupError, TypeError, AttributeError) as error:  # a recipe that lacks sections
        raise DamagedState(folder) from error
    _refuse(folder, "choices", changed, "restore them")


def same_length(old: RunState, recipe: Recipe) -> bool:
    """Whether a run is meant to be as long as it was when it began."""
    now = recipe.run.model_dump(mode="json")
    return all(now[name] == old.recipe["run"][name] for name in ("steps", "epochs"))


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
        _refuse(folder, f"weights of {new.recipe['target']}", changed, "restore the target")
    changed = [
        f"{key}: {old.data.get(key)} -> {value}"
        for key, value in new.data.items()
        if old.data.get(key) != value
    ]
    _refuse(folder, f"data in {new.recipe['data']['path']}", changed, "restore the data")


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
