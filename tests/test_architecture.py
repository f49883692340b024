"""The promise: the code stays small enough to be read, imports point one way and in no circle, and
no module hides an installed package.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
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
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
TESTS = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("*.py"))}
CORE = {"heads": 39_500, "infer": 20_500, "train": 27_000}
"""Code tokens of the core's floors, without comments and docstrings. These are round ceilings with
some slack, here and below: a part that needs more takes it from another.
"""
ROOMS = {
    "heads.target": 20_000,
    "heads.hybrid": 5_250,
    "heads.cpu": 7_500,
    "heads.mtp": 4_500,
    "infer.fixed": 4_000,
    "train.features": 7_000,
}
"""Folders of the core."""
WINGS = {
    "heads.formats": 15_500,
    "infer.drafters": 6_500,
    "infer.measure": 8_000,
    "infer.chat": 3_750,
    "infer.serve": 22_000,
    "infer.generate": 3_000,
    "infer.pipeline": 3_250,
    "infer.costs": 1_750,
    "infer.grammar": 1_750,
    "infer.lossy": 1_000,
    "train.data": 22_000,
    "train.advice": 9_500,
    "train.learn": 5_500,
    "scripts": 17_250,
}
"""The folders and modules around the core."""
PARTS = {**CORE, **ROOMS, **WINGS}
TOTAL = 246_000
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
    *("heads.drafting", "heads.medusa", "infer.slots", "infer.engine", "infer.accept"),
    *("train.medusa", "train.loop"),
)
"""What ARCHITECTURE.md says to read first: a kind of head, its target, decoding, training."""
KERNEL_TOKENS = 20_500
BEYOND = {
    "heads.choices": "the keys of a recipe's section `head`",
    "heads.cpu.attention": "attention of few tokens",
    "heads.cpu.linear": "products of few tokens",
    "heads.hybrid.states": "recurrent states beside the slots",
    "heads.labels": "the target's distribution as labels",
    "heads.layers": "modules of heads",
    "heads.losses": "cross-entropy and its like, in chunks",
    "heads.target.adapter": "a LoRA that learns along with heads",
    "heads.target.load": "a target by name",
    "heads.target.longrope": "RoPE that depends on the length of a text",
    "heads.target.lora": "LoRAs of others",
    "heads.target.masks": "who sees whom, as models take it",
    "heads.target.onnx_decoder": "layers that run in ONNX Runtime",
    "heads.target.packing": "documents beside each other in training",
    "heads.target.placement": "devices, dtypes, quantisation",
    "heads.target.pretrained": "what transformers' models have where",
    "heads.target.trial": "whether a model can follow a tree",
    "heads.tensors": "names of dtypes",
    "heads.tree_drafting": "the search of dynamic trees",
    "heads.vocabulary": "heads with fewer tokens",
    "infer.fixed.maker": "whether steps are compiled or recorded",
    "infer.constraint": "what an answer may be",
    "infer.draws": "random numbers",
    "infer.paths": "trees of rows",
    "infer.reading": "prompts, a part at a time",
    "infer.rows": "a text and its end",
    "infer.rules": "a rule for each row",
    "infer.sources": "what makes drafters",
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
MENDED = 322
"""How many mends have a test. This number only grows."""
COMPLEX = {"heads": 0, "infer": 0, "train": 0, "scripts": 0}
"""Functions whose complexity (ruff's C901) is over 10, per folder. These numbers only shrink."""
PAGES = {"README.md": 150, "ARCHITECTURE.md": 170}
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


@pytest.mark.mend("six wheels were committed at the top of the repository")
def test_the_repository_holds_what_is_listed():
    """Six wheels were once downloaded into its top, and `git add` took them."""
    assert {name.split("/")[0] for name in tracked()} == TOP


@pytest.mark.mend("wheels, checkpoints and GGUF files that are committed unseen")
def test_a_file_that_is_no_text_is_listed():
    """As git tells them: by a zero byte. A wheel, a checkpoint, a GGUF file has one."""
    files = {name: ROOT / name for name in tracked()}
    binaries = {
        name for name, file in files.items() if file.is_file() and b"\0" in file.read_bytes()[:8000]
    }
    assert binaries == BINARIES


def functions(tree: ast.AST):
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_parts_and_the_whole_stay_within_their_tokens():
    """A total, so that what is added somewhere is paid for somewhere else."""
    tokens = Counter()
    for name, path in MODULES.items():
        tokens[part(name)] += len(code_tokens(path.read_text()))
    assert tokens.keys() == PARTS.keys()
    assert {name: count for name, count in tokens.items() if count > PARTS[name]} == {}
    assert tokens.total() <= TOTAL


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
    for name, tree in TREES.items():
        if part(name) in WINGS or name.endswith(".__init__"):
            continue
        used = imports(tree, set(MODULES))
        wings = {other for other in used if part(other) in WINGS}
        assert wings <= DOORS, f"{name} imports {sorted(wings - DOORS)}"


def test_the_kernel_takes_an_afternoon():
    """It is small, imports what is named here alone, and is what a newcomer is told to read."""
    sources = {name: MODULES[name].read_text() for name in KERNEL}
    assert sum(len(code_tokens(source)) for source in sources.values()) <= KERNEL_TOKENS
    used = set().union(*(imports(TREES[name], set(MODULES)) for name in KERNEL))
    assert used - {*KERNEL} == {*BEYOND}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    order = re.search(r"The kernel takes an afternoon.*?Then", text, re.DOTALL)
    assert order
    listed = [name.split("/")[-1] for name in re.findall(r"`([\w/]+)\.py`", order[0])]
    assert listed == [name.split(".")[-1] for name in KERNEL]


def test_a_wing_imports_few_others():
    neighbours = {}
    for name, tree in TREES.items():
        if (wing := part(name)) in WINGS.keys() - {"scripts"}:
            used = {part(module) for module in imports(tree, set(MODULES))}
            neighbours.setdefault(wing, set()).update(used & WINGS.keys() - {wing})
    assert {wing: others for wing, others in neighbours.items() if others} == NEIGHBOURS


def test_decoding_loads_no_wing():
    """Whoever only decodes needs no library that a wing needs."""
    source = "import draftheads.heads, draftheads.infer.engine, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    names = [name.removeprefix("draftheads.") for name in run.stdout.split()]
    loaded = {part(name) for name in names if name in MODULES}
    assert {"heads", "infer"} <= loaded
    assert loaded & WINGS.keys() <= {"heads.formats"}


def test_functions_stay_simple():
    """By the linter's own count; none is over 12."""
    for folder in ORDER:
        over = complexities(ROOT / folder)
        assert len(over) <= COMPLEX[folder], over
        assert {name: count for name, count in over.items() if count > 12} == {}


def test_pages_stay_short():
    lines = {page: len((ROOT / page).read_text().splitlines()) for page in PAGES}
    assert {page: count for page, count in lines.items() if count > PAGES[page]} == {}


def test_the_picture_shows_every_part():
    """Whoever adds a part draws the picture again: scripts/benchmarks/architecture_picture.py."""
    titles = re.findall(r'class="title"[^>]*>([^<]+)<', (ROOT / PICTURE).read_text())
    assert sorted(titles) == sorted({part(module) for module in MODULES})


def test_the_map_names_every_module():
    """In the row of its folder, since two folders may have modules of one name."""
    named, folder = set(), ""
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        if title := re.fullmatch(r"\| `([\w/]+)/` \| \|", line):
            folder = title[1].replace("/", ".")
        elif folder and line.startswith("| `"):
            cells = [re.findall(r"`([\w/]+)`", cell) for cell in line.split("|")[1:3]]
            inner = [name.strip("/") for name in cells[0] if name.endswith("/")]
            for room in inner or [""]:
                room = f"{folder}.{room}".rstrip(".")
                named |= {f"{room}.{name}" for name in cells[1]}
            named |= {f"{folder}.{name}" for name in cells[0]}
    modules = {name for name in MODULES if not name.endswith("__init__")}
    assert sorted(modules - named) == []


def test_functions_are_short():
    """Without their signatures, which for commands are the options that a person types."""
    lengths = {
        f"{name}.{f.name}": (f.end_lineno or 0) - f.body[0].lineno + 1
        for name, tree in TREES.items()
        for f in functions(tree)
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_functions_take_few_parameters():
    """Of a command's, each is an option that a person types, or a dataclass of them."""
    commands = {command.callback.__name__ for command in app.registered_commands}
    for name, tree in TREES.items():
        for node in functions(tree):
            arguments = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)} - {"self", "cls"}
            most = MOST_OPTIONS if node.name in commands else MOST_PARAMETERS
            is_few = len(arguments) <= most or node.name == "__init__"
            assert is_few, f"{name}.{node.name} takes {len(arguments)} parameters"


def test_imports_point_to_the_left():
    for name, tree in TREES.items():
        relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        assert not relative, f"{name}: imports are absolute"
        allowed = ORDER[: ORDER.index(name.split(".")[0]) + 1]
        for other in imports(tree, set(MODULES)):
            assert other.split(".")[0] in allowed, f"{name} imports {other}"


def test_imports_form_no_circle():
    """Type-only imports and imports inside functions included."""
    names = set(MODULES)
    edges = {name: imports(tree, names) - {name} for name, tree in TREES.items()}
    assert circles(edges) == []


def test_rooms_form_no_circle():
    """A room can be read without the one that uses it. Modules of a floor are rooms of their own:
    `train/batches` reads `train/data`, `train/features` reads both.
    """

    def room(module: str) -> str:
        return module if part(module) in ORDER else part(module)

    edges: dict[str, set[str]] = {room(name): set() for name in MODULES}
    for name, tree in TREES.items():
        used = map(room, imports(tree, set(MODULES)))
        edges[room(name)] |= {*used} - {room(name)}
    assert circles(edges) == []


@pytest.mark.mend("bodies of protocols that inherit None")
def test_what_a_protocol_only_declares_says_so():
    """Its body is `...`, or it is abstract, where classes inherit from the protocol."""
    classes = [
        (name, node)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
    ]
    assert classes
    for name, node in classes:
        for method in functions(node):
            marks = [*map(ast.unparse, [*method.decorator_list, *method.body[1:]])]
            says = ast.get_docstring(method) is None or marks not in ([], ["property"])
            assert says, f"{name}.{node.name}.{method.name}"


def test_no_module_shadows_an_installed_package():
    """Running train/medusa.py by path puts train/ first on sys.path."""
    installed = set(packages_distributions())
    ours = {part for name in MODULES for part in name.split(".")[1:]}
    assert (ours - {"__init__"}) & installed == set()


def test_test_modules_share_by_helpers_alone():
    """What two of them need is in tests/helpers, fixtures in a conftest.py."""
    for path, tree in TESTS.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("test_")], path


def test_every_mend_keeps_its_test():
    """A mend was lost, twice, with a test that a rewrite dropped. A test says with
    `@pytest.mark.mend("...")` which fault must not come back, once for each; a rewrite moves the
    marks of what it merges. So their number only grows.
    """
    marks = [
        (f"{path.name}::{function.name}", [*map(ast.unparse, mark.args)])
        for path, tree in TESTS.items()
        for function in functions(tree)
        for mark in function.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.mend"
    ]
    wordless = [test for test, said in marks if len(said) != 1 or not ast.literal_eval(said[0])]
    assert wordless == []
    assert [test for test, _ in marks if "::test_" not in test] == []
    assert len(marks) >= MENDED
