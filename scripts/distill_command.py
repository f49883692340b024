"""`draftheads distill`: what it takes, and how that becomes a distillation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftheads.scripts.options import (
    Device,
    Dtype,
    Limit,
    Prompts,
    PromptWords,
    Revision,
    Seed,
    Split,
    Streaming,
    TargetName,
    Temperature,
    TemplateArgs,
    Threads,
    Tools,
    TopK,
    TopP,
    choose_threads,
    keep_or_drop,
    load_target,
    template_variables,
)
from draftheads.scripts.server_options import ApiKeyEnv, Concurrency, Server, ServerModel, connect

if TYPE_CHECKING:
    from draftheads.train.data.distill import DistillReport

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
