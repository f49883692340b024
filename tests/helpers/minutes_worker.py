"""Started on several processes: trains for some time, by a clock that stands still on all processes
but the first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from draftheads.train import run
from draftheads.train.launch import make_accelerator
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe

if __name__ == "__main__":
    path, out = sys.argv[1], Path(sys.argv[2])
    recipe = load_recipe(path, ["run.minutes=0.01", f"run.output={out / 'run'}"])
    accelerator = make_accelerator(recipe)
    if not accelerator.is_main_process:
        run.time = SimpleNamespace(monotonic=float)
    fit(recipe, accelerator)
    accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps groups of its own, whose threads may abort the interpreter's end
