"""The options and bodies of the commands. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from draftheads.train.entry import choose_threads, set_threads

if TYPE_CHECKING:
    from draftheads.heads.hub import HeadFolder
    from draftheads.heads.target import Target
    from draftheads.infer.accept import Acceptance
    from draftheads.train.data.server import ServedTarget

Keep = Literal["keep", "drop"]

TargetName = Annotated[str, Option("--target", help="target model: a folder or a Hub id")]
MaybeTarget = Annotated[str | None, Option("--target", help="default: the one the head records")]
Head = Annotated[str, Option(help="head folder, run folder or Hub id (user/name@revision)")]
Heads = Annotated[list[str], Option(help="as for chat; repeatable")]
Revision = Annotated[str | None, Option(help="the target's branch, tag or commit on the Hub")]
Prompts = Annotated[str, Option(help="a prompt file, a folder of them, or a Hub data set")]
PromptWords = Annotated[int | None, Option(min=1, help="cut plain texts to their first N words")]
Limit = Annotated[int | None, Option(min=1, help="use only the first N prompts or conversations")]
Split = Annotated[str, Option(help="split of a Hub data set")]
Streaming = Annotated[bool | None, Option(help="store no Hub data set; default: with --limit")]
TemplateArgs = Annotated[str, Option(help="chat template variables, as JSON")]
Tools = Annotated[Keep, Option(help="tool calls and results in conversations")]
Reasoning = Annotated[Keep, Option(help="<think> ... </think> of the answers")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Option()]
Device = Annotated[str | None, Option(help="e.g. cuda:0; default: CUDA if there is one")]
Threads = Annotated[int | None, Option(min=1, max=1024, help="of the CPU; default: what is faster")]
Temperature = Annotated[float, Option(min=0.0, help="0 is greedy")]
TopP = Annotated[float, Option(min=0.0, max=1.0, help="probability mass kept")]
TopK = Annotated[int, Option(min=0, help="tokens kept; 0 keeps all")]
IsTypical = Annotated[bool, Option("--typical", help="typical acceptance: faster, but LOSSY")]
Seed = Annotated[int, Option(min=-(2**62), max=2**62, help="of all draws")]  # torch takes int64
Server = Annotated[str | None, Option(help="OpenAI-compatible, of the target: http://HOST:PORT")]
ServerModel = Annotated[str | None, Option(help="its name for the target, if it has several")]
KeyVariable = Annotated[str | None, Option(help="environment variable that holds its key")]
Recipe = Annotated[Path, Argument(help="a recipe, e.g. recipes/demo-medusa.yaml")]
Overrides = Annotated[list[str] | None, Argument(help="key.path=value ...")]
Json = Annotated[Path | None, Option("--json", help="write the figures here")]


def load_target(
    name: str,
    dtype: str,
    device: str | None,
    revision: str | None = None,
    heads: Sequence[HeadFolder] = (),
) -> Target:
    """The target, with the adapter that `heads` were trained together with, where they were, and
    with transformers' own chatter silenced. Raises ValueError for a device there is not.
    """
    import torch
    import transformers

    from draftheads.heads.hub import shared_adapter
    from draftheads.heads.target import Target

    if device is not None:
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:  # of several lines, and not of the option
            usable = "cuda:0" if torch.cuda.is_available() else "cpu; torch finds no usable GPU"
            raise ValueError(
                f"--device: expected a device of this machine, got {device!r}; try {usable}"
            ) from error
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    adapter = shared_adapter(heads)
    target = Target.load(name, dtype=dtype, device=device, revision=revision)
    return target.attach(adapter) if adapter else target


def rule(temperature: float, top_p: float, top_k: int, typical: bool, seed: int) -> Acceptance:
    """The acceptance rule that these options ask for."""
    from draftheads.infer.accept import Greedy, Sampled, Typical

    rule: Acceptance = Greedy()
    if typical:
        rule = Typical(temperature=temperature or 0.7)
    elif temperature:
        rule = Sampled(temperature=temperature, top_p=top_p, top_k=top_k)
    rule.seed(seed)
    return rule


def template_variables(text: str) -> dict[str, Any]:
    """The value of --template-args. Raises ValueError where it is no JSON object, or sets what is
    set anyway.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # json's own words name no option
        value = None
    if not isinstance(value, dict):
        raise ValueError(
            f"--template-args: expected a JSON object, got {text[:80]!r}; write it as in "
            '{"enable_thinking": false}'
        )
    taken = {"conversation", "messages", "tokenize", "add_generation_prompt"}.intersection(value)
    if taken:
        raise ValueError(
            f"--template-args: expected variables of the chat template, got {', '.join(taken)}, "
            "which is set anyway; leave it out"
        )
    return value


def recorded_threads(out: Path) -> int | None:
    """Those that a distillation was begun with: another number may round differently."""
    from draftheads.train.data.answers import MANIFEST, read_manifest

    return read_manifest(out).get("threads") if (out / MANIFEST).is_file() else None


def connect(target: str, options: dict[str, Any], revision: str | None) -> ServedTarget:
    """The target, its answers from a server. Raises ValueError or OSError without one."""
    from draftheads.train.data.server import ServedTarget, ServerOptions

    if not options["url"]:
        raise ValueError("--server: expected http://HOST:PORT, got none; name its address")
    return ServedTarget(target, ServerOptions(**options), revision)


def distill(
    target: TargetName,
    prompts: Prompts,
    out: Annotated[Path, Option(help="folder to write; an unfinished one is continued")],
    temperature: Temperature = 0.3,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    max_new_tokens: Annotated[int, Option(min=1, help="tokens per answer")] = 512,
    batch_size: Annotated[int, Option(min=1, help="prompts answered together")] = 32,
    limit: Limit = None,
    prompt_words: PromptWords = None,
    split: Split = "train",
    streaming: Streaming = None,
    skip_empty: Annotated[bool, Option("--skip-empty", help="pass over empty prompts")] = False,
    max_turns: Annotated[int | None, Option(min=1, help="user turns per conversation")] = None,
    tools: Tools = "drop",
    reasoning: Reasoning = "keep",
    template_args: TemplateArgs = "{}",
    server: Server = None,
    server_model: ServerModel = None,
    api_key_env: KeyVariable = None,
    concurrency: Annotated[int, Option(min=1, help="requests to the server at a time")] = 32,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Let the target answer prompts; its own tokens become the training set.

    Learned is all that the target writes; with --reasoning drop its thoughts are context, as tool
    calls and results of the prompts are. Exit code 1: prompts are unanswered.
    """
    from draftheads.train.data.distill import DistillOptions
    from draftheads.train.data.distill import distill as run
    from draftheads.train.data.prompts import Hub, read_prompts

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    options = DistillOptions(
        **sampling,
        out=out,
        source=prompts,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        max_turns=max_turns,
        reasoning=reasoning,
        template_args=template_variables(template_args),
    )
    reading: dict[str, Any] = {"prompt_words": prompt_words, "skip_empty": skip_empty}
    texts = read_prompts(prompts, hub=Hub(split, streaming), limit=limit, tools=tools, **reading)
    if server or server_model or api_key_env:
        served = {"url": server, "model": server_model, "api_key_env": api_key_env}
        there = connect(target, {**served, "concurrency": concurrency}, revision)
        report = run(there, texts, options)
    else:
        local = load_target(target, dtype, device, revision)
        choose_threads(threads or recorded_threads(out), local, batch_size)
        report = run(local, texts, options)
    if report.missing or (report.complete and not report.counts.done):
        raise typer.Exit(1)


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    no_probe: Annotated[
        bool, Option("--no-probe", help="count from shapes alone; train nothing")
    ] = False,
    processes: Annotated[
        int | None, Option(min=1, help="of the launch; default: WORLD_SIZE, else 1")
    ] = None,
    engine: Annotated[
        str, Option(help="what divides the head: ddp, zero1, zero2, zero3, fsdp2")
    ] = "ddp",
    threads: Threads = None,
    json_out: Json = None,
) -> None:
    """Predict memory, disk and time of a recipe before anything is loaded: from shapes, and from a
    few training steps on a shallow random target.
    """
    import transformers

    from draftheads.scripts.printing import print_plan, write_plan
    from draftheads.train.plan import make_plan
    from draftheads.train.recipe import load_recipe

    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the process that takes the steps
    transformers.logging.disable_progress_bar()
    made = make_plan(load_recipe(recipe, overrides or []), processes, engine, probe=not no_probe)
    print_plan(made)
    if json_out:
        write_plan(made, json_out)


def train(recipe: Recipe, overrides: Overrides = None, threads: Threads = None) -> None:
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
    run: Annotated[Path, Argument(help="a run's output folder, e.g. out/demo-medusa")],
) -> None:
    """Write a run's report.md and its curves again, from its metrics and checkpoints."""
    from draftheads.train.progress import write_report

    print(write_report(run))


def demo(
    out: Annotated[Path, Option(help="folder for everything the demo makes")] = Path("out/demo"),
) -> None:
    """Distill, train, bench and chat on the embedded target: a few minutes of CPU, no network."""
    from draftheads.scripts.demo import demo as run

    run(out)


def bench(
    target: TargetName,
    head: Heads,
    prompts: Prompts,
    max_new_tokens: Annotated[int, Option(min=1)] = 128,
    nodes: Annotated[list[int] | None, Option(min=1, help="draft nodes to try; repeatable")] = None,
    tree: Annotated[
        list[str] | None,
        Option(
            help="4,2,1 or [[0],[0,0]] or nodes=16,depth=5,top_k=4 (not Medusa), NAME@TREE for "
            "one head; default: the heads' own; repeatable"
        ),
    ] = None,
    limit: Annotated[int, Option(min=1, help="use only the first N prompts")] = 16,
    repetitions: Annotated[int, Option(min=1, help="runs of every prompt")] = 3,
    prompt_words: PromptWords = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    json_out: Json = None,
    plot: Annotated[Path | None, Option(help="write a PNG here")] = None,
    card: Annotated[bool, Option("--card", help="write the figures into the model card")] = False,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Measure heads against `generate` and against this engine without drafts, in one process."""
    from draftheads.heads.hub import open_head
    from draftheads.infer.bench import BenchOptions, print_report
    from draftheads.infer.bench import bench as run
    from draftheads.scripts import journey

    journey.check_outputs([json_out], head if card else [], plot)
    folders = dict(zip(journey.head_names(head), map(open_head, head), strict=True))
    model = load_target(target, dtype, device, revision, list(folders.values()))
    choose_threads(threads, model)
    loaded = {name: folder.load(model) for name, folder in folders.items()}
    options = BenchOptions(
        max_new_tokens=max_new_tokens,
        sampling=rule(temperature, top_p, top_k, typical, seed),
        repetitions=repetitions,
        nodes=nodes or (),
        seed=seed,
    )
    ids = journey.opening_ids(model, prompts, prompt_words, limit)
    report = run(model, journey.with_trees(loaded, tree or ()), ids, options)
    print_report(report)
    journey.write_outputs(report, json_out, plot, folders if card else {})


def chat(
    head: Head,
    target: MaybeTarget = None,
    system: Annotated[str | None, Option(help="system message")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="tokens per answer")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    nodes: Annotated[int | None, Option(min=1, help="draft nodes per step")] = None,
    tree: Annotated[str | None, Option(help="a tree instead of the head's own")] = None,
    show_accepted: Annotated[
        bool, Option("--show-accepted", help="colour accepted drafts")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Talk with the target, its answers sped up by the heads."""
    from draftheads.heads.hub import open_head
    from draftheads.heads.tree import parse_tree
    from draftheads.infer.chat import ChatOptions
    from draftheads.infer.chat import chat as run
    from draftheads.infer.engine import Speculator

    folder = open_head(head)
    name, revision = (target, None) if target else folder.target
    model = load_target(name, dtype, device, revision, [folder])
    choose_threads(threads, model)
    drafts = folder.load(model)
    shape = parse_tree(tree) if tree else drafts.tree
    sampling = rule(temperature, top_p, top_k, typical, seed)
    run(
        Speculator(model, drafts, tree=shape.head(nodes) if nodes else shape),
        ChatOptions(system, sampling, max_new_tokens, show_accepted),
    )


def publish(
    folder: Annotated[Path, Argument(help="a head folder or a run folder")],
    repo_id: Annotated[str, Argument(help="user/name on the Hub")],
    public: Annotated[bool, Option("--public", help="make a new repository public")] = False,
    revision: Annotated[str, Option(help="branch to write to")] = "main",
    licence: Annotated[
        str | None, Option("--license", help="of the heads, e.g. apache-2.0")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="print the files and the card; send nothing")
    ] = False,
) -> None:
    """Upload a checked head folder to the Hub (private unless --public)."""
    from draftheads.scripts.publish import prepare
    from draftheads.scripts.publish import publish as send

    upload = prepare(folder, repo_id, licence=licence)
    for note in upload.notes:
        print(f"note: {note}", file=sys.stderr)
    if dry_run:
        kind = "public" if public else "private"
        print(f"{upload.folder} -> {repo_id} ({kind} if new), branch {revision}; nothing is sent")
        print(f"{upload.listing()}\n\n{upload.card}")
    else:
        print(upload.listing())
        print(send(upload, public=public, revision=revision))


def data_preview(
    path: Annotated[str, Argument(help="a distillation folder, or prompts (then give --target)")],
    target: Annotated[
        str | None, Option(help="whose tokenizer: a folder or Hub id; default: the manifest's")
    ] = None,
    count: Annotated[int, Option("-n", min=0, help="documents to print")] = 3,
    plain: Annotated[
        bool, Option("--plain", help="no colours: what is learned is in [[ ]]")
    ] = False,
    boundaries: Annotated[bool, Option("--boundaries", help="put a | between tokens")] = False,
    split: Split = "train",
    tools: Tools = "drop",
    template_args: TemplateArgs = "{}",
) -> None:
    """Print what heads would learn from: documents with the target's tokens marked, and a summary.

    Loads a tokenizer, no weights. Of prompts: how the first of them render.
    """
    from rich.console import Console

    from draftheads.scripts.printing import Pen, show_answers, show_prompts, text_side
    from draftheads.train.data.answers import MANIFEST
    from draftheads.train.data.conversation import Renderer
    from draftheads.train.data.prompts import Hub, check_tools, read_prompts, with_tools

    side = text_side(target, path)
    out = Console(highlight=False, soft_wrap=True)
    plain = plain or not out.is_terminal or out.no_color
    pen = Pen(side, plain=plain, boundaries=boundaries)
    if (Path(path) / MANIFEST).is_file():
        show_answers(Path(path), side, pen, count, out)
        return
    renderer = Renderer(side, template_variables(template_args))
    prompts = read_prompts(path, hub=Hub(split), limit=max(count, 1), tools=tools)
    if any(with_tools(prompt.messages or ()) for prompt in prompts):
        check_tools(side.tokenizer, renderer.template_args)
    show_prompts(prompts, renderer, pen, out)


def import_answers(
    conversations: Annotated[
        str, Argument(help="a file, a folder or a Hub data set, answers included")
    ],
    target: TargetName,
    out: Annotated[Path, Option(help="folder to write, a new one")],
    tools: Tools = "keep",
    reasoning: Reasoning = "keep",
    limit: Limit = None,
    split: Split = "train",
    streaming: Streaming = None,
    template_args: TemplateArgs = "{}",
) -> None:
    """Make a training set of conversations that the target wrote earlier, without asking it again.

    Learned is what the assistant says: reasoning and calls of tools, unless dropped, and the end of
    each answer. Loads a tokenizer, no weights, so that the target wrote it is not checked.
    """
    from draftheads.train.data.conversation import TextSide
    from draftheads.train.data.imports import import_answers as run
    from draftheads.train.data.prompts import Hub, check_tools, read_conversations, with_tools

    side = TextSide.load(target)
    arguments = template_variables(template_args)
    found = read_conversations(
        conversations, hub=Hub(split, streaming), limit=limit, tools=tools, reasoning=reasoning
    )
    if any(with_tools(messages) for messages in found):
        check_tools(side.tokenizer, arguments)
    counts = run(side, found, out, template_args=arguments, source=conversations)
    print(
        f"{out}: {counts.documents} documents, {counts.skipped} conversations skipped, "
        f"{counts.learned_tokens:,} tokens to learn in {counts.turns} answers; not checked: that "
        f"{target} wrote them"
    )
    for why, number in counts.reasons.most_common():
        print(f"  {number} {why}")
