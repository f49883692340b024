"""Why is my acceptance low? One function per check, and findings sorted by what they explain.

A check measures something and prices it in tokens per step. What has no price of its own (other
weights, data without tokens) is charged with what is left: how far the head falls short of what
training recorded, less what is already explained.

Legend: M learned positions, K draft depth, v draft vocabulary.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, permutations
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.eagle import AutoregressiveHead
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.pretrained import same_weights
from draftheads.heads.target import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.accept import Acceptance
from draftheads.infer.engine import Speculator
from draftheads.train.batches import Documents, Rows, Span
from draftheads.train.data.answers import Answer
from draftheads.train.evaluate import calibrate
from draftheads.train.setup import LOW_SHARE

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
class Decoded:
    """What decoding wrote after the openings. accepted: drafts accepted in each step."""

    answers: list[Answer]
    accepted: Tensor
    tokens: int

    @property
    def tokens_per_step(self) -> float:
        """The target's own token included, prefill left out."""
        return self.tokens / max(1, len(self.accepted))


@dataclass(eq=False)
class Evidence:
    """A head, what it is examined on, and the measurements, each made when it is first asked for.

    facts: "draftheads" of its config.json. openings: prompts to decode, as ids. documents,
    manifest: the data, if any. sampling: tried besides greedy decoding.
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

    @cached_property
    def decoded(self) -> Decoded:
        """Greedily, with the head's own tree."""
        return self.decode(self.openings)

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
        documents = self.documents
        if documents is None or not bool(documents.learn_N.any()):
            return self.decoded_rows
        spans = unseen(self.training, documents)
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
        training = self.training
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
        return calibrate(ranks_MK, self.nodes, self.head.tree).tokens_per_step

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

    def decode(self, openings: Sequence[Sequence[int]], rule: Acceptance | None = None) -> Decoded:
        """Answers to openings. Raises ValueError when none leaves room in the context."""
        context = self.target.context
        room = [opening for opening in openings if len(opening) + 2 <= context]
        if not room:
            raise ValueError(
                f"expected an opening shorter than the context of {self.target.name} ({context} "
                f"tokens), got {len(openings)} longer ones; pass other --prompts"
            )
        answers, accepted, tokens = [], [], 0
        engine = Speculator(self.target, self.head)
        for opening in room:
            limit, new = min(self.new_tokens, context - len(opening)), []
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


WORTH = 0.05
"""Tokens per step below which a finding explains nothing that anyone would notice."""
MANY_UNKNOWN = 0.1
"""Share of the target's tokens outside the draft vocabulary from which it is too small."""
WARMER = 0.5
"""Difference of temperatures that is worth a word."""
PROMPTS = 64
"""Documents whose prompts are compared with the chat template."""
SENTINEL = "Prompt42"

Result = tuple[float | None, str] | None
"""(tokens per step, None: what is left; the numbers), or None where nothing is wrong."""


@dataclass(frozen=True)
class Check:
    """normal: what it measures where nothing is wrong; advice: the next step otherwise. alone: not
    made where something was found that brings the same about.
    """

    name: str
    normal: str
    advice: str
    alone: bool
    measure: Callable[[Evidence], Result]


CHECKS: list[Check] = []
"""In the order in which they are made."""


def check(name: str, normal: str, advice: str, alone: bool = False) -> Callable[..., Any]:
    """Make a function a check, after those above it."""

    def add(measure: Callable[[Evidence], Result]) -> Callable[[Evidence], Result]:
        CHECKS.append(Check(name, normal, advice, alone, measure))
        return measure

    return add


@dataclass(frozen=True)
class Finding:
    """What a check found. explains: tokens per step that mending it may bring. shown: numbers."""

    check: str
    explains: float
    shown: str
    normal: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """findings: sorted, the one that explains most first; remarks: cost nothing that can be
    noticed. Tokens per step: measured: of greedy decoding; predicted: for the best fixed tree;
    expected: what training recorded for that.
    """

    findings: list[Finding]
    remarks: list[Finding]
    measured: float
    predicted: float
    expected: float | None


def diagnose(evidence: Evidence) -> Diagnosis:
    """Examine a head. Raises ValueError where nothing can be decoded."""
    found: list[Finding] = []
    for each in CHECKS if evidence.finite else CHECKS[:1]:  # ranks of NaN say nothing
        if each.alone and any(finding.explains >= WORTH for finding in found):
            continue
        result = each.measure(evidence)
        if result:
            left = max(0.0, evidence.missing - sum(finding.explains for finding in found))
            price = left if result[0] is None else result[0]
            found.append(Finding(each.name, price, result[1], each.normal, each.advice))
    found.sort(key=lambda finding: -finding.explains)
    return Diagnosis(
        findings=[finding for finding in found if finding.explains >= WORTH],
        remarks=[finding for finding in found if finding.explains < WORTH],
        measured=evidence.decoded.tokens_per_step,
        predicted=evidence.predicted(evidence.observed_MK) if evidence.finite else 1.0,
        expected=evidence.training.get("predicted_tokens_per_step"),
    )


@check("weights", "none", "take an earlier checkpoint, or train this part")
def unfit_weights(evidence: Evidence) -> Result:
    """Numbers that are not finite, and matrices that are zero as they were before training."""
    state = evidence.head.state_dict().items()
    bad = [name for name, tensor in state if not bool(tensor.isfinite().all())]
    bad += [name for name, x in state if x.dtype.is_floating_point and x.ndim > 1 and not x.any()]
    if not bad:
        return None
    return None, f"{len(bad)} of {len(state)} tensors are all zero or not finite: {bad[:3]}"


@check(
    "data",
    f"{LOW_SHARE:.0%} of the tokens or more, and some in every document",
    "look at `learn` in answers-*.jsonl, and distill again: it spans what the target wrote",
)
def little_data(evidence: Evidence) -> Result:
    """How much of the data is learned."""
    documents = evidence.documents
    if documents is None:
        return None
    learned, total = int(documents.learn_N.sum()), len(documents.tokens_N)
    empty = sum(not bool(documents.learn_N[slice(*span)].any()) for span in documents.spans)
    if learned >= LOW_SHARE * total and empty <= 0.5 * len(documents.spans):
        return None
    documents_empty = f"{empty} of {len(documents.spans)} documents have none"
    return None, f"{learned} of {total} tokens are learned; {documents_empty}"


@check(
    "features",
    "no other layers are better than those of the head's config.json",
    "set draftheads.feature_layers there to these layers (0 = embeddings; SGLang's numbers are one "
    "lower), or train again with the layers it has now",
    alone=True,
)
def other_layers(evidence: Evidence) -> Result:
    """Features one layer lower or higher, each and all, and in another order."""
    layers = evidence.layers
    changed = list(permutations(layers)) if len(layers) <= 3 else [layers[::-1]]
    for step in (-1, 1):
        changed.append(tuple(layer + step for layer in layers))
        for place in range(len(layers)):
            changed.append((*layers[:place], layers[place] + step, *layers[place + 1 :]))
    last = evidence.target.layers
    possible = [each for each in dict.fromkeys(changed) if min(each) >= 0 and max(each) <= last]
    names = {(each, 0): f"the states of layers {list(each)}" for each in possible if each != layers}
    return _best_of(evidence, names)


@check(
    "alignment",
    "features[i] is the state from which tokens[i] was predicted",
    "the head was trained on pairs shifted by one: export or train it again",
    alone=True,
)
def other_places(evidence: Evidence) -> Result:
    """Features one token late or early."""
    layers = evidence.layers
    names = {(layers, 1): "features one token late", (layers, -1): "features one token early"}
    return _best_of(evidence, names)


def _best_of(evidence: Evidence, names: dict[Variant, str]) -> Result:
    """Whether one of the variants is clearly better than what the head's config says."""
    found = evidence.ranks_along(evidence.rows, list(names)) if names else []
    scores = [float(runs(ranks_MK).mean()) for ranks_MK in found]
    if not scores:
        return None
    best = scores.index(max(scores))
    plain_MK, best_MK = evidence.ranks_MK, found[best]
    if not is_above(runs(best_MK) - runs(plain_MK), WORTH):
        return None
    right, now = (float((ranks_MK[:, 0] == 0).float().mean()) for ranks_MK in (best_MK, plain_MK))
    return evidence.predicted(best_MK) - evidence.predicted(plain_MK), (
        f"with {list(names.values())[best]}, the head's first guess is right {right:.1%} of the "
        f"time, as it is {now:.1%} ({len(plain_MK)} positions)"
    )


@check(
    "target",
    "the same fingerprint",
    "load the target that it was trained on, at that revision, or train on this one",
)
def target_changed(evidence: Evidence) -> Result:
    """The target's weights against those that the head was trained on."""
    recorded, now = evidence.facts.get("target", {}), evidence.target.fingerprint()
    if same_weights(recorded.get("fingerprint"), now):
        return None
    return None, (
        f"trained on {recorded.get('name')} with fingerprint {recorded.get('fingerprint')} "
        f"(revision {recorded.get('revision')}); {evidence.target.name} has {now}"
    )


@check(
    "adapter",
    "the same adapter",
    "restore the folder adapter/ beside the head's config.json, or load the target without one",
)
def adapter_missing(evidence: Evidence) -> Result:
    """The adapter against the one that the head was trained together with."""
    recorded, adapter = evidence.facts.get("adapter"), evidence.target.adapter
    expected = recorded["fingerprint"] if recorded else "none"
    got = adapter.fingerprint() if adapter else "none"
    return None if expected == got else (None, f"trained with adapter {expected}, there is {got}")


@check(
    "template",
    "the same tokens around every prompt",
    "use the template (system prompt, BOS) that the data was made with, or distill again",
)
def other_template(evidence: Evidence) -> Result:
    """The form of the data's prompts against what the target's tokenizer gives them now."""
    documents, tokenizer = evidence.documents, evidence.target.tokenizer
    if documents is None or tokenizer is None:
        return None
    now = tokenizer.decode(tokenizer(SENTINEL)["input_ids"])
    if tokenizer.chat_template:
        variables = evidence.manifest.get("sampling", {}).get("template_args") or {}
        variables |= {"add_generation_prompt": True, "tokenize": False}
        message = {"role": "user", "content": SENTINEL}
        now = tokenizer.apply_chat_template([message], **variables)
    before, _, after = now.partition(SENTINEL)
    before = before.rstrip(" ")
    openings = openings_of(documents, documents.spans[:PROMPTS])
    texts = [tokenizer.decode(opening) for opening in openings]
    other = [text for text in texts if not (text.startswith(before) and text.endswith(after))]
    if len(other) <= 0.5 * len(texts):
        return None
    used = texts[: len(evidence.openings)]
    start = commonprefix(used) if len(used) > 1 else ""
    end = commonprefix([text[::-1] for text in used])[::-1] if len(used) > 1 else ""
    prompts = [f"{before}{text.removeprefix(start).removesuffix(end)}{after}" for text in used]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    stored, current = (evidence.decode(each) for each in (openings[: len(used)], ids))
    lost = stored.tokens_per_step - current.tokens_per_step
    return lost if is_above(stored.accepted.float(), current.accepted.float()) else 0.0, (
        f"{len(other)} of {len(texts)} prompts of the data are not what the tokenizer makes now: "
        f"{other[0][:40]!r} ... {other[0][-20:]!r}, not {before[:40]!r} ... {after[-20:]!r}; "
        f"{stored.tokens_per_step:.2f} tokens per step then, {current.tokens_per_step:.2f} now"
    )


@check(
    "data",
    f"the target's own answers, at a temperature within {WARMER} of use",
    "distill with this target at the temperature of use, and train on that",
)
def other_writer(evidence: Evidence) -> Result:
    """Who wrote the data, and at which temperature."""
    manifest, now = evidence.manifest, evidence.target.fingerprint()
    writer = manifest.get("target", {})
    if not same_weights(writer.get("fingerprint"), now):
        written = f"{writer.get('name')} with fingerprint {writer.get('fingerprint')}"
        return evidence.lost_in_use or None, f"written by {written}; this target has {now}"
    drawn = manifest.get("sampling", {}).get("temperature")
    asked = getattr(evidence.sampling, "temperature", 0.0)
    if drawn is None or abs(drawn - asked) <= WARMER:
        return None
    return 0.0, f"drawn at temperature {drawn}, decoding is at {asked}"


@check(
    "temperature",
    "a little less than greedy",
    "distill at this temperature and train with head.labels=soft, or decode colder",
)
def temperature(evidence: Evidence) -> Result:
    """Acceptance at the temperature that was asked for."""
    greedy = evidence.decoded
    if evidence.sampling is None:
        return None
    drawn = evidence.decode(evidence.openings, evidence.sampling)
    if not is_above(greedy.accepted.float(), drawn.accepted.float()):
        return None
    return greedy.tokens_per_step - drawn.tokens_per_step, (
        f"{drawn.tokens_per_step:.2f} tokens per step with {evidence.sampling}, "
        f"{greedy.tokens_per_step:.2f} greedy ({len(drawn.accepted)}, {len(greedy.accepted)} steps)"
    )


@check(
    "tree",
    "the best tree of its size",
    "use that tree (chat --tree, or draftheads.tree in config.json)",
)
def wrong_tree(evidence: Evidence) -> Result:
    """What its tree catches, against the best one of its size."""
    tree, ranks_MK = evidence.head.tree, evidence.ranks_MK
    if not isinstance(tree, StaticTree) or not tree.paths:
        return None
    best = calibrate(ranks_MK, tree.draft_nodes, tree)
    gain = best.tokens_per_step - tree.expected_tokens(ranks_MK)
    if gain <= WORTH + SURE * error(runs(ranks_MK)):
        return None
    paths = json.dumps(best.tree.to_json(), separators=(",", ":"))
    return gain, (
        f"its {tree.draft_nodes} nodes catch {gain:.2f} tokens per step less than the best ones "
        f"would ({len(ranks_MK)} positions): {paths}"
    )


@check(
    "draft vocabulary",
    f"below {MANY_UNKNOWN:.0%}",
    "train with a larger head.vocabulary, or with one counted on texts like these",
)
def small_vocabulary(evidence: Evidence) -> Result:
    """How much of what the target writes the head can guess at all."""
    head, ranks_MK = evidence.head, evidence.ranks_MK
    ids_v = head.token_map if isinstance(head, MedusaHead | AutoregressiveHead) else None
    if ids_v is None:
        return None
    truth_MK = truth(evidence.rows, ranks_MK.shape[1])
    unknown_MK = ~torch.isin(truth_MK, ids_v.cpu()) & (truth_MK >= 0)
    if not is_above(unknown_MK[:, 0].float(), MANY_UNKNOWN):
        return None
    share = float(unknown_MK[:, 0].float().mean())
    right = float((ranks_MK[:, 0] == 0).float().mean()) / max(1 - share, 1e-6)
    gain = runs(torch.where(unknown_MK, 0, ranks_MK)).mean() - runs(ranks_MK).mean()
    return float(gain) * right, (
        f"{share:.1%} of the target's tokens are outside the {len(ids_v)} that the head can guess "
        f"({len(ranks_MK)} positions); of the others it guesses {right:.1%} right"
    )


@check(
    "untrained",
    "several times as often",
    "check that the right file was loaded and that training's loss fell",
    alone=True,
)
def at_chance(evidence: Evidence) -> Result:
    """The head against the token that is most frequent."""
    first_M = truth(evidence.rows, 1)[:, 0]
    counts_V = torch.bincount(first_M[first_M >= 0], minlength=1)
    chance = float(counts_V.max()) / max(1, int(counts_V.sum()))
    hits_M = (evidence.ranks_MK[:, 0] == 0).float()
    right = float(hits_M.mean())
    if not evidence.missing or right > 1.5 * chance + 2 * error(hits_M):
        return None
    return None, (
        f"the first guess is right {right:.1%} of the time ({len(hits_M)} positions), the most "
        f"frequent token would be {chance:.1%}"
    )


@check(
    "use",
    "about equal",
    "distill prompts like those of use, rendered and answered as in use",
    alone=True,
)
def other_use(evidence: Evidence) -> Result:
    """What decoding writes against the data."""
    if not evidence.lost_in_use:
        return None
    data, used = (float(runs(x).mean()) for x in (evidence.ranks_MK, evidence.used_MK))
    return evidence.lost_in_use, (
        f"right guesses in a row: {data:.2f} on the data ({len(evidence.ranks_MK)} positions), "
        f"{used:.2f} on what the target writes now ({len(evidence.used_MK)})"
    )


@check(
    "unexplained",
    "as recorded",
    "compare the text with the training data (--data), and the head's files with the run's",
    alone=True,
)
def fallen_short(evidence: Evidence) -> Result:
    """The prediction against the one that training recorded."""
    if not evidence.missing or "predicted_tokens_per_step" not in evidence.training:
        return None
    return None, f"{evidence.missing:.2f} tokens per step fewer than training recorded"
