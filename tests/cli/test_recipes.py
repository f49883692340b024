"""The promise: the recipes of the package can be listed, read, copied and trained by name."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from draftheads.recipes import recipe_names
from draftheads.scripts.cli import app


def output(*arguments: str) -> str:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).output


def test_all_are_listed_with_a_title():
    lines = output("recipes").splitlines()
    assert [line for line in lines if not line.startswith(" ")] == recipe_names()
    assert all(line.strip() for line in lines)


def test_one_is_shown_or_copied_as_it_is(tmp_path):
    shown = output("recipes", "demo-medusa")
    copy = tmp_path / "new" / "mine.yaml"
    assert f"draftheads plan {copy}" in output("recipes", "demo-medusa", "--copy", str(copy))
    assert copy.read_text() == shown
    with pytest.raises(ValueError, match="expected a new file"):
        output("recipes", "demo-medusa", "--copy", str(copy))


def test_keys_of_one_section():
    keys = [line for line in output("keys", "optim").splitlines() if not line.startswith(" ")]
    assert keys and all(key.startswith("optim.") for key in keys)
    assert "Annotated" not in output("keys")
    with pytest.raises(ValueError, match="expected a section of a recipe"):
        output("keys", "optimizer")


def test_the_schema_is_json():
    assert json.loads(output("keys", "--schema"))["title"] == "Recipe"
