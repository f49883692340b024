"""Is the tree that `tune` finds as fast as the best of five that a person might choose?

    draftheads tune --head H --prompts tune.txt --dtype float32 --compile --dry-run --json F
    python scripts/benchmarks/tuned.py --tuned F --head H --prompts race.txt --dtype float32

One row of markdown: tokens per second on prompts that `tune` never saw of chains of 4 and 7 and of
the head's own 4, 16 and 60 best nodes; then those of the tuned tree. Steps are compiled if those of
`tune` were.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from draftheads.heads.formats.hub import HeadFolder, open_head
from draftheads.heads.target import Target
from draftheads.heads.tree import StaticTree, Tree
from draftheads.infer.measure.costs import NONE, Trial
from draftheads.infer.measure.tune import Track, TuneOptions
from draftheads.infer.race import fitting_prompts
from draftheads.infer.threads import set_threads
from draftheads.scripts.journey import opening_ids
from draftheads.train.entry import mistakes_in_one_line

COLUMNS = "chain 4", "chain 7", "4", "16", "60"


def by_hand(own: Tree, depth: int) -> list[Tree]:
    """The trees of `COLUMNS`, as deep as a head drafts."""
    chains: list[Tree] = [StaticTree.from_widths([1] * min(length, depth)) for length in (4, 7)]
    return [*chains, *(own.resized(nodes) for nodes in (4, 16, 60))]


def row(target: Target, folder: HeadFolder, ids: list[list[int]], found: dict[str, Any]) -> str:
    """Race on prompts. found: what `tune` wrote."""
    settings, head = found["settings"], folder.load(target)
    options = TuneOptions(settings["max_new_tokens"], compile=settings["compile"])
    best = found["best"]
    paths = best["tree"].get("paths")
    tree = head.tree if paths is None else StaticTree(tuple(map(tuple, paths)))
    fixed = by_hand(head.tree, head.depth)
    prompts = fitting_prompts(target, ids, options.max_new_tokens)
    chosen = [Trial(each, 1.0, 1.0) for each in (tree, NONE, *fixed)]
    measured = {t.tree: t for t in Track(target, head, options, None).trials(chosen, prompts)}
    tuned, by_person = measured[tree], max((measured[each] for each in fixed), key=_speed)
    errors = [
        each["predicted"] / each["measured"] - 1 for each in found["trials"] if each["predicted"]
    ]
    own = best["predicted"] / best["measured"] - 1
    low, high = by_person.gain_ci95
    dtype, compiled = str(target.dtype).removeprefix("torch."), ", compiled" * options.compile
    cells = [
        f"{Path(target.name).name}, {dtype}{compiled}",
        head.kind,
        f"{measured[NONE].measured:.0f}",
        *(f"{measured[each].measured:.0f}" for each in fixed),
        f"**{tuned.measured:.0f}** ({tree.draft_nodes} nodes, {tree.depth} deep)",
        f"{tuned.measured / by_person.measured:.2f} ({1 / high:.2f} to {1 / low:.2f})",
        f"{own:+.0%} ({min(errors):+.0%} to {max(errors):+.0%})",
    ]
    return f"| {' | '.join(cells)} |"


def _speed(trial: Trial) -> float:
    return trial.measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tuned", type=Path, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--prompt-words", type=int)
    parser.add_argument("--limit", type=int, default=24)
    chosen = parser.parse_args()
    set_threads(1)
    found = json.loads(chosen.tuned.read_text())
    folder = open_head(chosen.head)
    target = Target.load(chosen.target or folder.target[0], dtype=chosen.dtype)
    ids = opening_ids(target, chosen.prompts, chosen.prompt_words, chosen.limit)
    columns = ["target", "head", "plain", *COLUMNS, "tuned", "over the best", "prediction error"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    print(row(target, folder, ids, found))


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
