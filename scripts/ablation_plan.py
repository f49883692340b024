"""Which runs an ablation has: the grids of its axes, as recipes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from draftheads.train.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class Plan:
    """One run. choices: the overrides that tell it from the others; its name and folder."""

    name: str
    choices: tuple[str, ...]
    recipe: Recipe


def combinations(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """["a=1,2", "b=3"] -> [("a=1", "b=3"), ("a=2", "b=3")]; commas in brackets do not split."""
    values = []
    for axis in axes:
        key, equals, text = axis.partition("=")
        if not equals:
            raise ValueError(f"{axis!r}: expected key=value,value without spaces, e.g. head.rank=8")
        values.append([f"{key}={value}" for value in re.split(r",(?![^\[{]*[\]}])", text)])
    return list(product(*values))


def plan(
    path: Path, overrides: Sequence[str], grids: Sequence[Sequence[str]]
) -> tuple[list[Plan], dict[str, str]]:
    """The runs of all grids, and name -> reason for those that the recipe refuses.

    Raises ValueError when none is left, or when they have several targets.
    """
    base = load_recipe(path, overrides)
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    for choices in [choices for axes in grids for choices in combinations(axes)]:
        name = ",".join(choice.removeprefix("head.") for choice in choices)
        name = re.sub(r"[^\w.=,+-]", "_", name)  # a folder's
        try:
            recipe = load_recipe(path, [*overrides, *choices])
        except ValueError as error:  # not all that can be combined fits together
            refused[name] = str(error)
            continue
        run = recipe.run.model_copy(update={"output": base.run.output / name})
        plans[name] = Plan(name, choices, recipe.model_copy(update={"run": run}))
    if not plans:
        raise ValueError(f"no combination can be trained: {next(iter(refused.values()), 'none')}")
    if len({(p.recipe.target, p.recipe.target_dtype) for p in plans.values()}) > 1:
        raise ValueError("expected one target for all runs, got several; vary other keys")
    return list(plans.values()), refused
