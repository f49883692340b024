"""Prompt lookup: drafts continuations from earlier places in the text, and from earlier texts.

Legend: B batch, C committed tokens of a step, D feature width.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np

from draftheads.heads.drafting import Committed
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, TokenTree, Tree
from draftheads.infer.paths import TokenPath, refuse_fixed, stacked
from draftheads.infer.sources import DrafterSource

KEY = 2
"""Number of tokens by which a memory finds places."""
TRIES = 32
"""Number of unsorted places of a memory that are compared with the end of a text, newest first."""
UNSORTED = 4096
"""Number of places that may always stay unsorted."""
REACH = 16
"""Number of tokens before a place that are compared."""
NOTHING = -1
"""Token that separates the texts of a memory."""


@dataclass(frozen=True)
class NGram(DrafterSource):
    """Prompt lookup: drafts the tokens that followed earlier occurrences of the newest tokens, and
    nothing if there are none.

    tree: limits; `top_k` is the number of earlier places, newest first, and `depth` the number of
    tokens copied from each. longest, shortest: lengths of the suffix to look up; the longest one
    with an earlier occurrence is used. memory: earlier texts, used when they match more of the
    newest tokens. Raises ValueError for lengths out of order.
    """

    tree: DynamicTree = DynamicTree(draft_nodes=15, depth=15, top_k=4)  # 16 with the root
    longest: int = 3
    shortest: int = 2
    memory: NGramIndex | None = field(default=None, repr=False)

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
        limits = tree or self.tree
        assert isinstance(limits, DynamicTree)
        return NGramDrafter(self, limits)


class NGramIndex:
    """Earlier texts in which n-grams are looked up. Not thread-safe.

    Places are sorted by the tokens before them, read backwards, as in a suffix array. Places of the
    newest texts are in lists until there are as many as sorted ones.

    limit: the most tokens that it holds; beyond it, the older half is dropped.
    """

    def __init__(self, limit: int = 250_000) -> None:
        self.limit = limit
        self._tokens = array("q")
        self._newest: dict[tuple[int, ...], list[int]] = defaultdict(list)  # places, by KEY tokens
        self._last: list[int] = []  # the newest text
        self._sort()

    def append(self, text: Sequence[int]) -> None:
        """Add a text. If it begins with the text before it, as each turn of a conversation does,
        only the rest is stored.
        """
        new = list(text)
        known = len(self._last)
        if known and new[:known] == self._last:
            self._tokens.pop()  # the end of the text goes on
            new = new[known:]
        self._last = list(text)
        if len(self._tokens) + len(new) >= self.limit:
            self._tokens = self._tokens[-self.limit // 2 :]
            self._sort()
        for token in [*new[-self.limit // 2 :], NOTHING]:
            if token != NOTHING:
                self._newest[tuple(self._tokens[-KEY:])].append(len(self._tokens))
            self._tokens.append(token)
        if len(self._tokens) > 2 * max(UNSORTED, len(self._sorted)):
            self._sort()

    def _sort(self) -> None:
        tokens = np.array(self._tokens, np.int64)
        places = np.flatnonzero(tokens != NOTHING)
        self._before = np.concatenate([np.full(REACH, NOTHING), tokens])
        columns = [self._before[places + REACH - 1 - back] for back in range(REACH)]
        order = np.lexsort(columns[::-1])
        self._sorted = places[order]
        self._pairs = _pair(columns[0], columns[1])[order]
        self._newest.clear()

    def continuations(
        self, text: Sequence[int], above: int, limits: DynamicTree
    ) -> list[TokenPath]:
        """The next `limits.depth` tokens (fewer at the end of an earlier text) after the places
        whose previous tokens match the end of this text longest, newest first; none unless the
        match is longer than `above`.
        """
        if len(text) < KEY:
            return []
        most, best = self._agreeing(text[: -REACH - 1 : -1])
        best = sorted(best[-limits.top_k :], reverse=True)
        newest: list[int] = []
        for place in reversed(self._newest.get(tuple(text[-KEY:]), [])[-TRIES:]):
            length = agreement(text, self._tokens, place)
            if length > most:
                newest = best = []
                most = length
            if length == most:
                newest = [*newest, place]
        if most <= max(above, KEY - 1):
            return []
        copies = []
        for place in [*newest, *best][: limits.top_k]:
            copy = tuple(self._tokens[place : place + limits.depth])
            copies.append(copy[: copy.index(NOTHING)] if NOTHING in copy else copy)
        return copies

    def _agreeing(self, end: Sequence[int]) -> tuple[int, list[int]]:
        """The length of the longest match between the end of a text, reversed in `end`, and the
        tokens before sorted places; and these places, ascending.
        """
        pair = _pair(*end[:KEY])
        low, high = np.searchsorted(self._pairs, [pair, pair + 1])
        length = KEY if low < high else 0
        while KEY <= length < len(end):
            column = self._before[self._sorted[low:high] + REACH - 1 - length]
            left, right = np.searchsorted(column, [end[length], end[length] + 1])
            if left == right:
                break
            low, high = low + left, low + right
            length += 1
        return length, np.sort(self._sorted[low:high]).tolist()


def _pair(newest: Any, before: Any) -> Any:
    """One number for two tokens, which sorts like the pair."""
    return newest * (1 << 32) + before + 1


class NGramDrafter:
    """Looks up the end of each row's text in the text itself and in a memory."""

    feature_layers: tuple[int, ...] = ()
    cache = None

    def __init__(self, source: NGram, limits: DynamicTree) -> None:
        self.limits = limits
        self.lengths = range(source.shortest, source.longest + 1)
        self.memory = source.memory
        self.texts: list[NGramText] = []

    def propose(self, committed: Committed) -> TokenTree:
        if not self.texts:
            self.texts = [self.new_text() for _ in committed.counts]
        news = committed.tokens_BC.tolist()
        rows: list[list[TokenPath]] = []
        for text, new, count in zip(self.texts, news, committed.counts, strict=True):
            text.append(new[:count])
            copies = self.copies(text) if count else []
            rows.append(most_shared(copies, self.limits.draft_nodes))
        roots = [text.tokens[-1] for text in self.texts]
        return stacked(roots, rows, committed.tokens_BC.device)

    def copies(self, text: NGramText) -> list[TokenPath]:
        """Continuations of the end of a text, from the text itself or the memory, whichever has the
        longer match (the text, if equal). A long match says more than a near place: on 300
        conversations, fewer tokens were accepted when the memory was asked only if the text had no
        match.
        """
        places = text.places()
        if self.memory is not None:
            lengths = [agreement(text.tokens, text.tokens, place) for place in places]
            above = max(lengths, default=self.lengths.start - 1)
            if copies := self.memory.continuations(text.tokens, above, self.limits):
                return copies
        return text.copies(places, self.limits.depth)

    def new_text(self) -> NGramText:
        """The text of a new row."""
        return NGramText(self.lengths, self.limits.top_k)

    def rewind(self, length: int) -> None:
        text = self.new_text()
        text.append(self.texts[0].tokens[:length])
        self.texts = [text]


def most_shared(copies: Sequence[TokenPath], count: int) -> list[TokenPath]:
    """The `count` nodes that most copies pass through; among equals the shallower ones, then those
    of earlier copies.
    """
    shared = Counter(copy[:depth] for copy in copies for depth in range(1, len(copy) + 1))
    order = sorted(shared, key=lambda path: (-shared[path], len(path)))
    best = set(order[:count])
    return [path for path in shared if path in best]


class NGramText:
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

    def places(self) -> list[int]:
        """The places after the longest suffix that occurred before, newest first."""
        for length in reversed(self._lengths):
            if places := self._after.get(tuple(self.tokens[-length:])):
                return [*reversed(places)]
        return []

    def copies(self, places: Sequence[int], depth: int) -> list[TokenPath]:
        """Copies `depth` tokens from each place. A copy that reaches the end of the text continues
        with the tokens that it has copied.
        """
        copies = [self.tokens[place : place + depth] for place in places]
        return [tuple(islice(cycle(copy), depth)) for copy in copies]


def agreement(text: Sequence[int], other: Sequence[int], place: int) -> int:
    """The number of tokens before a place of another text that match the end of a text; at most
    `REACH`.
    """
    most = min(len(text), place, REACH)
    length = 0
    while length < most and text[-1 - length] == other[place - 1 - length]:
        length += 1
    return length
