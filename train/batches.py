"""Packs answers into rows, and orders the rows into batches.

A step's rows are a function of (seed, step) alone; processes and accumulation only divide them.
So a run resumes at step n without stored state, on any number of processes that divides the step.

Legend: B batch, T tokens; of a data set: N tokens, D documents, S spans to learn, P pieces of
documents, G groups of pieces that share prefixes, R rows.
"""

from __future__ import annotations

import ctypes
import math
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from draftheads.heads.batch import Batch
from draftheads.train.data.answers import REPAIR, Answer, Manifest, open_shards, verify
from draftheads.train.data.shards import Array, Shard, bounds_of, content_hash, digest, to_batch

OPEN_ROWS = 64
"""Rows that packing keeps open: first fit among them is linear and fills rows to about 99 %."""
FEW_STEPS = 50
"""Runs with fewer steps get a warning."""
MOST_TOKENS = 65536
"""Maximum tokens per step when the recipe leaves them to the data."""
SPLIT_SEED = 20240119
"""Independent of the run's seed, so that all runs are evaluated on the same text."""
HELDOUT_TOKENS = 1 << 17
"""Held-out tokens to evaluate: more would delay checkpoints without changing the tree."""

SHARED = 256
"""Tokens with which conversations begin alike, such as a system prompt and tools, before they stand
in one row. Less would not pay for the mask of such rows.
"""
MOST_IDS = 1 << 31
"""Bound of token ids where the vocabulary is not known."""
CHUNK = 1 << 22
"""Tokens that are counted at once."""

Span = tuple[int, int]


class Documents:
    """Token ids of many documents, one after another, in memory or on pages of files.

    What opening a folder keeps in memory per process are 8 bytes per document and 16 per span.
    """

    def __init__(self, shards: Sequence[Shard], digest: str = "", below: int = MOST_IDS) -> None:
        """digest: of these shards, if it is known. below: bound of the token ids. Raises ValueError
        if there are no tokens.
        """
        self._shards = shards
        self._digest = digest
        self._below = below
        firsts = np.cumsum([0, *(len(shard.tokens_N) for shard in shards)])
        if not firsts[-1]:
            raise ValueError("the data has no answers; run `draftheads distill` to the end first")
        self._firsts: list[int] = firsts.tolist()
        self._bounds_D1 = bounds_of(shards)
        pairs = list(zip(shards, self._firsts, strict=False))
        self._starts_S = np.concatenate([shard.starts_S + first for shard, first in pairs])
        sizes = [np.zeros(1, np.int64), *(shard.sizes_S for shard in shards)]
        self._learned_S1 = np.concatenate(sizes).cumsum(dtype=np.int64)
        """Learned tokens before each span."""

    @classmethod
    def read(cls, answers: Iterable[Answer]) -> Documents:
        """Documents in memory. Raises ValueError if there are none."""
        rows = []
        for answer in answers:
            tokens = np.asarray(answer.tokens, np.int32)
            row = {"tokens": tokens, "learn": answer.learn, "follows": answer.follows}
            rows.append(row | {"hash": content_hash(tokens)})
        return cls([Shard(to_batch(rows))] if rows else [])

    @classmethod
    def open(cls, folder: str | Path, below: int, target: str) -> Documents:
        """The documents of a folder. Raises ValueError for a damaged folder, and for token ids that
        are not `below` the size of the target's vocabulary.
        """
        shards, manifest = open_shards(folder)
        bounds = [file.largest_token for file in manifest.shards]
        if not bounds:
            bounds = [int(shard.tokens_N.max(initial=0)) for shard in shards]
        largest = max(bounds, default=0)
        if largest >= below:
            raise ValueError(
                f"{folder}: expected token ids below {below} ({target}), got {largest}; use the "
                "data of this target, or distill with it"
            )
        return cls(shards, manifest.digest, below)

    def __len__(self) -> int:
        return len(self._bounds_D1) - 1

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._firsts[-1]

    @property
    def learned(self) -> int:
        """Number of learned tokens."""
        return int(self._learned_S1[-1])

    @property
    def spans(self) -> Array:
        """int64 (D, 2): the half-open span of tokens of each document."""
        return np.stack([self._bounds_D1[:-1], self._bounds_D1[1:]], axis=1)

    def tokens(self, start: int, stop: int) -> Array:
        """int32: the tokens of a span inside one shard. Raises ValueError, naming the document, for
        token ids outside the vocabulary, and for a file that was cut since it was opened.
        """
        shard = bisect_right(self._firsts, start, hi=len(self._shards)) - 1
        first = self._firsts[shard]
        tokens = self._shards[shard].read(start - first, stop - first)
        ids = tokens.view(np.uint32)  # in which negative ones are large
        if len(ids) and ids.max() >= self._below:
            place = int(np.argmax(ids >= self._below))
            [document] = self.numbers(np.array([start + place])).tolist()
            raise ValueError(
                f"{self._shards[shard].path or 'data'}: expected token ids from 0 to "
                f"{self._below - 1}, got {tokens[place]} in document {document}; {REPAIR}"
            )
        return tokens

    def mask(self, start: int, stop: int) -> Array:
        """bool: which tokens of a span the target wrote."""
        mask = np.zeros(stop - start, np.bool_)
        low, high = np.searchsorted(self._starts_S, (start, stop))
        low = max(0, low - 1)  # this one may end inside
        bounds = self._learned_S1[low : high + 1] - self._learned_S1[low]
        firsts = self._starts_S[low:high] - start
        for first, size in zip(firsts.tolist(), np.diff(bounds).tolist(), strict=True):
            mask[max(0, first) : max(0, first + size)] = True
        return mask

    def learned_before(self, places: Array) -> Array:
        """int64: the number of learned tokens before each place."""
        if not len(self._starts_S):
            return np.zeros_like(places)
        after = np.searchsorted(self._starts_S, places)
        last = np.maximum(after - 1, 0)  # the last span that starts before, which may end later
        ends = self._starts_S[last] + self._learned_S1[last + 1] - self._learned_S1[last]
        return self._learned_S1[after] - np.where(after > 0, np.maximum(ends - places, 0), 0)

    def numbers(self, starts: Array) -> Array:
        """Indices of the documents that hold these tokens."""
        return np.searchsorted(self._bounds_D1[:-1], starts, side="right") - 1

    def conversations(self) -> Array:
        """int32 (D,): the number of each document's conversation."""
        follows_D = np.concatenate([shard.follows_D for shard in self._shards])
        return np.cumsum(~follows_D, dtype=np.int32) - 1

    def digest(self) -> str:
        """Hash of tokens, loss mask, documents and conversations, as 16 hex digits."""
        self._digest = self._digest or digest(self._shards)
        return self._digest

    def split(self, heldout: float) -> tuple[Array, Array]:
        """(spans of training documents, of held-out documents), int64 (.., 2), at least one each.

        heldout: share of the conversations, which are never divided. Conversations that contain a
        copy of a held-out document are not trained on: greedy answers to equal prompts are equal.
        If nothing else is left, training uses the held-out documents.
        """
        talk_D = self.conversations()
        total = int(talk_D[-1]) + 1
        count = min(max(1, round(heldout * total)), max(1, total - 1))
        is_chosen = np.zeros(total, np.bool_)
        is_chosen[_permutation(total, SPLIT_SEED)[:count]] = True
        apart_D = is_chosen[talk_D]
        hashes_D = pa.chunked_array([shard.batch["hash"] for shard in self._shards])
        copies_D = pc.is_in(hashes_D, value_set=hashes_D.filter(pa.array(apart_D))).to_numpy()
        is_known = np.zeros(total, np.bool_)
        is_known[talk_D[copies_D]] = True
        spans, train_D = self.spans, ~is_known[talk_D]
        return spans[train_D if train_D.any() else apart_D], spans[apart_D]

    def frequent_tokens(self, count: int, vocab_size: int) -> list[int]:
        """The `count` token ids that the target writes most often, most frequent first."""
        counts_V = self.token_counts(vocab_size)
        order: list[int] = np.argsort(-counts_V, kind="stable")[:count].tolist()
        return order

    def token_counts(self, vocab_size: int) -> Array:
        """int64 (V,): how often the target writes each token."""
        counts_V = np.zeros(vocab_size, np.int64)
        for shard, first in zip(self._shards, self._firsts, strict=False):
            learn_N = shard.written()
            for at in range(0, len(learn_N), CHUNK):
                is_learned = learn_N[at : at + CHUNK]
                tokens = self.tokens(first + at, first + at + len(is_learned))
                counts_V += np.bincount(tokens[is_learned], minlength=vocab_size)
        return counts_V


class Verification:
    """Compares a folder of answers with its checksums, in a thread beside the first steps."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, args=(folder, manifest), daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True if a difference was found so far."""
        return self._error is not None

    def wait(self) -> None:
        """Raises ValueError naming the files that differ."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, folder: Path, manifest: Manifest) -> None:
        try:
            verify(folder, manifest)
        except Exception as error:  # raised again by the thread that trains
            self._error = error


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, each a document of its own for the head.

    starts_P, stops_P: spans of tokens. learned_P: their learned tokens. prefixes_P: the tokens that
    a piece has in common with the one before it, with which it stands in one row as a branch of it;
    0: it stands by itself. So rows of 6 tokens come from four documents, of which b and c are turns
    of one conversation, or of two that begin alike, and have the same first two tokens:

        documents    aaaaaaaa  bbbb  bbcc  ddd
        cut          aaaaaa  aa  bbbb  bbcc  ddd
        group        aaaaaa  aa  bbbb+cc  ddd         what branches adds its own tokens alone
        pack         2       1   0        1           rows, after the groups were shuffled
        order        bbbbcc | aaddd | aaaaaa
    """

    starts_P: Array
    stops_P: Array
    learned_P: Array
    prefixes_P: Array

    @property
    def sizes_P(self) -> Array:
        """The tokens that each adds to its row."""
        return self.stops_P - self.starts_P - self.prefixes_P

    def at(self, places: Array | slice) -> Pieces:
        """Select the pieces at these places."""
        return Pieces(
            self.starts_P[places],
            self.stops_P[places],
            self.learned_P[places],
            self.prefixes_P[places],
        )


def cut(documents: Documents, spans_D2: Array, length: int) -> Pieces:
    """Documents in pieces of at most `length` tokens. The first token of a piece is not learned,
    because no state predicted it.
    """
    starts_D, stops_D = spans_D2.reshape(-1, 2).T
    counts_D = -(-(stops_D - starts_D) // length)
    befores_D = counts_D.cumsum() - counts_D  # pieces of the documents before
    starts_P = np.repeat(starts_D - length * befores_D, counts_D)
    starts_P += length * np.arange(len(starts_P))
    stops_P = np.minimum(starts_P + length, np.repeat(stops_D, counts_D))
    learned_P = documents.learned_before(stops_P) - documents.learned_before(starts_P + 1)
    return Pieces(starts_P, stops_P, learned_P, np.zeros_like(starts_P))


def openings(pieces: Pieces, documents: Documents) -> Array:
    """int64 (P,): where the first piece is whose conversation begins with the same SHARED tokens;
    for a shorter one, where its own conversation begins.
    """
    talks_P = documents.conversations()[documents.numbers(pieces.starts_P)]
    firsts = np.flatnonzero(np.diff(talks_P, prepend=-1))
    stops = pieces.stops_P[firsts]
    places: dict[int, int] = {}
    found = firsts.copy()
    for number, start in enumerate(pieces.starts_P[firsts].tolist()):
        if start + SHARED <= stops[number]:
            opening = content_hash(documents.tokens(start, start + SHARED))
            found[number] = places.setdefault(opening, firsts[number])
    return np.repeat(found, np.diff(firsts, append=len(talks_P)))


def group(pieces: Pieces, documents: Documents, length: int) -> Pieces:
    """These pieces, those that begin alike one after another, with the prefixes that they share: a
    piece and its branches fit into a row, and no branch begins behind its first learned token.
    """
    openings_P = openings(pieces, documents)
    order = np.argsort(openings_P, kind="stable")
    pieces = pieces.at(order)
    prefixes_P = np.zeros_like(pieces.starts_P)
    spans = list(zip(pieces.starts_P.tolist(), pieces.stops_P.tolist(), strict=True))
    size = 0  # of the group of the piece before
    last = -1
    for place in (np.flatnonzero(np.diff(openings_P[order]) == 0) + 1).tolist():
        earlier, own = (documents.tokens(*span) for span in spans[place - 1 : place + 1])
        learned = documents.mask(*spans[place])[1:].nonzero()[0][0]
        most = min(len(earlier), learned)
        differs = np.append(earlier[:most] != own[:most], True)
        prefix = int(differs.argmax())
        if last != place - 1:
            size = len(earlier)
        if not prefix or size + len(own) - prefix > length:
            prefix = size = 0
        prefixes_P[place] = prefix
        size += len(own) - prefix
        last = place
    return replace(pieces, prefixes_P=prefixes_P)


def pack_groups(sizes_G: Array, length: int, seed: int, *, several: bool) -> tuple[Array, Array]:
    """(row, turn) of each group: they take turns by `seed`, and go into the oldest open row with
    room for them. several: else each has a row of its own.
    """
    shuffled_G = _permutation(len(sizes_G), seed)
    turns_G = np.argsort(shuffled_G)
    if not several:
        return turns_G, turns_G
    # over Python's integers: numpy's are slow in a loop
    rows = _first_fit(array("i", sizes_G[shuffled_G].tobytes()), length)
    return rows[turns_G], turns_G


class Rows:
    """Documents in rows of at most `length` tokens.

    Documents are shuffled by `seed` and packed first-fit (pack=False: one per row). Longer ones are
    cut into row-long pieces. A piece counts as a document: its positions start at 0. Pieces without
    learned tokens are dropped.

    share_prefixes: where they fit, documents of a conversation, and of those that begin with the
    same SHARED tokens, stand in one row, which has the prefix that two of them share once. The
    later one is a branch of the earlier one there.
    """

    def __init__(
        self,
        documents: Documents,
        spans: Array | Sequence[Span],
        length: int,
        *,
        pack: bool,
        seed: int,
        share_prefixes: bool = False,
    ) -> None:
        self.documents = documents
        self.spans = np.asarray(spans, np.int64)
        self.length = length
        pieces = cut(documents, self.spans, length)
        self.cut = len(pieces.starts_P) - len(self.spans)
        pieces = pieces.at(np.flatnonzero(pieces.learned_P))
        if share_prefixes:
            pieces = group(pieces, documents, length)
        firsts_G = np.flatnonzero(pieces.prefixes_P == 0)  # of each group, whose branches follow
        sizes_G = np.array(_sums(pieces.sizes_P, firsts_G), np.int32)
        counts_G = np.diff(firsts_G, append=len(pieces.starts_P))
        rows_G, turns_G = pack_groups(sizes_G, length, seed, several=pack)
        rows_P = np.repeat(rows_G, counts_G)
        order = np.lexsort((np.repeat(turns_G, counts_G), rows_P))
        pieces = pieces.at(order)
        self._starts_P = pieces.starts_P
        self._lengths_P = (pieces.stops_P - pieces.starts_P).astype(np.int32)
        self._prefixes_P = pieces.prefixes_P.astype(np.int32)
        firsts_R = np.flatnonzero(np.diff(rows_P[order], prepend=-1))
        self._bounds_R1 = array("q", np.append(firsts_R, len(order)).tobytes())
        self.learned = _sums(pieces.learned_P, firsts_R)
        """Learned tokens of each row."""
        self.sizes = _sums(pieces.sizes_P, firsts_R)
        """Tokens of each row, without padding."""
        self.prefix_tokens = int(pieces.prefixes_P.sum())
        """Tokens of prefixes that rows hold once for several documents."""

    def __len__(self) -> int:
        return len(self.sizes)

    def pieces(self, row: int) -> list[Span]:
        """The spans of tokens that a row holds."""
        start, stop = self._bounds_R1[row : row + 2]
        starts_P = self._starts_P[start:stop]
        stops_P = starts_P + self._lengths_P[start:stop]
        return list(zip(starts_P.tolist(), stops_P.tolist(), strict=True))

    def prefixes_of(self, row: int) -> list[int]:
        """Counts the first tokens that each piece has in common with the one before."""
        start, stop = self._bounds_R1[row : row + 2]
        prefixes: list[int] = self._prefixes_P[start:stop].tolist()
        return prefixes

    def document_numbers(self, rows: Iterable[int]) -> list[int]:
        """Indices of the documents in these rows, in the order of the data."""
        starts = [start for row in rows for start, _ in self.pieces(row)]
        numbers: list[int] = self.documents.numbers(np.array(starts, np.int64)).tolist()
        return numbers

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows, padded to the longest; padding is a separate document."""
        width = max(self.sizes[row] for row in rows)
        lines = [self._line(row, width) for row in rows]
        tokens_BT, loss_mask_BT, positions_BT, documents_BT = (
            torch.from_numpy(np.stack(part)) for part in zip(*lines, strict=True)
        )
        has_branches = any(any(self.prefixes_of(row)) for row in rows)
        reach_BT = None
        if has_branches:
            reach_BT = torch.from_numpy(np.stack([self._reach(row, width) for row in rows]))
        return Batch(tokens_BT, loss_mask_BT, positions_BT, documents_BT, reach_BT=reach_BT)

    def _line(self, row: int, width: int) -> tuple[Array, Array, Array, Array]:
        """Token ids, loss mask, positions and documents (T) of a row, padded to a width."""
        end = self.sizes[row]
        prefixes_P, firsts_P, sizes_P = self._layout(row)
        spans = [
            (start + prefix, stop)
            for (start, stop), prefix in zip(self.pieces(row), prefixes_P.tolist(), strict=True)
        ]
        tokens_T = np.zeros(width, np.int64)
        loss_mask_T = np.zeros(width, np.bool_)
        positions_T = np.arange(width)
        documents_T = np.full(width, -1)
        np.concatenate([self.documents.tokens(*span) for span in spans], out=tokens_T[:end])
        loss_mask_T[:end] = np.concatenate([self.documents.mask(*span) for span in spans])
        loss_mask_T[firsts_P] = False
        positions_T[:end] -= np.repeat(firsts_P - prefixes_P, sizes_P)
        positions_T[end:] -= end
        documents_T[:end] = np.repeat(np.arange(len(spans)), sizes_P)
        return tokens_T, loss_mask_T, positions_T, documents_T

    def _reach(self, row: int, width: int) -> Array:
        """`Batch.reach_BT` of a row, padded to a width: a branch ends it for the tokens behind the
        prefix that it shares. Padding may see the last document.
        """
        reach_T = np.full(width, width - 1)
        path = np.arange(0)  # the places of a document's tokens
        for prefix, first, size in zip(*self._layout(row), strict=True):
            reach_T[path[prefix:]] = first - 1
            path = np.append(path[:prefix], np.arange(first, first + size))
        return reach_T - np.arange(width)

    def _layout(self, row: int) -> tuple[Array, Array, Array]:
        """Returns of each piece of a row its prefix, and the place and number of its own tokens."""
        starts_P, stops_P = np.array(self.pieces(row)).T
        prefixes_P = np.array(self.prefixes_of(row))
        sizes_P = stops_P - starts_P - prefixes_P
        return prefixes_P, sizes_P.cumsum() - sizes_P, sizes_P


@dataclass(frozen=True)
class Order:
    """The rows of each step: an endless stream of epochs, each shuffled by (seed, epoch)."""

    rows: int  # in the data set
    rows_per_step: int  # over all processes
    seed: int

    def step(self, step: int) -> list[int]:
        """Row numbers of a step, over all processes; steps count from 0."""
        first = step * self.rows_per_step
        epochs, places = np.divmod(np.arange(first, first + self.rows_per_step), self.rows)
        numbers: list[int] = []
        for epoch in np.unique(epochs).tolist():
            order = _permutation(self.rows, self.seed * 1_000_003 + epoch + 1)
            numbers += order[places[epochs == epoch]].tolist()
        return numbers

    def steps(self, epochs: float) -> int:
        """Number of steps in `epochs` passes over the rows, rounded down, at least 1."""
        return max(1, int(epochs * self.rows / self.rows_per_step + 1e-9))


def share(
    rows: Sequence[int], rows_per_batch: int, rank: int, world: int
) -> list[tuple[int, list[int]]]:
    """One process's micro batches of a step, each with its number in the step.

    Raises ValueError if the processes cannot all have equally many.
    """
    size = min(rows_per_batch, len(rows) // world)
    if not size or len(rows) % (size * world):
        raise ValueError(
            f"expected rows per step that processes ({world}) x data.rows_per_batch "
            f"({rows_per_batch}) divide evenly, got {len(rows)}; resume on another number of "
            "processes, or with another data.rows_per_batch"
        )
    batches = [list(rows[at : at + size]) for at in range(0, len(rows), size)]
    return list(enumerate(batches))[rank::world]


@dataclass(frozen=True)
class DataAmount:
    """The amount of data that a run reads, which decides the size of its steps."""

    rows: int | None  # None: unknown
    length: int  # of a row, in tokens
    epochs: float | None  # None: the recipe gives the number of steps
    world: int  # processes

    def rows_per_step(self, tokens_per_step: int | None, rows_per_batch: int) -> tuple[int, str]:
        """(rows per step over all processes, a note if the recipe requests another number, or "").

        tokens_per_step: None means 100 steps or more, of at most MOST_TOKENS. Within an epoch no
        step reads a row twice. Raises ValueError for fewer rows than processes.
        """
        if self.rows is not None and self.rows < self.world:
            raise ValueError(
                f"expected a row of {self.length} tokens for each of {self.world} processes, "
                f"got {self.rows} rows; use fewer processes, or lower data.sequence_length"
            )
        requested = tokens_per_step or MOST_TOKENS
        wanted = requested
        most = math.inf
        if self.rows is not None:
            most = min(1.0, self.epochs or 1.0) * self.rows
            if not tokens_per_step and self.epochs is not None:
                hundredth = int(self.epochs * self.rows * self.length / 100)
                wanted = min(MOST_TOKENS, max(1, hundredth))
        if not tokens_per_step:
            most = min(most, wanted / self.length)
        unit = rows_per_batch * self.world
        count = max(1, round(wanted / self.length / unit)) * unit
        if count > most:
            step = unit if most >= unit else self.world
            count = max(self.world, int(most) // step * step)
        size = count * self.length
        if size == requested:
            return count, ""
        return count, f"run.tokens_per_step: using {size}, whole batches that the data can fill"

    def warning(self, steps: int, rows_per_step: int) -> str:
        """A warning if `steps` are too few to learn from, or ""."""
        if steps >= FEW_STEPS or not self.epochs or self.rows is None:
            return ""
        return (
            f"warning: {steps} steps of {rows_per_step * self.length} tokens are few to learn from;"
            " distill more prompts, raise run.epochs or lower run.tokens_per_step"
        )


def release() -> None:
    """Return freed memory to the system: glibc keeps the megabytes of large temporary arrays."""
    libc = None if os.name == "nt" else ctypes.CDLL(None)  # Windows names it
    if trim := getattr(libc, "malloc_trim", None):
        trim(0)


def heldout_rows(rows: Rows) -> int:
    """Number of rows to evaluate, from the first."""
    ends = accumulate(rows.sizes)
    return next((row for row, end in enumerate(ends, 1) if end >= HELDOUT_TOKENS), len(rows))


def _first_fit(sizes: Iterable[int], length: int) -> Array:
    """The row of each piece: the oldest open row with room, else a new one."""
    rows = array("q")
    room: list[int] = []  # free tokens of the open rows, oldest first
    oldest = 0
    for size in sizes:
        at = next((place for place, free in enumerate(room) if free >= size), len(room))
        rows.append(oldest + at)
        if at < len(room):
            room[at] -= size
            continue
        room.append(length - size)
        if len(room) > OPEN_ROWS:
            del room[0]
            oldest += 1
    return np.frombuffer(rows, np.int64)


def _sums(values: Array, firsts: Array) -> Sequence[int]:
    """Sums of the stretches that begin at `firsts`, as Python's numbers in an array."""
    return array("q", np.add.reduceat(values, firsts, dtype=np.int64).tobytes())


@lru_cache(maxsize=2)  # `Order` asks at each step
def _permutation(count: int, seed: int) -> Array:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.numpy().astype(np.int32)
