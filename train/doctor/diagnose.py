"""Why is my acceptance low? Checks in the order of causes, sorted by what they explain.

What an experiment proves is believed first. A fact whose price cannot be measured by itself (other
weights, data without tokens) is charged with what is left: how far the head falls short of what
training recorded, less what is already explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from draftheads.train.doctor import in_use, origins, suspects, symptoms
from draftheads.train.doctor.evidence import Case, Evidence, is_above, runs
from draftheads.train.doctor.finding import WORTH, Diagnosis, Finding
from draftheads.train.heldout import calibrate

Check = Callable[[Evidence, float], Iterator[Finding]]

ORDINARY = 2.0
"""Tokens per step that any trained head brings; expected where training recorded nothing."""

CAUSES: list[Check] = [
    origins.data_teaches,
    symptoms.unfit_weights,
    origins.target_changed,
    origins.adapter_missing,
    origins.other_template,
    origins.other_writer,
    in_use.warm,
    in_use.drafting,
    in_use.wrong_tree,
    symptoms.small_vocabulary,
    symptoms.forgets_with_length,
]
"""Each is looked for whatever else was found."""
REST: list[Check] = [symptoms.cliff, symptoms.at_chance, origins.other_use, origins.fallen_short]
"""What a cause found before would bring about as well: looked for only where there is none."""
NOTES: list[Check] = [origins.data_habits, in_use.near_ties]
"""What is worth a remark."""


def diagnose(case: Case) -> Diagnosis:
    """Examine a head. Raises ValueError where nothing can be decoded."""
    evidence = Evidence(case)
    if symptoms.not_finite(case.head):  # what it guesses cannot even be ranked
        lost = (case.training.get("predicted_tokens_per_step") or ORDINARY) - 1.0
        return _diagnosis(evidence, 1.0, list(symptoms.unfit_weights(evidence, lost)))
    predicted = calibrate(evidence.whole_MK, case.nodes, case.head.tree).tokens_per_step
    missing = shortfall(evidence, predicted)
    found = [] if _knows_nothing(evidence) else list(suspects.experiments(evidence))
    for check in [*CAUSES, *REST, *NOTES]:
        if check in REST and any(finding.matters for finding in found):
            continue
        left = max(0.0, missing - sum(finding.explains for finding in found))
        found += check(evidence, left if left >= WORTH else 0.0)
    return _diagnosis(evidence, predicted, found)


def _diagnosis(evidence: Evidence, predicted: float, found: list[Finding]) -> Diagnosis:
    found = sorted(found, key=lambda finding: -finding.explains)
    return Diagnosis(
        findings=[finding for finding in found if finding.matters],
        remarks=[finding for finding in found if not finding.matters],
        measured=evidence.written.tokens_per_step,
        steps=len(evidence.written.accepted),
        predicted=predicted,
        positions=len(evidence.whole_MK),
        expected=evidence.case.training.get("predicted_tokens_per_step"),
    )


def shortfall(evidence: Evidence, predicted: float) -> float:
    """Tokens per step by which the prediction falls short of training's own, or of an ordinary
    head's where there is none; 0 within chance.
    """
    training, ranks_MK = evidence.case.training, evidence.whole_MK
    recorded = training.get("predicted_tokens_per_step")
    if recorded:
        shares: list[float] = training.get("heldout_top1", [])[: ranks_MK.shape[1]]
        hits_M, expected = (ranks_MK[:, : len(shares)] == 0).float().sum(1), sum(shares)
    else:
        hits_M, expected = runs(ranks_MK), ORDINARY - 1
    missing = max(0.0, (recorded or ORDINARY) - predicted)
    return missing if is_above(-hits_M, -expected) else 0.0


def _knows_nothing(evidence: Evidence) -> bool:
    """Whether the head cannot have learned: a new one guesses early, which looks like a shift."""
    checks = (origins.data_teaches, symptoms.unfit_weights)
    return any(True for check in checks for _ in check(evidence, 0.0))
