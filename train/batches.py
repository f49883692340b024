"""Packs answers into rows, and orders the rows into batches.

A step's rows are a function of (seed, step) alone; processes and accumulation only divide them.
So a run resumes at step n without stored state, on any number of processes that divides the step.

Legend: B batch, T tokens, N all tokens of a data set.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from draftheads.heads.batch import Batch
from draftheads.train.data.answers import Answer

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

Span = tuple[int, int]


@dataclass(frozen=True)
class Documents:
    """Token ids of many documents, concatenated."""

    tokens_N: Tensor  # int32
    learn_N: Tensor  # bool: the target wrote this token
    spans: list[Span]  # half-open, one per document
    following: tuple[int, ...] = ()  # documents that continue the previous one's conversation

    @classmethod
    def read(cls, answers: Iterable[Answer]) -> Documents:
        """Concatenate answers. Raises ValueError if there are none."""
        tokens, learn = array("i"), bytearray()
        spans: list[Span] = []
        following: list[int] = []
        for answer in answers:
            start = len(tokens)
            if answer.follows:
                following.append(len(spans))
            tokens.extend(answer.tokens)
            learn.extend(bytes(len(answer.tokens)))
            for first, last in answer.learn:
                learn[start + first : start + last] = b"\x01" * (last - first)
            spans.append((start, len(tokens)))
        if not tokens:
            raise ValueError("the data has no answers; run `draftheads distill` to the end first")
        tokens_N = torch.frombuffer(tokens, dtype=torch.int32)
        learn_N = torch.frombuffer(learn, dtype=torch.uint8).bool()
        return cls(tokens_N, learn_N, spans, tuple(following))

    def digest(self) -> str:
        """Hash of tokens, loss mask, documents and conversations, as 16 hex digits."""
        digest = hashlib.sha256()
        for tensor in (self.tokens_N, self.learn_N):
            digest.update(tensor.numpy().tobytes())
        for numbers in (self.spans, self.following):
            digest.update(torch.tensor(numbers, dtype=torch.int64).numpy().tobytes())
        return digest.hexdigest()[:16]

    def split(self, heldout: float) -> tuple[list[Span], list[Span]]:
        """(training documents, held-out documents), at least one each.

        heldout: share of the conversations, which are never divided. Conversations that contain a
        copy of a held-out document are not trained on: greedy answers to equal prompts are equal.
        If nothing else is left, training uses the held-out documents.
        """
        starts = sorted(set(range(len(self.spans))).difference(self.following))
        conversations = [self.spans[a:b] for a, b in pairwise([*starts, len(self.spans)])]
        total = len(conversations)
        count = min(max(1, round(heldout * total)), max(1, total - 1))
        chosen = sorted(_permutation(total, SPLIT_SEED)[:count])
        held_out = [span for number in chosen for span in conversations[number]]
        known = {self._content(span) for span in held_out}
        train: list[Span] = []
        for spans in conversations:
            if known.isdisjoint(map(self._content, spans)):
                train += spans
        return train or held_out, held_out

    def _content(self, span: Span) -> bytes:
        return self.tokens_N[slice(*span)].numpy().tobytes()

    def frequent_tokens(self, count: int, vocab_size: int) -> list[int]:
        """The `count` token ids that the target writes most often, most frequent first."""
        written = torch.bincount(self.tokens_N[self.learn_N].long(), minlength=vocab_size)
        return written.argsort(descending=True, stable=True)[:count].tolist()


class Rows:
    """Documents in rows of at most `length` tokens.

    Documents are shuffled by `seed` and packed first-fit (pack=False: one per row). Longer ones are
    cut into row-long pieces. A piece counts as a document: its positions start at 0, and its first
    token is not learned, because no state predicted it. Pieces without learned tokens are dropped.
    """

    def __init__(
        self, documents: Documents, spans: Sequence[Span], length: int, *, pack: bool, seed: int
    ) -> None:
        self.documents, self.spans, self.length = documents, spans, length
        learned_N = documents.learn_N.long().cumsum(0)
        learned: dict[Span, int] = {}
        pieces = 0
        for start, stop in spans:
            for first in range(start, stop, length):
                last = min(first + length, stop)
                pieces += 1
                if count := int(learned_N[last - 1] - learned_N[first]):
                    learned[first, last] = count
        self.cut = pieces - len(spans)
        useful = list(learned)
        shuffled = [useful[place] for place in _permutation(len(useful), seed)]
        self.rows = _first_fit(shuffled, length if pack else 0)
        self.learned = [sum(learned[piece] for piece in row) for row in self.rows]
        """Learned tokens of each row."""
        self.sizes = [sum(stop - start for start, stop in row) for row in self.rows]
        """Tokens of each row, without padding."""

    def __len__(self) -> int:
        return len(self.rows)

    def document_numbers(self, rows: Iterable[int]) -> list[int]:
        """Indices of the documents in these rows, in the order of the data."""
        starts = [start for start, _ in self.documents.spans]
        return [bisect_right(starts, start) - 1 for row in rows for start, _ in self.rows[row]]

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows, padded to the longest; padding is a separate document."""
        width = max(self.sizes[row] for row in rows)
        shape = (len(rows), width)
        tokens_BT = torch.zeros(shape, dtype=torch.long)
        loss_mask_BT = torch.zeros(shape, dtype=torch.bool)
        documents_BT = torch.full(shape, -1)
        positions_BT = torch.arange(width).repeat(len(rows), 1)
        for line, row in enumerate(rows):
            end = 0
            for number, (start, stop) in enumerate(self.rows[row]):
                place = slice(end, end := end + stop - start)
                tokens_BT[line, place] = self.documents.tokens_N[start:stop].long()
                loss_mask_BT[line, place] = self.documents.learn_N[start:stop]
                loss_mask_BT[line, place.start] = False
                documents_BT[line, place] = number
                positions_BT[line, place] -= place.start
            positions_BT[line, end:] -= end
        return Batch(tokens_BT, loss_mask_BT, positions_BT, documents_BT)


@dataclass(frozen=True)
class Order:
    """The rows of each step: an endless stream of epochs, each shuffled by (seed, epoch)."""

    rows: int  # in the data set
    rows_per_step: int  # over all processes
    seed: int

    def step(self, step: int) -> list[int]:
        """Row numbers of a step, over all processes; steps count from 0."""
        first = step * self.rows_per_step
        numbers = []
        for place in range(first, first + self.rows_per_step):
            epoch, index = divmod(place, self.rows)
            numbers.append(_permutation(self.rows, self.seed * 1_000_003 + epoch + 1)[index])
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
            f"expected rows per step that {world} processes x data.rows_per_batch {rows_per_batch} "
            f"divide evenly, got {len(rows)}; resume on another number of processes, or with "
            "another data.rows_per_batch"
        )
    batches = [list(rows[at : at + size]) for at in range(0, len(rows), size)]
    return list(enumerate(batches))[rank::world]


@dataclass(frozen=True)
class Reading:
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
        wanted, most = requested, math.inf
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
        used = count * self.length
        if used == requested:
            return count, ""
        return count, f"run.tokens_per_step: using {used}, whole batches that the data can fill"

    def warning(self, steps: int, rows_per_step: int) -> str:
        """A warning if `steps` are too few to learn from, or ""."""
        if steps >= FEW_STEPS or not self.epochs or self.rows is None:
            return ""
        return (
            f"warning: {steps} steps of {rows_per_step * self.length} tokens are few to learn from;"
            " distill more prompts, raise run.epochs or lower run.tokens_per_step"
        )


def heldout_rows(rows: Rows) -> int:
    """Number of rows to evaluate, from the first."""
    ends = accumulate(rows.sizes)
    return next((row for row, end in enumerate(ends, 1) if end >= HELDOUT_TOKENS), len(rows))


def _first_fit(pieces: Sequence[Span], length: int) -> list[list[Span]]:
    rows: list[list[Span]] = []
    room: dict[int, int] = {}  # free tokens of the open rows, oldest first
    for start, stop in pieces:
        size = stop - start
        row = next((row for row, free in room.items() if free >= size), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room[row] = length
            if len(room) > OPEN_ROWS:
                del room[next(iter(room))]
        rows[row].append((start, stop))
        if row in room:
            room[row] -= size
    return rows


@lru_cache(maxsize=2)  # `Order` asks once per row
def _permutation(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
