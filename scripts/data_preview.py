"""`draftheads data-preview` and `import-answers`: see what heads would learn from, and bring what
the target wrote earlier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from draftheads.scripts.options import TargetName, json_object


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
    template_args: Annotated[str, typer.Option(help="chat template variables, as JSON")] = "{}",
) -> None:
    """Print what heads would learn from: documents with the target's tokens marked, and a summary.

    Loads a tokenizer, no weights. Of prompts: how the first of them render.
    """
    from draftheads.scripts.preview import Pen, show_answers, show_prompts, text_side
    from draftheads.train.data.answers import MANIFEST
    from draftheads.train.data.conversation import Renderer
    from draftheads.train.data.prompts import read_prompts

    side = text_side(target, path)
    out = Console(highlight=False, soft_wrap=True)
    plain = plain or not out.is_terminal or out.no_color
    pen = Pen(side, plain=plain, boundaries=boundaries)
    if (Path(path) / MANIFEST).is_file():
        show_answers(Path(path), side, pen, count, out)
    else:
        renderer = Renderer(side, json_object("--template-args", template_args))
        show_prompts(read_prompts(path, limit=max(count, 1)), renderer, pen, out)


def import_answers(
    conversations: Annotated[
        str, typer.Argument(help="a file, a folder or a Hub data set, answers included")
    ],
    target: TargetName,
    out: Annotated[Path, typer.Option("--out", help="folder to write, a new one")],
    tools: Annotated[str, typer.Option(help="tool calls and their results: keep or drop")] = "keep",
    reasoning: Annotated[
        str, typer.Option(help="<think> ... </think> in answers: keep or drop")
    ] = "keep",
    template_args: Annotated[str, typer.Option(help="chat template variables, as JSON")] = "{}",
) -> None:
    """Make a training set of conversations that the target wrote earlier, without asking it again.

    Loads a tokenizer, no weights, so that the target wrote the answers is not checked.
    """
    from draftheads.train.data.imports import import_answers as run
    from draftheads.train.data.prompts import read_conversations
    from draftheads.train.data.textside import TextSide
    from draftheads.train.data.turns import check_tools

    side = TextSide.load(target)
    arguments = json_object("--template-args", template_args)
    keep_tools, keep_reasoning = _choice("--tools", tools), _choice("--reasoning", reasoning)
    found = read_conversations(conversations, tools=keep_tools, reasoning=keep_reasoning)
    if any(message["role"] == "tool" for messages in found for message in messages):
        check_tools(side.tokenizer, arguments)
    counts = run(side, found, out, template_args=arguments, source=conversations)
    print(
        f"{out}: {counts.done} documents, {counts.skipped} conversations skipped, "
        f"{counts.learned_tokens:,} tokens to learn in {counts.turns} answers; not checked: that "
        f"{target} wrote them"
    )
    for why, number in counts.reasons.most_common():
        print(f"  {number} {why}")


def _choice(option: str, value: str) -> Literal["keep", "drop"]:
    choices: dict[str, Literal["keep", "drop"]] = {"keep": "keep", "drop": "drop"}
    if value not in choices:
        raise ValueError(f"{option}: expected keep or drop, got {value!r}")
    return choices[value]
