"""What the measurements themselves say of a head: its weights, its guesses by depth and by
place.

Legend: M learned positions, K draft depth, v draft vocabulary.

Each check takes the evidence and how many tokens per step are still unexplained.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from draftheads.heads.autoregressive import AutoregressiveHead
from draftheads.heads.base import DraftHead
from draftheads.train.doctor.evidence import (
    Evidence,
    error,
    is_above,
    runs,
)
from draftheads.train.doctor.finding import WORTH, Finding
from draftheads.train.doctor.suspects import known_ids

MANY_UNKNOWN = 0.1
"""Share of the target's tokens outside the draft vocabulary from which it is too small."""
CLIFF = 0.6
"""Of the accuracy at depth 1, what an autoregressive head keeps at depth 2 when it was trained on
its own output.
"""


def unfit_weights(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Numbers that are not finite, and matrices that are zero as they were before training."""
    floating, broken = _floating(evidence.head), not_finite(evidence.head)
    empty = [name for name, each in floating.items() if each.ndim > 1 and not bool(each.any())]
    advice = "take an earlier checkpoint, or train again"
    if broken:
        shown = f"{len(broken)} of {len(floating)} tensors hold NaN or infinity: {_some(broken)}"
        yield Finding("weights", left, shown, "none", advice)
    if empty:
        shown = f"{len(empty)} of {len(floating)} matrices are all zero: {_some(empty)}"
        advice = "this part was never trained, or not saved: train it, or " + advice
        yield Finding("weights", left, shown, "none", advice)


def not_finite(head: DraftHead) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    return [name for name, each in _floating(head).items() if not bool(each.isfinite().all())]


def small_vocabulary(evidence: Evidence, left: float) -> Iterator[Finding]:
    """How much of what the target writes the head can guess at all."""
    ids_v, truth_MK, ranks_MK = known_ids(evidence.head), evidence.truth_MK, evidence.ranks_MK
    if ids_v is None:
        return
    unknown_MK = ~torch.isin(truth_MK, ids_v.cpu()) & (truth_MK >= 0)
    unknown_M = unknown_MK[:, 0].float()
    if not is_above(unknown_M, MANY_UNKNOWN):
        return
    share = float(unknown_M.mean())
    gain = runs(torch.where(unknown_MK, 0, ranks_MK)).mean() - runs(ranks_MK).mean()
    right = float((ranks_MK[:, 0] == 0).float().mean()) / max(1 - share, 1e-6)
    yield Finding(
        "draft vocabulary",
        float(gain) * right,
        f"{share:.1%} of the target's tokens are outside the {len(ids_v)} that the head can guess "
        f"({len(unknown_M)} positions); of the others it guesses {right:.1%} right",
        f"below {MANY_UNKNOWN:.0%}",
        "train with a larger head.vocabulary, or with one counted on texts like these",
    )


def forgets_with_length(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Guesses get worse behind the length that was trained."""
    places_M, runs_M = evidence.places_M, runs(evidence.ranks_MK)
    trained = evidence.case.recorded("data", "sequence_length")
    border = trained or (int(places_M.max()) + 1) // 2
    near_M, far_M = runs_M[places_M < border], runs_M[places_M >= border]
    if not is_above(near_M, far_M):
        return
    near, far = float(near_M.mean()), float(far_M.mean())
    if trained is None and far > 0.8 * near:  # the beginning of a text is not like its end
        return
    fourths = _by_place(evidence, border)
    length = f"trained with data.sequence_length {trained}" if trained else "trained length unknown"
    yield Finding(
        "long texts",
        near - float(runs_M.mean()),
        f"right guesses in a row: {near:.2f} before token {border} ({len(near_M)} positions), "
        f"{far:.2f} behind it ({len(far_M)}); {fourths}; {length}",
        "the same at every place",
        "train with a data.sequence_length as long as the texts that it is used on",
    )


def cliff(evidence: Evidence, left: float) -> Iterator[Finding]:
    """The head is right once and then lost: it never saw its own output in training."""
    ranks_MK = evidence.ranks_MK
    if not isinstance(evidence.head, AutoregressiveHead) or ranks_MK.shape[1] < 2:
        return
    usable_M = evidence.truth_MK[:, 1] >= 0
    hits_MK = ranks_MK[usable_M] == 0
    first_M, second_M = hits_MK[:, 0].float(), hits_MK[hits_MK[:, 0], 1].float()
    if not is_above(CLIFF * first_M, second_M):
        return
    first, second, depth = float(first_M.mean()), float(second_M.mean()), ranks_MK.shape[1]
    steps = evidence.case.recorded("head", "steps")
    trained = f"; trained with head.steps {steps}" if steps else ""
    kept = sum(first**k for k in range(1, depth + 1))
    yield Finding(
        "depth",
        max(0.0, kept - float(runs(ranks_MK).mean())),
        f"right at depth 1: {first:.1%}, then at depth 2: {second:.1%} ({len(second_M)} positions)"
        + trained,
        f"depth 2 keeps {CLIFF:.0%} of depth 1 or more",
        "train with head.steps of 3 to 7 (training-time test), so that the head learns to go on "
        "from its own output",
    )


def at_chance(evidence: Evidence, left: float) -> Iterator[Finding]:
    """The head is no better than the word that is most frequent."""
    truth_M = evidence.truth_MK[:, 0]
    truth_M = truth_M[truth_M >= 0]
    hits_M = (evidence.ranks_MK[:, 0] == 0).float()
    chance = float(torch.bincount(truth_M).max()) / len(truth_M) if len(truth_M) else 1.0
    if left < WORTH or float(hits_M.mean()) > 1.5 * chance + 2 * error(hits_M):
        return
    shares = " ".join(f"{share:.3f}" for share in (evidence.ranks_MK == 0).float().mean(0))
    yield Finding(
        "untrained",
        left,
        f"right by depth: {shares} ({len(hits_M)} positions); the most frequent token alone "
        f"would be right {chance:.3f} of the time",
        "several times chance",
        "these weights know nothing of this target: check that the right file was loaded and that "
        "training's loss fell",
    )


def _by_place(evidence: Evidence, border: int) -> str:
    places_M, runs_M = evidence.places_M, runs(evidence.ranks_MK)
    step, parts = max(1, border // 2), []
    for start in range(0, min(int(places_M.max()) + 1, 8 * step), step):
        here_M = runs_M[(places_M >= start) & (places_M < start + step)]
        if len(here_M):
            parts.append(f"{float(here_M.mean()):.2f} from {start}")
    return ", ".join(parts)


def _floating(head: DraftHead) -> dict[str, Tensor]:
    tensors = head.state_dict()
    return {name: each for name, each in tensors.items() if each.is_floating_point()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
