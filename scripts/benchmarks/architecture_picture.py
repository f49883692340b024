"""The picture of ARCHITECTURE.md: core and wings as boxes, drawn from the code.

    python scripts/benchmarks/architecture_picture.py docs/architecture.svg

A column is a folder, with its core on top and its wings below. A box is as high as its code tokens,
and at least as high as its text. Arrows are imports: from each core to the core on its left, and
from each wing to its core. "also" names the wings that a part imports besides.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from draftheads.scripts.benchmarks.house import FOLDERS, code_tokens, imports, modules

ROOT = Path(__file__).parents[2]
LAYOUT = ROOT / "tests" / "test_architecture.py"
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

    def lines(self, wings: set[str]) -> list[str]:
        """The text of the box below its title."""
        also = sorted(each.split(".")[-1] for each in self.imports & wings)
        lines = wrap(" ".join(self.modules), LETTERS)
        if len(also) > MOST_NAMES:
            lines.append(f"also {len(also)} wings")
        elif also:
            lines += wrap("also " + ", ".join(also), LETTERS)
        return lines

    def height(self, wings: set[str]) -> int:
        text = LINE * (len(self.lines(wings)) + 1) + 12
        return max(text, self.tokens // TOKENS_PER_PIXEL)


def wing_names() -> set[str]:
    """The wings, as the test of the architecture lists them."""
    for node in ast.parse(LAYOUT.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WINGS":
            return set(ast.literal_eval(node.value))
    raise ValueError(f"{LAYOUT}: expected WINGS, found none; name the wings there")


def read_parts(root: Path, wings: set[str]) -> list[Part]:
    """All parts, measured."""
    paths = modules(root)

    def part(module: str) -> str:
        own = [wing for wing in wings if f"{module}.".startswith(f"{wing}.")]
        return own[0] if own else module.split(".")[0]

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


def box(part: Part, x: int, y: int, wings: set[str]) -> list[str]:
    """A part as SVG, with its upper left corner at x, y."""
    style = "wing" if part.name in wings else "core"
    height, size = part.height(wings), f"{part.tokens / 1000:.1f}k"
    lines = [
        f'<rect class="{style}" x="{x}" y="{y}" width="{WIDTH}" height="{height}" rx="5"/>',
        f'<text class="title" x="{x + 8}" y="{y + 17}">{part.name}</text>',
        f'<text x="{x + WIDTH - 8}" y="{y + 17}" text-anchor="end">{size}</text>',
    ]
    for number, text in enumerate(part.lines(wings), start=1):
        lines.append(f'<text x="{x + 8}" y="{y + 17 + LINE * number}">{text}</text>')
    return lines


def arrow(path: str) -> str:
    return f'<path class="arrow" marker-end="url(#head)" d="{path}"/>'


def column(parts: list[Part], x: int, wings: set[str]) -> tuple[list[str], int]:
    """A folder as SVG, and the y at which it ends. Its wings join a line on the left, which leads
    to the core.
    """
    core = [part for part in parts if part.name not in wings]
    around = sorted((part for part in parts if part.name in wings), key=lambda part: -part.tokens)
    lines, y, end = [], MARGIN, MARGIN
    for part in [*core, *around]:
        lines += box(part, x, y, wings)
        if core and part in around:
            lines.append(arrow(f"M{x} {y + 14} H{x - 12} V{end - 12} H{x - 1}"))
        if part in core:
            end = y + part.height(wings)
        y += part.height(wings) + 12
    return lines, y


def picture(parts: list[Part], wings: set[str]) -> str:
    """The whole SVG."""
    lines, height = [], 0
    for number, folder in enumerate(FOLDERS):
        x = MARGIN + number * (WIDTH + GAP)
        drawn, y = column([part for part in parts if part.folder == folder], x, wings)
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
    wings = wing_names()
    Path(sys.argv[1]).write_text(picture(read_parts(ROOT, wings), wings))


if __name__ == "__main__":
    main()
