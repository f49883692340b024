"""Turns token ids into text: streamed answers and stop strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Tokenizers decode a character whose bytes are incomplete to this one."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages that may hold the reasoning of an answer."""
THOUGHT_KEY = THOUGHTS[0]
Marks = Mapping[tuple[int, ...], str]
"""Token ids -> the text that replaces them."""
CONTEXT = 8
"""Number of previous tokens that affect the decoding of the next one."""
CALL_ID = "call00000"
"""A call id of the only length that Mistral's templates accept."""
ARGUMENT_KEYS = ("arguments", "parameters", "input")
"""Keys of calls that may hold their arguments."""


def assistant(content: Any) -> dict[str, Any]:
    """An answer as a message."""
    return {"role": "assistant", "content": content}


def tool_call(name: str, arguments: Any, call_id: Any = CALL_ID) -> dict[str, Any]:
    """A message's tool call in OpenAI's layout."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def read_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that a client, a data set or a model wrote: an object, or its JSON
    text, encoded once or more; {} if they are absent, null or blank. Raises ValueError for others.
    """
    value = next((call[key] for key in ARGUMENT_KEYS if call.get(key) is not None), None)
    with suppress(ValueError, RecursionError):
        while isinstance(value, str):
            value = json.loads(value.strip() or "null", strict=False)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"expected arguments as a JSON object or its text, got {value!r:.40}")
    return value or {}


def without_blanks(text: str) -> str:
    """A text without its blanks."""
    return "".join(text.split())


class TextStream:
    """Decodes a growing list of tokens, and emits text once its characters are complete. The pieces
    join to the text of the whole list. Tokens decoded one by one do not: tokenizers drop the space
    before the first word, and a character may have several tokens.

    after: previous tokens, such as the prompt's, which decide about the space before the first
    word. Only the last few tokens are decoded again, so the cost per token is constant. marks:
    tokens that are shown as another text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        after: Sequence[int] = (),
        skip_special_tokens: bool = True,
        marks: Marks | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown = list(after[-CONTEXT:])
        self._held: list[int] = []
        self._marks = marks or {}
        self._begun: list[int] = []  # tokens that may begin a mark

    def feed(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens complete; "" inside a character."""
        if not self._marks:
            return self._feed(tokens)
        text = ""
        for token in tokens:
            self._begun.append(token)
            # until the tokens may begin a mark
            while all(mark[: len(self._begun)] != tuple(self._begun) for mark in self._marks):
                text += self._feed([self._begun.pop(0)])
            mark = tuple(self._begun)
            if mark in self._marks:
                self._begun.clear()
                text += self.flush() + self._marks[mark]
                self._shown = [*mark]
        return text

    def flush(self) -> str:
        """Returns the rest of the text, incomplete characters included."""
        self._held += self._begun
        self._begun.clear()
        return self._show(self._held_text())

    def _feed(self, tokens: Sequence[int]) -> str:
        self._held += tokens
        text = self._held_text()
        return "" if text.endswith(REPLACEMENT) else self._show(text)

    def _held_text(self) -> str:
        return self._decoded(self._shown + self._held)[len(self._decoded(self._shown)) :]

    def _decoded(self, tokens: list[int]) -> str:
        # cleaning up depends on text that may still follow
        text: str = self._tokenizer.decode(
            tokens,
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def _show(self, text: str) -> str:
        if text:
            self._shown = self._held
            self._held = []
        return text


class AnswerText:
    """The text of an answer while it grows, for chat and server.

    text: all text so far. accepted[i]: whether character i belongs to an accepted draft token.
    settled: number of characters that are final; later ones may be the beginning of a stop string.
    stop: the strings before which the text ends. stopped: the one of them that ended it. clean: a
    function applied to the text, such as `printable`.
    """

    def __init__(
        self,
        stream: TextStream,
        stop: Sequence[str] = (),
        clean: Callable[[str], str] = str,
    ) -> None:
        self.text = ""
        self.accepted: list[bool] = []
        self.settled = 0
        self.stopped: str | None = None
        self._stream = stream
        self._stop = stop
        self._clean = clean

    def add(self, tokens: Sequence[int], accepted: int = 0, is_last: bool = False) -> None:
        """Append tokens. accepted: how many of them, the first ones, are accepted draft tokens.
        is_last: no more follow.
        """
        drafts = max(accepted, 0)  # -1 for the prefill
        for token in tokens[:drafts]:  # one by one, so that each character has its own mark
            self._append(self._stream.feed([token]), True)
        self._append(self._stream.feed(tokens[drafts:]), False)
        if is_last:
            self.end()
        else:
            waiting = max((begun(self.text, stop) for stop in self._stop), default=0)
            self.settled = len(self.text) - waiting

    def end(self) -> None:
        """Append the rest, and cut the text before a stop string. It is only searched for at the
        end, because the engine ends an answer at the token that completes one.
        """
        self._append(self._stream.flush(), False)
        places = {stop: self.text.find(stop, self.settled) for stop in self._stop}
        found = {stop: place for stop, place in places.items() if place >= 0}
        self.stopped = min(found, key=found.__getitem__, default=None)
        self.settled = len(self.text) if self.stopped is None else found[self.stopped]
        self.text = self.text[: self.settled]
        del self.accepted[self.settled :]

    def _append(self, text: str, is_accepted: bool) -> None:
        text = self._clean(text)
        self.text += text
        self.accepted += [is_accepted] * len(text)


def begun(text: str, stop: str) -> int:
    """The number of characters at the end of a text that may begin a stop string."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class StopStrings:
    """Finds the token after `prompt` that completes a stop string.

    Raises ValueError for an empty stop string or a missing tokenizer.
    """

    def __init__(self, tokenizer: Any, stop: Collection[str], prompt: Sequence[int]) -> None:
        if tokenizer is None:
            raise ValueError("stop strings need a tokenizer, this target has none; leave them out")
        is_list = isinstance(stop, Collection) and not isinstance(stop, str)
        if not is_list or not all(isinstance(each, str) and each for each in stop):
            raise ValueError(f"stop: expected a list of non-empty strings, got {stop!r}")
        self._stop = tuple(stop)
        self._reach = max(map(len, stop))
        self._text = ""
        self._stream = TextStream(tokenizer, after=prompt, skip_special_tokens=False)

    def completed_by(self, token: int) -> bool:
        """True when the text up to this token contains a stop string."""
        self._text = self._text[-self._reach :] + self._stream.feed([token])
        return any(stop in self._text for stop in self._stop)
