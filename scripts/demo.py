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


def demo(out: Path, run: Callable[[list[str]], int | None]) -> None:
    """Run all stages in `out`; an earlier run is resumed. run: a command, given its words; returns
    its exit code, None for 0.
    """
    console = SafeConsole(highlight=False)
    began = time.monotonic()
    numbers = count(1)

    def stage(title: str, *words: object) -> None:
        console.rule(Text(f"{next(numbers)} of 7: {title}", "bold"))
        command = [str(word) for word in words]
        if command:
            console.print(f"$ draftheads {shlex.join(command)}", soft_wrap=True)
            code = run(command)
            if code:
                raise Exit(code)

    console.print(
        "The target: a frozen Llama of 3.1 M parameters that answers questions about Python's "
        "standard library."
    )
    threads = torch.get_num_threads()  # decoding may choose fewer
    target = ["--target", "demo-target"]
    stage(
        "the target answers prompts, its tokens are the data",
        *["distill", *target, "--prompts", "demo-prompts", "--out", out / "data"],
        *["--max-new-tokens", 128, "--batch-size", 64],
    )
    for kind, what in KINDS.items():
        places = [f"data.path={out / 'data'}", f"run.output={out / kind}"]
        stage(what, "train", f"demo-{kind}", *places, "--threads", threads)
    stage(
        "which is fastest on held-out prompts, against transformers' generate?",
        *["bench", *target, "--prompts", "demo-heldout", "--json", out / "bench.json"],
        *["--nodes", "4,8,16", "--repetitions", 1],
        *(word for kind in KINDS for word in ("--head", out / kind)),
    )
    results = json.loads((out / "bench.json").read_text())["heads"]
    best = max(results, key=lambda result: result["speedup"])["name"].partition("@")[0]
    stage(
        f"which tree of the {best} head is fastest here?",
        *["tune", "--head", out / best, "--prompts", "demo-heldout"],
    )
    stage("a chat with this tree; accepted draft tokens are coloured")
    sample_chat(load(out / best).engine, QUESTIONS, console=console)
    console.print(f"\nTotal time: {time.monotonic() - began:.0f} s.")
