"""`draftheads data-preview`: the documents of a distillation as text, and a summary of them.

Reads tokens and a tokenizer, never weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftheads.infer.chat import printable
from draftheads.infer.text import TextStream
from draftheads.train.data.answers import MANIFEST, count, read_answers, read_manifest
from draftheads.train.data.conversation import Conversation, Renderer
from draftheads.train.data.prompts import Prompt, check_source
from draftheads.train.data.tokenizer import TextSide

LEARNED, ENDING, REST = "green", "bold reverse green", "dim"
FREQUENT = 12
"""Learned tokens that the summary names."""
VOCABULARIES = (1024, 4096, 8192, 32768)
"""Sizes of draft vocabularies whose coverage the summary gives."""

Span = tuple[int, int]


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
        text, stream, at = Text(), TextStream(self._side.tokenizer, skip_special_tokens=False), 0
        for start, stop in learn:
            end = stop - (tokens[stop - 1] in self._side.eos_ids)
            self._write(text, stream, tokens[at:start], REST)
            text.append("[[" if self._plain else "")
            self._write(text, stream, tokens[start:end], LEARNED)
            text.append("|" if self._boundaries and start < end < stop else "")
            self._write(text, stream, tokens[end:stop], ENDING)
            text.append("]]" if self._plain else "")
            at = stop
        self._write(text, stream, tokens[at:], REST)
        return text

    def token(self, token: int) -> str:
        """One token as a Python literal, its spaces visible."""
        return repr(self._side.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _write(self, text: Text, stream: TextStream, tokens: Sequence[int], style: str) -> None:
        parts = [[token] for token in tokens] if self._boundaries else [tokens]
        written = "|".join(filter(None, map(stream.feed, parts)))
        text.append(printable(written), style="" if self._plain else style)


def show_answers(folder: Path, side: TextSide, pen: Pen, limit: int, out: Console) -> None:
    """Print the first documents of a folder, `limit` at most, and a summary of all."""
    learned: Counter[int] = Counter()
    for number, answer in enumerate(read_answers(folder)):
        written = [token for start, stop in answer.learn for token in answer.tokens[start:stop]]
        learned.update(written)
        if number < limit:
            out.print(
                f"document {number}: {len(answer.tokens)} tokens, {len(written)} learned in "
                f"{len(answer.learn)} answers",
                style="bold",
            )
            out.print(pen.document(answer.tokens, answer.learn), end="\n\n")
    manifest = read_manifest(folder)
    counts = count(folder, manifest)
    note = " (imported, not checked)" if "imported" in manifest else ""
    frequent = [f"{pen.token(token)} {n:,}" for token, n in learned.most_common(FREQUENT)]
    sizes = [size for size in VOCABULARIES if size < len(learned)]
    shares = [f"{size:,} cover {coverage(learned, size):.1%}" for size in sizes]
    lines = [
        f"documents      {counts.documents:,}; {counts.skipped:,} prompts skipped, "
        f"{counts.failed:,} failed",
        f"tokens         {counts.tokens:,}, {learned.total() / max(1, counts.tokens):.1%} learned",
        f"answers        {counts.turns:,}, {learned.total() / max(1, counts.turns):.1f} tokens on "
        f"average; {counts.cut / max(1, counts.documents):.1%} of the documents cut by length",
        f"most frequent  {', '.join(frequent)}",
        f"draft tokens   {', '.join([*shares, f'{len(learned):,} all'])} (of what is learned here)",
        *(f"               {number:,} {why}" for why, number in counts.reasons.most_common()),
    ]
    out.print(Text(f"{folder}, answered by {manifest['target']['name']}{note}", style="bold"))
    out.print(Text("\n".join(lines)))


def coverage(learned: Counter[int], size: int) -> float:
    """Share of the learned tokens that the `size` most frequent token ids make."""
    return sum(number for _, number in learned.most_common(size)) / max(1, learned.total())


def show_prompts(prompts: Sequence[Prompt], renderer: Renderer, pen: Pen, out: Console) -> None:
    """Print what the target is asked first by each prompt, or why it is not."""
    for prompt in prompts:
        conversation = Conversation(prompt, renderer, context=1 << 30)
        conversation.ask()
        reasons = [f"{kind}: {why}" for kind, why in conversation.outcome.items()]
        said = "".join(reasons) or f"{len(conversation.tokens)} tokens asked first"
        out.print(Text(f"prompt {prompt.index}: {said}", style="bold"))
        out.print(pen.document(conversation.tokens, []), end="\n\n")


def text_side(target: str | None, folder: str) -> TextSide:
    """The text side of the target that is named, else of the one in a folder's manifest."""
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
