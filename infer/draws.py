"""Random numbers of acceptance rules.

Legend: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.tree import TokenTree

Places = Sequence[tuple[str, int]]
"""Where the rows of a batch are: the seed of each, and the number of its new tokens."""


@dataclass
class RandomSource:
    """Where random numbers come from."""

    seed: int | None = None  # None: from torch's global stream
    generator: torch.Generator | None = None

    def on(self, device: torch.device) -> torch.Generator:
        """The generator, begun on its first device."""
        if self.generator is None:
            self.generator = torch.Generator(device)
            seed = int(torch.randint(1 << 62, ())) if self.seed is None else self.seed
            self.generator.manual_seed(seed)
        return self.generator


class Draws(ABC):
    """Where a rule's random choices come from."""

    by_row: ClassVar[bool] = False  # those of a row do not depend on the rows beside it
    numbers: Tensor | None = None
    """Of the newest draw; in the context of `filled`, those of its only draw, made before."""
    _is_filled = False

    @property
    def needs_same_drafts(self) -> bool:
        """Whether a seed was given that repeats what is drawn if the drafts are the same, too."""
        return False

    @abstractmethod
    def draw(self, logits: Tensor, tree: TokenTree | None = None) -> Tensor:
        """One token (...) for logits (..., V). tree: of logits_BNV; None: those of the next token
        of each row.
        """

    def seed(self, seed: int) -> None:  # noqa: B027  # nothing, if rows have seeds of their own
        """Begin again from a seed."""

    @abstractmethod
    def branch(self) -> Self:
        """The draws of another generation, which leave those here alone."""

    def prepare(self, rows: Places) -> None:  # noqa: B027  # few need it
        """As of `Acceptance`."""

    @contextmanager
    def filled(self, shape: tuple[int, ...], levels: int) -> Iterator[None]:
        """A context for one draw of this shape (but for the vocabulary) on trees of so many levels,
        with numbers made now, as a compiled or recorded function cannot make them. They replace
        those of the draw before, in the same memory if they are as many.
        """
        self._fill(shape, levels)
        self._is_filled = True
        try:  # what cannot be compiled draws again
            yield
        finally:
            self._is_filled = False

    @abstractmethod
    def _fill(self, shape: tuple[int, ...], levels: int) -> None: ...


Source = tuple[Draws, tuple[int, ...]]
"""Of random numbers, and the shape of a draw but for the vocabulary."""


class RandomStream(Draws):
    """Random draws on the logits' device, seeded by `seed` or by torch's global stream."""

    def __init__(self, source: RandomSource | None = None) -> None:
        self._source = source or RandomSource()

    @property
    def needs_same_drafts(self) -> bool:
        """If it has a seed of its own: each node draws."""
        return self._source.seed is not None

    def seed(self, seed: int) -> None:
        """Restart the stream, and those of all its branches."""
        self._source.seed = seed
        self._source.generator = None

    def branch(self) -> Self:
        """Further draws from the same numbers, in turns, which leave the newest draw here alone."""
        return type(self)(self._source)

    def draw(self, logits: Tensor, tree: TokenTree | None = None) -> Tensor:
        """One token per row without a device sync: argmax p / e with e ~ Exp(1)."""
        if self.numbers is None or not self._is_filled:
            self.numbers = torch.empty_like(logits, dtype=torch.float32)
            self.numbers.exponential_(generator=self._source.on(logits.device))
        return (torch.softmax(logits.float(), dim=-1) / self.numbers).argmax(-1)

    def _fill(self, shape: tuple[int, ...], levels: int) -> None:
        if self.numbers is None:  # nothing is ever drawn
            return
        if self.numbers.shape[:-1] != shape:
            self.numbers = self.numbers.new_empty(*shape, self.numbers.shape[-1])
        self.numbers.exponential_(generator=self._source.on(self.numbers.device))


class RowNumbers(Draws):
    """Random numbers of each row's own, from 0 to 1: the n-th is for its n-th new token, so a draw
    depends neither on other rows nor on the drafts. Tokens are -1 where logits are not finite.

    limit: new tokens of a row at most.
    """

    by_row = True

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows: Places = ()
        self._by_seed: dict[str, Tensor] = {}

    def draw(self, logits: Tensor, tree: TokenTree | None = None) -> Tensor:
        """By the inverse of the distribution function, in float64."""
        if tree is None:
            levels_BN = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
            return self._draw(logits[:, None], levels_BN)[:, 0]
        return self._draw(logits, (tree.topology.levels_BN - 1).expand(len(logits), -1))

    def branch(self) -> Self:
        return type(self)(self.limit)

    def prepare(self, rows: Places) -> None:
        self._rows = rows

    def _draw(self, scores_BNV: Tensor, levels_BN: Tensor) -> Tensor:
        below_BNV = scores_BNV.double().softmax(-1).cumsum(-1)
        total_BN1 = below_BNV[..., -1:]
        if self.numbers is None or not self._is_filled:
            self.numbers = self._next(levels_BN.shape[1]).to(levels_BN.device)
        uniform_BN1 = self.numbers.gather(1, levels_BN)[..., None]
        drawn_BN1 = torch.searchsorted(below_BNV, uniform_BN1 * total_BN1, right=True)
        drawn_BN1 = drawn_BN1.clamp(max=scores_BNV.shape[-1] - 1)  # by rounding alone
        return torch.where(total_BN1.isfinite(), drawn_BN1, -1)[..., 0]

    def _fill(self, shape: tuple[int, ...], levels: int) -> None:
        numbers_BN = self._next(levels)
        if self.numbers is None or self.numbers.shape != numbers_BN.shape:
            device = numbers_BN.device if self.numbers is None else self.numbers.device
            self.numbers = numbers_BN.to(device)
        self.numbers.copy_(numbers_BN)

    def _next(self, count: int) -> Tensor:
        """The next `count` numbers of each row, (B, count) float64, or zeros after its last."""
        seeds = {seed for seed, _ in self._rows}
        self._by_seed = {seed: all for seed, all in self._by_seed.items() if seed in seeds}
        rows = []
        for seed, place in self._rows:
            if seed not in self._by_seed:
                number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
                generator = torch.Generator().manual_seed(number)
                drawn = torch.rand(self.limit, generator=generator, dtype=torch.float64)
                self._by_seed[seed] = drawn
            numbers = self._by_seed[seed][place : place + count]
            rows.append(F.pad(numbers, (0, count - len(numbers))))
        return torch.stack(rows)
