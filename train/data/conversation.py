"""One prompt while its target answers it: the token ids so far, and what is asked next.

The target's answers keep the ids that it wrote. A later turn adds only the text that the chat
template puts between the answer and the next generation prompt; it is found by rendering the
conversation with a sentinel in the answer's place. If a template rewrites earlier turns (drops
their thinking, inserts an empty thinking block), there is no such text: the document is closed,
and the next answer opens another one, after the history as the template now renders it. So the
target sees in training what it sees in a chat, and every answer is learned once.

Tool calls and results of a prompt are context; the target is asked after the last result.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2.exceptions import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from draftheads.infer.text import REPLACEMENT
from draftheads.train.data.answers import Record
from draftheads.train.data.prompts import Message, Prompt

if TYPE_CHECKING:
    from draftheads.heads.target import Target

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class TextSide:
    """The text side of a target. eos_ids: tokens that end its answers."""

    name: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    revision: str | None = None

    @classmethod
    def load(cls, name: str, revision: str | None = None) -> TextSide:
        """Read from a folder or a Hub id. Raises ValueError if no tokenizer is found."""
        path = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision)
            eos_ids = _eos_ids(path, revision) or [tokenizer.eos_token_id]
        except Exception as error:  # a damaged file raises errors of many types
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{name}: expected a target's folder or Hub id with a tokenizer, found none that "
                f"can be read ({reason}); give one with --target, or download it again"
            ) from error
        return cls(name, tokenizer, tuple(one for one in eos_ids if one is not None), revision)


def _eos_ids(path: str, revision: str | None) -> list[int]:
    for config in (GenerationConfig, AutoConfig):
        try:
            found = config.from_pretrained(path, revision=revision).eos_token_id
        except (OSError, ValueError, AttributeError):  # a folder may hold a tokenizer alone
            if (Path(path) / "generation_config.json").is_file():
                raise  # without it, other end tokens would be learned
            continue
        if found is not None:
            return list(found) if isinstance(found, list) else [found]
    return []


SENTINEL = "DRAFTHEADS-ANSWER-STANDS-HERE"
TOO_LONG = "prompt does not fit into the target's context"
ONLY_THOUGHTS = "answers are thoughts alone, which are not learned"
LOSSY = "answer's text does not come back from its tokens"

Turn = list[Message]
"""Messages up to where the target answers."""


class Renderer:
    """Turns messages into token ids for one target.

    Without a chat template the contents of messages are joined by newlines. template_args: extra
    variables of the template, e.g. {"enable_thinking": False}.
    """

    def __init__(self, side: Target | TextSide, template_args: dict[str, Any]) -> None:
        if side.tokenizer is None:
            raise ValueError(
                f"{side.name}: expected a tokenizer beside the model, found none; "
                "put tokenizer.json and tokenizer_config.json into its folder"
            )
        self.tokenizer = side.tokenizer
        self.eos_ids = side.eos_ids
        self.template_args = template_args

    def opening(self, prompt: Prompt, turn: Turn) -> list[int]:
        """Token ids of a first prompt, ready for the target's answer."""
        if prompt.text is None and self.tokenizer.chat_template:
            return self.encode(self.render([turn], []))
        text = self._join(turn) if prompt.text is None else prompt.text
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        bare = self.encode(text)
        closed = bare and ids[:-1][-len(bare) :] == bare and ids[-1] in self.eos_ids
        return ids[:-1] if closed else ids  # some tokenizers put an end token after each text

    def history(self, turns: Sequence[Turn], answers: Sequence[Message]) -> list[int]:
        """Token ids of a conversation as the template renders it now, ready for the next answer."""
        return self.encode(self.render(turns, answers))

    def between(
        self, turns: Sequence[Turn], answers: Sequence[Message], first: int, lead: str, last_id: int
    ) -> list[int] | None:
        """Token ids between the last answer and the next; None if the template rewrites turns.

        turns: one more than answers. first: the answers before this one are history already. lead:
        template text between the last generation prompt and its answer. last_id: of the last
        answer; where it is an end token, the template's own is left out.
        """
        if any(answer.get("tool_calls") for answer in answers[first:]):
            return None  # a template may refuse the results of calls that the sentinel replaces
        stand_ins = [*answers[:first], *[said(SENTINEL)] * (len(answers) - first)]
        before = self.render(turns[:-1], stand_ins[:-1]) + lead
        whole = self.render(turns, stand_ins)
        rest = whole[len(before) :].lstrip()
        rendered = self.render(turns, answers)
        kept = all(answer["content"].strip() in rendered for answer in answers[first:])
        if not (kept and whole.startswith(before) and rest.startswith(SENTINEL)):
            return None
        rest = rest.removeprefix(SENTINEL)
        if last_id not in self.eos_ids:
            return self.encode(rest)
        end = self.tokenizer.decode([last_id])
        if rest.lstrip().startswith(end):
            rest = rest.lstrip().removeprefix(end)
        return self._encode_after(last_id, rest)

    def written(self, text: str, before: Sequence[int]) -> list[int] | None:
        """Token ids of a text after the ids `before`; None if none decode to that text there."""
        if REPLACEMENT in text:  # bytes were lost
            return None
        tail = list(before[-4:])  # enough for decoders that join a token with its neighbours
        start, newline = self.decode(tail), self.encode("\n")
        after_end = self._encode_after(self.eos_ids[0], text) if self.eos_ids else self.encode(text)
        # tokenizers that put a blank before each text, end tokens or not, leave it out inside one
        inside = self.encode("\n" + text)[len(newline) :]
        for ids in (after_end, inside):
            if self.decode(tail + ids) == start + text:
                return ids
        return None

    def thought(self, ids: list[int], before: Sequence[int]) -> int:
        """How many of an answer's first ids are its thinking, </think> included; all of them if it
        does not end. before: ids before the answer, which may open the thinking.
        """
        opened = self.decode(list(before[-16:])).rstrip().endswith(OPEN)
        if not (opened or self.decode(ids).lstrip().startswith(OPEN)):
            return 0
        lengths = range(len(ids))
        return bisect_left(lengths, True, key=lambda length: CLOSE in self.decode(ids[:length]))

    def render(self, turns: Sequence[Turn], answers: Sequence[Message], *, ask: bool = True) -> str:
        """The text of a conversation. ask: with a generation prompt at its end.

        Raises TemplateError for messages that the template refuses.
        """
        messages: Turn = []
        for turn, answer in zip_longest(turns, answers):
            messages += turn
            if answer is not None:
                messages.append(answer)
        if not self.tokenizer.chat_template:
            return self._join(messages)
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=ask, **self.template_args
            )
        except TypeError as error:  # raised by templates that loop over the tools they expect
            raise TemplateError(str(error)) from error
        return rendered

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, no special tokens added."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        text: str = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text

    def _encode_after(self, end_id: int, text: str) -> list[int]:
        """Token ids of a text after an end token, where tokenizers' rules for the first word of a
        text do not apply.
        """
        ids = self.encode(self.tokenizer.decode([end_id]) + text)
        return ids[1:] if ids[:1] == [end_id] else self.encode(text)

    @staticmethod
    def _join(messages: Turn) -> str:
        return "\n".join(message["content"] for message in messages)


def said(text: str) -> Message:
    """An answer as a message."""
    return {"role": "assistant", "content": text}


class Conversation:
    """A prompt, its answers so far, and why it ended.

    turns: what is asked, one after the other; default all of the prompt's. reasoning: "keep" learns
    the thinking that opens answers, "drop" leaves it where the target wrote it, as context.
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
        self.tokens: list[int] = []  # of the open document: what the target sees when it is asked
        self.outcome: dict[str, str] = {}
        self.retokenized = 0  # answers that were known as text alone
        self.turns = turns_of(prompt) if turns is None else turns
        self.answers: list[Message] = []
        self._renderer = renderer
        self._context = context
        self._reasoning = reasoning
        self._first = 0  # first answer of the open document; earlier ones are history there
        self._lead = ""
        self._learn: list[tuple[int, int]] = []
        self._closed: list[Record] = []

    def ask(self) -> bool:
        """Put the next question after the tokens, or open a document that asks it; False if none is
        left or it cannot be asked.
        """
        asked = len(self.answers)
        if self.outcome or asked == len(self.turns):
            return False
        try:
            tokens, first = self._asked(self.turns[: asked + 1])
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
            self.tokens, self._lead = tokens, ""
        return not self.outcome

    def lead(self, text: str, ids: list[int]) -> None:
        """Put text that the template writes before the answer after the question, as context."""
        self._lead = text
        self.tokens += ids

    def answer(self, ids: list[int], message: Message | None = None) -> None:
        """Put an answer, at least one token, after the question.

        message: the answer as later turns show it, default its text.
        """
        assert ids and self.tokens, "an answer has a token and position 0 is never learned"
        dropped = self._reasoning == "drop"
        thought = self._renderer.thought(ids, self.tokens) if dropped else 0
        if thought < len(ids):
            self._learn.append((len(self.tokens) + thought, len(self.tokens) + len(ids)))
        self.tokens += ids
        text = self._renderer.tokenizer.decode(ids, skip_special_tokens=True)
        self.answers.append(message or said(text))

    def end(self, kind: str, reason: str) -> None:
        """Ask nothing more. kind: "skipped" or "failed"; "stopped" if there is an answer."""
        self.outcome = {"stopped" if self.answers else kind: reason}

    def record(self) -> Record:
        """The line that is stored."""
        documents = [*self._closed, *self._open()]
        record: Record = {"id": self.prompt.index}
        if not documents:
            return record | ({"skipped": ONLY_THOUGHTS} if self.answers else self.outcome)
        record |= documents[0] if len(documents) == 1 else {"documents": documents}
        if self.retokenized:
            record["retokenized"] = self.retokenized
        return record | self.outcome

    def _asked(self, turns: Sequence[Turn]) -> tuple[list[int], int]:
        """What the target is to see, and the first answer in it that is not history."""
        if not self.answers:
            return self._renderer.opening(self.prompt, turns[0]), 0
        last_id = self.tokens[-1]
        ids = self._renderer.between(turns, self.answers, self._first, self._lead, last_id)
        if ids is None:
            return self._renderer.history(turns, self.answers), len(self.answers)
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


def turns_of(prompt: Prompt) -> list[Turn]:
    """Messages cut where the target answers: after each user's, or the tool results for it."""
    turns: list[Turn] = [[]]
    messages = prompt.messages or ()
    for message, after in zip_longest(messages, messages[1:]):
        turns[-1].append(message)
        given = after is not None and after["role"] in ("assistant", "tool")  # the source's call
        if message["role"] in ("user", "tool") and not given:
            turns.append([])
    return turns[:-1] if prompt.messages else turns
