"""Where in a rendered conversation its answers stand, in characters.

Chat templates hide what an assistant wrote in many ways: they trim it, put an empty thinking block
before it, drop the thinking of earlier turns, or end a turn with text that no model writes.
`spans` looks in this order:

    generation   the template says it: {% generation %}
    prefix       the conversation up to an answer, rendered with a generation prompt, is a prefix
    markers      the text between the answers does not depend on them: rendered with stand-ins

What is found reads like the message, blanks at its edges apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

Message = dict[str, Any]
Span = tuple[int, int]

STAND_IN = "DRAFTHEADS-ANSWER-{}-STANDS-HERE"
OPEN, CLOSE = "<think>", "</think>"
EMPTY = re.compile(rf"\A\s*{OPEN}\s*{CLOSE}\s*")
GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


@dataclass(frozen=True)
class Said:
    """A message that the assistant wrote.

    place: among the messages. text: its content, without blanks at the edges. calls: names of the
    tools that it calls.
    """

    place: int
    text: str
    calls: tuple[str, ...] = ()


def said(messages: Sequence[Message]) -> list[Said]:
    """What the assistant wrote; silence is left out."""
    found = [
        Said(place, content(message).strip(), _called(message))
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    return [one for one in found if one.text or one.calls]


def content(message: Message) -> str:
    """A message's text, "" where it has none."""
    return message.get("content") or ""


class Written:
    """A conversation as a chat template renders it. template_args: its extra variables.

    Rendering raises ValueError for messages that the template refuses.
    """

    def __init__(
        self, tokenizer: Any, messages: Sequence[Message], template_args: dict[str, Any]
    ) -> None:
        self._tokenizer = tokenizer
        self._template_args = template_args
        self._messages = list(messages)
        self.said = said(messages)
        self.text = self.render(len(messages))

    def spans(self) -> tuple[str, list[Span]] | None:
        """(how they were found, where the answers stand without their end tokens), or None."""
        ways = (
            ("generation", self._by_generation),
            ("prefix", self._by_prefix),
            ("markers", self._by_markers),
        )
        found = ((name, find()) for name, find in ways)
        return next(((name, spans) for name, spans in found if spans), None)

    def asked(self, answer: Said) -> str:
        """The prompt that this answer was written behind.

        That of a template without generation prompts is what stands before the answer.
        """
        asked = self.render(answer.place, ask=True)
        if asked != self.render(answer.place):
            return asked
        around = self.around([answer], answer.place + 1)
        return around[0] if around else asked

    def called(self, answer: Said) -> Span | None:
        """Where tool calls stand when nothing follows them: behind their prompt, an empty thinking
        block left out.
        """
        asked, whole = self.asked(answer), self.render(answer.place + 1)
        if not whole.startswith(asked):
            return None
        rest = whole[len(asked) :]
        start = len(whole) - len(EMPTY.sub("", rest, count=1))
        stands = all(part in whole[start:] for part in (answer.text, *answer.calls))
        return (start, len(whole.rstrip())) if stands else None

    def around(self, answers: Sequence[Said], count: int) -> list[str] | None:
        """Of the first `count` messages, the text before, between and behind these answers."""
        exchanged = self._messages[:count]
        for number, answer in enumerate(answers):
            stand_in = {"role": "assistant", "content": STAND_IN.format(number)}
            exchanged[answer.place] = stand_in
        parts = [self._render(exchanged, ask=False)]
        for number in range(len(answers)):
            halves = parts.pop().split(STAND_IN.format(number))
            if len(halves) != 2:
                return None
            parts += halves
        return parts

    def render(self, count: int, *, ask: bool = False) -> str:
        """The first `count` messages. ask: with a generation prompt behind them."""
        return self._render(self._messages[:count], ask=ask)

    def _by_generation(self) -> list[Span] | None:
        """Marked by the template, less what the generation prompt already says."""
        if not self._tokenizer.is_fast or not GENERATION.search(self._tokenizer.chat_template):
            return None
        marked = self._tokenizer.apply_chat_template(
            self._messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._template_args,
        )
        encoded = self._tokenizer(
            self.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        runs = _runs(marked["assistant_masks"], encoded["offset_mapping"])
        if len(runs) != len(self.said):
            return None
        spans = []
        for (start, stop), answer in zip(runs, self.said, strict=True):
            asked = self.render(answer.place, ask=True)
            start = max(start, len(asked)) if self.text.startswith(asked) else start
            spans.append(self._within(start, stop, answer))
        return _all(spans)

    def _by_prefix(self) -> list[Span] | None:
        """Behind the generation prompts, where the text begins with them."""
        return _all([self._prefixed(answer) for answer in self.said])

    def _prefixed(self, answer: Said) -> Span | None:
        asked = self.render(answer.place, ask=True)
        whole = self.render(answer.place + 1) if answer.calls else self.text
        if not (self.text.startswith(asked) and self.text.startswith(whole)):
            return None
        return self._within(len(asked), len(whole), answer)

    def _by_markers(self) -> list[Span] | None:
        """Between the parts of the text that stay when contents are exchanged.

        Calls are not exchanged; they stand behind their generation prompts.
        """
        exchanged = [answer for answer in self.said if not answer.calls]
        parts = self.around(exchanged, len(self._messages))
        if parts is None or not self.text.startswith(parts[0]):
            return None
        at = len(parts[0])
        spans: list[Span | None] = [self._prefixed(one) for one in self.said if one.calls]
        for answer, behind in zip(exchanged, parts[1:], strict=True):
            whole = content(self._messages[answer.place])
            shown = (whole, whole.lstrip(), whole.rstrip(), whole.strip())
            fits = [text for text in shown if self.text.startswith(text + behind, at)]
            if not fits:
                return None
            spans.append((at, at + len(fits[0])))
            at += len(fits[0]) + len(behind)
        found = _all(spans)
        return sorted(found) if found and at == len(self.text) else None

    def _within(self, start: int, stop: int, answer: Said) -> Span | None:
        """The answer and the blanks before it, at the start of a part of the text.

        With tool calls the whole part is the assistant's, less the blanks at its end.
        """
        part = self.text[start:stop]
        if answer.calls:
            stands = answer.text in part and all(name in part for name in answer.calls)
            return (start, start + len(part.rstrip())) if stands else None
        if not part.lstrip().startswith(answer.text):
            return None
        at = start + len(part) - len(part.lstrip())
        lead = self.text[start:at]
        whole = content(self._messages[answer.place])
        own = whole[: len(whole) - len(whole.lstrip())]
        if not lead.endswith(own):
            own = ""
        if lead.lstrip("\n") not in ("", " "):  # indentation of the template's source
            start = at - len(own)
        return start, at + len(answer.text)

    def _render(self, messages: Sequence[Message], *, ask: bool) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask, **self._template_args
            )
        except (TemplateError, TypeError) as error:  # raised by the template: roles, or no tools
            raise ValueError(f"chat template refuses the messages: {error}") from error
        return rendered


def _called(message: Message) -> tuple[str, ...]:
    calls = message.get("tool_calls") or ()
    return tuple(call.get("function", call)["name"] for call in calls)


def _runs(mask: Sequence[int], offsets: Sequence[Span]) -> list[Span]:
    """Character spans of the runs of ones."""
    runs: list[Span] = []
    for place, (one, (start, stop)) in enumerate(zip(mask, offsets, strict=True)):
        if one and place and mask[place - 1]:
            runs[-1] = (runs[-1][0], stop)
        elif one:
            runs.append((start, stop))
    return runs


def _all(spans: Sequence[Span | None]) -> list[Span] | None:
    found = [span for span in spans if span is not None]
    return found if len(found) == len(spans) else None
