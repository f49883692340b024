"""The documents of a distillation as text, and how they add up: what `draftheads data-preview`
prints.

Reads tokens and a tokenizer, never weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftheads.infer.chat import printable
from draftheads.infer.text import TextStream
from draftheads.train.data.answers import MANIFEST, Answer, Counts, read_answers, read_manifest
from draftheads.train.data.answers import count as counted
from draftheads.train.data.conversation import Conversation, Renderer
from draftheads.train.data.prompts import Prompt, check_source
from draftheads.train.data.tokenizer import TextSide

LEARNED, ENDING, REST = "green", "bold reverse green", "dim"
FREQUENT = 12
"""Learned tokens that the summary names."""
VOCABULARIES = (1024, 4096, 8192, 32768)
"""Sizes of draft vocabularies that the summary judges."""

Span = tuple[int, int]


@dataclass
class Summary:
    """Counts over the documents of a folder. learned: how often each token id is."""

    documents: int = 0
    tokens: int = 0
    learned: Counter[int] = field(default_factory=Counter)

    def add(self, answer: Answer) -> None:
        """Count one document."""
        self.documents += 1
        self.tokens += len(answer.tokens)
        for start, stop in answer.learn:
            self.learned.update(answer.tokens[start:stop])

    def coverage(self, size: int) -> float:
        """Share of the learned tokens that the `size` most frequent token ids make."""
        kept = sum(count for _, count in self.learned.most_common(size))
        return kept / max(1, self.learned.total())


class Pen:
    """Writes token ids as text.

    plain: brackets around what is learned, instead of colours. boundaries: | between tokens.
    """

    def __init__(self, side: TextSide, *, plain: bool, boundaries: bool) -> None:
        self._side = side
        self._plain = plain
        self._boundaries = boundaries

    def document(self, tokens: Sequence[int], learn: Sequence[Span]) -> Text:
        """A document's text; end tokens that are learned stand out."""
        text = Text()
        stream = TextStream(self._side.tokenizer, skip_special_tokens=False)
        at = 0
        for start, stop in learn:
            ends = tokens[stop - 1] in self._side.eos_ids
            text.append(self._written(stream, tokens[at:start]), style=self._style(REST))
            text.append("[[" if self._plain else "")
            said = self._written(stream, tokens[start : stop - ends])
            text.append(said, style=self._style(LEARNED))
            if ends:
                text.append("|" if self._boundaries and said else "")
                end = self._written(stream, tokens[stop - 1 : stop])
                text.append(end, style=self._style(ENDING))
            text.append("]]" if self._plain else "")
            at = stop
        text.append(self._written(stream, tokens[at:]), style=self._style(REST))
        return text

    def token(self, token: int) -> str:
        """One token as a Python literal, its spaces visible."""
        return repr(self._side.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _written(self, stream: TextStream, tokens: Sequence[int]) -> str:
        parts = [[token] for token in tokens] if self._boundaries else [tokens]
        return printable("|".join(filter(None, (stream.feed(part) for part in parts))))

    def _style(self, style: str) -> str:
        return "" if self._plain else style


def show_answers(folder: Path, side: TextSide, pen: Pen, count: int, out: Console) -> None:
    """Print the first `count` documents of a folder and a summary of all."""

    summary = Summary()
    for answer in read_answers(folder):
        if summary.documents < count:
            learned = sum(stop - start for start, stop in answer.learn)
            out.print(
                f"document {summary.documents}: {len(answer.tokens)} tokens, {learned} learned in "
                f"{len(answer.learn)} answers",
                style="bold",
            )
            out.print(pen.document(answer.tokens, answer.learn), end="\n\n")
        summary.add(answer)
    manifest = read_manifest(folder)
    note = " (imported, not checked)" if "imported" in manifest else ""
    title = f"{folder}, answered by {manifest['target']['name']}{note}"
    out.print(Text(title, style="bold"))
    for line in _summary(summary, counted(folder, manifest), pen):
        out.print(Text(line))


def _summary(summary: Summary, counts: Counts, pen: Pen) -> list[str]:
    learned = summary.learned.total()
    frequent = ", ".join(
        f"{pen.token(token)} {number:,}" for token, number in summary.learned.most_common(FREQUENT)
    )
    sizes = [size for size in VOCABULARIES if size < len(summary.learned)]
    coverage = "".join(f"{size:,} cover {summary.coverage(size):.1%}, " for size in sizes)
    return [
        f"documents      {summary.documents:,}; {counts.skipped:,} prompts skipped, "
        f"{counts.failed:,} failed",
        f"tokens         {summary.tokens:,}, {learned / max(1, summary.tokens):.1%} learned",
        f"answers        {counts.turns:,}, {learned / max(1, counts.turns):.1f} tokens on average; "
        f"{counts.cut / max(1, counts.documents):.1%} of the documents cut by length",
        f"most frequent  {frequent}",
        f"draft tokens   {coverage}{len(summary.learned):,} all (of what is learned here)",
        *(f"               {number:,} {why}" for why, number in counts.reasons.most_common()),
    ]


def show_prompts(prompts: Sequence[Prompt], renderer: Renderer, pen: Pen, out: Console) -> None:
    """Print what the target is asked first by each prompt, or why it is not."""

    for prompt in prompts:
        conversation = Conversation(prompt, renderer, context=1 << 30, max_turns=1)
        asked = conversation.ask()
        outcome = "".join(f"{kind}: {why}" for kind, why in conversation.outcome.items())
        said = f"{len(conversation.tokens)} tokens asked first" if asked else outcome
        out.print(Text(f"prompt {prompt.index}: {said}", style="bold"))
        out.print(pen.document(conversation.tokens, []), end="\n\n")


def text_side(target: str | None, folder: str) -> TextSide:
    """Of the target that is named, else of the one that a folder's manifest names."""

    if target:
        return TextSide.load(target)
    if not (Path(folder) / MANIFEST).is_file():
        check_source(folder)
        raise ValueError(
            f"{folder}: expected --target to render prompts with, got none; pass the target's "
            "folder or Hub id, or give a folder that `draftheads distill` wrote"
        )
    origin = read_manifest(folder)["target"]
    return TextSide.load(origin["name"], origin.get("revision"))
