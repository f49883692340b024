"""Started on several processes: trains each recipe, then again from half of what came out, then
from half of what one process made; and leaves each process's weights, and what it would draw next.

Beside a recipe stands `one`, a run of one process, finished.
"""

from __future__ import annotations

import gc
import shutil
import sys
from pathlib import Path

import torch
from accelerate.utils import wait_for_everyone

from draftheads.train.checkpoint import newest
from draftheads.train.launch import StopRequest, make_accelerator
from draftheads.train.loop import Trainer
from draftheads.train.recipe import load_recipe


def train(path: Path, output: Path) -> Trainer:
    """One run, as `fit` does it, but the processes stay together."""
    recipe = load_recipe(path, [f"run.output={output}"])
    trainer = Trainer(recipe, accelerator, newest(output)[0])
    trainer.run(StopRequest(output))
    return trainer


def halve(source: Path, output: Path, *, first: bool) -> Path:
    """A copy of a run without its last checkpoint, made by the first process."""
    if first:
        shutil.copytree(source, output, symlinks=True)
        shutil.rmtree(output / "step-000006")
    wait_for_everyone()
    return output


if __name__ == "__main__":
    out = Path(sys.argv[1])
    accelerator = make_accelerator(load_recipe(sys.argv[2]))
    for path in map(Path, sys.argv[2:]):
        folder = out / path.parent.name
        trainer = train(path, folder / "whole")
        rank = accelerator.process_index
        adapter = trainer.target.adapter
        learned = trainer.engine.whole().state_dict() | (adapter.state() if adapter else {})
        left = {"head": learned, "drawn": torch.rand(()).item()}
        torch.save(left, folder / f"rank-{rank}.pt")
        train(path, halve(folder / "whole", folder / "resumed", first=rank == 0))
        train(path, halve(path.parent / "one", folder / "moved", first=rank == 0))
    del trainer
    gc.collect()
    accelerator.end_training()
