"""Lookahead decoding (arXiv 2402.02057): drafts n-grams that the target generates while it
verifies.

Each tree contains a window of guesses: W tokens after the newest one, each followed by a branch of
the target's answers there in the last steps. The target's answers at the ends of the branches
complete W n-grams, which are drafted when the text reaches their first token.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from draftheads.heads.tree import DynamicTree
from draftheads.infer.drafters.ngram import NGram, NGramDrafter, Text, most_shared
from draftheads.infer.paths import TokenPath


@dataclass(frozen=True)
class Lookahead(NGram):
    """Drafts n-grams of the text, and those that the target generated beside it.

    tree: limits; half of the nodes are for guesses. length: tokens of a guessed n-gram; 2 is
    parallel Jacobi decoding (arXiv 2305.10427). Raises ValueError for a length below 2, and the
    errors of NGram.
    """

    tree: DynamicTree = DynamicTree(draft_nodes=30, depth=15, top_k=4)
    length: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 2:
            raise ValueError(f"lookahead: expected n-grams of 2 tokens or more, got {self.length}")

    def drafter_of(self, limits: DynamicTree) -> LookaheadDrafter:
        """A new drafter with these limits."""
        return LookaheadDrafter(self, limits)


class LookaheadDrafter(NGramDrafter):
    """Looks up the end of each row's text in the text itself and among its guesses."""

    def __init__(self, source: Lookahead, limits: DynamicTree) -> None:
        super().__init__(source, limits)
        self.levels = source.length - 1
        longest = limits.depth + 1 - self.levels
        self.columns = max(0, min(longest, limits.draft_nodes // (2 * self.levels)))

    def new_text(self) -> GuessedText:
        """A text with a window of random guesses."""
        return GuessedText(self.lengths, self.limits.top_k, self.levels, self.columns)

    def paths(self, text: Any) -> list[TokenPath]:
        guesses = {path[:depth] for path in text.window() for depth in range(1, len(path) + 1)}
        copies = [*self.copies(text), *reversed(text.grams[text.tokens[-1]])]
        drafts = most_shared(copies, self.limits.draft_nodes - len(guesses))
        nodes = [*dict.fromkeys([*sorted(guesses, key=len), *drafts])]
        text.nodes = nodes
        return nodes

    def observe(self, choices: Sequence[Sequence[int]]) -> None:
        """See `Observer.observe`."""
        for text, chosen in zip(self.texts, choices, strict=True):
            if text.nodes:  # empty for a finished row
                text.learn(chosen)


class GuessedText(Text):
    """The text of one row, its window and its guessed n-grams."""

    def __init__(self, lengths: range, places: int, levels: int, columns: int) -> None:
        super().__init__(lengths, places)
        self.levels: list[list[int]] = [[] for _ in range(levels)]
        self.columns = columns
        self.grams: dict[int, deque[TokenPath]] = defaultdict(lambda: deque(maxlen=columns))
        self.nodes: list[TokenPath] = []
        self._random = Random(0)

    def append(self, tokens: Sequence[int]) -> None:
        super().append(tokens)
        # a level was answered one place after the level above it: with one new token, a column is
        # where it has to be
        for level in self.levels:
            del level[: max(len(tokens) - 1, 0)]

    def window(self) -> list[TokenPath]:
        """For each column, the path to the end of its branch."""
        for level in self.levels:  # filled here: the same guesses if a text is read in parts
            level += self._random.choices(self.tokens, k=self.columns - len(level))
        branches = zip(*self.levels, strict=True)
        return [(*self.levels[0][:column], *branch) for column, branch in enumerate(branches)]

    def learn(self, chosen: Sequence[int]) -> None:
        """Take the target's answers at the nodes of the newest tree."""
        answers = dict(zip(self.nodes, chosen[1:], strict=False))
        new = []
        for column, path in enumerate(self.window()):
            new.append(answers[path])
            self.grams[path[column]].append((*path[column + 1 :], answers[path]))
        self.levels = [*self.levels[1:], new]
        self.nodes = []
