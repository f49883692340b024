"""Which test files can a change reach? By imports, and never too few: an import for types, inside a
function or in a text that is run counts, and who reads a file that no import leads to runs always.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
CLI = ROOT / "scripts" / "cli.py"
HELPERS = {path.stem: path for path in (TESTS / "helpers").glob("*.py")}
TEST_FILES = sorted(TESTS.rglob("test_*.py"))
PACKAGE = ("heads", "infer", "train", "recipes", "scripts")
FACADES = ("heads", "infer", "train")
"""Packages whose names are imported from elsewhere when they are used."""
PAGES = re.compile(r"[^/]+\.md|docs/.*|\.github/.*|\.gitignore")
"""What only tests read that look for such files."""
FINDS_PAGES = re.compile(r"\.md\b|\bdocs\b|\bMENDS\b|\bls-files\b|\.github\b")
CODE = [path for folder in PACKAGE for path in (ROOT / folder).rglob("*.py")]
DOTTED = re.compile(r"draftheads(?:\.\w+)+")
FINDS_FILES = re.compile(r"__file__\)(\.resolve\(\))?\.parent|\bROOT\b|\bls-files\b")
RUNS_ALL = re.compile(r"\bregistered_commands\b|\bCOMMANDS\b")
FINDS_CODE = re.compile(r"\bROOT\b.*glob\(|\brglob\(|\bls-files\b|\bMODULES\b")


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(source(path))


@cache
def module(name: str) -> Path | None:
    """The file of `heads.tree`; of "", the package's own."""
    place = ROOT if name.split(".")[0] in PACKAGE else ROOT / "src" / "draftheads"
    place = place.joinpath(*name.split(".")) if name else place
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


def imported(code: ast.AST) -> Iterator[str]:
    """The dotted names that code imports, or has in a text that is no docstring."""
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
    for text in texts(code):
        yield from DOTTED.findall(text)


def texts(code: ast.AST) -> Iterator[str]:
    """The strings of code, without its docstrings."""
    notes = {id(node.value) for node in ast.walk(code) if isinstance(node, ast.Expr)}
    for node in ast.walk(code):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node.value


@cache
def files(dotted: str) -> frozenset[Path]:
    """The files behind `draftheads.heads.tree.TokenTree` or the name of a helper: a module and the
    packages around it. A name of a façade is where the façade has it from; the façade alone is all
    of its names.
    """
    first, *parts = dotted.split(".")
    if first != "draftheads":
        return frozenset({HELPERS[first]} if first in HELPERS else ())
    if parts == ["load"]:
        parts = ["infer", "load"]
    places = [module(".".join(parts[:end])) for end in range(len(parts) + 1)]
    found = {place for place in places if place}
    if parts and parts[0] in FACADES and (len(parts) == 1 or not places[2]):
        exported = [name for name in imported(tree(places[1])) if name.startswith("draftheads.")]
        exact = [name for name in exported if name.split(".")[-1] == parts[-1]]
        found = found.union(*map(files, exact or exported))
    return frozenset(found)


@cache
def commands() -> dict[str, Path]:
    """The functions of commands, and the modules that define them."""
    keys = {ast.unparse(key) for node in ast.walk(tree(CLI)) for key in keys_of(node)}
    modules = [file for file in needs(CLI) if file.parent == CLI.parent]
    return {
        node.name: file
        for file in modules
        for node in tree(file).body
        if isinstance(node, ast.FunctionDef) and {node.name, f"{file.stem}.{node.name}"} & keys
    }


def keys_of(node: ast.AST) -> list[ast.expr]:
    """The keys of the table COMMANDS."""
    is_table = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "COMMANDS"
    return node.value.keys if is_table else []


@cache
def needs(path: Path, without: frozenset[str] = frozenset()) -> frozenset[Path]:
    """The files that one file names. A façade's names count where they are used.

    without: functions that do not count.
    """
    if path.name == "conftest.py" or path in map(module, ("", *FACADES)):
        return frozenset()
    body = [node for node in tree(path).body if getattr(node, "name", "") not in without]
    code = ast.Module(body, [])
    found = frozenset[Path]().union(*map(files, imported(code)))
    if path.is_relative_to(TESTS):
        said = words(path)
        found |= {HELPERS[word] for word in HELPERS.keys() & said}
        if FINDS_FILES.search(source(path)):  # and may run one of them
            found |= {file for file in CODE if {file.stem, file.parent.name} <= said}
    return found | fixtures(path) if path.name.startswith("test_") else found


@cache
def words(path: Path) -> frozenset[str]:
    """The words in a file's strings."""
    return frozenset(word for text in texts(tree(path)) for word in re.findall(r"[\w-]+", text))


def parameters(code: ast.AST) -> set[str]:
    return {node.arg for node in ast.walk(code) if isinstance(node, ast.arg)}


def fixtures(test: Path) -> frozenset[Path]:
    """The conftests above a test, and what those of their functions need that it may use."""
    above = [folder / "conftest.py" for folder in test.parents if folder.is_relative_to(TESTS)]
    found = {conftest for conftest in above if conftest.is_file()}
    asked = parameters(tree(test)) | words(test)
    for conftest in sorted(found, key=lambda file: -len(file.parts)):
        bound = {}
        functions = []
        for node in tree(conftest).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias, name in zip(node.names, imported(node), strict=True):
                    bound[alias.asname or alias.name] = name
            elif not getattr(node, "name", "").startswith("pytest_"):  # hooks choose tests
                functions.append(node)
        for node in reversed(functions):  # a fixture uses those before it
            code = ast.unparse(node)
            if "@pytest.fixture" in code and "autouse" not in code and node.name not in asked:
                continue
            asked |= parameters(node)
            used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            names = [*imported(node), *(bound[each] for each in used & bound.keys())]
            found = found.union(*map(files, names))
    return frozenset(found)


@cache
def closure(test: Path) -> set[Path]:
    """All files that a test file needs, itself among them. Commands that none of its strings names
    are not run by it.
    """
    ours = everything(test, lambda file: {each for each in needs(file) if TESTS in each.parents})
    said = {word.replace("-", "_") for file in ours for word in words(file)}
    typed = commands().keys() & said
    if not typed or "demo" in typed or any(RUNS_ALL.search(source(file)) for file in ours):
        typed = commands().keys()
    untyped = frozenset(commands().keys() - typed)
    hosts = {*commands().values()}
    return everything(test, lambda file: needs(file, untyped) if file in hosts else needs(file))


def changes(base: str) -> set[str]:
    """What differs between a commit, or where we left it, and the working tree. Raises
    CalledProcessError for what git does not know as a commit.
    """

    def git(*arguments: str) -> list[str]:
        command = ["git", "-c", "core.quotePath=false", *arguments]
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return run.stdout.splitlines()

    [left] = git("merge-base", base, "HEAD")
    return {
        *git("diff", "--name-only", "--no-renames", left),
        *git("ls-files", "--others", "--exclude-standard"),
    }


def reached(names: Iterable[str]) -> list[Path]:
    """The test files that a change of these files can reach."""
    changed: set[Path] = set()
    finders = {FINDS_CODE}
    for name in names:
        file = ROOT / name
        folder = name.split("/")[0]
        is_gone = not file.exists()
        if is_gone and file.name.startswith("test_"):
            continue
        if PAGES.fullmatch(name):
            finders.add(FINDS_PAGES)
        elif is_gone or folder not in ("src", "tests", *PACKAGE):
            return TEST_FILES
        elif file.suffix == ".py":
            changed.add(file)
        else:  # data, which the modules beside it or above it read
            finders.add(FINDS_FILES)
            near = next(above for above in file.parents if [*above.glob("*.py")])
            changed |= {*near.glob("*.py")}
    return [test for test in TEST_FILES if closure(test) & changed or finders & found_by(test)]


@cache
def found_by(test: Path) -> set[re.Pattern[str]]:
    """The patterns of a test file and its helpers, where these look into the repository."""
    ours = [file for file in closure(test) if TESTS in file.parents and file.name != "conftest.py"]
    texts = [source(file) for file in ours if FINDS_FILES.search(source(file))]
    patterns = (FINDS_CODE, FINDS_FILES, FINDS_PAGES)
    return {pattern for pattern in patterns for text in texts if pattern.search(text)}


def everything(start: Path, edges: Callable[[Path], Iterable[Path]]) -> set[Path]:
    """What is reached from a file."""
    found, queue = {start}, [start]
    while queue:
        more = {*edges(queue.pop())} - found
        found |= more
        queue += more
    return found
