"""`draftheads plan`, `train`, `keys`, `report` and `demo`: what they take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from draftheads.scripts.options import Threads, set_threads


def plan(
    recipe: Annotated[Path, typer.Argument(help="a recipe, e.g. recipes/demo-medusa.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="count from shapes alone; train nothing")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="of the launch; default: WORLD_SIZE, else 1")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="what divides the head: ddp, zero1, zero2, zero3, fsdp2")
    ] = "ddp",
    threads: Threads = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Predict memory, disk and time of a recipe before anything is loaded: from shapes, and from a
    few training steps on a shallow random target.
    """
    import transformers

    from draftheads.scripts.plan_table import print_plan, write_plan
    from draftheads.train.plan.planner import make_plan
    from draftheads.train.plan.sizes import Launch
    from draftheads.train.recipe import load_recipe

    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the process that takes the steps
    transformers.logging.disable_progress_bar()
    launch = Launch.here(processes, engine)
    made = make_plan(load_recipe(recipe, overrides or []), launch, probe=not no_probe)
    print_plan(made)
    if json_out:
        write_plan(made, json_out)


def train(
    recipe: Annotated[Path, typer.Argument(help="a recipe, e.g. recipes/demo-medusa.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
    threads: Threads = None,
) -> None:
    """Train heads of any kind in this process (a recipe without head.kind: Medusa heads).

    In several processes: `accelerate launch train/medusa.py RECIPE.yaml` or
    `accelerate launch train/eagle.py RECIPE.yaml`.
    """
    from draftheads.train.entry import train as run

    set_threads(threads)
    raise typer.Exit(run(str(recipe), overrides or [], "medusa"))


def keys() -> None:
    """List all keys of recipes: what each takes, its default and what it is."""
    from draftheads.train.recipe import key_table

    for key, takes, default, description in key_table():
        print(f"{key} = {default} [{takes}]\n    {description}")


def report(
    run: Annotated[Path, typer.Argument(help="a run's output folder, e.g. out/demo-medusa")],
) -> None:
    """Write a run's report.md and its curves again, from its metrics and checkpoints."""
    from draftheads.train.report import write_report

    print(write_report(run))


def demo(
    out: Annotated[Path, typer.Option("--out", help="folder for everything the demo makes")] = Path(
        "out/demo"
    ),
) -> None:
    """Distill, train, bench and chat on the embedded target: a few minutes of CPU, no network."""
    from draftheads.scripts.demo import demo as run

    run(out)
