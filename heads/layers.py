"""Small modules that draft heads are made of.

Legend: B batch, M tokens, K heads, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T")


class Stateless(nn.Module):
    """A module whose result depends on its tensors and weights alone, as compilers like it."""


class ResidualBlock(Stateless):
    """x + SiLU(W x + b), L times, each with its own W and b; all zero at first, so that it starts
    as the identity.

    in_width: of a wider input; the first layer then narrows it and adds to a linear map of it,
    which starts as the input's first `width` numbers (Hydra's first block). Medusa's published code
    shares one block between the layers and leaves b random. Tensor names `layers.{j}.weight` and
    `layers.{j}.bias` are those that vLLM loads.
    """

    def __init__(self, width: int, layers: int, in_width: int | None = None) -> None:
        super().__init__()
        widths = [in_width or width] + [width] * (layers - 1)
        self.layers = nn.ModuleList(nn.Linear(each, width) for each in widths)
        for parameter in self.layers.parameters():
            nn.init.zeros_(parameter)
        self.residual: nn.Module = nn.Identity()
        if in_width is not None:
            self.residual = wide = nn.Linear(in_width, width)
            nn.init.zeros_(wide.bias)
            nn.init.eye_(wide.weight)

    def forward(self, x_MD: Tensor) -> Tensor:
        first, *others = self.layers
        x_MD = self.residual(x_MD) + F.silu(first(x_MD))
        for layer in others:
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
        unembed: list[Tensor] = list(lm_heads.parameters())  # none has a bias
        self.unembed_KDV = torch.stack(unembed).transpose(1, 2)

    def hidden(self, x_BD: Tensor, depth: int) -> Tensor:
        """What the first `depth` blocks make of their common input: (depth, B, D)."""
        x_KBD = x_BD.expand(depth, -1, -1)
        for weight_KDD, bias_K1D in self.layers:
            x_KBD = x_KBD + F.silu(torch.baddbmm(bias_K1D[:depth], x_KBD, weight_KDD[:depth]))
        return x_KBD

    def unembed(self, hidden_KBD: Tensor) -> Tensor:
        """Logits (K, B, V) of the first K heads."""
        return torch.bmm(hidden_KBD, self.unembed_KDV[: len(hidden_KBD)])


def linear(layers: nn.ModuleList, number: int) -> nn.Linear:
    """One of several matrices."""
    return cast(nn.Linear, layers[number])


class Cached(Generic[T]):
    """Something computed from parameters, and made anew when one of them has changed."""

    def __init__(self) -> None:
        self._of: tuple[Tensor, ...] = ()
        self._versions: tuple[tuple[int, int], ...] | None = None
        self._digest: list[int] = []

    def get(
        self, parameters: Iterable[Tensor], make: Callable[[], T], frozen: Iterable[Tensor] = ()
    ) -> T:
        """What `make` returns for these parameters as they are now. frozen: others that it reads.

        Quick, and blind to what was written through `.data`: `refresh` sees that, in `parameters`.
        """
        self._of = tuple(parameters)
        read = (*self._of, *frozen)
        versions = tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in read)
        if self._versions != versions:
            with torch.inference_mode(False), torch.no_grad():  # training may use it, too
                self._versions, self._value, self._digest = versions, make(), _digest(self._of)
        return self._value

    def refresh(self) -> None:
        """Forget what is no longer what `make` would return."""
        if self._versions is not None and _digest(self._of) != self._digest:
            self._versions = None


def refresh(head: nn.Module) -> None:
    """To be called once per generation, as it reads all of a head's weights."""
    for module in head.modules():
        for value in vars(module).values():
            if isinstance(value, Cached):
                value.refresh()


def _digest(tensors: Sequence[Tensor]) -> list[int]:
    """A number for the bits of each tensor: the sums of its rows, weighed by their places."""
    sums = []
    for tensor in tensors:
        rows = len(tensor) if tensor.ndim and tensor.numel() else 1
        bits = tensor.detach().reshape(rows, -1).view(torch.uint8)
        if bits.numel() and bits.shape[1] % 8 == 0:
            bits = bits.view(torch.int64)
        odd = torch.arange(1, 2 * rows, 2, device=bits.device)
        sums.append((bits.sum(1, dtype=torch.int64) * odd).sum())
    return torch.stack(sums).tolist() if sums else []
