"""The promise: editors and type checkers know the types of the public names, which are imported
when they are used; a misspelt name is an error before a program runs.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import draftheads
from draftheads import infer, train

ROOT = Path(__file__).parents[2]
SCRIPT = """
import draftheads
from draftheads.heads import load_pair
from draftheads.infer import Speculator, bench
from draftheads.train import fit, load_recipe

model = draftheads.load("out/qwen")
reveal_type(model)
reveal_type(model.generate("Why?"))
reveal_type(model.generate(["Why?"]))
target, head = load_pair("out/qwen")
reveal_type(target)
reveal_type(Speculator(target, head))
recipe = load_recipe("recipe.yaml")
reveal_type(recipe)
reveal_type(fit(recipe))
reveal_type(bench(target, {"head": head}, [[1]]))
draftheads.infer.Spekulator
"""
TYPES = [
    *("TextGenerator", "Completion", "list[Completion]", "Target", "Speculator", "Recipe"),
    *("Outcome", "BenchReport"),
]


@pytest.mark.mend(
    "mypy and editors took load, Speculator, Recipe and fit for Any, and misspelt names for right"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("checker", "pattern"),
    [("mypy", r'Revealed type is "(.+)"'), ("pyright", r'Type of ".+" is "(.+)"')],
)
def test_a_checker_knows_the_types_of_a_user_script(checker, pattern, tmp_path):
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    tool = shutil.which(checker, path=places)
    if tool is None:
        pytest.skip(f"{checker} is not installed here; pip install {checker}")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--pythonpath", sys.executable] if checker == "pyright" else []
    # in the root: mypy knows the project by now, from the gate's own run
    words = [tool, *options, str(script)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    known = [re.sub(r"\w+\.", "", found) for found in re.findall(pattern, run.stdout)]
    assert known == TYPES, run.stdout + run.stderr
    [error] = [line for line in run.stdout.splitlines() if " error: " in line]
    assert "Spekulator" in error


@pytest.mark.mend("a name that is imported when it is used was unknown to type checkers")
@pytest.mark.parametrize("package", [draftheads, infer, train])
def test_checkers_read_the_names_that_the_package_has(package):
    """For them the names are imported; when the program runs, from where these imports say."""
    tree = ast.parse(Path(package.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    modules = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*modules} == {*package.__all__} - {"__version__"} <= {*dir(package)}
    assert all(getattr(package, name) for name in package.__all__), "each is found"
