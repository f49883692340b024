"""Small modules that draft heads are made of.

Legend: B batch, M tokens, K heads, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), L times, each with its own W and b; all zero at first, so that it starts
    as the identity.

    Medusa's published code shares one block between the layers and leaves b random. Tensor names
    `layers.{j}.weight` and `layers.{j}.bias` are those that vLLM loads.
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


class StackedHeads:
    """Copies of small heads' weights, side by side: all depths in a handful of kernels."""

    def __init__(self, blocks: nn.ModuleList, lm_heads: nn.ModuleList) -> None:
        stacks = [
            torch.stack(depths)  # weight, bias, weight, bias, ... of each layer
            for depths in zip(*(block.parameters() for block in blocks), strict=True)
        ]
        weights = [weight_KDD.transpose(1, 2) for weight_KDD in stacks[0::2]]
        biases = [bias_KD[:, None] for bias_KD in stacks[1::2]]
        self.layers = list(zip(weights, biases, strict=True))
        self.unembed_KDV = torch.stack(list(lm_heads.parameters())).transpose(1, 2)

    def __call__(self, x_BD: Tensor, depth: int) -> Tensor:
        """Logits (depth, B, V) of the first `depth` heads."""
        x_KBD = x_BD.to(self.unembed_KDV.dtype).expand(depth, -1, -1)
        for weight_KDD, bias_K1D in self.layers:
            x_KBD = x_KBD + F.silu(torch.baddbmm(bias_K1D[:depth], x_KBD, weight_KDD[:depth]))
        return torch.bmm(x_KBD, self.unembed_KDV[:depth])
