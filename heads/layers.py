"""Small modules that draft heads are made of. Legend: M tokens, D width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), L times, each with its own W and b; all zero at first, so that it starts
    as the identity.

    The published code shares one block between layers and leaves b random (reference: Medusa,
    section 1.1). Tensor names `layers.{j}.weight` and `layers.{j}.bias` are those that vLLM loads.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x_MD: Tensor) -> Tensor:
        for layer in self.layers:
            x_MD = x_MD + F.silu(layer(x_MD))
        return x_MD
