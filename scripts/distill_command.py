"""`draftheads distill`: what it takes, and how that becomes a distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftheads.scripts.options import (
    Device,
    Dtype,
    Prompts,
    PromptWords,
    Seed,
    TargetName,
    Temperature,
    TopK,
    TopP,
    json_object,
    load_target,
)
from draftheads.scripts.server_options import ApiKeyEnv, Concurrency, Server, ServerModel, connect


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
