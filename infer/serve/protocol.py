"""OpenAI's requests and answers, as far as this engine can honour them; what it cannot is refused.

Beyond OpenAI's: `top_k`, `return_token_ids` and `stop_token_ids` as vLLM has them, the
`generation_config` of `transformers chat`, `draft: false` for the plain model, and with
`stream_options.include_steps` what each forward pass of the target brought.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException

from draftheads.infer.engine import Step
from draftheads.infer.serve.logprobs import (
    ScoredToken,
    TokenScore,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
)
from draftheads.infer.text import AnswerText

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
"""Options that this engine does not have, and the values that ask for nothing. Null always does."""
HARMLESS = {
    "cache_prompt",
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Options that are not read, because no value of them changes an answer."""
MOST_STOPS = 16
MOST_MESSAGES, MOST_PARTS = 1024, 64
MOST_CHOICES = 128
"""Prompts x n."""
MOST_LOGPROBS = 20
MOST_BRACKETS = 1 << 17
"""Of a body. A million lists take Python seconds, in which no other thread runs."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
SeveralPrompts = Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopStrings = Annotated[list[StopString], Field(max_length=MOST_STOPS, fail_fast=True)]
R = TypeVar("R", bound="Request")


class ApiError(HTTPException):
    """An error that the client is told of in OpenAI's shape. param: the option that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        **headers: str,
    ) -> None:
        super().__init__(status, message, headers or None)
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        said = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


class StreamOptions(BaseModel):
    """What a stream tells besides the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = False
    include_steps: bool | None = False
    include_obfuscation: bool | None = False  # not read: padding against eavesdroppers


class Request(BaseModel):
    """What chats and completions share."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    seed: int | None = None
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    return_token_ids: bool | None = False
    skip_special_tokens: bool | None = True
    draft: bool | None = True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        """New tokens of an answer at most."""
        return self.max_tokens

    @property
    def count(self) -> int:
        """Answers for each prompt."""
        return self.n or 1

    @property
    def scores(self) -> int | None:
        """How many of the likeliest tokens to tell for each one; None: no log-probabilities."""
        return None

    @property
    def is_echoed(self) -> bool:
        """Whether the prompt is a part of the answer."""
        return False


def parsed(kind: type[R], body: bytes) -> R:
    """A request of this kind. Raises ApiError."""
    try:
        if body.count(b"[") + body.count(b"{") > MOST_BRACKETS:
            raise ApiError(400, f"expected at most {MOST_BRACKETS} brackets, got more; send fewer")
        given = json.loads(body.decode("utf-8-sig"))
        if not isinstance(given, dict):
            raise ApiError(400, f"expected a JSON object, got {_shown(given)}; send {{...}}")
        _refuse_unsupported(kind, given)
        return kind.model_validate(given)
    except ValidationError as error:
        raise _in_one_line(error) from None
    except RecursionError:
        fault = "got one nested too deeply; flatten it"
    except json.JSONDecodeError as error:
        fault = f"cannot read it from character {error.pos} on; check quotes, commas and brackets"
    except UnicodeDecodeError as error:
        fault = f"got other bytes than UTF-8 from byte {error.start} on; encode it as UTF-8"
    except ValueError:  # Python reads no numbers of more than 4,300 digits
        fault = "got a number with thousands of digits; send a smaller one"
    raise ApiError(400, f"expected a JSON object: {fault}")


def _refuse_unsupported(kind: type[Request], given: dict[str, Any]) -> None:
    """Raise ApiError for options that this engine does not have, unless they ask for nothing."""
    known = kind.model_fields.keys() | HARMLESS
    names = [
        name
        for name, value in given.items()
        if name not in known and value is not None and value not in NEUTRAL.get(name, ())
    ]
    if names:
        # others than identifiers may have line breaks, or no UTF-8
        shown = [name[:64] if name.isidentifier() else repr(name[:64]) for name in names[:5]]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        rest = "is not supported; leave it out"
        if len(names) > 1:
            rest = "are not supported; leave them out"
        said = f"{', '.join(shown)}{more} {rest}"
        raise ApiError(400, said, "unsupported_parameter", shown[0])


def _in_one_line(error: ValidationError) -> ApiError:
    """The fault that says most: of a union's alternatives, one of the right type."""
    faults = error.errors(include_url=False, include_context=False)

    def rank(fault: Any) -> tuple[bool, int]:
        return fault["type"].endswith(("_type", "_parsing")), -len(fault["loc"])

    fault = min(faults, key=rank)
    parts = [str(part)[:64] for part in fault["loc"] if part != "str"]
    place = ".".join(part for part in parts if part.replace("_", "").isalnum())
    message = _message(fault)
    return ApiError(400, f"{place}: {message}" if place else message, None, place or None)


def _message(fault: Any) -> str:
    """What was expected and what was got, of one of pydantic's errors."""
    if fault["type"] == "missing":
        return "expected a value, got none"
    if fault["type"] == "extra_forbidden":
        return "not supported; leave it out"
    said = fault["msg"].removeprefix("Value error, ")
    if not said.startswith("Input should be "):
        return str(said)
    expected = said.removeprefix("Input should be ").partition(", got ")[0]
    return f"expected {expected.partition(', unable')[0]}, got {_shown(fault['input'])}"


class CompletionRequest(Request):
    """Continue texts or token ids."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], SeveralPrompts]
        | Annotated[list[TokenIds], SeveralPrompts]
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = False

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _say_what_is_expected(cls, given: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(given)
        except ValidationError:
            raise ValueError(
                "expected a text, a list of token ids (whole numbers from 0), or a list of at most "
                f"{MOST_CHOICES} of either, each with at least 1 character or token; got "
                f"{_shown(given)}"
            ) from None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Those to continue."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]

    @property
    def scores(self) -> int | None:
        """As OpenAI's: 0 is for those of the answer's own tokens."""
        return self.logprobs

    @property
    def is_echoed(self) -> bool:
        """As asked."""
        return bool(self.echo)


def _shown(given: Any) -> str:
    """The beginning of a value, made of no more than that."""
    if isinstance(given, list):
        more = ", ..." if len(given) > 2 else ""
        return f"[{', '.join(map(_shown, given[:2]))}{more}]"
    if isinstance(given, dict):
        return "an object"
    return f"{given!r:.40}" if not isinstance(given, str) else repr(given[:40])


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: (
        str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)] | None
    ) = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {**self.model_dump(), "content": content}


class ChatRequest(Request):
    """Answer a conversation."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    generation_config: str | None = None

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

    @model_validator(mode="after")
    def _ask_for_logprobs_with_top(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected logprobs true with it; set logprobs")
        return self

    @property
    def limit(self) -> int | None:
        """By the newer name or the older one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def scores(self) -> int | None:
        """As OpenAI's `top_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class Choice:
    """One answer in the making.

    texts: those of single tokens, for log-probabilities. echo: the prompt's text, if it is a part
    of the answer.
    """

    def __init__(
        self,
        reply: Reply,
        prompt: list[int],
        text: AnswerText,
        texts: TokenTexts,
        echo: str = "",
    ) -> None:
        self.index, self.prompt, self.text, self.echo = len(reply.choices), prompt, text, echo
        self.request = request = reply.request
        self.options = request.stream_options or StreamOptions()
        self.is_chat = isinstance(request, ChatRequest)
        self.tokens: list[int] = []
        self.steps: list[Step] = []
        self.finish: str | None = None
        self._texts = texts
        self._characters = 0  # of the tokens whose log-probabilities are told

    def add(
        self, step: Step, scores: Iterable[TokenScore] = (), before: Iterable[TokenScore] = ()
    ) -> Piece:
        """Take a step up to its end token. scores: of its tokens, if the request asks for them.
        before: those of the prompt from its second token on.
        """
        tokens, is_first = step.tokens, not self.steps
        ends = self.request.stop_token_ids or ()
        place = next((n for n, token in enumerate(tokens) if token in ends), None)
        self.finish = step.finish
        if place is not None:
            tokens, self.finish = tokens[: place + 1], "stop"
        self.tokens += tokens
        self.steps.append(step)
        shown = tokens[:-1] if self.finish == "eos" or place is not None else tokens
        text, drafted = self.text.feed(shown, step.accepted if self.options.include_steps else 0)
        if self.text.stopped:
            self.finish = "stop"
        if self.finish:
            text += self.text.flush()
            self.finish = "length" if self.finish == "length" else "stop"
        scored = list[ScoredToken](zip(tokens, scores, strict=False))
        if is_first and self.request.is_echoed:
            text = self.echo + text
            if self.request.scores is not None:
                scored = [
                    (self.prompt[0], None),
                    *zip(self.prompt[1:], before, strict=True),
                    *scored,
                ]
        return Piece(self, text, tokens, scored, step, drafted)

    def entry(self, text: str, scored: Sequence[ScoredToken] = (), **more: Any) -> dict[str, Any]:
        """A part of this choice, or all of it."""
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
            if self.request.stream:
                said = {"delta": {"content": text}}
        logprobs = None
        if self.request.scores is not None:
            logprobs = self._logprobs(scored)
        return {"index": self.index, **said, "logprobs": logprobs, "finish_reason": None, **more}

    def opening(self) -> dict[str, Any]:
        """The first entry of a stream."""
        entry = {**self.entry(""), "logprobs": None}
        if self.is_chat:
            entry["delta"]["role"] = "assistant"
        return entry

    def _logprobs(self, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        if self.is_chat:
            return chat_logprobs([score for _, score in scored if score], self._texts)
        told = completion_logprobs(scored, self._texts, self._characters)
        self._characters += sum(map(len, told["tokens"]))
        return told


@dataclass
class Piece:
    """What a step adds to a choice."""

    choice: Choice
    text: str
    tokens: list[int]
    scored: list[ScoredToken]
    step: Step
    drafted: int  # characters of accepted draft tokens, the first ones

    def facts(self) -> dict[str, Any]:
        """What the step brought, for `include_steps`."""
        step = self.step
        return {
            "tokens": len(step.tokens),
            "accepted": accepted(step),
            "drafted": step.drafted,
            "accepted_chars": self.drafted,
            "seconds": round(step.draft_seconds + step.verify_seconds, 6),
            "prefill": step.accepted < 0,
        }


class Reply:
    """The answers to a request, as OpenAI's clients read them. prompts: each has as many choices as
    the request asks for.
    """

    def __init__(self, request: Request, model: str, prompts: list[list[int]]) -> None:
        self.request, self.prompts = request, prompts
        self.choices: list[Choice] = []
        is_chat = isinstance(request, ChatRequest)
        kind = "chat.completion" if is_chat else "text_completion"
        chunk = ".chunk" if is_chat and request.stream else ""
        self.head: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}",
            "object": kind + chunk,
            "created": int(time.time()),
            "model": model,
        }

    @property
    def is_complete(self) -> bool:
        """Whether all answers are there."""
        return all(choice.finish for choice in self.choices)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """All answers at once."""
        entries = []
        for choice in self.choices:
            own = [piece for piece in pieces if piece.choice is choice]
            text = "".join(piece.text for piece in own)
            scored = [pair for piece in own for pair in piece.scored]
            more: dict[str, Any] = {"finish_reason": choice.finish}
            if self.request.return_token_ids:
                more["token_ids"] = choice.tokens
            entries.append(choice.entry(text, scored, **more))
        return {**self.head, "choices": entries, **self._prompt_ids(entries)}

    def opening(self, choice: Choice) -> dict[str, Any]:
        """The first chunk of a choice."""
        entry = choice.opening()
        return {**self.head, "choices": [entry], **self._prompt_ids([entry])}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The chunk of a step."""
        choice = piece.choice
        more: dict[str, Any] = {"finish_reason": choice.finish}
        if choice.options.include_steps:
            more["step"] = piece.facts()
        if self.request.return_token_ids:
            more["token_ids"] = piece.tokens
        return {**self.head, "choices": [choice.entry(piece.text, piece.scored, **more)]}

    def usage(self, reused: int, seconds: float) -> dict[str, Any]:
        """Counts in OpenAI's names, over all choices; a prompt counts once. reused: prompt tokens
        that were not computed again. seconds: of the engine.
        """
        steps = [step for choice in self.choices for step in choice.steps]
        right = sum(map(accepted, steps))
        drafted = sum(step.drafted for step in steps)
        prompt = sum(map(len, self.prompts))
        completion = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": reused},
            "completion_tokens_details": {
                "accepted_prediction_tokens": right,
                "rejected_prediction_tokens": drafted - right,
            },
            "steps": len(steps),
            "seconds": round(seconds, 6),
        }

    def _prompt_ids(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """If they are asked for, those of the only prompt; those of several are in the entries."""
        if not self.request.return_token_ids:
            return {}
        if len(self.prompts) == 1:
            return {"prompt_token_ids": self.prompts[0]}
        for entry in entries:
            entry["prompt_token_ids"] = self.choices[entry["index"]].prompt
        return {}


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
