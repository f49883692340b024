"""Loading the target and the drafts that a command names. Heavy imports wait, as in `options`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftheads.infer.threads import choose_threads, set_threads
from draftheads.scripts.options import chosen_tree, parsed_template_args
from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.formats.hub import HeadFolder
    from draftheads.heads.target import Target
    from draftheads.infer.accept import Acceptance
    from draftheads.infer.engine import Speculator


@dataclass(frozen=True)
class Place:
    """Where and how a target is loaded: --dtype, --device and --threads."""

    dtype: str
    device: str | None
    threads: int | None


def load_target(
    name: str,
    dtype: str,
    device: str | None,
    revision: str | None = None,
    heads: Sequence[HeadFolder] = (),
    template_args: str | None = None,
) -> Target:
    """Load the target, with the adapter that `heads` were trained with, if any, and the chat
    template variables of their data, or those of --template-args. Raises ValueError for a device
    that this machine does not have.
    """
    import torch
    import transformers

    from draftheads.heads.formats.hub import shared_adapter, shared_template_args
    from draftheads.heads.placement import default_device
    from draftheads.heads.target import Target

    if device is not None:
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:  # several lines that name no option
            usable = default_device()
            hint = "; torch finds no usable GPU" if usable == "cpu" else ""
            raise ValueError(
                f"--device: expected a device of this machine, got {device!r}; try {usable}{hint}"
            ) from error
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    adapter = shared_adapter(heads)
    if template_args is None:
        variables = shared_template_args(heads)
    else:
        variables = parsed_template_args(template_args)
    target = Target.load(name, dtype=dtype, device=device, revision=revision)
    target.template_args = variables
    return target.attach(adapter) if adapter else target


def load_fast_target(
    name: str,
    place: Place,
    revision: str | None = None,
    heads: Sequence[HeadFolder] = (),
    template_args: str | None = None,
) -> Target:
    """`load_target`, with threads chosen, and on a CPU with dtype "auto" as the faster one by a
    measurement. Not for what learns or writes data: its results would depend on timing.
    """
    from draftheads.heads.placement import default_device

    dtype = place.dtype
    set_threads(place.threads)
    device = place.device or default_device()
    if device == "cpu" and dtype == "auto" and not name.endswith(".gguf"):
        dtype = faster_dtype(name, revision)
    target = load_target(name, dtype, place.device, revision, heads, template_args)
    choose_threads(place.threads, target)
    return target


def faster_dtype(name: str, revision: str | None) -> str:
    """The faster dtype for a target on this CPU; says so where there is a choice."""
    import torch

    from draftheads.heads.placement import read_config
    from draftheads.infer.measure.precision import measured_pace, own_dtype

    config = read_config(name, revision)
    if own_dtype(config) == torch.float32:
        return "auto"
    pace = measured_pace(config)
    say(pace, sys.stderr)
    return pace.dtype


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts and accepts: the options of chat and serve with these names."""

    head: str | None
    sampling: Acceptance
    tree: str | None
    nodes: int | None
    adaptive: bool
    compile: bool


def load_engine(
    target: str | None, drafting: Drafting, place: Place, template_args: str | None
) -> Speculator:
    """Load a target and what --head names, if anything; by default, the target is the head's."""
    from draftheads.infer.drafters.named import load_drafts, named_drafts
    from draftheads.infer.engine import Speculator

    drafts = named_drafts(drafting.head) if drafting.head else None
    name, revision = target, None
    if drafts is not None and not target:
        name, revision = drafts.target
    if name is None:
        raise ValueError("expected --head or --target, got neither; pass one")
    folders = drafts.folders if drafts else []
    model = load_fast_target(name, place, revision, folders, template_args)
    drafter = None
    if drafts is not None:
        loaded = load_drafts({"": drafts}, model, drafting.sampling, drafting.adaptive)
        *_, drafter = loaded.values()
    tree = chosen_tree(drafter, drafting.tree, drafting.nodes)
    engine = Speculator(model, drafter, tree=tree, compile=drafting.compile)
    announce(engine.compile)
    return engine


def announce(compile: bool) -> None:
    """Say why the first answers take long."""
    if compile:
        say("compiling takes about a minute per candidate, and less the next time", sys.stderr)
