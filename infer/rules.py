"""One rule for rows that have rules of their own.

Legend: B batch, R rows of one rule, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftheads.heads.tree import TokenTree
from draftheads.infer.accept import Acceptance, Accepted
from draftheads.infer.draws import Draws, SeededRow


def joined_rule(rules: Sequence[Acceptance], device: torch.device) -> Acceptance:
    """The rule of a batch. device: of the logits."""
    if all(rule == rules[0] for rule in rules):
        return rules[0]
    return RowRules(tuple(rules), device)


class Part(NamedTuple):
    """Rows of a batch with equal rules."""

    rule: Acceptance
    rows: list[int]
    rows_R: Tensor
    """The same on the device."""


@dataclass(frozen=True)
class RowRules(Acceptance):
    """A rule for each row of a batch, which chooses as it does for that row alone. device: of the
    logits.
    """

    rules: tuple[Acceptance, ...]
    device: torch.device

    @cached_property
    def _parts(self) -> list[Part]:
        """A part for each distinct rule."""
        distinct: list[Acceptance] = []
        for rule in self.rules:
            if rule not in distinct:
                distinct.append(rule)
        parts = []
        for rule in distinct:
            rows = [row for row, other in enumerate(self.rules) if other == rule]
            parts.append(Part(rule, rows, torch.tensor(rows, device=self.device)))
        return parts

    @cached_property
    def _order(self) -> Tensor:
        """Where each row is among those of the parts."""
        return torch.cat([part.rows_R for part in self._parts]).argsort()

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """The path of each row by its own rule."""
        paths = [
            part.rule(logits_BNV[part.rows_R], tree.select(part.rows_R)) for part in self._parts
        ]
        return Accepted(*(torch.cat(each)[self._order] for each in zip(*paths, strict=True)))

    def choose(self, logits: Tensor) -> Tensor:
        """Tokens (B, ...) by the rules of logits (B, ..., V)."""
        chosen = [part.rule.choose(logits[part.rows_R]) for part in self._parts]
        return torch.cat(chosen)[self._order]

    def prepare(self, rows: Sequence[SeededRow]) -> None:
        """Prepare each rule for its rows."""
        for part in self._parts:
            part.rule.prepare([rows[row] for row in part.rows])

    def constants(self) -> tuple[Any, ...]:
        """The constants of each rule, and its rows."""
        return tuple((*part.rule.constants(), *part.rows) for part in self._parts)

    def all_draws(self) -> list[Draws]:
        """The draws of the distinct rules."""
        return [part.rule.draws for part in self._parts]
