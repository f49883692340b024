"""Why is my acceptance low? One row per check, and what they find sorted by what it explains.

A check measures something and prices it in tokens per step. What cannot be priced by itself (other
weights, data without tokens) is charged with what is left: how far the head falls short of what
training recorded, less what is already explained.

Legend: M learned positions, K draft depth, v draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.eagle import AutoregressiveHead
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.tree import StaticTree
from draftheads.heads.weights import same_weights
from draftheads.train.doctor.measurements import (
    ORDINARY,
    Case,
    Evidence,
    Variant,
    decode,
    error,
    is_above,
    openings_of,
    runs,
    truth,
)
from draftheads.train.setup import LOW_SHARE

WORTH = 0.05
"""Tokens per step below which a finding explains nothing that anyone would notice."""
MANY_UNKNOWN = 0.1
"""Share of the target's tokens outside the draft vocabulary from which it is too small."""
WARMER = 0.5
"""Difference of temperatures that is worth a word."""
PROMPTS = 64
"""Documents whose prompts are compared with the chat template."""
SENTINEL = "Prompt42"
MOST_ORDERS = 3
"""Feature layers of which every order is tried; of more, only the reverse."""

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


def check(name: str, normal: str, advice: str, *, alone: bool = False) -> Callable[..., Any]:
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
    noticed. measured: tokens per step of greedy decoding in `steps` steps. predicted: by the
    observed `positions`, for the best fixed tree. expected: what training recorded for that.
    """

    findings: list[Finding]
    remarks: list[Finding]
    measured: float
    steps: int
    predicted: float
    positions: int
    expected: float | None


def diagnose(case: Case) -> Diagnosis:
    """Examine a head. Raises ValueError where nothing can be decoded."""
    evidence, found = Evidence(case), list[Finding]()
    expected = case.training.get("predicted_tokens_per_step")
    finite = not _not_finite(evidence)
    missing = evidence.missing if finite else (expected or ORDINARY) - 1.0
    for each in CHECKS if finite else CHECKS[:1]:  # else not even ranks can be had
        if each.alone and any(finding.explains >= WORTH for finding in found):
            continue
        result = each.measure(evidence)
        if result:
            left = max(0.0, missing - sum(finding.explains for finding in found))
            price = result[0] if result[0] is not None else left
            found.append(Finding(each.name, price, result[1], each.normal, each.advice))
    found.sort(key=lambda finding: -finding.explains)
    ranks_MK = evidence.observed_MK if finite else torch.zeros(0, 1)
    return Diagnosis(
        findings=[finding for finding in found if finding.explains >= WORTH],
        remarks=[finding for finding in found if finding.explains < WORTH],
        measured=evidence.decoded.tokens_per_step,
        steps=len(evidence.decoded.accepted),
        predicted=evidence.predicted(ranks_MK) if finite else 1.0,
        positions=len(ranks_MK),
        expected=expected,
    )


@check(
    "weights",
    "none",
    "take an earlier checkpoint, or train this part",
)
def unfit_weights(evidence: Evidence) -> Result:
    """Numbers that are not finite, and matrices that are zero as they were before training."""
    state = {k: x for k, x in evidence.head.state_dict().items() if x.is_floating_point()}
    empty = [name for name, x in state.items() if x.ndim > 1 and not bool(x.any())]
    if broken := _not_finite(evidence):
        return None, f"{len(broken)} of {len(state)} tensors hold NaN or infinity: {broken[:3]}"
    return (
        (None, f"{len(empty)} of {len(state)} tensors are all zero: {empty[:3]}") if empty else None
    )


def _not_finite(evidence: Evidence) -> list[str]:
    state = evidence.head.state_dict()
    return [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]


@check(
    "data",
    f"{LOW_SHARE:.0%} of the tokens or more, and some in every document",
    "look at `learn` in answers-*.jsonl, and distill again: it spans what the target wrote",
)
def empty_data(evidence: Evidence) -> Result:
    """How much of the data is learned."""
    documents = evidence.case.documents
    if documents is None:
        return None
    learned, total = int(documents.learn_N.sum()), len(documents.tokens_N)
    empty = sum(not bool(documents.learn_N[slice(*span)].any()) for span in documents.spans)
    if learned >= LOW_SHARE * total and empty <= 0.5 * len(documents.spans):
        return None
    return None, (
        f"{learned} of {total} tokens are learned; {empty} of {len(documents.spans)} documents "
        "have none"
    )


@check(
    "features",
    "no other layers are better than those of the head's config.json",
    "set draftheads.feature_layers there to these layers (0 = embeddings; SGLang's numbers are "
    "one lower), or train again with the layers it has now",
    alone=True,
)
def other_layers(evidence: Evidence) -> Result:
    """Features one layer lower or higher, each and all, and in another order."""
    layers, last = evidence.layers, evidence.target.layers
    orders = permutations(layers) if len(layers) <= MOST_ORDERS else [layers[::-1]]
    changed = list(orders)
    for step in (-1, 1):
        changed.append(tuple(layer + step for layer in layers))
        for place in range(len(layers)):
            changed.append((*layers[:place], layers[place] + step, *layers[place + 1 :]))
    possible = [each for each in changed if min(each) >= 0 and max(each) <= last]
    variants = [(each, 0) for each in dict.fromkeys(possible) if each != layers]
    names = [f"states of layers {list(each)} instead of {list(layers)}" for each, _ in variants]
    return _best_of(evidence, variants, names)


@check(
    "alignment",
    "features[i] is the state from which tokens[i] was predicted",
    "the head was trained on pairs shifted by one: export or train it again",
    alone=True,
)
def other_places(evidence: Evidence) -> Result:
    """Features one token late or early."""
    names = ["for each token the feature of the token before it", "... of the token after it"]
    return _best_of(evidence, [(evidence.layers, 1), (evidence.layers, -1)], names)


def _best_of(evidence: Evidence, variants: Sequence[Variant], names: Sequence[str]) -> Result:
    """Whether one of the variants is clearly better than what the head's config says."""
    plain_MK = evidence.ranks_MK
    found = evidence.ranks_along(evidence.rows, variants) if variants else []
    best_MK, name = max(
        zip(found, names, strict=True),
        key=lambda pair: float(runs(pair[0]).mean()),
        default=(plain_MK, ""),
    )
    if not is_above(runs(best_MK) - runs(plain_MK), WORTH):
        return None
    right, now = (float((ranks_MK[:, 0] == 0).float().mean()) for ranks_MK in (best_MK, plain_MK))
    return evidence.predicted(best_MK) - evidence.predicted(plain_MK), (
        f"with {name}, the head's first guess is right {right:.1%} of the time, as it is {now:.1%} "
        f"({len(plain_MK)} positions)"
    )


@check(
    "target",
    "the same fingerprint",
    "load the target that it was trained on, at that revision, or train on this one",
)
def target_changed(evidence: Evidence) -> Result:
    """The target's weights against those that the head was trained on."""
    recorded = evidence.case.facts.get("target", {})
    known, now = recorded.get("fingerprint"), evidence.target.fingerprint()
    if same_weights(known, now):
        return None
    return None, (
        f"trained on {recorded.get('name')} with fingerprint {known} (revision "
        f"{recorded.get('revision')}); {evidence.target.name} has {now}"
    )


@check(
    "adapter",
    "the same adapter",
    "restore the folder adapter/ beside the head's config.json, or load the target without one",
)
def adapter_missing(evidence: Evidence) -> Result:
    """The adapter against the one that the head was trained together with."""
    recorded, adapter = evidence.case.facts.get("adapter"), evidence.target.adapter
    expected = recorded["fingerprint"] if recorded else "none"
    got = adapter.fingerprint() if adapter else "none"
    if expected == got:
        return None
    return None, f"trained with adapter {expected} on the target, which has {got}"


@check(
    "template",
    "the same tokens around every prompt",
    "use the template (system prompt, BOS) that the data was made with, or distill again",
)
def other_template(evidence: Evidence) -> Result:
    """The form of the data's prompts against what the target's tokenizer gives them now."""
    case, tokenizer = evidence.case, evidence.target.tokenizer
    if case.documents is None or tokenizer is None:
        return None
    openings = openings_of(case.documents, case.documents.spans[:PROMPTS])
    texts = [tokenizer.decode(opening) for opening in openings]
    before, after = _frame(case, tokenizer)
    wrong = [text for text in texts if not _is_framed(text, before, after)]
    if len(wrong) <= 0.5 * len(texts):
        return None
    used = texts[: len(case.openings)]
    start = commonprefix(used) if len(used) > 1 else ""
    end = commonprefix([text[::-1] for text in used])[::-1] if len(used) > 1 else ""
    cores = [text.removeprefix(start).removesuffix(end) for text in used]
    current = [f"{before}{core}{after}" for core in cores]
    ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in current]
    stored, now = decode(case, openings[: len(used)]), decode(case, ids)
    less = is_above(stored.accepted.float(), now.accepted.float())
    return stored.tokens_per_step - now.tokens_per_step if less else 0.0, (
        f"{len(wrong)} of {len(texts)} prompts of the data are framed otherwise than the target's "
        f"tokenizer does it now: {wrong[0][:40]!r} ... {wrong[0][-20:]!r} instead of "
        f"{before!r} ... {after!r}; {stored.tokens_per_step:.2f} tokens per step in the data's "
        f"form, {now.tokens_per_step:.2f} in the present one"
    )


def _frame(case: Case, tokenizer: Any) -> tuple[str, str]:
    """The text before and after a prompt, as the tokenizer makes it."""
    if tokenizer.chat_template:
        variables = case.manifest.get("sampling", {}).get("template_args") or {}
        messages = [{"role": "user", "content": SENTINEL}]
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **variables
        )
    else:
        text = tokenizer.decode(tokenizer(SENTINEL)["input_ids"])
    before, _, after = text.partition(SENTINEL)
    return before.rstrip(" "), after


def _is_framed(text: str, before: str, after: str) -> bool:
    """Whether a prompt stands in this frame, and not in two beginnings at once."""
    rest = text.removeprefix(before)
    twice = bool(before) and rest.lstrip().startswith(before.strip())
    return text.startswith(before) and text.endswith(after) and not twice


@check(
    "data",
    f"the target's own answers, at a temperature within {WARMER} of use",
    "distill with this target at the temperature of use, and train on that",
)
def other_writer(evidence: Evidence) -> Result:
    """Who wrote the data, and how warm."""
    manifest, target = evidence.case.manifest, evidence.target
    writer, now = manifest.get("target", {}), target.fingerprint()
    if not same_weights(writer.get("fingerprint"), now):
        return evidence.lost_in_use or None, (
            f"the data was written by {writer.get('name')} with fingerprint "
            f"{writer.get('fingerprint')}; {target.name} has {now}"
        )
    drawn = manifest.get("sampling", {}).get("temperature")
    asked = getattr(evidence.case.sampling, "temperature", 0.0)
    if drawn is None or abs(drawn - asked) <= WARMER:
        return None
    return 0.0, f"the data was drawn at temperature {drawn}, decoding is at {asked}"


@check(
    "temperature",
    "a little less than greedy",
    "distill at this temperature and train with head.labels=soft, or decode colder",
)
def warm(evidence: Evidence) -> Result:
    """Acceptance at the temperature that was asked for."""
    case, cold = evidence.case, evidence.decoded
    if case.sampling is None:
        return None
    drawn = decode(case, case.openings, case.sampling)
    if not is_above(cold.accepted.float(), drawn.accepted.float()):
        return None
    return cold.tokens_per_step - drawn.tokens_per_step, (
        f"{drawn.tokens_per_step:.2f} tokens per step with {case.sampling} ({len(drawn.accepted)} "
        f"steps), {cold.tokens_per_step:.2f} greedy ({len(cold.accepted)})"
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
    half, gains = len(ranks_MK) // 2, []
    for fit_MK, test_MK in [(ranks_MK[half:], ranks_MK[:half]), (ranks_MK[:half], ranks_MK[half:])]:
        best = tree.fitted(fit_MK, tree.draft_nodes)
        gains.append(_caught(best, test_MK) - _caught(tree, test_MK))
    gain_M = torch.cat(gains)
    if not is_above(gain_M, WORTH):
        return None
    paths = json.dumps(tree.fitted(ranks_MK, tree.draft_nodes).to_json(), separators=(",", ":"))
    return float(gain_M.mean()), (
        f"its {tree.draft_nodes} nodes catch {float(gain_M.mean()):.2f} tokens per step less than "
        f"the best ones would ({len(ranks_MK)} positions): {paths}"
    )


def _caught(tree: StaticTree, ranks_MK: Tensor) -> Tensor:
    """float (M,): how many nodes of the tree are on each observed path."""
    known = set(tree.paths)
    paths = [tuple(path) for path in ranks_MK.tolist()]
    caught = [sum(path[:d] in known for d in range(1, len(path) + 1)) for path in paths]
    return torch.tensor(caught, dtype=torch.float32)


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
    gain = runs(torch.where(unknown_MK, 0, ranks_MK)).mean() - runs(ranks_MK).mean()
    right = float((ranks_MK[:, 0] == 0).float().mean()) / max(1 - share, 1e-6)
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
    first_M = first_M[first_M >= 0]
    hits_M = (evidence.ranks_MK[:, 0] == 0).float()
    chance = float(torch.bincount(first_M).max()) / len(first_M) if len(first_M) else 1.0
    right = float(hits_M.mean())
    if not evidence.missing or right > 1.5 * chance + 2 * error(hits_M):
        return None
    return None, (
        f"the first guess is right {right:.3f} of the time ({len(hits_M)} positions); the most "
        f"frequent token alone would be {chance:.3f} of the time"
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
    if not evidence.missing or not evidence.case.training.get("predicted_tokens_per_step"):
        return None
    return (
        None,
        f"{evidence.missing:.2f} tokens per step fewer are predicted than training recorded",
    )
