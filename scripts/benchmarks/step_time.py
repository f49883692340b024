"""How close is a training step to what its arithmetic costs?

    python scripts/benchmarks/step_time.py --threads 1 --rows 4 [--profile] [--json OUT]

Builds a random Llama target in memory and times training steps of Medusa, EAGLE-3 and block heads
on it. The floor of a step is its arithmetic (`step_trial.py`) divided by the rate at which
this machine multiplies matrices, measured between the steps. Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import profile

from draftheads.infer.race import describe_machine, machine_line
from draftheads.scripts.benchmarks.step_trial import (
    KINDS,
    Setup,
    Trial,
    add_options,
    chosen_setup,
    counted,
    create_batch,
    create_target,
    total,
)
from draftheads.train.entry import mistakes_in_one_line

SQUARE = 1024
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Clock:
    """Interleaved times, and between them the matmul rate, so that other work on this machine hits
    all of them alike.
    """

    def __init__(self, setup: Setup) -> None:
        device, dtype = torch.device(setup.device), getattr(torch, setup.dtype)
        tokens, width = setup.rows * setup.length, setup.hidden_size
        shapes = (SQUARE, SQUARE, SQUARE), (tokens, width, setup.intermediate_size)
        self.device = device
        self.now = CLOCKS[setup.clock]
        self.factors = {
            f"{n} x {k} x {m}": (
                torch.randn(n, k, device=device, dtype=dtype),
                torch.randn(m, k, device=device, dtype=dtype).T,
            )
            for n, k, m in shapes
        }
        self.seconds: dict[tuple[str, str], list[float]] = {}
        self.rates: dict[str, list[float]] = {name: [] for name in self.factors}

    def time(self, kind: str, piece: str, function: Callable[[], Any]) -> None:
        """Time a call, after the matrix products."""
        for shape, factors in self.factors.items():
            (n, k), m = factors[0].shape, factors[1].shape[1]
            self.rates[shape].append(2 * n * k * m / self._time(torch.matmul, *factors))
        self.seconds.setdefault((kind, piece), []).append(self._time(function))

    def rate(self) -> tuple[str, float]:
        """(shape, FLOP/s) of the faster kind of product; medians."""
        medians = {shape: statistics.median(rates) for shape, rates in self.rates.items()}
        return max(medians.items(), key=lambda item: item[1])

    def median(self, kind: str, piece: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[kind, piece])

    def _time(self, function: Callable[..., Any], *arguments: Tensor) -> float:
        self._wait()
        began = self.now()
        function(*arguments)
        self._wait()
        return self.now() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(setup: Setup, *, with_profile: bool = False) -> dict[str, Any]:
    """Time all kinds; the numbers of the report, ready for JSON. Times are in seconds."""
    target, batch = create_target(setup), create_batch(setup)
    trials = [Trial(kind, setup, target, batch) for kind in KINDS]
    clock = Clock(setup)
    checks = {trial.kind: [counted(trial.frozen), counted(trial.learn)] for trial in trials}
    for trial in trials:
        trial.update()  # makes the optimizer's state, as every first step does
    for _ in range(setup.repetitions):
        for trial in trials:
            for piece, function in trial.pieces().items():
                clock.time(trial.kind, piece, function)
    shape, rate = clock.rate()
    report: dict[str, Any] = {
        "machine": describe_machine(target),
        "setup": asdict(setup),
        "rate": {"shape": shape, "flop_per_second": rate},
        "heads": {t.kind: _results(t, clock, rate, checks[t.kind]) for t in trials},
    }
    if with_profile:
        report["profile"] = {trial.kind: _profile(trial) for trial in trials}
    return report


def _results(trial: Trial, clock: Clock, rate: float, check: list[int]) -> dict[str, Any]:
    parts = trial.parts()
    seconds = {piece: clock.median(trial.kind, piece) for piece in parts}
    floors = {piece: total(each) / rate for piece, each in parts.items()}
    seconds["whole step"], floors["whole step"] = sum(seconds.values()), sum(floors.values())
    by_formula = [total(each, only_linear=True) for each in parts.values()][:2]
    return {
        "parts": [asdict(part) for each in parts.values() for part in each],
        "seconds": seconds,
        "floor": floors,
        "reached": {piece: floors[piece] / seconds[piece] for piece in seconds},
        "frozen_forwards": {piece: s / seconds["frozen forward"] for piece, s in seconds.items()},
        "linear_flop": {"formula": by_formula, "counted": check},
    }


def _profile(trial: Trial) -> str:
    trial.frozen()
    with profile() as profiler:
        trial.learn()
    trial.optimizer.zero_grad()
    order = (
        "self_device_time_total" if trial.target.device.type == "cuda" else "self_cpu_time_total"
    )
    operators = profiler.key_averages()
    return str(operators.table(sort_by=order, row_limit=25, max_name_column_width=50))


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The floor by part, the times, and what they were taken on."""
    console = console or Console()
    for kind, results in report["heads"].items():
        console.print(_floor_table(kind, results["parts"]))
    console.print(_time_table(report["heads"]))
    for note in _notes(report):
        console.print(note, style="dim", markup=False, highlight=False)
    for kind, text in report.get("profile", {}).items():
        console.rule(f"{kind}: forward + backward by operator")
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _floor_table(kind: str, parts: list[dict[str, Any]]) -> Table:
    made = table(f"{kind}: what must be computed", "part", ("forward", "backward", "share"))
    whole = sum(part["forward"] + part["backward"] for part in parts)
    for part in parts:
        share = (part["forward"] + part["backward"]) / whole
        made.add_row(part["name"], _giga(part["forward"]), _giga(part["backward"]), f"{share:.1%}")
    made.add_row("sum, GFLOP", *(_giga(sum(p[way] for p in parts)) for way in _WAYS), "")
    return made


_WAYS = ("forward", "backward")


def _time_table(heads: dict[str, Any]) -> Table:
    names = ("floor ms", "measured ms", "reached", "x frozen")
    made = table("one training step", "piece", names)
    for kind, results in heads.items():
        for piece, seconds in results["seconds"].items():
            made.add_row(
                f"{kind}: {piece}",
                f"{results['floor'][piece] * 1e3:.1f}",
                f"{seconds * 1e3:.1f}",
                f"{results['reached'][piece]:.0%}" if results["floor"][piece] else "",
                f"{results['frozen_forwards'][piece]:.2f}",
            )
    return made


def _notes(report: dict[str, Any]) -> list[str]:
    rate, setup = report["rate"], report["setup"]
    checks = {kind: results["linear_flop"] for kind, results in report["heads"].items()}
    return [
        f"floor: FLOP / {rate['flop_per_second'] / 1e9:.0f} GFLOP/s, the median rate of "
        f"{rate['shape']} products between the steps. x frozen: multiples of the frozen forward.",
        f"{setup['rows']} rows x {setup['length']} tokens, {setup['documents']} documents in each; "
        f"medians of {setup['repetitions']} interleaved repetitions, "
        f"{setup['clock']} time.",
        *(
            f"{kind}: linear layers by formula {_giga(sum(check['formula']))} GFLOP, torch counts "
            f"{_giga(sum(check['counted']))}; more is work that the floor does not ask for."
            for kind, check in checks.items()
        ),
        f"machine: {machine_line(report['machine'])}.",
    ]


def table(title: str, first: str, others: Sequence[str]) -> Table:
    """An empty one."""
    made = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    made.add_column(first, min_width=30)
    for name in others:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _giga(flop: int) -> str:
    return f"{flop / 1e9:.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--profile", action="store_true", help="top operators by their own time")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    chosen = parser.parse_args(argv)
    report = measure(chosen_setup(chosen), with_profile=chosen.profile)
    print_report(report)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
