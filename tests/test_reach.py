"""The promise: a push runs each file of tests that its change can reach, and few others."""

from __future__ import annotations

import subprocess

import pytest
import reach

REACHED = [
    ("train/advice/plan.py", ["train/test_plan", "cli/test_cli"], ["heads/test_tree"]),
    ("infer/serve/calls.py", ["infer/test_calls", "infer/test_server"], ["heads/test_lossless"]),
    ("infer/grammar.py", ["infer/test_grammar", "infer/test_server"], ["heads/test_lossless"]),
    ("infer/engine.py", ["infer/test_engine", "heads/test_lossless", "cli/test_serve"], []),
    ("heads/formats/llamacpp.py", ["formats/test_formats_llamacpp"], []),
    ("src/draftheads/extras.py", ["cli/test_entry"], []),
    ("infer/serve/page/page.js", ["infer/test_page"], ["heads/test_lossless"]),
    ("heads/formats/card.jinja", ["cli/test_publish", "heads/test_hub"], []),
    ("recipes/demo-medusa.yaml", ["cli/test_recipes", "train/test_recipe"], []),
    ("docs/trees.md", ["cli/test_docs", "cli/test_site"], ["infer/", "train/test_training"]),
    ("tests/helpers/plain_eagle.py", ["heads/test_eagle_drafter"], ["infer/"]),
    ("tests/helpers/workers.py", ["train/test_launch"], ["infer/", "heads/"]),
    ("tests/heads/conftest.py", ["heads/test_tree"], ["infer/", "train/test_training"]),
    ("tests/heads/test_tree.py", ["heads/test_tree"], ["infer/", "train/test_training"]),
    (
        "tests/infer/test_that_was_removed.py",
        ["test_architecture"],
        ["infer/", "train/test_training"],
    ),
]
"""A changed file, tests that it reaches, and the beginnings of those that it does not."""
FOUND = ("infer/test_examples", "infer/test_reasoning", "heads/test_gguf", "heads/test_hub")
"""Tests that look for files of the repository."""


def names(changed: str) -> set[str]:
    tests = reach.reached([changed])
    return {str(test.relative_to(reach.TESTS).with_suffix("")) for test in tests}


@pytest.mark.parametrize(
    ("changed", "among", "without"), REACHED, ids=[each[0] for each in REACHED]
)
def test_what_a_change_can_reach_is_run(changed, among, without):
    found = names(changed)
    assert {*among, "test_architecture"} <= found
    others = [name for name in found - {*FOUND} if name.startswith((*without, "never"))]
    assert others == []


@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "Makefile", "tests/conftest.py", "heads/a_module_that_is_gone.py"]
)
def test_what_may_reach_all_runs_all(changed):
    assert reach.reached([changed]) == reach.TEST_FILES


def test_commands_reach_what_they_import_and_no_more():
    """`train` alone is typed in one file of tests: what only `serve` needs is not run there."""
    typed = reach.closure(reach.TESTS / "train" / "test_minutes.py")
    assert reach.ROOT / "train" / "loop.py" in typed
    assert reach.ROOT / "scripts" / "cli.py" in typed
    assert reach.ROOT / "infer" / "serve" / "app.py" not in typed


def test_names_in_texts_are_imports(tmp_path):
    """Patches by name, and programs that a test starts."""
    file = tmp_path / "some.py"
    file.write_text(
        "patch('draftheads.infer.race.clock')\nrun('from draftheads.heads import Target')"
    )
    found = {path.relative_to(reach.ROOT).as_posix() for path in reach.needs(file)}
    assert {"infer/race.py", "infer/__init__.py", "heads/medusa.py"} <= found
    file.with_name("other.py").write_text("from draftheads.heads import StaticTree")
    found = {p.relative_to(reach.ROOT).as_posix() for p in reach.needs(file.with_name("other.py"))}
    assert "heads/tree.py" in found and "heads/medusa.py" not in found


def test_changes_are_those_of_commits_and_of_the_working_tree(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        person = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *person, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(reach, "ROOT", tmp_path)
    git("init", "-b", "main")
    for name in ("kept", "moved", "changed", "committed"):
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-m", "a")
    git("checkout", "-b", "work")
    (tmp_path / "committed").write_text("else")
    git("mv", "moved", "there")
    git("commit", "-a", "-m", "b")
    (tmp_path / "changed").write_text("else")
    (tmp_path / "new é").write_text("new")
    assert reach.changes("main") == {"committed", "moved", "there", "changed", "new é"}
    with pytest.raises(subprocess.CalledProcessError):
        reach.changes("no-such-commit")
