"""Token ids as text: streamed answers, stop strings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Decoders write it for a character whose bytes are incomplete."""
CONTEXT = 8
"""Previous tokens that affect the decoding of the next one."""


class WithTokens(Protocol):
    """A `Step`."""

    @property
    def tokens(self) -> list[int]:
        """New token ids."""
        ...


class TextStream:
    """Decodes a growing list of tokens, and emits text once its characters are complete. The pieces
    joined are the decoded whole, which the decoded steps joined are not: tokenizers drop the space
    before the first word, and characters may have several tokens.

    after: previous tokens, such as the prompt's, which decide about the space before the first
    word. Only the last few tokens are decoded again, so that the cost per token is constant.
    """

    def __init__(
        self, tokenizer: Any, *, after: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._shown = list(after[-CONTEXT:])
        self._held: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        """Text completed by these tokens, "" inside a character."""
        self._held += tokens
        text = self._held_text()
        return "" if text.endswith(REPLACEMENT) else self._show(text)

    def flush(self) -> str:
        """The rest of the text, incomplete characters included."""
        return self._show(self._held_text())

    def read(self, steps: Iterable[WithTokens]) -> Iterator[str]:
        """The text of a generation's steps, piece by piece, incomplete characters at its end
        included.
        """
        for step in steps:
            yield self.feed(step.tokens)
        yield self.flush()

    def _held_text(self) -> str:
        return self._decoded(self._shown + self._held)[len(self._decoded(self._shown)) :]

    def _decoded(self, tokens: list[int]) -> str:
        # what is cleaned up depends on text that may not have come yet
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text

    def _show(self, text: str) -> str:
        if text:
            self._shown, self._held = self._held, []
        return text


class AnswerText:
    """The text of an answer, step by step. Text that may be the beginning of a stop string waits;
    from a complete one on, nothing is emitted.

    after, skip_special_tokens: as of `TextStream`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        *,
        after: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._stop = stop
        self._stream = TextStream(tokenizer, after=after, skip_special_tokens=skip_special_tokens)
        self._waiting = ""
        self.stopped = False

    def feed(self, tokens: Sequence[int], accepted: int) -> tuple[str, int]:
        """Text completed by a step's tokens, and how many of its characters, the first ones, are of
        the first `accepted` tokens.
        """
        drafted = self._stream.feed(tokens[:accepted]) if accepted > 0 else ""
        own = self._stream.feed(tokens[max(accepted, 0) :])
        known = 0 if self._waiting else len(drafted)
        text = self._emit(drafted + own)
        return text, min(known, len(text))

    def flush(self) -> str:
        """The rest of the text."""
        text = self._emit(self._stream.flush())
        rest, self._waiting = self._waiting, ""
        return text if self.stopped else text + rest

    def _emit(self, text: str) -> str:
        if not self._stop or self.stopped:
            return "" if self.stopped else text
        text = self._waiting + text
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        self.stopped = bool(places)
        end = min(places) if places else len(text) - max(begun(text, each) for each in self._stop)
        self._waiting = text[end:]
        return text[:end]


def begun(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


class StopStrings:
    """Finds the token after `prompt` that completes a stop string.

    Raises ValueError for an empty stop string or a missing tokenizer.
    """

    def __init__(self, tokenizer: Any, stop: Collection[str], prompt: Sequence[int]) -> None:
        if tokenizer is None:
            raise ValueError("stop strings need a tokenizer, this target has none; leave them out")
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop: expected a list of non-empty strings, got {stop!r}")
        self._stop = tuple(stop)
        self._reach = max(map(len, stop))
        self._text = ""
        self._stream = TextStream(tokenizer, after=prompt, skip_special_tokens=False)

    def completed_by(self, token: int) -> bool:
        """True when the text up to this token contains a stop string."""
        self._text = self._text[-self._reach :] + self._stream.feed([token])
        return any(stop in self._text for stop in self._stop)
