"""The commands about recipes: those that come with the package, and the keys of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from draftheads.train.entry import say

NAME = "a name; default: list all"


def recipes(
    name: Annotated[str | None, Argument(help=NAME)] = None,
    copy: Annotated[Path | None, Option(help="write it to this file, to be edited")] = None,
) -> None:
    """List the recipes that come with the package, show one, or copy it. `draftheads train` and
    `plan` find them by name.
    """
    from draftheads.heads.files import write_text
    from draftheads.recipes import recipe_names
    from draftheads.train.recipe import find_recipe

    if name is None:
        if copy:
            raise ValueError("--copy: expected the name of a recipe before it, got none")
        for each in recipe_names():
            say(f"{each}\n    {title(find_recipe(each))}")
        return
    text = find_recipe(name).read_text(encoding="utf-8")
    if copy is None:
        say(text.rstrip())
        return
    if copy.exists():
        raise ValueError(f"--copy: expected a new file, got {copy}, which exists; name another")
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_text(copy, text)
    say(f"written to {copy}; next: draftheads plan {copy} target=TARGET data.path=DATA")


def title(path: Path) -> str:
    """The first sentence of a recipe's comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[0].removeprefix("# ")


def keys(
    section: Annotated[str | None, Argument(help="head, optim, run, ...; default: all")] = None,
    schema: Annotated[bool, Option("--schema", help="print a JSON schema for editors")] = False,
) -> None:
    """List recipe keys with types, defaults and descriptions."""
    from draftheads.train.recipe import Recipe, json_schema, key_table

    if schema:
        say(json.dumps(json_schema(), indent=2))
        return
    rows = [row for row in key_table() if section in (None, row[0].partition(".")[0].split()[0])]
    if not rows:
        sections = ", ".join(Recipe.model_fields)
        raise ValueError(f"expected a section of a recipe ({sections}), got {section!r}")
    for key, takes, default, description in rows:
        say(f"{key} = {default} [{takes}]\n    {description}")
