"""How fast are batches? Tokens per second of transformers' batched `generate` and of this engine,
without drafts and with heads, at several batch sizes, in turns in one process.

    python scripts/benchmarks/batches.py --target T --head H [--head H2] --prompts P.jsonl \\
        [--batch 1 2 4 8] [--nodes 8] [--max-new-tokens 128] [--threads 1]

Every row of this engine's output is compared with `generate` of that prompt alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from draftheads.heads.hub import load_head
from draftheads.heads.target import Target
from draftheads.infer.accept import Greedy
from draftheads.infer.bench import describe_machine, machine_line
from draftheads.infer.engine import Baseline, Speculator, without_defaults
from draftheads.scripts.journey import opening_ids
from draftheads.train.entry import mistakes_in_one_line, set_threads

Rows = list[list[int]]
Decode = Callable[[Sequence[Sequence[int]]], Rows]


def ours(speculator: Speculator, limit: int) -> Decode:
    """Continue a batch with this engine."""

    def decode(prompts: Sequence[Sequence[int]]) -> Rows:
        rows: Rows = [[] for _ in prompts]
        for steps in speculator.generate_batch(prompts, max_new_tokens=limit):
            for row, step in zip(rows, steps, strict=True):
                row += step.tokens if step else []
        return rows

    return decode


def theirs(target: Target, limit: int) -> Decode:
    """Continue a left-padded batch with transformers' `generate`."""
    eos = list(target.eos_ids)
    config = GenerationConfig(
        max_new_tokens=limit, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0
    )

    def decode(prompts: Sequence[Sequence[int]]) -> Rows:
        width = max(map(len, prompts))
        padded = [[config.pad_token_id] * (width - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        out = target.model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), generation_config=config
        )
        rows = out[:, width:].tolist()
        ends = [[i for i, token in enumerate(row, start=1) if token in eos] for row in rows]
        return [row[: end[0]] if end else row for row, end in zip(rows, ends, strict=True)]

    return decode


def measure(
    target: Target, decoders: dict[str, Decode], prompts: Rows, size: int, truth: Rows
) -> dict[str, tuple[float, int]]:
    """Tokens per second, and the number of rows that equal the truth, of each decoder."""
    batches = [slice(first, first + size) for first in range(0, len(prompts), size)]
    tokens, seconds = dict.fromkeys(decoders, 0), dict.fromkeys(decoders, 0.0)
    equal = dict.fromkeys(decoders, 0)
    names = list(decoders)
    for name in names:
        decoders[name](prompts[batches[0]])
    for turn, part in enumerate(batches):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = perf_counter()
            rows = decoders[name](prompts[part])
            seconds[name] += perf_counter() - began
            tokens[name] += sum(map(len, rows))
            equal[name] += sum(map(list.__eq__, rows, truth[part]))
    return {name: (tokens[name] / seconds[name], equal[name]) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", action="append", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--prompt-words", type=int)
    parser.add_argument("--limit", type=int, default=16, help="prompts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    chosen = parser.parse_args()
    set_threads(chosen.threads)
    target, limit = Target.load(chosen.target), chosen.max_new_tokens
    prompts = opening_ids(target, chosen.prompts, chosen.prompt_words, chosen.limit)
    decoders = {"generate": theirs(target, limit), "plain": ours(Speculator(target), limit)}
    for folder in chosen.head:
        head = load_head(folder, target=target)
        tree = head.tree.head(chosen.nodes)
        decoders[Path(folder).name] = ours(Speculator(target, head, tree=tree), limit)
    table = Table(title=f"{target.name}: tokens per second", box=box.SIMPLE_HEAD)
    for name in ("batch", *decoders):
        table.add_column(name, justify="right")
    with without_defaults(target):
        alone = Baseline(target)
        truth = [
            [*alone.generate(prompt, sampling=Greedy(), max_new_tokens=limit)][0].tokens
            for prompt in prompts
        ]
        for size in chosen.batch:
            found = measure(target, decoders, prompts, size, truth)
            base = found["generate"][0]
            table.add_row(
                str(size),
                *(
                    f"{speed:.0f} ({speed / base:.2f}x, {equal}/{len(prompts)} equal)"
                    for speed, equal in found.values()
                ),
            )
    console = Console(width=160)
    console.print(table)
    console.print(f"machine: {machine_line(describe_machine(target))}.", style="dim")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
