"""Experiments: would the head be right more often if it were fed or read otherwise? What helps
clearly is what is wrong.

Legend: M learned positions, K draft depth, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from os.path import commonprefix

import torch
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.eagle import AutoregressiveHead, Eagle3Head
from draftheads.heads.layers import Rope, default_rope
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.sequential import PrefixLayer, SequentialHead
from draftheads.heads.weights import same_weights
from draftheads.train.batches import Documents, Span
from draftheads.train.data.conversation import SENTINEL, Renderer
from draftheads.train.data.distill import MANY_CUT
from draftheads.train.data.prompts import Prompt
from draftheads.train.doctor.measurements import (
    WORTH,
    Case,
    Diagnosis,
    Evidence,
    Finding,
    Variant,
    accepts_less,
    drafting,
    error,
    is_above,
    near_ties,
    ranks_along,
    runs,
    warm,
    write,
    wrong_tree,
)
from draftheads.train.evaluate import calibrate
from draftheads.train.setup import LOW_SHARE

ROPE_BASES = (10000.0, 500000.0, 1000000.0)
MANY_STATES = 4
"""From so many feature layers on, only reversal is tried, not every order."""


def experiments(evidence: Evidence) -> Iterator[Finding]:
    """A finding for each kind of variant of which the best one is clearly better."""
    kinds = {
        "features": list(other_layers(evidence)),
        "alignment": list(other_places(evidence)),
        "rope": list(other_bases(evidence)),
        "draft vocabulary": list(other_ids(evidence)),
    }
    variants = [variant for kind in kinds.values() for variant in kind]
    observed = dict(zip(variants, ranks_along(evidence.case, evidence.rows, variants), strict=True))
    for check, kind in kinds.items():
        if kind:
            best = max(kind, key=lambda variant: float(runs(observed[variant]).mean()))
            yield from _compared(evidence, check, best, observed[best])


def other_layers(evidence: Evidence) -> Iterator[Variant]:
    """Each feature one layer lower or higher, all of them, and every other order."""
    plain, last = evidence.plain, evidence.target.layers
    layers = plain.layers
    moved = [
        tuple(layer + step * (place in (here, None)) for place, layer in enumerate(layers))
        for step in (-1, 1)
        for here in range(len(layers))
    ]
    moved += [tuple(layer + step for layer in layers) for step in (-1, 1)]
    orders = permutations(layers) if len(layers) < MANY_STATES else [layers[::-1]]
    for changed in dict.fromkeys([*moved, *orders]):
        if changed != layers and all(0 <= layer <= last for layer in changed):
            name = f"states of layers {list(changed)} instead of {list(layers)}"
            yield replace(plain, name=name, layers=changed)


def other_places(evidence: Evidence) -> Iterator[Variant]:
    """Features one token late or early."""
    for shift, words in ((1, "before"), (-1, "behind")):
        name = f"for each token the feature of the token {words} it"
        yield replace(evidence.plain, name=name, shift=shift)


def other_bases(evidence: Evidence) -> Iterator[Variant]:
    """Other RoPE bases, and no scaling, for heads whose layers have positions."""
    reader = _reader(evidence.head)
    if reader is None:
        return
    own, width = reader.rope, _head_dim(evidence.head)
    bases = dict.fromkeys([own.theta, *ROPE_BASES, default_rope(evidence.target, {})[0]])
    for theta in bases:
        for scaling in [own.scaling] if own.scaling is None else [own.scaling, None]:
            if (theta, scaling) != (own.theta, own.scaling):
                rope = Rope(width, theta, scaling)
                name = f"RoPE base {theta:g}" + (" unscaled" if own.scaling and not scaling else "")
                planted = partial(_planted_rope, reader, rope)
                instead = f" instead of {own.theta:g}" if theta != own.theta else ""
                yield replace(evidence.plain, name=name + instead, planted=planted)


def other_ids(evidence: Evidence) -> Iterator[Variant]:
    """The draft vocabulary's ids taken for offsets, for absolute ids, and off by one."""
    ids_v = known_ids(evidence.head)
    if ids_v is None:
        return
    places_v = torch.arange(len(ids_v), device=ids_v.device)
    readings: dict[str, Tensor] = {
        "d2t read as absolute ids instead of offsets": ids_v - places_v,
        "d2t read as offsets instead of absolute ids": ids_v + places_v,
        "draft ids one lower": ids_v - 1,
        "draft ids one higher": ids_v + 1,
        "draft ids one place further on": ids_v.roll(1),
        "draft ids one place back": ids_v.roll(-1),
    }
    for name, read_v in readings.items():
        rising = bool((read_v.diff() > 0).all())
        if rising and int(read_v[0]) >= 0 and int(read_v[-1]) < evidence.target.vocab_size:
            yield replace(evidence.plain, name=name, planted=_with_ids(evidence.head, read_v))


def known_ids(head: DraftHead) -> Tensor | None:
    """int64 (v,): the target ids that the head can guess; None: all."""
    return head.token_map if isinstance(head, MedusaHead | AutoregressiveHead) else None


def _compared(
    evidence: Evidence, check: str, variant: Variant, ranks_MK: Tensor
) -> Iterator[Finding]:
    case, plain_MK = evidence.case, evidence.ranks_MK
    if not is_above(runs(ranks_MK) - runs(plain_MK), WORTH):
        return
    better, worse = (
        calibrate(ranks, case.nodes, case.head.tree).tokens_per_step
        for ranks in (ranks_MK, plain_MK)
    )
    right, now = (float((ranks[:, 0] == 0).float().mean()) for ranks in (ranks_MK, plain_MK))
    yield Finding(
        check,
        better - worse,
        f"with {variant.name}, the head's first guess is right {right:.1%} of the time, as it is "
        f"{now:.1%} (the same {len(ranks_MK)} positions; {better:.2f} tokens per step instead of "
        f"{worse:.2f})",
        "nothing else is better than what the head's config says",
        ADVICE[check],
    )


ADVICE = {
    "features": "set draftheads.feature_layers in the head's config.json to these layers (0 = "
    "embeddings; SGLang's numbers are one lower), or train again with the layers it has now",
    "alignment": "the head was trained on pairs shifted by one; features[i] is the state from "
    "which tokens[i] was predicted: export or train it again so",
    "rope": "set rope_theta and rope_scaling in the head's config.json to what it was trained with "
    "(loaders assume 10000 where it is missing)",
    "draft vocabulary": "write d2t as target id minus draft index, in the order of the head's "
    "lm_head, and t2d to match",
}
"""What to do about what an experiment has shown."""


def _reader(head: DraftHead) -> AutoregressiveHead | PrefixLayer | None:
    """The part of a head that has positions."""
    if isinstance(head, AutoregressiveHead):
        return head
    return head.prefix if isinstance(head, SequentialHead) else None


def _head_dim(head: DraftHead) -> int:
    reader = _reader(head)
    assert reader is not None
    return len(reader.rope.frequencies)


@contextmanager
def _planted_rope(reader: AutoregressiveHead | PrefixLayer, rope: Rope) -> Iterator[None]:
    own, reader.rope = reader.rope, rope
    try:
        yield
    finally:
        reader.rope = own


def _with_ids(head: DraftHead, ids_v: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """A context in which the head guesses these ids."""

    @contextmanager
    def planted() -> Iterator[None]:
        name = "d2t" if isinstance(head, Eagle3Head) else "token_map"
        own_v = getattr(head, name)
        places_v = torch.arange(len(ids_v), device=ids_v.device)
        setattr(head, name, ids_v - places_v if name == "d2t" else ids_v)
        try:
            yield
        finally:
            setattr(head, name, own_v)

    return planted


# What the measurements themselves say of a head: its weights, its guesses by depth and by
# place.
#
# Legend: M learned positions, K draft depth, v draft vocabulary.
#
# Each check takes the evidence and how many tokens per step are still unexplained.


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


# Is the head used on what it was made for? Its target, its data, and the form of its prompts.
#
# Each check takes the evidence and how many tokens per step are still unexplained.


PROMPTS = 64
"""Documents whose prompts are compared with the chat template."""
COLDER = 0.5
"""Difference of temperatures that is worth a word."""


def data_teaches(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Whether the data has tokens to learn."""
    documents = evidence.case.documents
    if documents is None:
        return
    learned, count = int(documents.learn_N.sum()), len(documents.spans)
    empty = sum(not bool(documents.learn_N[slice(*span)].any()) for span in documents.spans)
    share = learned / len(documents.tokens_N)
    if share < LOW_SHARE or empty > 0.5 * count:
        yield Finding(
            "data",
            left,
            f"{learned} of {len(documents.tokens_N)} tokens are learned ({share:.1%}); {empty} of "
            f"{count} documents have none",
            f"{LOW_SHARE:.0%} or more, and some in every document",
            "look at `learn` in answers-*.jsonl, and distill again: the spans are what the target "
            "wrote",
        )


def target_changed(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Whether the target's weights are those that the head was trained on."""
    recorded = evidence.case.facts.get("target", {})
    known, now = recorded.get("fingerprint"), evidence.target.fingerprint()
    if not same_weights(known, now):
        yield Finding(
            "target",
            left,
            f"the head was trained on {recorded.get('name')} with fingerprint {known} (revision "
            f"{recorded.get('revision')}); {evidence.target.name} has {now} (revision "
            f"{evidence.target.revision})",
            "the same fingerprint",
            "load the target that it was trained on, at that revision, or train on this one",
        )


def adapter_missing(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Whether the target has the adapter that the head was trained together with."""
    recorded, adapter = evidence.case.facts.get("adapter"), evidence.target.adapter
    expected = recorded["fingerprint"] if recorded else "none"
    got = adapter.fingerprint() if adapter else "none"
    if expected != got:
        yield Finding(
            "adapter",
            left,
            f"the head was trained with adapter {expected} on its target; the target has {got}",
            "the same adapter",
            "restore the folder adapter/ beside the head's config.json, which is where it is read "
            "from"
            if recorded
            else "load the target without an adapter",
        )


def other_writer(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Whether this target wrote the data."""
    writer = evidence.case.manifest.get("target", {})
    known, now = writer.get("fingerprint"), evidence.target.fingerprint()
    if not same_weights(known, now):
        yield Finding(
            "data",
            max(left, _worse_in_use(evidence)),
            f"the data was written by {writer.get('name')} with fingerprint {known}; "
            f"{evidence.target.name} has {now}",
            "the target's own answers",
            "distill with this target and train on that",
        )


def data_habits(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Answers that were cut, and how warm they were drawn: what may matter, without a price."""
    manifest = evidence.case.manifest
    counts = manifest.get("counts", {})
    cut, done = counts.get("cut", 0), max(1, counts.get("done", 0))
    if cut > MANY_CUT * done:
        yield Finding(
            "data",
            0.0,
            f"{cut} of {done} answers were cut by length",
            f"below {MANY_CUT:.0%}",
            "they teach no ending; raise --max-new-tokens of distill where answers should end",
        )
    drawn = manifest.get("sampling", {}).get("temperature")
    asked = getattr(evidence.case.sampling, "temperature", 0.0)
    if drawn is not None and abs(drawn - asked) > COLDER:
        yield Finding(
            "data",
            0.0,
            f"the data was drawn at temperature {drawn}, decoding is at {asked}",
            f"within {COLDER}",
            "distill at the temperature of use",
        )


@dataclass(frozen=True)
class Framing:
    """What stands around a prompt: text before and behind it."""

    before: str
    behind: str

    @classmethod
    def now(cls, renderer: Renderer) -> Framing:
        """As the target's tokenizer makes it."""
        message = {"role": "user", "content": SENTINEL}
        chat = Prompt(0, messages=(message,)) if renderer.tokenizer.chat_template else None
        ids = renderer.opening(chat or Prompt(0, text=SENTINEL), [message] if chat else [])
        before, _, behind = renderer.tokenizer.decode(ids).partition(SENTINEL)
        return cls(before.rstrip(" "), behind)

    def fits(self, text: str) -> bool:
        """Whether a prompt stands in this frame, and not in two beginnings at once."""
        rest = text.removeprefix(self.before)
        twice = bool(self.before) and rest.lstrip().startswith(self.before.strip())
        return text.startswith(self.before) and text.endswith(self.behind) and not twice


def other_template(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Whether the data's prompts have the form that the target's tokenizer gives them now."""
    case, target = evidence.case, evidence.target
    if case.documents is None or target.tokenizer is None:
        return
    arguments = case.manifest.get("sampling", {}).get("template_args") or {}
    renderer = Renderer(target, arguments)
    frame, openings = (
        Framing.now(renderer),
        openings_of(case.documents, case.documents.spans[:PROMPTS]),
    )
    texts = [target.tokenizer.decode(opening) for opening in openings]
    wrong = [number for number, text in enumerate(texts) if not frame.fits(text)]
    if len(wrong) <= 0.5 * len(texts):
        return
    usual = openings[: len(case.openings)]
    reframed = _reframed(texts[: len(usual)], frame)
    converted = [
        list(target.tokenizer(each, add_special_tokens=False)["input_ids"]) for each in reframed
    ]
    stored, current = (write(case, each, case.head) for each in (usual, converted))
    cost = stored.tokens_per_step - current.tokens_per_step
    yield Finding(
        "template",
        cost if accepts_less(current, stored) else 0.0,
        f"{len(wrong)} of {len(texts)} prompts of the data begin or end otherwise than the "
        f"target's tokenizer writes them now: {_difference(texts[wrong[0]], frame)}; "
        f"{stored.tokens_per_step:.2f} tokens per step in the data's form, "
        f"{current.tokens_per_step:.2f} in the present one",
        "the same tokens around every prompt",
        "use the template (system prompt, BOS) that the data was made with, or distill again",
    )


def other_use(evidence: Evidence, left: float) -> Iterator[Finding]:
    """Whether the head does worse on what it is used for than on the data."""
    worse = _worse_in_use(evidence)
    if worse:
        written, data = evidence.written_whole_MK, evidence.ranks_MK
        yield Finding(
            "use",
            worse,
            f"right guesses in a row: {float(runs(data).mean()):.2f} on the data ({len(data)} "
            f"positions), {float(runs(written).mean()):.2f} on what the target writes now "
            f"({len(written)})",
            "about equal",
            "distill prompts like those of use, rendered and answered as in use",
        )


def fallen_short(evidence: Evidence, left: float) -> Iterator[Finding]:
    """The head is worse than training recorded, and nothing else explains it."""
    if left and evidence.case.training.get("predicted_tokens_per_step"):
        yield Finding(
            "unexplained",
            left,
            f"{left:.2f} tokens per step fewer are predicted than training recorded "
            f"({len(evidence.ranks_MK)} positions)",
            "as recorded",
            "compare the text with the training data (--data), and the head's files with the run's",
        )


def openings_of(documents: Documents, spans: Sequence[Span]) -> list[list[int]]:
    """The prompts of documents; the first quarter of those in which nothing is learned."""
    openings = []
    for start, stop in spans:
        learned = documents.learn_N[start:stop].nonzero()
        end = int(learned[0]) if len(learned) else (stop - start) // 4
        openings.append(documents.tokens_N[start : start + max(1, end)].tolist())
    return openings


def _worse_in_use(evidence: Evidence) -> float:
    """Tokens per step that are predicted less for what decoding wrote than for the data; 0 within
    chance.
    """
    if not evidence.on_data:
        return 0.0
    data_MK, written_MK = evidence.ranks_MK, evidence.written_whole_MK
    if not is_above(runs(data_MK), runs(written_MK)):
        return 0.0
    case = evidence.case
    predicted = [calibrate(each, case.nodes, case.head.tree) for each in (data_MK, written_MK)]
    return max(0.0, predicted[0].tokens_per_step - predicted[1].tokens_per_step)


def _reframed(texts: Sequence[str], frame: Framing) -> list[str]:
    """Prompts out of the frame that they have in common, into another one."""
    before = commonprefix(texts) if len(texts) > 1 else ""
    behind = commonprefix([text[::-1] for text in texts])[::-1] if len(texts) > 1 else ""
    cores = [text.removeprefix(before).removesuffix(behind) for text in texts]
    return [f"{frame.before}{core}{frame.behind}" for core in cores]


def _difference(text: str, frame: Framing) -> str:
    """Where a prompt first leaves the frame."""
    if not text.startswith(frame.before):
        same = len(commonprefix([text, frame.before]))
        return f"at character {same} {text[same : same + 40]!r}, not {frame.before[same:][:40]!r}"
    if not text.endswith(frame.behind):
        return f"the end is {text[-40:]!r}, not {frame.behind[-40:]!r}"
    return f"{frame.before!r} stands twice"


# Why is my acceptance low? Checks in the order of causes, sorted by what they explain.
#
# What an experiment proves is believed first. A fact whose price cannot be measured by itself
# (other weights, data without tokens) is charged with what is left: how far the head falls short
# of what training recorded, less what is already explained.


Check = Callable[[Evidence, float], Iterator[Finding]]

ORDINARY = 2.0
"""Tokens per step that any trained head brings; expected where training recorded nothing."""

CAUSES: list[Check] = [
    data_teaches,
    unfit_weights,
    target_changed,
    adapter_missing,
    other_template,
    other_writer,
    warm,
    drafting,
    wrong_tree,
    small_vocabulary,
    forgets_with_length,
]
"""Each is looked for whatever else was found."""
REST: list[Check] = [cliff, at_chance, other_use, fallen_short]
"""What a cause found before would bring about as well: looked for only where there is none."""
NOTES: list[Check] = [data_habits, near_ties]
"""What is worth a remark."""


def diagnose(case: Case) -> Diagnosis:
    """Examine a head. Raises ValueError where nothing can be decoded."""
    evidence = Evidence(case)
    if not_finite(case.head):  # what it guesses cannot even be ranked
        lost = (case.training.get("predicted_tokens_per_step") or ORDINARY) - 1.0
        return _diagnosis(evidence, 1.0, list(unfit_weights(evidence, lost)))
    predicted = calibrate(evidence.whole_MK, case.nodes, case.head.tree).tokens_per_step
    missing = shortfall(evidence, predicted)
    found = [] if _knows_nothing(evidence) else list(experiments(evidence))
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
    checks = (data_teaches, unfit_weights)
    return any(True for check in checks for _ in check(evidence, 0.0))
