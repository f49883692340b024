"""The commands and their options. Heavy imports wait until a command runs, so that --help is
instant.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from draftheads.infer.threads import choose_threads, set_threads
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.formats.hub import HeadFolder
    from draftheads.heads.target import Target
    from draftheads.heads.tree import Tree
    from draftheads.infer.accept import Acceptance
    from draftheads.infer.engine import DrafterSource
    from draftheads.train.data.distill import Answerer, DistillOptions

Keep = Literal["keep", "drop"]

TargetName = Annotated[str, Option("--target", help="target model: a folder or a Hub id")]
MaybeTarget = Annotated[str | None, Option("--target", help="default: the one the head records")]
HEAD = """head folder, run folder or Hub id (user/name@revision); ngram, model:PATH, early-exit:K;
or several of these joined by +"""
Head = Annotated[str, Option(help=HEAD)]
MaybeHead = Annotated[str | None, Option(help=f"{HEAD}; default: the plain model")]
Heads = Annotated[list[str], Option(help="as for chat; repeatable")]
Revision = Annotated[str | None, Option(help="the target's branch, tag or commit on the Hub")]
PROMPTS = """a prompt file, a folder of them, a Hub data set, or spec-bench, mt-bench, humaneval,
gsm8k"""
BATCH_TOKENS = "limit of prompts answered together x longest prompt and answer"
Prompts = Annotated[str, Option(help=PROMPTS)]
PromptWords = Annotated[int | None, Option(min=1, help="truncate plain texts to N words")]
Limit = Annotated[int | None, Option(min=1, help="use only the first N prompts or conversations")]
Split = Annotated[str | None, Option(help="of a Hub data set; default: the set's own, else train")]
Streaming = Annotated[bool | None, Option(help="do not store a Hub data set; default: --limit")]
TemplateArgs = Annotated[str, Option(help="chat template variables, as JSON")]
MaybeTemplateArgs = Annotated[
    str | None,
    Option("--template-args", help="chat template variables, as JSON; default: the head's data's"),
]
Tools = Annotated[Keep, Option(help="tool calls and results in conversations")]
Reasoning = Annotated[Keep, Option(help="<think> ... </think> of the answers")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Option()]
Device = Annotated[str | None, Option(help="e.g. cuda:0; default: CUDA if there is one")]
IsAdaptive = Annotated[bool, Option("--adaptive", help="draft while it pays (tuned heads)")]
Compile = Annotated[bool, Option("--compile", help="compile steps (takes a minute at first)")]
Threads = Annotated[int | None, Option(min=1, max=1024, help="CPU threads; default: the fastest")]
Temperature = Annotated[float, Option(min=0.0, help="0 is greedy")]
TopP = Annotated[float, Option(min=0.0, max=1.0, help="probability mass to keep")]
TopK = Annotated[int, Option(min=0, help="tokens to keep; 0 keeps all")]
IsTypical = Annotated[bool, Option("--typical", help="typical acceptance: faster, but LOSSY")]
LENIENCE = """draft models draw chains (speculative sampling), kept with probability
min(1, LENIENCE p / q): 1 is lossless, more is LOSSY"""
Lenience = Annotated[float | None, Option(help=LENIENCE)]
Seed = Annotated[int, Option(min=-(2**62), max=2**62, help="for all sampling")]  # int64
SERVER = "OpenAI-compatible server: http://HOST:PORT; repeatable, all of one model"
Servers = Annotated[list[str] | None, Option(help=SERVER)]
ServerModel = Annotated[str | None, Option(help="the server's name for the target")]
KeyVariable = Annotated[str | None, Option(help="environment variable with the server's key")]
Recipe = Annotated[Path, Argument(help="a recipe, e.g. recipes/demo-medusa.yaml")]
Overrides = Annotated[list[str] | None, Argument(help="key.path=value ...")]
Json = Annotated[Path | None, Option("--json", help="write the figures here")]
Place = tuple[str, str | None, int | None]
"""dtype, device and threads"""
TREES = """4,2,1 or [[0],[0,0]] or nodes=16,depth=5,top_k=4 (not Medusa), NAME@TREE for one head;
default: the heads' own; repeatable"""
Trees = Annotated[list[str] | None, Option(help=TREES)]


def load_target(
    name: str,
    dtype: str,
    device: str | None,
    revision: str | None = None,
    heads: Sequence[HeadFolder] = (),
    template_args: str | None = None,
) -> Target:
    """Load the target, with the adapter that `heads` were trained with, if any, and the chat
    template variables of their data, or those of --template-args. Raises ValueError for a device
    that this machine does not have.
    """
    import torch
    import transformers

    from draftheads.heads.formats.hub import shared_adapter, shared_template_args
    from draftheads.heads.target import Target

    if device is not None:
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:  # several lines that name no option
            usable = "cuda:0" if torch.cuda.is_available() else "cpu; torch finds no usable GPU"
            raise ValueError(
                f"--device: expected a device of this machine, got {device!r}; try {usable}"
            ) from error
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    adapter = shared_adapter(heads)
    if template_args is None:
        variables = shared_template_args(heads)
    else:
        variables = parsed_template_args(template_args)
    target = Target.load(name, dtype=dtype, device=device, revision=revision)
    target.template_args = variables
    return target.attach(adapter) if adapter else target


def load_fast_target(
    name: str,
    place: Place,
    revision: str | None = None,
    heads: Sequence[HeadFolder] = (),
    template_args: str | None = None,
) -> Target:
    """`load_target`, with threads chosen, and on a CPU with dtype "auto" as the faster one by a
    measurement. Not for what learns or writes data: its results would depend on timing.
    """
    import torch

    dtype, device, threads = place
    on_cpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu"
    set_threads(threads)
    if on_cpu and dtype == "auto" and not name.endswith(".gguf"):
        dtype = faster_dtype(name, revision)
    target = load_target(name, dtype, device, revision, heads, template_args)
    choose_threads(threads, target)
    return target


def faster_dtype(name: str, revision: str | None) -> str:
    """The faster dtype for a target on this CPU; says so where there is a choice."""
    import torch

    from draftheads.heads.placement import check_path, read_config
    from draftheads.infer.measure.precision import measured_pace, own_dtype

    check_path(name)
    config = read_config(name, revision)
    if own_dtype(config) == torch.float32:
        return "auto"
    pace = measured_pace(config)
    say(pace, sys.stderr)
    return pace.dtype


def rule(
    temperature: float,
    top_p: float,
    top_k: int,
    typical: bool,
    seed: int,
    lenience: float | None = None,
) -> Acceptance:
    """The acceptance rule that these options request."""
    from draftheads.infer.accept import Greedy, Sampled, Typical
    from draftheads.infer.drafters.draft_sampling import SpeculativeSampling

    rule: Acceptance = Greedy()
    if lenience is not None:
        if typical or not temperature:
            raise ValueError(
                "--lenience: expected sampling, as with --temperature 1, and not --typical, got "
                f"{'--typical' if typical else '--temperature 0'}; change that"
            )
        rule = SpeculativeSampling(temperature, top_p, top_k, lenience)
    elif typical:
        rule = Typical(temperature=temperature or 0.7)
    elif temperature:
        rule = Sampled(temperature=temperature, top_p=top_p, top_k=top_k)
    rule.seed(seed)
    return rule


def parsed_template_args(text: str) -> dict[str, Any]:
    """The value of --template-args. Raises ValueError as `template_variables`."""
    from draftheads.heads.target import template_variables

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # json's message names no option
        value = text
    try:
        return template_variables(value)
    except ValueError as error:
        raise ValueError(f"--template-args: {error}") from error


def announce(compile: bool) -> None:
    """Say why the first answers take long."""
    if compile:
        said = "compiling takes about a minute per candidate, and less the next time"
        say(said, sys.stderr)


def write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures of a --json option, if it is given."""
    from draftheads.heads.files import write_text

    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(figures, indent=2) + "\n")


def recorded_threads(out: Path) -> int | None:
    """CPU threads of an unfinished distillation: another number may round differently."""
    from draftheads.train.data.answers import MANIFEST, read_manifest

    return read_manifest(out).get("threads") if (out / MANIFEST).is_file() else None


def local_answerer(
    target: Target, head: str | None, tree: str | None, options: DistillOptions
) -> Answerer:
    """A target in this process that answers, with or without heads."""
    from draftheads.heads.formats.hub import load_head
    from draftheads.infer.engine import Speculator
    from draftheads.train.data.distill import LocalAnswerer

    drafts = load_head(head, target=target) if head else None
    engine = Speculator(target, drafts, tree=chosen_tree(drafts, tree, None))
    return LocalAnswerer(engine, options.batch_size, options.max_batch_tokens)


def distill(
    target: TargetName,
    prompts: Prompts,
    out: Annotated[Path, Option(help="folder to write; an unfinished one is resumed")],
    temperature: Temperature = 0.3,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    max_new_tokens: Annotated[int, Option(min=1, help="tokens per answer")] = 512,
    batch_size: Annotated[int, Option(min=1, help="prompts answered together")] = 32,
    max_batch_tokens: Annotated[int | None, Option(min=1, help=BATCH_TOKENS)] = None,
    head: Annotated[str | None, Option(help="draft heads, which change no answer")] = None,
    tree: Annotated[str | None, Option(help="default: the head's own")] = None,
    limit: Limit = None,
    prompt_words: PromptWords = None,
    split: Split = None,
    streaming: Streaming = None,
    skip_empty: Annotated[bool, Option("--skip-empty", help="skip empty prompts")] = False,
    max_turns: Annotated[int | None, Option(min=1, help="user turns per conversation")] = None,
    tools: Tools = "drop",
    reasoning: Reasoning = "keep",
    template_args: TemplateArgs = "{}",
    server: Servers = None,
    server_model: ServerModel = None,
    api_key_env: KeyVariable = None,
    concurrency: Annotated[int, Option(min=1, help="concurrent requests to each server")] = 32,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Let the target answer prompts; its own tokens become the training set.

    Exit code 1: some prompts are unanswered.
    """
    from draftheads.train.data.distill import DistillOptions
    from draftheads.train.data.distill import distill as run
    from draftheads.train.data.prompts import Hub, StoredPrompts, iter_prompts
    from draftheads.train.data.server import ServedTarget, ServerOptions

    if server and (head or tree or max_batch_tokens):
        raise ValueError("--head, --tree, --max-batch-tokens: omit these, the server decodes")
    chosen: Any = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    chosen |= {"out": out, "source": prompts, "max_new_tokens": max_new_tokens}
    chosen |= {"batch_size": batch_size, "max_batch_tokens": max_batch_tokens}
    chosen |= {"max_turns": max_turns, "reasoning": reasoning}
    options = DistillOptions(**chosen, template_args=parsed_template_args(template_args))
    reading: dict[str, Any] = {"prompt_words": prompt_words, "skip_empty": skip_empty}
    found = iter_prompts(prompts, hub=Hub(split, streaming), limit=limit, tools=tools, **reading)
    texts = StoredPrompts(found)
    if server or server_model or api_key_env:
        served: Any = {"urls": server or [""], "model": server_model, "api_key_env": api_key_env}
        remote = ServerOptions(**served, concurrency=concurrency)
        report = run(ServedTarget(target, remote, revision), texts, options)
    else:
        local = load_target(target, dtype, device, revision)
        choose_threads(threads or recorded_threads(out), local, batch_size)
        report = run(local_answerer(local, head, tree, options), texts, options)
    if report.missing or (report.complete and not report.counts.done):
        raise typer.Exit(1)


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    no_probe: Annotated[
        bool, Option("--no-probe", help="count from shapes; train nothing")
    ] = False,
    processes: Annotated[int | None, Option(min=1, help="default: WORLD_SIZE, else 1")] = None,
    engine: Annotated[str, Option(help="ddp, zero1, zero2, zero3 or fsdp2")] = "ddp",
    threads: Threads = None,
    json_out: Json = None,
) -> None:
    """Predict memory, disk and time of a recipe from shapes and a few training steps on a shallow
    random target.
    """
    import transformers

    from draftheads.scripts.printing import print_plan
    from draftheads.train.plan import make_plan
    from draftheads.train.recipe import load_recipe

    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for the process that trains
    transformers.logging.disable_progress_bar()
    if not no_probe:
        say("training a few steps to measure memory and time; --no-probe skips this")
    made = make_plan(load_recipe(recipe, overrides or []), processes, engine, probe=not no_probe)
    print_plan(made)
    write_figures(json_out, made.to_json())


def train(recipe: Recipe, overrides: Overrides = None, threads: Threads = None) -> None:
    """Train heads of any kind in this process (a recipe without head.kind: Medusa heads).

    In several processes: `accelerate launch train/medusa.py RECIPE.yaml` or
    `accelerate launch train/eagle.py RECIPE.yaml`.
    """
    from draftheads.train.entry import train as run

    set_threads(threads)
    sys.exit(run(str(recipe), overrides or [], "medusa"))


def keys() -> None:
    """List all recipe keys with types, defaults and descriptions."""
    from draftheads.train.recipe import key_table

    for key, takes, default, description in key_table():
        say(f"{key} = {default} [{takes}]\n    {description}")


def demo(
    out: Annotated[Path, Option(help="folder for all outputs of the demo")] = Path("out/demo"),
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
    tree: Trees = None,
    batch: Annotated[int, Option(min=1, help="prompts decoded together")] = 1,
    limit: Annotated[int, Option(min=1, help="prompts, taken evenly from all categories")] = 16,
    repetitions: Annotated[int, Option(min=1, help="runs of every prompt")] = 3,
    prompt_words: PromptWords = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    lenience: Lenience = None,
    json_out: Json = None,
    markdown: Annotated[Path | None, Option(help="write the tables here")] = None,
    plot: Annotated[Path | None, Option(help="write a PNG here")] = None,
    card: Annotated[bool, Option("--card", help="write the figures into the model card")] = False,
    adaptive: IsAdaptive = False,
    compile: Compile = False,
    template_args: MaybeTemplateArgs = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Measure heads and other drafters against `generate` and this engine without drafts."""
    from draftheads.heads.formats.hub import record_measured
    from draftheads.infer.drafters.named import open_drafts
    from draftheads.infer.measure import report as reports
    from draftheads.infer.measure.bench import bench as run
    from draftheads.infer.race import BenchOptions
    from draftheads.scripts.journey import check_outputs, contestants, load_drafts, openings

    check_outputs([json_out, markdown], head if card else [], plot)
    drafts = open_drafts(head)
    folders = [folder for each in drafts.values() for folder in each.folders]
    place = (dtype, device, threads)
    model = load_fast_target(target, place, revision, folders, template_args)
    sampling = rule(temperature, top_p, top_k, typical, seed, lenience)
    loaded = load_drafts(drafts, model, sampling, adaptive)
    settings: dict[str, Any] = {"seed": seed, "compile": compile, "batch": batch}
    options = BenchOptions(max_new_tokens, sampling, repetitions, nodes or (), **settings)
    ids, categories = openings(model, prompts, prompt_words, limit)
    announce(compile)
    entries = contestants(model, loaded, tree or (), options)
    report = run(model, entries, ids, options, categories=categories)
    reports.print_report(report)
    outputs = {reports.write_json: json_out, reports.write_markdown: markdown, reports.plot: plot}
    for write, path in outputs.items():
        if path:
            write(report, path)
    for name, folder in zip(drafts, folders, strict=True) if card else ():
        results = [each.name for each in report.heads if f"{each.name}@".startswith(f"{name}@")]
        record_measured(folder.path, [reports.measured_facts(report, each) for each in results])


def tune(
    target: MaybeTarget = None,
    head: Annotated[str | None, Option(help="head or run folder; default: no head, only T")] = None,
    prompts: Annotated[str | None, Option(help="as for bench; needed with --head")] = None,
    max_new_tokens: Annotated[int, Option(min=2)] = 64,
    nodes: Annotated[int, Option(min=1, help="draft nodes of the largest tree")] = 64,
    context: Annotated[int, Option(min=1, help="tokens of text, without --head")] = 256,
    limit: Annotated[int, Option(min=2, help="use only the first N prompts")] = 24,
    repetitions: Annotated[int, Option(min=1, help="runs of every prompt")] = 3,
    prompt_words: PromptWords = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="print only; keep the head's tree")] = False,
    json_out: Json = None,
    compile: Compile = False,
    template_args: MaybeTemplateArgs = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Find the tree with the most tokens per second on this machine and write it into the head.

    Without --head: how many tokens per step would heads need to pay here?
    """
    from draftheads.heads.formats.hub import open_head, record_tuned
    from draftheads.infer.measure.tune import TuneOptions, verify_curve
    from draftheads.infer.measure.tune import tune as run
    from draftheads.scripts.journey import check_outputs, opening_ids
    from draftheads.scripts.printing import print_curve, print_tuned

    sampling = rule(temperature, top_p, top_k, False, seed)
    options = TuneOptions(max_new_tokens, sampling, repetitions, nodes, seed, compile)
    check_outputs([json_out], [head] if head and not dry_run else [], option="--head")
    figures: dict[str, Any]
    if head is None:
        if target is None:
            raise ValueError("expected --target or --head to tune for, got neither; pass one")
        model = load_fast_target(target, (dtype, device, threads), revision)
        curve = verify_curve(model, context, options)
        print_curve(model, context, curve)
        figures = {"context": context, "verify": curve}
    else:
        if prompts is None:
            raise ValueError("expected --prompts to tune the head on, got none; pass a file")
        folder = open_head(head)
        name, commit = (target, revision) if target else folder.target
        place = (dtype, device, threads)
        model = load_fast_target(name, place, commit, [folder], template_args)
        ids = opening_ids(model, prompts, prompt_words, limit)
        found = run(model, folder.load(model), ids, options, others=[folder.trained_tree])
        print_tuned(found)
        if not dry_run:
            record_tuned(folder.path, found.best.tree, found.facts())
            say(f"written to {folder.path}")
        figures = asdict(found)
    write_figures(json_out, figures)


def chat(
    head: MaybeHead = None,
    target: MaybeTarget = None,
    system: Annotated[str | None, Option(help="system message")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="tokens per answer")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    lenience: Lenience = None,
    nodes: Annotated[int | None, Option(min=1, help="draft nodes per step")] = None,
    tree: Annotated[str | None, Option(help="a tree instead of the head's own")] = None,
    show_accepted: Annotated[bool, Option(help="accepted draft tokens in green")] = True,
    plain: Annotated[bool, Option("--plain", help="plain text, as in a pipe")] = False,
    adaptive: IsAdaptive = False,
    compile: Compile = False,
    template_args: MaybeTemplateArgs = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Chat with the target, sped up by a head or another drafter."""
    from draftheads.infer.chat.repl import ChatOptions
    from draftheads.infer.chat.repl import chat as run
    from draftheads.infer.engine import Speculator

    sampling = rule(temperature, top_p, top_k, typical, seed, lenience)
    place = (dtype, device, threads)
    model, drafter = open_engine(head, target, sampling, adaptive, place, template_args)
    shape = chosen_tree(drafter, tree, nodes)
    speculator = Speculator(model, drafter, tree=shape, compile=compile)
    announce(speculator.compile)
    run(speculator, ChatOptions(system, sampling, max_new_tokens, show_accepted, plain, seed))


def serve(
    head: MaybeHead = None,
    target: MaybeTarget = None,
    host: Annotated[str, Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: any free one")] = 8000,
    name: Annotated[str | None, Option(help="of the model; default: the target's")] = None,
    api_key_env: Annotated[
        str | None, Option(help="environment variable with a key that requests must have")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, Option(help="name by which it may be called; repeat for several")
    ] = None,
    root_path: Annotated[str, Option(help="path under which a proxy offers it, as /model")] = "",
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    slots: Annotated[int, Option(min=1, max=64, help="requests decoded at a time")] = 4,
    queue: Annotated[int, Option(min=1, help="requests that may wait; more get 429")] = 64,
    timeout: Annotated[float, Option(min=1, help="seconds for a request")] = 600.0,
    nodes: Annotated[int | None, Option(min=1, help="draft nodes per step")] = None,
    tree: Annotated[str | None, Option(help="a tree instead of the head's own")] = None,
    adaptive: IsAdaptive = False,
    compile: Compile = False,
    template_args: MaybeTemplateArgs = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Serve the target over HTTP, as OpenAI does, with a page to chat on.

    --temperature, --top-p and --top-k are for requests that do not say.
    """
    from draftheads.infer.engine import Speculator
    from draftheads.infer.serve.app import serve as run
    from draftheads.infer.serve.service import ServeOptions
    from draftheads.train.data.server import secret

    key = secret(api_key_env) if api_key_env else None
    sampling = rule(temperature, top_p, top_k, False, 0)
    options = ServeOptions(
        name or "",
        key,
        temperature,
        top_p,
        top_k,
        slots,
        queue,
        timeout,
        allowed_hosts=tuple(allowed_host or ()),
        root_path=root_path.rstrip("/"),
    )
    place = (dtype, device, threads)
    model, drafter = open_engine(head, target, sampling, adaptive, place, template_args)
    shape = chosen_tree(drafter, tree, nodes)
    speculator = Speculator(model, drafter, tree=shape, compile=compile)
    announce(speculator.compile)
    name = name or Path(os.path.expanduser(model.name)).absolute().name
    run(speculator, replace(options, name=name), host, port)


def open_engine(
    head: str | None,
    target: str | None,
    sampling: Acceptance,
    adaptive: bool,
    place: Place,
    template_args: str | None,
) -> tuple[Target, DrafterSource | None]:
    """Load a target and what --head names, if anything."""
    from draftheads.infer.drafters.named import named_drafts
    from draftheads.scripts.journey import load_drafts

    if head is None and target is None:
        raise ValueError("expected --head or --target, got neither; pass one")
    drafts = named_drafts(head) if head else None
    name, revision = (target, None) if target or drafts is None else drafts.target
    folders = drafts.folders if drafts else []
    model = load_fast_target(name or "", place, revision, folders, template_args)
    if drafts is None:
        return model, None
    *_, drafter = load_drafts({"": drafts}, model, sampling, adaptive).values()
    return model, drafter


def chosen_tree(drafts: DrafterSource | None, tree: str | None, nodes: int | None) -> Tree | None:
    """The tree that --tree and --nodes ask for; default: the drafts' own. Raises ValueError."""
    from draftheads.heads.tree import parse_tree

    if drafts is None:
        if tree or nodes:
            raise ValueError("--tree and --nodes: expected drafts, got none; pass --head, too")
        return None
    shape = parse_tree(tree) if tree else drafts.tree
    return shape.resized(nodes) if nodes else shape


def publish(
    folder: Annotated[Path, Argument(help="a head folder or a run folder")],
    repo_id: Annotated[str, Argument(help="user/name on the Hub")],
    public: Annotated[bool, Option("--public", help="make the repository public")] = False,
    revision: Annotated[str, Option(help="branch to write to")] = "main",
    licence: Annotated[str | None, Option("--license", help="e.g. apache-2.0")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace another model's files")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="print files and card only")] = False,
) -> None:
    """Upload a checked head folder to the Hub (private unless --public)."""
    from draftheads.scripts.publish import prepare
    from draftheads.scripts.publish import publish as upload_files

    upload = prepare(folder, repo_id, licence=licence)
    for note in upload.notes:
        say(f"note: {note}", sys.stderr)
    if dry_run:
        kind = "public" if public else "private"
        say(f"{upload.folder} -> {repo_id} ({kind}), branch {revision}; dry run")
        say(f"{upload.listing()}\n\n{upload.card}")
    else:
        say(upload.listing())
        say(upload_files(upload, public=public, revision=revision, overwrite=overwrite))


def data_preview(
    path: Annotated[str, Argument(help="a distillation folder, or prompts (with --target)")],
    target: Annotated[str | None, Option(help="default: the one in the manifest")] = None,
    count: Annotated[int, Option("-n", min=0, help="documents to print")] = 3,
    plain: Annotated[bool, Option("--plain", help="[[ ]] instead of colours")] = False,
    boundaries: Annotated[bool, Option("--boundaries", help="put a | between tokens")] = False,
    check: Annotated[bool, Option("--check", help="compare a folder with its checksums")] = False,
    split: Split = None,
    tools: Tools = "drop",
    template_args: TemplateArgs = "{}",
) -> None:
    """Print documents with the target's tokens marked, and a summary; or rendered prompts.

    Loads a tokenizer, no weights; --check loads neither.
    """
    if check:
        check_answers(Path(path))
        return
    from draftheads.heads.terminal import SafeConsole
    from draftheads.scripts.printing import Pen, show_answers, show_prompts, text_side
    from draftheads.train.data.answers import MANIFEST
    from draftheads.train.data.conversation import Renderer
    from draftheads.train.data.prompts import Hub, check_tools, read_prompts, with_tools

    side = text_side(target, path)
    out = SafeConsole(highlight=False, soft_wrap=True)
    plain = plain or not out.is_terminal or out.no_color
    pen = Pen(side, plain=plain, boundaries=boundaries)
    if (Path(path) / MANIFEST).is_file():
        show_answers(Path(path), side, pen, count, out)
        return
    renderer = Renderer(side, parsed_template_args(template_args))
    prompts = read_prompts(path, hub=Hub(split), limit=max(count, 1), tools=tools)
    if any(with_tools(prompt.messages or ()) for prompt in prompts):
        check_tools(side.tokenizer, renderer.template_args)
    show_prompts(prompts, renderer, pen, out)


def check_answers(folder: Path) -> None:
    """Compare all that a folder says of itself, and print what it holds."""
    from draftheads.train.data.answers import check

    counts = check(folder)
    say(
        f"{folder}: {counts.documents:,} documents, {counts.tokens:,} tokens, "
        f"{counts.learned_tokens:,} to learn; all as they were written"
    )


def import_answers(
    conversations: Annotated[str, Argument(help="a file, folder or Hub data set with answers")],
    target: TargetName,
    out: Annotated[Path, Option(help="new folder to write")],
    tools: Tools = "keep",
    reasoning: Reasoning = "keep",
    limit: Limit = None,
    split: Split = None,
    streaming: Streaming = None,
    template_args: TemplateArgs = "{}",
) -> None:
    """Make a training set from conversations that the target wrote earlier.

    Heads learn the assistant's turns with their end tokens; reasoning and tool calls, too, unless
    dropped. Loads a tokenizer, no weights, so it is not checked that the target wrote them.
    """
    from draftheads.train.data.conversation import TextSide
    from draftheads.train.data.imports import import_answers as run
    from draftheads.train.data.prompts import Hub, check_tools, read_conversations, with_tools

    side = TextSide.load(target)
    arguments = parsed_template_args(template_args)
    found = read_conversations(
        conversations, hub=Hub(split, streaming), limit=limit, tools=tools, reasoning=reasoning
    )
    if any(with_tools(messages) for messages in found):
        check_tools(side.tokenizer, arguments)
    counts = run(side, found, out, template_args=arguments, source=conversations)
    say(
        f"{out}: {counts.documents} documents, {counts.skipped} conversations skipped, "
        f"{counts.learned_tokens:,} tokens to learn in {counts.turns} answers; not checked: that "
        f"{target} wrote them"
    )
    for why, number in counts.reasons.most_common():
        say(f"  {number} {why}")


def convert(
    source: Annotated[str, Argument(help="a head: folder, run folder or Hub id, any layout")],
    out: Annotated[Path, Argument(help="new folder, or GGUF file, to write")],
    to: Annotated[
        str,
        Option(
            "--to", help="draftheads, vllm, sglang, gguf, openvino, mlx, trtllm, tgi or speculators"
        ),
    ],
    target: Annotated[
        str | None, Option(help="the head's target, if it is needed; for gguf, its GGUF file")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Convert a head to or from the layout of vLLM, SGLang, llama.cpp, TGI and others, bit by bit.

    --target is needed where a layout leaves something to the target.
    """
    from draftheads.heads.formats.llamacpp import TargetFile
    from draftheads.scripts.convert import converted

    if to == "gguf":
        file = TargetFile.open(target) if target else None
        say(converted(source, out, to, target_file=file))
    else:
        say(converted(source, out, to, load_target(target, dtype, device) if target else None))


def merge(
    head: Annotated[str, Argument(help="head folder, run folder or Hub id, with an adapter")],
    out: Annotated[Path, Argument(help="new folder to write: the model, with heads/ in it")],
    target: MaybeTarget = None,
    dtype: Dtype = "auto",
) -> None:
    """Write the adapted target of Medusa-2 heads as a plain model that any engine loads.

    Its heads are in OUT/heads. --dtype auto is the target's own.
    """
    import transformers

    from draftheads.scripts.convert import merged

    transformers.logging.disable_progress_bar()
    say(merged(head, out, target, dtype))
