"""Turns prompts into token ids, in the same way for distillation, benchmarks, chat and server."""

from __future__ import annotations

import ctypes
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any, Literal, Protocol

import psutil
from jinja2.exceptions import TemplateError

from draftheads.heads.target.load import template_variables
from draftheads.infer.text import THOUGHTS, Marks, TextStream, assistant, tool_call, without_blanks

Message = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]
"""A conversation, {"role", "content"} each."""
OPEN, CLOSE = "<think>", "</think>"
"""Texts mark reasoning with these, whatever special tokens a target writes."""
RESULT_MARK = "<tool_response>"
RESULT = re.compile(rf"^\s*{RESULT_MARK}\n?(.*?)\n?</tool_response>\s*$", re.DOTALL)
"""A tool's result with Hermes's marks."""
TAIL = 64
"""Number of tokens at the end of a prompt that show whether the answer begins with reasoning."""
QUESTION = {"role": "user", "content": "Hello"}
THOUGHT, ANSWER = "DRAFTHEADS-THOUGHT", "DRAFTHEADS-ANSWER"
"""Placeholder texts, to be found in a rendered conversation."""
EXPRESSION_ERRORS = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
    RecursionError,
)
"""Errors that the expressions of a chat template may raise, besides jinja's own."""
LOOK_S, LOOKS, MOST_BYTES = 0.1, 100, 1 << 30
"""Seconds between two checks of running templates; the most checks and the most memory that a
template may take. Checks are counted, not seconds, because a process may be stopped.
"""


class EndlessTemplateError(TemplateError):
    """Raised for a chat template that takes too long, or too much memory."""

    def __init__(self) -> None:
        super().__init__(f"it takes over {LOOKS * LOOK_S:g} s, or {MOST_BYTES >> 20:,} MB")


@contextmanager
def template_limits() -> Iterator[None]:
    """Raise `EndlessTemplateError` in a block that does not end. A template is a program whose
    loops and texts jinja does not bound.
    """
    block = threading.get_ident()
    ended = threading.Event()
    lock = threading.Lock()

    def watch() -> None:
        most = math.inf
        for _ in range(LOOKS):
            if ended.wait(LOOK_S):
                return
            memory = psutil.Process().memory_info().rss
            if memory > most:
                break
            most = min(most, memory + MOST_BYTES)
        with lock:
            if not ended.is_set():
                error = ctypes.py_object(EndlessTemplateError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(block), error)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with lock:  # afterwards, nothing is raised here
            ended.set()


class TextSource(Protocol):
    """The tokenizer side of a target: `Target` itself, or its tokenizer without weights."""

    @property
    def name(self) -> str:
        """The target's name, for error messages."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None if the target has none."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    @property
    def template_args(self) -> Mapping[str, Any]:
        """Default variables of the chat template."""
        ...


@dataclass(frozen=True)
class Reasoning:
    """Where a chat template puts the reasoning of answers.

    marks: tokens that stand for OPEN and CLOSE; decoded texts leave special tokens out, and
    reasoning would run into the answer without them. message: builds the message of an answer from
    reasoning and text, as the template expects it; None: the reasoning stays in the text.
    is_opened: whether the generation prompt opens reasoning. opening, closing: the template's own
    text before and after reasoning. after: the text between reasoning and the header of an answer.
    header: the text before an answer, also without reasoning.
    """

    marks: Marks
    message: Callable[[str, str], Message] | None = None
    is_opened: bool = False
    opening: str = OPEN
    closing: str = CLOSE
    after: str = ""
    header: str = ""


def _keyed(thought: str, answer: str) -> Message:
    return {**assistant(answer), **dict.fromkeys(THOUGHTS, thought)}


def _in_parts(thought: str, answer: str) -> Message:
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": answer}]
    return assistant(parts)


EXAMPLES = (
    (_keyed, _keyed(THOUGHT, ANSWER)),
    (_in_parts, _in_parts(THOUGHT, ANSWER)),
    # some templates show reasoning only before a call
    (_keyed, {**_keyed(THOUGHT, ""), "tool_calls": [tool_call(ANSWER, {})]}),
)
"""Functions that build a message with reasoning, and an example message of each."""


def _behind(text: str, start: str) -> str:
    """The rest of a text after `start`, stripped; "" if the text begins otherwise."""
    return text.removeprefix(start).strip() if text.startswith(start) else ""


class PromptRenderer:
    """Turns plain texts and conversations into token ids for one target.

    Without a chat template the contents of messages are joined by newlines. template_args: extra
    variables of the template, such as {"enable_thinking": False}. Raises ValueError for a missing
    tokenizer.
    """

    def __init__(self, side: TextSource, template_args: Mapping[str, Any]) -> None:
        if side.tokenizer is None:
            raise ValueError(
                f"{side.name}: expected a tokenizer next to the model, found none; put "
                "tokenizer.json and tokenizer_config.json into its folder, or pass token ids"
            )
        self.name = side.name
        self.tokenizer = side.tokenizer
        self.eos_ids = side.eos_ids
        self.template_args = dict(template_args)

    def with_variables(self, variables: Mapping[str, Any]) -> PromptRenderer:
        """The same renderer with further variables of the template, such as tools. It keeps what is
        known about reasoning.
        """
        if not variables:
            return self
        other = copy(self)
        other.template_args = {**self.template_args, **variables}
        return other

    def text(self, messages: Messages, *, ask: bool = True, as_is: bool = False) -> str:
        """The text of a conversation. ask: append the generation prompt. as_is: the messages
        are already what `template_message` makes of them.

        Raises TemplateError for messages that the template refuses.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return "\n".join(message["content"] for message in messages)
        try:
            given = messages if as_is else [self.template_message(each) for each in messages]
            with template_limits():
                rendered: str = self.tokenizer.apply_chat_template(
                    given, tokenize=False, add_generation_prompt=ask, **self.template_args
                )
        except EXPRESSION_ERRORS as error:
            raise TemplateError(str(error) or type(error).__name__) from error
        return rendered

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """Where the template puts reasoning, found by rendering example answers; None if the
        template leaves reasoning in the text and decoded texts show all marks.
        """
        tags = {tuple(self.encode(tag)): tag for tag in (OPEN, CLOSE)}
        if not all(len(ids) == 1 and self._has_special(ids) for ids in tags):
            tags = {}
        has_template = getattr(self.tokenizer, "chat_template", None)
        for message, example in EXAMPLES if has_template else ():
            try:
                question = self.text([QUESTION])
                shown = [
                    self.text([QUESTION, each], ask=False, as_is=True)
                    for each in (assistant(ANSWER), example)
                ]
            except TemplateError:
                continue
            header = shown[0].partition(ANSWER)[0]
            before, _, after = shown[1].partition(THOUGHT)
            between, answer, _ = after.partition(ANSWER)
            closing = self.encode(between.strip())
            # templates print unknown parts with their type
            if answer and closing and "type" not in between:
                if "tool_calls" in example:
                    closing = closing[:1]  # the rest is the call's
                opening = _behind(before, question) or _behind(before, header)
                ids = self.encode(opening)
                if not ids and self._has_special(closing[:1]):
                    ids = [each for each in self.encode(before) if self._has_special([each])][-1:]
                marks = {
                    tuple(ids): OPEN,
                    tuple(closing[:1]): CLOSE,
                    # the header of the answer, after reasoning and without
                    tuple(closing[1:]): "",
                    tuple(self.encode(_behind(header, question))): "",
                }
                special = {ids: text for ids, text in marks.items() if self._has_special(ids)}
                end = between.strip()
                if end.startswith(CLOSE):
                    end = CLOSE
                elif self._has_special(closing[:1]):
                    end = self.tokenizer.decode(closing[:1])
                rest = between.strip().removeprefix(end)
                # some generation prompts have an empty block in its place
                shared = commonprefix([self.encode(question), self.encode(header)])
                lead = self.tokenizer.decode(self.encode(header)[len(shared) :]).strip()
                if end in lead:  # an empty block
                    lead = ""
                return Reasoning(
                    marks=special | tags,
                    message=message,
                    is_opened=before == question,
                    opening=opening,
                    closing=end,
                    after="" if "tool_calls" in example else rest.removesuffix(lead).strip(),
                    header=lead,
                )
        return Reasoning(tags) if tags else None

    def _has_special(self, ids: Sequence[int]) -> bool:
        """True if decoded texts leave some of these tokens out."""
        decode = self.tokenizer.decode
        return any(decode([each], skip_special_tokens=True) != decode([each]) for each in ids)

    def template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message in the form that the template expects: reasoning in its keys or in the text,
        results of tools without the marks that the template adds, and OpenAI's newer name of the
        system role replaced by the older one, because most templates drop the newer.
        """
        role = message.get("role")
        content = message.get("content") or ""
        if role == "developer":
            return {**message, "role": "system"}
        if not isinstance(content, str):
            return message
        if role == "tool" and RESULT_MARK in str(self.tokenizer.chat_template):
            return {**message, "content": RESULT.sub(r"\1", content)}
        if role != "assistant":
            return message
        thought = next((message[key] for key in THOUGHTS if message.get(key)), None)
        if thought:
            if not content.lstrip().startswith(OPEN):  # then it is there already
                content = f"{OPEN}\n{thought}\n{CLOSE}\n\n{content}"
            message = {key: message[key] for key in message if key not in THOUGHTS}
            message["content"] = content
        thought, closed, answer = content.partition(CLOSE)
        has_open = thought.lstrip().startswith(OPEN)
        how = self.reasoning if has_open or closed else None
        if how is None or how.message is None or not (has_open or how.is_opened):
            return message
        thought = thought.lstrip().removeprefix(OPEN).strip()
        return {**message, **how.message(thought, answer.lstrip())}

    def reasoning_of(self, prompt: Sequence[int]) -> Literal["opened", "possible", "none"]:
        """Says if an answer begins with reasoning: "opened" by the prompt, "possible" if the
        template knows reasoning and the target may open it, or "none".
        """
        _, start, written = self._ending(prompt).rpartition(self._answer_start or ANSWER)
        thought = written.rpartition(CLOSE)[2].rstrip()
        # a long text may mention <think> without opening reasoning
        if thought.endswith(OPEN) or (start and OPEN in thought):
            return "opened"
        return "possible" if start and not written.strip() else "none"

    @cached_property
    def _answer_start(self) -> str:
        """The text before answers; "" if the template has no reasoning."""
        if self.reasoning is None and CLOSE not in str(self.tokenizer.chat_template):
            return ""
        try:
            question = self._ending(self.encode(self.text([QUESTION])))
        except TemplateError:
            return ""
        start = question.rpartition(QUESTION["content"])[2].partition(OPEN)[0]
        return start.rstrip().removesuffix(CLOSE)  # of an empty block

    def _ending(self, prompt: Sequence[int]) -> str:
        stream = TextStream(self.tokenizer, skip_special_tokens=False, marks=self.marks)
        return stream.feed(prompt[-TAIL:]) + stream.flush()

    @property
    def marks(self) -> Marks | None:
        """The marks of reasoning, for the text of answers to a conversation."""
        return self.reasoning.marks if self.reasoning else None

    def answer_text(self, ids: Sequence[int]) -> str:
        """The text of an answer to a conversation."""
        stream = TextStream(self.tokenizer, marks=self.marks)
        return stream.feed(ids) + stream.flush()

    def prompt_ids(self, prompt: str | Messages) -> list[int]:
        """Token ids of a plain text, or of a conversation up to the start of the answer. If the
        last message is the beginning of an answer, they end with it.

        Plain text gets the tokenizer's own first tokens, but not the end token that some tokenizers
        append to every text, because a prompt is to be continued. Raises TemplateError.
        """
        text = prompt if isinstance(prompt, str) else self._asked(prompt)
        bare = self.encode(text)
        if not isinstance(prompt, str):
            last = prompt[-1] if prompt else {}
            content = last.get("content") if last.get("role") not in ("assistant", "tool") else None
            # templates drop roles that they do not know; blanks may differ
            if isinstance(content, str) and without_blanks(content) not in without_blanks(text):
                raise TemplateError(
                    "the template leaves out the last message; its role is expected to be user"
                )
            if getattr(self.tokenizer, "chat_template", None):
                return bare
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        ends = (*self.eos_ids, self.tokenizer.eos_token_id)
        is_closed = bare and ids[:-1][-len(bare) :] == bare and ids[-1] in ends
        return ids[:-1] if is_closed else ids

    def _asked(self, messages: Messages) -> str:
        """The text of a conversation up to the place where the target continues: the start of an
        answer, or the end of an answer that the last message begins.
        """
        last = messages[-1] if messages else {}
        content = last.get("content") or ""
        is_whole = last.get("role") != "assistant" or last.get("tool_calls")
        if is_whole or not isinstance(content, str):
            return self.text(messages)
        text = self.text([*messages[:-1], {**last, "content": content + ANSWER}], ask=False)
        begun, mark, _ = text.rpartition(ANSWER)
        if not mark:
            raise TemplateError("the template leaves out the end of the last message")
        return begun

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_prompt(
    target: TextSource,
    prompt: str | Messages,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt, as `PromptRenderer.prompt_ids` returns them.

    template_args: variables for this prompt, in addition to `target.template_args`. Raises
    ValueError for a missing tokenizer, an empty prompt, and what template or tokenizer rejects.
    """
    renderer = PromptRenderer(target, target.template_args)
    renderer = renderer.with_variables(template_variables(template_args or {}))
    try:  # errors of jinja and tokenizers do not name the prompt
        ids = renderer.prompt_ids(prompt)
    except (TemplateError, TypeError, UnicodeError) as error:
        raise ValueError(
            f"expected a prompt that chat template and tokenizer accept, got {prompt!r:.80} "
            f"({error}); change it"
        ) from error
    if not ids:
        raise ValueError("the prompt is empty; expected some text")
    return ids
