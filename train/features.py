"""Features of training rows: computed by the frozen target at every step, or kept in memory.

Legend: B batch, T tokens, D feature width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.base import Batch
from draftheads.heads.target import Target
from draftheads.train.batches import Rows


class Features:
    """The target's features of rows, by row number.

    cache_gb: how much main memory this process may fill with features of rows that it has seen, so
    that further epochs need no target; 0 keeps nothing. With a cache, features are computed one
    row at a time: they then do not depend on which rows share a batch, and a continued run, whose
    cache is empty, gets the same bits.
    """

    def __init__(self, target: Target, rows: Rows, layers: Sequence[int], cache_gb: float) -> None:
        self.target, self.rows, self.layers = target, rows, tuple(layers)
        self.cached = cache_gb > 0
        self._room = int(cache_gb * 1e9)
        self._known: dict[int, Tensor] = {}

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """features_BTD of these rows; `batch` is the same rows on the target's device."""
        if not self.cached:
            return self.target.features(batch, self.layers)
        lines = [self._row(number).to(batch.tokens_BT.device) for number in numbers]
        return pad_sequence(lines, batch_first=True)

    def _row(self, number: int) -> Tensor:
        known = self._known.get(number)
        if known is not None:
            return known
        batch = self.rows.batch([number]).to(self.target.device)
        features_TD = self.target.features(batch, self.layers)[0]
        size = features_TD.numel() * features_TD.element_size()
        if size <= self._room:
            self._room -= size
            self._known[number] = features_TD.cpu()
        return features_TD
