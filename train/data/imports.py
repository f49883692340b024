"""Which tokens of a given conversation its assistant wrote.

Distillation knows what the target wrote, as it was there. Of conversations that were written
earlier only messages are left. `Spans.documents` renders them, finds the answers in the text
(see `draftheads.train.data.conversation`) and brings them to tokens. A conversation becomes one
document; where the chat template rewrites what was written, each answer becomes one, behind the
prompt that asked for it.

Learned is an answer's content, as rendered, and the token that ends it, never the header before
it. The learned tokens decode to what the message says.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.train.data.answers import FORMAT, MANIFEST, Counts, Journal, Record, write_manifest
from draftheads.train.data.conversation import (
    CLOSE,
    OPEN,
    Message,
    Said,
    Span,
    Written,
    content,
    said,
)
from draftheads.train.data.prompts import Messages
from draftheads.train.data.tokenizer import TextSide

Tokens = tuple[list[int], list[Span]]


@dataclass(frozen=True)
class Document:
    """Token ids, the half-open spans of them to learn, and how those were found.

    method: generation, prefix, markers, or turns where each answer is a document. ended: the last
    answer is followed by a token that ends it.
    """

    tokens: list[int]
    learn: list[Span]
    method: str
    ended: bool


class Spans:
    """Finds the assistant's tokens in conversations, for one tokenizer and its chat template.

    eos_ids: what ends the target's answers; without them, the special token that the template puts
    behind the last answer. template_args: extra variables of the template. Raises ValueError for a
    tokenizer without a chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: Sequence[int] = (),
        template_args: dict[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"{tokenizer.name_or_path}: expected a chat template, found none; "
                "conversations with answers cannot be rendered without one"
            )
        self._tokenizer = tokenizer
        self._template_args = template_args or {}
        self._specials = _longest_first(
            [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
        )
        self._ends = _longest_first(tokenizer.convert_ids_to_tokens(list(eos_ids)))

    def documents(self, messages: Sequence[Message]) -> list[Document]:
        """One document, or one per answer where the template rewrites what was written.

        Raises ValueError for a conversation without an answer, one that the template refuses, and
        one whose answers cannot be found.
        """
        answers = said(messages)
        if not answers:
            raise ValueError("expected an assistant turn that says something, found none")
        messages = messages[: answers[-1].place + 1]
        written = Written(self._tokenizer, messages, self._template_args)
        found = written.spans()
        if found:
            return [self._document(written.text, found[1], found[0])]
        return [self._as_asked(written, messages, answer) for answer in answers]

    def _as_asked(self, written: Written, messages: Sequence[Message], answer: Said) -> Document:
        """The prompt that asked for this answer, then the answer as it was written."""
        around = written.around([answer], answer.place + 1)
        called = written.called(answer) if answer.calls else None
        if called:
            return self._document(written.render(answer.place + 1), [called], "turns")
        if around is None or answer.calls:
            raise ValueError(
                f"turn {answer.place + 1}: expected the answer in what the chat template renders, "
                "found something else; leave the conversation out, or give another template"
            )
        asked = written.asked(answer)
        answered = _behind(asked, content(messages[answer.place]), answer.place)
        span = (len(asked), len(asked) + len(answered))
        return self._document(asked + answered + around[1], [span], "turns")

    def _document(self, text: str, spans: Sequence[Span], method: str) -> Document:
        """Tokens up to the last answer's end; spans: characters of what was said."""
        ends = self._ends or self._special_at(text, spans[-1][1])
        closed = [(start, _end(text, stop, ends)) for start, stop in spans]
        last = closed[-1][1]
        tokens, learn = self._tokens(text[:last], closed)
        return Document(tokens, learn, method, text[:last].endswith(tuple(ends)))

    def _special_at(self, text: str, at: int) -> list[str]:
        """The special token that ends the text said up to `at`: before it, of tool calls, or
        behind.
        """
        before, behind = text[:at], text[at:].lstrip()
        found = (one for one in self._specials if before.endswith(one) or behind.startswith(one))
        return [special for special in [next(found, "")] if special]

    def _tokens(self, text: str, spans: Sequence[Span]) -> Tokens:
        """Token ids of `text` and the spans of them that make these spans of characters.

        Where a token straddles an edge the text is cut there: the target's tokens begin where the
        prompt's end.
        """
        whole = self._in_one(text, spans) if self._tokenizer.is_fast else None
        if whole and self._reads(whole, text, spans, _same):
            return whole
        pieces = self._in_pieces(text, spans)
        added = whole is not None and self._decode(pieces[0]) != self._decode(whole[0])
        if not added and self._reads(pieces, text, spans, _same):
            return pieces
        wider = [(start - (text[start - 1 : start] == " "), stop) for start, stop in spans]
        joined = whole and self._in_one(text, wider)
        for found in (whole, joined, pieces):  # some decoders hide the blanks at the edges
            if found and self._reads(found, text, spans, _same_words):
                return found
        raise ValueError(
            "expected the assistant's tokens to decode to what it said, got something else; "
            "check that the chat template belongs to the tokenizer"
        )

    def _in_one(self, text: str, spans: Sequence[Span]) -> Tokens | None:
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = encoded["offset_mapping"]
        learn = []
        for start, stop in spans:
            within = [n for n, (first, last) in enumerate(offsets) if start <= first < last <= stop]
            if not within:
                return None
            learn.append((within[0], within[-1] + 1))
        return list(encoded["input_ids"]), learn

    def _in_pieces(self, text: str, spans: Sequence[Span]) -> Tokens:
        tokens: list[int] = []
        learn: list[Span] = []
        at = 0
        for start, stop in spans:
            tokens += self._encode(text[at:start])
            first = len(tokens)
            tokens += self._encode(text[start:stop])
            learn.append((first, len(tokens)))
            at = stop
        return tokens, learn

    def _reads(self, found: Tokens, text: str, spans: Sequence[Span], same: Any) -> bool:
        tokens, learn = found
        return all(
            first > 0 and same(self._decode(tokens[first:last]), text[start:stop])
            for (first, last), (start, stop) in zip(learn, spans, strict=True)
        )

    def _encode(self, text: str) -> list[int]:
        """As chat templates are encoded: they write a beginning token themselves."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def _end(text: str, at: int, ends: Sequence[str]) -> int:
    """Behind the end token that follows `at`, blanks between them or not; else `at`."""
    token = at + len(text[at:]) - len(text[at:].lstrip())
    end = next((end for end in ends if text.startswith(end, token)), None)
    return at if end is None or text[:at].endswith(tuple(ends)) else token + len(end)


def _behind(asked: str, answer: str, place: int) -> str:
    """What of an answer was written behind the generation prompt, which may open the thinking."""
    if asked.rstrip().endswith(CLOSE) and answer.lstrip().startswith(OPEN):
        raise ValueError(
            f"turn {place + 1}: expected no reasoning, as the generation prompt ends with {CLOSE}, "
            "got some; switch it on with template arguments, or drop the reasoning"
        )
    if not asked.rstrip().endswith(OPEN):
        return answer
    if CLOSE not in answer:
        raise ValueError(
            f"turn {place + 1}: expected reasoning, as the generation prompt opens {OPEN}, got "
            "none; switch it off with template arguments, or give answers with their reasoning"
        )
    if not answer.lstrip().startswith(OPEN):
        return answer
    blank = asked[len(asked.rstrip()) :]
    return answer.lstrip().removeprefix(OPEN).removeprefix(blank)


def _same(found: str, text: str) -> bool:
    return found == text


def _same_words(found: str, text: str) -> bool:
    """But for blanks, which some decoders also make of the ▁ in a special token's name."""
    return _letters(found) == _letters(text)


def _letters(text: str) -> str:
    return "".join(text.replace("▁", " ").split())


def _longest_first(texts: Sequence[str]) -> list[str]:
    return sorted(set(texts), key=len, reverse=True)


# Conversations whose answers the target wrote earlier, as a folder that training reads.
#
# The folder is like one of `draftheads distill`, and its manifest says that the answers were
# imported: that this target wrote them is the user's word, nothing here has checked it.


BATCH = 64


def import_answers(
    side: TextSide,
    conversations: Sequence[Messages],
    out: Path,
    *,
    template_args: dict[str, Any] | None = None,
    source: str = "",
) -> Counts:
    """Write the conversations of `read_conversations` to `out`, a folder for training.

    A conversation that the chat template cannot show is skipped, with its reason. Raises ValueError
    where none can be shown, and for a folder that is there already.
    """
    if (out / MANIFEST).is_file():
        raise ValueError(
            f"{out}: expected a new folder, found one with a {MANIFEST}; choose another"
        )
    spans = Spans(side.tokenizer, side.eos_ids, template_args)
    lines: list[Record] = []
    methods: Counter[str] = Counter()
    for messages in conversations:
        found, names = _records(spans, messages)
        lines += [{"id": place, **record} for place, record in enumerate(found, start=len(lines))]
        methods.update(names)
    counts = Counts()
    for line in lines:
        counts.add(line)
    if not counts.done:
        reason = counts.reasons.most_common(1)[0][0] if counts.reasons else "there are none"
        raise ValueError(f"{source}: expected conversations to learn from, got none; {reason}")
    manifest = _manifest(side, lines, template_args or {}, source)
    manifest["imported"] = {"verified": False, "found_by": dict(methods)}
    manifest["counts"] = counts.numbers()
    _write(out, lines, manifest)
    return counts


def _records(spans: Spans, messages: Messages) -> tuple[list[Record], list[str]]:
    """Lines without their ids, and how the answers in them were found."""
    try:
        documents = spans.documents(messages)
    except ValueError as error:  # the next conversation may be fine
        return [{"skipped": str(error)}], []
    records = [
        {
            "tokens": document.tokens,
            "learn": [list(span) for span in document.learn],
            "turns": len(document.learn),
            "finish": "eos" if document.ended else "length",
        }
        for document in documents
    ]
    return records, [document.method for document in documents]


def _manifest(
    side: TextSide, lines: Sequence[Record], template_args: dict[str, Any], source: str
) -> dict[str, Any]:
    packages = ("draftheads", "transformers", "tokenizers")
    return {
        "format": FORMAT,
        "target": {
            "name": side.name,
            "revision": side.revision,
            "fingerprint": None,
            "dtype": None,
        },
        "sampling": {"template_args": template_args},
        "seed": None,
        "batch_size": BATCH,
        "prompts": {
            "source": source,
            "count": len(lines),
            "sha256": hashlib.sha256(json.dumps(lines).encode()).hexdigest(),
        },
        "complete": True,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def _write(out: Path, lines: Sequence[Record], manifest: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with Journal(out, 0, 1) as journal:
        journal.cut(0)  # of a run that was killed before its manifest
        journal.append(lines)
    write_manifest(out, manifest)  # last: it says that all is there
