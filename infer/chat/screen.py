"""What a chat draws: the text of an answer as it grows, with accepted drafts in colour."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from rich.console import Console

from draftheads.infer.text import AnswerText

ACCEPTED, NOTE = "green", "dim"


class Screen:
    """Prints text as it comes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._shown = 0  # characters

    def show(self, content: AnswerText) -> None:
        """Print what is new; characters that are accepted in green."""
        new = zip(content.text[self._shown :], content.accepted[self._shown :], strict=True)
        for mark, characters in groupby(new, itemgetter(1)):
            part = "".join(character for character, _ in characters)
            self.console.out(part, style=ACCEPTED if mark else None, end="", highlight=False)
        self._shown = len(content.text)

    def close(self) -> None:
        """End the line."""
        self.console.out("")
