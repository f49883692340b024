"""Limits the next token by the text so far: the target's logits are changed before the acceptance
rule sees them, so the law is that of the plain model under the same constraint.

Legend: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from draftheads.infer.paths import TokenPath


class ConstraintError(ValueError):
    """A constraint cannot be followed any further: its answer ends, and those beside it go on."""


class Constraint(ABC):
    """A constraint of answers, or of one row's answer."""

    @abstractmethod
    def row(self, number: int, prompt: Sequence[int]) -> Constraint:
        """The constraint of the answer to a prompt, which may remember what it has read. number: of
        the row in a batch.
        """

    @abstractmethod
    def after(self, answer: list[int], path: TokenPath, logits_V: Tensor) -> Tensor:
        """float32 logits (V,) after an answer and a path, which they allowed so far; minus infinity
        for what is forbidden. logits_V: the target's. Answers of later calls are not shorter.
        Raises ConstraintError.
        """

    def drafts(self, answer: list[int], paths: Sequence[TokenPath]) -> Sequence[TokenPath]:
        """The paths to verify in place of drafted ones, of which none is there twice."""
        return paths
