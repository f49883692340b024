"""Options that several commands share, in dataclasses by what they are about, and the checks of
their values. Heavy imports wait until a command runs, so that --help is instant.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from typer import Argument, Context, Option

from draftheads.arguments import (
    check_answers,
    check_folder,
    check_new,
    head_folder,
    nearest,
    takes_files,
    text_files,
)
from draftheads.infer.pipeline.loading import Place
from draftheads.recipes import check_target, find_recipe, head_path
from draftheads.train.data.prompts import check_source, read_tools
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.tree import Tree
    from draftheads.infer.accept import Acceptance
    from draftheads.infer.sources import DrafterSource


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer reads it: a parameter that is a dataclass is replaced by its fields, which
    --help shows together, with the first words of its docstring as their title.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += parameters_of(groups[name], parameter.default)
        else:
            parameters.append(
                parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    @wraps(command)
    def called(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each: values.pop(each) for each in names(group)})
        command(**values)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return called


def parameters_of(group: Any, own: Any) -> Iterator[Parameter]:
    """The fields of a dataclass as parameters. own: an instance, whose values are the defaults of
    one command; else the fields' own are.
    """
    for name, hint in get_type_hints(group, include_extras=True).items():
        option = copy(hint.__metadata__[0])  # a command may have the same option without a group
        option.rich_help_panel = group.__doc__.partition(".")[0]
        yield Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=getattr(own, name, getattr(group, name, Parameter.empty)),
            annotation=Annotated[hint.__origin__, option],
        )


def names(*groups: Any) -> set[str]:
    """The parameters that stand for dataclasses."""
    return {field.name for group in groups for field in fields(group)}


def early(check: Callable[[Any], object]) -> Callable[[Context, Any], Any]:
    """A callback that checks a value, or each of a list, while the command line is read: a mistake
    is said before torch is loaded.
    """

    def callback(context: Context, value: Any) -> Any:
        if value is not None and not context.resilient_parsing:  # while the shell completes a word
            for each in value if isinstance(value, list) else [value]:
                check(each)
        return value

    return callback


DRAFTERS = "ngram", "retrieve", "mtp", "model"
"""Names for --head, besides those of folders and Hub ids."""


def check_head(source: str | Path) -> None:
    """Raise FileNotFoundError if a part of --head names no drafter, and no folder or Hub id."""
    name = str(source)
    is_folder = os.path.isdir(os.path.expanduser(name))
    for part in [name] if is_folder else name.split("+"):
        kind, _, path = part.partition(":")
        if is_folder or kind not in DRAFTERS:
            head_folder(head_path(part))
        elif kind == "model":
            check_target(path)
        elif kind == "retrieve":
            text_files(part)


def check_file(file: Path) -> None:
    """Raise ValueError for a file that cannot be written: before anything is measured."""
    folder = nearest(file.absolute().parent)
    if not takes_files(folder):
        raise ValueError(f"{file}: expected a folder that can be written, {folder} is not one")
    if str(file) == "-":
        raise ValueError("expected a file to write, got -, and stdout has the table; give a name")
    if file.is_symlink() or (file.exists() and not file.is_file()):  # it would be replaced
        raise ValueError(
            f"{file}: expected a file to write, got a folder, a link or a device; give another name"
        )


HEAD_CHECK = early(check_head)
PROMPT_CHECK = early(check_source)
TARGET_CHECK = early(check_target)
DATA_CHECK = early(check_answers)
OUT_CHECK = early(check_folder)
NEW_CHECK = early(check_new)

TargetName = Annotated[
    str,
    Option(callback=TARGET_CHECK, help="target model: a folder, a Hub id, or smollm2"),
]
MaybeTarget = Annotated[
    str | None,
    Option(callback=TARGET_CHECK, help="default: the one the head records"),
]
LORA_CHECK = early(lambda source: head_folder(source, "PEFT adapter"))
LORA = """LoRA of the target in PEFT's format, to be merged into it: a folder or a Hub id
(user/name@revision); default: without --target, the one the head records"""
Lora = Annotated[str | None, Option("--adapter", callback=LORA_CHECK, help=LORA)]
Revision = Annotated[str | None, Option(help="the target's branch, tag or commit on the Hub")]
HEAD = """head folder, run folder or Hub id (user/name@revision); mtp: the target's own,
mtp:N: from N tokens;
ngram, retrieve:FILES, model:PATH; or several of these joined by +"""
PROMPTS = """a prompt file, a folder of them, a Hub data set, or spec-bench, mt-bench, speed-bench,
humaneval, mbpp, gsm8k, math500"""
Prompts = Annotated[str, Option(callback=PROMPT_CHECK, help=PROMPTS)]
REASONING = "of the answers: keep learns it, drop has it as context, only learns nothing else"
Reasoning = Annotated[Literal["keep", "drop", "only"], Option(help=REASONING)]
TOOLS = """tool calls and results in conversations, and the column of tools; FILE.json: keep, and
these tools for all"""
TemplateArgs = Annotated[str, Option(help="chat template variables, as JSON")]
MaybeTemplateArgs = Annotated[
    str | None,
    Option(help="chat template variables, as JSON; default: the head's data's"),
]
Dtypes = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Annotated[Dtypes, Option()]
Device = Annotated[str | None, Option(help="e.g. cuda:0; default: cuda, else mps, else cpu")]
Threads = Annotated[int | None, Option(min=1, max=1024, help="CPU threads; default: the fastest")]
Seed = Annotated[int, Option(min=-(2**62), max=2**62, help="for all sampling")]  # int64
RecipeFile = Annotated[
    Path, Argument(callback=early(find_recipe), help="a recipe, e.g. recipes/demo-medusa.yaml")
]
Overrides = Annotated[list[str] | None, Argument(help="key.path=value ...")]
ServerModel = Annotated[str | None, Option(help="the server's name for the target")]
ApiKeyEnv = Annotated[str | None, Option(help="environment variable with the server's key")]
Json = Annotated[
    Path | None, Option("--json", callback=early(check_file), help="write the figures here")
]


@dataclass(frozen=True)
class Placement:
    """Target on this machine."""

    lora: Lora = None
    dtype: Dtype = "auto"
    device: Device = None
    threads: Threads = None

    def place(
        self, bits: Literal[8, 4] | None = None, engine: Literal["onnx", "torch"] | None = None
    ) -> Place:
        """Where and how the target is loaded."""
        return Place(
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            bits=bits,
            engine=engine,
            lora=self.lora,
            report=say_beside,
        )


BITS = """quantise the target: 8 (int8) on a CPU, 8 or 4 on a GPU (bitsandbytes)"""


Bits = Annotated[Literal[8, 4] | None, Option(help=BITS)]
Engine = Annotated[
    Literal["onnx", "torch"] | None,
    Option(help="what runs int8 layers on a CPU; default: onnx (ONNX Runtime) where it can"),
]


@dataclass(frozen=True)
class Speed:
    """Speed."""

    bits: Bits = None
    engine: Engine = None
    compile: Annotated[
        bool, Option("--compile", help="compile steps (takes a minute at first)")
    ] = False


@dataclass(frozen=True)
class Lossy:
    """Acceptance by other rules."""

    lenient: Annotated[
        str,
        Option(help="also keep what the target nearly chose, as in top=3,gap=1 (nats): LOSSY"),
    ] = ""

    typical: Annotated[bool, Option("--typical", help="typical acceptance: faster, but LOSSY")] = (
        False
    )


@dataclass(frozen=True)
class Sampling:
    """Sampling."""

    temperature: Annotated[float, Option(min=0.0, help="0 is greedy")] = 0.0
    top_p: Annotated[float, Option(min=0.0, max=1.0, help="probability mass to keep")] = 1.0
    top_k: Annotated[int, Option(min=0, help="tokens to keep; 0 keeps all")] = 0

    def rule(self, seed: int, lossy: Lossy | None = None) -> Acceptance:
        """The acceptance rule that these options request."""
        from draftheads.infer.accept import Greedy, Sampled
        from draftheads.infer.lossy import Typical

        lossy = lossy or Lossy()
        rule: Acceptance = Greedy()
        if lossy.lenient:
            if lossy.typical or self.temperature:
                raise ValueError(
                    "--lenient: expected greedy decoding by one rule, got it with "
                    f"{'--typical' if lossy.typical else '--temperature'}; leave one out"
                )
            rule = parsed_lenient(lossy.lenient)
        elif lossy.typical:
            rule = Typical(temperature=self.temperature or 0.7)
        elif self.temperature:
            rule = Sampled(self.temperature, self.top_p, self.top_k)
        rule.seed(seed)
        return rule


def parsed_lenient(text: str) -> Acceptance:
    """The value of --lenient. Raises ValueError as `Lenient`, and for other names."""
    from draftheads.infer.lossy import Lenient

    kinds: dict[str, type] = {"top": int, "gap": float, "surprise": float}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            values[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise ValueError(
                f"--lenient: expected top (a whole number), gap and surprise, got {part!r}; as in "
                "top=3,gap=1"
            ) from None
    return Lenient(**values)


@dataclass(frozen=True)
class PromptSet:
    """Reading of prompts."""

    limit: Annotated[
        int | None, Option(min=1, help="use only the first N prompts or conversations")
    ] = None
    split: Annotated[
        str | None, Option(help="of a Hub data set; default: the set's own, else train")
    ] = None
    tools: Annotated[
        str, Option(callback=early(read_tools), metavar="keep|drop|FILE", help=TOOLS)
    ] = "drop"

    def template_args(self, text: str) -> dict[str, Any]:
        """The variables of --template-args, with the tools of a file."""
        tools = read_tools(self.tools)
        variables = parsed_template_args(text) or {}
        return variables | ({"tools": tools} if tools else {})


def parsed_template_args(text: str | None) -> dict[str, Any] | None:
    """The value of --template-args, if any. Raises ValueError as `template_variables`."""
    if text is None:
        return None
    from draftheads.heads.target.load import template_variables

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # json's message names no option
        value = text
    try:
        return template_variables(value)
    except ValueError as error:
        raise ValueError(f"--template-args: {error}") from error


def chosen_tree(drafts: DrafterSource | None, tree: str | None, nodes: int | None) -> Tree | None:
    """The tree that --tree and --nodes ask for; default: the drafts' own. Raises ValueError."""
    from draftheads.heads.tree import parse_tree

    if drafts is None:
        if tree or nodes:
            raise ValueError("--tree and --nodes: expected drafts, got none; pass --head, too")
        return None
    shape = parse_tree(tree) if tree else drafts.tree
    return shape.resized(nodes) if nodes else shape


def write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures of a --json option, if there is one."""
    from draftheads.heads.files import write_json

    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures)


def say_beside(line: object) -> None:
    """Print a line beside a command's own output."""
    say(line, sys.stderr)


def say_compiling(compile: bool) -> None:
    """Say why the first answers take long."""
    if compile:
        say_beside("compiling takes about a minute per candidate, and less the next time")


def say_next(*words: object) -> None:
    """Print the command of draftheads to type next: each command that succeeds ends with one."""
    say_beside(f"next: {shlex.join(['draftheads', *map(str, words)])}")


def target_options(target: str | None, lora: str | None) -> list[str]:
    """The options that load the same target again."""
    return [*(["--target", target] if target else []), *(["--adapter", lora] if lora else [])]
