"""Drafters that need no training: none, n-gram lookup, and an oracle for tests and upper bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftheads.heads.base import Committed
from draftheads.heads.shape import TreeShape
from draftheads.heads.tree import TokenTree, Topology


class NoDraft:
    """Proposes nothing: the engine then decodes one token per forward, as the plain model does."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._root: Topology | None = None

    def propose(self, committed: Committed) -> TokenTree:
        tokens_B = committed.last_tokens_B()
        if self._root is None:
            self._root = Topology(torch.full((1, 1), -1, device=tokens_B.device))
        return TokenTree(tokens_B[:, None], self._root)


class Oracle:
    """Knows each row's continuation and hides it in a tree: the upper bound of every head of that
    shape.

    continuations: per row, the tokens that follow the prompt. noise: the chance that a node is
    spoilt, seed: of the spoiling. The path of best guesses (rank 0) carries the truth, the other
    nodes carry wrong tokens.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        shape: TreeShape,
        continuations: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.shape = shape
        self.continuations = continuations
        self.vocab_size = vocab_size
        self.noise = noise
        self.written: list[int] | None = None
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, committed: Committed) -> TokenTree:
        counts = committed.counts
        if self.written is None:  # the first call brings the prompt and one token
            self.written = [1] * len(counts)
        else:
            self.written = [a + b for a, b in zip(self.written, counts, strict=True)]
        roots = committed.last_tokens_B().tolist()
        rows = [self._row(root, row) for row, root in enumerate(roots)]
        device = committed.tokens_BA.device
        return TokenTree(torch.tensor(rows, device=device), self.shape.topology(device))

    def _row(self, root: int, row: int) -> list[int]:
        assert self.written is not None
        ahead = list(self.continuations[row][self.written[row] :])
        tokens = [root]
        for path in self.shape.paths:
            depth, rank = len(path), path[-1]
            truth = ahead[depth - 1] if depth <= len(ahead) else 0
            spoilt = torch.rand((), generator=self.generator).item() < self.noise
            offset = rank + self.shape.width if spoilt else rank
            tokens.append((truth + offset) % self.vocab_size)
        return tokens
