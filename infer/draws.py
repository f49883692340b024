"""Random numbers of acceptance rules: the n-th of a row is for its n-th new token.

Legend: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from random import Random
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
"""Numbers of a row that are made together."""


class SeededRow(Protocol):
    """Where a row of a batch is: the seed of its numbers, "" until there is one, and how many new
    tokens it has.
    """

    seed: str

    @property
    def new_tokens(self) -> int: ...


class Draws:
    """Where a rule's random choices come from: a number from 0 to 1 for each place of a row. So
    what is drawn depends on the seed and the text of a row alone, neither on the rows beside it nor
    on what is drafted. Tokens are -1 where logits are not finite.

    Numbers of the same place may serve all nodes of a tree: one of them at most is on the path that
    is kept, and which one it is does not depend on them.
    """

    def __init__(self) -> None:
        self.numbers: Tensor | None = None
        """float64 (B, places) of the newest draw; in the context of `filled`, of its only one."""
        self._is_filled = False
        self._rows: Sequence[SeededRow] = ()
        self._seeds: Random | None = None  # None: torch's global stream

    def seed(self, seed: int) -> None:
        """Decide the seeds of all rows that come without one, in their order."""
        self._seeds = Random(str(seed))

    def new_seed(self) -> int:
        """The seed of the next row without one."""
        if self._seeds is None:
            return int(torch.randint(1 << 62, ()))
        return self._seeds.getrandbits(62)

    def prepare(self, rows: Sequence[SeededRow]) -> None:
        """See `Acceptance.prepare`."""
        self._rows = rows

    def draw(self, logits: Tensor, depths_BN: Tensor | None = None) -> Tensor:
        """The next token (B) of each row for logits (B, V); or with the depths (B|1, N) of a tree's
        nodes, the tokens (B, N) after these for logits (B, N, V).
        """
        if depths_BN is None:
            return self.draw(logits[:, None], logits.new_zeros(1, 1, dtype=torch.long))[:, 0]
        rows, nodes = logits.shape[:2]
        # the inverse of the distribution function
        below_BNV = logits.float().softmax(-1).cumsum(-1, dtype=torch.float64)
        total_BN1 = below_BNV[..., -1:]
        if self.numbers is None or not self._is_filled:
            self.numbers = self.next(nodes).to(logits.device)
        uniform_BN1 = self.numbers.gather(1, depths_BN.expand(rows, -1))[..., None]
        drawn_BN1 = torch.searchsorted(below_BNV, uniform_BN1 * total_BN1, right=True)
        drawn_BN1 = drawn_BN1.clamp(max=logits.shape[-1] - 1)  # by rounding alone
        return torch.where(total_BN1.isfinite(), drawn_BN1, -1)[..., 0]

    def next(self, count: int) -> Tensor:
        """The numbers of each row's next `count` places, float64 (B, count)."""
        numbers = []
        for row in self._rows:
            row.seed = row.seed or str(self.new_seed())
            first, start = divmod(row.new_tokens, BLOCK)
            blocks = range(first, first + (start + count - 1) // BLOCK + 1)
            drawn = torch.cat([_block(row.seed, block) for block in blocks])
            numbers.append(drawn[start : start + count])
        return torch.stack(numbers)

    @contextmanager
    def filled(self, places: int) -> Iterator[None]:
        """A context for one draw for so many places, with numbers made now, as a compiled or
        recorded function cannot make them. They replace those of the draw before, in the same
        memory if they are as many.
        """
        if self.numbers is not None:  # else nothing is ever drawn
            numbers_BN = self.next(places)
            if self.numbers.shape != numbers_BN.shape:
                self.numbers = self.numbers.new_empty(numbers_BN.shape)
            self.numbers.copy_(numbers_BN)
        self._is_filled = True
        try:  # what cannot be compiled draws again
            yield
        finally:
            self._is_filled = False


@lru_cache(4096)
def _block(seed: str, number: int) -> Tensor:
    digest = hashlib.sha256(repr((seed, number)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return torch.rand(BLOCK, generator=generator, dtype=torch.float64)
