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
    """Training tokens, with several documents packed into each row."""

    tokens_BT: Tensor
    """int64 token ids."""
    loss_mask_BT: Tensor
    """bool, True for tokens that the target generated."""
    positions_BT: Tensor
    """int64, 0 at the start of each document."""
    documents_BT: Tensor
    """int64, the document of the row that each token belongs to; -1 is padding."""

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))

    def roots(self, depth: int) -> Iterator[Tensor]:
        """For each k = 1..depth, bool (B, T): the positions i from which tokens[i + k] is learned.

        As in decoding, tokens[i] is the root of a tree: the target must have generated all tokens
        from i to i + k, in one document.
        """
        here_BT = self.loss_mask_BT
        for k in range(1, depth + 1):
            same_BT = self.documents_BT[:, :-k] == self.documents_BT[:, k:]
            reached_BT = here_BT[:, :-k] & self.loss_mask_BT[:, k:] & same_BT
            here_BT = F.pad(reached_BT, (0, min(k, self.loss_mask_BT.shape[1])))
            yield here_BT
