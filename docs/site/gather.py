"""Gather the documentation site in a folder: settings, and pages/.

    python docs/site/gather.py build/docs && zensical build -f build/docs/mkdocs.yml

The pages are docs/, the documents beside it, and references that follow from the code: commands,
recipe keys, recipes, public names. Links of a clone become links of the site.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import typer.main

from draftheads.scripts.cli import app
from draftheads.train.recipe import key_table

ROOT = Path(__file__).parents[2]
DOCUMENTS = {"README.md": "index.md"} | {
    name: name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
}
"""Documents beside docs/, and their pages."""
RECIPES = "reference/recipes.md"
FACADES = ("draftheads.heads", "draftheads.infer", "draftheads.train")
LINK = re.compile(r"\]\((?!\w+:)([\w./-]+)(#[^)]*)?\)")
"""A link to a file, in Markdown."""


def gather(folder: Path) -> None:
    """Write settings and pages; what was gathered earlier is replaced."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "mkdocs.yml").is_file():
        raise SystemExit(f"{folder}: expected a new folder or an earlier site, got another one")
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("site", "*.json"))
    shutil.copy(Path(__file__).parent / "mkdocs.yml", folder)
    (pages / "reference").mkdir()
    for page in pages.rglob("*.md"):
        name = str(page.relative_to(pages))
        page.write_text(linked(page.read_text(), name, (ROOT / "docs" / name).parent))
    for document, name in DOCUMENTS.items():
        (pages / name).write_text(linked((ROOT / document).read_text(), name, ROOT))
    for name, lines in {
        "reference/commands.md": commands(),
        "reference/keys.md": keys(),
        RECIPES: recipes(),
        "reference/python.md": names(),
    }.items():
        (pages / name).write_text("\n".join(lines) + "\n")


def linked(text: str, name: str, beside: Path) -> str:
    """A page's text with links of the site. name: of the page. beside: the folder of its source."""
    up = "../" * name.count("/")

    def moved(match: re.Match[str]) -> str:
        return f"]({up}{address((beside / match[1]).resolve(), match[2] or '')})"

    return LINK.sub(moved, text)


def address(source: Path, anchor: str) -> str:
    """Where the site shows a file of the repository, from its root."""
    path = source.relative_to(ROOT)
    if path.parts[0] == "docs":
        return f"{path.relative_to('docs')}{anchor}"
    if path.suffix == ".yaml":
        return f"{RECIPES}#{path.stem}"
    return f"{DOCUMENTS.get(path.name, RECIPES)}{anchor}"


def commands() -> Iterator[str]:
    """All commands with their arguments and options."""
    yield "# Commands\n"
    for name, command in typer.main.get_group(app).commands.items():
        yield f"## draftheads {name} {{ #{name} }}\n\n{command.help}\n"
        yield "| argument or option | default | meaning |\n| --- | --- | --- |"
        for parameter in command.params:
            spelling = ", ".join([*parameter.opts, *parameter.secondary_opts])
            default = "required" if parameter.required else f"`{parameter.default}`"
            default = default.replace("`None`", "").replace("`False`", "")
            meaning = " ".join((getattr(parameter, "help", "") or "").split())
            yield f"| `{spelling}` | {default} | {meaning} |"
        yield ""


def keys() -> Iterator[str]:
    """All keys of recipes, by section."""
    yield "# Recipe keys\n"
    yield "Any key can be set on the command line: `draftheads train RECIPE key=value`."
    shown = None
    for key, takes, default, description in key_table():
        section = key.partition(".")[0] if "." in key else "the target"
        if section != shown:
            yield f"\n## {section}\n"
            yield "| key | takes | default | meaning |\n| --- | --- | --- | --- |"
            shown = section
        cells = (f"`{key}`", f"`{takes}`", f"`{default}`", description)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def recipes() -> Iterator[str]:
    """All packaged recipes and launch configurations, as they are."""
    yield "# Recipes\n"
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        yield f"## {path.stem} {{ #{path.stem} }}\n\n```yaml\n{path.read_text()}```\n"


def names() -> Iterator[str]:
    """The public names; the site's builder adds their signatures and docstrings."""
    yield "# Python reference\n\nThe [guide](../python.md) shows how these work together.\n"
    for facade in FACADES:
        module = import_module(facade)
        yield f"## {facade}\n"
        for name in sorted(module.__all__):
            source = getattr(getattr(module, name), "__module__", "")
            if source.startswith("draftheads."):
                yield f"::: {source}.{name}\n"


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
