"""What a run will need: memory per device, disk and time, before anything is loaded.

Sizes follow from shapes (`sizes`), rows from the data (`workload`); what shapes do not
tell is tried (`probe`) and extrapolated to the target's depth.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftheads.heads.placement import check_placement
from draftheads.train.assemble import check_tokens
from draftheads.train.checkpoint import newest
from draftheads.train.contents import SHARD_BYTES
from draftheads.train.judge import check_judge
from draftheads.train.plan.activations import activation_bytes
from draftheads.train.plan.machine import device_memory, resident
from draftheads.train.plan.needs import Disk, Duration, Memory
from draftheads.train.plan.parts import Sizes
from draftheads.train.plan.probe import Probe, ProbeError, Prober
from draftheads.train.plan.sizes import ENGINES, FEATURE_BYTES, Launch, count_sizes
from draftheads.train.plan.trial import ALONE, JOINT, Trial
from draftheads.train.plan.workload import Steps, Workload, plan_steps, read_workload
from draftheads.train.recipe import Recipe
from draftheads.train.state import check_same_run, read_state
from draftheads.train.trackers import check_trackers


@dataclass(frozen=True)
class Plan:
    """All of it. probed: layers of the targets that were tried; empty: shapes alone, because of
    `reason`. time: None without a probe. busy: processes per core that wanted to run before it.
    """

    recipe: Recipe
    launch: Launch
    sizes: Sizes
    work: Workload
    steps: Steps
    memory: Memory
    disk: Disk
    time: Duration | None
    probed: list[int]
    reason: str
    busy: float

    @property
    def tokens_per_step(self) -> float:
        """Over all processes, padding not counted."""
        return self.steps.rows * self.work.row_tokens

    def remedy(self) -> str:
        """One line, empty where everything fits."""
        if not self.memory.fits:
            needed, limit = self.memory.needed, self.memory.limit
            what = (
                f"memory; {'set run.gradient_checkpointing, ' if self.recipe.adapter else ''}lower "
                "data.rows_per_batch, data.sequence_length or data.cache_gb, set head.vocabulary, "
                "or divide the head's state over processes with --engine zero2"
            )
        elif self.disk.features > self.disk.allowed:
            needed, limit = self.disk.features, self.disk.allowed
            what = "features; take features.dtype=fp8 or raise features.disk_gb"
        elif self.disk.fits:
            return ""
        else:
            needed, limit = self.disk.total, self.disk.free
            what = "disk; lower run.keep, take features.dtype=fp8, or another run.output"
        return (
            f"does not fit: expected at most {limit / 1e9:.1f} GB, needs {needed / 1e9:.1f} GB of "
            f"{what}"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON."""
        work = {key: value for key, value in vars(self.work).items() if key != "answers"}
        target = self.sizes.target
        return {
            "launch": asdict(self.launch),
            **asdict(self.sizes),
            "target": {**asdict(target), "dtype": str(target.dtype).split(".")[-1]},
            "data": {**work, "row_tokens": self.work.row_tokens},
            "steps": {**asdict(self.steps), "tokens_per_step": self.tokens_per_step},
            "memory": {**asdict(self.memory), "total": self.memory.total, "fits": self.memory.fits},
            "disk": {**asdict(self.disk), "total": self.disk.total, "fits": self.disk.fits},
            "time": asdict(self.time) if self.time else None,
            "probed": self.probed,
            "reason": self.reason,
            "busy": self.busy,
            "recipe": self.recipe.model_dump(mode="json"),
        }


def make_plan(recipe: Recipe, launch: Launch, *, probe: bool = True, clock: str = "wall") -> Plan:
    """Count, look, try. clock: of the probe, "wall" or "cpu". Raises ValueError and OSError for
    what the trainer would refuse.
    """
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    if recipe.adapter and "weights" in ENGINES[launch.engine]:
        raise ValueError(
            f"--engine: expected ddp, zero1 or zero2 with an adapter, got {launch.engine}, which "
            "would divide matrices that the target reads between the heads' forwards"
        )
    _refuse(recipe, launch)
    sizes = count_sizes(recipe)
    work = read_workload(recipe, sizes.target.context)
    largest = max((max(answer.tokens) for answer in work.answers), default=0)
    check_tokens(recipe, largest, sizes.target.vocabulary)
    steps = plan_steps(recipe, work, launch.processes)
    batch = min(recipe.data.rows_per_batch, steps.rows // launch.processes)  # as `share` divides it
    data = recipe.data.model_copy(update={"rows_per_batch": batch})
    recipe = recipe.model_copy(update={"data": data})
    activations = activation_bytes(recipe, sizes, work.length)
    found, reason = None, "--no-probe was given"
    if probe:
        found, reason = _probe(Prober(recipe, sizes, work, steps, clock), activations)
    trial = found.at((sizes.target.layers, sizes.adapter.layers)) if found else None
    planner = _Planner(recipe, launch, sizes, work, steps)
    return Plan(
        **vars(planner),
        memory=planner.probed(trial, found) if trial and found else planner.counted(activations),
        disk=planner.disk(trial),
        time=planner.duration(trial, found) if trial and found else None,
        probed=found.layers if found else [],
        reason=reason,
        busy=busy,
    )


def _refuse(recipe: Recipe, launch: Launch) -> None:
    """What the trainer refuses before it loads anything."""
    check_trackers(recipe.run.trackers)
    check_judge(recipe, lambda said: None)
    check_placement(recipe.target_placement, recipe.target_bits, launch.processes)
    place = _existing(recipe.run.output)
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(
            f"{recipe.run.output}: expected a folder that can be written, {place} is not one; "
            "give another run.output"
        )
    checkpoint, _ = newest(recipe.run.output)
    if checkpoint:
        check_same_run(checkpoint, read_state(checkpoint), recipe.model_dump(mode="json"))


def _existing(path: Path) -> Path:
    """A path, or the nearest of its parents that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def _probe(prober: Prober, activations: int) -> tuple[Probe | None, str]:
    """(what it found, "") or (None, why there is none)."""
    needed = prober.bytes(activations)
    free = device_memory("cuda" if torch.cuda.is_available() else "cpu")[1]
    if needed > free:
        return None, (
            f"a probe needs up to {needed / 1e9:.1f} GB here, and {free / 1e9:.1f} GB are free"
        )
    try:
        return prober.run(), ""
    except ProbeError as error:
        return None, f"the probe failed: {error}"


@dataclass(frozen=True)
class _Planner:
    recipe: Recipe
    launch: Launch
    sizes: Sizes
    work: Workload
    steps: Steps

    def counted(self, activations: int) -> Memory:
        """From shapes alone: the most that training holds, or writing a shard of features."""
        return self._memory(resident(), max(activations, self._shard_bytes()))

    def probed(self, trial: Trial, probe: Probe) -> Memory:
        """The highest of the phases, with what the probe had no part in."""
        parts = self._memory(trial.base, 0)
        trained = parts.weights + parts.gradients + parts.optimizer
        undivided = 4 * self.sizes.trained - trained  # saving makes everything whole again
        elsewhere = self.sizes.target.bytes() - parts.target
        new = parts.cache - min(parts.cache, self._kept_features(probe.rows))
        more = parts.data - min(parts.data, self.work.sampled)
        peaks = {
            "load": trial.peaks["load"] + more - elsewhere,
            "train": trial.peaks["train"] + more + new - undivided - elsewhere,
            "save": trial.peaks["save"] + more + new - elsewhere,
        }
        rest = max(peaks.values()) - parts.total
        # what is less than the parts has freed some of the target
        target = max(0, parts.target + min(0, rest))
        return replace(self._memory(trial.base, max(0, rest)), target=target)

    def disk(self, trial: Trial | None) -> Disk:
        """Checkpoints as the probe wrote them, or as counted."""
        run = self.recipe.run
        most = run.keep + 2  # the best one may be older, and one is being written
        return Disk(
            checkpoint=trial.checkpoint if trial else self.sizes.checkpoint,
            checkpoints=min(self.steps.saves or most, most),
            features=self._stored_features(),
            allowed=int(self.recipe.features.disk_gb * 1e9),
            data=self.work.stored,
            free=shutil.disk_usage(_existing(run.output)).free,
        )

    def duration(self, trial: Trial, probe: Probe) -> Duration:
        """Steps at the real depth; the held-out documents as many as there are."""
        micro, count, alone = self.steps.micro_batches, self.steps.count, self.steps.alone
        features = micro * trial.features
        save = trial.observe * self.work.heldout / max(1, probe.heldout) + trial.save
        load = trial.load
        if self.recipe.features.mode == "cached":
            rows = self._stored_tokens() / self.work.row_tokens
            load += trial.features * rows / self.recipe.data.rows_per_batch
            features = 0.0
        kept = min(1.0, self.recipe.data.cache_gb * 1e9 / max(1, self._feature_bytes(self._rows())))
        seen = min(1.0, 1 / self.steps.passes) if self.steps.passes else 1.0

        def mean(start: float, stop: float, kind: str) -> float:
            """Of the steps between two parts of the run."""
            remembered = kept * max(0.0, stop - max(start, seen)) / (stop - start)
            return trial.step(micro, kind) + features * (1 - remembered)

        apart = mean(0.0, alone, ALONE) if alone else None
        joint = mean(alone, 1.0, JOINT) if alone < 1 else None
        shares = {ALONE: alone, JOINT: 1 - alone}
        later = sum(share * trial.step(micro, kind) for kind, share in shares.items() if share)
        step = later + features * (1 - (1 - seen) * kept)
        total = load + count * step + (self.steps.saves or 1) * save if count else None
        return Duration(step, apart, joint, later + features, later, load, save, total)

    def _memory(self, base: int, activations: int) -> Memory:
        launch = self.launch
        on_cpu = launch.device == "cpu"
        placement = self.recipe.target_placement
        seen = self.steps.rows * self.steps.count if self.steps.count else None
        return Memory(
            base=base,
            target=self.sizes.target.bytes(placement, launch.processes),
            **launch.trained(self.sizes.trained),
            data=self.work.memory if on_cpu else 0,
            cache=self._kept_features(seen) if on_cpu else 0,
            mapped=self.recipe.features.mode == "cached",
            activations=activations,
            limit=device_memory(launch.device)[0],
            sharing=launch.processes if on_cpu else 1,
        )

    def _rows(self) -> int:
        return self.work.rows or self.steps.rows * (self.steps.count or 1)

    def _feature_bytes(self, rows: float) -> int:
        """Of so many rows, as the target computes them."""
        target = self.sizes.target
        numbers = rows * self.work.row_tokens * target.width * self.sizes.head.features
        return int(numbers * target.dtype.itemsize)

    def _kept_features(self, seen: int | None) -> int:
        """In memory, after so many rows were trained on; None: enough to fill it."""
        if self.recipe.features.mode == "cached":
            rows = self._rows()
            return self._stored_features() * min(rows, rows if seen is None else seen) // rows
        known = [rows for rows in (self.work.rows, seen) if rows is not None]
        room = int(self.recipe.data.cache_gb * 1e9)
        return min(room, self._feature_bytes(min(known))) if known else room

    def _shard_bytes(self) -> int:
        """While a shard is written: rows as computed, encoded, joined, as bytes and on their way to
        the file.
        """
        number = FEATURE_BYTES[self.recipe.features.dtype][0]
        copies = 4 + self.sizes.target.dtype.itemsize / number
        return int(min(SHARD_BYTES, self._stored_features()) * copies)

    def _stored_features(self) -> int:
        choices = self.recipe.features
        if choices.mode != "cached":
            return 0
        number, scale = FEATURE_BYTES[choices.dtype]
        per_token = self.sizes.head.features * (self.sizes.target.width * number + scale)
        return int(self._stored_tokens() * per_token)

    def _stored_tokens(self) -> float:
        """Whose features are in files: with an adapter, not the held-out ones, which it changes."""
        heldout = 0 if self.recipe.adapter else self.work.heldout
        return self._rows() * self.work.row_tokens + heldout
