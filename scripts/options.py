"""Options that several commands share, and what their values mean. Heavy imports wait until a
command runs, so that --help is instant.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Context, Option

from draftheads.arguments import (
    check_folder,
    check_new,
    check_path,
    head_folder,
    nearest,
    takes_files,
)
from draftheads.recipes import find_recipe
from draftheads.train.data.prompts import check_source

if TYPE_CHECKING:
    from draftheads.heads.tree import Tree
    from draftheads.infer.accept import Acceptance
    from draftheads.infer.engine import DrafterSource


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


def check_head(source: str | Path) -> None:
    """Raise FileNotFoundError if a part of --head names no drafter, and no folder or Hub id."""
    name = str(source)
    parts = [name]
    if not os.path.isdir(os.path.expanduser(source)):
        parts = name.split("+")
        near = meant(name)
        if near != name:
            raise FileNotFoundError(f"--head: no drafter is called {name}; did you mean {near}?")
    for part in parts:
        kind, _, path = part.partition(":")
        if kind == "model":
            check_path(path)
        elif kind not in ("ngram", "early-exit", "mtp"):
            head_folder(part)


def meant(name: str) -> str:
    """The name of drafters that another one means, such as n-gram, early_exit:4 or HEAD,ngram."""
    parts = []
    is_meant = False
    for part in re.split("[+,]", name):
        kind, colon, value = part.strip().partition(":")
        drafter = MISSPELT.get(re.sub("[-_ ]", "", kind.lower()))
        is_meant = is_meant or drafter is not None
        parts.append((drafter or kind) + colon + value)
    return "+".join(parts) if is_meant else name


def check_either(head: str | None, target: str | None) -> None:
    """Raise ValueError without any model."""
    if head is None and target is None:
        raise ValueError("expected --head or --target, got neither; pass one")


SERVED = {"server_plain", "server_model", "api_key_env", "concurrency"}
"""Parameters of `bench --server` alone."""
COMMON = {"server", "target", "prompts", "max_new_tokens", "limit", "repetitions", "prompt_words"}
COMMON |= {"temperature", "top_p", "top_k", "json_out", "template_args", "revision", "seed"}
"""Parameters of every `bench`; the rest is for heads in this process."""


def is_served(context: Context) -> bool:
    """Whether `bench` measures servers. Raises ValueError for options that are not for what it
    measures, and for those that it lacks.
    """
    words = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    check_places(context, SERVED, words.keys() - SERVED - COMMON, "the server decodes")
    served = is_typed(context, "server")
    missing = [words[name] for name in ("target", "head") if not is_typed(context, name)]
    if missing and not served:
        raise ValueError(
            f"bench: expected --target and --head, or --server, got no {' and no '.join(missing)}; "
            "pass them"
        )
    return served


def check_places(context: Context, remote: Set[str], local: Set[str], reason: str) -> None:
    """Raise ValueError for `remote` parameters without --server, and for `local` ones with it,
    which mean nothing then for this reason.
    """
    served = is_typed(context, "server")
    useless = local if served else remote
    options = [each for each in context.command.params if each.name in useless]
    others = [each.opts[0] for each in options if is_typed(context, each.name)]
    if others and served:
        raise ValueError(f"{', '.join(others)}: omit these with --server, {reason}")
    if others:
        raise ValueError(f"{', '.join(others)}: expected --server, too, got none; pass it")


def is_typed(context: Context, name: str | None) -> bool:
    """Whether a parameter stands on the command line."""
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


def check_file(file: Path) -> None:
    """Raise ValueError for a file that cannot be written: before anything is measured."""
    folder = nearest(file.absolute().parent)
    if not takes_files(folder):
        raise ValueError(f"{file}: expected a folder that can be written, {folder} is not one")
    if file.is_dir():
        raise ValueError(f"{file}: expected a file to write, got a folder; add a file's name")
    if file.is_symlink() or (file.exists() and not file.is_file()):  # it would be replaced
        raise ValueError(f"{file}: expected a file to write, got a link or a device; give another")


MISSPELT = {"ngram": "ngram", "ngrams": "ngram", "earlyexit": "early-exit"}
"""Names of drafters without marks and capitals -> as they are."""

Keep = Literal["keep", "drop"]

TargetName = Annotated[
    str, Option("--target", callback=early(check_path), help="target model: a folder or a Hub id")
]
LORA_CHECK = early(lambda source: head_folder(source, "PEFT adapter"))
LORA = """LoRA of the target in PEFT's format, to be merged into it: a folder or a Hub id
(user/name@revision); default: without --target, the one the head records"""
MaybeLora = Annotated[str | None, Option("--adapter", callback=LORA_CHECK, help=LORA)]
MaybeTarget = Annotated[
    str | None,
    Option("--target", callback=early(check_path), help="default: the one the head records"),
]
HEAD = """head folder, run folder or Hub id (user/name@revision); mtp: the target's own,
mtp:N: from N tokens;
ngram, model:PATH, early-exit:K; or several of these joined by +"""
HEAD_CHECK = early(check_head)
Head = Annotated[str, Option(callback=HEAD_CHECK, help=HEAD)]
MaybeHead = Annotated[
    str | None, Option(callback=HEAD_CHECK, help=f"{HEAD}; default: the plain model")
]
MaybeHeads = Annotated[
    list[str] | None, Option(callback=HEAD_CHECK, help="as for chat; repeatable")
]
BenchTarget = Annotated[
    str | None,
    Option("--target", callback=early(check_path), help="model; default: the one --server serves"),
]
BENCH_SERVER = """measure a head where it is served: http://HOST:PORT of a server with drafts, such
as vLLM's with --speculative-config"""
Revision = Annotated[str | None, Option(help="the target's branch, tag or commit on the Hub")]
PROMPTS = """a prompt file, a folder of them, a Hub data set, or spec-bench, mt-bench, humaneval,
gsm8k"""
BATCH_TOKENS = "limit of prompts answered together x longest prompt and answer"
PROMPT_CHECK = early(check_source)
Prompts = Annotated[str, Option(callback=PROMPT_CHECK, help=PROMPTS)]
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
AnswerTokens = Annotated[int, Option(min=1, help="tokens per answer")]
Repetitions = Annotated[int, Option(min=1, help="runs of every prompt")]
MaybeNodes = Annotated[int | None, Option(min=1, help="draft nodes per step")]
MaybeTree = Annotated[str | None, Option(help="a tree instead of the head's own")]
TREES = """4,2,1 or [[0],[0,0]] or nodes=16,depth=5,top_k=4 (not Medusa), NAME@TREE for one head;
default: the heads' own; repeatable"""
Trees = Annotated[list[str] | None, Option(help=TREES)]
Dtypes = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Annotated[Dtypes, Option()]
HeadDtype = Annotated[Dtypes, Option(help="of the written head; auto: as it is")]
BITS = """quantise the target: 8 (int8) on a CPU, 8 or 4 on a GPU (bitsandbytes)"""
Bits = Annotated[Literal[8, 4] | None, Option(help=BITS)]
Device = Annotated[str | None, Option(help="e.g. cuda:0; default: cuda, else mps, else cpu")]
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
Recipe = Annotated[
    Path, Argument(callback=early(find_recipe), help="a recipe, e.g. recipes/demo-medusa.yaml")
]
OUT_CHECK = early(check_folder)
NEW_CHECK = early(check_new)
Overrides = Annotated[list[str] | None, Argument(help="key.path=value ...")]
FILE_CHECK = early(check_file)
Json = Annotated[Path | None, Option("--json", callback=FILE_CHECK, help="write the figures here")]


def rule(
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    *,
    typical: bool = False,
    seed: int = 0,
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


def check_writable_head(source: str, option: str) -> None:
    """Raise ValueError for a head that is not on this machine or in another layout: nothing can be
    written into its config and card. option: what asks for that.
    """
    from draftheads.heads.formats.hub import open_head

    if not Path(source).is_dir():
        raise ValueError(
            f"{option}: expected a head folder on this machine, got {source}; a head of the Hub is "
            "downloaded with `hf download`, other drafters have no folder"
        )
    if not open_head(source).facts.is_ours:
        raise ValueError(
            f"{option}: expected a head in this project's own layout, got {source}; "
            f"draftheads convert {source} DIR --to draftheads writes one"
        )


def write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures of a --json option, if there is one."""
    from draftheads.heads.files import write_text

    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(figures, indent=2) + "\n")
