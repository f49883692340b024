"""Options that several commands share, and what they stand for. Heavy imports wait until they are
used.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from draftheads.train.entry import one_line

if TYPE_CHECKING:
    from draftheads.heads.base import DraftHead
    from draftheads.heads.target import Target
    from draftheads.infer.accept import Acceptance
    from draftheads.train.data.distill import DistillReport
    from draftheads.train.data.server import ServedTarget

THREAD_TRIALS, LONG_FORWARD, WORTH_A_THREAD = 7, 0.2, 1.15
"""Forwards with either number of threads; seconds after which one trial is enough; the speedup
below which further threads only take cores from others.
"""

Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=1024,
        help="CPU threads; default: one if decoding gains no more, else all",
    ),
]
TargetName = Annotated[str, typer.Option("--target", help="target model: a folder or a Hub id")]
MaybeTarget = Annotated[
    str | None, typer.Option("--target", help="target model; default: the one the head records")
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="the target's branch, tag or commit on the Hub")
]
Prompts = Annotated[
    str, typer.Option("--prompts", help="a prompt file, a folder of them, or a Hub data set")
]
PromptWords = Annotated[
    int | None,
    typer.Option("--prompt-words", min=1, help="use the first N words of plain texts as prompts"),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="use only the first N prompts or conversations")
]
Split = Annotated[str, typer.Option("--split", help="split of a Hub data set")]
Streaming = Annotated[
    bool | None,
    typer.Option(
        "--streaming/--no-streaming",
        help="store nothing of a Hub data set, fetch what is read; default: with --limit",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16")]
Device = Annotated[
    str | None, typer.Option("--device", help="e.g. cuda:0; default: CUDA if there is one")
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="probability mass kept")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="tokens kept; 0 keeps all")]
IsTypical = Annotated[
    bool, typer.Option("--typical", help="Medusa's typical acceptance: faster, but LOSSY")
]
Seed = Annotated[
    int, typer.Option("--seed", min=-(2**62), max=2**62, help="of all draws")  # torch's are int64
]
Tools = Annotated[
    str, typer.Option("--tools", help="tool calls and their results: keep (as context) or drop")
]
TemplateArgs = Annotated[
    str, typer.Option("--template-args", help="chat template variables, as JSON")
]


def load_target(
    name: str,
    dtype: str,
    device: str | None,
    revision: str | None = None,
    heads: Sequence[str] = (),
) -> Target:
    """The target, with the adapter that `heads` were trained together with, where they were, and
    with transformers' own chatter silenced. Raises ValueError for a dtype or device there is not.
    """
    import torch
    import transformers

    from draftheads.heads.hub import shared_adapter
    from draftheads.heads.target import Target

    one_of("--dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
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


def load_head(name: str, target: Target) -> DraftHead:
    """A head for `target`."""
    from draftheads.heads.hub import load_head

    return load_head(name, target=target)


def rule(temperature: float, top_p: float, top_k: int, typical: bool, seed: int) -> Acceptance:
    """The acceptance rule that these options ask for."""
    from draftheads.infer.accept import Greedy, Sampled, Typical

    if typical:
        rule: Acceptance = Typical(temperature=temperature or 0.7)
    elif temperature == 0:
        rule = Greedy()
    else:
        rule = Sampled(temperature=temperature, top_p=top_p, top_k=top_k)
    rule.seed(seed)
    return rule


def template_variables(text: str) -> dict[str, Any]:
    """The value of --template-args. Raises ValueError where it is no JSON object, or sets what is
    set anyway.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--template-args: expected a JSON object, got {text[:80]!r} ({error}); e.g. "
            '{"enable_thinking": false}'
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"--template-args: expected a JSON object, got {text[:80]!r}")
    taken = {"conversation", "messages", "tokenize", "add_generation_prompt"}.intersection(value)
    if taken:
        raise ValueError(
            f"--template-args: expected variables of the chat template, got {', '.join(taken)}, "
            "which is set anyway; leave it out"
        )
    return value


def one_of(option: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError for an option's value that is none of the choices."""
    if value not in choices:
        expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ValueError(f"{option}: expected {expected}, got {value!r}")


def keep_or_drop(option: str, value: str) -> Literal["keep", "drop"]:
    """An option's value as one of the two. Raises ValueError when it is neither."""
    one_of(option, value, ("keep", "drop"))
    return "keep" if value == "keep" else "drop"


def spread(arguments: list[str]) -> list[str]:
    """`--head A B` as `--head A --head B`, likewise --nodes and --tree, for click."""
    spreading, out = "", []
    for argument in arguments:
        if argument.startswith("-"):
            spreading = argument if argument in ("--head", "--nodes", "--tree") else ""
            out += [] if spreading else [argument]
        else:
            out += [spreading, argument] if spreading else [argument]
    return out


def set_threads(threads: int | None) -> None:
    """Limit torch to so many CPU threads."""
    if threads:
        import torch

        torch.set_num_threads(threads)


def choose_threads(threads: int | None, target: Target, rows: int = 1) -> None:
    """As many CPU threads as the user has chosen (`--threads`, OMP_NUM_THREADS). Otherwise one,
    where forwards of `rows` tokens, measured here, gain little by more: they would only take cores
    from others. Models that take long keep all threads.
    """
    import torch

    set_threads(threads)
    available = torch.get_num_threads()
    if threads or available == 1 or "OMP_NUM_THREADS" in os.environ or target.device.type != "cpu":
        return
    tokens_B1 = torch.zeros(rows, 1, dtype=torch.long)
    seconds: dict[int, list[float]] = {1: [], available: []}
    with torch.inference_mode():
        for _ in range(THREAD_TRIALS):
            for count, measured in seconds.items():
                torch.set_num_threads(count)
                began = time.perf_counter()
                target.model(tokens_B1, use_cache=False)
                measured.append(time.perf_counter() - began)
            if seconds[available][-1] > LONG_FORWARD:
                return
    gain = median(seconds[1]) / median(seconds[available])
    torch.set_num_threads(1 if gain < WORTH_A_THREAD else available)


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """The user's mistakes, by this project's convention ValueError and OSError, end the process
    with a line and exit code 2. DRAFTHEADS_DEBUG=1 shows tracebacks.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if os.environ.get("DRAFTHEADS_DEBUG"):
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)


def _one_line(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}"
    return one_line(error)


# Options of a server that answers instead of a target in this process.


Server = Annotated[
    str | None,
    typer.Option("--server", help="OpenAI-compatible server of the target, http://HOST:PORT"),
]
ServerModel = Annotated[
    str | None, typer.Option("--server-model", help="its name for the target, if it has several")
]
ApiKeyEnv = Annotated[
    str | None, typer.Option("--api-key-env", help="environment variable that holds its key")
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", min=1, help="requests to the server at a time")
]


def connect(
    target: str,
    server: str | None,
    model: str | None,
    api_key_env: str | None,
    concurrency: int,
    revision: str | None = None,
) -> ServedTarget:
    """The target, its answers from a server. Raises ValueError or OSError without one."""
    if not server:
        raise ValueError("--server: expected http://HOST:PORT, got none; name the server's address")
    import transformers

    from draftheads.train.data.server import ServedTarget, ServerOptions

    transformers.logging.set_verbosity_error()
    options = ServerOptions(
        url=server, model=model, api_key_env=api_key_env, concurrency=concurrency
    )
    return ServedTarget(target, options, revision)


# `draftheads distill`: what it takes, and how that becomes a distillation.


Out = Annotated[Path, typer.Option(help="folder to write; an unfinished one is continued")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="tokens per answer")]
BatchSize = Annotated[int, typer.Option(min=1, help="prompts answered together")]
SkipEmpty = Annotated[bool, typer.Option("--skip-empty", help="pass over empty prompts")]
MaxTurns = Annotated[int | None, typer.Option(min=1, help="user turns per conversation")]
Reasoning = Annotated[
    str,
    typer.Option(help="<think> ... </think> of the target: keep (learned) or drop (context)"),
]


def distill(
    target: TargetName,
    prompts: Prompts,
    out: Out,
    temperature: Temperature = 0.3,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    max_new_tokens: MaxNewTokens = 512,
    batch_size: BatchSize = 32,
    limit: Limit = None,
    prompt_words: PromptWords = None,
    split: Split = "train",
    streaming: Streaming = None,
    skip_empty: SkipEmpty = False,
    max_turns: MaxTurns = None,
    tools: Tools = "drop",
    reasoning: Reasoning = "keep",
    template_args: TemplateArgs = "{}",
    server: Server = None,
    server_model: ServerModel = None,
    api_key_env: ApiKeyEnv = None,
    concurrency: Concurrency = 32,
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
        reasoning=keep_or_drop("--reasoning", reasoning),
        template_args=template_variables(template_args),
    )
    hub, kept = Hub(split, streaming), keep_or_drop("--tools", tools)
    texts = read_prompts(
        prompts, hub=hub, limit=limit, prompt_words=prompt_words, skip_empty=skip_empty, tools=kept
    )
    if server or server_model or api_key_env:
        answerer = connect(target, server, server_model, api_key_env, concurrency, revision)
        return _end(run(answerer, texts, options))
    local = load_target(target, dtype, device, revision)
    choose_threads(threads or _recorded_threads(out), local, batch_size)
    return _end(run(local, texts, options))


def _recorded_threads(out: Path) -> int | None:
    """Those that a distillation was begun with: another number may round differently."""
    from draftheads.train.data.answers import MANIFEST, read_manifest

    return read_manifest(out).get("threads") if (out / MANIFEST).is_file() else None


def _end(report: DistillReport) -> None:
    if report.missing or (report.complete and not report.counts.done):
        raise typer.Exit(1)


# `draftheads plan`, `train`, `keys`, `report` and `demo`: what they take.


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
    from draftheads.train.plan import Launch, make_plan
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


# `draftheads bench` and `chat`: what they take.


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
    from draftheads.infer.bench import BenchOptions, print_report
    from draftheads.infer.bench import bench as run
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
    from draftheads.heads.tree import parse_tree
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


# `draftheads publish`: what it takes.


def publish(
    folder: Annotated[Path, typer.Argument(help="a head folder or a run folder")],
    repo_id: Annotated[str, typer.Argument(help="user/name on the Hub")],
    public: Annotated[bool, typer.Option("--public", help="make a new repository public")] = False,
    revision: Annotated[str, typer.Option("--revision", help="branch to write to")] = "main",
    licence: Annotated[
        str | None, typer.Option("--license", help="of the heads, e.g. apache-2.0")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the files and the card; send nothing")
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
    path: Annotated[
        str, typer.Argument(help="a distillation folder, or prompts (then give --target)")
    ],
    target: Annotated[
        str | None,
        typer.Option(help="whose tokenizer: a folder or Hub id; default: the manifest's"),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=0, help="documents to print")] = 3,
    plain: Annotated[
        bool, typer.Option("--plain", help="no colours: what is learned stands in [[ ]]")
    ] = False,
    boundaries: Annotated[
        bool, typer.Option("--boundaries", help="put a | between tokens")
    ] = False,
    split: Split = "train",
    tools: Tools = "drop",
    template_args: TemplateArgs = "{}",
) -> None:
    """Print what heads would learn from: documents with the target's tokens marked, and a summary.

    Loads a tokenizer, no weights. Of prompts: how the first of them render.
    """
    from draftheads.scripts.preview import Pen, show_answers, show_prompts, text_side
    from draftheads.train.data.answers import MANIFEST
    from draftheads.train.data.conversation import Renderer
    from draftheads.train.data.prompts import Hub, check_tools, read_prompts, with_tools

    side = text_side(target, path)
    out = Console(highlight=False, soft_wrap=True)
    plain = plain or not out.is_terminal or out.no_color
    pen = Pen(side, plain=plain, boundaries=boundaries)
    if (Path(path) / MANIFEST).is_file():
        show_answers(Path(path), side, pen, count, out)
    else:
        renderer = Renderer(side, template_variables(template_args))
        kept = keep_or_drop("--tools", tools)
        prompts = read_prompts(path, hub=Hub(split), limit=max(count, 1), tools=kept)
        if any(with_tools(prompt.messages or ()) for prompt in prompts):
            check_tools(side.tokenizer, renderer.template_args)
        show_prompts(prompts, renderer, pen, out)


def import_answers(
    conversations: Annotated[
        str, typer.Argument(help="a file, a folder or a Hub data set, answers included")
    ],
    target: TargetName,
    out: Annotated[Path, typer.Option("--out", help="folder to write, a new one")],
    tools: Annotated[
        str, typer.Option(help="tool calls (learned) and their results (context): keep or drop")
    ] = "keep",
    reasoning: Annotated[
        str, typer.Option(help="<think> ... </think> in answers: keep (learned) or drop (removed)")
    ] = "keep",
    limit: Limit = None,
    split: Split = "train",
    streaming: Streaming = None,
    template_args: TemplateArgs = "{}",
) -> None:
    """Make a training set of conversations that the target wrote earlier, without asking it again.

    Learned is what the assistant says: reasoning and calls of tools, unless dropped, and the end of
    each answer. Loads a tokenizer, no weights, so that the target wrote it is not checked.
    """
    from draftheads.train.data.imports import import_answers as run
    from draftheads.train.data.prompts import Hub, check_tools, read_conversations, with_tools
    from draftheads.train.data.tokenizer import TextSide

    side = TextSide.load(target)
    arguments = template_variables(template_args)
    found = read_conversations(
        conversations,
        hub=Hub(split, streaming),
        limit=limit,
        tools=keep_or_drop("--tools", tools),
        reasoning=keep_or_drop("--reasoning", reasoning),
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
