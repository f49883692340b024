"""What decoding is compared with: a token chosen where nothing was drafted, and where texts end.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftheads.infer.accept import Acceptance
from draftheads.infer.draws import Draws


@dataclass
class Place:
    """Where a token is drawn: the seed of its row, and how many tokens come before it."""

    seed: str
    new_tokens: int


def row_seed(number: int) -> str:
    """The seed of the first row that a rule decodes after `rule.seed(number)`."""
    draws = Draws()
    draws.seed(number)
    return str(draws.new_seed())


def chosen(rule: Acceptance, logits_V: Tensor, place: Place) -> int:
    """What a rule chooses where nothing was drafted."""
    rule.prepare([place])
    return int(rule.choose(logits_V[None])[0])


def until_the_end(
    tokens: Sequence[int],
    new: int,
    ends: Collection[int],
    tokenizer: Any = None,
    stop: Collection[str] = (),
) -> list[int]:
    """Tokens up to an end token, the one that completes a stop string, or the limit."""
    answer: list[int] = []
    for token in tokens:
        answer.append(token)
        stopped = any(text in tokenizer.decode(answer) for text in stop)
        if stopped or token in ends or len(answer) == new:
            break
    return answer
