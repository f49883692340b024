"""The parts of an answer: reasoning, text, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

from draftheads.infer.prompt import CLOSE, OPEN
from draftheads.infer.serve.calls import CallForm, Schemas
from draftheads.infer.serve.protocol import Json
from draftheads.infer.text import CALL_ID, begun, tool_call

REASONING_KEYS = ("reasoning_content", "reasoning")
"""Keys for reasoning of DeepSeek and of vLLM; clients read one of them."""


@dataclass(frozen=True)
class AnswerForm:
    """Splits an answer into its parts while it grows. Calls are only returned at its end, because
    it is unknown before whether they are complete, except for the one call of a grammar: it grows
    with the answer, and its arguments are the text that was written.

    start: OPEN if the prompt has opened the reasoning. has_reasoning: if not, reasoning stays in
    the text, and so do calls without their form. most: the most calls to return.
    is_constrained: if a grammar lets the answer be one call.
    """

    start: str = ""
    has_reasoning: bool = False
    calls: CallForm | None = None
    schemas: Schemas = field(default_factory=dict)
    most: int | None = None
    is_constrained: bool = False
    call_id: str = field(default_factory=lambda: uuid4().hex[: len(CALL_ID)])

    def parts(self, text: str, finish: str | None) -> Json:
        """The parts of an answer, under the names of messages. Of the beginning of an answer, only
        text that is final; of a whole one, which has a `finish`, everything except a mark or a call
        that is cut by "length".
        """
        reasoning = ""
        calls: list[Json] = []
        if self.has_reasoning:
            text = self.start + text
            beginning = text.lstrip()
            if beginning.startswith(OPEN):
                reasoning, closed, text = beginning.removeprefix(OPEN).partition(CLOSE)
                text = text.lstrip()
                if not closed and finish != "stop":
                    reasoning = reasoning[: len(reasoning) - begun(reasoning, CLOSE)]
            elif OPEN.startswith(beginning) and finish != "stop":
                text = ""
        if self.calls is not None:
            text, rest = self.calls.divide(text)
            text = self.calls.outside(text, finish == "stop" or bool(rest))
            call = self.calls.partial_call(rest, self.schemas) if self.is_constrained else None
            if call is not None:
                calls = [{"index": 0, **tool_call(*call, self.call_id)}]
                text = text.rstrip()
            elif finish:
                calls, left = self.calls.read_all(rest, self.schemas, finish == "length")
                text = text + rest if left == rest else text.rstrip() + left
            else:
                text = text.rstrip()
        return {
            **dict.fromkeys(REASONING_KEYS, reasoning.strip()),
            "content": text,
            "tool_calls": calls[: self.most],
        }
