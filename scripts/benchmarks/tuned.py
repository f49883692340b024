"""Is the tree that `tune` finds as fast as the best of five that a person might choose?

    python scripts/benchmarks/tuned.py --target T --head H --dtype float32 [--compile] \\
        --prompts tune.txt --others race.txt

One row of markdown: tokens per second on prompts that `tune` never saw of chains of 4 and 7 and of
the head's own 4, 16 and 60 best nodes; then those of the tuned tree.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from draftheads.heads.hub import open_head
from draftheads.heads.target import Target
from draftheads.heads.tree import StaticTree, Tree
from draftheads.infer.bench import fitting_prompts
from draftheads.infer.costs import NONE, Trial
from draftheads.infer.tune import Track, TuneOptions, tune
from draftheads.scripts.journey import opening_ids
from draftheads.train.entry import mistakes_in_one_line, set_threads

COLUMNS = "chain 4", "chain 7", "4", "16", "60"


def by_hand(own: Tree, depth: int) -> list[Tree]:
    """The trees of `COLUMNS`, as deep as a head drafts."""
    chains: list[Tree] = [StaticTree.from_widths([1] * min(length, depth)) for length in (4, 7)]
    return [*chains, *(own.head(nodes) for nodes in (4, 16, 60))]


def row(
    target: Target, head_folder: str, prompts: list[list[list[int]]], options: TuneOptions
) -> str:
    """Tune on the first prompts, race on the second."""
    head = open_head(head_folder).load(target)
    found = tune(target, head, prompts[0], options)
    fixed = by_hand(head.tree, head.depth)
    chosen = [Trial(tree, 1.0, 1.0) for tree in (found.best.tree, NONE, *fixed)]
    others = fitting_prompts(target, prompts[1], options.max_new_tokens)
    raced = Track(target, head, options, None).trials(chosen, others)
    measured = {each.tree: each for each in raced}
    tuned, best = measured[found.best.tree], max((measured[t] for t in fixed), key=_speed)
    errors = [each.predicted / each.measured - 1 for each in found.trials if each.predicted]
    chosen_error = found.best.predicted / found.best.measured - 1  # -100%: not predicted
    low, high = best.gain_ci95
    cells = [
        f"{Path(target.name).name}, {str(target.dtype).removeprefix('torch.')}"
        + ", compiled" * options.compile,
        Path(head_folder).name,
        f"{measured[NONE].measured:.0f}",
        *(f"{measured[tree].measured:.0f}" for tree in fixed),
        f"**{tuned.measured:.0f}** ({tuned.tree.draft_nodes} nodes, {tuned.tree.depth} deep)",
        f"{tuned.measured / best.measured:.2f} ({1 / high:.2f} to {1 / low:.2f})",
        f"{chosen_error:+.0%} ({min(errors):+.0%} to {max(errors):+.0%})",
    ]
    return f"| {' | '.join(cells)} |"


def _speed(trial: Trial) -> float:
    return trial.measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--others", required=True)
    parser.add_argument("--prompt-words", type=int)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    chosen = parser.parse_args()
    set_threads(1)
    head = ["target", "head", "plain", *COLUMNS, "tuned", "over the best", "prediction error"]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    target = Target.load(chosen.target, dtype=chosen.dtype)
    prompts = [
        opening_ids(target, source, chosen.prompt_words, chosen.limit)
        for source in (chosen.prompts, chosen.others)
    ]
    options = TuneOptions(max_new_tokens=chosen.max_new_tokens, compile=chosen.compile)
    print(row(target, chosen.head, prompts, options))


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
