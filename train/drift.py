"""How far an adapter has moved the target's own output (Medusa-2), on held-out answers.

Legend: M learned positions, C positions of a chunk, D feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from draftheads.heads.target import Target
from draftheads.train.heldout import Share

CHUNK = 256
"""Positions whose logits, twice, are held at a time."""


@dataclass(frozen=True)
class Drift:
    """agreement: share of tokens at which the first choice is still the untouched target's. kl:
    divergence KL(untouched || adapted), nats per token. tokens: how many were looked at.
    """

    agreement: float
    kl: float
    tokens: int

    def facts(self) -> dict[str, Any]:
        """What metrics, checkpoints and cards say of it."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"the adapted target's first choice is the untouched one's at {self.agreement:.2%} of "
            f"{self.tokens} tokens, {self.kl:.4f} nats from it"
        )


@torch.no_grad()
def measure_drift(target: Target, share: Share, layers: Sequence[int]) -> Drift:
    """At the learned tokens of the held-out rows; all processes share the work and get the same.

    layers: the last hidden state, alone.
    """
    same, divergence, count = 0, 0.0, 0
    for number, _, batch in share.batches():
        after_MD = target.features(batch, layers)[batch.learn_BT]
        with target.untouched():
            before_MD = target.features(batch, layers)[batch.learn_BT]
        for start in range(0, len(before_MD), CHUNK):
            part = slice(start, start + CHUNK)
            before_CV = target.unembed(before_MD[part]).float().log_softmax(-1)
            after_CV = target.unembed(after_MD[part]).float().log_softmax(-1)
            if number is not None:
                same += int((before_CV.argmax(-1) == after_CV.argmax(-1)).sum())
                divergence += float((before_CV.exp() * (before_CV - after_CV)).sum())
                count += len(before_CV)
    parts = gather_object([(same, divergence, count)])
    same, divergence, count = (sum(numbers) for numbers in zip(*parts, strict=True))
    return Drift(same / count, divergence / count, count)
