"""Draws the text of an answer as it grows, with accepted drafts in colour."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.console import Console

from draftheads.infer.text import AnswerText

ACCEPTED, NOTE = "green", "dim"


@dataclass
class Screen:
    """Prints text as it comes."""

    console: Console
    shown: int = 0  # characters

    def show(self, content: AnswerText) -> None:
        """Print the new part of the text. Characters of accepted drafts are green."""
        new = zip(content.text[self.shown :], content.accepted[self.shown :], strict=True)
        for mark, characters in groupby(new, itemgetter(1)):
            part = "".join(character for character, _ in characters)
            self.console.out(part, style=ACCEPTED if mark else None, end="", highlight=False)
        self.shown = len(content.text)

    def close(self) -> None:
        """End the line."""
        self.console.out("")
