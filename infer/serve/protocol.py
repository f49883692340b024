"""OpenAI's requests and errors. Options that this engine does not support are refused.

Extensions: `top_k`, `return_token_ids`, `stop_token_ids`, `structured_outputs` and variables of the
chat template as in vLLM, `draft: false` for the plain model, and `stream_options.include_steps` for
the results of each forward pass of the target.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException

from draftheads.arguments import expected
from draftheads.heads.target.load import template_variables
from draftheads.infer.text import read_arguments

Json = dict[str, Any]
"""A JSON object."""
OFF = {
    "add_special_tokens",
    "bad_words",
    "chat_template_kwargs",
    "echo",
    "frequency_penalty",
    "functions",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "suffix",
    "top_logprobs",
    "use_beam_search",
}
"""Unsupported options, which have no effect if they are 0, false or empty."""
NEUTRAL = {
    "background": False,
    "best_of": 1,
    "include_reasoning": True,
    "length_penalty": 1,
    "modalities": ["text"],
    "repetition_penalty": 1,
    "spaces_between_special_tokens": True,
    "truncation": "disabled",
}
"""Other unsupported options, and their values without effect. Null never has an effect."""
HARMLESS = {
    "cache_prompt",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "user",
}
"""Options that are ignored, because no value of them changes an answer."""
ADVICE = {
    "background": "stream the answer",
    "conversation": "send the whole input",
    "previous_response_id": "send the whole input",
}
"""What to do without an unsupported option, where it is more than to leave it out."""
TEMPLATE_VARIABLES = {"documents": None, "reasoning_effort": "medium", "verbosity": "medium"}
"""Options that are variables of chat templates, and their values without effect."""
SAY_NOTHING = {"type", "properties", "required", "title", "description", "$schema"}
"""Keywords of a schema that, without properties, leave every key to the model."""
MOST_STOPS = 16
MOST_MESSAGES, MOST_PARTS = 1024, 64
MOST_TOOLS = 128
MOST_CHOICES = 128
"""Most answers to a request: prompts x n."""
MOST_LOGPROBS = 20
MOST_BRACKETS = 1 << 17
"""Most brackets of a body. A million lists take Python seconds, in which no other thread runs."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
SeveralPrompts = Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)
Choices = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopStrings = Annotated[list[StopString], Field(max_length=MOST_STOPS, fail_fast=True)]


class ApiError(HTTPException):
    """An error that the client gets in OpenAI's form. param: the option that it concerns."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        **headers: str,
    ) -> None:
        super().__init__(status, message, headers or None)
        self.code = code
        self.param = param

    def body(self) -> Json:
        """The error in OpenAI's form."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class StreamOptions(BaseModel):
    """The additional contents of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = False
    include_steps: bool | None = False
    include_obfuscation: bool | None = False  # not read: padding against eavesdroppers


class NamedSchema(BaseModel):
    """A schema of answers, beside its name. Answers follow it, `strict` or not."""

    model_config = ConfigDict(strict=True)

    schema_: Json | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """The form of an answer. Some clients leave out the object around the schema."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: Json | None = Field(None, alias="schema")

    @property
    def schemas(self) -> list[Json]:
        """The given schemas: one, or two by mistake."""
        named = self.json_schema.schema_ if self.json_schema else None
        schemas = [schema for schema in (named, self.schema_) if schema is not None]
        return schemas or [{"type": "object"}] * (self.type == "json_object")

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if bool(self.schemas) == (self.type == "text"):
            raise ValueError(
                "expected json_schema.schema with type json_schema, and none with text, got type "
                f"{self.type} with{'' if self.schemas else 'out'} one"
            )
        return self


class StructuredOutputs(BaseModel):
    """The constraint of an answer, as in `Grammar`: one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Json | Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    disable_any_whitespace: bool | None = None  # not read: JSON has one way of spacing
    disable_fallback: bool | None = None  # not read: there is no other backend


class Body(BaseModel, ABC):
    """The body of a request, in any protocol. harmless: options that are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    harmless: ClassVar[Collection[str]] = HARMLESS

    model: str | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    store: bool | None = None  # false: not kept for learning

    @abstractmethod
    def generation(self) -> GenerationRequest:
        """What the engine is asked for. Raises ApiError and ValidationError."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        """Raise ApiError for an unsupported option that has an effect, because without it the
        answer would not be the one that was asked for.
        """
        if not isinstance(body, dict):
            raise ValueError("expected a JSON object")
        supported = cls.model_fields.keys() | cls.harmless
        for name, value in body.items():
            is_off = value is None or (name in OFF and not value) or value == NEUTRAL.get(name)
            if name not in supported and not is_off:
                # others than identifiers may have line breaks
                shown = name[:64] if name.isidentifier() else repr(name[:64])
                message = f"{shown} is not supported; {ADVICE.get(name, 'leave it out')}"
                raise ApiError(400, message, "unsupported_parameter", shown)
        return body


class GenerationRequest(Body):
    """The options that chats and completions share."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    seed: int | None = None
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    return_token_ids: bool | None = False
    skip_special_tokens: bool | None = True
    draft: bool | None = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def generation(self) -> GenerationRequest:
        """The request itself."""
        return self

    @property
    def grammars(self) -> list[tuple[Any, Any]]:
        """Kind and text of the grammars that the answer must follow, as in `Grammar`."""
        outputs = self.structured_outputs or StructuredOutputs()
        schemas = self.response_format.schemas if self.response_format else []
        texts = [
            *(("json_schema", schema) for schema in schemas),
            ("json_schema", outputs.json_),
            ("json_schema", {"type": "object"} if outputs.json_object else None),
            ("regex", outputs.regex),
            ("choice", outputs.choice),
            ("grammar", outputs.grammar),
        ]
        return [(kind, text) for kind, text in texts if text is not None]

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        return []

    @property
    def required_tools(self) -> list[Tool]:
        """The tools of which one must be called."""
        return []

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if isinstance(self.stop, str):
            return (self.stop,)
        return tuple(self.stop or ())

    @property
    def limit(self) -> int | None:
        """Most new tokens of an answer."""
        return self.max_tokens

    @property
    def count(self) -> int:
        """Number of answers for each prompt."""
        return self.n or 1

    @property
    def scores(self) -> int | None:
        """Number of likeliest tokens to return for each token; None: no log-probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """True if the text of an answer begins with its prompt."""
        return False

    @property
    def includes_steps(self) -> bool:
        """True if a stream contains the results of each step."""
        return bool(self.stream_options and self.stream_options.include_steps)


def parsed(kind: type[Body], body: bytes) -> GenerationRequest:
    """Parse a body of this kind. Raises ApiError."""
    if body.count(b"[") + body.count(b"{") > MOST_BRACKETS:
        raise ApiError(400, f"expected at most {MOST_BRACKETS} brackets, got more; send fewer")
    try:
        return kind.model_validate_json(body).generation()
    except ValidationError as error:
        raise _in_one_line(error) from None


def _in_one_line(error: ValidationError) -> ApiError:
    """The most informative fault: of a union's alternatives, one of the right type."""
    faults = error.errors(include_url=False)
    typed = [each for each in faults if not each["type"].endswith(("_type", "_parsing"))]
    fault: Any = max(typed or faults, key=lambda each: len(each["loc"]))
    parts = [str(part)[:64] for part in fault["loc"] if part != "str"]
    place = ".".join(part for part in parts if part.replace("_", "").isalnum())
    message = expected(fault["msg"])
    if fault["type"].startswith("union_tag"):
        place += ".type"
    if fault["type"] in ("missing", "union_tag_not_found"):
        message = "expected a value, got none"
    elif fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        message = f"expected one of {context['expected_tags']}, got {context['tag']!r:.40}"
    elif fault["type"] == "extra_forbidden":
        message = "expected no such option; leave it out"
    elif fault["type"] not in ("value_error", "json_invalid"):
        message = f"{message.partition(', got ')[0]}, got {fault['input']!r:.40}"
    return ApiError(400, f"{place}: {message}" if place else message, None, place or None)


class CompletionRequest(GenerationRequest):
    """Continue texts or token ids."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], SeveralPrompts]
        | Annotated[list[TokenIds], SeveralPrompts]
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts to continue."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return [*self.prompt]

    @property
    def scores(self) -> int | None:
        """OpenAI's `logprobs`: 0 asks for the log-probabilities of the answer's own tokens."""
        return self.logprobs

    @property
    def echoes(self) -> bool:
        """OpenAI's `echo`; log-probabilities begin at the prompt, too."""
        return bool(self.echo)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Described(BaseModel):
    """The base of request parts whose further keys templates may read."""

    model_config = ConfigDict(strict=True, extra="allow")


def _or_empty(value: Any) -> Any:
    """Replace null by the empty object."""
    return {} if value is None else value


class ArgumentsSchema(Described):
    """The JSON schema of a function's arguments."""

    type: Any = "object"
    properties: dict[str, Json | bool] = {}

    @property
    def closed(self) -> Json:
        """The schema. If it says nothing about keys, it allows only the empty object, because keys
        could go on forever.
        """
        schema = self.model_dump()
        says_nothing = not self.properties and schema.keys() <= SAY_NOTHING
        return {**schema, "additionalProperties": False} if says_nothing else schema


class Function(Described):
    """A function that may be called."""

    name: str = Field(pattern=r"^[\w.-]{1,128}$")
    description: str | None = ""
    parameters: Annotated[ArgumentsSchema, BeforeValidator(_or_empty)] = ArgumentsSchema()


class Tool(Described):
    """A tool that may be called."""

    type: Literal["function"]
    function: Function


class ToolName(BaseModel):
    """The only tool that may be called, by its name."""

    type: Literal["function"] = "function"
    function: Function


class CalledFunction(Described):
    """A function and its arguments: clients send JSON text, templates read an object."""

    name: Text
    arguments: Json

    @model_validator(mode="before")
    @classmethod
    def _read_arguments(cls, body: Any) -> Any:
        return {**body, "arguments": read_arguments(body)} if isinstance(body, dict) else body


class ToolCall(Described):
    """A call in a message."""

    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Described):
    """A message of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: (
        str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)] | None
    ) = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)

    def plain(self) -> Json:
        """The message as chat templates read it."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message = self.model_dump(exclude_none=True)
        if not self.tool_calls:
            message.pop("tool_calls", None)
        return {**message, "content": content}


class ChatRequest(GenerationRequest):
    """Answer a conversation."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: Json | None = None
    documents: list[Json] | None = None
    reasoning_effort: Text | None = None
    verbosity: Text | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | ToolName | None = None
    parallel_tool_calls: bool | None = True
    reasoning_format: Literal["auto", "none"] | None = "auto"

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _check_variables(cls, value: Any) -> Any:
        if value is None:
            return None
        variables = template_variables(value)
        if "chat_template" in variables:  # a program, which clients must not run here
            raise ValueError("the chat template is the server's own; leave chat_template out")
        return variables

    @model_validator(mode="after")
    def _ask_for_logprobs_with_top(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected logprobs true with it; set logprobs")
        return self

    @model_validator(mode="after")
    def _check_last_message(self) -> ChatRequest:
        is_begun = self.messages[-1].role == "assistant"
        right = {"continue_final_message": is_begun, "add_generation_prompt": not is_begun}
        for name, value in right.items():
            if getattr(self, name) not in (None, value):
                message = (
                    f"{name}: expected {json.dumps(value)}, as a last message is continued if, and "
                    "only if, it is the assistant's; leave it out"
                )
                raise ApiError(400, message, param=name)
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatRequest:
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not self.required_tools:
            name = choice.function.name if isinstance(choice, ToolName) else choice
            message = f"tool_choice: expected one of `tools`, got {name!r:.80}; add it"
            raise ApiError(400, message, param="tool_choice")
        return self

    @property
    def required_tools(self) -> list[Tool]:
        """The tools of which the answer must be a call."""
        if isinstance(self.tool_choice, ToolName):
            name = self.tool_choice.function.name
            return [tool for tool in self.callable_tools if tool.function.name == name]
        return self.callable_tools if self.tool_choice == "required" else []

    @property
    def begun(self) -> str:
        """The beginning of the answer, if the last message is the assistant's."""
        last = self.messages[-1].plain()
        return str(last["content"]) if last["role"] == "assistant" else ""

    @property
    def variables(self) -> Json:
        """The variables of the chat template."""
        named = {name: getattr(self, name) for name in TEMPLATE_VARIABLES}
        variables = {name: value for name, value in named.items() if value is not None}
        variables |= self.chat_template_kwargs or {}
        tools = [tool.model_dump(exclude_none=True) for tool in self.callable_tools]
        return {**variables, "tools": tools} if tools else variables

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def limit(self) -> int | None:
        """The limit by its newer name or its older one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def scores(self) -> int | None:
        """The number in OpenAI's `top_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None
