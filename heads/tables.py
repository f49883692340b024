"""Metadata as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def flat(values: dict[str, Any], name: str = "") -> dict[str, Any]:
    """A nested dict with dotted keys ("data.target.name"), without empty values."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result |= flat(value, f"{name}{key}.")
        elif value not in (None, "", []):
            result[f"{name}{key}"] = value
    return result


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, floats with four significant digits; "" without rows."""
    lines = [[_cell(value) for value in row] for row in rows]
    if not lines:
        return ""
    rule = ["---"] * len(titles)
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, rule, *lines])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|")
