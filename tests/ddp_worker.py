"""Started by torchrun: one process of a run, which leaves its weights, and what it would draw
next, behind for comparison."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from draftheads.train.launch import StopRequest, make_accelerator
from draftheads.train.loop import Trainer
from draftheads.train.recipe import load_recipe

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    accelerator = make_accelerator(recipe := load_recipe(folder / "recipe.yaml", sys.argv[2:]))
    trainer = Trainer(recipe, accelerator)
    trainer.run(StopRequest(), None)
    left = {"head": trainer.head.state_dict(), "drawn": torch.rand(()).item()}
    torch.save(left, folder / f"rank-{accelerator.process_index}.pt")
    accelerator.end_training()
