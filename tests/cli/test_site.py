"""The promise: the documentation site has every page of the documents; its links lead to pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """The gathered site."""
    folder = tmp_path_factory.mktemp("site")
    gather_script().gather(folder)
    return folder / "pages"


def gather_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gather", SITE / "gather.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(entries: object) -> list[str]:
    """The files of a navigation, in its order."""
    if isinstance(entries, str):
        return [entries]
    children = entries.values() if isinstance(entries, dict) else entries
    return [name for child in children for name in names(child)]


def test_the_navigation_has_every_page_once(pages):
    settings = yaml.safe_load((SITE / "mkdocs.yml").read_text())
    written = [str(page.relative_to(pages)) for page in pages.rglob("*.md")]
    assert sorted(names(settings["nav"])) == sorted(written)


def test_links_lead_to_pages(pages):
    for page in pages.rglob("*.md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!\w+:)([^)\s#]+)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_references_have_every_command_key_and_recipe(pages):
    reference = {page.stem: page.read_text() for page in (pages / "reference").iterdir()}
    assert "## draftheads bench" in reference["commands"] and "`--nodes`" in reference["commands"]
    assert "`optim.lr`" in reference["keys"] and "`run.output`" in reference["keys"]
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert f"## {recipe.stem} " in reference["recipes"]
    assert "::: draftheads.infer.engine.Speculator" in reference["python"]


@pytest.mark.mend("the script of the site deleted whatever folder it was given")
def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="expected a new folder or an earlier site"):
        gather_script().gather(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
