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
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from draftheads.train.entry import one_line

if TYPE_CHECKING:
    from draftheads.heads.base import DraftHead
    from draftheads.heads.target import Target
    from draftheads.infer.accept import Acceptance

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
