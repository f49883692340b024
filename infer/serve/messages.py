"""Anthropic's Messages: a body becomes a chat, and its answer a message of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from draftheads.infer.serve.blocks import Block, BlockReply
from draftheads.infer.serve.conversation import (
    call,
    chat_messages,
    joined,
    result,
    thinking_variables,
    thought,
)
from draftheads.infer.serve.jobs import Job
from draftheads.infer.serve.protocol import (
    HARMLESS,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    ApiError,
    ArgumentsSchema,
    Body,
    CalledFunction,
    ChatRequest,
    FunctionName,
    Json,
    StopStrings,
    Text,
    TextPart,
)

STRICT = ConfigDict(strict=True)
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""By the reasons of chats."""
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; others are invalid requests below 500, and the server's own errors from there."""
EMPTY_BLOCKS = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
TEXT_KEYS = {"reasoning": "thinking", "text": "text", "call": "partial_json"}
DELTA_TYPES = {"reasoning": "thinking_delta", "text": "text_delta", "call": "input_json_delta"}
Texts = str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]


class Thinking(BaseModel):
    """The reasoning of an answer."""

    model_config = STRICT

    type: Literal["thinking"]
    thinking: str

    def message(self, role: str) -> Json:
        """As chats have it."""
        return thought(self.thinking)


class RedactedThinking(BaseModel):
    """Reasoning that only another server can read."""

    type: Literal["redacted_thinking"]

    def message(self, role: str) -> Json:
        """As chats have it."""
        return thought("")


class MessageText(TextPart):
    """A text."""

    def message(self, role: str) -> Json:
        """As chats have it."""
        return {"role": role, "content": self.text}


class ToolUse(CalledFunction):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Text

    def message(self, role: str) -> Json:
        """As chats have it."""
        return call(self.name, self.arguments, self.id)


class ToolResult(BaseModel):
    """The result of a call. Its text says if it is an error: templates have no key for it."""

    model_config = STRICT

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts | None = None
    is_error: bool | None = None

    def message(self, role: str) -> Json:
        """As chats have it."""
        return result(joined(self.content), self.tool_use_id)


ContentBlock = Annotated[
    MessageText | ToolUse | ToolResult | Thinking | RedactedThinking, Field(discriminator="type")
]


class MessageParam(BaseModel):
    """A message; Claude Code sends some of the system's between others."""

    model_config = STRICT

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(max_length=MOST_PARTS, fail_fast=True)]

    def messages(self) -> Iterator[Json]:
        """Its blocks, as chats have them."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
        else:
            for block in self.content:
                yield block.message(self.role)


class CustomTool(BaseModel):
    """A tool that may be called."""

    model_config = STRICT

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: ArgumentsSchema

    def tool(self) -> Json:
        """As chats have it."""
        function = {"name": self.name, "parameters": self.input_schema.model_dump()}
        return {"type": "function", "function": {**function, "description": self.description}}


class ToolChoice(BaseModel):
    """Which tools may be called."""

    model_config = STRICT

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: Text | None = None
    disable_parallel_tool_use: bool | None = False

    def tool_choice(self) -> Any:
        """As chats have it."""
        if self.type == "tool":
            return {"function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingOptions(BaseModel):
    """Whether to reason."""

    model_config = STRICT

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None  # not read: nothing ends reasoning early


class OutputFormat(BaseModel):
    """A schema of the text."""

    model_config = STRICT

    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")

    def response_format(self) -> Json:
        """As chats have it."""
        return {"type": "json_schema", "schema": self.schema_}


class OutputConfig(BaseModel):
    """The form of the text, and how much to reason."""

    model_config = STRICT

    effort: Text | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """A request to count the tokens of a conversation."""

    harmless = HARMLESS | {"cache_control", "context_management", "inference_geo"}

    messages: list[MessageParam] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    system: Texts | None = None
    tools: list[CustomTool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None

    def generation(self) -> ChatRequest:
        """The same as a chat."""
        return ChatRequest.model_validate(self._options())

    def _options(self) -> Json:
        messages = [message for each in self.messages for message in each.messages()]
        if self.system:
            messages.insert(0, {"role": "system", "content": joined(self.system)})
        choice = self.tool_choice or ToolChoice()
        output = self.output_config or OutputConfig()
        thinks = {"enabled": True, "disabled": False}.get(
            self.thinking.type if self.thinking else ""
        )
        return {
            "model": self.model,
            "messages": chat_messages(messages),
            "tools": [tool.tool() for tool in self.tools or ()],
            "tool_choice": choice.tool_choice(),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "response_format": output.format and output.format.response_format(),
            "chat_template_kwargs": thinking_variables(output.effort, thinks),
        }


class MessagesBody(CountBody):
    """A request of Messages."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: StopStrings | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)

    def _options(self) -> Json:
        same = {"max_tokens", "temperature", "top_p", "top_k", "stream"}
        return {
            **super()._options(),
            **self.model_dump(include=same),
            "stop": self.stop_sequences,
        }


class MessagesReply(BlockReply):
    """The answer to a request of Messages."""

    def begun(self) -> Iterator[Json]:
        """The message without blocks."""
        yield {"type": "message_start", "message": self.answer(())}

    def opened(self, block: Block) -> Iterator[Json]:
        """An empty block."""
        empty = EMPTY_BLOCKS.get(block.kind) or _tool_use(block, {})
        yield {"type": "content_block_start", "index": block.number, "content_block": empty}

    def grown(self, block: Block, text: str) -> Json:
        """A piece of a text or of arguments."""
        delta = {"type": DELTA_TYPES[block.kind], TEXT_KEYS[block.kind]: text}
        return {"type": "content_block_delta", "index": block.number, "delta": delta}

    def closed(self, block: Block) -> Iterator[Json]:
        """The end of a block."""
        yield {"type": "content_block_stop", "index": block.number}

    def ended(self, jobs: Sequence[Job]) -> Iterator[Json]:
        """Why the message ended, and its usage."""
        yield {"type": "message_delta", "delta": self._stop(), "usage": self._usage(jobs)}
        yield {"type": "message_stop"}

    def waiting(self) -> Json:
        """A ping."""
        return {"type": "ping"}

    def answer(self, jobs: Sequence[Job]) -> Json:
        """The message."""
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": [_content(block) for block in self.blocks],
            **self._stop(),
            "usage": self._usage(jobs),
        }

    def failure(self, error: ApiError) -> Json:
        """The error in its own event."""
        return error_body(error)

    def _stop(self) -> Json:
        reason = STOP_REASONS.get(self.choice.finish or "")
        stopped = self.choice.stopped if reason == "end_turn" else None
        return {"stop_reason": "stop_sequence" if stopped else reason, "stop_sequence": stopped}

    def _usage(self, jobs: Sequence[Job]) -> Json:
        usage = self.usage(jobs)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }


def error_body(error: ApiError) -> Json:
    """An error in Anthropic's form."""
    usual = "api_error" if error.status_code >= 500 else "invalid_request_error"
    kind = ERROR_TYPES.get(error.status_code, usual)
    return {"type": "error", "error": {"type": kind, "message": error.detail}}


def _tool_use(block: Block, arguments: Any) -> Json:
    name = block.call["function"]["name"]
    return {"type": "tool_use", "id": block.call["id"], "name": name, "input": arguments}


def _content(block: Block) -> Json:
    """A block of a whole message."""
    if block.kind == "call":
        return _tool_use(block, _arguments(block.text))
    return {**EMPTY_BLOCKS[block.kind], TEXT_KEYS[block.kind]: block.text}


def _arguments(text: str) -> Any:
    """The arguments of a call; of one that is cut, those that are whole. Empty, if JSON cannot be
    sent: it has a number that is too large, or half a character.
    """
    try:
        arguments = from_json(text, allow_partial=True)
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return {}
    return arguments
