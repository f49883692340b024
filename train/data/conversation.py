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
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from jinja2.exceptions import TemplateError

from draftheads.infer.text import REPLACEMENT
from draftheads.train.data.prompts import Prompt

if TYPE_CHECKING:
    from draftheads.heads.target import Target
    from draftheads.train.data.distill import Answerer
    from draftheads.train.data.tokenizer import TextSide

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


# One prompt while the target answers it: the token ids so far, and what is asked next.
#
# The target's answers stay the ids it produced. What a later turn adds is only the text that the
# chat template puts between the answer and the next generation prompt; it is found by rendering the
# conversation with a sentinel in the answer's place. A template that rewrites earlier turns (drops
# their thinking, or inserts an empty thinking block) leaves no such text. The document is then
# closed, and the next answer stands in one of its own, behind the history as the template renders
# it now: what the target sees in a chat. Every answer is learned once, where it was written.
#
# Calls of tools and their results, where a prompt has them, are the source's and not learned; the
# target is asked behind the last result.


SENTINEL = "DRAFTHEADS-ANSWER-STANDS-HERE"
TOO_LONG = "prompt does not fit into the target's context"
ONLY_THOUGHTS = "answers are thoughts alone, which are not learned"
LOSSY = "answer's text does not come back from its tokens"
Turn = list[dict[str, Any]]
Record = dict[str, Any]


class Renderer:
    """Turns messages into token ids for one target.

    With a chat template the messages go through it; without one their contents are joined by
    newlines. template_args: extra variables of the template, e.g. {"enable_thinking": False}.
    """

    def __init__(self, target: Target | Answerer | TextSide, template_args: dict[str, Any]) -> None:
        if target.tokenizer is None:
            raise ValueError(
                f"{target.name}: expected a tokenizer beside the model, found none; "
                "put tokenizer.json and tokenizer_config.json into its folder"
            )
        self.tokenizer = target.tokenizer
        self.eos_ids = target.eos_ids
        self.template_args = template_args

    def opening(self, prompt: Prompt, turn: Turn) -> list[int]:
        """Token ids of a first prompt, ready for the target to go on."""
        if prompt.text is None and self.tokenizer.chat_template:
            return self._encode(self._render([turn], []))
        text = self._join(turn) if prompt.text is None else prompt.text
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        bare = self._encode(text)
        closed = bare and ids[:-1][-len(bare) :] == bare and ids[-1] in self.eos_ids
        return ids[:-1] if closed else ids  # some tokenizers put an end token behind each text

    def between(
        self, turns: Sequence[Turn], answers: Sequence[list[int]], first: int
    ) -> list[int] | None:
        """Token ids between the last answer and the next; None if the template rewrites turns.

        turns: one more than answers. first: the answers before this one are history already. The
        end-of-turn text is left out where the target already wrote it.
        """
        texts = self._texts(answers)
        stand_ins = [*texts[:first], *[SENTINEL] * (len(answers) - first)]
        before = self._render(turns[:-1], stand_ins[:-1])
        whole = self._render(turns, stand_ins)
        rest = whole[len(before) :].lstrip()
        rendered = self._render(turns, texts)
        kept = all(text.strip() in rendered for text in texts[first:])
        if not (kept and whole.startswith(before) and rest.startswith(SENTINEL)):
            return None
        return self._after(rest.removeprefix(SENTINEL), answers[-1][-1])

    def history(self, turns: Sequence[Turn], answers: Sequence[list[int]]) -> list[int]:
        """Token ids of the conversation as the template renders it now, ready for the next answer:
        what a chat sends. turns: one more than answers.
        """
        return self._encode(self._render(turns, self._texts(answers)))

    def thought(self, ids: list[int], before: Sequence[int]) -> int:
        """How many of an answer's first ids are a thought, its </think> included; all of them when
        it does not end. before: ids that the answer stands behind; they may open the thought.
        """
        opened = self._decode(list(before[-16:])).rstrip().endswith(OPEN)
        text = self._decode(ids)
        if not (opened or text.lstrip().startswith(OPEN)):
            return 0
        lengths = range(len(ids))
        return bisect_left(lengths, True, key=lambda length: CLOSE in self._decode(ids[:length]))

    def written(self, text: str, before: Sequence[int]) -> list[int] | None:
        """Token ids of an answer's text behind the ids `before`; None if none decode to just this
        text there.

        A replacement character stands for bytes that are lost, so it never comes back either.
        """
        if REPLACEMENT in text:
            return None
        tail = list(before[-4:])  # enough for decoders that join a token with its neighbours
        start, newline = self._decode(tail), self._encode("\n")
        behind_end = self._behind(self.eos_ids[0], text) if self.eos_ids else self._encode(text)
        # tokenizers that put a blank before each text, end tokens or not, leave it out inside one
        inside = self._encode("\n" + text)[len(newline) :]
        for ids in (behind_end, inside):
            if self._decode(tail + ids) == start + text:
                return ids
        return None

    def _texts(self, answers: Sequence[list[int]]) -> list[str]:
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def _after(self, text: str, last_id: int) -> list[int]:
        if last_id not in self.eos_ids:
            return self._encode(text)
        end = self.tokenizer.decode([last_id])
        if text.lstrip().startswith(end):
            text = text.lstrip().removeprefix(end)
        return self._behind(last_id, text)

    def _behind(self, end_id: int, text: str) -> list[int]:
        """Token ids of a text behind an end token, so that tokenizers' rules for the first word of
        a text do not apply.
        """
        ids = self._encode(self.tokenizer.decode([end_id]) + text)
        return ids[1:] if ids[:1] == [end_id] else self._encode(text)

    def _render(self, turns: Sequence[Turn], answers: Sequence[str]) -> str:
        messages: Turn = []
        for turn, answer in zip_longest(turns, answers):
            messages += turn
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        if not self.tokenizer.chat_template:
            return self._join(messages)
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.template_args
            )
        except TypeError as error:  # raised by templates that loop over the tools they expect
            raise TemplateError(str(error)) from error
        return rendered

    def _encode(self, text: str) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return list(encoded["input_ids"])

    @staticmethod
    def _join(messages: Turn) -> str:
        return "\n".join(message["content"] for message in messages)


class Conversation:
    """A prompt, its answers so far, and why it ended.

    tokens: of the document that is open, what the target sees when it is asked. answered: answers
    so far. retokenized: of them, those known as text alone. reasoning: "keep" learns the thoughts
    that open answers, "drop" leaves them where the target wrote them, as context for what follows.
    """

    def __init__(
        self,
        prompt: Prompt,
        renderer: Renderer,
        context: int,
        max_turns: int | None,
        reasoning: Literal["keep", "drop"] = "keep",
    ) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.outcome: dict[str, str] = {}
        self.retokenized = 0
        self._renderer = renderer
        self._context = context
        self._turns = _turns(prompt)[:max_turns]
        self._reasoning = reasoning
        self._answers: list[list[int]] = []
        self._learn: list[tuple[int, int]] = []
        self._first = 0  # answer in the open document; those before it stand there as history
        self._closed: list[Record] = []

    @property
    def answered(self) -> int:
        """Answers so far."""
        return len(self._answers)

    def ask(self) -> bool:
        """Put the next question behind the tokens, or open a document that asks it; False when none
        is left or it cannot be.
        """
        if self.outcome or self.answered == len(self._turns):
            return False
        try:
            tokens, first = self._asked()
        except (
            TemplateError
        ) as error:  # templates refuse roles they do not know; other prompts are fine
            self.end("skipped", f"chat template refuses the messages: {error}")
            return False
        if not tokens:
            self.end("skipped", "prompt has no tokens")
        elif len(tokens) + 1 > self._context:
            self.end("skipped", TOO_LONG)
        else:
            if first != self._first:
                self._closed += self._open()
                self._learn, self._first = [], first
            self.tokens = tokens
        return not self.outcome

    def answer(self, ids: list[int]) -> None:
        """Put the target's answer, at least one token, behind the question."""
        assert ids and self.tokens, "an answer has a token and position 0 is never learned"
        dropped = self._reasoning == "drop"
        thought = self._renderer.thought(ids, self.tokens) if dropped else 0
        if thought < len(ids):
            self._learn.append((len(self.tokens) + thought, len(self.tokens) + len(ids)))
        self.tokens += ids
        self._answers.append(ids)

    def end(self, kind: str, reason: str) -> None:
        """Ask nothing more. kind: "skipped" or "failed"; "stopped" once there is an answer."""
        self.outcome = {"stopped" if self._answers else kind: reason}

    def record(self) -> Record:
        """The line that is stored."""
        documents = [*self._closed, *self._open()]
        if not documents:
            outcome = {"skipped": ONLY_THOUGHTS} if self._answers else self.outcome
            return {"id": self.prompt.index, **outcome}
        return {
            "id": self.prompt.index,
            **(documents[0] if len(documents) == 1 else {"documents": documents}),
            **({"retokenized": self.retokenized} if self.retokenized else {}),
            **self.outcome,
        }

    def _asked(self) -> tuple[list[int], int]:
        """What the target is to see, and the first answer that stands there as it was written."""
        turns = self._turns[: self.answered + 1]
        if not self._answers:
            return self._renderer.opening(self.prompt, turns[0]), 0
        ids = self._renderer.between(turns, self._answers, self._first)
        if ids is None:
            return self._renderer.history(turns, self._answers), self.answered
        return self.tokens + ids, self._first

    def _open(self) -> list[Record]:
        """The open document, if it has something to learn."""
        if not self._learn:
            return []
        tokens = self.tokens[: self._learn[-1][1]]  # a question without its answer teaches nothing
        document = {
            "tokens": tokens,
            "learn": [list(span) for span in self._learn],
            "turns": len(self._learn),
            "finish": "eos" if tokens[-1] in self._renderer.eos_ids else "length",
        }
        return [document]


def _turns(prompt: Prompt) -> list[Turn]:
    """Messages cut where the target answers: behind each user's, or the tool results for it."""
    turns: list[Turn] = [[]]
    messages = prompt.messages or ()
    for message, after in zip_longest(messages, messages[1:]):
        turns[-1].append(message)
        given = after is not None and after["role"] in ("assistant", "tool")  # the source's call
        if message["role"] in ("user", "tool") and not given:
            turns.append([])
    return turns[:-1] if prompt.messages else turns
