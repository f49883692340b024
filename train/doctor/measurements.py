"""What is measured of a head: its ranks along texts, and decoding with it.

Legend: M learned positions, K draft depth, T tokens, D feature width.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.target import Target
from draftheads.infer.accept import Acceptance
from draftheads.infer.engine import Speculator
from draftheads.train.batches import Documents, Rows, Span
from draftheads.train.data.answers import Answer
from draftheads.train.evaluate import calibrate

TEXT_TOKENS = 4096
"""Of the documents along which heads are observed."""
ROWS_PER_BATCH = 4
BLOCK = 16
"""Neighbouring positions depend on each other: errors are estimated from means of so many."""
SURE = 4.0
"""Standard errors by which a difference exceeds chance; many are looked at, so two are too few."""
ORDINARY = 2.0
"""Tokens per step that any trained head brings; expected where training recorded nothing."""
Variant = tuple[tuple[int, ...], int]
"""Another way to feed a head: the layers that it reads, and by how many tokens these are late."""


@dataclass(frozen=True)
class Case:
    """A head and what it is examined on. facts: "draftheads" of its config.json. openings: prompts
    to decode, as ids. documents, manifest: the data, if any. sampling: tried besides greedy.
    """

    target: Target
    head: DraftHead
    facts: dict[str, Any]
    openings: list[list[int]]
    documents: Documents | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    new_tokens: int = 64
    sampling: Acceptance | None = None

    @property
    def training(self) -> dict[str, Any]:
        """What training recorded, or nothing."""
        recorded: dict[str, Any] = self.facts.get("training") or {}
        return recorded

    @property
    def nodes(self) -> int:
        """Draft nodes of the trees that predictions are made for."""
        choices = self.training.get("recipe", {}).get("head", {})
        return choices.get("nodes") or self.head.tree.draft_nodes


@dataclass(frozen=True)
class Decoded:
    """What decoding wrote after the openings. accepted: drafts accepted in each step."""

    answers: list[Answer]
    accepted: Tensor
    tokens: int

    @property
    def tokens_per_step(self) -> float:
        """The target's own token included, prefill left out."""
        return self.tokens / max(1, len(self.accepted))


class Evidence:
    """The measurements, each made when it is first asked for."""

    def __init__(self, case: Case) -> None:
        self.case, self.head, self.target = case, case.head, case.target

    @cached_property
    def decoded(self) -> Decoded:
        """Greedily, with the head's own tree."""
        return decode(self.case, self.case.openings)

    @cached_property
    def decoded_rows(self) -> Rows:
        """The same as rows, one answer each."""
        documents = Documents.read(self.decoded.answers)
        return Rows(documents, documents.spans, self.target.context, pack=False, seed=0)

    @cached_property
    def rows(self) -> Rows:
        """The text along which the head is observed: documents of the data that were not trained
        on, or else what decoding wrote.
        """
        documents = self.case.documents
        if documents is None or not bool(documents.learn_N.any()):
            return self.decoded_rows
        spans = unseen(self.case.training, documents)
        useful = [span for span in spans if bool(documents.learn_N[slice(*span)].any())]
        spread = random.Random(0).sample(useful, len(useful))
        ends = accumulate(stop - start for start, stop in spread)
        few = [span for span, end in zip(spread, ends, strict=True) if end <= TEXT_TOKENS]
        length = min(self.target.context, TEXT_TOKENS)
        rows = Rows(documents, few or spread[:1], length, pack=False, seed=0)
        return rows if len(rows) else self.decoded_rows

    @property
    def on_data(self) -> bool:
        """Whether `rows` are documents of the data."""
        return self.rows is not self.decoded_rows

    @property
    def layers(self) -> tuple[int, ...]:
        """That the head reads, counted from 0, the embeddings."""
        return tuple(layer % (self.target.layers + 1) for layer in self.head.feature_layers)

    @cached_property
    def ranks_MK(self) -> Tensor:
        """Of the tokens of `rows`, as the head is configured."""
        return self.ranks_along(self.rows, [(self.layers, 0)])[0]

    @cached_property
    def used_MK(self) -> Tensor:
        """Of the tokens that decoding wrote, without the ends: in short texts they weigh more than
        in long ones, and no deep guess can be right there.
        """
        ranks_MK = self.ranks_along(self.decoded_rows, [(self.layers, 0)])[0]
        inside_M = truth(self.decoded_rows, ranks_MK.shape[1])[:, -1] >= 0
        return ranks_MK[inside_M] if bool(inside_M.any()) else ranks_MK

    @property
    def observed_MK(self) -> Tensor:
        """Ranks as training would count them."""
        return self.ranks_MK if self.on_data else self.used_MK

    @cached_property
    def finite(self) -> bool:
        """Whether all of the head's numbers are."""
        return all(bool(tensor.isfinite().all()) for tensor in self.head.state_dict().values())

    @cached_property
    def missing(self) -> float:
        """Tokens per step by which the prediction falls short of training's own, or of an ordinary
        head's where there is none; 0 within chance.
        """
        training = self.case.training
        recorded = training.get("predicted_tokens_per_step")
        if not self.finite:
            return (recorded or ORDINARY) - 1.0
        ranks_MK = self.observed_MK
        hits_M, expected = runs(ranks_MK), ORDINARY - 1
        if recorded:
            shares: list[float] = training.get("heldout_top1", [])[: ranks_MK.shape[1]]
            hits_M, expected = (ranks_MK[:, : len(shares)] == 0).float().sum(1), sum(shares)
        missing = (recorded or ORDINARY) - self.predicted(ranks_MK)
        return max(0.0, missing) if is_above(-hits_M, -expected) else 0.0

    @cached_property
    def lost_in_use(self) -> float:
        """Tokens per step predicted less for what decoding wrote than for the data; 0 within
        chance.
        """
        if not self.on_data or not is_above(runs(self.ranks_MK), runs(self.used_MK)):
            return 0.0
        return max(0.0, self.predicted(self.ranks_MK) - self.predicted(self.used_MK))

    def predicted(self, ranks_MK: Tensor) -> float:
        """Tokens per step of the best fixed tree."""
        return calibrate(ranks_MK, self.case.nodes, self.head.tree).tokens_per_step

    @torch.no_grad()
    def ranks_along(
        self, rows: Rows, variants: Sequence[tuple[Sequence[int], int]]
    ) -> list[Tensor]:
        """ranks_MK with features of other layers, or so many tokens late; the target reads every
        row once for all of these variants.
        """
        layers = sorted({layer for chosen, _ in variants for layer in chosen})
        found: list[list[Tensor]] = [[] for _ in variants]
        for batch in batches(rows):
            batch = batch.to(self.target.device)
            states = self.target.features(batch, layers).chunk(len(layers), dim=-1)
            for (chosen, shift), ranks in zip(variants, found, strict=True):
                parts = [states[layers.index(layer)] for layer in chosen]
                features_BTD = torch.cat(parts, dim=-1).roll(shift, dims=1)
                ranks.append(self.head.token_ranks(batch, features_BTD, self.target).cpu())
        return [torch.cat(ranks) for ranks in found]


def decode(
    case: Case, openings: Sequence[Sequence[int]], rule: Acceptance | None = None
) -> Decoded:
    """Answers to openings. Raises ValueError when none leaves room in the context."""
    context = case.target.context
    room = [opening for opening in openings if len(opening) + 2 <= context]
    if not room:
        raise ValueError(
            f"expected an opening shorter than the context of {case.target.name} ({context} "
            f"tokens), got {len(openings)} longer ones; pass other --prompts"
        )
    answers, accepted, tokens = [], [], 0
    engine = Speculator(case.target, case.head)
    for opening in room:
        limit, new = min(case.new_tokens, context - len(opening)), []
        for step in engine.generate(opening, sampling=rule, max_new_tokens=limit):
            new += step.tokens
            if step.accepted >= 0:  # not the prefill
                accepted.append(step.accepted)
                tokens += len(step.tokens)
        span = (len(opening), len(opening) + len(new))
        answers.append(Answer([*opening, *new], [span]))
    return Decoded(answers, torch.tensor(accepted), tokens)


def batches(rows: Rows) -> Iterator[Batch]:
    """All rows, in order."""
    for start in range(0, len(rows), ROWS_PER_BATCH):
        yield rows.batch(range(start, min(start + ROWS_PER_BATCH, len(rows))))


def truth(rows: Rows, depth: int) -> Tensor:
    """int64 (M, K): the tokens after each learned position, -1 where they are not the target's."""
    found = []
    for batch in batches(rows):
        columns = [
            torch.where(here_BT, batch.tokens_BT.roll(-k, dims=1), -1)
            for k, here_BT in enumerate(batch.roots(depth), start=1)
        ]
        found.append(torch.stack(columns, dim=-1)[batch.loss_mask_BT])
    return torch.cat(found)


def runs(ranks_MK: Tensor) -> Tensor:
    """float (M,): how many best guesses in a row were right."""
    return (ranks_MK == 0).long().cumprod(1).sum(1).float()


def error(values_M: Tensor) -> float:
    """Standard error of a mean over neighbouring positions; infinite of too few."""
    count = len(values_M) // BLOCK
    if count < 2:
        return math.inf
    means = values_M[: count * BLOCK].float().view(count, BLOCK).mean(1)
    return float(means.std() / math.sqrt(count))


def is_above(values_M: Tensor, other: Tensor | float) -> bool:
    """Whether a mean exceeds another one by more than chance: SURE standard errors."""
    if not len(values_M) or (isinstance(other, Tensor) and not len(other)):
        return False
    spread = error(values_M)
    if isinstance(other, Tensor):
        spread, other = math.hypot(spread, error(other)), float(other.float().mean())
    return bool(float(values_M.float().mean()) - other > SURE * spread)


def unseen(training: dict[str, Any], documents: Documents) -> list[Span]:
    """Held-out documents where training recorded that it saw this data, or else all."""
    digest = training.get("data", {}).get("digest")
    heldout = training.get("recipe", {}).get("data", {}).get("heldout")
    if heldout is None or digest not in (None, documents.digest()):
        return documents.spans
    return documents.split(heldout)[1]


def openings_of(documents: Documents, spans: Sequence[Span]) -> list[list[int]]:
    """The prompts of documents; the first quarter of those in which nothing is learned."""
    openings = []
    for start, stop in spans:
        learned = documents.learn_N[start:stop].nonzero()
        end = int(learned[0]) if len(learned) else (stop - start) // 4
        openings.append(documents.tokens_N[start : start + max(1, end)].tolist())
    return openings
