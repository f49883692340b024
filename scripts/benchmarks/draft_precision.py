"""What is lost in τ if a head's weights are int8, or if it drafts the most frequent tokens alone?

    python scripts/benchmarks/draft_precision.py --target T --prompts P --head H [--head H ...]

The tokens that count as frequent are those of the target's answers to every second prompt; heads
are measured on the others, with the tree of --nodes, greedy. Vocabularies are cut from the trained
head, whose lm_heads lose rows, so a head that is trained with one can only be better.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.heads.base import DraftHead
from draftheads.heads.cpu.linear import pack_layers
from draftheads.heads.formats.hub import open_head
from draftheads.heads.kinds import HEADS
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.accept import Greedy
from draftheads.infer.engine import Speculator
from draftheads.infer.race import describe_machine, machine_line
from draftheads.infer.rows import Statistics
from draftheads.scripts.openings import opening_ids
from draftheads.train.entry import mistakes_in_one_line

SHARES = (1 / 2, 1 / 4, 1 / 8)
"""Of the tokens that a head drafts."""


def answers(
    target: Target, head: DraftHead | None, prompts: Sequence[Sequence[int]], new: int, nodes: int
) -> tuple[list[int], Statistics]:
    """All new tokens, and the statistics of their steps."""
    tree = head.tree.resized(nodes) if head is not None else None
    engine = Speculator(target, head, tree=tree)
    steps = [
        step
        for prompt in prompts
        for step in engine.generate(prompt, sampling=Greedy(), max_new_tokens=new)
    ]
    return [token for step in steps for token in step.tokens], Statistics.of(steps)


def cut(head: DraftHead, target: Target, ids: list[int]) -> DraftHead:
    """The same head, which drafts these tokens alone."""
    kind = HEADS[head.kind]
    choices = {"labels": "hard"} | {
        key: value for key, value in _sizes(head).items() if key in kind.Choices.model_fields
    }
    small = kind.create(target, kind.Choices(**choices), ids)
    rows = torch.isin(own_tokens(head, target), torch.tensor(ids)).nonzero()[:, 0]
    state = small.state_dict()
    for name, tensor in head.state_dict().items():
        if name not in state or name in ("token_map", "t2d", "d2t"):
            continue
        is_vocabulary = tensor.shape != state[name].shape
        state[name] = tensor[rows] if is_vocabulary else tensor
    small.load_state_dict(state)
    small.tree = head.tree if isinstance(head.tree, StaticTree) else small.tree
    return small.eval()


def own_tokens(head: DraftHead, target: Target) -> torch.Tensor:
    """Target ids of the tokens that a head drafts."""
    return torch.arange(target.vocab_size) if head.token_map is None else head.token_map


def _sizes(head: DraftHead) -> dict[str, Any]:
    """Choices that shape a head, from its config."""
    config = head.config()
    sizes: dict[str, Any] = {"depth": head.depth, "layers": getattr(head, "layers", None)}
    if "conditioning" in config:
        sizes |= {"conditioning": config["conditioning"], "prefix": bool(config["prefix_layer"])}
    if hasattr(head, "down"):
        sizes["rank"] = len(head.down[0].weight)  # type: ignore[index]
    return {key: value for key, value in sizes.items() if isinstance(value, int | str | bool)}


def rows(
    target: Target, source: str, prompts: Sequence[Sequence[int]], new: int, nodes: int
) -> Iterator[dict[str, Any]]:
    """τ of one head as it was trained, in int8, and with reduced vocabularies."""
    seen, measured = prompts[::2], prompts[1::2]
    tokens, _ = answers(target, None, seen, new, nodes)
    frequent = torch.bincount(torch.tensor(tokens), minlength=target.vocab_size)
    head = open_head(source).load(target)
    own_v = own_tokens(head, target)
    order = own_v[frequent[own_v].argsort(descending=True, stable=True)].tolist()
    text, trained = answers(target, head, measured, new, nodes)

    def row(name: str, statistics: Statistics) -> dict[str, Any]:
        tau = statistics.tokens_per_step
        lost = 1 - tau / trained.tokens_per_step
        return {"head": Path(source).name, "weights": name, "tau": tau, "lost": lost}

    yield row("as trained", trained)
    int8 = open_head(source).load(target)
    pack_layers(int8, 8, small=True, keep=list(int8.modules()))
    same, statistics = answers(target, int8, measured, new, nodes)
    assert same == text
    yield row("int8", statistics)
    if head.kind not in ("medusa", "sequential"):
        return
    for share in SHARES:
        ids = sorted(order[: int(share * len(order))])
        same, statistics = answers(target, cut(head, target, ids), measured, new, nodes)
        assert same == text
        covered = sum(token in set(ids) for token in text) / len(text)
        yield {**row(f"{len(ids)} tokens", statistics), "covered": covered}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--prompt-words", type=int)
    parser.add_argument("--head", action="append", required=True)
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers here")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = Target.load(chosen.target, dtype="float32")
    prompts = opening_ids(target, chosen.prompts, chosen.prompt_words, chosen.limit)
    found = [
        row
        for head in chosen.head
        for row in rows(target, head, prompts, chosen.max_new_tokens, chosen.nodes)
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("head", "weights", "τ", "lost", "covered"):
        table.add_column(name)
    for row in found:
        covered = f"{row['covered']:.1%}" if "covered" in row else ""
        table.add_row(
            row["head"], row["weights"], f"{row['tau']:.3f}", f"{row['lost']:.1%}", covered
        )
    console = Console()
    console.print(table)
    console.print(f"machine: {machine_line(describe_machine(target))}.", style="dim")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
