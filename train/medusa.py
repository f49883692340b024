"""Train Medusa heads: accelerate launch train/medusa.py RECIPE.yaml [key.path=value ...]

Several processes: `accelerate launch --multi_gpu --num_processes N ...` on GPUs,
`ACCELERATE_USE_CPU=true torchrun --nproc-per-node N ...` on CPU. Exit codes: 0 done, 2 a mistake
in recipe, data or launch, 130 interrupted and saved. DRAFTHEADS_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from draftheads.train.loop import Outcome, fit
from draftheads.train.recipe import load_recipe

USAGE = "usage: train/medusa.py RECIPE.yaml [key.path=value ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe; returns the exit code. Only the first process speaks."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    speaks = os.environ.get("RANK", "0") == "0"
    if not arguments or arguments[0] in ("-h", "--help"):
        if speaks:
            print(f"{__doc__}\n{USAGE}")
        return 0 if arguments else 2
    try:
        outcome = fit(load_recipe(arguments[0], arguments[1:]))
    except (ValueError, OSError) as error:  # the user's mistakes: a line, no traceback
        if os.environ.get("DRAFTHEADS_DEBUG"):
            raise
        if speaks:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if speaks:
        print(_ending(outcome))
    return 0 if outcome.finished else 130


def _ending(outcome: Outcome) -> str:
    if not outcome.finished:
        return (
            f"interrupted at step {outcome.step} of {outcome.steps}, saved in "
            f"{outcome.checkpoint}; run the same command again to go on"
        )
    if not outcome.trained:
        return (
            f"{outcome.checkpoint}: this run is finished; raise run.steps to go on, "
            "or give another run.output"
        )
    return f"done: {outcome.steps} steps, saved in {outcome.checkpoint}"


if __name__ == "__main__":
    sys.exit(main())
