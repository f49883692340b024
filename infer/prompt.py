"""Prompts as token ids: one rule for distillation, benchmarks, chat and server."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from os.path import commonprefix
from typing import Any, Protocol

import psutil
from jinja2.exceptions import TemplateError

from draftheads.infer.text import Marks, TextStream

Message = dict[str, Any]
OPEN, CLOSE = "<think>", "</think>"
"""In texts, reasoning stands between them, whatever special tokens a target writes."""
QUESTION = {"role": "user", "content": "Hello"}
THOUGHT, ANSWER = "DRAFTHEADS-THOUGHT", "DRAFTHEADS-ANSWER"
"""Texts that are searched for in a rendered conversation."""
EXPRESSION_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
EXPRESSION_ERRORS += (MemoryError, RecursionError)
"""What the expressions of a chat template may raise, besides jinja's own errors."""
LOOK_S, LOOKS, MOST_BYTES = 0.1, 100, 1 << 30
"""Seconds between two looks at running templates; how many looks, and how much memory, one may
take. Looks, not seconds, as a process may be stopped.
"""


class EndlessTemplateError(TemplateError):
    """A chat template that takes too long, or too much memory."""

    def __init__(self) -> None:
        super().__init__(f"it takes over {LOOKS * LOOK_S:g} s, or {MOST_BYTES >> 20:,} MB")


Running = dict[int, tuple[int, int]]
"""Threads that run a template -> looks so far, and memory of the process at the first."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raise `EndlessTemplateError` in a block that does not end: a template is a program, whose
    loops and texts jinja does not bound.
    """
    lock, running = _watched(os.getpid())
    thread = threading.get_ident()
    running[thread] = (0, 0)
    try:
        yield
    finally:
        with lock:  # afterwards, nothing is raised here
            running.pop(thread, None)


@cache
def _watched(process: int) -> tuple[threading.Lock, Running]:
    """A lock, and the threads that another one looks after. process: no thread outlives a fork."""
    lock, running = threading.Lock(), Running()
    memory = psutil.Process(process).memory_info

    def look() -> None:
        while True:
            time.sleep(LOOK_S)
            with lock:
                for thread, (looks, before) in list(running.items()):
                    used = memory().rss
                    running[thread] = (looks + 1, before or used)
                    if looks == LOOKS or used - (before or used) > MOST_BYTES:
                        running.pop(thread)
                        error = ctypes.py_object(EndlessTemplateError)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    threading.Thread(target=look, daemon=True).start()
    return lock, running


class TextSource(Protocol):
    """The text side of a target: `Target` itself, or its tokenizer without weights."""

    @property
    def name(self) -> str:
        """For error messages."""
        ...

    @property
    def tokenizer(self) -> Any:
        """Of transformers; None if there is none."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    @property
    def template_args(self) -> Mapping[str, Any]:
        """Variables of the chat template for prompts that have none."""
        ...


@dataclass(frozen=True)
class Reasoning:
    """How a chat template marks the reasoning of answers, if with special tokens: decoded texts do
    not show these, and reasoning would run into the answer.

    message: makes an answer of reasoning and text, as the template takes it; None: as texts have
    it. is_opened: by the generation prompt.
    """

    marks: Marks
    message: Callable[[str, str], Message] | None = None
    is_opened: bool = False


def _keyed(thought: str, answer: str) -> Message:
    keys = ("reasoning_content", "reasoning", "thinking")
    return {"role": "assistant", "content": answer, **dict.fromkeys(keys, thought)}


def _in_parts(thought: str, answer: str) -> Message:
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": answer}]
    return {"role": "assistant", "content": parts}


CALL = {"id": "call00000", "type": "function", "function": {"name": ANSWER, "arguments": {}}}
EXAMPLES = (
    (_keyed, _keyed(THOUGHT, ANSWER)),
    (_in_parts, _in_parts(THOUGHT, ANSWER)),
    # some templates show reasoning only where a call follows
    (_keyed, {**_keyed(THOUGHT, ""), "tool_calls": [CALL]}),
)
"""Answers with reasoning, and what makes such a message."""


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
        self.tokenizer = side.tokenizer
        self.eos_ids = side.eos_ids
        self.template_args = dict(template_args)

    def text(self, messages: Sequence[Mapping[str, Any]], *, ask: bool = True) -> str:
        """The text of a conversation. ask: append the generation prompt.

        Raises TemplateError for messages that the template refuses.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return "\n".join(message["content"] for message in messages)
        try:
            with bounded():
                rendered: str = self.tokenizer.apply_chat_template(
                    [self.parsed(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=ask,
                    **self.template_args,
                )
        except EXPRESSION_ERRORS as error:
            raise TemplateError(str(error) or type(error).__name__) from error
        return rendered

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """Found by rendering answers; None if texts show all marks, or there are none."""
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        tags = {tuple(self.encode(tag)): tag for tag in (OPEN, CLOSE)}
        if all(len(ids) == 1 and self._has_special(ids) for ids in tags):
            return Reasoning(tags)
        for message, example in EXAMPLES:
            try:
                prompt = self.text([QUESTION])
                plain = self.text([QUESTION, {"role": "assistant", "content": ANSWER}], ask=False)
                whole = self.text([QUESTION, example], ask=False)
            except TemplateError:
                continue
            before, _, after = whole.partition(THOUGHT)
            between, answer, _ = after.partition(ANSWER)
            closing = self.encode(between.strip())
            first, rest = closing[:1], closing[1:]
            if not (answer and self._has_special(first)):
                continue
            if "tool_calls" in example:
                rest = []  # of the call
            lead = self.encode(plain.partition(ANSWER)[0])
            opening, is_opened = self._opening(self.encode(prompt), self.encode(before), lead)
            lead = lead[len(commonprefix([self.encode(prompt), lead])) :]
            marks = {tuple(opening): OPEN, tuple(first): CLOSE, tuple(rest): "", tuple(lead): ""}
            found = {ids: text for ids, text in marks.items() if self._has_special(ids)}
            return Reasoning(found, message, is_opened)
        return None

    def _opening(
        self, prompt: list[int], before: list[int], lead: list[int]
    ) -> tuple[list[int], bool]:
        """The tokens that open reasoning, those before it being given, and whether the generation
        prompt has them. lead: tokens before an answer without reasoning.
        """
        shared = commonprefix([prompt, before])
        if shared != prompt:  # which ends reasoning at once
            shared = commonprefix([shared, lead])
        opening = self.encode(self.tokenizer.decode(before[len(shared) :]).strip())
        if self._has_special(opening):
            return opening, False
        return [token for token in before if self._has_special([token])][-1:], True

    def _has_special(self, ids: Sequence[int]) -> bool:
        """Whether decoded texts leave some of these out."""
        decode = self.tokenizer.decode
        return any(decode([each], skip_special_tokens=True) != decode([each]) for each in ids)

    def parsed(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message as the template takes it, which marks reasoning with special tokens."""
        content = message.get("content")
        is_answer = message.get("role") == "assistant" and isinstance(content, str)
        if not (is_answer and (OPEN in content or CLOSE in content)):
            return message
        how = self.reasoning
        begins = content.lstrip().startswith(OPEN) or (how and how.is_opened and CLOSE in content)
        if how is None or how.message is None or not begins:
            return message
        thought, _, answer = content.partition(CLOSE)
        thought = thought.lstrip().removeprefix(OPEN)
        return {**message, **how.message(thought.strip(), answer.lstrip())}

    def answer_stream(self) -> TextStream:
        """For the tokens of an answer to a conversation."""
        return TextStream(self.tokenizer, marks=self.reasoning.marks if self.reasoning else {})

    def answer_text(self, ids: Sequence[int]) -> str:
        """The text of such tokens."""
        stream = self.answer_stream()
        return stream.feed(ids) + stream.flush()

    def prompt_ids(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a plain text, or of a conversation ({"role", "content"} messages) up to the
        start of the answer.

        Plain text gets the tokenizer's own first tokens, but not the end token that some tokenizers
        append to every text: a prompt goes on. Raises TemplateError.
        """
        text = prompt if isinstance(prompt, str) else self.text(prompt)
        bare = self.encode(text)
        if not isinstance(prompt, str) and getattr(self.tokenizer, "chat_template", None):
            return bare
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        ends = (*self.eos_ids, self.tokenizer.eos_token_id)
        is_closed = bare and ids[:-1][-len(bare) :] == bare and ids[-1] in ends
        return ids[:-1] if is_closed else ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_prompt(
    target: TextSource,
    prompt: str | Sequence[Mapping[str, Any]],
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt as of `PromptRenderer.prompt_ids`.

    template_args: variables for this prompt, in addition to `target.template_args`. Raises
    ValueError for a missing tokenizer, an empty prompt, and what template or tokenizer rejects.
    """
    renderer = PromptRenderer(target, {**target.template_args, **(template_args or {})})
    try:  # errors of jinja and tokenizers do not mention the prompt
        ids = renderer.prompt_ids(prompt)
    except (TemplateError, TypeError, UnicodeError) as error:
        raise ValueError(
            f"expected a prompt that chat template and tokenizer accept, got {prompt!r:.80} "
            f"({error}); change it"
        ) from error
    if not ids:
        raise ValueError("the prompt is empty; expected some text")
    return ids
