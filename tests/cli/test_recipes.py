"""The promise: the recipes of the package can be listed, read, copied and trained by name."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from draftheads.heads import Target
from draftheads.recipes import FOLDER, find_recipe, packaged, recipe_names
from draftheads.scripts.cli import app
from draftheads.scripts.data import SETS
from draftheads.train import read_prompts


def output(*arguments: str) -> str:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).output


def test_all_are_listed_with_a_title():
    lines = output("recipes").splitlines()
    assert [line for line in lines if not line.startswith(" ")] == recipe_names()
    assert all(line.strip() for line in lines)


def test_one_is_shown_as_it_is():
    assert output("recipes", "demo-medusa") == find_recipe("demo-medusa").read_text()


@pytest.mark.mend("`keys run.minutes` knew no key")
def test_keys_of_one_section():
    keys = [line for line in output("keys", "optim").splitlines() if not line.startswith(" ")]
    assert keys and all(key.startswith("optim.") for key in keys)
    assert "Annotated" not in output("keys")
    with pytest.raises(ValueError, match="expected a section or a key of a recipe"):
        output("keys", "optimizer")
    line, _ = output("keys", "run.minutes").splitlines()
    assert line.startswith("run.minutes = null")
    with pytest.raises(ValueError, match=r"did you mean run\.minutes\?"):
        output("keys", "run.minuets")


def test_the_demo_is_found_by_name_wherever_one_is(tmp_path, monkeypatch):
    """So its recipes work after `pip install`; what is in the working directory comes first."""
    monkeypatch.chdir(tmp_path)
    demo = Target.load("demo-target")
    assert demo.fingerprint() == Target.load(FOLDER / "demo-target").fingerprint()
    assert demo.name == "demo-target" and demo.tokenizer is not None
    assert len(read_prompts("demo-prompts")) == 2602
    assert not packaged("..", "") and not packaged("", "") and not packaged("a/../demo-target", "")
    (tmp_path / "demo-prompts").write_text("mine")
    with pytest.raises(ValueError, match=r"pass a folder of \.json"):
        read_prompts("demo-prompts")


def test_prompt_sets_of_the_package_are_there():
    shown = output("prompts")
    sets = {name: text for purpose in SETS.values() for name, text in purpose.items()}
    assert all(f"{name} " in shown and text in shown for name, text in sets.items())
    assert all(packaged(name, ".jsonl") for name in sets if name.startswith("demo-"))
    assert max(map(len, shown.splitlines())) <= 80
