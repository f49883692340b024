"""Reads requests: their bodies, and the token ids of their prompts. Threads do what takes long, and
prompts that are too long are refused before all of their text is tokenized.
"""

from __future__ import annotations

import asyncio
from threading import Lock
from typing import Any

from starlette.requests import ClientDisconnect, Request

from draftheads.heads.target.model import Target
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.serve.calls import find_form
from draftheads.infer.serve.protocol import (
    MOST_CHOICES,
    TEMPLATE_VARIABLES,
    ApiError,
    Body,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Json,
    parsed,
)

DENSE = 16
"""More characters per token than texts have. If a text has this many for each token of the context,
only that much of it is tokenized at first.
"""


class Gone(ApiError):
    """Raised when the client has left, so nobody reads the answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client has left")


class Reader:
    """Reads requests for one model.

    name: of the model. most_choices: the most answers to one request that the queue can hold.
    """

    def __init__(self, target: Target, name: str, most_choices: int) -> None:
        self.target = target
        self.name = name
        self.most_choices = min(most_choices, MOST_CHOICES)
        self.calls = find_form(target)
        self._turn = Lock()  # tokenizers in Python are for one thread at a time

    async def read(
        self, kind: type[Body], http: Request
    ) -> tuple[GenerationRequest, list[list[int]]]:
        """Returns the request in a body of this kind, and its prompts. Raises ApiError, Gone."""
        content_type = http.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                400,
                f"expected Content-Type: application/json, got {content_type[:80]!r}; set this "
                "header",
            )
        try:
            body = await http.body()
        except ClientDisconnect:
            raise Gone() from None
        return await asyncio.to_thread(self._parsed, kind, body)

    def unknown(self, model: str | None) -> ApiError:
        """The error for another model."""
        message = f"expected model {self.name!r}, got {model!r:.80}; see /v1/models"
        return ApiError(404, message, "model_not_found", "model")

    def _parsed(self, kind: type[Body], body: bytes) -> tuple[GenerationRequest, list[list[int]]]:
        request = parsed(kind, body)
        if request.model not in (None, self.name):
            raise self.unknown(request.model)
        prompts: list[Any] = [request]
        if isinstance(request, CompletionRequest):
            prompts = request.prompts
        choices = len(prompts) * request.count
        if choices > self.most_choices:
            raise ApiError(
                400,
                f"expected at most {self.most_choices} answers (prompts x n), got {choices}; send "
                "several requests",
                param="n",
            )
        return request, [self.encoded(prompt) for prompt in prompts]

    def encoded(self, prompt: Any) -> list[int]:
        """Token ids of a text, a chat or token ids. Raises ApiError."""
        if isinstance(prompt, list):
            return self._fitting(prompt)
        variables: Json | None = None
        try:
            if isinstance(prompt, ChatRequest):
                variables = self._variables(prompt)
                prompt = self._messages(prompt)
            else:
                self._refuse_long(prompt)
            with self._turn:
                return self._fitting(encode_prompt(self.target, prompt, variables))
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def _variables(self, request: ChatRequest) -> Json:
        """The variables of the chat template. Raises ApiError for an option that the template does
        not read.
        """
        template = str(self.target.tokenizer.chat_template)
        variables = request.variables
        for name, usual in TEMPLATE_VARIABLES.items():
            value = getattr(request, name)
            if value in (None, usual) or name in template:
                continue
            if (name, value) != ("reasoning_effort", "none") or "enable_thinking" not in template:
                message = f"{name}: expected a chat template that reads it, that of "
                message += f"{self.target.name} does not; leave it out"
                raise ApiError(400, message, "unsupported_parameter", name)
            variables.setdefault("enable_thinking", False)
        return variables

    def _messages(self, request: ChatRequest) -> list[Json]:
        if not getattr(self.target.tokenizer, "chat_template", None):
            raise ApiError(400, f"{self.target.name} has no chat template; use /v1/completions")
        if request.callable_tools and self.calls is None:
            message = (
                f"tools: expected a chat template that shows tools and calls, that of "
                f"{self.target.name} does not, or calls in an unknown way; leave tools out"
            )
            raise ApiError(400, message, param="tools")
        messages = [message.plain() for message in request.messages]
        # templates leave out the reasoning of earlier answers, but nothing of the others
        questions = [each["content"] for each in messages if each["role"] != "assistant"]
        self._refuse_long("".join([*questions, str(request.variables)]))
        return messages

    def _refuse_long(self, text: str) -> None:
        """Raise ApiError for a text whose beginning already fills the context."""
        reach = DENSE * self.target.context
        if len(text) <= reach:
            return
        with self._turn:
            beginning = self.target.tokenizer(text[:reach], add_special_tokens=False, verbose=False)
        self._fitting(beginning["input_ids"])

    def _fitting(self, prompt: list[int]) -> list[int]:
        """Returns the prompt. Raises ApiError if it leaves no room for an answer."""
        context = self.target.context
        if len(prompt) >= context:
            raise ApiError(
                400,
                f"expected a prompt shorter than the context of {context} tokens, got "
                f"{len(prompt)} or more; send a shorter one",
                "context_length_exceeded",
            )
        return prompt
