"""Soft labels: heads learn the target's distribution, not the true tokens.

Legend: B batch, T tokens, D feature width, R rows with a loss, U target states.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.losses import Teacher
from draftheads.heads.target.model import Target


def check_labels(head: DraftHead, target: Target) -> None:
    """Raise ValueError, before the first step, for soft labels of a target without logits."""
    if head.has_soft_labels:
        target.unembed(torch.zeros(1, target.hidden_size).to(target.device, target.dtype))


def soft_labels(
    head: DraftHead,
    features_BTD: Tensor,
    places_R: np.ndarray,
    target: Target,
    *,
    acceptance: bool = False,
) -> Teacher | None:
    """The labels of rows whose last states are at these places of the flattened features, as
    `DraftHead.training_layers` orders them; None for a head with hard labels.
    """
    if not head.has_soft_labels:
        return None
    last_PD = features_BTD[..., -head.hidden_size :].flatten(0, -2).to(target.dtype)

    def logits(places_U: Tensor) -> Tensor:
        return target.unembed(last_PD[places_U])

    return Teacher(
        places_R,
        logits,
        head.token_map,
        vocab_size=target.vocab_size,
        acceptance=acceptance,
    )
