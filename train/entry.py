"""Start and end of every command and training script: one error line and an exit code.

0: done. 2: a mistake of the user, by this project's convention a ValueError or OSError. 130:
interrupted. Nothing slow is imported before signals are handled.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from draftheads.arguments import expected
from draftheads.extras import explanation
from draftheads.train.faults import LostProcessError, OutOfMemoryError, memory_errors
from draftheads.train.signals import HANG_UPS, handling, hang_up

INTERRUPTED = 130
LONGEST_LINE = 800
"""Characters of an error line: it may quote what was given."""
LESS_MEMORY = (
    "give it less at a time: fewer or shorter rows, prompts or answers, or a smaller model"
)
HELP = """Train draft heads.

Several processes: `accelerate launch --multi_gpu --num_processes N ...` on GPUs,
`ACCELERATE_USE_CPU=true torchrun --nproc-per-node N ...` on CPU. A recipe without `head.kind` is
for {kind} heads. Exit codes: 0 done, 2 a mistake in recipe, data or launch, 130 interrupted and
saved. DRAFTHEADS_DEBUG=1 shows tracebacks.

usage: train/{script}.py RECIPE.yaml [key.path=value ...]"""


def words(argv: Sequence[str] | None, script: str, kind: str) -> Sequence[str]:
    """The words of a command line (None: of this process), without the --local_rank that launchers
    add, and say in LOCAL_RANK, too; without any, or for -h, its usage, and the end.
    """
    arguments = sys.argv[1:] if argv is None else argv
    arguments = [word for word in arguments if not re.fullmatch(r"--local[_-]rank=\d+", word)]
    if not arguments or arguments[0] in ("-h", "--help"):
        say_once(HELP.format(kind=kind, script=script))
        sys.exit(0 if arguments else 2)
    return arguments


@contextmanager
def mistakes_in_one_line(*, resumes: bool = True) -> Iterator[None]:
    """End the process with one line and an exit code: 2 after a mistake of the user or a fault of
    the machine (with DRAFTHEADS_DEBUG set, its traceback), 130 after Ctrl-C, SIGTERM or SIGHUP.
    These two raise SystemExit, so that open files are closed and temporary ones removed. Terminals
    and threads are prepared, too.

    resumes: whether the same command continues where an interrupted one ended.
    """
    spin_briefly()
    quiet_transformers()
    guard_terminal()
    advice = "; run the same command again to resume" if resumes else ""

    def end(number: int, frame: FrameType | None) -> None:
        if isinstance(sys.exc_info()[1], LostProcessError):
            return  # a launcher ends those that are left; their own line says why
        by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        say_once(f"interrupted by {by}{advice}", sys.stderr)
        sys.exit(INTERRUPTED)

    with handling(end, signal.SIGTERM), handling(hang_up, *HANG_UPS):
        try:
            with memory_errors(LESS_MEMORY):
                yield
        except KeyboardInterrupt:
            end(signal.SIGINT, None)
        except (ValueError, OSError, MemoryError, ImportError) as error:
            is_ours = isinstance(error, ImportError) and (error.name or "").startswith("draftheads")
            if is_ours or os.environ.get("DRAFTHEADS_DEBUG"):
                raise
            _print_mistake(error)
            sys.exit(2)


def _print_mistake(error: Exception) -> None:
    """Print the line of an error, once per machine if all of its processes make the mistake."""
    is_disk = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    # only those that are left notice that another process is gone
    is_own = is_disk or isinstance(error, LostProcessError | OutOfMemoryError | ConnectionError)
    rank = os.environ.get("RANK", "0")
    if is_own or os.environ.get("LOCAL_RANK", rank) == "0":
        where = "" if is_first() else f" on process {rank}"
        say(f"error{where}: {one_line(error)}", sys.stderr)


def one_line(error: Exception) -> str:
    """An error message without line breaks, and without the middle of a very long one."""
    line = _message(error)
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2
    return f"{line[:half]} ... {line[-half:]}"  # what is expected, and what to do


def _message(error: Exception) -> str:
    """In one line; of several by pydantic, the first."""
    if isinstance(error, ImportError):
        return explanation(error)
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return (
            f"{'.'.join(map(str, first['loc']))}: {expected(first['msg'])}, got {first['input']!r}"
        )
    return " ".join(str(error).split()) or type(error).__name__


def spin_briefly() -> None:
    """Make OpenMP threads spin for microseconds before they sleep, unless the user has configured
    it. By default they spin for long, which slows all of them down once another process needs a
    core; without spinning, training takes 1.8 times as long. Call this before torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def quiet_transformers() -> None:
    """Let transformers show no progress bars and errors alone, unless the user has configured it.
    Call this before it is loaded.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def guard_terminal() -> None:
    """From now on, warnings and log records of all libraries are `harmless`, and characters that
    the terminal's encoding lacks are written as escapes, not raised as errors.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_HarmlessRecord)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {harmless(str(message))}\n"


def say(text: object, file: TextIO | None = None) -> None:
    """Print `harmless` text."""
    try:
        print(harmless(str(text)), file=file, flush=True)
    except OSError as error:
        error.filename = "standard output"  # on a full disk, say
        raise


def harmless(text: str) -> str:
    """`printable`, whose import loads torch, where it changes anything."""
    if all(map(str.isprintable, text.split("\n"))):
        return text
    from draftheads.heads.terminal import printable

    return printable(text)


class _HarmlessRecord(logging.LogRecord):
    def getMessage(self) -> str:
        return harmless(super().getMessage())


def say_once(text: str, file: TextIO | None = None) -> None:
    """`say`, on the first process of a launch only."""
    if is_first():
        say(text, file)


def is_first() -> bool:
    """True if this is the first process of a launch."""
    return os.environ.get("RANK", "0") == "0"
