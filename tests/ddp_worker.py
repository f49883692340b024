"""Started by torchrun: one process of one run after the other, which leaves beside each recipe the
head's weights, and what it would draw next, for comparison.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from draftheads.train.launch import StopRequest, make_accelerator
from draftheads.train.loop import Trainer
from draftheads.train.recipe import load_recipe

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        accelerator = make_accelerator(recipe := load_recipe(path))
        trainer = Trainer(recipe, accelerator)
        trainer.run(StopRequest(recipe.run.output))
        left = {"head": trainer.head.state_dict(), "drawn": torch.rand(()).item()}
        torch.save(left, path.with_name(f"rank-{accelerator.process_index}.pt"))
    accelerator.end_training()
