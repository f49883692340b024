"""What a chat draws: streamed markdown with accepted drafts in colour."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from time import perf_counter

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, SegmentLines
from rich.style import Style
from rich.text import Text

ACCEPTED, NOTE = "green", "dim"
PAUSE = 9
"""Seconds without drawing after each second of drawing."""
FAR, NEAR = 256, 16
"""How far ahead of the last match a rendered word, or a character, is searched in the source."""

_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


def runs(marked: Iterable[tuple[str, bool]]) -> Iterator[tuple[bool, str]]:
    """Marked characters as strings of the same mark."""
    for mark, run in groupby(marked, itemgetter(1)):
        yield mark, "".join(char for char, _ in run)


def block_starts(source: str) -> list[int]:
    """Places where the blocks of a markdown source start. No text added after a line break changes
    the blocks before the last one.
    """
    lines = source.split("\n")
    tokens = [token for token in _PARSER.parse(source) if token.level == 0 and token.nesting >= 0]
    first = [token.map[0] for token in tokens if token.map]
    return [sum(len(line) + 1 for line in lines[:number]) for number in first]


@dataclass(frozen=True)
class MarkdownText:
    """Markdown, with line breaks kept, HTML shown as text and one empty line after a block."""

    source: str
    accepted: Sequence[bool]  # characters to colour
    last: int = 0  # draw only as many lines of the end; 0: all

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list[list[Segment]]()
        for start, end in pairwise([*block_starts(self.source), len(self.source)]):
            source = self.source[start:end]
            block = console.render_lines(_markdown(source), options, pad=False)
            filled = [n for n, line in enumerate(block) if any(s.text.strip() for s in line)]
            block = block[filled[0] : filled[-1] + 1] if filled else []
            if lines:
                lines.append([])
            lines.extend(_tinted(block, source, self.accepted[start:end]))
        yield SegmentLines(lines[-self.last :], new_lines=True)


def _markdown(source: str) -> Markdown:
    markdown = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    markdown.parsed = _PARSER.parse(source)
    for token in markdown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return markdown


def _tinted(
    lines: Iterable[list[Segment]], source: str, accepted: Sequence[bool]
) -> Iterator[list[Segment]]:
    """Colour the rendered words whose characters in the source are accepted. Words are looked up in
    order, so syntax and what the renderer adds are skipped.
    """
    green = Style.parse(ACCEPTED)
    place = 0
    for line in lines:
        painted = []
        for text, style, _ in line:
            marks = [False] * len(text)
            for word in re.finditer(r"\S+", text):
                places = _places(word[0], source, place)
                place = max(place, places[-1] + 1)
                marks[word.start() : word.end()] = [at >= 0 and accepted[at] for at in places]
            tinted = (style or Style()) + green
            for mark, part in runs(zip(text, marks, strict=True)):
                painted.append(Segment(part, tinted if mark else style))
        yield painted


def _places(word: str, source: str, place: int) -> list[int]:
    """Where the characters of a rendered word are in the source; -1: near `place` they are not."""
    at = source.find(word, place, place + FAR)
    if at >= 0:
        return list(range(at, at + len(word)))
    places = []
    for char in word:
        at = source.find(char, place, place + NEAR)
        place = max(place, at + 1)
        places.append(at)
    return places


class PlainScreen:
    """Prints text as it comes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._shown = 0  # characters

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self.console.out("")

    def show(self, text: str, accepted: Sequence[bool]) -> None:
        """Print what is new; characters that are accepted in green."""
        new = zip(text[self._shown :], accepted[self._shown :], strict=True)
        for mark, part in runs(new):
            self.console.out(part, style=ACCEPTED if mark else None, end="", highlight=False)
        self._shown = len(text)


class MarkdownScreen:
    """Streams markdown: blocks that can no longer change go to the scrollback, the last one and a
    line of status are redrawn. Drawing takes at most a tenth of the time.
    """

    def __init__(self, console: Console, status: Callable[[], str]) -> None:
        self.console = console
        self.status = status
        self._due = 0.0
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._start = 0  # of what is redrawn
        self._text = ""
        self._accepted: Sequence[bool] = ()

    def __enter__(self) -> MarkdownScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update("", refresh=True)
        self._live.stop()
        self.console.print(self._block(self._start, len(self._text)), end="")

    def show(self, text: str, accepted: Sequence[bool]) -> None:
        """Draw the text so far, if it is time; characters that are accepted in green."""
        self._text = text
        self._accepted = accepted
        began = perf_counter()
        if began < self._due:
            return
        start = self._start
        starts = block_starts(text[start:].rpartition("\n")[0])
        if len(starts) > 1:
            self._start += starts[-1]
        status = Text(self.status(), NOTE, no_wrap=True, overflow="ellipsis")
        last = self._block(self._start, len(text), max(self.console.height - 3, 1))
        with self.console:  # one write
            self._live.update(Group(last, status), refresh=True)
            if self._start > start:
                self.console.print(self._block(start, self._start), end="")
        now = perf_counter()
        self._due = now + PAUSE * (now - began)

    def _block(self, start: int, end: int, last: int = 0) -> RenderableType:
        block = MarkdownText(self._text[start:end], self._accepted[start:end], last)
        return Group("", block) if start else block
