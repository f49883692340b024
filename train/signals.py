"""The signals that ask a process to end, and the terminal that a dropped connection takes away."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

HANG_UPS = tuple(number for number in signal.Signals if number.name == "SIGHUP")
"""SIGHUP, which Windows does not have."""
REQUESTS = (signal.SIGINT, signal.SIGTERM, *HANG_UPS)
"""Ctrl-C, a request by another program, and the end of the terminal or of the ssh connection."""
PARTING = 0.5
"""Seconds in which `| tee`, which the same hang-up reaches, ends after this process was told."""

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handling(handler: Handler, *numbers: int) -> Iterator[None]:
    """Handle these signals in the block. Those that the process was started to ignore stay ignored:
    SIGHUP under nohup, SIGINT in a background job of a script.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if number in HANG_UPS:
            _leave_lost_outputs()
        handler(number, frame)

    old = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number in numbers if old[number] is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, old[number])


def hang_up(number: int, frame: FrameType | None) -> None:
    """Handle SIGHUP as SIGTERM is handled now, whoever does it."""
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler):
        handler(number, frame)
    else:
        sys.exit(128 + number)


def _leave_lost_outputs() -> None:
    """Write to nowhere where a terminal or a pipe's reader is gone: a line printed there would
    raise OSError, and nothing would be saved.
    """
    time.sleep(PARTING)
    lost = select.POLLERR | select.POLLHUP
    outputs = select.poll()
    for output in (1, 2):
        outputs.register(output, 0)  # errors alone
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output, events in outputs.poll(0):
        if events & lost:
            os.dup2(nowhere, output)
    os.close(nowhere)
