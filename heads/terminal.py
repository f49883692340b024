"""The texts that may reach a terminal. Names, answers and error messages come from models, servers
and downloaded files; control characters in them could write to the clipboard, move the cursor or
hide text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from tqdm import tqdm

UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line break, DEL, C1
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that reorder text
    r"\u2028\u2029"  # line breaks that are not seen as such
    r"\ud800-\udfff]"  # halves of characters, which cannot be encoded
)


def printable(text: str) -> str:
    """The text without control characters other than tab and line break."""
    return UNPRINTABLE.sub("", text)


class SafeConsole(Console):
    """A rich console that prints `printable` text and no escape sequences but its own. Square
    brackets are no markup, as names may contain them. highlight: colours of numbers.
    """

    def __init__(self, *, highlight: bool = False, **options: Any) -> None:
        super().__init__(markup=False, highlight=highlight, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of a renderable."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():  # the second: almost all, and fast
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


LINE = "{desc} {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
"""A progress bar in a log."""
EVERY_S = 30
"""Seconds between two such lines."""
FIRST_LINE_S = 5
"""Seconds after which what takes long says so."""


class _Lines:
    """stderr without a terminal, where nothing is drawn over."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Each line is."""


@contextmanager
def said_if_long(text: str, say: Callable[[str], object] | None = None) -> Iterator[None]:
    """Say what a block does, on stderr or by `say`, if it takes longer than FIRST_LINE_S."""
    timer = Timer(FIRST_LINE_S, say or _Lines().write, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def progress_bar(**options: Any) -> tqdm[Any]:
    """A progress bar on stderr, with options of tqdm; now and then a line where that is no
    terminal.
    """
    if not sys.stderr.isatty():
        times = {"mininterval": EVERY_S, "maxinterval": EVERY_S}
        options |= {"file": _Lines(), "bar_format": LINE, "ncols": None, **times}
    return tqdm(**options)
