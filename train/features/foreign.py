"""Hidden states in the files of other toolkits, as the features of our rows.

Legend: T tokens of a document, P tokens of a piece of it, L captured states, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from draftheads.heads.target.model import Target
from draftheads.train.batches import Rows, Span
from draftheads.train.data.foreign import FAULTS, ForeignFolder, damaged
from draftheads.train.data.shards import Array
from draftheads.train.features.states import (
    StateChecks,
    StateFeatures,
    StateLayout,
    check_layers,
)
from draftheads.train.recipe import Recipe

READERS = 4
"""Threads that read the states of a batch."""
COMPARED = 64
"""Tokens of the document that is compared with the target's own states."""

Check = Callable[[Tensor, Sequence[int], Array, int], object]
"""(states (P, L, H), ids, loss mask of a piece, its place in the document)."""
Read = Callable[[int, int, Array, Array], Tensor]
"""(document, place of a piece's first token in it, ids and loss mask of the piece) -> its states
(P, L, H).
"""


@dataclass
class ForeignStates:
    """Hidden states of documents in the files of another toolkit.

    sizes: tokens of each document. hidden: width of a state. check: raises ValueError for the
    states of a piece that are not those of its tokens. Raises ValueError if files are missing.
    """

    folder: ForeignFolder
    path: Path
    sizes: Sequence[int]
    hidden: int
    check: Check

    def __post_init__(self) -> None:
        numbers = range(len(self.sizes))
        self.files = [self.path / self.folder.name(document) for document in numbers]
        missing = [file for file in self.files if not file.is_file()]
        if missing:
            raise ValueError(
                f"{self.path}: expected hidden states of {len(self.sizes)} documents, got none for "
                f"{len(missing)}, first {missing[0].name}; run `{self.folder.command}` to write "
                "them, or set features.mode=online"
            )

    def __call__(self, document: int, start: int, tokens_P: Array, learned_P: Array) -> Tensor:
        """The states (P, L, H) of the piece of a document that begins at `start`. Raises ValueError
        naming the file, unless they are those of this piece.
        """
        file = self.files[document]
        size = self.sizes[document]
        stop = start + len(tokens_P)
        advice = f", or delete it and run `{self.folder.command}`"
        try:
            ids_T, states_TLH = self.folder.read(file, self.hidden)
            if ids_T.shape != (size,) or not np.array_equal(ids_T[start:stop], tokens_P):
                raise ValueError(f"token ids of another document than {document}")
            if len(states_TLH) != size:
                raise ValueError(f"states of {len(states_TLH)} tokens for {size}")
            states_PLH = states_TLH[start:stop].clone()  # what is mapped may be cut
        except FAULTS as error:
            raise damaged(file, error, advice) from error
        try:
            self.check(states_PLH, tokens_P.tolist(), learned_P, start)
        except ValueError as error:
            raise ValueError(f"{file}: {error}; copy it again{advice}") from error
        return states_PLH


def foreign_features(
    recipe: Recipe,
    target: Target,
    rows: Sequence[Rows],
    layers: Sequence[int],
    folder: ForeignFolder,
) -> list[StateFeatures]:
    """The sources for rows of another toolkit's data. Raises ValueError if states are missing."""
    last = target.layers
    captured = sorted({*(recipe.features.layers or [2, last // 2, last - 3]), last})
    layout = StateLayout(target, captured, layers, is_normed=folder.is_normed)
    documents = rows[0].documents
    sizes = np.diff(documents.spans)[:, 0].tolist()
    path = recipe.features.path or folder.path / folder.place
    states = ForeignStates(folder, path, sizes, target.hidden_size, StateChecks(layout))
    first = int(np.argmax(np.array(sizes) > 1))
    start = int(documents.spans[first, 0])
    span = start, start + min(sizes[first], COMPARED)
    tokens = documents.tokens(*span)
    states_PLH = states(first, 0, tokens, documents.mask(*span))
    try:
        check_layers(layout, states_PLH, tokens.tolist())
    except ValueError as error:
        raise ValueError(f"{path / folder.name(first)}: {error}") from None
    return [file_features(layout, each, states) for each in rows]


def file_features(layout: StateLayout, rows: Rows, read: Read) -> StateFeatures:
    """Of another toolkit's files. read: called by several threads. The states of a piece are those
    of its whole document.
    """
    threads = ThreadPoolExecutor(READERS, "states")
    documents = rows.documents

    def states(span: Span) -> Tensor:
        [number] = documents.numbers(np.array(span[:1])).tolist()
        start = span[0] - documents.spans[number, 0]
        return read(number, start, documents.tokens(*span), documents.mask(*span))

    def ask(number: int) -> list[Future[Tensor]]:
        return [threads.submit(states, span) for span in rows.pieces(number)]

    return StateFeatures(layout, rows, ask, partial(threads.shutdown, cancel_futures=True))
