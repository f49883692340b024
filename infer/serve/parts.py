"""The parts of an answer: reasoning, text, calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftheads.infer.prompt import CLOSE, OPEN
from draftheads.infer.serve.calls import CallForm, Schemas
from draftheads.infer.serve.protocol import Json
from draftheads.infer.text import Marks, TextStream, begun

TAIL = 16
"""Tokens of a prompt that show whether it ends with the opening of reasoning."""


@dataclass(frozen=True)
class Parts:
    """What there is of each part."""

    reasoning: str = ""
    text: str = ""
    calls: list[Json] = field(default_factory=list)

    def since(self, before: Parts) -> Parts:
        """What has come since."""
        reasoning = self.reasoning[len(before.reasoning) :]
        return Parts(reasoning, self.text[len(before.text) :], self.calls[len(before.calls) :])

    def message(self) -> Json:
        """As choices have it."""
        message: Json = {"content": None if self.calls and not self.text else self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


@dataclass(frozen=True)
class AnswerForm:
    """How an answer is taken apart while it grows. Calls are known at its end alone, as nobody
    knows before whether they are whole.

    has_reasoning: else it stays in the text. is_opened: by the prompt. calls: None: they stay in
    the text, too.
    """

    has_reasoning: bool = False
    is_opened: bool = False
    calls: CallForm | None = None
    schemas: Schemas = field(default_factory=dict)
    most: int | None = None  # calls

    @property
    def has_marks(self) -> bool:
        """Whether calls have marks."""
        return self.calls is not None and bool(self.calls.opening)

    def parts(self, text: str, is_last: bool) -> Parts:
        """Of the beginning of an answer, what will stay; of all of it if is_last."""
        reasoning = ""
        beginning = text.lstrip()
        if self.has_reasoning and (self.is_opened or beginning.startswith(OPEN)):
            reasoning, closed, text = beginning.removeprefix(OPEN).partition(CLOSE)
            reasoning = reasoning if closed or is_last else _before(reasoning, CLOSE)
            reasoning = reasoning.strip()
            text = text.lstrip()
        elif self.has_reasoning and OPEN.startswith(beginning) and not is_last:
            text = ""
        if self.calls is None:
            return Parts(reasoning, text)
        place = self.calls.place(text)
        if place >= 0:
            calls, rest = self.calls.read_all(text[place:], self.schemas) if is_last else ([], "")
            before = text[:place] if rest == text[place:] else text[:place].rstrip()
            return Parts(reasoning, before + rest, calls[: self.most])
        return Parts(reasoning, text if is_last else _before(text, self.calls.opening))


def is_opened(tokenizer: Any, marks: Marks | None, prompt: Sequence[int]) -> bool:
    """Whether a prompt opens the reasoning of its answer."""
    stream = TextStream(tokenizer, marks=marks)
    return (stream.feed(prompt[-TAIL:]) + stream.flush()).rstrip().endswith(OPEN)


def _before(text: str, mark: str) -> str:
    """A text without blanks at its end, and without what may be the beginning of a mark."""
    return text[: len(text) - begun(text, mark)].rstrip()
