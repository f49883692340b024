"""`--learn` of chat and serve, and the commands for what was learned: rollback and forget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from draftheads.extras import extras
from draftheads.scripts.models import say_beside
from draftheads.scripts.options import HEAD_CHECK
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.formats.hub import HeadFolder
    from draftheads.infer.engine import Speculator
    from draftheads.train.learn.learner import UseLearner
    from draftheads.train.learn.place import HeadStore

Learn = Annotated[
    bool, Option("--learn", help="keep questions and answers here, and train the head on them")
]
LearnKeep = Annotated[float, Option(min=0.01, help="days after which they are deleted")]
LearnSize = Annotated[float, Option("--learn-mb", min=2, help="megabytes of them, at most")]
LearnFolder = Annotated[
    Path | None, Option(help="where they are kept; default: draftheads/learned in your data")
]
LearnedHead = Annotated[str, Option(callback=HEAD_CHECK, help="as for chat or serve")]


@dataclass(frozen=True)
class Learning:
    """Options of chat and serve with these names."""

    keep_days: float
    size_mb: float
    folder: Path | None


@dataclass(frozen=True)
class Learner:
    """An engine, and what trains its head while it has nothing to do; None without --learn."""

    engine: Speculator
    background: UseLearner | None = None


@contextmanager
def learning(
    engine: Speculator, head: str | None, learn: bool, options: Learning
) -> Iterator[Learner]:
    """The engine, with --learn the newest head that was learned in it. Raises ValueError unless
    --head names one head, for compiled steps, and as `UseLearner` and `HeadStore` do.
    """
    if not learn:
        yield Learner(engine)
        return
    with extras():
        from draftheads.train.learn.place import HeadStore, address, learning_root, place_of

    folder = learned_folder(head)
    if engine.compile:
        raise ValueError("--learn: expected no --compile, as steps would be compiled again")
    path = place_of(folder, learning_root(options.folder))
    limits = {"most_mb": options.size_mb, "keep_days": options.keep_days}
    with closing(HeadStore(path, engine.target, head=address(folder), **limits)) as place:
        learner = _learner(engine, str(head), folder, place)
        say_beside(
            f"learning from use: what is asked and answered is kept in {path} for "
            f"{options.keep_days:g} days, at most {options.size_mb:g} MB; `draftheads forget` "
            "deletes it"
        )
        yield learner


def _learner(engine: Speculator, head: str, folder: HeadFolder, place: HeadStore) -> Learner:
    from draftheads.infer.drafters.ngram import NGramIndex
    from draftheads.infer.drafters.parts import with_memory
    from draftheads.infer.engine import DrafterSource
    from draftheads.scripts.doctor import data_of, documents_in
    from draftheads.train.learn.learner import Source, UseLearner, with_version

    memory = NGramIndex() if "ngram" in head.split("+") else None
    recorded = folder.facts.training.get("recipe", {}).get("data", {}).get("path")
    data = data_of(folder.path, str(recorded or ""))
    source = Source(folder, documents_in(data, engine.target))
    learner = UseLearner(engine.target, source, place.texts, place.versions, memory)
    if place.versions.served:
        engine = with_version(engine, place.versions.served)
    if memory:
        assert isinstance(engine.drafts, DrafterSource)
        engine = engine.with_drafts(with_memory(engine.drafts, memory))
    return Learner(engine, learner)


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
    there = {path: facts.get("head") for path, facts in place.places(root)}
    if head:
        folder = learned_folder(head)
        name, own = place.address(folder), place.place_of(folder, root)
        there = {path: each for path, each in there.items() if path == own or each == name}
    for path in there:
        say(f"deleting {path}")
        place.delete(path)
    say(f"{len(there)} of the folders in {root} were made by --learn, and are deleted")
