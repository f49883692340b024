"""The parts of an answer: reasoning, text, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftheads.infer.prompt import CLOSE, OPEN
from draftheads.infer.serve.calls import CallForm, Schemas
from draftheads.infer.serve.protocol import Json
from draftheads.infer.text import begun


@dataclass(frozen=True)
class AnswerForm:
    """How an answer is taken apart while it grows. Calls are told at its end, as nobody knows
    before whether they are whole.

    start: OPEN where the prompt has opened the reasoning. has_reasoning: else it stays in the text,
    as calls do without their form. most: calls to tell.
    """

    start: str = ""
    has_reasoning: bool = False
    calls: CallForm | None = None
    schemas: Schemas = field(default_factory=dict)
    most: int | None = None

    def parts(self, text: str, is_last: bool) -> Json:
        """Of the beginning of an answer, what will stay; of all of it if is_last. In the names of
        messages.
        """
        reasoning = ""
        calls: list[Json] = []
        if self.has_reasoning:
            text = self.start + text
            beginning = text.lstrip()
            if beginning.startswith(OPEN):
                reasoning, closed, text = beginning.removeprefix(OPEN).partition(CLOSE)
                text = text.lstrip()
                if not closed and not is_last:
                    reasoning = _before(reasoning, CLOSE)
            elif OPEN.startswith(beginning) and not is_last:
                text = ""
        if self.calls is not None:
            text, rest = self.calls.divide(text)
            if is_last:
                calls, left = self.calls.read_all(rest, self.schemas)
                text = text.rstrip() + left if calls else text + rest
            else:
                text = _before(text, self.calls.opening)
        return {
            "reasoning_content": reasoning.strip(),
            "content": text,
            "tool_calls": calls[: self.most],
        }


def _before(text: str, mark: str) -> str:
    """A text without blanks at its end, and without what may be the beginning of a mark."""
    return text[: len(text) - begun(text, mark)].rstrip()
