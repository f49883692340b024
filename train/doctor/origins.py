"""Is the head used on what it was made for? Its target, its data, and the form of its prompts.

Each check takes the evidence and how many tokens per step are still unexplained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from draftheads.heads.weights import same_weights
from draftheads.train.assemble import LOW_SHARE
from draftheads.train.batches import Documents, Span
from draftheads.train.data.conversation import SENTINEL, Renderer
from draftheads.train.data.distill import MANY_CUT
from draftheads.train.data.prompts import Prompt
from draftheads.train.doctor.evidence import Evidence, is_above, runs, write
from draftheads.train.doctor.finding import Finding
from draftheads.train.doctor.in_use import accepts_less
from draftheads.train.heldout import calibrate

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
