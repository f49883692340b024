"""How long do decoding steps take at the shapes of targets that people run, and at how many tokens
per step do heads begin to pay?

    python scripts/benchmarks/shapes.py --shape qwen3-0.6b --threads 1 2 --batch 1 4 8 --json OUT
    python scripts/benchmarks/shapes.py --shape llama-3.1-8b --device cuda --dtype bfloat16 \\
        --modes eager recorded compiled
    python scripts/benchmarks/shapes.py --pages docs/shapes.json README.md docs/lab/2026-11.md \\
        recipes/qwen3-0.6b-*.yaml

Weights are random, so hardly a draft is accepted; the time of a step does not depend on that. All
steps of one dtype, number of threads and batch are timed in turns: by CPU seconds of a single
thread, else by the wall clock. `generate` is transformers' own, before the target is packed.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import profile
from torch.utils._python_dispatch import _disable_current_modes

from draftheads.heads.base import DraftHead
from draftheads.heads.cpu.linear import PackedWeight
from draftheads.heads.cpu.onnx_graph import Program
from draftheads.heads.files import write_text
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree, Tree
from draftheads.infer.accept import Greedy
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.baseline import Baseline
from draftheads.infer.race import describe_machine, machine_line
from draftheads.infer.rows import Step
from draftheads.infer.threads import fair_clock
from draftheads.scripts.benchmarks import results
from draftheads.scripts.benchmarks.random_models import (
    SHAPES,
    Reads,
    Shape,
    create_head,
    create_target,
)
from draftheads.train.entry import mistakes_in_one_line

GENERATE, PLAIN, INT8 = "generate", "plain", "int8"
KINDS = ("medusa", "sequential", "block", "eagle3")
MODES = ("eager", "recorded", "compiled")
"""Steps run operator by operator; on CUDA replayed; compiled, and replayed there, too."""
CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaGraphLaunch"),
    "copies": ("cudaMemcpyAsync", "cudaMemsetAsync"),
    "waits": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
}
"""What a host asks of a GPU, by the profiler's names."""
SHOWN = (4, 8)
"""Draft nodes on pages."""
PLACE = ("dtype", "threads", "batch", "mode")
"""What steps that are timed in turns have in common."""
READ = 1 << 30
"""Bytes that are read to measure the memory's bandwidth."""
CHAIN, DYNAMIC = 5, 32
"""EAGLE-3 drafts a chain of fewer nodes than the first, a dynamic tree of the second or more."""


@dataclass(frozen=True)
class Setup:
    """The choices of one run. dtypes: "int8" is an int8 target with float32 activations. context:
    tokens before the steps that are timed. rounds: steps of each contestant. modes: of MODES.
    """

    shape: str = "qwen3-0.6b"
    dtypes: tuple[str, ...] = ("float32", "bfloat16", INT8)
    threads: tuple[int, ...] = (1,)
    batches: tuple[int, ...] = (1,)
    kinds: tuple[str, ...] = KINDS
    nodes: tuple[int, ...] = (4, 8, 16, 32, 60)
    modes: tuple[str, ...] = ("eager",)
    context: int = 256
    rounds: int = 9
    warmup: int = 3
    device: str = "cpu"

    def of(self, dtype: str) -> Shape:
        """Of targets and heads in this dtype."""
        whole = "float32" if dtype == INT8 else dtype
        return replace(SHAPES[self.shape], device=self.device, dtype=whole)


def measure(
    setup: Setup, console: Console, keep: Callable[[dict[str, Any]], None] = lambda report: None
) -> dict[str, Any]:
    """The numbers of the report, ready for JSON. Times are in seconds. keep: is given what there is
    as it grows.
    """
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"machine": {}, "setup": asdict(setup), "bandwidth": {}, "rows": rows}
    for threads in setup.threads:
        set_threads(setup, threads)
        report["bandwidth"][str(threads)] = bandwidth(setup)
    for dtype in setup.dtypes:
        target = create_target(setup.of(dtype))
        stock = {threads: generate_step(setup, target, threads) for threads in setup.threads}
        shape = setup.of(dtype)
        if setup.device == "cpu":
            target.pack(8 if dtype == INT8 else None)
        heads = {name: create_head(name, shape, target).pack(target) for name in setup.kinds}
        report["machine"] = describe_machine(target)
        for threads, batch, mode in product(setup.threads, setup.batches, setup.modes):
            set_threads(setup, threads)
            place = {"dtype": dtype, "threads": threads, "batch": batch, "mode": mode}
            if batch == 1 and mode == setup.modes[0]:
                rows.append({**place, "name": GENERATE, "nodes": 0, "seconds": stock[threads]})
            engines = contestants(setup, target, heads, mode)
            for row in steps(setup, engines, batch):
                rows.append({**place, **row})
                console.print(line(rows[-1]), style="dim", highlight=False)
            keep(report)
        del target, heads
        gc.collect()
    return report


def set_threads(setup: Setup, threads: int) -> None:
    """Of this process."""
    if setup.device == "cpu":
        torch.set_num_threads(threads)


def contestants(
    setup: Setup, target: Target, heads: Mapping[str, DraftHead], mode: str
) -> dict[tuple[str, int], Speculator]:
    """Engines by the name of their heads and their draft nodes."""
    compile = mode == "compiled"
    engines = {(PLAIN, 0): Speculator(target, None, compile=compile)}
    for (name, head), nodes in product(heads.items(), setup.nodes):
        tree = tree_of(name, nodes, head.depth)
        engines[name, nodes] = Speculator(target, head, tree=tree, compile=compile)
    for engine in engines.values():
        if mode == "eager":
            engine.maker.recorder = None
    return engines


def tree_of(name: str, nodes: int, depth: int) -> Tree:
    """The likeliest nodes if a first guess is right in 70 % at depth 1 and a tenth less often at
    each further one.
    """
    if name == "eagle3" and nodes < min(CHAIN, depth + 1):
        return StaticTree(tuple((0,) * level for level in range(1, nodes + 1)))
    if name == "eagle3" and nodes >= DYNAMIC:
        return DynamicTree(nodes, depth, 10)
    accuracies_KR = [[0.7 * 0.9**k * 0.3**r for r in range(10)] for k in range(depth)]
    return StaticTree.best_first(accuracies_KR, nodes)


def steps(
    setup: Setup, engines: Mapping[tuple[str, int], Speculator], batch: int
) -> list[dict[str, Any]]:
    """One row for each engine: seconds per step, quartiles, c (over plain), bytes of weights that
    a step reads, and how long its first steps took (compiled ones are compiled then).
    """
    texts = prompts(setup, next(iter(engines.values())).target, batch)
    deepest = max(engine.tree.depth for engine in engines.values())
    new = (setup.warmup + setup.rounds + 3) * (deepest + 1)  # more would be more memory
    runs: dict[tuple[str, int], Iterator[list[Step | None]]] = {}
    first: dict[tuple[str, int], float] = {}
    read: dict[tuple[str, int], int] = {}
    counts: dict[tuple[str, int], dict[str, int]] = {}
    for key, engine in engines.items():
        began = time.perf_counter()
        runs[key] = engine.generate_batch(texts, sampling=Greedy(), max_new_tokens=new)
        for _ in range(1 + setup.warmup):
            next(runs[key])
        first[key] = time.perf_counter() - began
        counts[key] = calls(runs[key])
        if not (engine.compile or engine.maker.recorder):
            with weights_read() as reads:
                next(runs[key])
            read[key] = reads.bytes
    clock = fair_clock(torch.device(setup.device))
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in engines}
    for _, key in product(range(setup.rounds), engines):
        began = clock()
        next(runs[key])  # ends when the host has read its tokens
        seconds[key].append(clock() - began)
    plain = statistics.median(seconds[PLAIN, 0])
    rows = []
    for (name, nodes), each in seconds.items():
        low, median, high = statistics.quantiles(each, n=4, method="inclusive")
        rows.append(
            {
                "name": name,
                "nodes": nodes,
                "seconds": median,
                "quartiles": [low, high],
                "c": median / plain,
                "bytes": read.get((name, nodes)),
                "first": first[name, nodes],
                **counts[name, nodes],
            }
        )
    return rows


def prompts(setup: Setup, target: Target, batch: int) -> list[list[int]]:
    """Texts of `context` tokens that differ."""
    starts = range(0, 7 * batch, 7)
    return [
        torch.arange(start, start + setup.context).remainder(target.vocab_size).tolist()
        for start in starts
    ]


@contextmanager
def weights_read() -> Iterator[Reads]:
    """Counts the bytes of weights that products read, packed ones and those of graphs included."""

    def counted(kind: type[PackedWeight] | type[Program]) -> Any:
        call = kind.__call__

        def counting(weights: Any, *arguments: Any) -> Any:
            reads.bytes += weights.nbytes
            with _disable_current_modes():
                return call(weights, *arguments)

        return mock.patch.object(kind, "__call__", counting)

    with counted(PackedWeight), counted(Program), Reads() as reads:
        yield reads


def calls(run: Iterator[Any]) -> dict[str, int]:
    """What a host asks of a GPU for one step, by CALLS; zeros without one."""
    with profile() as profiler:
        next(run)
    seen = Counter({event.key: event.count for event in profiler.key_averages()})
    return {name: sum(seen[each] for each in group) for name, group in CALLS.items()}


def generate_step(setup: Setup, target: Target, threads: int) -> float:
    """Seconds of a step of transformers' `generate`: a long answer less a short one."""
    set_threads(setup, threads)
    clock = fair_clock(torch.device(setup.device))
    [text] = prompts(setup, target, 1)

    def seconds(tokens: int) -> float:
        began = clock()
        list(Baseline(target).generate(text, sampling=Greedy(), max_new_tokens=tokens))
        return clock() - began

    seconds(2)
    short, long = (min(seconds(tokens) for _ in range(3)) for tokens in (2, 2 + setup.rounds))
    return (long - short) / setup.rounds


def bandwidth(setup: Setup) -> float:
    """Bytes per second that are read to sum large numbers."""
    numbers = torch.ones(READ // 4, device=setup.device)

    def seconds() -> float:
        began = time.perf_counter()
        numbers.sum().item()
        return time.perf_counter() - began

    return READ / min(seconds() for _ in range(10))


def line(row: dict[str, Any]) -> str:
    """What a person who waits is told."""
    return (
        f"{row['dtype']}, {row['threads']} threads, batch {row['batch']}: {row['name']} "
        f"{row['nodes']} {row['mode']} {row['seconds'] * 1e3:.1f} ms, c {row['c']:.2f}"
    )


def print_report(report: dict[str, Any], console: Console) -> None:
    """The table and what it was taken on."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=report["setup"]["shape"])
    for name in ("dtype", "step"):
        table.add_column(name, no_wrap=True)
    for name in ("threads", "batch", "nodes", "ms", "quartiles", "c", "GB", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report["rows"]:
        low, high = row.get("quartiles", [row["seconds"]] * 2)
        limit = (row.get("bytes") or 0) / report["bandwidth"][str(row["threads"])]
        table.add_row(
            row["dtype"],
            f"{row['name']} {row['mode']}",
            *(str(row[name]) for name in ("threads", "batch", "nodes")),
            f"{row['seconds'] * 1e3:.1f}",
            f"{low * 1e3:.1f}-{high * 1e3:.1f}",
            f"{row['c']:.2f}" if "c" in row else "",
            f"{row['bytes'] / 1e9:.2f}" if row.get("bytes") else "",
            f"{limit / row['seconds']:.0%}" if limit else "",
        )
    console.print(table)
    speeds = " and ".join(
        f"{speed / 1e9:.0f} GB/s with {threads} threads"
        for threads, speed in report["bandwidth"].items()
    )
    notes = [
        "c: over a plain step of the same dtype: tokens per step at which heads begin to pay.",
        f"GB: weights that a step reads. of limit: reading them alone, at {speeds}, over the step.",
        f"machine: {machine_line(report['machine'])}.",
    ]
    console.print("\n".join(notes), style="dim", markup=False, highlight=False)


def page_table(reports: Sequence[dict[str, Any]]) -> str:
    """For a page: a plain step's ms, and c of each kind of heads."""
    shown = " / ".join(map(str, SHOWN))
    lines = [
        "| shape | dtype | threads | rows | `generate` | plain | " + " | ".join(KINDS) + " |",
        "|" + " --- |" * (6 + len(KINDS)),
    ]
    for report in reports:
        places = dict.fromkeys(tuple(row[key] for key in PLACE) for row in report["rows"])
        for place in places:
            rows = {
                (row["name"], row["nodes"]): row
                for row in report["rows"]
                if tuple(row[key] for key in PLACE) == place
            }
            dtype, threads, batch, mode = place
            cells = [report["setup"]["shape"], dtype + ("" if mode == "eager" else f", {mode}")]
            cells += [str(threads), str(batch)]
            for name in (GENERATE, PLAIN):
                row = rows.get((name, 0))
                cells.append(f"{row['seconds'] * 1e3:.0f} ms" if row else "")
            for kind in KINDS:
                costs = [rows[kind, n]["c"] if (kind, n) in rows else None for n in SHOWN]
                texts = [f"{cost:.2f}" if cost else "-" for cost in costs]
                cells.append(" / ".join(texts) if any(costs) else "")
            lines.append("| " + " | ".join(cells) + " |")
    machine = reports[0]["machine"]
    lines += [
        "",
        f"Last columns: c with {shown} nodes. Random weights, {machine['cpu']}, torch "
        f"{machine['torch']}, {machine['date'][:10]}.",
    ]
    return "\n".join(lines) + "\n"


def advice(report: dict[str, Any], kinds: Sequence[str]) -> str:
    """Two sentences: from which τ the slowest of these heads pay, and what τ 3 brings, with the
    first number of threads. The first says which heads.
    """
    setup, nodes = report["setup"], SHOWN[-1]
    rows = {
        (row["name"], row["nodes"], row["dtype"]): row
        for row in report["rows"]
        if (row["threads"], row["batch"], row["mode"]) == (setup["threads"][0], 1, "eager")
    }
    pays, brings = [], []
    for dtype in setup["dtypes"]:
        slowest = max((rows[kind, nodes, dtype] for kind in kinds), key=lambda row: row["c"])
        plain = rows[PLAIN, 0, dtype]["seconds"]
        pays.append(f"{slowest['c']:.1f} in {dtype}")
        brings.append(f"{slowest['seconds'] / 3 * 1e3:.0f} instead of {plain * 1e3:.0f} ms")
    whose = f"of {kinds[0]} heads" if len(kinds) == 1 else f"of the slowest of {len(kinds)} kinds"
    where = f"{report['machine']['cpu']}, {setup['threads'][0]} thread"
    return (
        f"At the shape of {setup['shape']}, {nodes} draft nodes {whose} pay from τ "
        f"{', '.join(pays)} ({where}). At τ 3 a token takes {', '.join(brings)}."
    )


def write_pages(reports: Sequence[dict[str, Any]], pages: Sequence[Path]) -> None:
    """Replace what pages and recipes say. Raises SystemExit for one without a place."""
    for page in pages:
        text = page.read_text()
        if page.suffix == ".yaml":
            shape, _, kind = page.stem.rpartition("-")
            report = next(each for each in reports if each["setup"]["shape"] == shape)
            line = f"# Decoding: {advice(report, [kind])}"
            write_text(page, re.sub(r"^# Decoding: .*$", line, text, flags=re.MULTILINE))
        elif "<!-- shapes:" in text:
            results.write_table(page, "shapes", page_table(reports))
        else:
            results.write_table(
                page, "costs", advice(reports[0], reports[0]["setup"]["kinds"]) + "\n"
            )


def add_report(out: Path, report: dict[str, Any]) -> None:
    """To those of a file, in the place of one with the same choices."""
    reports = json.loads(out.read_text()) if out.exists() else []
    by_setup = {json.dumps(each["setup"]): each for each in [*reports, report]}
    write_text(out, json.dumps([*by_setup.values()], indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print; or write a table into a page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    start = Setup()
    parser.add_argument("--shape", default=start.shape, choices=list(SHAPES))
    dtypes = ["float32", "bfloat16", "float16", INT8]
    parser.add_argument("--dtype", nargs="+", default=start.dtypes, choices=dtypes)
    parser.add_argument("--threads", nargs="+", type=int, default=start.threads)
    parser.add_argument("--batch", nargs="+", type=int, default=start.batches)
    parser.add_argument("--kinds", nargs="+", default=start.kinds, choices=list(KINDS))
    parser.add_argument("--nodes", nargs="+", type=int, default=start.nodes)
    parser.add_argument("--modes", nargs="+", default=start.modes, choices=MODES)
    parser.add_argument("--context", type=int, default=start.context)
    parser.add_argument("--rounds", type=int, default=start.rounds)
    parser.add_argument("--device", default=start.device)
    parser.add_argument("--json", type=Path, metavar="OUT", help="add the numbers to this file")
    parser.add_argument("--pages", type=Path, nargs="+", metavar=("JSON", "PAGE"))
    chosen = parser.parse_args(argv)
    if chosen.pages:
        source, *pages = chosen.pages
        write_pages(json.loads(source.read_text()), pages)
        return
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device: expected a GPU, found none; try --device cpu")
    setup = Setup(
        shape=chosen.shape,
        dtypes=tuple(chosen.dtype),
        threads=tuple(chosen.threads),
        batches=tuple(chosen.batch),
        kinds=tuple(chosen.kinds),
        nodes=tuple(chosen.nodes),
        modes=tuple(chosen.modes),
        context=chosen.context,
        rounds=chosen.rounds,
        device=chosen.device,
    )
    console = Console()

    def keep(report: dict[str, Any]) -> None:
        if chosen.json:
            add_report(chosen.json, report)

    print_report(measure(setup, console, keep), console)


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
