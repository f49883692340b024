"""How much there is to train on: rows, tokens and steps of a recipe's data, or what is assumed
where there is none.

Legend: N tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from draftheads.train.batches import Documents, Order, Reading, Rows
from draftheads.train.data.answers import (
    MANIFEST,
    Answer,
    count,
    read_answers,
    read_manifest,
    write_manifest,
)
from draftheads.train.heldout import HELDOUT_TOKENS
from draftheads.train.recipe import Recipe

SAMPLE_TOKENS = 2_000_000
"""Read of a data set to know its rows; a larger one is taken to go on as it begins."""
DOCUMENT_BYTES = 400
"""Python's objects per document: spans, pieces, rows."""


@dataclass(frozen=True)
class Workload:
    """The rows of a run. answers: a sample of the data, or made up. known: the data is there.
    whole: all of it is in `answers`. rows: to train on, of `length` tokens at most; None: unknown.
    tokens: of these rows, padding not counted. heldout: tokens observed at each save.
    documents, stored: of the data, and its bytes on disk.
    """

    answers: list[Answer]
    known: bool
    whole: bool
    length: int
    rows: int | None
    tokens: int
    learned: float
    heldout: int
    documents: int
    stored: int

    @property
    def memory(self) -> int:
        """Bytes of the data in a training process: ids, what is learned, Python's spans."""
        return self.tokens * (4 + 1) + self.documents * DOCUMENT_BYTES

    @property
    def sampled(self) -> int:
        """As `memory`, of the sample alone."""
        return 5 * sum(len(x.tokens) for x in self.answers) + len(self.answers) * DOCUMENT_BYTES

    @property
    def row_tokens(self) -> float:
        """Tokens per row, padding not counted."""
        return self.tokens / self.rows if self.rows else float(self.length)


@dataclass(frozen=True)
class Steps:
    """micro_batches: per step and process. rows: per step, over all processes. count: None where
    the number of epochs is given and that of rows is not known. passes: over the rows. alone: share
    of the steps in which heads learn alone, 1 without an adapter.
    """

    micro_batches: int
    rows: int
    count: int | None
    passes: float | None
    saves: int | None
    alone: float
    note: str


def read_workload(recipe: Recipe, context: int) -> Workload:
    """Look at the recipe's data. Raises ValueError for a folder that is not in order."""
    length = min(recipe.data.sequence_length, context)
    if not (recipe.data.path / MANIFEST).is_file():
        return Workload([], False, False, length, None, 0, 1.0, HELDOUT_TOKENS, 0, 0)
    manifest = read_manifest(recipe.data.path)
    answers = list(_sample(recipe.data.path))
    documents = Documents.read(answers)
    size = len(documents.tokens_N)
    whole = size < SAMPLE_TOKENS
    total = len(answers) if whole else count_documents(recipe.data.path, manifest)
    times = total / len(answers)
    spans, apart = documents.split(recipe.data.heldout)
    train = Rows(documents, spans, length, pack=recipe.data.pack, seed=recipe.run.seed)
    heldout = Rows(documents, apart, length, pack=recipe.data.pack, seed=0)
    if not len(train) or not len(heldout):
        raise ValueError(f"{recipe.data.path}: expected tokens written by the target, got none")
    return Workload(
        answers,
        True,
        whole,
        length,
        round(len(train) * times),
        round(sum(train.sizes) * times),
        sum(train.learned) / sum(train.sizes),
        min(HELDOUT_TOKENS, round(sum(heldout.sizes) * times)),
        total,
        sum(path.stat().st_size for path in recipe.data.path.glob("*.json*")),
    )


def count_documents(folder: Path, manifest: dict[str, object]) -> int:
    """Documents in a folder; the manifest of a finished one knows."""
    counts = manifest.get("counts")
    if manifest["complete"] and isinstance(counts, dict):
        several = "documents" in counts  # else written when each prompt gave one
        return int(counts["documents" if several else "done"])
    return count(folder, manifest).documents


def plan_steps(recipe: Recipe, workload: Workload, processes: int) -> Steps:
    """How a run on so many processes goes."""
    choices = recipe.adapter
    rows = recipe.data.rows_per_batch
    reading = Reading(workload.rows, workload.length, recipe.run.epochs, processes)
    per_step, note = reading.rows_per_step(recipe.run.tokens_per_step, rows)
    steps = recipe.run.steps
    if steps is None and workload.rows and recipe.run.epochs:
        steps = Order(workload.rows, per_step, recipe.run.seed).steps(recipe.run.epochs)
    warning = reading.warning(steps, per_step) if steps else ""
    note = "; ".join(filter(None, (note, warning)))
    passes = steps * per_step / workload.rows if steps and workload.rows else None
    saves = -(-steps // recipe.run.save_every) if steps else None
    alone = choices.start if choices else 1.0
    if choices and steps:
        alone = math.ceil(alone * steps - 1e-9) / steps  # as the learner counts them
    micro_batches = max(1, per_step // (rows * processes))
    return Steps(micro_batches, per_step, steps, passes, saves, alone, note)


def made_up(rows: int, length: int, vocabulary: int) -> list[Answer]:
    """Rows that are full, and learned but for their first token: nothing costs more."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (rows, length), generator=generator).tolist()
    return [Answer(row, [(1, length)]) for row in tokens]


def heldout_tokens(answers: list[Answer], recipe: Recipe) -> int:
    """Tokens of these answers that a run observes when it saves."""
    _, apart = Documents.read(answers).split(recipe.data.heldout)
    return min(HELDOUT_TOKENS, sum(stop - start for start, stop in apart))


def write_answers(folder: Path, answers: list[Answer]) -> None:
    """A finished distillation folder that names no target."""
    talks: list[list[dict[str, object]]] = []
    for answer in answers:
        document = {"tokens": answer.tokens, "learn": answer.learn, "turns": 1, "finish": "eos"}
        if not answer.follows:
            talks.append([])
        talks[-1].append(document)
    folder.mkdir(parents=True)
    with (folder / "answers-00000-of-00001.jsonl").open("w") as file:
        for number, talk in enumerate(talks):
            file.write(json.dumps({"id": number, "documents": talk}) + "\n")
    manifest = {"format": 1, "batch_size": len(talks), "complete": True}
    counts = {"prompts": {"count": len(talks)}, "counts": {"done": len(talks)}}
    write_manifest(folder, {**manifest, **counts})


def _sample(folder: Path) -> Iterator[Answer]:
    size = 0
    for answer in islice(read_answers(folder), SAMPLE_TOKENS):
        if size >= SAMPLE_TOKENS:
            return
        size += len(answer.tokens)
        yield answer
