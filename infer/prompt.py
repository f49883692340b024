"""Prompts as token ids: one rule for distillation, benchmarks, chat and server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2.exceptions import TemplateError

EXPRESSION_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What the expressions of a chat template may raise, besides jinja's own errors."""


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
            rendered: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask, **self.template_args
            )
        except EXPRESSION_ERRORS as error:
            raise TemplateError(str(error)) from error
        return rendered

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
