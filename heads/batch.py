"""A batch of training tokens.

Legend: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Training tokens, several documents packed into each row."""

    tokens_BT: Tensor
    """int64 token ids."""
    loss_mask_BT: Tensor
    """bool, True where the target wrote the token."""
    positions_BT: Tensor
    """int64, 0 at the start of each document."""
    documents_BT: Tensor
    """int64, which document of the row a token belongs to; -1 marks padding."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))

    def roots(self, depth: int) -> Iterator[Tensor]:
        """For each k = 1..depth: bool (B, T), the positions i from which tokens[i + k] is learned.

        The target must have written everything from i to i + k, in one document, as it does when
        heads are used: tokens[i] is then the root of a tree.
        """
        here_BT = self.loss_mask_BT
        for k in range(1, depth + 1):
            same_BT = self.documents_BT[:, :-k] == self.documents_BT[:, k:]
            reached_BT = here_BT[:, :-k] & self.loss_mask_BT[:, k:] & same_BT
            here_BT = F.pad(reached_BT, (0, min(k, self.loss_mask_BT.shape[1])))
            yield here_BT
