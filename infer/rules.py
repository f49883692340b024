"""One rule for rows that have rules of their own.

Legend: B batch, R rows of one rule, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.tree import TokenTree
from draftheads.infer.accept import Acceptance, Accepted
from draftheads.infer.draws import Draws, Place


def joined_rule(rules: Sequence[Acceptance], device: torch.device) -> Acceptance:
    """The rule of a batch. device: of the logits."""
    if all(rule == rules[0] for rule in rules):
        return rules[0]
    return RowRules(tuple(rules), device)


@dataclass(frozen=True)
class RowRules(Acceptance):
    """A rule for each row of a batch, which chooses as it does for that row alone. device: of the
    logits.
    """

    rules: tuple[Acceptance, ...]
    device: torch.device

    @cached_property
    def _parts(self) -> list[tuple[Acceptance, list[int], Tensor]]:
        """The distinct rules, and the rows of each, there and on the device."""
        parts: list[tuple[Acceptance, list[int]]] = []
        for row, rule in enumerate(self.rules):
            for other, rows in parts:
                if rule == other:
                    rows.append(row)
                    break
            else:
                parts.append((rule, [row]))
        return [(rule, rows, torch.tensor(rows, device=self.device)) for rule, rows in parts]

    @cached_property
    def _order(self) -> Tensor:
        """Where each row is among those of the parts."""
        return torch.cat([rows_R for _, _, rows_R in self._parts]).argsort()

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """The path of each row by its own rule."""
        parts = [rule(logits_BNV[rows_R], tree.select(rows_R)) for rule, _, rows_R in self._parts]
        return Accepted(*(torch.cat(each)[self._order] for each in zip(*parts, strict=True)))

    def choose(self, logits: Tensor) -> Tensor:
        """Tokens (B, ...) by the rules of logits (B, ..., V)."""
        return torch.cat([rule.choose(logits[rows_R]) for rule, _, rows_R in self._parts])[
            self._order
        ]

    def prepare(self, rows: Sequence[Place]) -> None:
        """Prepare each rule for its rows."""
        for rule, places, _ in self._parts:
            rule.prepare([rows[place] for place in places])

    def constants(self) -> tuple[Any, ...]:
        """Those of each rule, and its rows."""
        return tuple((*rule.constants(), *rows) for rule, rows, _ in self._parts)

    def all_draws(self) -> list[Draws]:
        """Those of the distinct rules."""
        return [rule.draws for rule, _, _ in self._parts]
