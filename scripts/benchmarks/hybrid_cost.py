"""What does it cost to verify a tree on a hybrid target?

    python scripts/benchmarks/hybrid_cost.py [--nodes 8] [--repetitions 7] [--compiled]

Random weights at the shapes of real models, in bfloat16. Times, in turns: transformers' own forward
of one token with its own cache; a step here without drafts; a step with a tree of constant drafts,
in one call of each mixer and level by level. --compiled also times compiled steps, without drafts
and with the tree, after a minute or two of compiling per shape. Prints a Markdown table of medians
in milliseconds of CPU time and their ratios to transformers' forward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from typer import Option

from draftheads.heads import Target, TokenTree
from draftheads.heads.drafting import Committed
from draftheads.heads.hybrid.states import Mixing, cache_argument
from draftheads.heads.target.trial import Ways
from draftheads.heads.tree import StaticTree, Tree
from draftheads.infer.engine import DrafterSource, Speculator

COMMON = {"vocab_size": 32768, "hidden_size": 1024, "num_hidden_layers": 24, "head_dim": 256}
GROUPED = {**COMMON, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 3584}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention only, 0.5 B": ("qwen3", GROUPED),
    "Qwen3.5-0.8B (gated delta nets)": (
        "qwen3_5_text",
        {**GROUPED, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
    ),
    "Granite-4-like (Mamba 2)": (
        "granitemoehybrid",
        {
            **{key: GROUPED[key] for key in GROUPED if key != "head_dim"},
            "layer_types": (["mamba"] * 3 + ["attention"]) * 6,
            "mamba_n_heads": 32,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "num_local_experts": 0,
            "shared_intermediate_size": 3584,
        },
    ),
    "LFM2-like (short convolutions)": (
        "lfm2",
        {
            **{key: GROUPED[key] for key in GROUPED if key != "head_dim"},
            "layer_types": (["conv"] * 3 + ["full_attention"]) * 6,
        },
    ),
}
TEXT = 200
"""Tokens before the step."""


def milliseconds(work: Callable[[], object]) -> float:
    """CPU time of a call."""
    started = time.process_time()
    work()
    return 1e3 * (time.process_time() - started)


class Constant(DrafterSource):
    """Drafts the same tokens in every step, in no time."""

    feature_layers: tuple[int, ...] = ()
    cache = None
    rows_may_leave = True
    why_not_compiled = None

    def __init__(self, tree: StaticTree, vocabulary: int) -> None:
        self._tree, self.topology = tree, tree.topology()
        self.drafts = torch.randint(vocabulary, (1, tree.draft_nodes))

    @property
    def tree(self) -> Tree:
        return self._tree

    def check_tree(self, tree: Tree) -> None:
        """It has but one."""

    def drafter(self, target: Target, tree: Tree | None = None) -> Constant:
        return self

    def propose(self, committed: Committed) -> TokenTree:
        tokens_BN = torch.cat([committed.last_tokens_B()[:, None], self.drafts], dim=1)
        return TokenTree(tokens_BN, self.topology)

    def rewind(self, length: int) -> None:
        """Nothing to forget."""


def main(
    nodes: Annotated[int, Option(help="draft nodes")] = 8,
    repetitions: Annotated[int, Option(help="of each time")] = 7,
    threads: Annotated[int, Option(help="of torch")] = 1,
    compiled: Annotated[bool, Option(help="time compiled steps, too")] = False,
    only: Annotated[str, Option(help="shapes whose names contain this")] = "",
) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    columns = ["transformers", "plain", "tree", "by level"]
    columns += ["compiled plain", "compiled tree"] if compiled else []
    typer.echo(f"| shape | parameters | {' | '.join(columns)} | states of a row |")
    typer.echo("| --- " * (len(columns) + 3) + "|")
    for name, (kind, options) in SHAPES.items():
        if only not in name:
            continue
        torch.manual_seed(0)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options))
        model = model.to(torch.bfloat16).to_empty(device="cpu")
        for parameter in [*model.parameters(), *model.buffers()]:
            parameter.data.normal_(std=0.02)
        with torch.inference_mode():
            typer.echo(row(name, Target(model), nodes, repetitions, compiled))


def row(name: str, target: Target, nodes: int, repetitions: int, compiled: bool) -> str:
    """A line of the table."""
    ids = torch.randint(target.vocab_size, (TEXT,)).tolist()
    own = DynamicCache(config=target.config)
    kept = {cache_argument(type(target.model)): own}
    target.model(torch.tensor([ids]), **kept)
    one = torch.tensor([[ids[0]]])
    tree = StaticTree.from_widths((3, 1, 1)).resized(nodes)

    def steps(
        tree: StaticTree, compile: bool = False, mixing: Mixing = "tree"
    ) -> Callable[[], object]:
        target.ways = Ways(mixing)
        drafts = Constant(tree, target.vocab_size)
        decode = Speculator(target, drafts, compile=compile).generate(ids, max_new_tokens=1500)
        next(decode)
        return partial(next, decode)

    works = [
        lambda: target.model(one, **kept),
        steps(StaticTree(())),
        steps(tree),
        steps(tree, mixing="levels"),
    ]
    if compiled:
        works += [steps(StaticTree(()), compile=True), steps(tree, compile=True)]
    times = [[milliseconds(work) for work in works] for _ in range(repetitions + 2)][2:]
    first, *others = (statistics.median(column) for column in zip(*times, strict=True))
    cache = target.new_cache(1, TEXT)
    target.prefill([ids], cache, ())
    size = 0
    if cache.states is not None:
        kinds = cache.states.committed.values()
        size = sum(state.nbytes for states in kinds for state in states.values())
    millions = sum(parameter.numel() for parameter in target.model.parameters()) / 1e6
    cells = [f"{each:.0f} ({each / first:.2f})" for each in others]
    return (
        f"| {name} | {millions:.0f} M | {first:.0f} | {' | '.join(cells)} | {size / 1e6:.1f} MB |"
    )


if __name__ == "__main__":
    typer.run(main)
