"""What a bench races, and where it writes what it measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftheads.heads.target.model import Target
from draftheads.heads.tree import parse_tree
from draftheads.infer.accept import Greedy
from draftheads.infer.drafters.named import NamedDrafts
from draftheads.infer.engine import DrafterSource
from draftheads.infer.measure.baseline import rivals
from draftheads.infer.measure.bench import BenchOptions, BenchReport, Entry
from draftheads.infer.measure.report import write_cards, write_json, write_markdown
from draftheads.scripts.options import check_writable_head


def contestants(
    target: Target, drafts: Mapping[str, DrafterSource], trees: Sequence[str], options: BenchOptions
) -> dict[str, Entry]:
    """The drafters with their trees, and transformers' own `generate` with drafters that it has,
    too, where it writes the same tokens.
    """
    entries = with_trees(drafts, trees)
    if options.nodes and not entries.keys() & drafts.keys():
        raise ValueError("--nodes: expected a head without a --tree, got none; leave one out")
    if isinstance(options.sampling, Greedy) and options.batch == 1:
        entries |= rivals(target, drafts)
    return entries


def with_trees(drafts: Mapping[str, DrafterSource], texts: Sequence[str]) -> dict[str, Entry]:
    """Entries of a bench: each head with each tree of --tree, as "name@tree"; "name@tree" is for
    that head alone. A head without a tree keeps its own. Raises ValueError for an unknown name.
    """
    own: dict[str, Entry] = dict(drafts)
    entries: dict[str, Entry] = {}
    for text in texts:
        name, _, tree = text.rpartition("@")
        if name and name not in drafts:
            raise ValueError(
                f"--tree {text}: expected a tree, or one of {', '.join(drafts)} before the @, "
                f"got {name}"
            )
        for each in [name] if name else list(drafts):
            entries[f"{each}@{tree}"] = (drafts[each], parse_tree(tree))
            own.pop(each, None)
    return {**own, **entries}


@dataclass(frozen=True)
class Outputs:
    """What a bench writes. cards: heads that --card is for."""

    json: Path | None
    markdown: Path | None
    cards: Sequence[str]

    def check(self) -> None:
        """Raise ValueError, before anything is measured, for a head that cannot be written."""
        for source in self.cards:
            check_writable_head(source, "--card")

    def write(self, report: BenchReport, drafts: Mapping[str, NamedDrafts]) -> None:
        """Write all of them."""
        if self.json:
            write_json(report, self.json)
        if self.markdown:
            write_markdown(report, self.markdown)
        if self.cards:
            write_cards(report, {name: each.folders[0] for name, each in drafts.items()})
