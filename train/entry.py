"""What every training script does: run a recipe, and end with one line and an exit code.

Nothing slow is imported before signals are heard.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from draftheads.train.loop import Outcome
    from draftheads.train.recipe import Kind

INTERRUPTED = 130
"""Exit code of what was stopped by Ctrl-C, SIGTERM or a file."""


def main(argv: Sequence[str] | None, kind: Kind, help_text: str) -> int:
    """Run the recipe that `argv` (None: the process's arguments) names; returns the exit code.

    kind: of the head, where the recipe does not say it. help_text: for -h and for no arguments.
    """
    spin_briefly()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        if _speaks():
            print(help_text.strip())
        return 0 if arguments else 2
    return train(arguments[0], arguments[1:], kind)


def train(recipe: str, overrides: Sequence[str], kind: Kind) -> int:
    """Train as a recipe says: 0 done, 2 a mistake in recipe, data or launch, 130 interrupted. Of
    the processes of a machine, which would say the same, only the first one speaks.
    """
    logger = logging.getLogger("draftheads")
    level = logger.level
    logger.setLevel(level if _speaks() else logging.ERROR)
    try:
        with ended_by_sigterm():
            from draftheads.train.loop import fit  # slow
            from draftheads.train.recipe import load_recipe

            outcome = fit(load_recipe(recipe, overrides, kind))
    except KeyboardInterrupt:  # before the first step, or the second one
        _say_interrupted("Ctrl-C")
        return INTERRUPTED
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
            print(f"error{where}: {one_line(error)}", file=sys.stderr)
        return 2
    finally:
        logger.setLevel(level)
    if _speaks():
        print(_ending(outcome))
    return 0 if outcome.finished else INTERRUPTED


def spin_briefly() -> None:
    """Let OpenMP's threads spin for microseconds before they sleep, unless the user has chosen. By
    default they spin for so long that all get several times slower once another process wants a
    core; if they slept at once (OMP_WAIT_POLICY=passive), training on an idle machine would take
    1.8 times as long. To be called before torch loads.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit(130) here, so that what is open is closed and removed."""
    old = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def one_line(error: Exception) -> str:
    """An error's message without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _say_interrupted(signal.Signals(number).name)
    sys.exit(INTERRUPTED)


def _say_interrupted(by: str) -> None:
    if _speaks():
        print(
            f"interrupted by {by}; what was saved before is whole; run the same command again to "
            "resume",
            file=sys.stderr,
        )


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
