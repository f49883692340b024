"""Prompt lookup: continuations of the text's own repeats.

Legend: B batch, C committed tokens of a step, D feature width.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from draftheads.heads.drafting import Committed
from draftheads.heads.target import Target
from draftheads.heads.tree import DynamicTree, TokenTree, Tree
from draftheads.infer.drafters.rows import TokenPath, refuse_fixed, stacked
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
        refuse_fixed(tree, "n-grams")

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
        news = committed.tokens_BC.tolist()
        rows: list[list[TokenPath]] = []
        for text, new, count in zip(self.texts, news, committed.counts, strict=True):
            text.append(new[:count])
            copies = text.continuations(self.limits.depth) if count else []
            rows.append(most_shared(copies, self.limits.draft_nodes))
        roots = [text.tokens[-1] for text in self.texts]
        return stacked(roots, rows, committed.tokens_BC.device)

    def rewind(self, length: int) -> None:
        text = _Text(self.lengths, self.limits.top_k)
        text.append(self.texts[0].tokens[:length])
        self.texts = [text]


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

    def continuations(self, depth: int) -> list[TokenPath]:
        """`depth` tokens from each place after the longest known suffix, newest place first.

        A copy that reaches the end of the text continues with what it has copied.
        """
        for length in reversed(self._lengths):
            if places := self._after.get(tuple(self.tokens[-length:])):
                copies = [self.tokens[place : place + depth] for place in reversed(places)]
                return [tuple(islice(cycle(copy), depth)) for copy in copies]
        return []


def most_shared(copies: Sequence[TokenPath], nodes: int) -> list[TokenPath]:
    """The `nodes` nodes that most copies pass through; of equals the shallower ones, then those of
    earlier copies.
    """
    shared = Counter(copy[:depth] for copy in copies for depth in range(1, len(copy) + 1))
    order = sorted(shared, key=lambda path: (-shared[path], len(path)))
    best = set(order[:nodes])
    return [path for path in shared if path in best]
