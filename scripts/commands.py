"""The commands and their options. Heavy imports wait until a command runs, so that --help is
instant.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from draftheads.arguments import secret
from draftheads.infer.pipeline.loading import load_fast_target, load_target
from draftheads.infer.threads import choose_threads, set_threads
from draftheads.scripts.following import (
    after_answers,
    after_bench,
    local_options,
    say_next,
    target_options,
)
from draftheads.scripts.learning import (
    Learn,
    LearnFolder,
    Learning,
    LearnKeep,
    LearnSize,
    learning,
)
from draftheads.scripts.models import (
    Drafting,
    Place,
    announce,
    load_engine,
    prepared,
    say_beside,
)
from draftheads.scripts.options import (
    BATCH_TOKENS,
    BENCH_SERVER,
    FILE_CHECK,
    HEAD_CHECK,
    NEW_CHECK,
    OUT_CHECK,
    PROMPT_CHECK,
    AnswerTokens,
    BenchTarget,
    Bits,
    Compile,
    Device,
    Dtype,
    HeadDtype,
    IsTypical,
    Json,
    KeyVariable,
    Lenience,
    Limit,
    MaybeHead,
    MaybeHeads,
    MaybeLora,
    MaybeNodes,
    MaybeTarget,
    MaybeTemplateArgs,
    MaybeTree,
    Overrides,
    Prompts,
    PromptWords,
    Reasoning,
    Recipe,
    Repetitions,
    Revision,
    Seed,
    ServerModel,
    Servers,
    Split,
    Streaming,
    TargetName,
    Temperature,
    TemplateArgs,
    Threads,
    Tools,
    TopK,
    TopP,
    Trees,
    check_either,
    check_places,
    check_writable_head,
    chosen_tree,
    is_served,
    parsed_template_args,
    rule,
    write_figures,
)
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.base import DraftHead
    from draftheads.infer.measure.tune import TuneOptions
    from draftheads.train.data.distill import Answerer, DistillOptions


def local_answerer(
    target: str,
    revision: str | None,
    place: Place,
    head: str | None,
    tree: str | None,
    options: DistillOptions,
) -> Answerer:
    """A target in this process that answers, with or without heads."""
    from draftheads.heads.formats.hub import load_head
    from draftheads.infer.engine import Speculator
    from draftheads.train.data.answers import MANIFEST, read_manifest
    from draftheads.train.data.distill import LocalAnswerer

    loaded = load_target(target, place, revision, template_args=prepared())
    threads = place.threads
    if not threads and (options.out / MANIFEST).is_file():  # another number may round differently
        threads = read_manifest(options.out).get("threads")
    choose_threads(threads, loaded, options.batch_size)
    drafts = load_head(head, target=loaded) if head else None
    engine = Speculator(loaded, drafts, tree=chosen_tree(drafts, tree, None))
    return LocalAnswerer(engine, options.batch_size, options.max_batch_tokens)


def distill(
    context: typer.Context,
    target: TargetName,
    prompts: Prompts,
    out: Annotated[
        Path, Option(callback=OUT_CHECK, help="folder to write; an unfinished one is resumed")
    ],
    temperature: Temperature = 0.3,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    max_new_tokens: Annotated[int, Option(min=1, help="tokens per answer")] = 512,
    batch_size: Annotated[int, Option(min=1, help="prompts answered together")] = 32,
    max_batch_tokens: Annotated[int | None, Option(min=1, help=BATCH_TOKENS)] = None,
    head: Annotated[
        str | None, Option(callback=HEAD_CHECK, help="draft heads, which change no answer")
    ] = None,
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
    adapter: MaybeLora = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Let the target answer prompts; its own tokens become the training set. Exit code 1: some
    prompts are unanswered.
    """
    from draftheads.train.data import distill as distillation
    from draftheads.train.data.prompts import Hub, read_prompts
    from draftheads.train.data.server import ServedTarget, ServerOptions

    local = {"head", "tree", "max_batch_tokens", "adapter"}
    check_places(context, {"server_model", "api_key_env"}, local, "the server decodes")
    options = distillation.DistillOptions(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=max_new_tokens,
        out=out,
        batch_size=batch_size,
        max_batch_tokens=max_batch_tokens,
        seed=seed,
        max_turns=max_turns,
        template_args=parsed_template_args(template_args),
        reasoning=reasoning,
        source=prompts,
    )
    texts = read_prompts(
        prompts,
        hub=Hub(split, streaming),
        limit=limit,
        prompt_words=prompt_words,
        skip_empty=skip_empty,
        tools=tools,
    )
    answerer: distillation.Answerer
    if server:
        servers = ServerOptions(
            urls=server,
            model=server_model,
            api_key_env=api_key_env,
            concurrency=concurrency,
        )
        answerer = ServedTarget(target, servers, revision)
    else:
        place = Place(dtype, device, threads, lora=adapter)
        answerer = local_answerer(target, revision, place, head, tree, options)
    report = distillation.distill(answerer, texts, options)
    if report.missing or (report.complete and not report.counts.done):
        raise typer.Exit(1)
    if not report.others:
        after_answers(target, out, adapter)


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    no_probe: Annotated[
        bool, Option("--no-probe", help="count from shapes; load and try nothing")
    ] = False,
    processes: Annotated[int | None, Option(min=1, help="default: WORLD_SIZE, else 1")] = None,
    engine: Annotated[str, Option(help="ddp, zero1, zero2, zero3 or fsdp2")] = "ddp",
    threads: Threads = None,
    json_out: Json = None,
) -> None:
    """Predict memory, disk and time of a recipe from shapes and a trial of its steps."""
    import transformers

    from draftheads.scripts.printing import next_command, print_plan, remedy
    from draftheads.train.advice.plan import make_plan
    from draftheads.train.recipe import load_recipe

    set_threads(threads)
    transformers.logging.disable_progress_bar()
    if not no_probe:
        say("trying a few steps to measure memory and time; --no-probe skips this")
    made = make_plan(load_recipe(recipe, overrides or []), processes, engine, probe=not no_probe)
    print_plan(made)
    if not remedy(made):
        say_beside(f"next: {next_command(made, [str(recipe), *(overrides or [])])}")
    write_figures(json_out, made.to_json())


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    source: Annotated[
        str | None, Option("--from", help="a head, run or Hub id to continue: head.from=...")
    ] = None,
    threads: Threads = None,
) -> None:
    """Train heads of any kind in this process (a recipe without head.kind: Medusa heads).

    In several processes: `accelerate launch train/medusa.py RECIPE.yaml` or
    `accelerate launch train/eagle.py RECIPE.yaml`.
    """
    from draftheads.train.medusa import main

    set_threads(threads)
    values = [*(overrides or []), *([f"head.from={source}"] if source else [])]
    sys.exit(main([str(recipe), *values]))


def demo(
    out: Annotated[
        Path, Option(callback=OUT_CHECK, help="folder for all outputs of the demo")
    ] = Path("out/demo"),
) -> None:
    """Distill, train, bench and chat on the embedded target: a few minutes of CPU, no network."""
    from draftheads.scripts.demo import demo as run

    run(out)


def bench(
    context: typer.Context,
    prompts: Prompts,
    target: BenchTarget = None,
    head: MaybeHeads = None,
    server: Annotated[str | None, Option(help=BENCH_SERVER)] = None,
    server_plain: Annotated[str | None, Option(help="the same model there without drafts")] = None,
    server_model: ServerModel = None,
    api_key_env: KeyVariable = None,
    concurrency: Annotated[int, Option(min=1, help="requests at a time, to --server")] = 1,
    max_new_tokens: Annotated[int, Option(min=1)] = 128,
    nodes: Annotated[list[int] | None, Option(min=1, help="draft nodes to try: 4,8,16")] = None,
    tree: Trees = None,
    batch: Annotated[int, Option(min=1, help="prompts decoded together")] = 1,
    limit: Annotated[int, Option(min=1, help="prompts, taken evenly from all categories")] = 16,
    repetitions: Repetitions = 3,
    prompt_words: PromptWords = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    lenience: Lenience = None,
    json_out: Json = None,
    markdown: Annotated[
        Path | None, Option(callback=FILE_CHECK, help="write the tables here")
    ] = None,
    card: Annotated[bool, Option("--card", help="write the figures into the model card")] = False,
    explain: Annotated[bool, Option("--explain", help="print all notes below the table")] = False,
    compile: Compile = False,
    template_args: MaybeTemplateArgs = None,
    revision: Revision = None,
    adapter: MaybeLora = None,
    dtype: Dtype = "auto",
    bits: Bits = None,
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Measure heads and other drafters against `generate` and this engine without drafts. With
    --server: a server with drafts against one without.
    """
    from draftheads.infer.drafters.named import load_drafts, open_drafts
    from draftheads.infer.measure import bench as benches
    from draftheads.infer.measure.report import best, print_report
    from draftheads.scripts.contest import Outputs, contestants
    from draftheads.scripts.openings import openings

    is_remote = is_served(context)
    options = benches.BenchOptions(
        max_new_tokens=max_new_tokens,
        sampling=rule(temperature, top_p, top_k, typical=typical, seed=seed, lenience=lenience),
        repetitions=repetitions,
        nodes=nodes or (),
        seed=seed,
        compile=compile,
        batch=concurrency if is_remote else batch,
    )
    if server and is_remote:
        from draftheads.infer.measure.served import print_served
        from draftheads.scripts.served import bench_served, served_target
        from draftheads.train.data.distill import Sampling
        from draftheads.train.data.server import ServerOptions

        servers = ServerOptions(
            urls=[server, server_plain] if server_plain else [server],
            model=server_model,
            api_key_env=api_key_env,
            concurrency=concurrency,
            tries=1,
        )
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        answering = served_target(target, servers, revision)
        side = replace(answering.text_side, template_args=prepared(template_args) or {})
        ids, _ = openings(side, prompts, prompt_words, limit)
        served = bench_served(answering, ids, sampling, options)
        print_served(served)
        write_figures(json_out, asdict(served))
        return
    assert target and head  # checked by is_served
    outputs = Outputs(json_out, markdown, head if card else [])
    outputs.check()
    drafts = open_drafts(head)
    folders = [folder for each in drafts.values() for folder in each.folders]
    place = Place(dtype, device, threads, bits, adapter)
    model = load_fast_target(target, place, revision, folders, prepared(template_args))
    loaded = load_drafts(drafts, model, options.sampling)
    ids, categories = openings(model, prompts, prompt_words, limit)
    announce(compile)
    entries = contestants(model, loaded, tree or (), options)
    report = benches.bench(model, entries, ids, options, categories=categories)
    print_report(report, explain=explain)
    outputs.write(report, drafts)
    sources = dict(zip(drafts, dict.fromkeys(head), strict=True))
    after_bench(target_options(target, adapter), prompts, sources, best(report))


def tune(
    target: MaybeTarget = None,
    head: Annotated[
        str | None,
        Option(callback=HEAD_CHECK, help="head or run folder; default: no head, only T"),
    ] = None,
    prompts: Annotated[
        str | None, Option(callback=PROMPT_CHECK, help="as for bench; needed with --head")
    ] = None,
    max_new_tokens: Annotated[int, Option(min=2)] = 64,
    nodes: Annotated[int, Option(min=1, help="draft nodes of the largest tree")] = 64,
    context: Annotated[int, Option(min=1, help="tokens of text, without --head")] = 256,
    limit: Annotated[int, Option(min=2, help="use only the first N prompts")] = 24,
    repetitions: Repetitions = 3,
    prompt_words: PromptWords = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    dry_run: Annotated[bool, Option("--dry-run", help="print only; keep the head's tree")] = False,
    json_out: Json = None,
    compile: Compile = False,
    template_args: MaybeTemplateArgs = None,
    revision: Revision = None,
    adapter: MaybeLora = None,
    dtype: Dtype = "auto",
    bits: Bits = None,
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Find the tree with the most tokens per second on this machine and write it into the head.

    Without --head: how many tokens per step would heads need to pay here?
    """
    from draftheads.heads.formats.hub import open_head, record_tuned
    from draftheads.infer.drafters.named import named_drafts
    from draftheads.infer.measure.tune import TuneOptions
    from draftheads.infer.measure.tune import tune as run
    from draftheads.scripts.openings import opening_ids
    from draftheads.scripts.printing import print_tuned

    options = TuneOptions(
        max_new_tokens=max_new_tokens,
        sampling=rule(temperature, top_p, top_k, seed=seed),
        repetitions=repetitions,
        nodes=nodes,
        seed=seed,
        compile=compile,
    )
    place = Place(dtype, device, threads, bits, adapter)
    if head is None:
        write_figures(json_out, target_curve(target, revision, place, context, options))
        say_next("init", *target_options(target, adapter), "--out", "recipe.yaml")
        return
    is_native = head.partition(":")[0] == "mtp"  # the target's own layer is in no folder
    keeps_tree = not (is_native or dry_run)
    if keeps_tree:
        check_writable_head(head, "--head")
    if prompts is None:
        raise ValueError("expected --prompts to tune the head on, got none; pass a file")
    folders = [] if is_native else [open_head(head)]
    drafts = named_drafts(head)
    name, commit = (target, revision) if target else drafts.target
    place = place if target else place.recorded(folders[0])
    model = load_fast_target(name, place, commit, folders, prepared(template_args))
    ids = opening_ids(model, prompts, prompt_words, limit)
    trained = [folder.facts.trained_tree for folder in folders]
    tuned = run(model, cast("DraftHead", drafts.load(model)), ids, options, others=trained)
    print_tuned(tuned)
    if keeps_tree:
        record_tuned(folders[0].path, tuned.best.tree, tuned.facts())
        say(f"written to {folders[0].path}")
    write_figures(json_out, asdict(tuned))
    say_next("chat", *target_options(name, model.lora), "--head", head)


def target_curve(
    target: str | None, revision: str | None, place: Place, context: int, options: TuneOptions
) -> dict[str, Any]:
    """Print what a verification costs without a head; returns the figures."""
    from draftheads.infer.measure.tune import verify_curve
    from draftheads.scripts.printing import print_curve

    if target is None:
        raise ValueError("expected --target or --head to tune for, got neither; pass one")
    model = load_fast_target(target, place, revision, template_args=prepared())
    curve = verify_curve(model, context, options)
    print_curve(model, context, curve)
    return {"context": context, "verify": curve}


def chat(
    head: MaybeHead = None,
    target: MaybeTarget = None,
    system: Annotated[str | None, Option(help="system message")] = None,
    max_new_tokens: AnswerTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    lenience: Lenience = None,
    nodes: MaybeNodes = None,
    tree: MaybeTree = None,
    show_accepted: Annotated[bool, Option(help="accepted draft tokens in green")] = True,
    compile: Compile = False,
    template_args: MaybeTemplateArgs = None,
    adapter: MaybeLora = None,
    dtype: Dtype = "auto",
    bits: Bits = None,
    device: Device = None,
    threads: Threads = None,
    seed: Seed = 0,
    learn: Learn = False,
    learn_keep: LearnKeep = 30.0,
    learn_mb: LearnSize = 64.0,
    learn_folder: LearnFolder = None,
) -> None:
    """Chat with the target, sped up by a head or another drafter."""
    check_either(head, target)
    from draftheads.infer.chat.repl import ChatOptions
    from draftheads.infer.chat.repl import chat as run

    sampling = rule(temperature, top_p, top_k, typical=typical, seed=seed, lenience=lenience)
    drafting = Drafting(head, sampling, tree, nodes, compile)
    place = Place(dtype, device, threads, bits, adapter)
    engine = load_engine(target, drafting, place, template_args)
    options = ChatOptions(
        system=system,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        show_accepted=show_accepted,
        seed=seed,
    )
    with learning(engine, head, learn, Learning(learn_keep, learn_mb, learn_folder)) as learner:
        run(learner.engine, options, background=learner.background)


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
    nodes: MaybeNodes = None,
    tree: MaybeTree = None,
    compile: Compile = False,
    template_args: MaybeTemplateArgs = None,
    adapter: MaybeLora = None,
    dtype: Dtype = "auto",
    bits: Bits = None,
    device: Device = None,
    threads: Threads = None,
    learn: Learn = False,
    learn_keep: LearnKeep = 30.0,
    learn_mb: LearnSize = 64.0,
    learn_folder: LearnFolder = None,
) -> None:
    """Serve the target over HTTP, as OpenAI does, with a page to chat on.

    --temperature, --top-p and --top-k are for requests that do not say.
    """
    check_either(head, target)
    from draftheads.infer.serve.app import serve as run
    from draftheads.infer.serve.service import ServeOptions

    options = ServeOptions(
        name=name or "",
        key=secret(api_key_env) if api_key_env else None,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        slots=slots,
        waiting=queue,
        timeout=timeout,
        allowed_hosts=tuple(allowed_host or ()),
        root_path=root_path.rstrip("/"),
    )
    sampling = rule(temperature, top_p, top_k)
    drafting = Drafting(head, sampling, tree, nodes, compile)
    place = Place(dtype, device, threads, bits, adapter)
    engine = load_engine(target, drafting, place, template_args)
    if not name:
        model = engine.target.lora or engine.target.name
        options = replace(options, name=Path(os.path.expanduser(model)).absolute().name)
    with learning(engine, head, learn, Learning(learn_keep, learn_mb, learn_folder)) as learner:
        run(learner.engine, options, host, port, background=learner.background)


def publish(
    folder: Annotated[Path, Argument(callback=HEAD_CHECK, help="a head folder or a run folder")],
    repo_id: Annotated[str, Argument(help="user/name on the Hub")],
    public: Annotated[bool, Option("--public", help="make the repository public")] = False,
    revision: Annotated[str, Option(help="branch to write to")] = "main",
    licence: Annotated[str | None, Option("--license", help="e.g. apache-2.0")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace another model's files")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="print files and card only")] = False,
) -> None:
    """Upload a checked head folder to the Hub (private unless --public)."""
    from draftheads.heads.formats.hub import open_head
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
        head = repo_id if revision == "main" else f"{repo_id}@{revision}"
        say_next("chat", "--head", head, *local_options(open_head(upload.folder).facts))


def data_preview(
    path: Annotated[
        str,
        Argument(callback=PROMPT_CHECK, help="a distillation folder, or prompts (with --target)"),
    ],
    target: Annotated[str | None, Option(help="default: the one in the manifest")] = None,
    count: Annotated[int, Option("-n", min=0, help="documents to print")] = 3,
    check: Annotated[bool, Option("--check", help="compare a folder with its checksums")] = False,
    split: Split = None,
    tools: Tools = "drop",
    template_args: TemplateArgs = "{}",
) -> None:
    """Print documents with the target's tokens marked, and a summary; or rendered prompts.

    Marks are colours on a terminal, else [[ and ]].
    Loads a tokenizer, no weights; --check loads neither.
    """
    if check:
        from draftheads.train.data.answers import check as compare

        counts = compare(path)
        say(
            f"{path}: {counts.documents:,} documents, {counts.tokens:,} tokens, "
            f"{counts.learned_tokens:,} to learn; all as they were written"
        )
        return
    from draftheads.heads.terminal import SafeConsole
    from draftheads.infer.prompt import PromptRenderer
    from draftheads.scripts.printing import Pen, show_answers, show_prompts, text_side
    from draftheads.train.data.answers import MANIFEST
    from draftheads.train.data.conversation import check_tools
    from draftheads.train.data.prompts import Hub, read_prompts

    side = text_side(target, path)
    out = SafeConsole(highlight=False, soft_wrap=True)
    pen = Pen(side, is_plain=not out.is_terminal or out.no_color)
    if (Path(path) / MANIFEST).is_file():
        show_answers(Path(path), side, pen, count, out)
        after_answers(side.name, Path(path))
        return
    renderer = PromptRenderer(side, parsed_template_args(template_args))
    prompts = read_prompts(path, hub=Hub(split), limit=max(count, 1), tools=tools)
    check_tools(renderer, (prompt.messages for prompt in prompts))
    show_prompts(prompts, renderer, pen, out)
    say_next("distill", "--target", side.name, "--prompts", path, "--out", "data")


def import_answers(
    conversations: Annotated[
        str, Argument(callback=PROMPT_CHECK, help="a file, folder or Hub data set with answers")
    ],
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
    from draftheads.train.data.imports import import_answers as run
    from draftheads.train.data.prompts import Hub, read_conversations
    from draftheads.train.data.text_side import TextSide

    side = TextSide.load(target)
    arguments = parsed_template_args(template_args)
    talks = read_conversations(
        conversations, hub=Hub(split, streaming), limit=limit, tools=tools, reasoning=reasoning
    )
    counts = run(side, talks, out, template_args=arguments, source=conversations)
    say(
        f"{out}: {counts.documents} documents, {counts.skipped} conversations skipped, "
        f"{counts.learned_tokens:,} tokens to learn in {counts.turns} answers; not checked: that "
        f"{target} wrote them"
    )
    for why, number in counts.reasons.most_common():
        say(f"  {number} {why}")
    after_answers(target, out)


def convert(
    source: Annotated[
        str, Argument(callback=HEAD_CHECK, help="a head: folder, run folder or Hub id, any layout")
    ],
    out: Annotated[Path, Argument(callback=NEW_CHECK, help="new folder, or GGUF file, to write")],
    to: Annotated[
        str,
        Option(
            "--to",
            help="draftheads, vllm, sglang, gguf, openvino, mlx, speculators or mtp",
        ),
    ],
    target: Annotated[
        str | None, Option(help="the head's target, if it is needed; for gguf, its GGUF file")
    ] = None,
    adapter: MaybeLora = None,
    dtype: HeadDtype = "auto",
    device: Device = None,
    link: Annotated[bool, Option("--link", help="for mtp: hard links for files that stay")] = False,
) -> None:
    """Convert a head to or from the layout of vLLM, SGLang, llama.cpp and others, bit by bit.

    --target is needed where a layout leaves something to the target. mtp: the target's checkpoint
    with the head as its own MTP layer.
    """
    from draftheads.heads.formats.hub import CARD, open_head
    from draftheads.heads.formats.llamacpp import TargetFile
    from draftheads.scripts.convert import converted, with_mtp

    if to == "gguf":
        file = TargetFile.open(target) if target else None
        say(converted(source, out, to, target_file=file, dtype=dtype))
        say(f"next: the llama-server command in {open_head(source).path / CARD}", sys.stderr)
        return
    loaded = None
    if target:
        place = Place(dtype, device, lora=adapter)
        loaded = load_target(target, place, template_args=prepared())
    if to == "mtp":
        say(with_mtp(source, out, loaded, link=link, dtype=dtype))
        say_next("chat", "--target", out, "--head", "mtp")
        return
    say(converted(source, out, to, loaded, dtype=dtype))
    if to == "draftheads":
        words = target_options(target, adapter) or local_options(open_head(source).facts)
        say_next("chat", "--head", out, *words)
    else:
        say(f"next: the command in {out / CARD}", sys.stderr)


def merge(
    head: Annotated[
        str,
        Argument(callback=HEAD_CHECK, help="heads with an adapter: folder, run folder or Hub id"),
    ],
    out: Annotated[
        Path, Argument(callback=NEW_CHECK, help="new folder to write: the model, with heads/ in it")
    ],
    target: MaybeTarget = None,
    adapter: MaybeLora = None,
    dtype: Dtype = "auto",
) -> None:
    """Write the adapted target of heads (Medusa-2's, or a LoRA's) as a plain model that any engine
    loads.

    Its heads are in OUT/heads. --dtype auto is the target's own.
    """
    import transformers

    from draftheads.scripts.convert import merged

    transformers.logging.disable_progress_bar()
    say(merged(head, out, target, dtype, adapter))
    say_next("chat", "--target", out, "--head", out / "heads")
