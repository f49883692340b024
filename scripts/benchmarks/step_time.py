"""How close is a training step to what its arithmetic costs?

    python scripts/benchmarks/step_time.py --threads 1 --rows 4 [--profile] [--json OUT]

Builds a random Llama target in memory and times training steps of Medusa, EAGLE-3 and block heads
on it. The floor of a step is its arithmetic divided by the rate at which this machine multiplies
matrices, measured between the steps.

FLOP are counted, two per multiply-add, of matrix products alone: linear layers, and attention to
the entries that are seen. Backward takes one product for the gradient of the weight and one for
that of the input, where that is wanted: not of the frozen features. Nothing is computed twice.
Legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.block import BlockHead
from draftheads.heads.eagle import Eagle3Head
from draftheads.heads.kinds import HEADS
from draftheads.heads.layers import DecoderLayer
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.infer.race import describe_machine, machine_line
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer
from draftheads.train.engines import Learner
from draftheads.train.entry import mistakes_in_one_line
from draftheads.train.recipe import OptimChoices

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""The operators that linear layers end in; FlopCounterMode counts attention under other names."""


@dataclass(frozen=True)
class Part:
    """FLOP of one part of a step. is_linear: of linear layers, not of attention."""

    name: str
    forward: int
    backward: int = 0
    is_linear: bool = True


def root_masks(batch: Batch, depth: int) -> list[Tensor]:
    """`Batch.root_masks` as tensors."""
    return [torch.from_numpy(mask_BT) for mask_BT in batch.root_masks(depth)]


def frozen_parts(target: Target, batch: Batch) -> list[Part]:
    """The target's forward; its attention is causal within each document."""
    config = target.config
    seen = int((batch.positions_BT + 1).sum())
    attention = _attention(seen, config.num_attention_heads * config.head_dim) * target.layers
    return [
        Part("target: linear layers", _linear(batch.tokens_BT.numel(), target.model.get_decoder())),
        Part("target: attention", attention, is_linear=False),
    ]


def head_parts(head: DraftHead, batch: Batch, target: Target) -> list[Part]:
    """A head's forward and backward."""
    if isinstance(head, MedusaHead):
        return _medusa_parts(head, batch)
    if isinstance(head, BlockHead):
        return _block_parts(head, batch)
    assert isinstance(head, Eagle3Head), f"no formula for {head.kind}"
    return _eagle3_parts(head, batch, target)


def total(parts: Iterable[Part], *, only_linear: bool = False) -> int:
    """FLOP, forward and backward."""
    chosen = [part for part in parts if part.is_linear or not only_linear]
    return sum(part.forward + part.backward for part in chosen)


def counted(function: Callable[[], Any]) -> int:
    """FLOP that torch sees in the linear layers of a call, and of the backward pass in it."""
    with FlopCounterMode(display=False) as counter:
        function()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if str(name).split(".")[-1] in PRODUCTS)


def _medusa_parts(head: MedusaHead, batch: Batch) -> list[Part]:
    blocks = first = words = 0
    for k, mask_BT in enumerate(root_masks(batch, head.depth)):
        judged = int(mask_BT.sum())
        blocks += _linear(judged, head.blocks[k])
        first += _linear(judged, head.blocks[k].get_submodule("layers.0"))
        words += _linear(judged, head.lm_heads[k])
    return [
        Part("head: blocks", blocks, 2 * blocks - first),
        Part("head: lm_heads", words, 2 * words),
    ]


def _eagle3_parts(head: Eagle3Head, batch: Batch, target: Target) -> list[Part]:
    layers = head.midlayer if head.layer_count == 1 else head.layers
    masks = root_masks(batch, head.choices.steps)
    judged = [int(mask_BT.sum()) for mask_BT in masks]
    seen = [int(batch.positions_BT.sum())]  # the first token of a document makes no pair
    for step in range(1, head.choices.steps):
        seen.append(int(batch.positions_BT[masks[step]].sum()) + step * judged[step])
    width = head.design.shape.heads * head.design.shape.head_dim
    attention = _attention(sum(seen), width) * head.layer_count
    fused = _linear(batch.tokens_BT.numel(), head.fc)
    first = _linear(batch.tokens_BT.numel(), layers)
    later = _linear(sum(judged[1:]), layers)
    words = _linear(sum(judged), head.lm_head)
    labels = _linear(judged[0], target.model.get_output_embeddings())
    return [
        Part("head: fc", fused, fused),
        Part("head: layer, step 0", first, 2 * first),
        Part("head: layer, later steps", later, 2 * later),
        Part("head: attention", attention, 2 * attention, is_linear=False),
        Part("head: lm_head", words, 2 * words),
        *([Part("target: lm_head, for labels", labels)] if head.choices.labels == "soft" else []),
    ]


def _block_parts(head: BlockHead, batch: Batch) -> list[Part]:
    """Without conditioning, on the target's lm_head; random anchors stand for the mean one."""
    tokens, size, shape = batch.tokens_BT.numel(), head.design.block_size, head.design.shape
    masks = root_masks(batch, head.depth)
    anchors = int(masks[0].sum(1).clamp(max=head.choices.anchors).sum())
    judged = anchors * int(sum(mask_BT.sum() for mask_BT in masks)) // int(masks[0].sum())
    seen = anchors * size * (int(batch.positions_BT[masks[0]].float().mean()) + size)
    attention = _attention(seen, shape.heads * shape.head_dim) * len(head.layers)
    fused, layers = _linear(tokens, head.fc), _linear(anchors * size, head.layers)
    attentions = [cast(DecoderLayer, layer).self_attn for layer in head.layers]
    entries = sum(
        _linear(tokens, each.k_proj) + _linear(tokens, each.v_proj) for each in attentions
    )
    words = 2 * judged * head.hidden_size * head.vocab_size
    return [
        Part("head: fc", fused, fused),
        Part("head: keys and values of features", entries, 2 * entries),
        Part("head: layers, over blocks", layers, 2 * layers),
        Part("head: attention", attention, 2 * attention, is_linear=False),
        Part("target: lm_head", words, words),
    ]


def _linear(rows: int, module: nn.Module) -> int:
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    return 2 * rows * sum(layer.weight.numel() for layer in layers)


def _attention(seen: int, width: int) -> int:
    return 2 * 2 * seen * width  # scores, and the sum of values


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
    config = LlamaConfig(
        hidden_size=setup.hidden_size,
        intermediate_size=setup.intermediate_size,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.heads,
        num_key_value_heads=setup.kv_heads,
        vocab_size=setup.vocabulary,
        max_position_embeddings=max(2048, setup.length),
        tie_word_embeddings=False,
    )
    torch.manual_seed(setup.seed)
    model = LlamaForCausalLM(config).to(setup.device, getattr(torch, setup.dtype))
    return Target(model, name="random Llama")


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
    }
    vocabulary = range(setup.draft_vocabulary) if kind == "eagle3" else None
    head = HEADS[kind].create(target, HEADS[kind].Choices(**choices[kind]), vocabulary)
    return head.float().to(target.device)


KINDS = ("medusa", "eagle3", "block")


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

    def parts(self) -> dict[str, list[Part]]:
        """What each piece's arithmetic is."""
        frozen = frozen_parts(self.target, self.batch)
        head = head_parts(self.head, self.batch, self.target)
        return dict(zip(self.pieces(), (frozen, head, []), strict=True))


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
