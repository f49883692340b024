"""A batch of training tokens, and which of its places have a loss.

Places are found on the host, where the batch is made: a device would have to be waited for to know
how many there are.

Legend: B batch, T tokens, M places with a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Training tokens, with several documents packed into each row."""

    tokens_BT: Tensor
    """int64 token ids."""
    loss_mask_BT: Tensor
    """bool, True for tokens that the target generated."""
    positions_BT: Tensor
    """int64, 0 at the start of each document, unless that is a branch of an earlier one: there, the
    length of what they have in common.
    """
    documents_BT: Tensor
    """int64, the document of the row that each token belongs to; -1 is padding."""

    host: Batch | None = None
    """The same on the CPU; None: this one is."""
    reach_BT: Tensor | None = None
    """int64, for how many more places a token is seen; None: to the end of its document, as there
    are no branches.
    """

    def to(self, device: torch.device | str) -> Batch:
        """The same on a device. Copies from pinned memory are not waited for."""
        host = self.host or (self if self.tokens_BT.device.type == "cpu" else None)
        return replace(self._map(lambda tensor: tensor.to(device, non_blocking=True)), host=host)

    def pin_memory(self) -> Batch:
        """The same in pinned memory."""
        return self._map(Tensor.pin_memory)

    def learned(self) -> Tensor:
        """int64 (M,), rising: the places in the flattened batch of tokens that are learned."""
        return self.upload(np.flatnonzero((self.host or self).loss_mask_BT.numpy()))

    def roots(self, depth: int) -> list[Tensor]:
        """For each k = 1..depth, int64 (M,), rising: the places i in the flattened batch from which
        tokens[i + k] is learned.

        As in decoding, tokens[i] is the root of a tree: the target must have generated all tokens
        from i to i + k, in one document.
        """
        return [self.upload(np.flatnonzero(mask_BT)) for mask_BT in self.root_masks(depth)]

    def root_masks(self, depth: int) -> list[np.ndarray]:
        """The places of `roots` as bool (B, T), on the host."""
        on_host = self.host or self
        learned_BT = on_host.loss_mask_BT.numpy()
        documents_BT = on_host.documents_BT.numpy()
        masks = []
        here_BT = learned_BT
        for k in range(1, depth + 1):
            reached_BT = np.zeros_like(learned_BT)
            same = documents_BT[:, :-k] == documents_BT[:, k:]
            reached_BT[:, :-k] = here_BT[:, :-k] & learned_BT[:, k:] & same
            masks.append(here_BT := reached_BT)
        return masks

    def visible(self, places_BQ: Tensor | None = None, keys: slice = slice(None)) -> Tensor:
        """bool (B, Q, S): which of the `keys` the tokens at these places, default all, see: what
        comes before in their document, and themselves.
        """
        places_T = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device)
        if places_BQ is None:
            places_BQ = places_T.expand_as(self.tokens_BT)
        distance_BQS = places_BQ[:, :, None] - places_T[keys]
        if self.reach_BT is not None:
            return (distance_BQS >= 0) & (distance_BQS <= self.reach_BT[:, None, keys])
        documents_BQ = self.documents_BT.gather(1, places_BQ)
        same_BQS = documents_BQ[:, :, None] == self.documents_BT[:, None, keys]
        return same_BQS & (distance_BQS >= 0)

    def part(self, row: int, start: int, stop: int) -> Batch:
        """Some tokens of a row, alone."""
        host = self.host and self.host.part(row, start, stop)
        return replace(self._map(lambda tensor: tensor[row : row + 1, start:stop]), host=host)

    def upload(self, values: np.ndarray) -> Tensor:
        """Move what was computed on the host to the device of the batch."""
        return torch.from_numpy(values).to(self.tokens_BT.device, non_blocking=True)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            change(self.tokens_BT),
            change(self.loss_mask_BT),
            change(self.positions_BT),
            change(self.documents_BT),
            reach_BT=None if self.reach_BT is None else change(self.reach_BT),
        )


def at_places(x_BTX: Tensor, places_M: Tensor) -> Tensor:
    """(M, X): x at places of the flattened batch."""
    return x_BTX.flatten(0, 1).index_select(0, places_M)
