"""What may reach a terminal. Names, answers and error messages come from models, servers and
downloaded files; control characters in them could write to the clipboard, move the cursor or hide
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

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
    brackets are no markup unless `markup` says so: names may contain them.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of a renderable."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():  # the second: almost all, and fast
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
