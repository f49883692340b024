"""The commands that use a head: chat and serve, what these learn with --learn, and the demo. Heavy
imports wait until a command runs, so that --help is instant.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from draftheads.arguments import check_schema, secret
from draftheads.extras import extras
from draftheads.infer.pipeline.loading import load_parts
from draftheads.scripts.doctor import data_of, documents_in
from draftheads.scripts.options import (
    HEAD,
    HEAD_CHECK,
    OUT_CHECK,
    Lossy,
    MaybeTarget,
    MaybeTemplateArgs,
    Placement,
    Sampling,
    Seed,
    Speed,
    chosen_tree,
    early,
    parsed_template_args,
    say_beside,
    say_compiling,
)
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.formats.hub import HeadFolder
    from draftheads.infer.engine import Speculator
    from draftheads.train.learn.learner import UseLearner

SchemaFile = Annotated[
    Path | None,
    Option(callback=early(check_schema), help="file with a JSON schema of the answers"),
]
LearnFolder = Annotated[
    Path | None, Option(help="where they are kept; default: draftheads/learned in your data")
]
LearnedHead = Annotated[str, Option(callback=HEAD_CHECK, help="as for chat or serve")]


@dataclass(frozen=True)
class Drafts:
    """Drafts."""

    head: Annotated[
        str | None, Option(callback=HEAD_CHECK, help=f"{HEAD}; default: the plain model")
    ] = None
    nodes: Annotated[int | None, Option(min=1, help="draft nodes per step")] = None
    tree: Annotated[str | None, Option(help="a tree instead of the head's own")] = None


@dataclass(frozen=True)
class Learning:
    """Learning from use."""

    learn: Annotated[
        bool,
        Option("--learn", help="keep questions and answers here, and train the head on them"),
    ] = False
    learn_keep: Annotated[float, Option(min=0.01, help="days after which they are deleted")] = 30.0
    learn_mb: Annotated[float, Option(min=2, help="megabytes of them, at most")] = 64.0
    learn_folder: LearnFolder = None


@dataclass(frozen=True)
class ChatSettings:
    """Dialogue."""

    system: Annotated[str | None, Option(help="system message")] = None
    max_new_tokens: Annotated[int, Option(min=1, help="tokens per answer")] = 512


def demo(
    context: Context,
    out: Annotated[
        Path, Option(callback=OUT_CHECK, help="folder for all outputs of the demo")
    ] = Path("out/demo"),
) -> None:
    """Distill, train, bench and chat on the embedded target: a few minutes of CPU, no network. The
    same command again resumes.
    """
    from draftheads.scripts.demo import demo as run

    run(out, partial(context.find_root().command.main, standalone_mode=False))


def chat(
    dialogue: ChatSettings,
    drafts: Drafts,
    sampling: Sampling,
    placement: Placement,
    speed: Speed,
    learning: Learning,
    lossy: Lossy,
    target: MaybeTarget = None,
    template_args: MaybeTemplateArgs = None,
    schema: SchemaFile = None,
    seed: Seed = 0,
) -> None:
    """Chat with the target, sped up by a head or another drafter."""
    check_either(drafts.head, target)
    from draftheads.infer.chat.repl import ChatOptions
    from draftheads.infer.chat.repl import chat as run
    from draftheads.infer.grammar import Grammar

    rule = sampling.rule(seed, lossy)
    engine = load_engine(target, drafts, placement, speed, template_args)
    constraint = None
    if schema:
        constraint = Grammar(engine.target, "json_schema", schema.read_text(encoding="utf-8"))
    options = ChatOptions(
        system=dialogue.system,
        sampling=rule,
        max_new_tokens=dialogue.max_new_tokens,
        constraint=constraint,
    )
    with learner(engine, drafts.head, learning) as (learned, background):
        run(learned, options, background=background)


@dataclass(frozen=True)
class Address:
    """Address."""

    name: Annotated[str | None, Option(help="of the model; default: the target's")] = None
    host: Annotated[str, Option(help="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0: any free one")] = 8000
    api_key_env: Annotated[
        str | None, Option(help="environment variable with a key that requests must have")
    ] = None
    allowed_host: Annotated[
        list[str] | None, Option(help="name by which it may be called; repeat for several")
    ] = None
    root_path: Annotated[str, Option(help="path under which a proxy offers it, as /model")] = ""


@dataclass(frozen=True)
class Requests:
    """Requests."""

    slots: Annotated[int, Option(min=1, max=64, help="requests at a time, and texts kept")] = 4
    waiting: Annotated[
        int, Option("--queue", min=1, help="requests that may wait; more get 429")
    ] = 64
    timeout: Annotated[float, Option(min=1, help="seconds for a request")] = 600.0


def serve(
    address: Address,
    requests: Requests,
    sampling: Sampling,
    drafts: Drafts,
    placement: Placement,
    speed: Speed,
    learning: Learning,
    target: MaybeTarget = None,
    template_args: MaybeTemplateArgs = None,
) -> None:
    """Serve the target over HTTP, as OpenAI does, with a page to chat on.

    --temperature, --top-p and --top-k are for requests that do not say.
    """
    check_either(drafts.head, target)
    from draftheads.infer.serve.app import serve as run
    from draftheads.infer.serve.service import ServeOptions

    options = ServeOptions(
        name=address.name or "",
        key=secret(address.api_key_env) if address.api_key_env else None,
        allowed_hosts=tuple(address.allowed_host or ()),
        root_path=address.root_path.rstrip("/"),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        slots=requests.slots,
        waiting=requests.waiting,
        timeout=requests.timeout,
    )
    engine = load_engine(target, drafts, placement, speed, template_args)
    if not options.name:
        model = engine.target.lora or engine.target.name
        options = replace(options, name=Path(os.path.expanduser(model)).absolute().name)
    with learner(engine, drafts.head, learning) as (learned, background):
        run(learned, options, address.host, address.port, background=background)


def check_either(head: str | None, target: str | None) -> None:
    """Raise ValueError without any model."""
    if head is None and target is None:
        raise ValueError("expected --head or --target, got neither; pass one")


def load_engine(
    target: str | None,
    drafts: Drafts,
    placement: Placement,
    speed: Speed,
    template_args: str | None,
) -> Speculator:
    """Load a target and what --head names, if anything; by default, the target is the head's."""
    from draftheads.infer.engine import Speculator

    variables = parsed_template_args(template_args)
    place = placement.place(speed.bits, speed.engine)
    model, drafter = load_parts(drafts.head, target, place, variables)
    tree = chosen_tree(drafter, drafts.tree, drafts.nodes)
    engine = Speculator(model, drafter, tree=tree, compile=speed.compile)
    say_compiling(engine.compile)
    return engine


@contextmanager
def learner(
    engine: Speculator, head: str | None, options: Learning
) -> Iterator[tuple[Speculator, UseLearner | None]]:
    """The engine, with --learn the newest head that was learned in it; and what trains this head
    while nothing is decoded. Raises ValueError unless --head names one head, for compiled steps,
    and as `UseLearner` and `HeadStore` do.
    """
    if not options.learn:
        yield engine, None
        return
    from draftheads.infer.drafters.ngram import NGramIndex
    from draftheads.infer.drafters.parts import with_memory

    with extras():
        from draftheads.train.learn.learner import Source, UseLearner, with_version
        from draftheads.train.learn.place import HeadStore, address, learning_root, place_of

    folder = learned_folder(head)
    if engine.compile:
        raise ValueError("--learn: expected no --compile, as steps would be compiled again")
    path = place_of(folder, learning_root(options.learn_folder))
    limits = {"most_mb": options.learn_mb, "keep_days": options.learn_keep}
    with closing(HeadStore(path, engine.target, head=address(folder), **limits)) as place:
        memory = NGramIndex() if "ngram" in str(head).split("+") else None
        source = Source(folder, documents_in(data_of(folder), engine.target))
        background = UseLearner(engine.target, source, place.texts, place.versions, memory)
        if place.versions.served:
            engine = with_version(engine, place.versions.served)
        if memory:
            assert engine.drafts is not None  # as --head names some
            engine = engine.with_drafts(with_memory(engine.drafts, memory))
        say_beside(
            f"learning from use: what is asked and answered is kept in {path} for "
            f"{options.learn_keep:g} days, at most {options.learn_mb:g} MB; `draftheads forget` "
            "deletes it"
        )
        yield engine, background


def learned_folder(head: str | None) -> HeadFolder:
    """The one head that --head names. Raises ValueError for none or several."""
    from draftheads.infer.drafters.named import named_drafts

    folders = named_drafts(head).folders if head else []
    if len(folders) != 1:
        raise ValueError(
            f"--learn: expected --head with one head, got {len(folders)}; name the head to train"
        )
    return folders[0]


def rollback(head: LearnedHead, learn_folder: LearnFolder = None) -> None:
    """Serve the head before the newest that was learned, from the next start on."""
    from draftheads.train.learn.place import learning_root, place_of
    from draftheads.train.learn.place import rollback as run

    version = run(place_of(learned_folder(head), learning_root(learn_folder)))
    what = f"version {version}" if version else "the head that learning started from"
    say(f"{head} is served as {what} from now on")


def forget(
    head: Annotated[
        str | None, Option(callback=HEAD_CHECK, help="of this head; default: of all")
    ] = None,
    learn_folder: LearnFolder = None,
) -> None:
    """Delete what chat and serve have kept with --learn: texts, and the heads made from them."""
    from draftheads.train.learn import place

    root = place.learning_root(learn_folder)
    there = {path: facts.head for path, facts in place.places(root)}
    if head:
        folder = learned_folder(head)
        name = place.address(folder)
        own = place.place_of(folder, root)
        there = {path: each for path, each in there.items() if path == own or each == name}
    for path in there:
        say(f"deleting {path}")
        place.delete(path)
    say(f"{len(there)} of the folders in {root} were made by --learn, and are deleted")
