"""How large is the house, and how dense? Prints a Markdown table of the packaged code.

    python scripts/benchmarks/house.py [CHECKOUT ...]
    python scripts/benchmarks/house.py --since REVISION

One column per checkout, by default this one; or a revision of this repository beside it.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("heads", "infer", "train", "scripts")
UNPACKAGED = {"benchmarks", "checks"}
ROOMS = (
    *("heads.target", "heads.hybrid", "heads.cpu", "heads.mtp"),
    *("infer.fixed", "train.features"),
)
"""Folders of the core."""
WINGS = (
    "heads.formats",
    "infer.drafters",
    "infer.measure",
    "infer.chat",
    "infer.serve",
    "infer.generate",
    "infer.pipeline",
    "infer.costs",
    "infer.grammar",
    "infer.lossy",
    "train.data",
    "train.advice",
    "train.learn",
    "scripts",
)
"""Folders and modules around the core, which is all else."""
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.IfExp)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LONG = 40
"""Lines of a long function."""
PARTICIPLES = frozenset(
    [
        "given",
        "found",
        "made",
        "kept",
        "known",
        "said",
        "told",
        "asked",
        "read",
        "seen",
        "taken",
        "chosen",
        "written",
        "left",
        "done",
        "held",
        "named",
        "shown",
        "used",
        "sent",
        "saved",
        "loaded",
        "stored",
        "drawn",
    ]
)
"""Names that say what was done to a thing, not what it is."""


def modules(root: Path) -> dict[str, Path]:
    """Packaged modules by dotted name, `__init__` files included."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    packaged = [path for path in paths if UNPACKAGED.isdisjoint(path.parts)]
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in packaged}


def part(module: str) -> str:
    """The room or wing of a module; of the core's floor, its folder."""
    own = [name for name in (*ROOMS, *WINGS) if f"{module}.".startswith(f"{name}.")]
    return own[0] if own else module.split(".")[0]


def complexities(folder: Path, least: int = 10) -> dict[str, int]:
    """The packaged functions of a folder whose complexity (ruff's C901) is over `least`."""
    limit = ["--config", f"lint.mccabe.max-complexity={least}"]
    options = ["--isolated", "--select", "C901", "--output-format", "json", "--no-cache", *limit]
    run = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *options, folder], capture_output=True, text=True
    )
    messages = [
        re.match(r"`(.+)` is too complex \((\d+) > ", fault["message"])
        for fault in json.loads(run.stdout)
        if UNPACKAGED.isdisjoint(Path(fault["filename"]).parts)
    ]
    return {match[1]: int(match[2]) for match in messages if match}


def words(root: Path, pattern: str) -> int:
    """The words of these documents, as `wc -w` counts them."""
    return sum(len(page.read_text().split()) for page in root.glob(pattern))


def imports(tree: ast.AST, names: set[str]) -> set[str]:
    """The modules among `names` that a module imports, wherever and for whatever it does."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftheads."):
            module = (node.module or "").removeprefix("draftheads.")
            for alias in node.names:
                found.add(f"{module}.{alias.name}")
                found.add(module)
        elif isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("draftheads.") for alias in node.names)
    return found & names


def circles(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports whose module is, over others, imported by the imported one."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        queue = [start]
        while queue:
            for other in edges[queue.pop()] - seen:
                seen.add(other)
                queue.append(other)
        return seen

    reached = {name: reachable(name) for name in edges}
    return [(name, other) for name in edges for other in edges[name] if name in reached[other]]


def docstrings(tree: ast.AST) -> set[int]:
    """Line numbers at which strings begin that are statements: docstrings and field notes."""
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def whole_strings(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """Each f-string as one token, as before Python 3.12: a budget is the same for all versions."""
    depth = 0
    for token in tokens:
        name = tokenize.tok_name[token.type]
        if depth == 0:
            yield token
        if name == "FSTRING_START":
            depth += 1
        elif name == "FSTRING_END":
            depth -= 1


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """Tokens of Python's own tokenizer, without layout, comments and docstrings."""
    texts = docstrings(ast.parse(source))
    return [
        token
        for token in whole_strings(tokenize.generate_tokens(io.StringIO(source).readline))
        if token.type not in LAYOUT
        and token.type != tokenize.COMMENT
        and not (token.type == tokenize.STRING and token.start[0] in texts)
    ]


def measure(root: Path) -> dict[str, str]:
    """The rows of the table."""
    paths = modules(root)
    counts: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    private: list[str] = []
    edges: dict[str, set[str]] = {}
    for name, path in paths.items():
        source = path.read_text()
        tree = ast.parse(source)
        edges[name] = imports(tree, set(paths)) - {name}
        counts["lines"] += len(source.splitlines())
        counts[name.split(".")[0]] += len(source.splitlines())
        tokens = code_tokens(source)
        counts["tokens"] += len(tokens)
        counts[f"{part(name)} tokens"] += len(tokens)
        counts["core tokens"] += len(tokens) * (part(name) in FOLDERS[:3])
        counts["room tokens"] += len(tokens) * (part(name) in ROOMS)
        counts["code lines"] += len({token.start[0] for token in tokens})
        counts["comments"] += sum(
            token.type == tokenize.COMMENT
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
        )
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                counts["functions"] += 1
                counts["long"] += (node.end_lineno or 0) - node.lineno >= LONG
                if node.name.startswith("_") and not node.name.startswith("__"):
                    private.append(node.name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                calls[node.id] += 1
            elif isinstance(node, ast.Attribute):
                calls[node.attr] += 1
            if isinstance(node, COMPREHENSIONS):
                counts["comprehensions"] += 1
                inner = [each for each in ast.walk(node) if isinstance(each, COMPREHENSIONS)]
                counts["nested"] += len(inner) > 1
            counts["classes"] += isinstance(node, ast.ClassDef)
            counts["branches"] += isinstance(node, BRANCHES)
            counts["conditionals"] += isinstance(node, ast.IfExp)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                counts["tuples"] += isinstance(node.targets[0], ast.Tuple)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                counts["participles"] += node.id in PARTICIPLES
        counts["untyped dicts"] += source.count("dict[str, Any]")
    importers = Counter(other for name in edges for other in edges[name])
    code, lines = counts["code lines"], counts["lines"]
    files = [name for name in paths if not name.endswith("__init__")]
    return {
        "modules": str(len(files)),
        "packaged lines": f"{counts['lines']:,}",
        "code tokens": f"{counts['tokens']:,}",
        "code tokens per line of code": f"{counts['tokens'] / code:.1f}",
        "code tokens of the core": f"{counts['core tokens']:,}",
        **{f"- {name}": f"{counts[f'{name} tokens']:,}" for name in FOLDERS[:3]},
        "code tokens of the rooms": f"{counts['room tokens']:,}",
        **{f"- {name}": f"{counts[f'{name} tokens']:,}" for name in ROOMS},
        "code tokens of the wings": (
            f"{counts['tokens'] - counts['core tokens'] - counts['room tokens']:,}"
        ),
        **{f"- {name}": f"{counts[f'{name} tokens']:,}" for name in WINGS},
        "functions over complexity 10, 8": ", ".join(
            str(sum(len(complexities(root / folder, least)) for folder in FOLDERS))
            for least in (10, 8)
        ),
        f"functions over {LONG} lines": str(counts["long"]),
        "classes": str(counts["classes"]),
        "comment lines per code line": f"{counts['comments'] / code:.3f}",
        "private functions, share": f"{len(private) / counts['functions']:.0%}",
        "private functions used once": str(sum(calls[name] == 1 for name in private)),
        "branches per 100 lines": f"{100 * counts['branches'] / lines:.1f}",
        "comprehensions per 1,000 lines (nested)": (
            f"{1000 * counts['comprehensions'] / lines:.1f} ({1000 * counts['nested'] / lines:.1f})"
        ),
        "`x if c else y` per 1,000 lines": f"{1000 * counts['conditionals'] / lines:.1f}",
        "`a, b = x, y` per 1,000 lines": f"{1000 * counts['tuples'] / lines:.1f}",
        "participles as names per 1,000 lines": f"{1000 * counts['participles'] / lines:.1f}",
        "`dict[str, Any]`": str(counts["untyped dicts"]),
        "modules with one importer": str(sum(importers[name] == 1 for name in files)),
        "imports that close a circle": str(len(circles(edges))),
        "words of README, docs, ARCHITECTURE": ", ".join(
            f"{words(root, pattern):,}" for pattern in ("README.md", "docs/*.md", "ARCHITECTURE.md")
        ),
    }


def main() -> None:
    if sys.argv[1:2] != ["--since"]:
        roots = [Path(each) for each in sys.argv[1:]] or [ROOT]
        show({root.resolve().name: measure(root) for root in roots})
        return
    [revision] = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        files = subprocess.run(
            ["git", "-C", ROOT, "archive", revision, *FOLDERS, "docs", "*.md"],
            capture_output=True,
            check=True,
        )
        subprocess.run(["tar", "-x", "-C", folder], input=files.stdout, check=True)
        show({revision: measure(Path(folder)), "now": measure(ROOT)})


def show(columns: dict[str, dict[str, str]]) -> None:
    """Print the columns, with their names above them."""
    print("| | " + " | ".join(columns) + " |")
    print("|" + " --- |" * (len(columns) + 1))
    for row in next(iter(columns.values())):
        print(f"| {row} | " + " | ".join(column[row] for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
