"""How long does a decoding step take at the shape of a target, beside reading its weights once?

    python scripts/benchmarks/gpu_steps.py [--json OUT]        # Llama 3.1 8B's shape, bf16, CUDA

Weights are random, so hardly a draft is accepted; a step's time does not depend on that. A speedup
of heads whose acceptance length is tau on a trained target of this shape would be tau times the
last column.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.heads.base import DraftHead
from draftheads.heads.target import Target
from draftheads.heads.tree import DynamicTree, Tree
from draftheads.infer.accept import Greedy
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.baseline import Baseline
from draftheads.infer.race import describe_machine, machine_line
from draftheads.infer.threads import set_threads
from draftheads.scripts.benchmarks import draft_time
from draftheads.scripts.benchmarks.step_trial import option
from draftheads.train.entry import mistakes_in_one_line

GENERATE, PLAIN = "generate", "plain"
KINDS = {
    "medusa": "medusa",
    "sequential": "recurrent",
    "block": "block-rnn-2",
    "eagle3": "eagle3",
}
"""Row -> kind of draft_time."""
COPIED = 1 << 30
"""Bytes of the copy that measures the memory's bandwidth."""


@dataclass(frozen=True)
class Setup:
    """The choices of one run. hidden to layers: the target's shape. nodes, depth: of all trees but
    Medusa's, which has medusa_nodes. context: tokens before the steps that are timed.
    bandwidth: GB/s; 0: measured by a copy.
    """

    hidden: int = 4096
    vocab: int = 128_256
    layers: int = 32
    medusa_nodes: int = 64
    nodes: int = 60
    depth: int = 5
    context: int = 512
    steps: int = 60
    warmup: int = 6
    bandwidth: float = 0.0
    threads: int = 0
    device: str = "cuda"
    dtype: str = "bfloat16"


def drawn(setup: Setup, nodes: int) -> draft_time.Setup:
    """The same shape in draft_time, whose random targets and heads these are."""
    shape = {"hidden": setup.hidden, "vocab": setup.vocab, "layers": setup.layers}
    place = {"device": setup.device, "dtype": setup.dtype}
    return draft_time.Setup(**shape, **place, nodes=nodes, depth=setup.depth)


def bandwidth(setup: Setup) -> float:
    """Bytes per second that a large copy reads and writes."""
    if setup.bandwidth:
        return setup.bandwidth * 1e9
    source = torch.ones(COPIED, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(setup)

    return 2 * COPIED / min(seconds_of(copy) for _ in range(10))


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def synchronize(setup: Setup) -> None:
    """Wait for the device."""
    if setup.device.startswith("cuda"):
        torch.cuda.synchronize(setup.device)


def rows(setup: Setup, target: Target, chosen: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row for each contestant: seconds per step, quartiles, and bytes of weights."""
    weights = sum(parameter.nbytes for parameter in target.model.parameters())
    prompt = torch.arange(setup.context).remainder(target.vocab_size).tolist()
    if GENERATE in chosen:
        yield {"name": GENERATE, "seconds": generate_step(setup, target, prompt), "bytes": weights}
    for compile in (False, True):
        for name in (name for name in (PLAIN, *KINDS) if name in chosen):
            head, tree = contestant(setup, target, name)
            engine = Speculator(target, head, tree=tree, compile=compile)
            began = time.perf_counter()
            low, median, high = step_seconds(setup, engine, prompt)
            yield {
                "name": f"{name} compiled" if compile else name,
                "seconds": median,
                "quartiles": [low, high],
                "nodes": tree.draft_nodes if tree else 0,
                "bytes": weights + (draft_time.head_bytes(head) if head else 0),
                "took": time.perf_counter() - began,
            }


def contestant(setup: Setup, target: Target, name: str) -> tuple[DraftHead | None, Tree | None]:
    """A head filled with random weights, and its tree."""
    if name == PLAIN:
        return None, None
    shape = drawn(setup, setup.medusa_nodes if name == "medusa" else setup.nodes)
    head = draft_time.create_head(KINDS[name], shape, target)
    if name == "eagle3":
        return head, DynamicTree(shape.nodes, shape.depth, shape.top_k)
    return head, draft_time.trees(KINDS[name], shape)["fixed"]


def step_seconds(setup: Setup, engine: Speculator, prompt: Sequence[int]) -> list[float]:
    """Quartiles of the wall time between steps, each of which ends when its tokens are read."""
    seconds: list[float] = []
    for skipped in (2, setup.warmup):  # the first answer compiles
        steps = engine.generate(prompt, sampling=Greedy())
        ends = [time.perf_counter() for _ in islice(steps, skipped + setup.steps)]
        seconds = [end - start for start, end in pairwise(ends[skipped:])]
    return statistics.quantiles(seconds, n=4, method="inclusive")


def generate_step(setup: Setup, target: Target, prompt: Sequence[int]) -> float:
    """Seconds of a step of transformers' `generate`: a long answer less a short one."""

    def answer(tokens: int) -> Callable[[], object]:
        return lambda: list(
            Baseline(target).generate_batch([prompt], sampling=Greedy(), max_new_tokens=tokens)
        )

    answer(4)()
    short, long = (
        statistics.median(seconds_of(answer(tokens)) for _ in range(3))
        for tokens in (2, 2 + setup.steps)
    )
    return (long - short) / setup.steps


def measure(setup: Setup, chosen: Sequence[str], console: Console) -> dict[str, Any]:
    """The numbers of the report, ready for JSON. Times are in seconds."""
    whole = draft_time.create_target(drawn(setup, setup.nodes), layers=setup.layers)
    whole.model.generation_config.eos_token_id = None
    made = []
    for row in rows(setup, whole, chosen):
        made.append(row)
        console.print(f"{row['name']}: {row['seconds'] * 1e3:.2f} ms", style="dim")
    report = {"machine": describe_machine(whole), "setup": asdict(setup), "rows": made}
    return {**report, "bandwidth": bandwidth(setup)}


def print_report(report: dict[str, Any], console: Console) -> None:
    """The table and what it was taken on."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    for name in ("draft nodes", "ms", "quartiles", "GB", "x weights", "x own", "per τ"):
        table.add_column(name, justify="right", no_wrap=True)
    first, limit = report["rows"][0], report["bandwidth"]
    for row in report["rows"]:
        low, high = row.get("quartiles", [row["seconds"]] * 2)
        table.add_row(
            row["name"],
            str(row.get("nodes", 0)),
            f"{row['seconds'] * 1e3:.2f}",
            f"{low * 1e3:.2f}-{high * 1e3:.2f}",
            f"{row['bytes'] / 1e9:.1f}",
            f"{row['seconds'] * limit / first['bytes']:.2f}",
            f"{row['seconds'] * limit / row['bytes']:.2f}",
            f"{first['seconds'] / row['seconds']:.2f}",
        )
    console.print(table)
    notes = [
        "x weights: times of reading the target's weights once, at "
        f"{limit / 1e9:.0f} GB/s. x own: those and the head's.",
        f"per τ: {first['name']}'s time over this one's; times τ it is a speedup.",
        f"machine: {machine_line(report['machine'])}.",
    ]
    console.print("\n".join(notes), style="dim", markup=False, highlight=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for each in fields(Setup):
        parser.add_argument(
            option(each.name), type=type(each.default), default=each.default, help="%(default)s"
        )
    names = [GENERATE, PLAIN, *KINDS]
    parser.add_argument("--rows", nargs="+", default=names, choices=names)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    chosen = parser.parse_args(argv)
    setup = Setup(**{each.name: getattr(chosen, each.name) for each in fields(Setup)})
    if setup.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device: expected a GPU, found none; try --device cpu and a small shape")
    set_threads(setup.threads)
    console = Console()
    report = measure(setup, chosen.rows, console)
    print_report(report, console)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
