"""How long does drafting one tree take, for each kind of head, at the shape of a given target?

    python -m draftheads.scripts.draft_time --hidden 4096 --vocab 128256 --layers 32 \
        --nodes 60 --depth 4 --device cuda --dtype bfloat16 [--kinds medusa eagle3] [--json OUT]

Weights are random and no target verifies: a drafter is given random tokens and features, and makes
a tree of them. Heads that fit in memory together (`--together-gb`) are timed in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.heads.target import Target
from draftheads.infer.report import describe_machine, machine_line
from draftheads.scripts.draft_trial import (
    DEFAULT_KINDS,
    KINDS,
    Setup,
    Trial,
    create_head,
    create_target,
    head_bytes,
    trees,
)
from draftheads.scripts.options import mistakes_in_one_line, set_threads
from draftheads.scripts.step_time import CLOCKS
from draftheads.scripts.step_trial import option

Entry = tuple[str, str]
"""A kind and a tree."""


def measure(setup: Setup, kinds: Sequence[str] = DEFAULT_KINDS) -> dict[str, Any]:
    """Time every kind; the numbers of the report, ready for JSON. Times are in seconds."""
    target = create_target(setup)
    weights: dict[str, int] = {}
    rows = []
    for trials in _groups(setup, kinds, target, weights):
        rows += _rows(trials, setup)  # in a function: no variable here may keep a head
    return {
        "machine": describe_machine(target),
        "setup": asdict(setup),
        "weight_bytes": weights,
        "drafts": rows,
    }


def _groups(
    setup: Setup, kinds: Sequence[str], target: Target, weights: dict[str, int]
) -> Iterator[dict[Entry, Trial]]:
    """Trials to be timed in turns; a group is complete, and freed by the next, once its heads take
    `setup.together_gb`. weights: filled with the size of each kind's.
    """
    trials: dict[Entry, Trial] = {}
    held = 0
    for kind in kinds:
        head = create_head(kind, setup, target)
        weights[kind] = head_bytes(head)
        held += weights[kind]
        for name, tree in trees(kind, setup).items():
            trials[kind, name] = Trial(head, target, tree, setup)
        del head  # its trials hold it; the next one is made when they are gone
        if held >= setup.together_gb * 1e9 or kind == kinds[-1]:
            yield trials
            trials.clear()
            gc.collect()  # a drafter and its memory of the text hold each other
            held = 0


def timed(trials: dict[Entry, Trial], setup: Setup) -> dict[Entry, list[float]]:
    """Seconds of each draft, after a warm-up, one trial after another in every round."""
    seconds: dict[Entry, list[float]] = {entry: [] for entry in trials}
    now = CLOCKS[setup.clock]
    for number in range(setup.warmup + setup.repetitions):
        for entry, trial in trials.items():
            committed = trial.commit(setup.accepted)
            _wait(trial.target)
            began = now()
            trial.draft(committed)
            _wait(trial.target)
            if number >= setup.warmup:
                seconds[entry].append(now() - began)
    return seconds


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def _rows(trials: dict[Entry, Trial], setup: Setup) -> list[dict[str, Any]]:
    seconds, rows = timed(trials, setup), []
    for (kind, tree), trial in trials.items():
        low, median, high = statistics.quantiles(seconds[kind, tree], n=4, method="inclusive")
        rows.append(
            {
                "kind": kind,
                "tree": tree,
                "seconds": median,
                "quartiles": [low, high],
                "repetitions": setup.repetitions,
                "bytes_read": trial.bytes_read,
            }
        )
    return rows


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The table and what it was taken on."""
    console = console or Console()
    setup = report["setup"]
    title = (
        f"drafting {setup['nodes']} nodes, depth {setup['depth']}: width {setup['hidden']}, "
        f"vocabulary {setup['vocab']} (drafted: {setup['draft_vocab'] or 'all'})"
    )
    made = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    made.add_column("kind", min_width=16)
    made.add_column("tree")
    for name in ("ms", "quartiles", "weights MB", "read MB", "GB/s"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in report["drafts"]:
        low, high = row["quartiles"]
        made.add_row(
            row["kind"],
            row["tree"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{low * 1e3:.2f}-{high * 1e3:.2f}",
            f"{report['weight_bytes'][row['kind']] / 1e6:.1f}",
            f"{row['bytes_read'] / 1e6:.1f}",
            f"{row['bytes_read'] / row['seconds'] / 1e9:.1f}",
        )
    console.print(made)
    for note in _notes(report):
        console.print(note, style="dim", markup=False, highlight=False)


def _notes(report: dict[str, Any]) -> list[str]:
    setup = report["setup"]
    return [
        f"medians of {setup['repetitions']} drafts after {setup['warmup']}, each after "
        f"{setup['accepted']} new tokens behind a text of {setup['context']}; "
        f"{setup['clock']} time, Python's share in it.",
        "weights: the head's own. read: weights and what is kept of them, once for each time that "
        "an operator reads them; GB/s: read by time.",
        f"machine: {machine_line(report['machine'])}.",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for field in fields(Setup):
        kind = type(field.default)
        parser.add_argument(
            option(field.name), type=kind, default=field.default, help="%(default)s"
        )
    parser.add_argument("--kinds", nargs="+", default=list(DEFAULT_KINDS), choices=list(KINDS))
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    chosen = parser.parse_args(argv)
    setup = Setup(**{field.name: getattr(chosen, field.name) for field in fields(Setup)})
    set_threads(setup.threads)
    report = measure(setup, list(dict.fromkeys(chosen.kinds)))
    print_report(report)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
