"""`draftheads bench` and `chat`: what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftheads.scripts.options import (
    Device,
    Dtype,
    IsTypical,
    MaybeTarget,
    Prompts,
    PromptWords,
    Revision,
    Seed,
    TargetName,
    Temperature,
    Threads,
    TopK,
    TopP,
    choose_threads,
    load_head,
    load_target,
    rule,
)

Card = Annotated[bool, typer.Option("--card", help="write the figures into the head's model card")]


def bench(
    target: TargetName,
    head: Annotated[
        list[str],
        typer.Option(
            "--head", help="head folder, run folder or Hub id (user/name@revision); repeatable"
        ),
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
    card: Card = False,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Measure heads against `generate` and against this engine without drafts, in one process."""
    from draftheads.infer.bench import bench as run
    from draftheads.infer.race import BenchOptions
    from draftheads.infer.report import print_report
    from draftheads.scripts import journey

    journey.check_outputs([json_out], head if card else [], plot)
    model = load_target(target, dtype, device, revision, head)
    choose_threads(threads, model)
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
    journey.write_outputs(
        report, json_out, plot, dict(zip(head, names, strict=True)) if card else {}
    )


def chat(
    head: Annotated[
        str, typer.Option("--head", help="head folder, run folder or Hub id (user/name@revision)")
    ],
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
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Talk with the target, its answers sped up by the heads."""
    from draftheads.heads.hub import head_target
    from draftheads.heads.shape import parse_tree
    from draftheads.infer.chat import ChatOptions
    from draftheads.infer.chat import chat as run
    from draftheads.infer.engine import Speculator

    name, revision = (target, None) if target else head_target(head)
    model = load_target(name, dtype, device, revision, [head])
    choose_threads(threads, model)
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
