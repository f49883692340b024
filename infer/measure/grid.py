"""A table of figures, on a terminal of any width and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from draftheads.heads.tables import markdown_table

NARROW = {"vs best": "vs\nbest", "lossless": "loss-\nless"}
"""Titles that are wider than their column, for a terminal."""
LONGEST_NAME = 12
"""Characters of a text that is not folded into more lines, at least."""
GAP = 2
"""Characters between two columns."""


@dataclass(frozen=True)
class Grid:
    """A table. texts: number of columns, the first ones, that are no numbers."""

    columns: list[str]
    rows: list[list[str]]
    texts: int = 1

    def markdown(self) -> str:
        """As a Markdown table; "" without rows."""
        return markdown_table(self.columns, self.rows, self.texts)

    def print(self, console: Console, style: Callable[[Sequence[str]], str | None]) -> None:
        """Print as many tables as the width of the terminal asks for. style: of a whole row."""
        styles = [style(row) for row in self.rows]
        for part in self.folded(console.width):
            table = Table(
                box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
            )
            for place, name in enumerate(part.columns):
                if place < part.texts:
                    width = min(len(name), LONGEST_NAME)
                    table.add_column(name, overflow="fold", min_width=width)
                else:
                    table.add_column(NARROW.get(name, name), justify="right", no_wrap=True)
            for row, row_style in zip(part.rows, styles, strict=True):
                table.add_row(*row, style=row_style)
            console.print(table, "")

    def folded(self, width: int) -> list[Grid]:
        """Grids that fit into `width` characters, each with all texts and some of the numbers."""
        numbers = len(self.columns) - self.texts
        if self.width() <= width or numbers < 2:
            return [self]
        middle = self.texts + (numbers + 1) // 2
        parts = self._part(self.texts, middle), self._part(middle, len(self.columns))
        return [grid for part in parts for grid in part.folded(width)]

    def width(self) -> int:
        """The characters of a row, long texts folded."""
        widths = []
        for place, name in enumerate(self.columns):
            lines = [*NARROW.get(name, name).split("\n"), *(row[place] for row in self.rows)]
            longest = max(map(cell_len, lines))
            widths.append(min(longest, LONGEST_NAME) if place < self.texts else longest)
        return sum(widths) + GAP * (len(widths) - 1)

    def _part(self, start: int, stop: int) -> Grid:
        rows = [self.columns, *self.rows]
        columns, *rest = [[*row[: self.texts], *row[start:stop]] for row in rows]
        return Grid(columns, rest, self.texts)
