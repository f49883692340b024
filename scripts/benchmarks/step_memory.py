"""What does a training step hold, and what does it cost to hold less?

    python scripts/benchmarks/step_memory.py --threads 1 --rows 4 --vocabulary 32000 [--json OUT]

Prints peak memory and tokens per second of a Medusa step with all logits at once and with the
chunked loss, of EAGLE-3 and block steps with and without gradient checkpointing, and EAGLE-3's peak
by steps of training-time test. Legend: R rows that are judged, D width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftheads.heads import medusa
from draftheads.infer.race import describe_machine, machine_line
from draftheads.scripts.benchmarks.step_time import Clock, table
from draftheads.scripts.benchmarks.step_trial import (
    KINDS,
    Setup,
    Trial,
    add_options,
    chosen_setup,
    create_batch,
    create_target,
)
from draftheads.train.entry import mistakes_in_one_line

TTT = (1, 3, 5, 7)


@dataclass(frozen=True)
class Case:
    """A way to take a head's step. at_once: all logits are made at once and left to autograd."""

    title: str
    kind: str
    recompute: bool = False
    at_once: bool = False

    @contextmanager
    def applied(self, trial: Trial) -> Iterator[None]:
        """`trial` takes its steps in this way."""
        trial.head.recompute = self.recompute
        other = patch.object(medusa, "linear_cross_entropy", _all_at_once)
        with other if self.at_once else nullcontext():
            yield


CASES = {
    "medusa-at-once": Case("medusa, all logits at once", "medusa", at_once=True),
    "medusa": Case("medusa, chunked loss", "medusa"),
    "medusa-recompute": Case("medusa, chunked, checkpointing", "medusa", recompute=True),
    "eagle3": Case("eagle3", "eagle3"),
    "eagle3-recompute": Case("eagle3, checkpointing", "eagle3", recompute=True),
    "block": Case("block", "block"),
    "block-recompute": Case("block, checkpointing", "block", recompute=True),
}


def _all_at_once(
    hidden_RD: Tensor, weight_VD: Tensor, labels_R: Tensor, plus: None, *, teacher: None
) -> tuple[Tensor, Tensor, None]:
    """What `linear_cross_entropy` is measured against: the loss alone, without the ranks."""
    loss = F.cross_entropy(F.linear(hidden_RD, weight_VD), labels_R, reduction="sum")
    return loss, labels_R.new_zeros(len(labels_R)), None


def peak_bytes(setup: Setup, case: Case) -> int:
    """What a head's forward and backward need beyond what was there before."""
    target, batch = create_target(setup), create_batch(setup)
    trial = Trial(case.kind, setup, target, create_batch(replace(setup, rows=1, length=64)))
    with case.applied(trial):
        trial.frozen()
        trial.learn()  # what a first call sets up is not the step's
        trial.optimizer.zero_grad()
        width = setup.hidden_size * len(trial.head.training_layers)
        shape = (*batch.tokens_BT.shape, width)
        trial.features_BTD = torch.randn(shape, device=target.device, dtype=target.dtype)
        trial.batch = batch
        if target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(target.device)
            before = torch.cuda.memory_allocated(target.device)
            trial.learn()
            return torch.cuda.max_memory_allocated(target.device) - before
        # not getrusage's ru_maxrss: a process inherits that of the one that started it
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark is now what is held
        before = _resident_peak()
        trial.learn()
        return _resident_peak() - before


def _resident_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _peak_apart(setup: Setup, name: str) -> int:
    """`peak_bytes` in a process of its own."""
    command = [sys.executable, "-m", "draftheads.scripts.benchmarks.step_memory", "--case", name]
    out = subprocess.run(
        [*command, *setup.arguments()], check=True, stdout=subprocess.PIPE, text=True
    )
    return int(out.stdout.split()[-1])


def measure(setup: Setup) -> dict[str, Any]:
    """The numbers of the report, ready for JSON: bytes and seconds."""
    target, batch = create_target(setup), create_batch(setup)
    trials = {kind: Trial(kind, setup, target, batch) for kind in KINDS}
    clock = Clock(setup)
    for trial in trials.values():
        trial.frozen()
        trial.learn()
        trial.update()  # makes the optimizer's state, as every first step does
    for _ in range(setup.repetitions):
        for name, case in CASES.items():
            trial = trials[case.kind]
            with case.applied(trial):
                for piece, function in trial.pieces().items():
                    clock.time(name, piece, function)
    seconds = {
        name: sum(clock.median(name, piece) for piece in trials[case.kind].pieces())
        for name, case in CASES.items()
    }
    return {
        "machine": describe_machine(target),
        "setup": asdict(setup),
        "cases": {
            name: {"seconds": seconds[name], "peak": _peak_apart(setup, name)} for name in CASES
        },
        "ttt": {
            steps: {
                name: _peak_apart(replace(setup, ttt=steps), name)
                for name in ("eagle3", "eagle3-recompute")
            }
            for steps in TTT
        },
    }


def print_report(report: dict[str, Any]) -> None:
    """The tables, and what they were taken on."""
    console, setup = Console(), report["setup"]
    tokens = setup["rows"] * setup["length"]
    columns = ("peak MB", "ms per step", "tokens/s")
    made = table("forward + backward of a head, and its whole step", "head", columns)
    for name, case in report["cases"].items():
        milliseconds = f"{case['seconds'] * 1e3:.0f}"
        made.add_row(
            CASES[name].title, _mega(case["peak"]), milliseconds, f"{tokens / case['seconds']:.0f}"
        )
    console.print(made)
    console.print(_ttt_table(report["ttt"]))
    console.print(
        f"{setup['rows']} rows x {setup['length']} tokens, width {setup['hidden_size']}, "
        f"{setup['layers']} layers, vocabulary {setup['vocabulary']} (eagle3: "
        f"{setup['draft_vocabulary']}), {setup['depth']} Medusa heads, {setup['ttt']} steps of "
        f"training-time test; medians of {setup['repetitions']}, {setup['clock']} time.\n"
        f"machine: {machine_line(report['machine'])}.",
        style="dim",
        highlight=False,
    )


def _ttt_table(peaks: dict[int, dict[str, int]]) -> Table:
    made = table("eagle3: peak MB", "TTT steps", ("all kept", "checkpointing"))
    for steps, each in peaks.items():
        made.add_row(str(steps), _mega(each["eagle3"]), _mega(each["eagle3-recompute"]))
    return made


def _mega(size: int) -> str:
    return f"{size / 1e6:.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--case", choices=CASES, help="print one case's peak, in bytes, alone")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    chosen = parser.parse_args(argv)
    setup = chosen_setup(chosen)
    if chosen.case:
        print(peak_bytes(setup, CASES[chosen.case]))
        return
    report = measure(setup)
    print_report(report)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
