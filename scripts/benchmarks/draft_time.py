"""How long does drafting one tree take, for each kind of head, at the shape of a given target?

    python scripts/benchmarks/draft_time.py --hidden 4096 --vocab 128256 --layers 32 \\
        --nodes 60 --depth 4 --device cuda --dtype bfloat16 [--kinds medusa eagle3] [--json OUT]

Weights are random: a drafter is given random tokens and features, and makes a tree of them. Heads
that fit in memory together (`--together-gb`) are timed in turns.

With `--verify` the target has all its layers and verifies each tree. The report then says what a
whole step costs over a plain one, by the same clock: as many tokens per step must a head bring to
be worth its while. The shape of Qwen3-0.6B, in both precisions:

    for dtype in float32 bfloat16; do
        python scripts/benchmarks/draft_time.py --hidden 1024 --vocab 151936 --layers 28 \\
            --intermediate 3072 --heads 16 --kv-heads 8 --nodes 8 --depth 5 --rank 256 \\
            --threads 1 --clock cpu --repetitions 5 --warmup 1 --verify --dtype $dtype
    done

Legend: B batch, C newly committed tokens, D feature width, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.initialization import no_init_weights

from draftheads.heads.base import DraftHead
from draftheads.heads.block import MARKOV_TYPES
from draftheads.heads.drafting import Committed
from draftheads.heads.eagle import UnrolledChoices
from draftheads.heads.kinds import HEADS
from draftheads.heads.sequential import CONDITIONINGS
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Tree
from draftheads.infer.race import describe_machine, machine_line
from draftheads.infer.threads import set_threads
from draftheads.scripts.benchmarks.step_time import CLOCKS, option
from draftheads.train.entry import mistakes_in_one_line

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "medusa-shared": ("medusa", {"lm_head": "shared"}),
    **{name: ("sequential", {"conditioning": name}) for name in CONDITIONINGS},
    **{
        f"{name}-shared": ("sequential", {"conditioning": name, "lm_head": "shared"})
        for name in CONDITIONINGS
    },
    **{
        f"{name}+prefix": ("sequential", {"conditioning": name, "prefix": True})
        for name in CONDITIONINGS
    },
    "recurrent-shared+prefix": (
        "sequential",
        {"conditioning": "recurrent", "lm_head": "shared", "prefix": True},
    ),
    **{
        f"block-{name}-{layers}": ("block", {"conditioning": name, "layers": layers})
        for layers in (2, 5)
        for name in ("none", *MARKOV_TYPES)
    },
    "eagle3": ("eagle3", {}),
    "eagle": ("eagle", {}),
    "mtp": ("mtp", {}),
}
"""Name -> (kind, choices). shared: the target's lm_head; others have one for each depth (eagle3,
and block with a draft vocabulary: one). prefix: a decoder layer in front. block: conditioning and
number of layers; blocks of BLOCK slots.
"""
DEFAULT_KINDS = (
    *("medusa", "medusa-shared", *CONDITIONINGS, "recurrent+prefix"),
    *("block-none-2", "block-markov-2", "block-rnn-2", "eagle3"),
)
BLOCK = 7
GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
"""Operators that read as much of their first tensor as they return."""


@dataclass(frozen=True)
class Setup:
    """The choices of one run. hidden, vocab, layers, intermediate, heads, kv_heads, head_dim: the
    target's, the last four by default in Llama 3's proportions. verify: by a target of all these
    layers. pack: target and head are packed for a CPU, as commands do it. bits: 8: an int8 target.
    nodes, depth: of all trees. top_k: of the dynamic ones. draft_vocab: tokens that the heads can
    draft, 0: all. rank: of conditioning, 0: the kind's default. context: committed tokens before
    the first tree; accepted: before each further one. clock: as in `step_time`. together_gb: heads
    that take no more are timed in turns.
    """

    hidden: int = 512
    vocab: int = 8192
    layers: int = 16
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    verify: bool = False
    pack: bool = False
    bits: int = 0
    nodes: int = 60
    depth: int = 4
    top_k: int = 10
    draft_vocab: int = 0
    rank: int = 0
    context: int = 256
    accepted: int = 3
    repetitions: int = 30
    warmup: int = 5
    threads: int = 0
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    clock: str = "wall"
    together_gb: float = 4.0

    def __post_init__(self) -> None:
        if self.repetitions < 2:  # quartiles of one draft there are none
            raise ValueError(f"repetitions: expected 2 or more, got {self.repetitions}")
        for name in ("hidden", "vocab", "layers", "nodes", "depth", "top_k", "accepted"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {getattr(self, name)}")


def create_target(setup: Setup, *, layers: int = 1) -> Target:
    """A random target. With fewer layers than `setup.layers` it cannot verify, but has what
    drafters need: embeddings, lm_head, and the sizes of its layers, as many as it says it has.
    """
    head_dim = setup.head_dim or (128 if setup.hidden >= 1024 else 64)
    heads = setup.heads or max(1, setup.hidden // head_dim)
    config = LlamaConfig(
        hidden_size=setup.hidden,
        intermediate_size=setup.intermediate or setup.hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=setup.kv_heads or max(1, heads // 4),
        head_dim=head_dim,
        vocab_size=setup.vocab,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=False,
    )
    torch.manual_seed(setup.seed)
    with torch.device(setup.device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setup.dtype))
    fill(model)
    model.generation_config = GenerationConfig()
    target = Target(model.to(setup.device), name="random Llama")
    if setup.pack:
        target.pack(8 if setup.bits else None)
    target.unembed_weight()  # its check runs the model: before it says that it is deeper
    target.layers = setup.layers
    return target


def create_head(name: str, setup: Setup, target: Target) -> DraftHead:
    """A head of one of the `KINDS`, filled with random weights."""
    kind, choices = KINDS[name]
    choices, vocabulary = {**choices, "labels": "hard"}, None
    if issubclass(HEADS[kind].Choices, UnrolledChoices):
        choices |= {"nodes": setup.nodes, "top_k": setup.top_k}
    if kind == "block":
        choices |= {"block_size": max(BLOCK, setup.depth), "mask": 0}
    else:
        choices["depth"] = setup.depth
    if setup.rank and choices.get("conditioning", "hydra") != "hydra":
        choices["rank"] = setup.rank
    if setup.draft_vocab:
        spread = torch.linspace(0, setup.vocab - 1, setup.draft_vocab, dtype=torch.float64)
        vocabulary = spread.long().tolist()
    with _default_dtype(target.dtype), no_init_weights():  # float32 would take twice the memory
        head = HEADS[kind].create(target, HEADS[kind].Choices(**choices), vocabulary)
        head.to(target.device, target.dtype)
    fill(head)
    return head.eval().pack(target) if setup.pack else head.eval()


def fill(module: torch.nn.Module) -> None:
    """Draw a million weights and repeat them: drafts take as long, and to draw all takes minutes at
    the shape of an 8B model.
    """
    drawn = torch.empty(1 << 20).normal_(std=0.02)
    for parameter in module.parameters():
        for part in parameter.data.view(-1).split(len(drawn)):
            part.copy_(drawn[: len(part)])


def trees(name: str, setup: Setup) -> dict[str, Tree]:
    """Those that a kind fills: a fixed one as calibration makes them, where a first guess is right
    in 70 % at depth 1 and a tenth less often at each further one; and a dynamic one.
    """
    accuracies_KR = [[0.7 * 0.9**k * 0.3**r for r in range(10)] for k in range(setup.depth)]
    fixed = StaticTree.best_first(accuracies_KR, setup.nodes)
    if KINDS[name][0] == "medusa":
        return {"fixed": fixed}
    return {"fixed": fixed, "dynamic": DynamicTree(setup.nodes, setup.depth, setup.top_k)}


class Trial:
    """One drafter that drafts a tree after each commit of random tokens and features."""

    def __init__(self, head: DraftHead, target: Target, tree: Tree, setup: Setup) -> None:
        self.target, self.setup = target, setup
        self.drafter = head.drafter(target, tree)
        self.width = len(head.feature_layers) * target.hidden_size
        self.bytes_read = 0
        self.draft(self.commit(setup.context + 1))  # the text; its first token makes no pair
        with Reads() as reads:
            self.draft(self.commit(setup.accepted))
        self.bytes_read = reads.bytes

    def commit(self, count: int) -> Committed:
        """What a step of decoding would bring."""
        device, dtype = self.target.device, self.target.dtype
        return Committed(
            torch.randint(self.setup.vocab, (1, count), device=device),
            torch.randn(1, count, self.width, device=device, dtype=dtype),
            torch.tensor([count], device=device),
            [count],
        )

    @torch.inference_mode()
    def draft(self, committed: Committed) -> TokenTree:
        """The tree on the newest committed token."""
        return self.drafter.propose(committed)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators read of tensors that stood in memory before: weights, what is kept of
    their products, the text's keys and values. A matrix that is read twice counts twice; what was
    made on the way, such as logits, counts not at all.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._made: list[Tensor] = []  # kept, so that no other tensor gets their memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        after = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if {_place(tensor) for tensor in before} & {_place(tensor) for tensor in after}:
            return out  # a view, or written in place
        if func.overloadpacket.__name__ in GATHERS:
            read = sum(map(_bytes, after)) if self._stood(before[0]) else 0
        else:
            read = sum(_bytes(tensor) for tensor in before if self._stood(tensor))
        self.bytes += read
        self._made += after
        return out

    def _stood(self, tensor: Tensor) -> bool:
        """Indices and masks are not worth counting."""
        return tensor.is_floating_point() and _place(tensor) not in map(_place, self._made)


def head_bytes(head: DraftHead) -> int:
    """Of its own weights; the target's, which it may share, are not among them."""
    return sum(map(_bytes, head.parameters()))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:  # others in this process rely on float32
        yield
    finally:
        torch.set_default_dtype(before)


Entry = tuple[str, str]
"""A kind and a tree."""
PLAIN: Entry = ("plain", "none")
STEP_NOTE = (
    "verify, plain: the target's forward over the tree, and over one token. c: a step with drafts "
    "over a plain one, the tokens per step at which drafts begin to pay."
)


def measure(setup: Setup, kinds: Sequence[str] = DEFAULT_KINDS) -> dict[str, Any]:
    """Time every kind; the numbers of the report, ready for JSON. Times are in seconds."""
    target = create_target(setup, layers=setup.layers if setup.verify else 1)
    steps = Steps(target, setup) if setup.verify else None
    weights: dict[str, int] = {}
    rows = []
    for trials in _groups(setup, kinds, target, weights):
        rows += _rows(trials, setup, steps)  # in a function: no variable here may keep a head
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


class Steps:
    """The target's part of decoding steps, after one random text."""

    def __init__(self, target: Target, setup: Setup) -> None:
        self.target = target
        self.cache = target.new_cache(1, setup.context + 2 * setup.nodes)
        text = torch.randint(setup.vocab, (setup.context,)).tolist()
        with torch.inference_mode():
            target.prefill([text], self.cache, ())
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        self.plain = TokenTree(token_11, StaticTree(()).topology(target.device))

    @torch.inference_mode()
    def verify(self, tree: TokenTree, layers: Sequence[int]) -> None:
        """One forward pass; nothing is kept, so that all steps come after the same text."""
        self.target.verify(tree, self.cache, layers)


def timed(
    trials: dict[Entry, Trial], setup: Setup, steps: Steps | None = None
) -> dict[Entry, list[tuple[float, float]]]:
    """Seconds of each draft and of its verification, after a warm-up, one trial after another in
    every round; with `steps` also of PLAIN ones.
    """
    seconds: dict[Entry, list[tuple[float, float]]] = {entry: [] for entry in trials}
    now = CLOCKS[setup.clock]
    if steps:
        seconds[PLAIN] = []
    for number in range(setup.warmup + setup.repetitions):
        for entry in seconds:
            trial, tree = trials.get(entry), steps.plain if steps else None
            committed = trial.commit(setup.accepted) if trial else None
            _wait()
            began = now()
            if trial and committed:
                tree = trial.draft(committed)
            _wait()
            drafted = now()
            if steps and tree:
                steps.verify(tree, trial.drafter.feature_layers if trial else ())
            _wait()
            if number >= setup.warmup:
                seconds[entry].append((drafted - began, now() - drafted))
    return seconds


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rows(trials: dict[Entry, Trial], setup: Setup, steps: Steps | None) -> list[dict[str, Any]]:
    seconds, rows = timed(trials, setup, steps), []
    plain = [sum(each) for each in seconds.pop(PLAIN, [])]
    for (kind, tree), trial in trials.items():
        drafts, verifications = zip(*seconds[kind, tree], strict=True)
        low, median, high = statistics.quantiles(drafts, n=4, method="inclusive")
        verified = statistics.median(verifications)
        rows.append(
            {
                "kind": kind,
                "tree": tree,
                "seconds": median,
                "quartiles": [low, high],
                "repetitions": setup.repetitions,
                "bytes_read": trial.bytes_read,
                "verify_seconds": verified if steps else None,
                "plain_seconds": statistics.median(plain) if steps else None,
                "cost": (median + verified) / statistics.median(plain) if steps else None,
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
    shown = _step_columns if setup["verify"] else _draft_columns
    for name in shown(report, report["drafts"][0]):
        made.add_column(name, justify="right", no_wrap=True)
    for row in report["drafts"]:
        made.add_row(row["kind"], row["tree"], *shown(report, row).values())
    console.print(made)
    for note in _notes(report):
        console.print(note, style="dim", markup=False, highlight=False)


def _draft_columns(report: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    low, high = row["quartiles"]
    return {
        "ms": f"{row['seconds'] * 1e3:.2f}",
        "quartiles": f"{low * 1e3:.2f}-{high * 1e3:.2f}",
        "weights MB": f"{report['weight_bytes'][row['kind']] / 1e6:.1f}",
        "read MB": f"{row['bytes_read'] / 1e6:.1f}",
        "GB/s": f"{row['bytes_read'] / row['seconds'] / 1e9:.1f}",
    }


def _step_columns(report: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    return {
        "draft ms": f"{row['seconds'] * 1e3:.1f}",
        "verify ms": f"{row['verify_seconds'] * 1e3:.1f}",
        "plain ms": f"{row['plain_seconds'] * 1e3:.1f}",
        "c": f"{row['cost']:.2f}",
    }


def _notes(report: dict[str, Any]) -> list[str]:
    setup = report["setup"]
    return [
        f"medians of {setup['repetitions']} drafts after {setup['warmup']}, each after "
        f"{setup['accepted']} new tokens after a text of {setup['context']}; "
        f"{setup['clock']} time, Python's share in it.",
        "weights: the head's own. read: weights and what is kept of them, once for each time that "
        "an operator reads them; GB/s: read by time.",
        *([STEP_NOTE] if setup["verify"] else []),
        f"machine: {machine_line(report['machine'])}.",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for field in fields(Setup):
        name, default = option(field.name), field.default
        if isinstance(default, bool):
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=type(default), default=default, help="%(default)s")
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
