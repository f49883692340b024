"""The `draftheads` command: distill, plan, train, bench, chat, publish, demo.

A mistake of the user's ends with one line (expected, got, next step) and exit code 2; Ctrl-C with
130. Set DRAFTHEADS_DEBUG=1 to see the traceback of the former.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.logging import RichHandler

from draftheads.scripts.data_preview import data_preview, import_answers
from draftheads.scripts.doctor import Doctor
from draftheads.scripts.options import (
    Device,
    Dtype,
    IsTypical,
    MaybeTarget,
    Prompts,
    PromptWords,
    Seed,
    TargetName,
    Temperature,
    TopK,
    TopP,
    json_object,
    load_head,
    load_target,
    mistakes_in_one_line,
    rule,
    set_threads,
    spread,
)
from draftheads.scripts.server_options import ApiKeyEnv, Concurrency, Server, ServerModel, connect

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train small draft heads on a frozen causal LM, and generate faster with them.",
)


@app.command()
def distill(
    target: TargetName,
    prompts: Prompts,
    out: Annotated[
        Path, typer.Option("--out", help="folder to write; an unfinished one is continued")
    ],
    temperature: Temperature = 0.3,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts answered together")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="use only the first N prompts")] = None,
    prompt_words: PromptWords = None,
    split: Annotated[str, typer.Option(help="split of a Hub data set")] = "train",
    skip_empty: Annotated[
        bool, typer.Option("--skip-empty", help="pass over empty prompts")
    ] = False,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="user turns per conversation")
    ] = None,
    template_args: Annotated[str, typer.Option(help="chat template variables, as JSON")] = "{}",
    server: Server = None,
    server_model: ServerModel = None,
    api_key_env: ApiKeyEnv = None,
    concurrency: Concurrency = 32,
    dtype: Dtype = "auto",
    device: Device = None,
    seed: Seed = 0,
) -> None:
    """Let the target answer prompts; its own tokens become the training set."""
    from draftheads.train.data.distill import DistillOptions
    from draftheads.train.data.distill import distill as run
    from draftheads.train.data.prompts import read_prompts

    options = DistillOptions(
        out=out,
        source=prompts,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        max_turns=max_turns,
        template_args=json_object("--template-args", template_args),
    )
    texts = read_prompts(
        prompts, split=split, limit=limit, prompt_words=prompt_words, skip_empty=skip_empty
    )
    if server or server_model or api_key_env:
        run(connect(target, server, server_model, api_key_env, concurrency), texts, options)
    else:
        run(load_target(target, dtype, device), texts, options)


@app.command()
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

    transformers.logging.disable_progress_bar()
    launch = Launch.here(processes, engine)
    made = make_plan(load_recipe(recipe, overrides or []), launch, probe=not no_probe)
    print_plan(made)
    if json_out:
        write_plan(made, json_out)


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    recipe: Annotated[Path, typer.Argument(help="a recipe, e.g. recipes/demo-medusa.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value ...")] = None,
) -> None:
    """Train heads of any kind in this process (a recipe without head.kind: Medusa heads).

    In several processes: `accelerate launch train/medusa.py RECIPE.yaml` or
    `accelerate launch train/eagle.py RECIPE.yaml`.
    """
    from draftheads.train.entry import train as run

    raise typer.Exit(run(str(recipe), overrides or [], "medusa"))


@app.command()
def bench(
    target: TargetName,
    head: Annotated[
        list[str], typer.Option("--head", help="head folder, run folder or Hub id; repeatable")
    ],
    prompts: Prompts,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="draft nodes to try; repeatable")
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="a tree instead of the heads' own: 4,2,1 or [[0],[0,0]] or "
            "nodes=16,depth=5,top_k=4 (not Medusa); NAME@TREE: for one head; repeatable"
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="use only the first N prompts")] = 16,
    repetitions: Annotated[int, typer.Option(min=1, help="runs of every prompt")] = 3,
    prompt_words: PromptWords = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    plot: Annotated[Path | None, typer.Option(help="write a PNG here")] = None,
    card: Annotated[
        bool, typer.Option("--card", help="write the figures into the head's model card")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch CPU threads")] = None,
    seed: Seed = 0,
) -> None:
    """Measure heads against `generate` and against this engine without drafts, in one process."""
    from draftheads.infer.bench import bench as run
    from draftheads.infer.race import BenchOptions
    from draftheads.infer.report import print_report
    from draftheads.scripts import journey

    set_threads(threads)
    journey.check_outputs([json_out, plot], head if card else [])
    model = load_target(target, dtype, device)
    names = journey.head_names(head)
    loaded = [load_head(source, model) for source in head]
    heads = journey.with_trees(dict(zip(names, loaded, strict=True)), tree or ())
    options = BenchOptions(
        max_new_tokens=max_new_tokens,
        sampling=rule(temperature, top_p, top_k, typical, seed),
        repetitions=repetitions,
        nodes=nodes or (),
        seed=seed,
    )
    report = run(model, heads, journey.opening_ids(model, prompts, prompt_words, limit), options)
    print_report(report)
    cards = dict(zip(head, names, strict=True)) if card else {}
    journey.write_outputs(report, json_out, plot, cards)


@app.command()
def chat(
    head: Annotated[str, typer.Option("--head", help="head folder, run folder or Hub id")],
    target: MaybeTarget = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens per answer")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    nodes: Annotated[int | None, typer.Option(min=1, help="draft nodes per step")] = None,
    tree: Annotated[str | None, typer.Option(help="a tree instead of the head's own")] = None,
    show_accepted: Annotated[
        bool, typer.Option("--show-accepted", help="colour accepted drafts")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch CPU threads")] = None,
    seed: Seed = 0,
) -> None:
    """Talk with the target, its answers sped up by the heads."""
    from draftheads.heads.hub import head_target
    from draftheads.heads.shape import parse_tree
    from draftheads.infer.chat import ChatOptions
    from draftheads.infer.chat import chat as run
    from draftheads.infer.engine import Speculator

    set_threads(threads)
    name, revision = (target, None) if target else head_target(head)
    model = load_target(name, dtype, device, revision)
    drafts = load_head(head, model)
    shape = parse_tree(tree) if tree else drafts.tree
    run(
        Speculator(model, drafts, tree=shape.head(nodes) if nodes else shape),
        ChatOptions(
            system=system,
            sampling=rule(temperature, top_p, top_k, typical, seed),
            max_new_tokens=max_new_tokens,
            show_accepted=show_accepted,
        ),
    )


app.command("doctor")(Doctor)


@app.command()
def publish(
    folder: Annotated[Path, typer.Argument(help="a head folder or a run folder")],
    repo_id: Annotated[str, typer.Argument(help="user/name on the Hub")],
    public: Annotated[bool, typer.Option("--public", help="make a new repository public")] = False,
) -> None:
    """Upload a checked head folder to the Hub (private unless --public)."""
    from draftheads.scripts.publish import publish as run

    print(run(folder, repo_id, public=public))


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="folder for everything the demo makes")] = Path(
        "out/demo"
    ),
) -> None:
    """Distill, train, bench and chat on the embedded target: a few minutes of CPU, no network."""
    from draftheads.scripts.demo import demo as run

    run(out)


app.command("data-preview")(data_preview)
app.command("import-answers")(import_answers)


def main() -> None:
    """The console script."""
    log = logging.getLogger("draftheads")
    log.addHandler(RichHandler(show_time=False, show_path=False))
    log.propagate = False
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    with mistakes_in_one_line():
        app(spread(sys.argv[1:]))


if __name__ == "__main__":
    main()
