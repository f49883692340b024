"""Where does a decoding step spend its time: in matrix products, in other operators, in Python?

    python scripts/benchmarks/step_profile.py --target T --head H [--nodes 8] [--compile]

On a CPU. Steps are timed without torch's profiler, which then tells the share of each part: what no
operator accounts for is Python and torch's dispatcher. Operators that the compiler made of several
are `generated`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from statistics import median
from time import perf_counter

import torch._inductor.config as inductor
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from draftheads.heads.target import Target
from draftheads.infer.drafters.named import open_drafts
from draftheads.infer.engine import Speculator
from draftheads.infer.race import describe_machine, machine_line
from draftheads.infer.threads import set_threads
from draftheads.train.entry import mistakes_in_one_line

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "attention", "mkl", "onednn")
"""Parts of the names of operators that multiply matrices."""
PARTS = ("products", "generated", "other operators", "Python and dispatch")


def kind(operator: str) -> str | None:
    """The part of a step that an operator belongs to; None for a compiled function as a whole."""
    if "cpp_fused" in operator:
        return "generated"
    if "::" not in operator:
        return None
    name = operator.partition("::")[2]
    return "products" if any(part in name for part in PRODUCTS) else "other operators"


def step_parts(
    engine: Speculator, prompt: Sequence[int], steps: int
) -> tuple[float, Counter[str], float]:
    """Seconds of a step, those of each of its parts, and operators per step."""

    def answer(skipped: int) -> list[float]:
        made = engine.generate(prompt)
        list(islice(made, skipped))
        ends = [perf_counter(), *(perf_counter() for _ in islice(made, steps))]
        return [end - start for start, end in pairwise(ends)]

    answer(4)  # compiles
    seconds = min(median(answer(4)) for _ in range(3))
    made = engine.generate(prompt)
    list(islice(made, 4))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = perf_counter()
        taken = sum(1 for _ in islice(made, steps))
        profiled = perf_counter() - start
    parts: Counter[str] = Counter()
    operators = 0
    for event in profiler.key_averages():
        if part := kind(event.key):
            parts[part] += event.self_cpu_time_total / 1e6 / profiled * seconds
            operators += event.count
    parts[PARTS[-1]] = seconds - parts.total()
    return seconds, parts, operators / taken


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", action="append", default=[])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--prompt", default="Once upon a time there was")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="each once more, compiled")
    chosen = parser.parse_args(argv)
    set_threads(chosen.threads)
    inductor.cpp.enable_kernel_profile = True
    target = Target.load(chosen.target)
    prompt = target.tokenizer(chosen.prompt).input_ids
    sources = {name: drafts.load(target) for name, drafts in open_drafts(chosen.head).items()}
    engines: dict[str, Callable[[bool], Speculator]] = {
        "plain": lambda compile: Speculator(target, compile=compile)
    }
    for name, head in sources.items():
        engines[f"{name}@{chosen.nodes}"] = lambda compile, head=head: Speculator(
            target, head, tree=head.tree.resized(chosen.nodes), compile=compile
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step, microseconds")
    for column in ("all", *PARTS, "operators"):
        table.add_column(column, justify="right")
    for name, engine in engines.items():
        for compile in (False, True)[: 1 + chosen.compile]:
            seconds, parts, operators = step_parts(engine(compile), prompt, chosen.steps)
            numbers = [seconds, *(parts[part] for part in PARTS)]
            shown = [f"{number * 1e6:.0f}" for number in numbers]
            table.add_row(f"{name} compiled" if compile else name, *shown, f"{operators:.0f}")
    console = Console()
    console.print(table)
    console.print(f"machine: {machine_line(describe_machine(target))}.", style="dim")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
