"""What does it cost to verify a tree on a hybrid target?

    python scripts/benchmarks/hybrid_cost.py [--nodes 8] [--repetitions 7] [--threads 1]

Random weights at the shapes of real models, in bfloat16. Times, in turns: transformers' own forward
of one token with its own cache; one step here without drafts; a tree of drafts, whose kept path is
three nodes deep, in one call of each mixer and level by level. Prints a Markdown table of medians
in milliseconds of CPU time and their ratios to transformers' forward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache
from typer import Option

from draftheads.heads import Target, TokenTree
from draftheads.heads.tree import StaticTree, Topology

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


def main(
    nodes: Annotated[int, Option(help="draft nodes")] = 8,
    repetitions: Annotated[int, Option(help="of each time")] = 7,
    threads: Annotated[int, Option(help="of torch")] = 1,
) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    typer.echo("| shape | parameters | transformers | plain | tree | by level | states of a row |")
    typer.echo("| --- | --- | --- | --- | --- | --- | --- |")
    for name, (kind, options) in SHAPES.items():
        torch.manual_seed(0)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**options))
        model = model.to(torch.bfloat16).to_empty(device="cpu")
        for parameter in [*model.parameters(), *model.buffers()]:
            parameter.data.normal_(std=0.02)
        with torch.inference_mode():
            typer.echo(row(name, Target(model), nodes, repetitions))


def row(name: str, target: Target, nodes: int, repetitions: int) -> str:
    """A line of the table."""
    ids = torch.randint(target.vocab_size, (TEXT,)).tolist()
    own = DynamicCache(config=target.config)
    target.model(torch.tensor([ids]), past_key_values=own)
    shape = StaticTree.from_widths((3, 1, 1)).resized(nodes).topology()
    tokens = torch.randint(target.vocab_size, (1, shape.parents_BN.shape[1]))
    branched = TokenTree(tokens, shape)
    path = shape.ancestors_BNN[0, int(shape.levels_BN[0].argmax())].nonzero()[:, 0][:3].tolist()
    plain = TokenTree(tokens[:, :1], Topology(torch.tensor([[-1]])))
    caches = {}
    for mixing in ({}, {"by_level": True}):
        target._mixing = mixing
        caches[bool(mixing)] = cache = target.new_cache(1, TEXT + 2048)
        target.prefill([ids], cache, ())

    def step(what: TokenTree, kept: list[int], cache: Any) -> None:
        target.verify(what, cache, ())
        cache.keep(torch.tensor([kept]), [len(kept)])

    one = torch.tensor([[ids[0]]])
    works: list[Callable[[], object]] = [
        lambda: target.model(one, past_key_values=own),
        lambda: step(plain, [0], caches[False]),
        lambda: step(branched, path, caches[False]),
        lambda: step(branched, path, caches[True]),
    ]
    times = [[milliseconds(work) for work in works] for _ in range(repetitions + 1)][1:]
    first, *others = (statistics.median(column) for column in zip(*times, strict=True))
    states = caches[False].states
    size = 0
    if states is not None:
        size = sum(state.nbytes for kinds in states.committed.values() for state in kinds.values())
    millions = sum(parameter.numel() for parameter in target.model.parameters()) / 1e6
    cells = [f"{each:.0f} ({each / first:.2f})" for each in others]
    return (
        f"| {name} | {millions:.0f} M | {first:.0f} | {' | '.join(cells)} | {size / 1e6:.1f} MB |"
    )


if __name__ == "__main__":
    typer.run(main)
