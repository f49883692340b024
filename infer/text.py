"""From text to token ids and back, token by token: prompts, streamed text, stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jinja2

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for a character whose bytes are not complete yet."""
CONTEXT = 8
"""Tokens that decide how the next one is decoded."""


def encode_prompt(tokenizer: Any, prompt: str | Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a plain text, or of a conversation ({"role", "content"} messages) ready for the
    answer.

    A tokenizer without chat template gets the messages' contents, separated by line breaks. Raises
    ValueError when there is no tokenizer or nothing to encode, and for what the template or the
    tokenizer does not take.
    """
    if tokenizer is None:
        raise ValueError(
            "the target folder has no tokenizer; pass token ids, or add tokenizer.json"
        )
    try:  # jinja and the tokenizer's bindings do not say that it is the prompt
        if not isinstance(prompt, str) and getattr(tokenizer, "chat_template", None):
            ids = tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        else:
            if not isinstance(prompt, str):
                prompt = "\n".join(message["content"] for message in prompt)
            ids = tokenizer(prompt)["input_ids"]
    except jinja2.TemplateError as error:
        raise ValueError(
            f"expected a conversation that the chat template takes, it says: {error}; change the "
            "messages, or the template"
        ) from error
    except (TypeError, UnicodeError) as error:
        raise ValueError(
            f"expected a prompt of valid text, got {prompt!r:.80} ({error}); repair it"
        ) from error
    if not ids:
        raise ValueError("the prompt is empty: expected some text")
    return list(ids)


class TextStream:
    """Decodes a growing list of tokens; gives out text as soon as its characters are complete.

    after: tokens that came before, on which the space before the first word depends. Only the last
    few tokens are decoded again, so the cost per token does not grow with the text.
    """

    def __init__(
        self, tokenizer: Any, *, after: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._shown = list(after[-CONTEXT:])  # decoded again, for the spaces between words
        self._held: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete ("" while a character is still open)."""
        self._held += tokens
        text = self._held_text()
        return "" if text.endswith(REPLACEMENT) else self._show(text)

    def flush(self) -> str:
        """What is left at the end, incomplete characters included."""
        return self._show(self._held_text())

    def _held_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special_tokens=self._skip)
        after: str = self._tokenizer.decode(
            self._shown + self._held, skip_special_tokens=self._skip
        )
        return after[len(before) :]

    def _show(self, text: str) -> str:
        if text:
            self._shown, self._held = self._held, []
        return text


class StopStrings:
    """Tells which token after `prompt` completes one of the stop strings.

    Raises ValueError for an empty stop string or a target without tokenizer.
    """

    def __init__(self, tokenizer: Any, stop: Collection[str], prompt: Sequence[int]) -> None:
        if tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this target has none")
        if isinstance(stop, str) or not all(isinstance(each, str) and each for each in stop):
            raise ValueError(f"stop: expected a list of non-empty strings, got {stop!r}")
        self._stop = tuple(stop)
        self._reach = max(map(len, stop))
        self._text = ""
        self._stream = TextStream(tokenizer, after=prompt, skip_special_tokens=False)

    def completed_by(self, token: int) -> bool:
        """True when the text up to this token contains a stop string."""
        self._text = self._text[-self._reach :] + self._stream.feed([token])
        return any(stop in self._text for stop in self._stop)
