"""Hidden states that others computed, a serving engine or a program that wrote files, as the
features of our rows.

Legend: B batch, T tokens, P tokens of a document or a piece of it, L captured states, H hidden
size, D = layers x H.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from draftheads.heads.batch import Batch
from draftheads.heads.target import Target
from draftheads.train.batches import Rows, Span
from draftheads.train.data.shards import Array

READERS = 4
"""Threads that read the states of a batch."""

Read = Callable[[int, int, Array], Tensor]
"""(document, place of a piece's first token in it, ids of the piece) -> its states (P, L, H)."""


class StateLayout:
    """How captured states become features.

    captured: which states they are, by transformers' numbers, ascending: i enters layer i, and n,
    of n layers, leaves the last one. layers: the states of the features. is_normed: whether state n
    is after the final norm. Raises ValueError for states that were not captured.
    """

    def __init__(
        self,
        target: Target,
        captured: Sequence[int],
        layers: Sequence[int],
        *,
        is_normed: bool = False,
    ) -> None:
        self.target, self.captured = target, tuple(captured)
        self.is_normed = is_normed
        known = range(target.layers + 1)
        if list(captured) != sorted(set(captured)) or not set(captured) <= set(known):
            raise ValueError(
                f"expected states from 0 to {target.layers} of {target.name}, ascending, got "
                f"{list(captured)}; set features.layers to those that were captured"
            )
        wanted = [layer % len(known) for layer in layers]
        missing = sorted(set(wanted) - set(captured))
        if missing:
            raise ValueError(
                f"expected states {sorted(set(wanted))}, which the head reads, got "
                f"{list(captured)}; capture {missing}, too, or correct features.layers"
            )
        self.places = [self.captured.index(layer) for layer in wanted]

    @torch.no_grad()
    def row(self, documents: Sequence[Tensor]) -> Tensor:
        """features_TD of a row by the alignment law, in the target's dtype on its device.

        documents: the states (P, L, H) of each, computed alone.
        """
        return torch.cat([F.pad(self.features(each)[:-1], (0, 0, 1, 0)) for each in documents])

    def features(self, states_PLH: Tensor) -> Tensor:
        """The states of the features (P, D), at the tokens after which they were computed."""
        states_PLH = states_PLH.to(self.target.device, self.target.dtype)
        chosen = [
            self.target.final_norm(states_PLH[:, place])
            if self.captured[place] == self.target.layers and not self.is_normed
            else states_PLH[:, place]
            for place in self.places
        ]
        return torch.cat(chosen, dim=-1)


class FileFeatures:
    """A `FeatureSource` of another toolkit's files. read: called by several threads."""

    def __init__(self, layout: StateLayout, rows: Rows, read: Read) -> None:
        self._layout = layout
        self._rows = rows
        self._read = read
        self._starts_D = rows.documents.spans[:, 0]
        self._threads = ThreadPoolExecutor(READERS, "states")
        self._asked: dict[int, list[Future[Tensor]]] = {}

    def __call__(self, numbers: Sequence[int], batch: Batch) -> Tensor:
        """features_BTD. The states of a piece are those of its whole document."""
        self.ahead(numbers)
        states = [[each.result() for each in self._asked.pop(number)] for number in numbers]
        return pad_sequence(list(map(self._layout.row, states)), batch_first=True)

    def ahead(self, numbers: Sequence[int]) -> None:
        """Begin to read these rows."""
        for number in numbers:
            if number not in self._asked:
                spans = self._rows.pieces(number)
                self._asked[number] = [self._threads.submit(self._piece, span) for span in spans]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _piece(self, span: Span) -> Tensor:
        documents = self._rows.documents
        [number] = documents.numbers(np.array(span[:1])).tolist()
        return self._read(number, span[0] - self._starts_D[number], documents.tokens(*span))
