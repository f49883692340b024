"""The number of nodes that a batch drafts: fewer where drafts of many rows cost more than they
bring.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftheads.heads.tree import StaticTree, Tree

FIRST, OFTEN, TRIAL = 128, 512, 64
"""Steps of rows before the first trial of another tree and the next ones, and of a trial."""
GAIN = 1.05
"""A tree must be so much faster than the one in use."""


@dataclass
class SizeSearch:
    """The trees that are drafted for so many rows. best, used: indices of trees; they differ in a
    trial.
    """

    best: int
    used: int
    change: int = 1  # from the best tree to the next to be tried
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
            self.trees.append(tree.resized(nodes))
        if tree.nodes > 1:
            self.trees.append(StaticTree(()))
        self._searches = {1: SizeSearch(0, 0)}

    def choose(self, rows: int) -> Tree:
        """The tree of the next step."""
        if rows not in self._searches:  # start with what fewer rows found
            fewer = max(number for number in self._searches if number < rows)
            best = self._searches[fewer].best
            self._searches[rows] = SizeSearch(best, best)
        return self.trees[self._searches[rows].used]

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Take the tokens and seconds of the step after `choose`."""
        if rows == 1 or len(self.trees) == 1:
            return
        search = self._searches[rows]
        search.tokens += tokens
        search.seconds += seconds
        search.left -= rows
        if search.left > 0:
            return
        rate = search.tokens / max(search.seconds, 1e-9)
        search.tokens = 0
        search.seconds = 0.0
        if search.used == search.best:
            search.rate = rate
            search.left = TRIAL
            if not 0 <= search.best + search.change < len(self.trees):
                search.change = -search.change
            search.used = search.best + search.change
        elif rate > GAIN * search.rate:
            search.best = search.used
            search.left = FIRST
        else:
            search.change = -search.change
            search.used = search.best
            search.left = OFTEN
