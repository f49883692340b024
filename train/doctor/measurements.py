"""What an examination of a head finds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.target import Target
from draftheads.heads.tree import StaticTree, Tree
from draftheads.infer.accept import Acceptance
from draftheads.infer.engine import Speculator
from draftheads.train.batches import Documents, Rows, Span
from draftheads.train.data.answers import Answer

WORTH = 0.05
"""Tokens per step below which a finding explains nothing that anyone would notice."""


@dataclass(frozen=True)
class Finding:
    """check: what was examined. explains: tokens per step that mending it may bring. shown: the
    numbers. normal: what they are where nothing is wrong. advice: the next step.
    """

    check: str
    explains: float
    shown: str
    normal: str
    advice: str

    @property
    def matters(self) -> bool:
        """Whether it costs tokens that can be noticed; otherwise it is a remark."""
        return self.explains >= WORTH


@dataclass(frozen=True)
class Diagnosis:
    """findings: sorted, the one that explains most first. measured: tokens per step of greedy
    decoding in `steps` steps. predicted: by the observed `positions`, for the best fixed tree.
    expected: what training recorded for that, None where nothing was.
    """

    findings: list[Finding]
    remarks: list[Finding]
    measured: float
    steps: int
    predicted: float
    positions: int
    expected: float | None

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


# What a head does on texts: observed along them, and decoding. The measurements that `diagnose`
# judges.
#
# Legend: M learned positions, K draft depth, B batch, T tokens, D feature width.


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
        return ranks_along(self.case, self.written_rows, [self.plain])[0]

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
        return ranks_along(self.case, self.rows, [self.plain])[0]

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
        return torch.cat([batch.positions_BT[batch.loss_mask_BT] for batch in batches(self.rows)])

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
        found.append(torch.stack(columns, dim=-1)[batch.loss_mask_BT])
    return torch.cat(found)


@torch.no_grad()
def ranks_along(case: Case, rows: Rows, variants: Sequence[Variant]) -> list[Tensor]:
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
                ranks.append(case.head.token_ranks(batch, features_BTD, case.target).cpu())
    return [torch.cat(ranks) for ranks in found]


def replayed(tree: Tree, rows: Rows, ranks_MK: Tensor) -> float:
    """Tokens per step that a drafter which guesses as observed needs for these very answers; of a
    dynamic tree, only its best guesses are counted on.
    """
    chain = StaticTree.from_widths([1] * ranks_MK.shape[1])
    known = set(tree.paths if isinstance(tree, StaticTree) else chain.paths)
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


# What decoding says of a head: whether its guesses arrive, in which tree, how warm, how precise.
#
# Legend: M learned positions, K draft depth, T tokens, V vocabulary.
#
# Each check takes the evidence and how many tokens per step are still unexplained.


MANY_TIES = 0.02
"""Share of the target's choices that rounding may decide."""


def drafting(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Decoding accepts less than the guesses along the same text would earn."""
    written, tree = evidence.written, evidence.head.tree
    promised = replayed(tree, evidence.written_rows, evidence.written_ranks_MK)
    gap = promised - written.tokens_per_step
    if len(written.accepted) and gap > 0.07 * promised:
        yield Finding(
            "drafting",
            gap,
            f"decoding brings {written.tokens_per_step:.2f} tokens per step "
            f"({len(written.accepted)} steps); along the same text, the head's guesses are worth "
            f"{promised:.2f} or more",
            "equal for a fixed tree, no less for a dynamic one",
            "the head is drafted with in another way than it is trained: features or tokens reach "
            "its drafter late, or memory is not kept; please report it with this output",
        )


def wrong_tree(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Another tree of the same size would catch more."""
    head, ranks_MK = evidence.head, evidence.ranks_MK
    if isinstance(head.tree, StaticTree) and head.tree.paths:
        half = len(ranks_MK) // 2
        halves, best_M = (ranks_MK[:half], ranks_MK[half:]), []
        for known_MK, judged_MK in (halves[::-1], halves):
            best = head.tree.fitted(known_MK, head.tree.draft_nodes)
            best_M.append(_caught(best, judged_MK) - _caught(head.tree, judged_MK))
        gain_M = torch.cat([best_M[0], best_M[1]])
        if is_above(gain_M, WORTH):
            fitted = head.tree.fitted(ranks_MK, head.tree.draft_nodes)
            gain, paths = float(gain_M.mean()), json.dumps(fitted.to_json(), separators=(",", ":"))
            yield Finding(
                "tree",
                gain,
                f"its {head.tree.draft_nodes} nodes, {head.tree.depth} deep, catch {gain:.2f} "
                f"tokens per step less than the best {fitted.draft_nodes}, {fitted.depth} deep, "
                f"would ({len(ranks_MK)} positions)",
                "the best tree of its size",
                f"use the tree {paths} (chat --tree, or draftheads.tree in config.json)",
            )
    deepest = int(evidence.written.accepted.max()) if len(evidence.written.accepted) else 0
    if deepest < head.tree.depth - 1:
        yield Finding(
            "tree",
            0.0,
            f"the tree is {head.tree.depth} deep, no step of {len(evidence.written.accepted)} "
            f"accepted more than {deepest} drafts",
            "the deepest level is reached now and then",
            f"a tree of depth {deepest + 1} drafts faster; compare with draftheads bench --tree",
        )


def warm(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Acceptance at the temperature that was asked for."""
    case = evidence.case
    if case.sampling is None:
        return
    drawn = write(case, case.openings, case.head, case.sampling)
    if not accepts_less(drawn, evidence.written):
        return
    cold, warm = evidence.written.tokens_per_step, drawn.tokens_per_step
    data = case.manifest.get("sampling", {}).get("temperature")
    yield Finding(
        "temperature",
        cold - warm,
        f"{warm:.2f} tokens per step with {case.sampling} ({len(drawn.accepted)} steps), "
        f"{cold:.2f} greedy ({len(evidence.written.accepted)})"
        + (f"; the data was drawn at temperature {data}" if data is not None else ""),
        "a little less than greedy",
        "distill at this temperature and train with head.labels=soft, or decode colder",
    )


def near_ties(evidence: Evidence, left: float) -> Iterator[Finding]:
    """In low precision, one token at a time and many at a time do not always agree."""
    case, target = evidence.case, evidence.target
    if target.dtype == torch.float32:
        return
    differ = total = 0
    for answer in write(case, case.openings, None).answers:
        [(start, end)] = answer.learn
        tokens_1T = torch.tensor([answer.tokens], device=target.device)
        with torch.inference_mode():
            logits_TV = target.model(tokens_1T, use_cache=False).logits[0, start - 1 : end - 1]
        differ += int((logits_TV.argmax(-1) != tokens_1T[0, start:end]).sum())
        total += end - start
    share = differ / max(1, total)
    yield Finding(
        "precision",
        share * evidence.written.tokens_per_step if share > MANY_TIES else 0.0,
        f"in {target.dtype}, the target's choice after one token at a time differs from that after "
        f"all at once at {differ} of {total} places ({share:.1%})",
        f"below {MANY_TIES:.0%}: ties that rounding decides, output is lossless up to them",
        "use --dtype float32 where output must be equal token for token",
    )


def accepts_less(less: Written, more: Written) -> bool:
    """Whether the steps of one accept fewer drafts than those of another, beyond chance."""
    return is_above(more.accepted.float(), less.accepted.float())


def _caught(tree: StaticTree, ranks_MK: Tensor) -> Tensor:
    """float (M,): how many nodes of the tree lie on each observed path."""
    known = set(tree.paths)
    paths = [tuple(path) for path in ranks_MK.tolist()]
    caught = [sum(path[:d] in known for d in range(1, len(path) + 1)) for path in paths]
    return torch.tensor(caught, dtype=torch.float32)
