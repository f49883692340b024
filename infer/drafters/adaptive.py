"""Drafting only while it pays, judged by what recent drafts brought.

Legend: B batch, C committed tokens, D feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.target import Target
from draftheads.heads.tree import TokenTree, Tree
from draftheads.infer.engine import DrafterSource, NoDraft

NEWEST = 1 / 8
"""Weight of the newest step in the mean of tokens per step."""
CREDIT = 1.3
"""At the start and after each pause the mean is this times what pays."""
PAUSES = 8, 64
"""Steps of the first pause and of the longest one; while drafts fail, each is twice the last."""


class StepCosts(Protocol):
    """What steps cost, as `infer.measure.costs.Costs` knows it."""

    def break_even(self, tree: Tree) -> float:
        """Tokens per step at which decoding with this tree is as fast as without drafts."""
        ...


@dataclass(frozen=True)
class Adaptive(DrafterSource):
    """Drafts of a head or another source, in those steps where they pay.

    costs: those of the source; they say how many tokens per step pay for its tree.
    """

    drafts: DrafterSource
    costs: StepCosts

    @property
    def tree(self) -> Tree:
        """The source's own."""
        return self.drafts.tree

    def check_tree(self, tree: Tree) -> None:
        """Raise ValueError for a tree that the source cannot fill."""
        self.drafts.check_tree(tree)

    def drafter(self, target: Target, tree: Tree | None = None) -> AdaptiveDrafter:
        """A new drafter, for one generation."""
        tree = tree or self.tree
        worth = self.costs.break_even(tree)
        return AdaptiveDrafter(self.drafts.drafter(target, tree), worth)


class AdaptiveDrafter:
    """Pauses while drafts bring fewer than `worth` tokens per step, the target's own included, and
    tries again after each pause.
    """

    cache = None  # the drafter's is behind the text after a pause

    def __init__(self, drafter: Drafter, worth: float) -> None:
        self.drafter, self.worth = drafter, worth
        self.feature_layers = drafter.feature_layers
        self.mean = CREDIT * worth  # tokens per step and row, of steps with drafts
        self.left, self.pause = 0, PAUSES[0]  # steps of this pause and of the next one
        self._drafted = False
        self._seen = 0  # tokens of the first row, by the drafter
        self._unseen: list[Committed] = []  # committed in this pause
        self._none = NoDraft()

    def propose(self, committed: Committed) -> TokenTree:
        if self._drafted:
            self._learn([count for count in committed.counts if count])
        self._unseen.append(committed)
        self._drafted = not self.left
        if self.left:
            self.left -= 1
            return self._none.propose(committed)
        committed, self._unseen = joined(self._unseen), []
        self._seen += committed.counts[0]
        return self.drafter.propose(committed)

    def rewind(self, length: int) -> None:
        self._drafted = False
        more = length - self._seen
        if more > 0:
            unseen = joined(self._unseen)
            count_B = torch.full_like(unseen.count_B, more)
            self._unseen = [replace(unseen, count_B=count_B, counts=[more])]
        else:
            self.drafter.rewind(length)
            self._seen, self._unseen = length, []

    def _learn(self, counts: Sequence[int]) -> None:
        """Decide on a pause by what the last draft brought to each row."""
        self.mean += NEWEST * (sum(counts) / len(counts) - self.mean)
        if self.mean < self.worth:
            self.left, self.mean = self.pause, CREDIT * self.worth
            self.pause = min(2 * self.pause, PAUSES[1])
        elif self.mean > CREDIT * self.worth:
            self.pause = PAUSES[0]


def joined(parts: Sequence[Committed]) -> Committed:
    """What several steps added to each row, as if one had."""
    if len(parts) == 1:
        return parts[0]
    tokens, features, counts = [], [], []
    for row in range(len(parts[0].counts)):
        tokens.append(torch.cat([part.tokens_BC[row, : part.counts[row]] for part in parts]))
        features.append(torch.cat([part.features_BCD[row, : part.counts[row]] for part in parts]))
        counts.append(sum(part.counts[row] for part in parts))
    tokens_BC = pad_sequence(tokens, batch_first=True)
    features_BCD = pad_sequence(features, batch_first=True)
    count_B = torch.tensor(counts, device=tokens_BC.device)
    return Committed(tokens_BC, features_BCD, count_B, counts)
