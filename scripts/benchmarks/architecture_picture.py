"""The picture of ARCHITECTURE.md: core and wings as boxes, drawn from the code.

    python scripts/benchmarks/architecture_picture.py docs/architecture.svg

A column is a folder: its core and the core's rooms, then its wings. A box is as high as its code
tokens, and at least as high as its text. Arrows are imports: from each core to the core on its
left, and from each wing to its core. "also" names the wings that a part imports besides.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from draftheads.scripts.benchmarks.house import (
    FOLDERS,
    WINGS,
    code_tokens,
    imports,
    modules,
    part,
)

ROOT = Path(__file__).parents[2]
WIDTH, GAP, MARGIN = 200, 34, 16  # pixels
LINE, LETTERS = 14, 27  # pixels of a line of text, letters that fit into one
TOKENS_PER_PIXEL = 220
MOST_NAMES = 4
STYLE = """
text { font: 11px ui-monospace, monospace; fill: #24292f }
.title { font-weight: bold; font-size: 12px }
.core { fill: #cfe4f7; stroke: #3b7cb8 } .wing { fill: #f3f1e8; stroke: #a59c7c }
.arrow { fill: none; stroke: #6b7280; stroke-width: 1.5 } marker path { fill: #6b7280 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .core { fill: #16344d; stroke: #5b9bd5 } .wing { fill: #2a2820; stroke: #8d8467 }
  .arrow { stroke: #9aa4b0 } marker path { fill: #9aa4b0 }
}
"""
HEAD = """<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0 8 4 0 8z"/></marker>"""


@dataclass(frozen=True)
class Part:
    """A core or a wing: its name, tokens, modules, and the other parts that it imports."""

    name: str
    tokens: int
    modules: list[str]
    imports: set[str]

    @property
    def folder(self) -> str:
        return self.name.split(".")[0]

    def lines(self) -> list[str]:
        """The text of the box below its title."""
        also = sorted(each.split(".")[-1] for each in self.imports & {*WINGS})
        lines = wrap(" ".join(self.modules), LETTERS)
        if len(also) > MOST_NAMES:
            lines.append(f"also {len(also)} wings")
        elif also:
            lines += wrap("also " + ", ".join(also), LETTERS)
        return lines

    def height(self) -> int:
        text = LINE * (len(self.lines()) + 1) + 12
        return max(text, self.tokens // TOKENS_PER_PIXEL)


def read_parts(root: Path) -> list[Part]:
    """All parts, measured."""
    paths = modules(root)
    tokens: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    used: dict[str, set[str]] = {}
    for module, path in paths.items():
        name = part(module)
        source = path.read_text()
        tokens[name] = tokens.get(name, 0) + len(code_tokens(source))
        names.setdefault(name, [])
        used.setdefault(name, set())
        if module.endswith("__init__"):
            continue
        if module != name:
            names[name].append(module.split(".")[-1])
        used[name] |= {part(other) for other in imports(ast.parse(source), set(paths))} - {name}
    return [Part(name, tokens[name], names[name], used[name]) for name in tokens]


def box(each: Part, x: int, y: int) -> list[str]:
    """A part as SVG, with its upper left corner at x, y."""
    style = "wing" if each.name in WINGS else "core"
    height, size = each.height(), f"{each.tokens / 1000:.1f}k"
    lines = [
        f'<rect class="{style}" x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="5"/>',
        f'<text class="title" x="{x + 8}" y="{y + 17}">{each.name}</text>',
        f'<text x="{x + WIDTH - 8}" y="{y + 17}" text-anchor="end">{size}</text>',
    ]
    for number, text in enumerate(each.lines(), start=1):
        lines.append(f'<text x="{x + 8}" y="{y + 17 + LINE * number}">{text}</text>')
    return lines


def arrow(path: str) -> str:
    return f'<path class="arrow" marker-end="url(#head)" d="{path}"/>'


def column(parts: list[Part], x: int) -> tuple[list[str], int]:
    """A folder as SVG, and the y at which it ends. Its wings join a line on the left, which leads
    to the core.
    """
    core = [each for each in parts if each.name not in WINGS]
    around = sorted((each for each in parts if each.name in WINGS), key=lambda each: -each.tokens)
    lines, y, end = [], MARGIN, MARGIN
    for each in [*core, *around]:
        lines += box(each, x, y)
        if core and each in around:
            lines.append(arrow(f"M{x} {y + 14} H{x - 12} V{end - 12} H{x - 1}"))
        if each in core:
            end = y + each.height()
        y += each.height() + 12
    return lines, y


def picture(parts: list[Part]) -> str:
    """The whole SVG."""
    lines, height = [], 0
    for number, folder in enumerate(FOLDERS):
        x = MARGIN + number * (WIDTH + GAP)
        drawn, y = column([each for each in parts if each.folder == folder], x)
        lines += drawn
        height = max(height, y)
        if number:
            lines.append(arrow(f"M{x} {MARGIN + 14} H{x - GAP + 1}"))
    width = 2 * MARGIN + len(FOLDERS) * (WIDTH + GAP) - GAP
    body = "\n".join([f"<style>{STYLE}</style>", HEAD, *lines])
    view = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>\n{body}\n</svg>\n'


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    Path(sys.argv[1]).write_text(picture(read_parts(ROOT)))


if __name__ == "__main__":
    main()
