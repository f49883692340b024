"""The commands that say what there is to begin with: recipes, their keys, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import yaml
from typer import Argument, Option

from draftheads.arguments import suggestion
from draftheads.recipes import find_recipe, recipe_names
from draftheads.scripts.following import say_next, target_options
from draftheads.scripts.options import NEW_CHECK, MaybeLora, Revision, TargetName
from draftheads.train.entry import say

NAME = "a name; default: list all"
PROMPTS = {
    "to distil from (--prompts NAME; the Hub's need a network)": {
        "demo-prompts": "2,602 questions on Python, for demo-target",
        "HuggingFaceH4/ultrachat_200k": "207,865 chats (--split train_sft)",
        "allenai/tulu-3-sft-mixture": "939,343 chats: general, code, math",
        "tatsu-lab/alpaca": "52,002 short instructions",
    },
    "to measure with (bench and tune; not for distilling)": {
        "demo-heldout": "64 of the demo's questions, held out",
        "demo-copying": "16 chats that end with: Repeat that.",
        "spec-bench": "480 questions in 13 categories",
        "mt-bench": "80 questions in 8 categories",
        "humaneval": "164 functions to complete",
        "gsm8k": "1,319 word problems",
    },
}
"""Ready sets of prompts, by what they are for."""
HOW_MANY = """How many? A few hundred for a first Medusa or sequential head. Medusa heads gain
little from more, sequential heads still gain at a million tokens. EAGLE-3's
paper used about 500,000. Best are prompts like those that you will ask.
--limit N takes the first N."""


def recipes(
    name: Annotated[str | None, Argument(help=NAME)] = None,
    copy: Annotated[
        Path | None, Option(callback=NEW_CHECK, help="write it to this file, to be edited")
    ] = None,
) -> None:
    """List the recipes that come with the package, show one, or copy it. `draftheads train` and
    `plan` find them by name.
    """
    from draftheads.heads.files import write_text

    if name is None:
        if copy:
            raise ValueError(
                "--copy: expected the name of a recipe to copy, got none; `draftheads recipes` "
                "lists them"
            )
        for each in recipe_names():
            about = find_recipe(each).read_text(encoding="utf-8").splitlines()[0]
            say(f"{each}\n    {about.removeprefix('# ')}")
        return
    text = find_recipe(name).read_text(encoding="utf-8")
    if copy is None:
        say(text.rstrip())
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_text(copy, text)
    say(f"written to {copy}")
    say_next("plan", copy)


def init(
    target: TargetName,
    out: Annotated[Path, Option(callback=NEW_CHECK, help="new recipe to write")],
    data: Annotated[Path | None, Option(help="answers, there already or not yet")] = None,
    kind: Annotated[str, Option(help="sequential, medusa, eagle3 or block")] = "sequential",
    revision: Revision = None,
    adapter: MaybeLora = None,
) -> None:
    """Write a recipe for a target on this machine, with the reason for each choice. Reads the
    target's config.json, no weights.
    """
    from draftheads.heads.files import write_text
    from draftheads.train.advice.suggest import suggest

    text = suggest(target, kind, data, revision, adapter)
    answers = yaml.safe_load(text)["data"]["path"]
    words = " ".join(target_options(target, adapter))
    commands = [
        f"draftheads distill {words} --prompts PROMPTS --out {answers}",
        f"draftheads plan {out}",
        f"draftheads train {out}",
    ]
    about = f"{kind} heads for {target}, by `draftheads init`. Every line may be edited."
    header = "\n".join(f"# {line}" for line in [about, *commands])
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, f"{header}\n{text}")
    say(text.rstrip())
    say_next("plan", out)


def keys(
    section: Annotated[
        str | None, Argument(help="head, optim, run, run.minutes, ...; default: all")
    ] = None,
    schema: Annotated[bool, Option("--schema", help="print a JSON schema for editors")] = False,
) -> None:
    """List recipe keys with types, defaults and descriptions."""
    from draftheads.train.recipe import Recipe, json_schema, key_table

    if schema:
        say(json.dumps(json_schema(), indent=2))
        return
    rows = table = key_table()
    if section:
        rows = [x for x in table if f"{x[0]}.".replace(" ", ".").startswith(f"{section}.")]
    if not rows:
        near = suggestion(
            str(section), {*Recipe.model_fields, *(row[0].split()[0] for row in table)}
        )
        hint = f"did you mean {near}?" if near else "choose one, or leave it out for all"
        sections = ", ".join(Recipe.model_fields)
        raise ValueError(
            f"expected a section or a key of a recipe ({sections}), got {section!r}; {hint}"
        )
    for key, takes, default, description in rows:
        say(f"{key} = {default} [{takes}]\n    {description}")


def prompts() -> None:
    """List ready sets of prompts, and say how many are needed."""
    for purpose, sets in PROMPTS.items():
        say(purpose)
        for name, content in sets.items():
            say(f"  {name:30}{content}")
    say(f"\n{HOW_MANY}")
