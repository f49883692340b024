"""The command that follows: each command that succeeds ends with the next one to type."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from draftheads.train.entry import say


def say_next(*words: object) -> None:
    """Print a command of draftheads, beside the output of the one before it."""
    say(f"next: {shlex.join(['draftheads', *map(str, words)])}", sys.stderr)


def after_answers(target: str, out: Path) -> None:
    """Training needs a recipe for this target."""
    say_next("init", "--target", target, "--data", out, "--out", f"{out.name}.yaml")


def after_bench(target: str, heads: Sequence[str], prompts: str) -> None:
    """The first head on this machine can be tuned; other drafters chat."""
    local = [head for head in heads if Path(head).is_dir()]
    if local:
        say_next("tune", "--head", local[0], "--prompts", prompts)
    else:
        say_next("chat", "--target", target, "--head", heads[0])
