"""The commands that make a training set. Heavy imports wait until a command runs, so that --help is
instant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Context, Exit, Option

from draftheads.infer.pipeline.loading import load_target
from draftheads.infer.threads import choose_threads
from draftheads.scripts.options import (
    DATA_CHECK,
    HEAD_CHECK,
    NEW_CHECK,
    OUT_CHECK,
    PROMPT_CHECK,
    TARGET_CHECK,
    ApiKeyEnv,
    Placement,
    Prompts,
    PromptSet,
    Reasoning,
    Revision,
    Sampling,
    Seed,
    ServerModel,
    TargetName,
    TemplateArgs,
    names,
    say_next,
    target_options,
)
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.target.model import Target
    from draftheads.infer.remote import ServerOptions

SETS = {
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
        "math500": "500 problems of contests",
        "mbpp": "257 functions to write, sanitized",
        "speed-bench": "its own questions in 11 categories",
    },
}
"""Ready sets of prompts, by what they are for."""
HOW_MANY = """How many? A few hundred for a first Medusa or sequential head. Medusa heads gain
little from more, sequential heads still gain at a million tokens. EAGLE-3's
paper used about 500,000. Best are prompts like those that you will ask.
--limit N takes the first N."""


def prompts() -> None:
    """List ready sets of prompts, and say how many are needed."""
    for purpose, sets in SETS.items():
        say(purpose)
        for name, content in sets.items():
            say(f"  {name:30}{content}")
    say(f"\n{HOW_MANY}")


TOGETHER = 64
"""Questions that are written together."""


@dataclass(frozen=True)
class Answers:
    """Answers."""

    max_new_tokens: Annotated[int, Option(min=1, help="tokens per answer")] = 512
    batch_size: Annotated[int, Option(min=1, help="prompts answered together")] = 32
    reasoning: Reasoning = "keep"
    seed: Seed = 0


SERVER = "OpenAI-compatible server: http://HOST:PORT; repeatable, all of one model"


@dataclass(frozen=True)
class AnswerServers:
    """Servers that answer instead of this process."""

    server_model: ServerModel = None
    api_key_env: ApiKeyEnv = None
    server: Annotated[list[str] | None, Option(help=SERVER)] = None
    concurrency: Annotated[int, Option(min=1, help="concurrent requests to each server")] = 32

    def options(self, urls: list[str]) -> ServerOptions:
        """The options by which these servers are asked."""
        from draftheads.infer.remote import ServerOptions

        return ServerOptions(
            urls=urls,
            model=self.server_model,
            api_key_env=self.api_key_env,
            concurrency=self.concurrency,
        )


def check_places(context: Context) -> None:
    """Raise ValueError for options of servers without --server, and, with it, for options of a
    target in this process, which mean nothing then.
    """
    source: Callable[[str], Any] = context.get_parameter_source
    options = {str(each.name): each.opts[0] for each in context.command.params}
    typed = {name for name in options if source(name).name == "COMMANDLINE"}
    useless = typed & names(AnswerServers)
    line = "expected --server, too, got none; pass it"
    if "server" in typed:
        useless = typed & {"head", "lora"}
        line = "omit these with --server, the server decodes"
    if useless:
        raise ValueError(f"{', '.join(sorted(options[name] for name in useless))}: {line}")


def questions(
    target: TargetName,
    out: Annotated[Path, Option(callback=NEW_CHECK, help="new prompt file to write, .jsonl")],
    placement: Placement,
    count: Annotated[int, Option(min=1, help="questions")] = 2000,
    seed: Seed = 0,
    revision: Revision = None,
) -> None:
    """Let a chat model ask itself questions: prompts for those who have none.

    They are as spread as what the model was made for; prompts like yours are better. Ctrl-C keeps
    what is there.
    """
    from draftheads.heads.files import write_text
    from draftheads.infer.engine import Speculator
    from draftheads.train.data.questions import questions as ask_itself

    engine = Speculator(answering_target(target, revision, placement, TOGETHER))
    out.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    try:
        for question in ask_itself(engine, count, TOGETHER, seed):
            lines.append(json.dumps({"prompt": question}, ensure_ascii=False) + "\n")
    finally:
        if lines:
            write_text(out, "".join(lines))
            say(f"{out}: {len(lines):,} of {count:,} questions")
    words = target_options(target, placement.lora)
    say_next("distill", *words, "--prompts", out, "--out", out.with_suffix(""))


def distill(
    context: Context,
    target: TargetName,
    prompts: Prompts,
    out: Annotated[
        Path, Option(callback=OUT_CHECK, help="folder to write; an unfinished one is resumed")
    ],
    questions: PromptSet,
    answers: Answers,
    servers: AnswerServers,
    placement: Placement,
    sampling: Sampling = Sampling(temperature=0.3),
    head: Annotated[
        str | None, Option(callback=HEAD_CHECK, help="draft heads, which change no answer")
    ] = None,
    revision: Revision = None,
    template_args: TemplateArgs = "{}",
) -> None:
    """Let the target answer prompts; its own tokens become the training set. Exit code 1: some
    prompts are unanswered.
    """
    from draftheads.heads.formats.hub import load_head
    from draftheads.infer.engine import Speculator
    from draftheads.train.data import distill as distillation
    from draftheads.train.data.prompts import read_prompts
    from draftheads.train.data.server import ServedTarget

    check_places(context)
    options = distillation.DistillOptions(
        out=out,
        source=prompts,
        template_args=questions.template_args(template_args),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=answers.max_new_tokens,
        batch_size=answers.batch_size,
        reasoning=answers.reasoning,
        seed=answers.seed,
    )
    texts = read_prompts(
        prompts, split=questions.split, limit=questions.limit, tools=questions.tools
    )
    answerer: distillation.Answerer
    if servers.server:
        answerer = ServedTarget(target, servers.options(servers.server), revision)
    else:
        loaded = answering_target(target, revision, placement, answers.batch_size)
        drafts = load_head(head, target=loaded) if head else None
        answerer = distillation.LocalAnswerer(Speculator(loaded, drafts), answers.batch_size)
    report = distillation.distill(answerer, texts, options)
    if report.missing or (report.complete and not report.counts.done):
        raise Exit(1)
    if report.complete:
        say_init(target, out, placement.lora)


def answering_target(
    target: str, revision: str | None, placement: Placement, batch_size: int
) -> Target:
    """A target that writes data, in a dtype that no measurement chose."""
    from draftheads.heads.target.load import answering_dtype
    from draftheads.heads.target.placement import default_device

    place = placement.place()
    if place.dtype == "auto" and (place.device or default_device()) == "cpu":
        place = replace(place, dtype=answering_dtype(target, revision))
    loaded = load_target(target, place, revision)
    choose_threads(placement.threads, loaded, batch_size)
    return loaded


def say_init(target: str, out: Path, lora: str | None = None) -> None:
    """Training on answers needs a recipe for this target."""
    words = target_options(target, lora)
    say_next("init", *words, "--data", out, "--out", f"{out.absolute().name}.yaml")


def import_answers(
    conversations: Annotated[
        str, Argument(callback=PROMPT_CHECK, help="a file, folder or Hub data set with answers")
    ],
    target: TargetName,
    out: Annotated[Path, Option(callback=NEW_CHECK, help="new folder to write")],
    subset: PromptSet = PromptSet(tools="keep"),
    reasoning: Reasoning = "keep",
    learn: Annotated[Literal["all", "last"], Option(help="answers of each conversation")] = "all",
    model: Annotated[str, Option(help="its name in agents' sessions; default: TARGET's")] = "",
    template_args: TemplateArgs = "{}",
) -> None:
    """Make a training set from conversations that the target wrote earlier.

    Heads learn the assistant's turns with their end tokens; reasoning and tool calls, too, unless
    dropped, and no message with weight 0 or train false. Loads a tokenizer, no weights, so it is
    not checked that the target wrote them.
    """
    from draftheads.train.data.imports import import_answers as run
    from draftheads.train.data.prompts import read_conversations
    from draftheads.train.data.text_side import TextSide

    side = TextSide.load(target)
    arguments = subset.template_args(template_args)
    talks = read_conversations(
        conversations,
        split=subset.split,
        limit=subset.limit,
        tools=subset.tools,
        learn=learn,
        model=model or target,
    )
    counts = run(
        side, talks, out, template_args=arguments, source=conversations, reasoning=reasoning
    )
    say(f"{out}; not checked: that {target} wrote it")
    for line in counts.lines():
        say(line)
    say_init(target, out)


def data_preview(
    path: Annotated[Path, Argument(callback=DATA_CHECK, help="a distillation folder")],
    target: Annotated[
        str | None, Option(callback=TARGET_CHECK, help="default: the one in the manifest")
    ] = None,
    count: Annotated[int, Option("-n", min=0, help="documents to print")] = 3,
    check: Annotated[bool, Option("--check", help="compare a folder with its checksums")] = False,
) -> None:
    """Print documents with the target's tokens marked, and a summary.

    Marks are colours on a terminal, else [[ and ]].
    Loads a tokenizer, no weights; --check loads neither.
    """
    if check:
        from draftheads.train.data.answers import check as compare

        counts = compare(path)
        say(f"{path}: all as it was written: {counts.lines()[0]}")
        return
    from draftheads.heads.terminal import SafeConsole
    from draftheads.scripts.printing import Pen, show_answers
    from draftheads.train.data.answers import read_manifest
    from draftheads.train.data.text_side import TextSide

    manifest = read_manifest(path)
    origin = manifest.target
    side = TextSide.load(target or origin.name, None if target else origin.revision)
    out = SafeConsole(soft_wrap=True)
    pen = Pen(side, is_plain=not out.is_terminal or out.no_color)
    show_answers(path, pen, count, out)
    say_init(side.name, path)
