"""What should the owner of a laptop decode with? This project in bfloat16 and int8, and llama.cpp
with the same weights in Q8_0 and Q4_K_M, each plain and with the same EAGLE-3 head.

    DRAFTHEADS_LLAMACPP=FOLDER python scripts/benchmarks/laptop.py --tokenizer MODEL [--json OUT]

FOLDER is what engine_runs/install_llamacpp.sh made. Weights are random at the shape of a target
people run, so hardly a draft is accepted, and the time of a step is measured: with a trained head
of acceptance length tau, a token takes a step's time divided by tau. CPU seconds on one thread, all
in turns. --tokenizer: any with fewer tokens than the shape has; llama.cpp needs one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from draftheads.heads.formats.hub import open_head, save_head
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.accept import Greedy
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.llamacpp import LlamaServer, serving
from draftheads.infer.race import describe_machine, machine_line
from draftheads.scripts.benchmarks import draft_time, shapes
from draftheads.scripts.benchmarks.engine_runs import llamacpp
from draftheads.train.entry import mistakes_in_one_line

CHAIN = 4
DTYPES = ("bfloat16", shapes.INT8)
FILES = ("Q8_0", "Q4_K_M")
CONTEXT, TOKENS, ROUNDS = 256, 8, 5

Measure = Callable[[], float]
"""Seconds per step."""


@dataclass(frozen=True)
class Contestant:
    """A way to decode: who, the target's weights and their bytes, and whether a head drafts."""

    name: str
    weights: str
    size: int
    has_head: bool
    measure: Measure


def written(folder: Path, setup: shapes.Setup, tokenizer: str) -> tuple[Path, Path]:
    """A random target and an EAGLE-3 head for it, as folders."""
    target = shapes.random_target(setup, "bfloat16")
    target.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    head = draft_time.create_head("eagle3", setup.draft_setup("bfloat16"), target)
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    saved = save_head(head, folder / "head", target=target)
    return folder / "target", saved


def ours(target_folder: Path, head_folder: Path) -> Iterator[Contestant]:
    """This project, for each dtype."""
    for dtype in DTYPES:
        target = Target.load(target_folder, dtype="bfloat16").pack(
            8 if dtype == shapes.INT8 else None
        )
        target.model.generation_config.eos_token_id = None
        head = open_head(str(head_folder)).load(target).pack(target)
        tree = StaticTree.from_widths((1,) * CHAIN)
        prompt = shapes.prompts(shapes.Setup(context=CONTEXT), target, 1)[0]
        for drafts in (None, head):
            engine = Speculator(target, drafts, tree=tree if drafts else None)
            steps = engine.generate(prompt, sampling=Greedy())
            for _ in islice(steps, 3):
                pass
            with shapes.weights_read() as reads:
                next(steps)

            def measure(steps: Any = steps) -> float:
                began = thread_time()
                for _ in islice(steps, TOKENS):
                    pass
                return (thread_time() - began) / TOKENS

            yield Contestant("draftheads", dtype, reads.bytes, drafts is not None, measure)


def theirs(folder: Path, target: Path, head: Path, stack: ExitStack) -> Iterator[Contestant]:
    """llama.cpp's server, for each kind of file."""
    script = Path(llamacpp.__file__).with_name("llamacpp_target.py")
    whole = folder / "target.gguf"
    command = [sys.executable, script, target, "--outtype", "bf16", "--outfile", whole]
    llamacpp.run_command(command)
    drafts = llamacpp.head_gguf(str(head), whole, folder)
    small_head = folder / "head-Q8_0.gguf"
    quantize = llamacpp.PROGRAM.with_name("llama-quantize")
    llamacpp.run_command([quantize, drafts, small_head, "Q8_0"])
    prompt = list(range(10, 10 + CONTEXT))
    for kind in FILES:
        file = folder / f"target-{kind}.gguf"
        llamacpp.run_command([quantize, whole, file, kind])
        for with_head in (False, True):
            options: list[str | Path] = ["-m", file, "-np", "1", "-c", "1024", "-t", "1"]
            if with_head:
                options += ["-md", small_head, "--spec-type", "draft-eagle3", "-td", "1"]
                options += ["--spec-draft-n-max", str(CHAIN), "--spec-draft-p-min", "0"]
            server = stack.enter_context(serving(llamacpp.PROGRAM, options))

            def measure(server: LlamaServer = server) -> float:
                """Tokens are answered one by one or as drafts that were accepted."""
                url = server.url
                _, accepted = llamacpp.counts(llamacpp.read(f"{url}/metrics"))
                began = server.clock()
                body = {"prompt": prompt, "n_predict": 4 * TOKENS, "temperature": 0}
                body |= {"ignore_eos": True, "cache_prompt": True}
                llamacpp.read(f"{url}/completion", body)
                seconds = server.clock() - began
                _, after = llamacpp.counts(llamacpp.read(f"{url}/metrics"))
                return seconds / (4 * TOKENS - (sum(after) - sum(accepted)))

            measure()  # reads the prompt
            yield Contestant("llama.cpp", kind, file.stat().st_size, with_head, measure)


def measure(setup: shapes.Setup, tokenizer: str) -> dict[str, Any]:
    """The numbers of the report, ready for JSON."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name, ExitStack() as stack:
        folder = Path(name)
        target, head = written(folder, setup, tokenizer)
        contestants = [*ours(target, head), *theirs(folder, target, head, stack)]
        seconds: dict[int, list[float]] = {number: [] for number in range(len(contestants))}
        for _ in range(ROUNDS):
            for number, each in enumerate(contestants):
                seconds[number].append(each.measure())
        machine = describe_machine(Target.load(target, dtype="bfloat16"))
    rows = [
        {
            "name": each.name,
            "weights": each.weights,
            "bytes": each.size,
            "head": each.has_head,
            "seconds": statistics.median(seconds[number]),
            "range": [min(seconds[number]), max(seconds[number])],
        }
        for number, each in enumerate(contestants)
    ]
    return {"machine": machine, "shape": setup.shape, "chain": CHAIN, "rows": rows}


def print_report(report: dict[str, Any], console: Console) -> None:
    """ms of a plain token, of a step that verifies a chain, and of a token at some tau."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"the shape of {report['shape']}")
    for column in ("who", "weights"):
        table.add_column(column)
    for column in ("GB", "plain ms", "step ms", "c", "token at τ 2", "τ 3"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = report["rows"]
    for plain, step in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(
            plain["name"],
            plain["weights"],
            f"{plain['bytes'] / 1e9:.2f}",
            f"{plain['seconds'] * 1e3:.0f}",
            f"{step['seconds'] * 1e3:.0f}",
            f"{step['seconds'] / plain['seconds']:.2f}",
            *(f"{step['seconds'] * 1e3 / tau:.0f}" for tau in (2, 3)),
        )
    console.print(table)
    notes = [
        f"step: a chain of {report['chain']} drafts, verified. GB: weights that a token reads, for "
        "llama.cpp the file.",
        f"machine: {machine_line(report['machine'])}.",
    ]
    console.print("\n".join(notes), style="dim", markup=False, highlight=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(shapes.SHAPES))
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    chosen = parser.parse_args(argv)
    if not llamacpp.PROGRAM.is_file():
        raise ValueError(
            "DRAFTHEADS_LLAMACPP: expected the folder that install_llamacpp.sh made, found no "
            "llama-server there"
        )
    report = measure(shapes.Setup(shape=chosen.shape), chosen.tokenizer)
    print_report(report, Console())
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
