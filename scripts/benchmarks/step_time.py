"""How close is a training step to what its arithmetic costs?

    python scripts/benchmarks/step_time.py --threads 1 --rows 4 [--profile] [--json OUT]

Builds a random Llama target in memory and times training steps of heads on it. The floor of a step
is its arithmetic divided by the rate at which this machine multiplies matrices, measured between
the steps.

FLOP are counted by torch, two per multiply-add, of linear layers and of attention. Backward takes
one product for the gradient of the weight and one for that of the input, where that is wanted: not
of the frozen features.
Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.kinds import HEADS
from draftheads.heads.target.model import Target
from draftheads.infer.race import describe_machine, machine_line
from draftheads.scripts.benchmarks import random_models
from draftheads.scripts.benchmarks.random_models import Shape
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer
from draftheads.train.engines import Learner
from draftheads.train.entry import mistakes_in_one_line
from draftheads.train.recipe import OptimChoices

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""The operators that linear layers end in; FlopCounterMode counts attention under other names."""


def counted(function: Callable[[], Any]) -> int:
    """FLOP of the matrix products and of the attention of a call, and of the backward pass in it,
    as torch counts them.
    """
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# The pieces of a training step on a random target, ready to be called again and again.
#
# Legend: B batch, T tokens, D width.


@dataclass(frozen=True)
class Setup:
    """The choices of one run; the sizes are the target's, and EAGLE-3's layer has the same.

    documents: packed into each row of `length` tokens. depth: Medusa's heads. ttt: EAGLE-3's steps
    of training-time test. anchors: block heads' blocks per row. threads: 0 leaves torch's number.
    dtype: of the target and of matrix products; the heads' weights are float32, as in training.
    clock: "wall", or "cpu": time that all threads together had, which on a busy machine is fairer
    where there is one thread.
    """

    hidden_size: int = 512
    intermediate_size: int = 1376
    layers: int = 8
    heads: int = 8
    kv_heads: int = 8
    vocabulary: int = 4096
    draft_vocabulary: int = 4096
    rows: int = 8
    length: int = 512
    documents: int = 4
    depth: int = 4
    ttt: int = 7
    anchors: int = 64
    repetitions: int = 5
    threads: int = 0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    clock: str = "wall"

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        pairs = [(option(name), str(value)) for name, value in asdict(self).items()]
        return [word for pair in pairs for word in pair]


def create_target(setup: Setup) -> Target:
    """A random Llama."""
    shape = Shape(
        hidden=setup.hidden_size,
        vocab=setup.vocabulary,
        layers=setup.layers,
        intermediate=setup.intermediate_size,
        heads=setup.heads,
        kv_heads=setup.kv_heads,
        head_dim=setup.hidden_size // setup.heads,
        device=setup.device,
        dtype=setup.dtype,
    )
    return random_models.create_target(shape)


def create_batch(setup: Setup) -> Batch:
    """Documents of random tokens, packed as in training, all learned but the first of each."""
    size, count = setup.length // setup.documents, setup.documents * setup.rows
    tokens_DT = torch.randint(setup.vocabulary, (count, size), dtype=torch.int32).tolist()
    documents = Documents.read(Answer(tokens, [(0, size)]) for tokens in tokens_DT)
    rows = Rows(documents, documents.spans, setup.length, pack=True, seed=setup.seed)
    return rows.batch(range(len(rows))).to(setup.device)


def create_head(kind: str, setup: Setup, target: Target) -> DraftHead:
    """A new head as the trainer makes it."""
    choices: dict[str, dict[str, Any]] = {
        "medusa": {"depth": setup.depth},
        "eagle3": {"steps": setup.ttt},
        "block": {"conditioning": "none", "anchors": setup.anchors},
        "sequential": {"depth": setup.depth},
    }
    vocabulary = None if kind == "block" else range(setup.draft_vocabulary)
    head = HEADS[kind].create(target, HEADS[kind].Choices(**choices[kind]), vocabulary)
    return head.float().to(target.device)


KINDS = ("medusa", "eagle3", "block", "sequential")


class Trial:
    """The pieces of a head's training step, to be called again and again."""

    def __init__(self, kind: str, setup: Setup, target: Target, batch: Batch) -> None:
        self.kind, self.target, self.batch = kind, target, batch
        self.head = create_head(kind, setup, target)
        self.optimizer = Learner(self.head, "fp32").optimizer(OptimChoices())
        self.dtype = target.dtype
        self.features_BTD: Tensor | None = None

    def frozen(self) -> None:
        """The target's forward."""
        self.features_BTD = self.target.features(self.batch, self.head.training_layers)

    def learn(self) -> None:
        """The head's forward and backward."""
        is_mixed = self.dtype != torch.float32
        with torch.autocast(self.target.device.type, self.dtype, enabled=is_mixed):
            loss = self.head(self.batch, self.features_BTD, self.target).loss
        (loss / int(self.batch.loss_mask_BT.sum())).backward()

    def update(self) -> None:
        """Clipping and AdamW."""
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pieces(self) -> dict[str, Callable[[], None]]:
        """Name in the report -> call, in the order of a step."""
        return {
            "frozen forward": self.frozen,
            "head forward + backward": self.learn,
            "optimizer": self.update,
        }


def add_options(parser: ArgumentParser) -> None:
    """One for each choice of `Setup`."""
    for field in fields(Setup):
        kind = type(field.default)
        parser.add_argument(
            option(field.name), type=kind, default=field.default, help="%(default)s"
        )


def chosen_setup(chosen: Namespace) -> Setup:
    """What the command line chose; torch has that many threads from now on."""
    setup = Setup(**{field.name: getattr(chosen, field.name) for field in fields(Setup)})
    if setup.threads:
        torch.set_num_threads(setup.threads)
    return setup


def option(name: str) -> str:
    """The command line's word for a choice of `Setup`."""
    return f"--{name.replace('_', '-')}"


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
    flop = {trial.kind: [counted(each) for each in trial.pieces().values()] for trial in trials}
    for _ in range(setup.repetitions):
        for trial in trials:
            for piece, function in trial.pieces().items():
                clock.time(trial.kind, piece, function)
    shape, rate = clock.rate()
    report: dict[str, Any] = {
        "machine": describe_machine(target),
        "setup": asdict(setup),
        "rate": {"shape": shape, "flop_per_second": rate},
        "heads": {trial.kind: _results(trial, clock, rate, flop[trial.kind]) for trial in trials},
    }
    if with_profile:
        report["profile"] = {trial.kind: _profile(trial) for trial in trials}
    return report


def _results(trial: Trial, clock: Clock, rate: float, flop: list[int]) -> dict[str, Any]:
    seconds = {piece: clock.median(trial.kind, piece) for piece in trial.pieces()}
    floors = {piece: count / rate for piece, count in zip(seconds, flop, strict=True)}
    seconds["whole step"] = sum(seconds.values())
    floors["whole step"] = sum(floors.values())
    tokens = trial.batch.tokens_BT.numel()
    return {
        "seconds": seconds,
        "floor": floors,
        "reached": {piece: floors[piece] / seconds[piece] for piece in seconds},
        "tokens_per_second": tokens / seconds["whole step"],
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
    console.print(_time_table(report["heads"]))
    for note in _notes(report):
        console.print(note, style="dim", markup=False, highlight=False)
    for kind, text in report.get("profile", {}).items():
        console.rule(f"{kind}: forward + backward by operator")
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _time_table(heads: dict[str, Any]) -> Table:
    names = ("floor ms", "measured ms", "reached")
    made = table("one training step", "piece", names)
    for kind, results in heads.items():
        for piece, seconds in results["seconds"].items():
            made.add_row(
                f"{kind}: {piece}",
                f"{results['floor'][piece] * 1e3:.1f}",
                f"{seconds * 1e3:.1f}",
                f"{results['reached'][piece]:.0%}" if results["floor"][piece] else "",
            )
    return made


def _notes(report: dict[str, Any]) -> list[str]:
    rate, setup = report["rate"], report["setup"]
    speeds = [f"{kind} {each['tokens_per_second']:.0f}" for kind, each in report["heads"].items()]
    return [
        f"floor: FLOP / {rate['flop_per_second'] / 1e9:.0f} GFLOP/s, the median rate of "
        f"{rate['shape']} products between the steps. Tokens per second: {', '.join(speeds)}.",
        f"{setup['rows']} rows x {setup['length']} tokens, {setup['documents']} documents in each; "
        f"medians of {setup['repetitions']} interleaved repetitions, {setup['clock']} time.",
        f"machine: {machine_line(report['machine'])}.",
    ]


def table(title: str, first: str, others: Sequence[str]) -> Table:
    """An empty one."""
    made = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    made.add_column(first, min_width=30)
    for name in others:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
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
