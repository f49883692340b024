"""What a run's report says in words, of its metrics alone. Advice is for `draftheads doctor`.

Legend: a point is (step, tokens per step).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftheads.train.judge_choices import measure_of
from draftheads.train.state import RunState

Line = dict[str, Any]
Point = tuple[int, float]


def remarks(metrics: Sequence[Line], best: RunState) -> str:
    """Whether it was still learning, what the loss would have chosen, how far training and held-out
    documents are apart, how deep drafts are accepted.

    Tokens per step are those of decoding, or where nothing was decoded simulated ones.
    """
    judged = [line for line in metrics if "heldout_tokens_per_step" in line]
    decoded = [line for line in judged if "measured" in line]
    points = [(x["step"], x["measured"]["tokens_per_step"]) for x in decoded]
    points = points or [(x["step"], x["heldout_tokens_per_step"]) for x in judged]
    said = [_trend(points, best), _by_loss(metrics, points, best), _apart(metrics, best)]
    if best.measured and (accepted := best.measured["acceptance"]):
        said.append(
            f"{accepted[0]:.0%} of the steps of decoding had a draft accepted, {accepted[-1]:.0%} "
            f"had {len(accepted)}."
        )
    return "\n".join(f"* {each}" for each in said if each) or "Nothing: heads were not judged."


def losses_until(metrics: Sequence[Line], step: int) -> list[float]:
    """The training losses that were logged up to `step`."""
    return [line["loss"] for line in metrics if "loss" in line and line["step"] <= step]


def _trend(points: Sequence[Point], best: RunState) -> str:
    taus = dict(points)
    if best.step not in taus:
        return ""
    if len(points) == 1:
        return "Judged once, so whether it was still learning is not known (`judge.every`)."
    (first, lowest), (last, newest) = points[0], points[-1]
    error = f" (± {best.measured['standard_error']:.2f})" if best.measured else ""
    rise = f"from {lowest:.2f} tokens per step at step {first:,} to {taus[best.step]:.2f}{error}"
    if best.step != last:
        after = sum(step > best.step for step, _ in points)
        return (
            f"It came {rise} at step {best.step:,}, the best; of the {after} judgements after it "
            f"the last found {newest:.2f}."
        )
    step, tau = max((p for p in points[:-1] if p[0] <= 0.75 * last), default=points[0])
    return f"It came {rise} at its end, {newest - tau:.2f} of that since step {step:,}."


def _by_loss(metrics: Sequence[Line], points: Sequence[Point], best: RunState) -> str:
    """Of the judged steps."""
    known = [(losses_until(metrics, step), step, tau) for step, tau in points]
    losses = [(losses[-1], -step, tau) for losses, step, tau in known if losses]
    if len(losses) < 2 or measure_of(best.recipe) == "loss":
        return ""
    _, step, tau = min(losses)
    if -step == best.step:
        return "The training loss was the lowest there too."
    return f"By training loss step {-step:,} would have been the best, with {tau:.2f}."


def _apart(metrics: Sequence[Line], best: RunState) -> str:
    """What the head knows by heart does not help elsewhere."""
    until = [line for line in metrics if line["step"] <= best.step]
    learned = next((line["top1"][0] for line in reversed(until) if "top1" in line), None)
    found = next((x["heldout_top1"][0] for x in reversed(until) if "heldout_top1" in x), None)
    if learned is None or found is None:
        return ""
    return (
        f"At depth 1 the best guess was right for {learned:.0%} of the tokens of the last training "
        f"batches and for {found:.0%} of held-out ones."
    )
