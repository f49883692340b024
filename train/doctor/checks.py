"""Why is my acceptance low? One function per check, and findings sorted by what they explain.

A check measures something and prices it in tokens per step. What has no price of its own (other
weights, data without tokens) is charged with what is left: how far the head falls short of what
training recorded, less what is already explained.

Legend: M learned positions, K draft depth, v draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from os.path import commonprefix
from typing import Any

import torch

from draftheads.heads.eagle import AutoregressiveHead
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.tree import StaticTree
from draftheads.heads.weights import same_weights
from draftheads.train.doctor.measurements import (
    SURE,
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
from draftheads.train.evaluate import calibrate
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


def diagnose(case: Case) -> Diagnosis:
    """Examine a head. Raises ValueError where nothing can be decoded."""
    evidence = Evidence(case)
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
        expected=case.training.get("predicted_tokens_per_step"),
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
    documents = evidence.case.documents
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
    recorded, now = evidence.case.facts.get("target", {}), evidence.target.fingerprint()
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
    recorded, adapter = evidence.case.facts.get("adapter"), evidence.target.adapter
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
    case, tokenizer = evidence.case, evidence.target.tokenizer
    if case.documents is None or tokenizer is None:
        return None
    now = tokenizer.decode(tokenizer(SENTINEL)["input_ids"])
    if tokenizer.chat_template:
        variables = case.manifest.get("sampling", {}).get("template_args") or {}
        variables |= {"add_generation_prompt": True, "tokenize": False}
        message = {"role": "user", "content": SENTINEL}
        now = tokenizer.apply_chat_template([message], **variables)
    before, _, after = now.partition(SENTINEL)
    before = before.rstrip(" ")
    openings = openings_of(case.documents, case.documents.spans[:PROMPTS])
    texts = [tokenizer.decode(opening) for opening in openings]
    other = [text for text in texts if not (text.startswith(before) and text.endswith(after))]
    if len(other) <= 0.5 * len(texts):
        return None
    used = texts[: len(case.openings)]
    start = commonprefix(used) if len(used) > 1 else ""
    end = commonprefix([text[::-1] for text in used])[::-1] if len(used) > 1 else ""
    prompts = [f"{before}{text.removeprefix(start).removesuffix(end)}{after}" for text in used]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    stored, current = decode(case, openings[: len(used)]), decode(case, ids)
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
    manifest, now = evidence.case.manifest, evidence.target.fingerprint()
    writer = manifest.get("target", {})
    if not same_weights(writer.get("fingerprint"), now):
        written = f"{writer.get('name')} with fingerprint {writer.get('fingerprint')}"
        return evidence.lost_in_use or None, f"written by {written}; this target has {now}"
    drawn = manifest.get("sampling", {}).get("temperature")
    asked = getattr(evidence.case.sampling, "temperature", 0.0)
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
    case, greedy = evidence.case, evidence.decoded
    if case.sampling is None:
        return None
    drawn = decode(case, case.openings, case.sampling)
    if not is_above(greedy.accepted.float(), drawn.accepted.float()):
        return None
    return greedy.tokens_per_step - drawn.tokens_per_step, (
        f"{drawn.tokens_per_step:.2f} tokens per step with {case.sampling} ({len(drawn.accepted)} "
        f"steps), {greedy.tokens_per_step:.2f} greedy ({len(greedy.accepted)})"
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
    if not evidence.missing or "predicted_tokens_per_step" not in evidence.case.training:
        return None
    return None, f"{evidence.missing:.2f} tokens per step fewer than training recorded"
