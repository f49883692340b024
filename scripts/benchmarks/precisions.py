"""How many tokens do heads draft for a target in several precisions? All in one run.

    python scripts/benchmarks/precisions.py --target MODEL --target MODEL-Q4_0.gguf \\
        --head TRAINED_ON_MODEL --head TRAINED_ON_Q4 --prompts PROMPTS [--json OUT]

Greedy, on the same prompts. Tokens per step of each head with each target, with the 95 % interval
over prompts; the share of answers that are equal to those of the first target.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from draftheads.heads.formats.hub import load_head, open_head
from draftheads.heads.target import Target
from draftheads.infer.engine import Speculator, Statistics
from draftheads.scripts.journey import opening_ids
from draftheads.train.entry import mistakes_in_one_line

RESAMPLES = 2000


def acceptance(
    target: Target, head: Any, prompts: list[list[int]], new: int
) -> tuple[list[Statistics], list[list[int]]]:
    """Statistics and answers of each prompt."""
    engine, found, answers = Speculator(target, head), [], []
    for prompt in prompts:
        steps = list(engine.generate(prompt, max_new_tokens=new))
        found.append(Statistics.of(steps))
        answers.append([token for step in steps for token in step.tokens])
    return found, answers


def interval(each: list[Statistics]) -> tuple[float, float, float]:
    """Tokens per step over all prompts, and its 95 % bootstrap interval."""
    counts_P2 = torch.tensor([[one.tokens, one.steps] for one in each], dtype=torch.float64)
    places = torch.randint(
        len(each), (RESAMPLES, len(each)), generator=torch.Generator().manual_seed(0)
    )
    sums_R2 = counts_P2[places].sum(1)
    low, high = (sums_R2[:, 0] / sums_R2[:, 1]).quantile(torch.tensor([0.025, 0.975]).double())
    tokens, steps = counts_P2.sum(0).tolist()
    return tokens / steps, float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", required=True)
    parser.add_argument("--head", action="append", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, prompts = [], list[list[int]]()
    with mistakes_in_one_line():
        first: dict[str, list[list[int]]] = {}
        for name in options.target:
            target = Target.load(name)
            prompts = prompts or opening_ids(target, options.prompts, None, options.limit)
            for folder in options.head:
                with warnings.catch_warnings():  # that it was trained on another precision
                    warnings.simplefilter("ignore")
                    head = load_head(folder, target=target)
                each, answers = acceptance(target, head, prompts, options.new_tokens)
                mean, low, high = interval(each)
                trained = open_head(folder).facts.target.quantisation or "as trained"
                same = sum(map(list.__eq__, answers, first.setdefault(folder, answers)))
                row = {"target": name, "head": folder, "trained on": trained}
                row |= {"tokens per step": f"{mean:.3f} ({low:.3f} to {high:.3f})"}
                rows.append(row | {"equal answers": f"{same} of {len(prompts)}"})
                print(" | ".join(rows[-1].values()), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
