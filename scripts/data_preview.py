"""`draftheads data-preview` and `import-answers`: see what heads would learn from, and bring what
the target wrote earlier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftheads.scripts.options import (
    Limit,
    Split,
    Streaming,
    TargetName,
    TemplateArgs,
    Tools,
    keep_or_drop,
    template_variables,
)


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
    from draftheads.train.data.prompts import Hub, read_prompts
    from draftheads.train.data.turns import check_tools, with_tools

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
    from draftheads.train.data.prompts import Hub, read_conversations
    from draftheads.train.data.textside import TextSide
    from draftheads.train.data.turns import check_tools, with_tools

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
        f"{out}: {counts.done} documents, {counts.skipped} conversations skipped, "
        f"{counts.learned_tokens:,} tokens to learn in {counts.turns} answers; not checked: that "
        f"{target} wrote them"
    )
    for why, number in counts.reasons.most_common():
        print(f"  {number} {why}")
