"""Faults of the machine in one line: memory that ran out, a process of the launch that died.

torch raises RuntimeError for both, as for mistakes in a program, which keep their traceback: only
their text tells them apart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED", re.I)
AMOUNT = re.compile(r"allocate ([\d.]+ ?\w+)")
LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|likely closed|timed out|timeout"
    r"|remote process|ncclRemoteError|communicator was aborted",
    re.I,
)
"""What gloo, NCCL and torch's store say when the other side is gone."""


def is_of_machine(error: Exception) -> bool:
    """True if an error says that memory ran out, or that another process is gone."""
    text = str(error)
    return isinstance(error, MemoryError) or bool(MEMORY.search(text) or LOST.search(text))


class OutOfMemoryError(MemoryError):
    """Memory ran out; the message is one line and says what to lower."""


class LostProcessError(ConnectionError):
    """Another process of this launch is missing."""


@contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Raise OutOfMemoryError if memory runs out in the block, on the CPU or a GPU.

    advice: what to lower.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if not (isinstance(error, MemoryError) or MEMORY.search(text)):
            raise
        device = "GPU" if re.search("CUDA|CUBLAS|HIP", text) else "CPU"
        amount = AMOUNT.search(text)
        request = ""
        if amount:  # torch's CPU allocator counts bytes
            number, _, unit = amount[1].partition(" ")
            size = f"{int(number) / 1e9:.3g} GB" if unit.startswith("byte") else amount[1]
            request = f", which was asked for {size} more"
        raise OutOfMemoryError(f"out of memory on the {device}{request}; {advice}") from error


@contextmanager
def lost_processes() -> Iterator[None]:
    """Raise LostProcessError if the block fails because it misses another process."""
    try:
        yield
    except RuntimeError as error:
        text = re.sub(r"^\[\S+\] ", "", " ".join(str(error).split()))  # without a source line
        is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
        if is_alone or not LOST.search(text):
            raise
        reason = text.partition(". ")[0]
        raise LostProcessError(
            f"another process of this launch is gone or never came ({reason:.100}); its own last "
            "line, or the launcher's report, says why; run the same command again to resume"
        ) from error
