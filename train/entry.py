"""Start and end of every command and training script: one error line and an exit code.

0: done. 2: a mistake of the user, by this project's convention a ValueError or OSError. 130:
interrupted. Nothing slow is imported before signals are handled.
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import os
import re
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


def main(argv: Sequence[str] | None = None, *, script: str, kind: Kind) -> int:
    """Run the recipe named in `argv` (None: the arguments of the process); returns the exit code.

    kind: of the head, if the recipe has no `head.kind`.
    """
    spin_briefly()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        _print(HELP.format(kind=kind, script=script))
        return 0 if arguments else 2
    try:
        with mistakes_in_one_line():
            return train(arguments[0], arguments[1:], kind)
    except SystemExit as ended:
        return int(ended.code or 0)


def train(recipe: str, overrides: Sequence[str], kind: Kind) -> int:
    """Train from a recipe; returns 0, or 130 if the run was interrupted and saved."""
    from draftheads.train.loop import fit  # slow
    from draftheads.train.recipe import load_recipe

    logging.getLogger("draftheads").disabled = not _is_first()
    outcome = fit(load_recipe(recipe, overrides, kind))
    if not outcome.finished:
        _print(
            f"interrupted by {outcome.stopped_by} at step {outcome.step} of {outcome.steps}, saved "
            f"in {outcome.checkpoint}; run the same command again to resume"
        )
        return INTERRUPTED
    if outcome.trained:
        _print(f"done: {outcome.steps} steps, saved in {outcome.checkpoint}")
    else:
        _print(
            f"{outcome.checkpoint}: this run is finished; raise run.steps to continue it, or set "
            "another run.output"
        )
    return 0


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """End the process with one line and an exit code: 2 after a mistake of the user (with
    DRAFTHEADS_DEBUG set, its traceback), 130 after Ctrl-C or SIGTERM. SIGTERM raises SystemExit, so
    that open files are closed and temporary ones removed.
    """
    old = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)
    except (ValueError, OSError, ImportError) as error:
        ours = isinstance(error, ImportError) and (error.name or "").startswith("draftheads")
        if ours or os.environ.get("DRAFTHEADS_DEBUG"):
            raise
        # processes of one machine make the same mistakes, but a disk may fail only one of them,
        # and only those that are left notice that another one is gone
        is_disk = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        rank = os.environ.get("RANK", "0")
        if (
            is_disk
            or isinstance(error, ConnectionError)
            or os.environ.get("LOCAL_RANK", rank) == "0"
        ):
            where = "" if _is_first() else f" on process {rank}"
            print(f"error{where}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, old)


def one_line(error: Exception) -> str:
    """An error message without line breaks; of several by pydantic, the first."""
    if isinstance(error, ImportError) and error.name:  # without one the message says all
        return f"expected an installed package, got: {error}; {installation(error)}"
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}"
    return " ".join(str(error).split()) or type(error).__name__


def installation(error: ImportError) -> str:
    """The command that installs what could not be imported: an extra of ours, or the package."""
    module = (error.name or "").partition(".")[0]
    for requirement in importlib.metadata.requires("draftheads") or []:
        name = re.match(r"[\w-]+", requirement)
        extra = re.search("extra == ['\"](.+?)['\"]", requirement)
        if extra and name and name[0].replace("-", "_").lower() == module.lower():
            return f"pip install 'draftheads[{extra[1]}]'"
    return f"pip install {module}"


def spin_briefly() -> None:
    """Make OpenMP threads spin for microseconds before they sleep, unless the user has configured
    it. By default they spin for long, which slows all of them down once another process needs a
    core; without spinning, training takes 1.8 times as long. Call this before torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _end(number: int, frame: FrameType | None) -> NoReturn:
    by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    _print(f"interrupted by {by}; run the same command again to resume", sys.stderr)
    sys.exit(INTERRUPTED)


def _print(text: str, file: TextIO | None = None) -> None:
    if _is_first():
        print(text, file=file)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def set_threads(threads: int | None) -> None:
    """Limit torch to `threads` CPU threads."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def choose_threads(threads: int | None, target: Target, rows: int = 1) -> None:
    """Use the number of CPU threads that the user has set (`--threads`, OMP_NUM_THREADS). Otherwise
    a single one, if more speed up forwards of `rows` tokens by less than 15 %: they would only take
    cores from other processes. Targets whose forward takes 0.2 s or longer keep all threads.
    """
    import torch

    set_threads(threads)
    available = torch.get_num_threads()
    if threads or available == 1 or "OMP_NUM_THREADS" in os.environ or target.device.type != "cpu":
        return
    tokens_B1 = torch.zeros(rows, 1, dtype=torch.long)

    def seconds(count: int) -> float:
        torch.set_num_threads(count)
        began = time.perf_counter()
        target.model(tokens_B1, use_cache=False)
        return time.perf_counter() - began

    with torch.inference_mode():
        if seconds(available) >= 0.2:
            return
        alone, together = zip(*((seconds(1), seconds(available)) for _ in range(7)), strict=True)
    torch.set_num_threads(1 if median(alone) < 1.15 * median(together) else available)
