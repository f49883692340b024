"""Started on several processes: trains for some time, then for as many steps as that came to."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from accelerate.utils import wait_for_everyone

from draftheads.train.launch import make_accelerator
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe

if __name__ == "__main__":
    path, out = sys.argv[1], Path(sys.argv[2])
    accelerator = make_accelerator(load_recipe(path))
    lengths = {"budget": "run.minutes=0.01"}
    for name in ("budget", "counted"):
        recipe = load_recipe(path, [lengths[name], f"run.output={out / name}"])
        steps = fit(recipe, accelerator).steps
        lengths["counted"] = f"run.steps={steps}"
        gc.collect()
        wait_for_everyone()
    accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps groups of its own, whose threads may abort the interpreter's end
