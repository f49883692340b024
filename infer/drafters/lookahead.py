"""Lookahead decoding (arXiv 2402.02057): n-grams that the target itself guesses while it verifies.

A window of guesses rides in each tree: W tokens after the newest one, and after each of these a
branch of what the target answered there in the last steps. Its answers at the ends of the branches
complete W n-grams, which are drafted where the text comes to their first token.
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
    """Drafts n-grams of the text, and those that the target guessed beside it.

    tree: limits; half of the nodes are for guesses. length: tokens of a guessed n-gram; 2 is
    parallel Jacobi decoding (arXiv 2305.10427). Raises ValueError for one below 2, and as NGram.
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
    """Looks up the end of each row's text in the text and among its guesses."""

    def __init__(self, source: Lookahead, limits: DynamicTree) -> None:
        super().__init__(source, limits)
        self.levels = source.length - 1
        longest = limits.depth + 1 - self.levels
        self.columns = max(0, min(longest, limits.draft_nodes // (2 * self.levels)))

    def new_text(self) -> GuessedText:
        """With a window of random guesses."""
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
            if text.nodes:  # none of a finished row
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
        """A path to the end of the branch of each column."""
        for level in self.levels:  # here, so that a text that is read in parts has the same guesses
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
