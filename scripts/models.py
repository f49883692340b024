"""The loader of `draftheads.infer`, with options as a person types them. Heavy imports wait, as in
`options`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftheads.infer.pipeline import loading
from draftheads.scripts.options import chosen_tree, parsed_template_args
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.infer.accept import Acceptance
    from draftheads.infer.engine import Speculator


def say_beside(line: object) -> None:
    """Print a line beside a command's own output."""
    say(line, sys.stderr)


@dataclass(frozen=True)
class Place(loading.Place):
    """Where and how a command loads a target: --dtype, --device, --threads, --bits and
    --adapter.
    """

    report: Callable[[object], None] = say_beside


def prepared(template_args: str | None = None) -> dict[str, Any] | None:
    """The variables of --template-args; from now on, transformers prints errors alone."""
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    return None if template_args is None else parsed_template_args(template_args)


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts and accepts: the options of chat and serve with these names."""

    head: str | None
    sampling: Acceptance
    tree: str | None
    nodes: int | None
    compile: bool


def load_engine(
    target: str | None, drafting: Drafting, place: Place, template_args: str | None
) -> Speculator:
    """Load a target and what --head names, if anything; by default, the target is the head's."""
    from draftheads.infer.engine import Speculator

    variables = prepared(template_args)
    model, drafter = loading.load_parts(drafting.head, target, drafting.sampling, place, variables)
    tree = chosen_tree(drafter, drafting.tree, drafting.nodes)
    engine = Speculator(model, drafter, tree=tree, compile=drafting.compile)
    announce(engine.compile)
    return engine


def announce(compile: bool) -> None:
    """Say why the first answers take long."""
    if compile:
        say_beside("compiling takes about a minute per candidate, and less the next time")
