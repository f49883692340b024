"""How many nodes a batch drafts: fewer where drafts cost many rows more than they bring."""

from __future__ import annotations

from dataclasses import dataclass

from draftheads.heads.tree import StaticTree, Tree

FIRST, OFTEN, TRIAL = 128, 512, 64
"""Steps of rows before the first trial of another tree and the next ones, and of a trial."""
GAIN = 1.05
"""A tree must be so much faster than the one in use."""


@dataclass
class Choice:
    """What is drafted for so many rows. size: the index of a tree."""

    size: int
    trial: int | None = None  # the tree that is tried now
    change: int = 1  # from the tree in use to the next to be tried
    left: int = FIRST  # steps of rows, until a trial begins or ends
    tokens: int = 0  # since then
    seconds: float = 0.0
    rate: float = 0.0  # tokens per second before the trial


class TreeSizes:
    """Finds the fastest of a tree, its half, its quarter, ... and no drafts, by trials while rows
    are decoded, for each number of rows. A row alone has the whole tree.
    """

    def __init__(self, tree: Tree) -> None:
        self.trees: list[Tree] = [tree]
        while (nodes := (self.trees[-1].nodes - 1) // 2) > 1:
            self.trees.append(tree.head(nodes))
        if tree.nodes > 1:
            self.trees.append(StaticTree(()))
        self._choices = {1: Choice(0)}

    def choose(self, rows: int) -> Tree:
        """The tree of the next step."""
        if rows not in self._choices:  # start with what fewer rows found
            fewer = max(number for number in self._choices if number < rows)
            self._choices[rows] = Choice(self._choices[fewer].size)
        choice = self._choices[rows]
        return self.trees[choice.size if choice.trial is None else choice.trial]

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """What the step after `choose` brought to these rows, and took."""
        if rows == 1:
            return
        choice = self._choices[rows]
        choice.tokens, choice.seconds = choice.tokens + tokens, choice.seconds + seconds
        choice.left -= rows
        if choice.left > 0:
            return
        rate = choice.tokens / max(choice.seconds, 1e-9)
        choice.tokens, choice.seconds = 0, 0.0
        if choice.trial is None:
            choice.rate, choice.left = rate, TRIAL
            choice.trial = self._neighbour(choice)
        elif rate > GAIN * choice.rate:
            choice.size, choice.trial, choice.left = choice.trial, None, FIRST
        else:
            choice.change, choice.trial, choice.left = -choice.change, None, OFTEN

    def _neighbour(self, choice: Choice) -> int:
        """The next to be tried: at either end of the sizes, there is one alone."""
        if not 0 <= choice.size + choice.change < len(self.trees):
            choice.change = -choice.change
        return min(max(choice.size + choice.change, 0), len(self.trees) - 1)
