"""Checkpoints: a step folder is a head folder plus `trainer/`, written whole or not at all.

    out/step-001000/{config.json, model.safetensors, README.md}    what Hub and engines load
    out/step-001000/trainer/{state.json, optimizer.pt}             what a continued run needs
    out/best -> step-001000                                        by predicted tokens per step

Data order and randomness are functions of (seed, step), the learning rate of the step: none of
them is stored.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import nn

from draftheads.heads.base import DraftHead
from draftheads.heads.hub import CONFIG, WEIGHTS, save_head, staged
from draftheads.heads.target import Target
from draftheads.train.recipe import differences

TRAINER, STATE, OPTIMIZER, BEST = "trainer", "state.json", "optimizer.pt", "best"
SHARDS = "deepspeed"


@dataclass(frozen=True)
class RunState:
    """What a checkpoint says about its run.

    step: optimizer steps done. steps: of the whole run. tokens: trained on, padding not counted.
    seconds: of training, over all its launches. recipe: as dumped. data: counts that show
    whether the data is the same.
    """

    step: int
    steps: int
    tokens: int
    seconds: float
    loss: float
    tokens_per_step: float
    recipe: dict[str, Any]
    data: dict[str, int]


@dataclass(frozen=True)
class Trained:
    """What a run trains: the head itself, the head as wrapped for training, its optimizer, and the
    frozen target.
    """

    head: DraftHead
    model: nn.Module
    optimizer: Any
    target: Target


def newest(output: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    steps = _steps(output)
    return steps[-1] if steps else None


def read_state(folder: Path) -> RunState:
    """The state that a checkpoint was saved with."""
    values: dict[str, Any] = json.loads((folder / TRAINER / STATE).read_text())
    return RunState(**values)


def check_same_run(folder: Path, old: RunState, recipe: dict[str, Any]) -> None:
    """Refuse to continue a run with other choices than it began with; its length may change."""
    changed = differences(old.recipe, recipe)
    if changed:
        raise ValueError(
            f"{folder.parent} holds a run with other choices ({'; '.join(changed)}); "
            "restore them, or give another run.output"
        )


def check_same_data(folder: Path, old: RunState, data: dict[str, int]) -> None:
    """Refuse to continue on data that has changed: step n would not mean the same rows."""
    if old.data != data:
        raise ValueError(
            f"{folder.parent} was trained on other data ({old.data}, now {data}); "
            "restore the data, or give another run.output"
        )


class Checkpoints:
    """Saves and loads the trained parts of one run. All processes call it; the first one writes."""

    def __init__(self, output: Path, keep: int, accelerator: Accelerator) -> None:
        self.output, self.keep, self.accelerator = output, keep, accelerator
        if accelerator.is_main_process:
            output.mkdir(parents=True, exist_ok=True)
            for unfinished in output.glob(".step-*"):
                shutil.rmtree(unfinished)

    def save(self, trained: Trained, state: RunState, facts: dict[str, Any]) -> Path:
        """Write step-*, then forget old ones. facts: what the head's config.json says of its
        training.
        """
        folder = self.output / f"step-{state.step:06d}"
        shards = self.output / f".{folder.name}.{SHARDS}"
        if self._sharded:  # every process holds a part of the optimizer
            trained.model.save_checkpoint(str(shards), tag=SHARDS)  # type: ignore[operator]
            self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            with staged(folder) as staging:
                save_head(trained.head, staging, target=trained.target, training=facts)
                trainer = staging / TRAINER
                trainer.mkdir()
                if self._sharded:
                    shards.rename(trainer / SHARDS)
                else:
                    torch.save(trained.optimizer.state_dict(), trainer / OPTIMIZER)
                (trainer / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
            self._rotate()
        self.accelerator.wait_for_everyone()
        return folder

    def load(self, folder: Path, trained: Trained) -> None:
        """Put weights and optimizer back, bit for bit, into what the same recipe has made."""
        saved = folder / TRAINER / (SHARDS if self._sharded else OPTIMIZER)
        if not saved.exists():
            raise ValueError(
                f"{folder}: was saved {'without' if self._sharded else 'with'} DeepSpeed; "
                "continue it with the launch that it was started with"
            )
        if self._sharded:
            trained.model.load_checkpoint(str(saved), tag=SHARDS)  # type: ignore[operator]
        else:
            trained.head.load_state_dict(load_file(folder / WEIGHTS))
            state = torch.load(saved, map_location=self.accelerator.device, weights_only=True)
            trained.optimizer.load_state_dict(state)

    @property
    def _sharded(self) -> bool:
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def _rotate(self) -> None:
        """Point `best` at the best step; delete all but it and the newest `keep`."""
        steps = _steps(self.output)
        best = max(steps, key=lambda step: (read_state(step).tokens_per_step, step.name))
        link = self.output / f".{BEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(best.name, target_is_directory=True)
        os.replace(link, self.output / BEST)
        for step in steps[: -self.keep]:
            if step != best:
                shutil.rmtree(step)


def _steps(output: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(
        folder
        for folder in output.glob("step-*")
        if (folder / CONFIG).is_file() and (folder / TRAINER / STATE).is_file()
    )
