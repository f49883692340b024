"""Started on several processes: trains each recipe, then again from half of what came out, then
from half of what one process made; and leaves each process's weights, and what it would draw next.

Beside a recipe stands `one`, a run of one process, finished.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate.utils import wait_for_everyone

from draftheads.heads.target.model import Target
from draftheads.train import loop
from draftheads.train.engines import Engine
from draftheads.train.launch import make_accelerator
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe


def train(path: Path, output: Path) -> tuple[Target, Engine, float]:
    """One run, after which the processes stay together; its target, its engine, and what it would
    draw next.
    """
    runs = []

    def noted(run, *rest, **more):
        result = train_step(run, *rest, **more)
        with torch.random.fork_rng():
            runs.append((run.target, run.engine, torch.rand(()).item()))
        return result

    loop.train_step = noted
    fit(load_recipe(path, [f"run.output={output}"]), accelerator)
    loop.train_step = train_step  # else an engine would outlive its process group
    return runs[-1]


train_step = loop.train_step


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
        target, engine, drawn = train(path, folder / "whole")
        rank = accelerator.process_index
        adapter = target.adapter
        learned = engine.full_head().state_dict() | (adapter.state() if adapter else {})
        left = {"head": learned, "drawn": drawn}
        torch.save(left, folder / f"rank-{rank}.pt")
        train(path, halve(folder / "whole", folder / "resumed", first=rank == 0))
        train(path, halve(path.parent / "one", folder / "moved", first=rank == 0))
    if rank:  # the clock of the first counts
        loop.time = SimpleNamespace(monotonic=float)
    fit(load_recipe(path, ["run.minutes=0.01", f"run.output={folder / 'minutes'}"]), accelerator)
    del engine
    gc.collect()
    wait_for_everyone()
    accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps groups of its own, whose threads may abort the interpreter's end
