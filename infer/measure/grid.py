"""A table of figures, on a terminal of any width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

NARROW = {"vs best": "vs\nbest", "lossless": "loss-\nless"}
"""Titles that are wider than their column, for a terminal."""


@dataclass(frozen=True)
class Grid:
    """A table of numbers with a name at the beginning of each row."""

    columns: list[str]
    rows: list[list[str]]

    def print(
        self, console: Console, style: Callable[[Sequence[str]], str | None] = lambda row: None
    ) -> None:
        """Print it. style: of a whole row."""
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for place, name in enumerate(self.columns):
            title = NARROW.get(name, name)
            table.add_column(title, justify="right" if place else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*row, style=style(row))
        console.print(table, "")
