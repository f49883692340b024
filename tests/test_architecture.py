"""The promise: the code stays small, imports point one way, and no module hides an installed
package.
"""

from __future__ import annotations

import ast
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from draftheads.scripts.cli import app

ROOT = Path(__file__).parent.parent
ORDER = ["heads", "infer", "train", "scripts"]  # each imports only what stands to its left
SOURCES = [  # what is packaged
    path
    for folder in ORDER
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "benchmarks" not in path.parts
]
LINES = {"heads": 7_600, "infer": 2_450, "train": 10_800, "scripts": 4_900}  # may only shrink
LONGEST_FUNCTION, MOST_PARAMETERS = 60, 6


@pytest.fixture(params=SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def source(request) -> Path:
    return request.param


def functions(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_stays_within_its_budget_of_lines(folder):
    """A total, so that what is added somewhere is paid for somewhere else."""
    files = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == folder]
    assert sum(len(file.read_text().splitlines()) for file in files) <= LINES[folder]


def test_functions_are_short(source):
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions(source)}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION} == {}


def test_functions_take_few_parameters(source):
    """Commands aside: their parameters are the options that a person types."""
    module = ".".join(("draftheads", *source.relative_to(ROOT).with_suffix("").parts))
    commands = {
        command.callback.__name__
        for command in app.registered_commands
        if command.callback.__module__ == module
    }
    counts = {
        node.name: len(
            [a for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
        )
        for node in functions(source)
        if node.name not in {"__init__", *commands}
    }
    assert {name: n for name, n in counts.items() if n > MOST_PARAMETERS} == {}


def test_imports_point_to_the_left(source):
    allowed = ORDER[: ORDER.index(source.relative_to(ROOT).parts[0]) + 1]
    for node in ast.walk(ast.parse(source.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [node.module or ""]
        for name in names:
            if name.startswith("draftheads."):
                assert name.split(".")[1] in [*allowed, "recipes"], f"line {node.lineno}: {name}"


def test_no_module_shadows_an_installed_package():
    """Running train/medusa.py by path puts train/ first on sys.path."""
    installed = set(packages_distributions())
    ours = {name for path in SOURCES for name in path.relative_to(ROOT).with_suffix("").parts[1:]}
    assert (ours - {"__init__"}) & installed == set()
