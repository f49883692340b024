"""The commands that make a recipe and train by it. Heavy imports wait until a command runs, so that
--help is instant.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from draftheads.arguments import check_answers, suggestion
from draftheads.infer.threads import set_threads
from draftheads.recipes import check_paths, find_recipe, recipe_names
from draftheads.scripts.options import (
    NEW_CHECK,
    Lora,
    Overrides,
    RecipeFile,
    Revision,
    TargetName,
    Threads,
    early,
    say_beside,
    say_next,
)
from draftheads.train.entry import say


def recipes(
    name: Annotated[str | None, Argument(help="a name; default: list all")] = None,
) -> None:
    """List the recipes that come with the package, or show one. `draftheads train` and `plan` find
    them by name.
    """
    if name:
        say(find_recipe(name).read_text(encoding="utf-8").rstrip())
        return
    for each in recipe_names():
        about = find_recipe(each).read_text(encoding="utf-8").splitlines()[0]
        say(f"{each}\n    {about.removeprefix('# ')}")


def init(
    target: TargetName,
    out: Annotated[Path, Option(callback=NEW_CHECK, help="new recipe to write")],
    data: Annotated[
        Path | None,
        Option(
            callback=early(partial(check_answers, are_there=False)),
            help="answers, there already or not yet",
        ),
    ] = None,
    kind: Annotated[str, Option(help="sequential, medusa, eagle3, block or mtp")] = "sequential",
    revision: Revision = None,
    lora: Lora = None,
) -> None:
    """Write a recipe for a target on this machine, with the reason for each choice. Reads the
    target's config.json, no weights.
    """
    from draftheads.heads.files import write_text
    from draftheads.train.advice.suggest import suggest

    text = suggest(target, kind, data, revision, lora)
    about = f"{kind} heads for {target}, by `draftheads init`. Every line may be edited."
    header = f"# {about}\n# draftheads plan {out}\n# draftheads train {out}"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, f"{header}\n{text}")
    say(text.rstrip())
    say_next("plan", out)


def keys(
    section: Annotated[
        str | None, Argument(help="head, optim, run, run.minutes, ...; default: all")
    ] = None,
) -> None:
    """List recipe keys with types, defaults and descriptions."""
    from draftheads.train.recipe import Recipe, key_table

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


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    no_probe: Annotated[
        bool, Option("--no-probe", help="count from shapes; load and try nothing")
    ] = False,
    processes: Annotated[int, Option(min=1, help="processes of the launch")] = 1,
    engine: Annotated[str, Option(help="ddp, zero1, zero2, zero3 or fsdp2")] = "ddp",
    threads: Threads = None,
) -> None:
    """Predict memory and time of a recipe from shapes and a trial of its steps."""
    check_paths(recipe, overrides or [], has_data=False)
    if not no_probe:  # before imports, which take seconds
        say_beside(
            "memory by shapes; then by two or three steps, as the time; --no-probe skips these"
        )
    from draftheads.scripts.printing import next_command, print_counts, print_trial
    from draftheads.train.advice.plan import make_plan
    from draftheads.train.recipe import load_recipe

    set_threads(threads)
    choices = load_recipe(recipe, overrides or [])
    made = make_plan(choices, processes, engine, probe=not no_probe, counted=print_counts)
    print_trial(made)
    if made.fits:
        say_beside(f"next: {next_command(made, [str(recipe), *(overrides or [])])}")


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    threads: Threads = None,
) -> None:
    """Train heads of any kind in this process (a recipe without head.kind: Medusa heads).

    In several processes: `accelerate launch train/medusa.py RECIPE.yaml` or
    `accelerate launch train/eagle.py RECIPE.yaml`.
    """
    check_paths(recipe, overrides or [])
    from draftheads.train.medusa import main

    set_threads(threads)
    code = main([str(recipe), *(overrides or [])])
    if code:
        sys.exit(code)
