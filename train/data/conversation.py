"""A prompt while the target answers it: the token ids so far, and the next question.

Answers keep the ids that the target generated. A later turn adds only the text that the chat
template puts between an answer and the next generation prompt, which is found by rendering the
conversation with a placeholder for the answer. If the template rewrites earlier turns (drops their
reasoning, inserts an empty reasoning block), no such text exists: the document is closed, and the
next answer opens another one, after the history as the template renders it now. So the target sees
in training what it sees in a chat, and every answer is learned once.

Tool calls and results of a prompt are context; the target answers after the last result.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from draftheads.heads.placement import (
    ASKS_FOR_CODE,
    OWN_CODE,
    end_ids,
    location,
    read_config,
    read_generation_config,
)
from draftheads.infer.prompt import PromptRenderer
from draftheads.infer.text import REPLACEMENT
from draftheads.train.data.answers import Record
from draftheads.train.data.prompts import Message, Prompt

OPEN, CLOSE = "<think>", "</think>"
PLACEHOLDER = "DRAFTHEADS-ANSWER-PLACEHOLDER"
TOO_LONG = "prompt does not fit into the target's context"
ONLY_REASONING = "answers consist of reasoning only, which is not learned"
LOSSY = "answer's text cannot be tokenized without loss"

Turn = list[Message]
"""The messages before one answer of the target, since its previous answer."""


@dataclass(frozen=True)
class TextSide:
    """The tokenizer of a target. eos_ids: tokens that end its answers."""

    name: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    revision: str | None = None

    @classmethod
    def load(cls, name: str, revision: str | None = None) -> TextSide:
        """Read from a folder or a Hub id. Raises ValueError if no tokenizer is found."""
        folder = Path(os.path.expanduser(name))
        path = str(folder) if folder.exists() else name
        try:
            place, file = location(path)
            tokenizer = AutoTokenizer.from_pretrained(
                place, revision=revision, trust_remote_code=False, **file
            )
        except Exception as error:  # a damaged file raises errors of many types
            if ASKS_FOR_CODE in str(error):
                raise ValueError(f"target {name}: {OWN_CODE}") from error
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{name}: expected a target's folder or Hub id with a tokenizer, found none that "
                f"can be read ({reason}); give one with --target, or download it again"
            ) from error
        eos = _eos_token_id(path, revision)
        eos_ids = end_ids(tokenizer.eos_token_id if eos in (None, []) else eos, name)
        return cls(name, tokenizer, eos_ids, revision)


def _eos_token_id(path: str, revision: str | None) -> Any:
    """That of generation_config.json, else of config.json; None if neither has one."""
    generation = read_generation_config(path, revision)
    if generation is not None and generation.eos_token_id is not None:
        return generation.eos_token_id
    try:
        return getattr(read_config(path, revision), "eos_token_id", None)
    except (OSError, ValueError):
        if generation is not None:
            raise  # other end tokens would be learned without it
        return None  # the folder may only have a tokenizer


class Renderer(PromptRenderer):
    """Also renders what comes between the answers of a conversation, and answers given as text."""

    def opening(self, prompt: Prompt, turn: Turn) -> list[int]:
        """Token ids of a prompt's first turn, ready for the target's answer."""
        return self.prompt_ids(turn if prompt.text is None else prompt.text)

    def between(
        self, turns: Sequence[Turn], answers: Sequence[Message], first: int, lead: str, last_id: int
    ) -> list[int] | None:
        """Token ids between the last answer and the next; None if the template rewrites turns.

        turns: one more than answers. first: index of the first answer of the open document. lead:
        text of the template between the last generation prompt and its answer. last_id: last token
        of the last answer; if it is an end token, the template's own is left out.
        """
        if any(answer.get("tool_calls") for answer in answers[first:]):
            return None  # a template may refuse the results of calls that the placeholder replaces
        replaced = [*answers[:first], *[assistant(PLACEHOLDER)] * (len(answers) - first)]
        before = self.render(turns[:-1], replaced[:-1]) + lead
        whole = self.render(turns, replaced)
        rest = whole[len(before) :].lstrip()
        rendered = self.render(turns, answers)
        kept = all(answer["content"].strip() in rendered for answer in answers[first:])
        if not (kept and whole.startswith(before) and rest.startswith(PLACEHOLDER)):
            return None
        rest = rest.removeprefix(PLACEHOLDER)
        if last_id not in self.eos_ids:
            return self.encode(rest)
        end = self.tokenizer.decode([last_id])
        if rest.lstrip().startswith(end):
            rest = rest.lstrip().removeprefix(end)
        return self._encode_after(last_id, rest)

    def retokenize(self, text: str, before: Sequence[int]) -> list[int] | None:
        """Token ids of a text that follows the ids `before`; None if no ids decode to it there."""
        if REPLACEMENT in text:  # bytes were lost
            return None
        tail = list(before[-4:])  # enough for decoders that join a token with its neighbours
        start, newline = self.decode(tail), self.encode("\n")
        after_end = self._encode_after(self.eos_ids[0], text) if self.eos_ids else self.encode(text)
        # tokenizers that put a space before every text, even after end tokens, omit it inside one
        inside = self.encode("\n" + text)[len(newline) :]
        for ids in (after_end, inside):
            if self.decode(tail + ids) == start + text:
                return ids
        return None

    def reasoning_length(self, ids: list[int], before: Sequence[int]) -> int:
        """Number of tokens of an answer's opening reasoning, </think> included; all if unfinished.

        before: ids before the answer, which may end with <think>.
        """
        opened = self.decode(list(before[-16:])).rstrip().endswith(OPEN)
        if not (opened or self.decode(ids).lstrip().startswith(OPEN)):
            return 0
        lengths = range(len(ids))
        return bisect_left(lengths, True, key=lambda length: CLOSE in self.decode(ids[:length]))

    def render(self, turns: Sequence[Turn], answers: Sequence[Message], *, ask: bool = True) -> str:
        """The text of a conversation. ask: append the generation prompt.

        Raises TemplateError for messages that the template refuses.
        """
        messages: Turn = []
        for turn, answer in zip_longest(turns, answers):
            messages += turn
            if answer is not None:
                messages.append(answer)
        return self.text(messages, ask=ask)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _encode_after(self, end_id: int, text: str) -> list[int]:
        """Token ids of a text after an end token, where the rules for a text's first word do not
        apply.
        """
        ids = self.encode(self.tokenizer.decode([end_id]) + text)
        return ids[1:] if ids[:1] == [end_id] else self.encode(text)


def assistant(text: str) -> Message:
    """An answer as a message."""
    return {"role": "assistant", "content": text}


class Conversation:
    """A prompt, its answers so far, and why it ended.

    turns: default all of the prompt's. reasoning: "keep" learns the reasoning that opens answers,
    "drop" uses it as context only.
    """

    def __init__(
        self,
        prompt: Prompt,
        renderer: Renderer,
        context: int,
        turns: Sequence[Turn] | None = None,
        reasoning: Literal["keep", "drop"] = "keep",
    ) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []  # of the open document: what the target sees
        self.outcome: dict[str, str] = {}
        self.retokenized = 0  # answers that came as text without ids
        self.turns = turns_of(prompt) if turns is None else turns
        self.answers: list[Message] = []
        self._renderer = renderer
        self._context = context
        self._reasoning = reasoning
        self._first = 0  # first answer of the open document; earlier ones are its history
        self._lead = ""
        self._learn: list[tuple[int, int]] = []
        self._closed: list[Record] = []

    def ask(self) -> bool:
        """Append the next question, or open a document that ends with it; False if none is left
        or it cannot be asked.
        """
        asked, renderer = len(self.answers), self._renderer
        if self.outcome or asked == len(self.turns):
            return False
        turns, first = self.turns[: asked + 1], self._first
        try:
            if not asked:
                tokens = renderer.opening(self.prompt, turns[0])
            else:
                ids = renderer.between(turns, self.answers, first, self._lead, self.tokens[-1])
                tokens = self.tokens + (ids or [])
                if ids is None:
                    tokens, first = renderer.encode(renderer.render(turns, self.answers)), asked
        except TemplateError as error:  # templates refuse roles they do not know
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

    def answer(
        self,
        ids: list[int],
        message: Message | None = None,
        lead: str = "",
        lead_ids: Sequence[int] = (),
    ) -> None:
        """Append an answer of at least one token.

        message: the answer as later turns show it; default: its text. lead: text that the template
        inserts before the answer; context, not learned.
        """
        assert ids and self.tokens, "an answer has a token and position 0 is never learned"
        self._lead = lead
        self.tokens += lead_ids
        dropped = self._reasoning == "drop"
        skipped = self._renderer.reasoning_length(ids, self.tokens) if dropped else 0
        if skipped < len(ids):
            self._learn.append((len(self.tokens) + skipped, len(self.tokens) + len(ids)))
        self.tokens += ids
        text = self._renderer.decode(ids, skip_special_tokens=True)
        self.answers.append(message or assistant(text))

    def end(self, kind: str, reason: str) -> None:
        """Ask no more questions. kind: "skipped" or "failed"; "stopped" if there is an answer."""
        self.outcome = {"stopped" if self.answers else kind: reason}

    def record(self) -> Record:
        """The line to store."""
        documents = [*self._closed, *self._open()]
        record: Record = {"id": self.prompt.index}
        if not documents:
            return record | ({"skipped": ONLY_REASONING} if self.answers else self.outcome)
        record |= documents[0] if len(documents) == 1 else {"documents": documents}
        if self.retokenized:
            record["retokenized"] = self.retokenized
        return record | self.outcome

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


def turns_of(prompt: Prompt) -> list[Turn]:
    """The messages of a prompt, split where the target answers: after a user turn, or after the
    tool results that follow it.
    """
    turns: list[Turn] = [[]]
    messages = prompt.messages or ()
    for message, after in zip_longest(messages, messages[1:]):
        turns[-1].append(message)
        given = after is not None and after["role"] in ("assistant", "tool")  # the source's call
        if message["role"] in ("user", "tool") and not given:
            turns.append([])
    return turns[:-1] if prompt.messages else turns
