"""What every training script does: run a recipe, and end with one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from draftheads.train.choices import Kind
from draftheads.train.loop import Outcome, fit
from draftheads.train.recipe import load_recipe


def main(argv: Sequence[str] | None, kind: Kind, help_text: str) -> int:
    """Run the recipe that `argv` (None: the process's arguments) names; returns the exit code.

    kind: of the head, where the recipe does not say it. help_text: for -h and for no arguments.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        if _speaks():
            print(help_text.strip())
        return 0 if arguments else 2
    return train(arguments[0], arguments[1:], kind)


def train(recipe: str, overrides: Sequence[str], kind: Kind) -> int:
    """Train as a recipe says: 0 done, 2 a mistake in recipe, data or launch, 130 interrupted and
    saved. Of the processes of a machine, which would say the same, only the first one speaks.
    """
    try:
        outcome = fit(load_recipe(recipe, overrides, kind))
    except (ValueError, OSError) as error:  # the user's mistakes: a line, no traceback
        if os.environ.get("DRAFTHEADS_DEBUG"):
            raise
        # mistakes are the same on all processes of a machine; a disk may fail one of them alone
        alone = isinstance(error, OSError) and error.errno in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EIO,
        )
        if alone or os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
            where = "" if _speaks() else f" on process {os.environ['RANK']}"
            print(f"error{where}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if _speaks():
        print(_ending(outcome))
    return 0 if outcome.finished else 130


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _ending(outcome: Outcome) -> str:
    if not outcome.finished:
        return (
            f"interrupted by {outcome.stopped_by} at step {outcome.step} of {outcome.steps}, saved "
            f"in {outcome.checkpoint}; run the same command again to go on"
        )
    if not outcome.trained:
        return (
            f"{outcome.checkpoint}: this run is finished; raise run.steps to go on, "
            "or give another run.output"
        )
    return f"done: {outcome.steps} steps, saved in {outcome.checkpoint}"
