"""The promise: the code stays small enough to be read, imports point one way and in no circle, and
no module hides an installed package.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from draftheads.scripts.benchmarks.house import (
    circles,
    code_tokens,
    complexities,
    imports,
    modules,
    part,
)
from draftheads.scripts.cli import app

ROOT = Path(__file__).parents[1]
ORDER = ["heads", "infer", "train", "scripts"]  # each imports only what is to its left
MODULES = modules(ROOT)
CORE = {"heads": 37_250, "infer": 17_250, "train": 24_750}
"""Code tokens of the core's floors, without comments and docstrings, so that nothing is gained by
writing tighter. Who must raise one says in the commit what went for it.
"""
ROOMS = {
    "heads.target": 16_750,
    "heads.hybrid": 5_000,
    "heads.cpu": 3_000,
    "heads.mtp": 4_275,
    "infer.fixed": 3_385,
    "train.features": 9_000,
}
"""Folders of the core."""
WINGS = {
    "heads.formats": 14_500,
    "infer.drafters": 7_625,
    "infer.measure": 9_000,
    "infer.chat": 3_600,
    "infer.serve": 17_000,
    "infer.generate": 2_750,
    "infer.pipeline": 3_010,
    "infer.costs": 1_525,
    "infer.grammar": 1_750,
    "infer.lossy": 955,
    "train.data": 23_000,
    "train.advice": 7_100,
    "train.learn": 5_010,
    "scripts": 16_750,
}
"""The folders and modules around the core."""
PARTS = {**CORE, **ROOMS, **WINGS}
TOTAL = 229_500
"""Of all parts. Who must raise it says in the commit message what could not be deleted for it."""
DOORS = {
    "heads.formats.facts",
    "heads.formats.hub",
    "train.data.answers",
    "train.data.shards",
}
"""What the core uses of its wings: head folders, and the answers that it learns from."""
KERNEL = (
    *("heads.base", "heads.batch", "heads.target.model", "heads.cache", "heads.tree"),
    *("heads.drafting", "heads.medusa", "infer.engine", "infer.rows", "infer.accept"),
    *("train.medusa", "train.loop"),
)
"""What ARCHITECTURE.md says to read first: a kind of head, its target, decoding, training."""
KERNEL_TOKENS = 25_000
BEYOND = {
    "heads.choices": "the keys of a recipe's section `head`",
    "heads.cpu.attention": "attention of few tokens",
    "heads.cpu.linear": "products of few tokens",
    "heads.hybrid.states": "recurrent states beside the slots",
    "heads.layers": "modules of heads",
    "heads.losses": "cross-entropy and its like, in chunks",
    "heads.target.adapter": "a LoRA that learns along with heads",
    "heads.target.load": "a target by name",
    "heads.target.longrope": "RoPE that depends on the length of a text",
    "heads.target.lora": "LoRAs of others",
    "heads.target.masks": "who sees whom, as models take it",
    "heads.target.packing": "documents beside each other in training",
    "heads.target.placement": "devices, dtypes, quantisation",
    "heads.target.pretrained": "what transformers' models have where",
    "heads.target.trial": "whether a model can follow a tree",
    "heads.tensors": "names of dtypes",
    "heads.tree_drafting": "the search of dynamic trees",
    "heads.vocabulary": "heads with fewer tokens",
    "infer.fixed.maker": "whether steps are compiled or recorded",
    "infer.fixed.recorded": "replays of a step",
    "infer.fixed.steps": "a step as one function",
    "infer.constraint": "what an answer may be",
    "infer.draws": "random numbers",
    "infer.paths": "trees of rows",
    "infer.text": "stop strings",
    "infer.threads": "the clock",
    "train.batches": "rows and their order",
    "train.checkpoint": "what resuming needs",
    "train.entry": "signals and error lines",
    "train.features.sources": "states of the target",
    "train.launch": "processes that agree",
    "train.metrics": "the bar",
    "train.recipe": "keys and values",
    "train.run": "a run: its state, counts, saves",
    "train.setup": "parts from a recipe",
}
"""What the kernel uses, by a name that says enough."""
NEIGHBOURS = {
    "infer.chat": {"infer.costs"},
    "infer.drafters": {"heads.formats"},
    "infer.generate": {"heads.formats", "infer.drafters"},
    "infer.measure": {"infer.costs"},
    "infer.pipeline": {"heads.formats", "infer.drafters", "infer.grammar", "infer.measure"},
    "infer.serve": {"infer.grammar"},
    "train.advice": {"heads.formats", "infer.costs", "train.data"},
    "train.learn": {"heads.formats", "infer.drafters", "train.data"},
}
"""The wings that a wing imports. This list only shrinks."""
OPEN_CIRCLE = {"infer.fixed", "infer.rows"}
"""Rooms that still import each other. This set only shrinks."""
MENDS = "tests/mends.txt"
COMPLEX = {"heads": 0, "infer": 0, "train": 0, "scripts": 0}
"""Functions whose complexity (ruff's C901) is over 10, per folder. These numbers only shrink."""
PAGES = {"README.md": 150, "ARCHITECTURE.md": 163}
PICTURE = "docs/architecture.svg"
TOP = {
    *(".ci", ".github", "docs", "heads", "infer", "recipes", "scripts", "src", "tests", "train"),
    *(".gitignore", ".pre-commit-config.yaml", "Makefile"),
    *("constraints.txt", "pyproject.toml", "setup.py"),
    *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"),
}
"""What stands at the top of the repository."""
BINARIES = {
    "docs/page.png",
    "recipes/demo-target/model.safetensors",
    "recipes/smollm2-head/model.safetensors",
}
"""The files of the repository that are no text."""
LONGEST_FUNCTION, MOST_PARAMETERS, MOST_OPTIONS = 60, 6, 12


def tracked() -> list[str]:
    """The files of the repository, as the next commit has them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    return listed.stdout.split("\0")[:-1]


def test_the_repository_holds_what_is_listed():
    """Six wheels were once downloaded into its top, and `git add` took them."""
    assert {name.split("/")[0] for name in tracked()} == TOP


def test_a_file_that_is_no_text_is_listed():
    """As git tells them: by a zero byte. A wheel, a checkpoint, a GGUF file has one."""
    files = {name: ROOT / name for name in tracked()}
    binaries = {
        name for name, file in files.items() if file.is_file() and b"\0" in file.read_bytes()[:8000]
    }
    assert binaries == BINARIES


@pytest.fixture(params=MODULES, scope="module")
def tree(request) -> ast.Module:
    return ast.parse(MODULES[request.param].read_text())


def functions(tree: ast.AST):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_stays_within_its_tokens(name):
    """A total, so that what is added somewhere is paid for somewhere else."""
    files = [path for module, path in MODULES.items() if part(module) == name]
    total = sum(len(code_tokens(file.read_text())) for file in files)
    assert total <= PARTS[name]


def test_the_whole_stays_within_its_tokens():
    assert sum(len(code_tokens(path.read_text())) for path in MODULES.values()) <= TOTAL


def test_an_f_string_is_one_token():
    """Python 3.12 and later divide f-strings; a budget is the same number for every version."""
    assert len(code_tokens('x = f"{a} and {f(b):>{c}}"')) == len(code_tokens('x = "text"'))


def test_a_clone_shows_tools_the_package():
    """Type checkers, editors and coverage cannot read setuptools' mapping: links stand for it."""
    for folder in (*ORDER, "recipes"):
        link = ROOT / "src" / "draftheads" / folder
        assert link.is_symlink() and link.resolve() == ROOT / folder
        assert not link.readlink().is_absolute()


def test_the_core_imports_no_wing():
    """But for their doors, and the façades, which import what a name needs when it is used."""
    for name, path in MODULES.items():
        if part(name) in WINGS or name.endswith(".__init__"):
            continue
        used = imports(ast.parse(path.read_text()), set(MODULES))
        wings = {other for other in used if part(other) in WINGS}
        assert wings <= DOORS, f"{name} imports {sorted(wings - DOORS)}"


def test_the_kernel_takes_an_afternoon():
    """It is small, imports what is named here alone, and is what a newcomer is told to read."""
    sources = {name: MODULES[name].read_text() for name in KERNEL}
    assert sum(len(code_tokens(source)) for source in sources.values()) <= KERNEL_TOKENS
    trees = map(ast.parse, sources.values())
    used = set().union(*(imports(tree, set(MODULES)) for tree in trees))
    assert used - {*KERNEL} == {*BEYOND}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    order = re.search(r"The kernel takes an afternoon.*?Then", text, re.DOTALL)
    assert order
    listed = [name.split("/")[-1] for name in re.findall(r"`([\w/]+)\.py`", order[0])]
    assert listed == [name.split(".")[-1] for name in KERNEL]


@pytest.mark.parametrize("wing", [name for name in WINGS if name != "scripts"])
def test_a_wing_imports_few_others(wing):
    used = set()
    for name, path in MODULES.items():
        if part(name) == wing:
            used |= imports(ast.parse(path.read_text()), set(MODULES))
    others = {part(module) for module in used} & WINGS.keys() - {wing}
    assert others == NEIGHBOURS.get(wing, set())


def test_decoding_loads_no_wing():
    """Whoever only decodes needs no library that a wing needs."""
    source = "import draftheads.heads, draftheads.infer.engine, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    names = [name.removeprefix("draftheads.") for name in run.stdout.split()]
    loaded = {part(name) for name in names if name in MODULES}
    assert {"heads", "infer"} <= loaded
    assert loaded & WINGS.keys() <= {"heads.formats"}


@pytest.mark.parametrize("folder", ORDER)
def test_functions_stay_simple(folder):
    """By the linter's own count; none is over 12."""
    over = complexities(ROOT / folder)
    assert len(over) <= COMPLEX[folder], over
    assert all(complexity <= 12 for complexity in over.values()), over


@pytest.mark.parametrize("page", PAGES)
def test_a_page_stays_short(page):
    assert len((ROOT / page).read_text().splitlines()) <= PAGES[page]


def test_the_picture_shows_every_part():
    """Whoever adds a part draws the picture again: scripts/benchmarks/architecture_picture.py."""
    titles = re.findall(r'class="title"[^>]*>([^<]+)<', (ROOT / PICTURE).read_text())
    assert sorted(titles) == sorted({part(module) for module in MODULES})


def test_the_map_names_every_module():
    """A reader finds where to change a thing without a search."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {name for group in re.findall(r"`([^`]+)`", text) for name in re.findall(r"\w+", group)}
    modules = {module.rpartition(".")[2] for module in MODULES} - {"__init__"}
    assert modules <= named, sorted(modules - named)


def test_functions_are_short(tree):
    """Without their signatures, which for commands are the options that a person types."""
    lengths = {f.name: (f.end_lineno or 0) - f.body[0].lineno + 1 for f in functions(tree)}
    assert {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION} == {}


def test_functions_take_few_parameters(tree):
    """Of a command's, each is an option that a person types, or a dataclass of them."""
    commands = {command.callback.__name__ for command in app.registered_commands}
    counts = {
        node.name: len(
            [a for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
        )
        for node in functions(tree)
        if node.name != "__init__"
    }
    most = {name: MOST_OPTIONS if name in commands else MOST_PARAMETERS for name in counts}
    assert {name: n for name, n in counts.items() if n > most[name]} == {}


def test_imports_point_to_the_left():
    for name, path in MODULES.items():
        parsed = ast.parse(path.read_text())
        relative = [n for n in ast.walk(parsed) if isinstance(n, ast.ImportFrom) and n.level]
        assert not relative, f"{name}: imports are absolute"
        allowed = ORDER[: ORDER.index(name.split(".")[0]) + 1]
        for other in imports(parsed, set(MODULES)):
            assert other.split(".")[0] in allowed, f"{name} imports {other}"


def test_imports_form_no_circle():
    """Type-only imports and imports inside functions included."""
    names = set(MODULES)
    edges = {
        name: imports(ast.parse(path.read_text()), names) - {name} for name, path in MODULES.items()
    }
    assert circles(edges) == []


def test_rooms_form_no_circle():
    """A room can be read without the one that uses it. Modules of a floor are rooms of their own:
    `train/batches` reads `train/data`, `train/features` reads both.
    """

    def room(module: str) -> str:
        return module if part(module) in ORDER else part(module)

    edges: dict[str, set[str]] = {room(name): set() for name in MODULES}
    for name, path in MODULES.items():
        used = map(room, imports(ast.parse(path.read_text()), set(MODULES)))
        edges[room(name)] |= {*used} - {room(name)}
    assert {room for pair in circles(edges) for room in pair} <= OPEN_CIRCLE


def test_what_a_protocol_only_declares_says_so():
    """Its body is `...`, or it is abstract, where classes inherit from the protocol."""
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            if "Protocol" not in map(ast.unparse, node.bases):
                continue
            for method in functions(node):
                marks = [
                    *map(ast.unparse, method.decorator_list),
                    *map(ast.unparse, method.body[1:]),
                ]
                says = ast.get_docstring(method) is None or marks not in ([], ["property"])
                assert says, f"{path}: {node.name}.{method.name}"


def test_no_module_shadows_an_installed_package():
    """Running train/medusa.py by path puts train/ first on sys.path."""
    installed = set(packages_distributions())
    ours = {part for name in MODULES for part in name.split(".")[1:]}
    assert (ours - {"__init__"}) & installed == set()


def test_test_modules_share_by_helpers_alone():
    """What two of them need is in tests/helpers, fixtures in a conftest.py."""
    pattern = re.compile(r"^\s*(?:from|import) test_", re.MULTILINE)
    files = (ROOT / "tests").rglob("*.py")
    assert [file.name for file in files if pattern.search(file.read_text())] == []


def test_every_mend_keeps_its_test():
    """A mend was lost, twice, with a test that a rewrite dropped. The list names, for each fault
    that was mended, the tests that hold it: a rewrite moves a line, and does not remove it.
    """
    lines = [line.split() for line in (ROOT / MENDS).read_text().splitlines()]
    tests = [word for words in lines if words and words[0] != "#" for word in words[:1]]
    missing = [test for test in tests if not is_test(*test.split("::"))]
    assert tests and missing == []


def is_test(file: str, name: str) -> bool:
    """Does a file under tests/ have a test of this name?"""
    path = ROOT / "tests" / file
    return path.is_file() and name in {f.name for f in functions(ast.parse(path.read_text()))}
