"""Finds out why acceptance is low, with one function per check. Facts that training recorded are
compared first; then drafts are measured.

Legend: M learned positions, K draft depth, v draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.facts import HeadFacts
from draftheads.heads.formats.hub import target_difference
from draftheads.heads.target.model import Target
from draftheads.heads.tree import Tree
from draftheads.infer.costs import ORDINARY, typical
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.rows import Statistics, Step
from draftheads.train.advice.bounds import Bounds, bounds, by_context
from draftheads.train.advice.gains import Gain, gains
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer
from draftheads.train.data.shards import Array
from draftheads.train.evaluate import Share, calibrate, heldout_ranks
from draftheads.train.features.sources import OnlineFeatures
from draftheads.train.metrics import Line

TEXT_TOKENS = 4096
"""Number of tokens of the documents on which heads are evaluated."""
ROWS_PER_BATCH = 4
BLOCK = 16
"""Positions per block. Neighbouring positions are correlated, so standard errors are computed from
means of blocks.
"""
SURE = 4.0
"""Number of standard errors that make a difference significant. With this many checks, two are too
few.
"""
TIMED = 4
"""Number of answers that are decoded again to compare steps with and without drafts."""
MANY_UNKNOWN = 0.1
"""Largest acceptable share of the target's tokens outside the draft vocabulary."""
PROMPTS = 64
"""Number of documents whose prompts are compared with the chat template."""
SENTINEL = "Prompt42"


@dataclass(frozen=True)
class DecodedAnswers:
    """Decoded answers. steps: of each answer, its prefill first. Of all steps but prefills:
    accepted: draft tokens accepted in each. contexts: tokens before each. tokens_per_step: with the
    target's own token. seconds: of each.
    """

    answers: list[Answer]
    steps: list[list[Step]]
    accepted: Tensor
    contexts: list[int]
    tokens_per_step: float
    seconds: list[float]


@dataclass(eq=False)
class Evidence:
    """A head, the texts on which it is examined, and measurements that are made when they are
    needed.

    facts: the section of its config.json. openings: token ids of prompts to decode. documents: the
    data, if any. metrics: of the head's run, if it is here.
    """

    target: Target
    head: DraftHead
    facts: HeadFacts
    openings: list[list[int]]
    documents: Documents | None = None
    new_tokens: int = 64
    metrics: Sequence[Line] = ()

    def __post_init__(self) -> None:
        self.training = self.facts.training
        recipe = self.training.get("recipe", {})
        self.nodes: int = recipe.get("head", {}).get("nodes") or self.head.tree.draft_nodes
        self.finite = all(x.isfinite().all() for x in self.head.state_dict().values())

    @cached_property
    def decoded(self) -> DecodedAnswers:
        """Greedy decoding with the head's own tree."""
        return self.decode(self.openings)

    @cached_property
    def around(self) -> tuple[str, str]:
        """What the chat template writes before and after a question. The target has a tokenizer."""
        ids = encode_prompt(self.target, [{"role": "user", "content": SENTINEL}])
        before, _, after = self.target.tokenizer.decode(ids).partition(SENTINEL)
        return before.rstrip(" "), after

    @cached_property
    def break_even(self) -> float:
        """The time of a step with the head's tree over that of a step without drafts, measured now:
        with as many tokens per step, decoding is as fast as without drafts. 0 if it cannot be
        measured.
        """
        drafted: list[float] = []
        plain: list[float] = []
        for answer in self.decoded.answers[:TIMED]:  # in turns, so that other work slows both alike
            opening = answer.tokens[: answer.learn[0][0]]
            drafted += self.decode([opening]).seconds
            plain += self.decode([opening], drafts=False).seconds
        if not drafted or not plain:
            return 0.0
        return typical(drafted) / typical(plain)

    @cached_property
    def decoded_rows(self) -> Rows:
        """The decoded answers, one per row."""
        documents = Documents.read(self.decoded.answers)
        return Rows(documents, documents.spans, self.target.context, pack=False, seed=0)

    @cached_property
    def rows(self) -> Rows:
        """Held-out documents of the data, or else the decoded answers."""
        documents = self.documents
        if documents is None or not documents.learned:
            return self.decoded_rows
        spans = np.random.default_rng(0).permutation(unseen(self.training, documents))
        few = spans[np.diff(spans)[:, 0].cumsum() <= TEXT_TOKENS]
        length = min(self.target.context, TEXT_TOKENS)
        rows = Rows(documents, few if len(few) else spans[:1], length, pack=False, seed=0)
        return rows if len(rows) else self.decoded_rows

    @property
    def on_data(self) -> bool:
        """True if `rows` are documents of the data."""
        return self.rows is not self.decoded_rows

    @cached_property
    def ranks_MK(self) -> Tensor:
        """Ranks of the tokens of `rows`."""
        return self.ranks_of(self.rows)

    @cached_property
    def decoded_MK(self) -> Tensor:
        """Ranks of the decoded tokens."""
        return self.ranks_of(self.decoded_rows)

    @cached_property
    def used_MK(self) -> Tensor:
        """Ranks of the decoded tokens, except at the ends of texts, where no deep draft token can
        be right and of which short texts have more.
        """
        ranks_MK = self.decoded_MK
        inside_M = truth(self.decoded_rows, ranks_MK.shape[1])[:, -1] >= 0
        return ranks_MK[inside_M] if inside_M.any() else ranks_MK

    @cached_property
    def bounds(self) -> Bounds | None:
        """How far the head is from what is possible with it; None if it drafts nothing, or all
        answers are short.
        """
        ranks_MK, ids_v = self.decoded_MK, self.head.token_map
        sizes = [*self.decoded_rows.learned]
        if not self.head.tree.draft_nodes or max(sizes) <= ranks_MK.shape[1]:
            return None
        truth_MK = truth(self.decoded_rows, ranks_MK.shape[1])
        unknown_MK = torch.zeros_like(truth_MK, dtype=torch.bool)
        if ids_v is not None:
            unknown_MK = ~torch.isin(truth_MK, ids_v.cpu())
        return bounds(self.head.tree, torch.split(ranks_MK, sizes), torch.split(unknown_MK, sizes))

    @property
    def observed_MK(self) -> Tensor:
        """Ranks as training would count them."""
        return self.ranks_MK if self.on_data else self.used_MK

    @cached_property
    def predicted(self) -> float:
        """Tokens per step of the best fixed tree, as training would predict it."""
        if not self.finite:
            return 1.0
        return calibrate(self.observed_MK, self.nodes, self.head.tree).tokens_per_step

    def ranks_of(self, rows: Rows) -> Tensor:
        """ranks_MK of these rows."""
        source = OnlineFeatures(self.target, self.head.feature_layers, adapted=True)
        share = Share(rows, ROWS_PER_BATCH, Accelerator())
        return heldout_ranks(self.head, self.target, share, source)

    def decode(
        self,
        openings: Sequence[Sequence[int]],
        *,
        drafts: bool = True,
        tree: Tree | None = None,
    ) -> DecodedAnswers:
        """Answer the openings, greedily. tree: default: the head's own. Raises ValueError if none
        of them leaves room in the context.
        """
        context = self.target.context
        room = [opening for opening in openings if len(opening) + 2 <= context]
        if not room:
            raise ValueError(
                f"expected an opening shorter than the context of {self.target.name} ({context} "
                f"tokens), got {len(openings)} longer ones; pass other --prompts"
            )
        answers: list[Answer] = []
        texts: list[list[Step]] = []
        steps: list[Step] = []
        contexts: list[int] = []
        engine = Speculator(self.target, self.head if drafts else None, tree=tree)
        for opening in room:
            limit = min(self.new_tokens, context - len(opening))
            text = [*opening]
            texts.append([])
            for step in engine.generate(opening, max_new_tokens=limit):
                texts[-1].append(step)
                if step.accepted >= 0:  # not the prefill
                    steps.append(step)
                    contexts.append(len(text))
                text += step.tokens
            answers.append(Answer(text, [(len(opening), len(text))]))
        return DecodedAnswers(
            answers,
            texts,
            torch.tensor([step.accepted for step in steps]),
            contexts,
            Statistics.of(steps).tokens_per_step,
            [step.draft_seconds + step.verify_seconds for step in steps],
        )


def truth(rows: Rows, depth: int) -> Tensor:
    """int64 (M, K): the tokens after each learned position; -1 for tokens that the target did not
    write.
    """
    parts = []
    for number in range(len(rows)):
        batch = rows.batch([number])
        columns = [
            torch.where(torch.from_numpy(here_BT), batch.tokens_BT.roll(-k, dims=1), -1)
            for k, here_BT in enumerate(batch.root_masks(depth), start=1)
        ]
        parts.append(torch.stack(columns, dim=-1)[batch.loss_mask_BT])
    return torch.cat(parts)


def runs(ranks_MK: Tensor) -> Tensor:
    """float (M,): the number of consecutive top-1 draft tokens that are right."""
    return (ranks_MK == 0).long().cumprod(1).sum(1).float()


def error(values_M: Tensor) -> float:
    """Standard error of the mean over neighbouring positions; infinite for too few."""
    count = len(values_M) // BLOCK
    if count < 2:
        return math.inf
    means = values_M[: count * BLOCK].float().view(count, BLOCK).mean(1)
    return float(means.std() / math.sqrt(count))


def is_above(values_M: Tensor, other: Tensor | float) -> bool:
    """True if the mean is larger than another one by SURE standard errors."""
    spread = error(values_M)  # infinite without values, so nothing is above
    if isinstance(other, Tensor):
        spread = math.hypot(spread, error(other))
        other = float(other.float().mean())
    return float(values_M.float().mean()) - other > SURE * spread


def unseen(training: dict[str, Any], documents: Documents) -> Array:
    """The held-out documents if training recorded that it saw this data, otherwise all."""
    digest = training.get("data", {}).get("digest")
    heldout = training.get("recipe", {}).get("data", {}).get("heldout")
    if heldout is None or digest not in (None, documents.digest()):
        return documents.spans
    return documents.split(heldout)[1]


def openings_of(documents: Documents, spans: Array) -> list[list[int]]:
    """The prompts of documents; the first quarter of documents without learned tokens."""
    openings = []
    for start, stop in spans.tolist():
        [learned] = documents.mask(start, stop).nonzero()
        end = int(learned[0]) if len(learned) else (stop - start) // 4
        openings.append(documents.tokens(start, start + max(1, end)).tolist())
    return openings


@dataclass(frozen=True)
class Finding:
    """A failed check. found: the measured and the expected numbers; advice: the next step."""

    check: str
    found: str
    advice: str


def unfit_weights(evidence: Evidence) -> Finding | None:
    """Tensors that are not finite, and matrices that are still zero."""
    state = evidence.head.state_dict().items()
    bad = []
    for name, tensor in state:
        is_zero = tensor.is_floating_point() and tensor.ndim > 1 and not tensor.any()
        if is_zero or not tensor.isfinite().all():
            bad.append(name)
    if not bad:
        return None
    return Finding(
        "weights",
        f"{len(bad)} of {len(state)} tensors are all zero or not finite: {bad[:3]}",
        "use an earlier checkpoint, or train this part",
    )


def other_target(evidence: Evidence) -> Finding | None:
    """A target or an adapter that the head was not trained on."""
    difference = target_difference(evidence.facts, evidence.target)
    if not difference:
        return None
    return Finding(
        "target",
        f"trained {difference}",
        "load the target, revision and adapter that it was trained with, or train on this one",
    )


def other_template(evidence: Evidence) -> Finding | None:
    """Prompts of the data that differ from those that the target's chat template renders now."""
    documents, tokenizer = evidence.documents, evidence.target.tokenizer
    if documents is None or tokenizer is None:
        return None
    before, after = evidence.around
    openings = openings_of(documents, documents.spans[:PROMPTS])
    texts = [tokenizer.decode(opening) for opening in openings]
    other = [text for text in texts if not (text.startswith(before) and text.endswith(after))]
    if len(other) <= 0.5 * len(texts):
        return None
    few = texts[: len(evidence.openings)]
    start = end = ""  # the text that all prompts share is the other template
    if len(few) > 1:
        start = commonprefix(few)
        end = commonprefix([text[::-1] for text in few])[::-1]
    prompts = [f"{before}{text.removeprefix(start).removesuffix(end)}{after}" for text in few]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    past = evidence.decode(openings[: len(few)])
    current = evidence.decode(ids)
    if not is_above(past.accepted, current.accepted):
        return None
    return Finding(
        "template",
        f"{len(other)} of {len(texts)} prompts of the data differ from what the tokenizer makes: "
        f"{other[0][:40]!r} ... {other[0][-20:]!r}, not {before[:40]!r} ... {after[-20:]!r}; "
        f"{past.tokens_per_step:.2f} tokens per step then, {current.tokens_per_step:.2f} now",
        "use the template (system prompt, BOS) that the data was made with, or distill again",
    )


def small_vocabulary(evidence: Evidence) -> Finding | None:
    """Too many tokens that the head cannot draft."""
    ranks_MK = evidence.ranks_MK
    ids_v = evidence.head.token_map
    if ids_v is None:
        return None
    next_M = truth(evidence.rows, ranks_MK.shape[1])[:, 0]
    unknown_M = (~torch.isin(next_M, ids_v.cpu()) & (next_M >= 0)).float()
    if not is_above(unknown_M, MANY_UNKNOWN):
        return None
    return Finding(
        "draft vocabulary",
        f"{unknown_M.mean():.1%} of the target's tokens are outside the draft vocabulary of "
        f"{len(ids_v)} ({len(ranks_MK)} positions), more than {MANY_UNKNOWN:.0%}",
        "train with a larger head.vocabulary, or with one counted on texts like these",
    )


def other_use(evidence: Evidence) -> Finding | None:
    """Worse drafts on decoded text than on the data."""
    if not evidence.on_data:
        return None
    data_M = runs(evidence.ranks_MK)
    use_M = runs(evidence.used_MK)
    if not is_above(data_M, use_M):
        return None
    return Finding(
        "use",
        f"draft tokens right in a row: {data_M.mean():.2f} on the data ({len(data_M)} positions), "
        f"{use_M.mean():.2f} on what the target writes now ({len(use_M)})",
        "distill prompts like those you decode, rendered and answered the same way",
    )


def fallen_short(evidence: Evidence) -> Finding | None:
    """A head that is right less often than training recorded."""
    recorded = evidence.training.get("predicted_tokens_per_step")
    if not recorded or evidence.predicted >= recorded:
        return None
    ranks_MK = evidence.observed_MK
    shares: list[float] = evidence.training.get("heldout_top1", [])[: ranks_MK.shape[1]]
    hits_M = (ranks_MK[:, : len(shares)] == 0).float().sum(1)
    if not is_above(-hits_M, -sum(shares)):
        return None
    return Finding(
        "unexplained",
        f"{recorded - evidence.predicted:.2f} tokens per step fewer than training recorded",
        "compare the text with the training data (--data), and the head's files, feature layers "
        "and mask_token_id with the run's",
    )


def undertrained(evidence: Evidence) -> Finding | None:
    """A head that is worse than any that was trained for long enough."""
    few_M = -runs(evidence.observed_MK)
    if evidence.predicted >= ORDINARY or not is_above(few_M, 1 - ORDINARY):
        return None
    return Finding(
        "undertrained",
        f"{evidence.predicted:.2f} tokens per step predicted for the best tree of {evidence.nodes} "
        f"draft nodes; a trained head has {ORDINARY:.1f} or more",
        "train longer, on more of the target's answers, until the held-out loss stops falling; of "
        "another project's head, check that the right file was loaded",
    )


def slower_than_plain(evidence: Evidence) -> Finding | None:
    """Steps that cost more than their tokens are worth."""
    decoded, break_even = evidence.decoded, evidence.break_even
    too_few = 1 - break_even  # draft tokens per step, negated
    if not evidence.head.tree.draft_nodes or not is_above(-decoded.accepted, too_few):
        return None
    return Finding(
        "speed",
        f"slower than without drafts: a step costs {break_even:.2f} plain ones here (break-even τ) "
        f"and brings {decoded.tokens_per_step:.2f} tokens",
        "run draftheads tune for a tree that pays here, try --dtype bfloat16, or train further",
    )


CHECKS = (
    unfit_weights,
    other_target,
    other_template,
    small_vocabulary,
    other_use,
    fallen_short,
    undertrained,
    slower_than_plain,
)
SKIPPED = (other_use, fallen_short, undertrained)
"""Checks that other faults make fail, too; skipped once something was found."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of an examination. findings: in the order of `CHECKS`.

    Tokens per step: measured (greedy decoding), predicted (for the best fixed tree), expected (the
    prediction that training recorded), break_even (as fast as decoding without drafts; 0: not
    measured), by_context (measured, by the tokens before a step). bounds: of tokens per step, if
    one thing about the head were better. gains: what would bring more of them, the best first.
    """

    findings: list[Finding]
    measured: float
    predicted: float
    expected: float | None
    break_even: float
    bounds: Bounds | None
    by_context: dict[int, float]
    gains: list[Gain]


def diagnose(evidence: Evidence) -> Diagnosis:
    """Examine a head. Raises ValueError if nothing can be decoded."""
    findings: list[Finding] = []
    for check in CHECKS:
        # ranks from NaN are meaningless
        if findings and (check in SKIPPED or not evidence.finite):
            continue
        finding = check(evidence)
        if finding:
            findings.append(finding)
    tau = evidence.decoded.tokens_per_step
    bounds = evidence.bounds if evidence.finite else None
    return Diagnosis(
        findings=findings,
        measured=tau,
        predicted=evidence.predicted,
        expected=evidence.training.get("predicted_tokens_per_step"),
        break_even=evidence.break_even,
        bounds=bounds,
        by_context=by_context(evidence.decoded.contexts, evidence.decoded.accepted.tolist()),
        gains=gains(tau, bounds, evidence.metrics, evidence.training),
    )
