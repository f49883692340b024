"""What a head does on texts: observed along them, and decoding. The measurements that `diagnose`
judges.

Legend: M learned positions, K draft depth, B batch, T tokens, D feature width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import Batch, DraftHead
from draftheads.heads.shape import Tree, TreeShape
from draftheads.heads.target import Target
from draftheads.infer.accept import Acceptance
from draftheads.infer.engine import Speculator
from draftheads.train.batches import Documents, Rows, Span
from draftheads.train.data.answers import Answer

TEXT_TOKENS = 4096
"""Of the documents along which heads are observed."""
ROWS_PER_BATCH = 4
BLOCK = 16
"""Neighbouring positions depend on each other: errors are estimated from means of so many."""
SURE = 4.0
"""Standard errors by which a difference exceeds chance; many are looked at, so two are too few."""


@dataclass(frozen=True)
class Case:
    """Who is examined, and on what. facts: the head's config.json, "draftheads". documents,
    manifest: the data, if any. openings: prompts, as ids. sampling: tried besides greedy decoding.
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

    def recorded(self, *keys: str) -> Any:
        """A value of the recorded recipe; None where it is not recorded."""
        value: Any = self.training.get("recipe")
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def nodes(self) -> int:
        """Draft nodes of the trees that predictions are made for."""
        return self.recorded("head", "nodes") or self.head.tree.draft_nodes


@dataclass(frozen=True)
class Variant:
    """Another way to use the head. layers: of the target, counted from 0. shift: how many tokens
    late features come. planted: a context in which the head is changed.
    """

    name: str
    layers: tuple[int, ...]
    shift: int = 0
    planted: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Written:
    """What decoding wrote behind the openings. accepted: drafts accepted in each step."""

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
    def written(self) -> Written:
        """Greedy decoding with the head's own tree."""
        return write(self.case, self.case.openings, self.head)

    @cached_property
    def written_rows(self) -> Rows:
        """The same as rows, one answer each."""
        return rows_of(self.written.answers, self.target)

    @cached_property
    def written_ranks_MK(self) -> Tensor:
        """Of every token that decoding wrote, given the text before."""
        return observe(self.case, self.written_rows, [self.plain])[0]

    @cached_property
    def rows(self) -> Rows:
        """The text along which the head is observed: documents of the data that were not trained
        on, or else what decoding wrote.
        """
        documents = self.case.documents
        if documents is None or not bool(documents.learn_N.any()):
            return self.written_rows
        context = self.target.context
        chosen = list(_few(unseen(self.case.training, documents), documents))
        rows = Rows(documents, chosen, min(context, TEXT_TOKENS), pack=False, seed=0)
        return rows if len(rows) else self.written_rows

    @property
    def on_data(self) -> bool:
        """Whether `rows` are documents of the data."""
        return self.rows is not self.written_rows

    @cached_property
    def ranks_MK(self) -> Tensor:
        """Of the text's tokens, as the head is configured."""
        return observe(self.case, self.rows, [self.plain])[0]

    @cached_property
    def truth_MK(self) -> Tensor:
        """The text's tokens themselves, -1 where a document has ended."""
        return ahead(self.rows, self.ranks_MK.shape[1])

    @cached_property
    def whole_MK(self) -> Tensor:
        """`ranks_MK` as training would count them."""
        return self.ranks_MK if self.on_data else self.written_whole_MK

    @cached_property
    def written_whole_MK(self) -> Tensor:
        """Of what decoding wrote, without the ends: in short texts they weigh more than in long
        ones, and no deep guess can be right there.
        """
        ranks_MK = self.written_ranks_MK
        last_M = ahead(self.written_rows, ranks_MK.shape[1])[:, -1]
        return ranks_MK[last_M >= 0] if bool((last_M >= 0).any()) else ranks_MK

    @cached_property
    def places_M(self) -> Tensor:
        """How far into its document each learned position is."""
        return torch.cat([batch.positions_BT[batch.learn_BT] for batch in batches(self.rows)])

    @property
    def plain(self) -> Variant:
        """As the head is configured."""
        return Variant("as configured", tuple(self.counted(self.head.feature_layers)))

    def counted(self, layers: Sequence[int]) -> list[int]:
        """Layers counted from 0, the embeddings; -1 is the target's last."""
        return [layer % (self.target.layers + 1) for layer in layers]


def write(
    case: Case,
    openings: Sequence[list[int]],
    head: DraftHead | None,
    sampling: Acceptance | None = None,
) -> Written:
    """Answers to openings. Raises ValueError when none leaves room in the context."""
    room = [opening for opening in openings if len(opening) + 2 <= case.target.context]
    if not room:
        raise ValueError(
            f"expected an opening shorter than the context of {case.target.name} "
            f"({case.target.context} tokens), got {len(openings)} longer ones; pass other --prompts"
        )
    answers, accepted, tokens = [], [], 0
    for opening in room:
        limit = min(case.new_tokens, case.target.context - len(opening))
        engine, new = Speculator(case.target, head), []
        for step in engine.generate(opening, sampling=sampling, max_new_tokens=limit):
            new += step.tokens
            if step.accepted >= 0:
                accepted.append(step.accepted)
                tokens += len(step.tokens)
        span = (len(opening), len(opening) + len(new))
        answers.append(Answer([*opening, *new], [span]))
    return Written(answers, torch.tensor(accepted), tokens)


def rows_of(answers: Sequence[Answer], target: Target) -> Rows:
    """One answer per row."""
    documents = Documents.read(answers)
    return Rows(documents, documents.spans, target.context, pack=False, seed=0)


def batches(rows: Rows) -> Iterator[Batch]:
    """All rows, in order."""
    for start in range(0, len(rows), ROWS_PER_BATCH):
        yield rows.batch(range(start, min(start + ROWS_PER_BATCH, len(rows))))


def ahead(rows: Rows, depth: int) -> Tensor:
    """int64 (M, K): the tokens behind each learned position, -1 where they are not the target's."""
    found = []
    for batch in batches(rows):
        columns = [
            torch.where(here_BT, batch.tokens_BT.roll(-k, dims=1), -1)
            for k, here_BT in enumerate(batch.roots(depth), start=1)
        ]
        found.append(torch.stack(columns, dim=-1)[batch.learn_BT])
    return torch.cat(found)


@torch.no_grad()
def observe(case: Case, rows: Rows, variants: Sequence[Variant]) -> list[Tensor]:
    """ranks_MK under each variant; the target reads every row once for all of them."""
    layers = sorted({layer for variant in variants for layer in variant.layers})
    found: list[list[Tensor]] = [[] for _ in variants]
    for batch in batches(rows):
        batch = batch.to(case.target.device)
        states = case.target.features(batch, layers).chunk(len(layers), dim=-1)
        for variant, ranks in zip(variants, found, strict=True):
            chosen = [states[layers.index(layer)] for layer in variant.layers]
            features_BTD = torch.cat(chosen, dim=-1).roll(variant.shift, dims=1)
            with variant.planted():
                ranks.append(case.head.observe(batch, features_BTD, case.target).cpu())
    return [torch.cat(ranks) for ranks in found]


def replayed(tree: Tree, rows: Rows, ranks_MK: Tensor) -> float:
    """Tokens per step that a drafter which guesses as observed needs for these very answers; of a
    dynamic tree, only its best guesses are counted on.
    """
    chain = TreeShape.from_widths([1] * ranks_MK.shape[1])
    known = set(tree.paths if isinstance(tree, TreeShape) else chain.paths)
    steps = tokens = 0
    for ranks in torch.split(ranks_MK, rows.learned):
        paths, place = [tuple(path) for path in ranks.tolist()], 0
        while place < len(paths) - 1:  # the prefill wrote the first token
            path = paths[place]
            accepted = (d for d in range(len(path)) if path[: d + 1] not in known)
            place += 1 + next(accepted, len(path))
            steps += 1
        tokens += len(paths) - 1
    return tokens / max(1, steps)


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


def _few(spans: Sequence[Span], documents: Documents) -> Iterator[Span]:
    """Spans in which something is learned, spread over all, up to TEXT_TOKENS."""
    useful = [span for span in spans if bool(documents.learn_N[slice(*span)].any())]
    total, order = 0, torch.randperm(len(useful), generator=torch.Generator().manual_seed(0))
    for place in order.tolist():
        if total >= TEXT_TOKENS:
            return
        yield useful[place]
        total += useful[place][1] - useful[place][0]
