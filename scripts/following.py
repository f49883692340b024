"""The command that follows: each command that succeeds ends with the next one to type."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftheads.train.entry import say

if TYPE_CHECKING:
    from draftheads.heads.formats.facts import HeadFacts
    from draftheads.infer.measure.bench import Result


def say_next(*words: object) -> None:
    """Print a command of draftheads, beside the output of the one before it."""
    say(f"next: {shlex.join(['draftheads', *map(str, words)])}", sys.stderr)


def target_options(target: str | None, lora: str | None) -> list[str]:
    """The options that load the same target again."""
    return [*(["--target", target] if target else []), *(["--adapter", lora] if lora else [])]


def local_options(facts: HeadFacts) -> list[str]:
    """The options for a target on this machine, which a head that leaves it does not name."""
    from draftheads.scripts.public import is_local

    names = facts.target.name, facts.target.lora
    return target_options(*names) if any(map(is_local, names)) else []


def after_answers(target: str, out: Path, lora: str | None = None) -> None:
    """Training needs a recipe for this target."""
    words = target_options(target, lora)
    say_next("init", *words, "--data", out, "--out", f"{out.absolute().name}.yaml")


REMEDIES = {
    "speed": "tune",
    **dict.fromkeys(("target", "template", "use"), "distill"),
}
"""Checks of `doctor` -> the command that mends what they find."""


def after_doctor(words: Sequence[str], head: str, checks: Sequence[str]) -> None:
    """words: `target_options`. checks: those that found something. Others are mended by no
    command alone.
    """
    commands = [REMEDIES[check] for check in checks if check in REMEDIES]
    if not checks:
        say_next("chat", *words, "--head", head)
    elif commands[:1] == ["tune"]:
        say_next("tune", *words, "--head", head, "--prompts", "PROMPTS")
    elif commands:
        say_next("distill", *words, "--prompts", "PROMPTS", "--out", "data")


def after_bench(
    model: Sequence[str], prompts: str, sources: Mapping[str, str], winner: Result | None
) -> None:
    """A head on this machine is tuned, unless it won with a tree that was; other drafters chat, if
    they won. model: `target_options`. sources: names of drafters -> --head; winner: None if no
    drafts were faster.
    """
    from draftheads.heads.formats.hub import open_head

    candidate = winner.name if winner else ""
    names = [name for name in sources if candidate.startswith(name)]
    source = sources[max(names, key=len, default=next(iter(sources)))]
    words = [*model, "--head", source]
    if os.path.isdir(os.path.expanduser(source)):
        facts = open_head(source).facts
        is_done = candidate in names and facts.tuned
        if facts.is_ours and not is_done:
            say_next("tune", *words, "--prompts", prompts)
            return
    say_next("chat", *(words if winner else model))
