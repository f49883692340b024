"""OpenAI's requests and answers, as far as this engine can honour them; what it cannot is refused.

Beyond OpenAI's: `top_k`, `return_token_ids` and `stop_token_ids` as vLLM has them, the
`generation_config` of `transformers chat`, `draft: false` for the plain model, and with
`stream_options.include_steps` what each forward pass of the target brought.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from draftheads.infer.engine import Step
from draftheads.infer.text import AnswerText

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "ignore_eos": (False,),
    "min_tokens": (0,),
}
"""Options that this engine does not have, and the values that ask for nothing."""
MOST_STOPS = 16
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
OnlyOne = Field(min_length=1, max_length=1)
StopString = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(BaseModel):
    """What a stream tells besides the text."""

    include_usage: bool = False
    include_steps: bool = False


class Request(BaseModel):
    """What chats and completions share."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    seed: int | None = None
    n: int | None = Field(1, ge=1, le=1)
    return_token_ids: bool | None = False
    draft: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check_options(cls, given: Any) -> Any:
        for name, values in NEUTRAL.items() if isinstance(given, dict) else ():
            value = given.get(name)
            if value is not None and value not in values:
                raise ValueError(f"{name} is not supported; leave it out")
        return given

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(Request):
    """Continue a text or token ids."""

    prompt: Text | Annotated[list[TokenId], Field(min_length=1)] | Annotated[list[Text], OnlyOne]

    @field_validator("prompt")
    @classmethod
    def _only(cls, prompt: Any) -> Any:
        return prompt[0] if isinstance(prompt[0], str) and isinstance(prompt, list) else prompt

    @property
    def token_ids(self) -> list[int]:
        """The prompt, if it is given as token ids."""
        return [token for token in self.prompt if isinstance(token, int)]


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {**self.model_dump(), "content": content}


class ChatRequest(Request):
    """Answer a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)

    @model_validator(mode="before")
    @classmethod
    def _read_generation_config(cls, given: Any) -> Any:
        """`transformers chat` sends its options as JSON text."""
        config = given.get("generation_config") if isinstance(given, dict) else None
        if config is None:
            return given
        try:
            config = json.loads(config)
            options = {name: config.get(name) for name in ("temperature", "top_p", "top_k")}
            if not config.get("do_sample"):
                options["temperature"] = 0
            elif options["temperature"] is None:
                options["temperature"] = 1.0
            options["max_tokens"] = config.get("max_new_tokens")
        except (TypeError, ValueError, AttributeError, RecursionError):
            raise ValueError("generation_config: expected a JSON object as text") from None
        return {**{name: value for name, value in options.items() if value is not None}, **given}


class Reply:
    """An answer in the making, as OpenAI's clients read it."""

    def __init__(self, request: Request, model: str, prompt: list[int], text: AnswerText) -> None:
        self.is_chat = isinstance(request, ChatRequest)
        self.request, self.prompt, self.text = request, prompt, text
        self.options = request.stream_options or StreamOptions()
        kind = "chat.completion" if self.is_chat else "text_completion"
        chunk = ".chunk" if self.is_chat and request.stream else ""
        self.head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}",
            "object": kind + chunk,
            "created": int(time.time()),
            "model": model,
        }
        self.tokens: list[int] = []
        self.newest: list[int] = []  # of the last step
        self.steps: list[Step] = []
        self.finish: str | None = None

    def add(self, step: Step) -> tuple[str, int]:
        """Take a step up to its end token. Returns its text, and how much of it was drafted, if
        the request asks for steps.
        """
        tokens = step.tokens
        ends = self.request.stop_token_ids or ()
        place = next((n for n, token in enumerate(tokens) if token in ends), None)
        self.finish = step.finish
        if place is not None:
            tokens, self.finish = tokens[: place + 1], "stop"
        self.newest = tokens
        self.tokens += tokens
        self.steps.append(step)
        shown = tokens[:-1] if self.finish == "eos" or place is not None else tokens
        text, drafted = self.text.feed(shown, step.accepted if self.options.include_steps else 0)
        if self.text.stopped:
            self.finish = "stop"
        if self.finish:
            text += self.text.flush()
            self.finish = "length" if self.finish == "length" else "stop"
        return text, drafted

    def choice(self, text: str, **more: Any) -> dict[str, Any]:
        """A chunk of the stream, or all of it, with its only choice."""
        said: dict[str, Any] = {"text": text}
        if self.is_chat and self.request.stream:
            said = {"delta": {"content": text}}
        elif self.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": None, **more}
        return {**self.head, "choices": [choice]}

    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream."""
        opening = self.choice("")
        if self.is_chat:
            opening["choices"][0]["delta"]["role"] = "assistant"
        if self.request.return_token_ids:
            opening["prompt_token_ids"] = self.prompt
        return opening

    def facts(self, step: Step, drafted_characters: int) -> dict[str, Any]:
        """What a step brought, for `include_steps`."""
        return {
            "tokens": len(step.tokens),
            "accepted": accepted(step),
            "drafted": step.drafted,
            "accepted_chars": drafted_characters,
            "seconds": round(step.draft_seconds + step.verify_seconds, 6),
            "prefill": step.accepted < 0,
        }

    def usage(self, reused: int, seconds: float) -> dict[str, Any]:
        """Counts in OpenAI's names. reused: prompt tokens that were not computed again. seconds: of
        the engine.
        """
        right = sum(map(accepted, self.steps))
        drafted = sum(step.drafted for step in self.steps)
        return {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.tokens),
            "total_tokens": len(self.prompt) + len(self.tokens),
            "prompt_tokens_details": {"cached_tokens": reused},
            "completion_tokens_details": {
                "accepted_prediction_tokens": right,
                "rejected_prediction_tokens": drafted - right,
            },
            "steps": len(self.steps),
            "seconds": round(seconds, 6),
        }


def accepted(step: Step) -> int:
    """Draft tokens among the tokens of a step."""
    return max(min(step.accepted, len(step.tokens)), 0)


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    class Error(BaseModel):
        """What is wrong."""

        message: str
        type: str
        param: str | None
        code: str | None

    error: Error
