"""How every command and training script starts and ends: one error line and an exit code.

0: done. 2: a mistake of the user's, by this project's convention a ValueError or OSError. 130:
interrupted. Nothing slow is imported before signals are heard.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from draftheads.heads.target import Target
    from draftheads.train.recipe import Kind

INTERRUPTED = 130
HELP = """Train draft heads.

Several processes: `accelerate launch --multi_gpu --num_processes N ...` on GPUs,
`ACCELERATE_USE_CPU=true torchrun --nproc-per-node N ...` on CPU. A recipe without `head.kind` is
for {kind} heads. Exit codes: 0 done, 2 a mistake in recipe, data or launch, 130 interrupted and
saved. DRAFTHEADS_DEBUG=1 shows tracebacks.

usage: train/{script}.py RECIPE.yaml [key.path=value ...]"""


def main(argv: Sequence[str] | None, script: str, kind: Kind) -> int:
    """Run the recipe that `argv` (None: the process's arguments) names; returns the exit code.

    kind: of the head, where the recipe does not say it.
    """
    spin_briefly()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        _say(HELP.format(kind=kind, script=script))
        return 0 if arguments else 2
    try:
        with mistakes_in_one_line():
            return train(arguments[0], arguments[1:], kind)
    except SystemExit as ended:
        return int(ended.code or 0)


def train(recipe: str, overrides: Sequence[str], kind: Kind) -> int:
    """Train as a recipe says; returns 0, or 130 where it was interrupted and saved."""
    from draftheads.train.loop import fit  # slow
    from draftheads.train.recipe import load_recipe

    logger = logging.getLogger("draftheads")
    level = logger.level
    logger.setLevel(level if _is_first() else logging.ERROR)
    try:  # the level is the caller's
        outcome = fit(load_recipe(recipe, overrides, kind))
    finally:
        logger.setLevel(level)
    if not outcome.finished:
        _say(
            f"interrupted by {outcome.stopped_by} at step {outcome.step} of {outcome.steps}, saved "
            f"in {outcome.checkpoint}; run the same command again to resume"
        )
        return INTERRUPTED
    if outcome.trained:
        _say(f"done: {outcome.steps} steps, saved in {outcome.checkpoint}")
    else:
        _say(
            f"{outcome.checkpoint}: this run is finished; raise run.steps to continue it, or give "
            "another run.output"
        )
    return 0


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """End the process with a line and an exit code: 2 after a mistake of the user's (with a
    traceback where DRAFTHEADS_DEBUG is set), 130 after Ctrl-C or SIGTERM, which raises SystemExit
    so that what is open is closed and removed.
    """
    old = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)
    except (ValueError, OSError) as error:
        if os.environ.get("DRAFTHEADS_DEBUG"):
            raise
        # processes of one machine make the same mistakes; a disk may fail one of them alone
        alone = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        rank = os.environ.get("RANK", "0")
        if alone or os.environ.get("LOCAL_RANK", rank) == "0":
            where = "" if _is_first() else f" on process {rank}"
            print(f"error{where}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, old)


def one_line(error: Exception) -> str:
    """An error's message without its line breaks; of pydantic's, the first fault."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}"
    return " ".join(str(error).split()) or type(error).__name__


def spin_briefly() -> None:
    """Let OpenMP's threads spin for microseconds before they sleep, unless the user has chosen:
    with the default, all get several times slower once another process wants a core, and without
    spinning training takes 1.8 times as long. To be called before torch loads.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    _say(f"interrupted by {by}; run the same command again to resume", sys.stderr)
    sys.exit(INTERRUPTED)


def _say(text: str, file: TextIO | None = None) -> None:
    if _is_first():
        print(text, file=file)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def set_threads(threads: int | None) -> None:
    """Limit torch to so many CPU threads."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def choose_threads(threads: int | None, target: Target, rows: int = 1) -> None:
    """As many CPU threads as the user has chosen (`--threads`, OMP_NUM_THREADS). Otherwise one,
    where forwards of `rows` tokens, measured here, gain less than 15 % by more: they would only
    take cores from others. Models that take 0.2 s and longer keep all threads.
    """
    import torch

    set_threads(threads)
    available = torch.get_num_threads()
    if threads or available == 1 or "OMP_NUM_THREADS" in os.environ or target.device.type != "cpu":
        return
    tokens_B1 = torch.zeros(rows, 1, dtype=torch.long)
    seconds: dict[int, list[float]] = {1: [], available: []}
    with torch.inference_mode():
        while len(seconds[1]) < 7 and (not seconds[1] or seconds[available][-1] < 0.2):
            for count, measured in seconds.items():
                torch.set_num_threads(count)
                began = time.perf_counter()
                target.model(tokens_B1, use_cache=False)
                measured.append(time.perf_counter() - began)
    gain = median(seconds[1]) / median(seconds[available])
    is_fast = seconds[available][-1] < 0.2
    torch.set_num_threads(1 if is_fast and gain < 1.15 else available)
