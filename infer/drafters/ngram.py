"""Prompt lookup: continuations of the text's own repeats.

Legend: B batch, A committed tokens of a step, D feature width.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from draftheads.heads.drafting import Committed
from draftheads.heads.target import Target
from draftheads.heads.tree import DynamicTree, TokenTree, Tree
from draftheads.infer.drafters.rows import RowTree, _refuse_fixed, stacked
from draftheads.infer.engine import DrafterSource


@dataclass(frozen=True)
class NGram(DrafterSource):
    """Prompt lookup: drafts what followed the newest tokens where they occurred before, and nothing
    where they did not.

    tree: limits; `top_k` is the number of earlier places, the newest first, and `depth` that of
    tokens copied from each. longest, shortest: lengths of the suffix that is looked up; the longest
    that occurred before counts. Raises ValueError for lengths out of order.
    """

    tree: DynamicTree = DynamicTree(draft_nodes=16, depth=16, top_k=4)
    longest: int = 3
    shortest: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"n-grams: expected 1 <= shortest <= longest, got {self.shortest} and "
                f"{self.longest}; swap or raise them"
            )

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a fixed tree."""
        _refuse_fixed(tree, "n-grams")

    def drafter(self, target: Target, tree: Tree | None = None) -> NGramDrafter:
        """A new drafter, for one generation."""
        limits = self.tree if tree is None else tree
        assert isinstance(limits, DynamicTree)
        return NGramDrafter(limits, self.longest, self.shortest)


class NGramDrafter:
    """Looks up the end of each row's text in the text."""

    feature_layers: tuple[int, ...] = ()
    cache = None

    def __init__(self, limits: DynamicTree, longest: int, shortest: int) -> None:
        self.limits, self.lengths = limits, range(shortest, longest + 1)
        self.texts: list[_Text] = []

    def propose(self, committed: Committed) -> TokenTree:
        if not self.texts:
            self.texts = [_Text(self.lengths, self.limits.top_k) for _ in committed.counts]
        news = committed.tokens_BA.tolist()
        rows = []
        for text, new, count in zip(self.texts, news, committed.counts, strict=True):
            text.append(new[:count])
            found = text.continuations(self.limits.depth) if count else []
            rows.append(most_shared(text.tokens[-1], found, self.limits.draft_nodes))
        return stacked(rows, committed.tokens_BA.device)

    def rewind(self, length: int) -> None:
        kept = self.texts[0].tokens[:length]
        self.texts = [_Text(self.lengths, self.limits.top_k)]
        self.texts[0].append(kept)


class _Text:
    """The text of one row, and the newest places after each of its n-grams."""

    def __init__(self, lengths: range, places: int) -> None:
        self.tokens: list[int] = []
        self._lengths = lengths
        self._after: dict[tuple[int, ...], deque[int]] = defaultdict(lambda: deque(maxlen=places))

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for length in self._lengths:
                if length <= end:
                    self._after[tuple(self.tokens[end - length :])].append(end)
            self.tokens.append(token)

    def continuations(self, depth: int) -> list[list[int]]:
        """`depth` tokens from each place after the longest known suffix, newest place first.

        A copy that reaches the end of the text continues with what it has copied.
        """
        for length in reversed(self._lengths):
            if places := self._after.get(tuple(self.tokens[-length:])):
                copies = [self.tokens[place : place + depth] for place in reversed(places)]
                return [list(islice(cycle(copy), depth)) for copy in copies]
        return []


def most_shared(root: int, continuations: Sequence[Sequence[int]], nodes: int) -> RowTree:
    """The `nodes` nodes that most continuations pass through; of equals the shallower ones, then
    those of earlier continuations.
    """
    tree, shared = RowTree(root), [0]
    for tokens in continuations:
        node = 0
        for token in tokens:
            node = tree.add(node, token)
            shared += [0] * (node == len(shared))
            shared[node] += 1
    order = sorted(range(1, len(shared)), key=lambda node: (-shared[node], tree.depths[node]))
    return tree.only(order[:nodes])
