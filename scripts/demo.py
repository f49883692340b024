"""The whole journey on the embedded target, each step by its command. CPU only, no network."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from rich.text import Text
from typer import Exit

from draftheads.heads.terminal import SafeConsole
from draftheads.infer.chat.repl import sample_chat
from draftheads.infer.pipeline.generator import load

KINDS = {
    "medusa": "five Medusa heads learn to predict the next tokens",
    "sequential": "six heads learn it that also see the preceding draft tokens",
    "eagle3": "an EAGLE-3 head learns to continue its own drafts",
}
QUESTIONS = ("What does os.path.join do?", "And its signature?", "What does json.dumps do?")

Command = Callable[[list[str]], int | None]
"""A command, given its words; returns its exit code, None for 0."""


class Stages:
    """Numbered stages of a journey, each a command with its words."""

    def __init__(self, run: Command) -> None:
        self.console = SafeConsole()
        self._run = run
        self._numbers = count(1)

    def stage(self, title: str, command: str = "", *more: object) -> None:
        """Run a command. more: words after it, such as paths. Raises Exit where it fails."""
        self.console.rule(Text(f"{next(self._numbers)}: {title}", "bold"))
        words = [*command.split(), *map(str, more)]
        if words:
            self.console.print(f"$ draftheads {shlex.join(words)}", soft_wrap=True)
            code = self._run(words)
            if code:
                raise Exit(code)


def demo(out: Path, run: Command) -> None:
    """Run all stages in `out`; an earlier run is resumed."""
    began = time.monotonic()
    stages = Stages(run)
    stages.console.print(
        "The target: a frozen Llama of 3.1 M parameters that answers questions about Python's "
        "standard library."
    )
    threads = torch.get_num_threads()  # decoding may choose fewer
    stages.stage(
        "the target answers prompts, its tokens are the data",
        "distill --target demo-target --prompts demo-prompts --max-new-tokens 128 --batch-size 64",
        "--out",
        out / "data",
    )
    for kind, what in KINDS.items():
        command = f"train demo-{kind} --threads {threads}"
        stages.stage(what, command, f"data.path={out / 'data'}", f"run.output={out / kind}")
    heads = [word for kind in KINDS for word in ("--head", out / kind)]
    stages.stage(
        "which is fastest on held-out prompts, against transformers' generate?",
        "bench --target demo-target --prompts demo-heldout --nodes 4,8,16 --json",
        out / "bench.json",
        *heads,
    )
    results = json.loads((out / "bench.json").read_text())["heads"]
    best = max(results, key=lambda result: result["speedup"])["name"].partition("@")[0]
    stages.stage(
        f"which tree of the {best} head is fastest here?",
        "tune --prompts demo-heldout --head",
        out / best,
    )
    stages.stage(
        "a page about this head, to be opened in a browser",
        "report --prompts demo-heldout",
        out / best,
    )
    stages.stage("a chat with this tree; accepted draft tokens are coloured")
    sample_chat(load(out / best).engine, QUESTIONS, console=stages.console)
    stages.console.print(f"\nTotal time: {time.monotonic() - began:.0f} s.")
