"""Anthropic's Messages: a body becomes a chat, and its answer a message of blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json

from draftheads.infer.serve.blocks import Block, BlockReply
from draftheads.infer.serve.conversation import (
    ConversationBody,
    Items,
    Options,
    Texts,
    ToolChoice,
)
from draftheads.infer.serve.jobs import Job
from draftheads.infer.serve.protocol import (
    HARMLESS,
    MOST_TOOLS,
    ApiError,
    ArgumentsSchema,
    ChatRequest,
    Function,
    Json,
    StopStrings,
)

KEYS = {"reasoning": "thinking", "text": "text", "call": "partial_json"}
"""Of the text in a block; for calls, of the text in their deltas."""
DELTAS = {"reasoning": "thinking_delta", "text": "text_delta", "call": "input_json_delta"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
"""By the reasons of chats."""
ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Types of errors by status, where they are not of all below 500 or all from there."""


class CustomTool(Function):
    """A tool that may be called."""

    type: Literal["custom"] | None = None
    parameters: ArgumentsSchema = Field(ArgumentsSchema(), alias="input_schema")


class CountBody(ConversationBody):
    """A request to count the tokens of a conversation."""

    harmless = HARMLESS | {"cache_control", "context_management"}

    messages: Items
    system: Texts = []
    tools: list[CustomTool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    thinking: Options | None = None
    output_config: Options | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop_sequences: StopStrings | None = None

    def generation(self) -> ChatRequest:
        """The same as a chat."""
        choice = self.tool_choice or ToolChoice()
        return self.chat(
            self.system,
            self.messages,
            self.tools or (),
            (self.output_config, self.thinking),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
        )


class MessagesBody(CountBody):
    """A request of Messages."""

    max_tokens: int = Field(ge=1, lt=2**31)


class MessagesReply(BlockReply):
    """The answer to a request of Messages."""

    waiting = {"type": "ping"}

    def start(self) -> Iterator[Json]:
        """The message without blocks."""
        yield {"type": "message_start", "message": self.answer(())}

    def open(self, block: Block) -> Iterator[Json]:
        """An empty block."""
        content = _content(block)
        yield {"type": "content_block_start", "index": block.number, "content_block": content}

    def delta(self, block: Block, text: str) -> Json:
        """A piece of a text or of arguments."""
        delta = {"type": DELTAS[block.kind], KEYS[block.kind]: text}
        return {"type": "content_block_delta", "index": block.number, "delta": delta}

    def close(self, block: Block) -> Iterator[Json]:
        """The end of a block."""
        yield {"type": "content_block_stop", "index": block.number}

    def finish(self, jobs: Sequence[Job]) -> Iterator[Json]:
        """Why the message ended, and its usage."""
        yield {"type": "message_delta", "delta": self._stop, "usage": self._usage(jobs)}
        yield {"type": "message_stop"}

    def answer(self, jobs: Sequence[Job]) -> Json:
        """The message."""
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": [_content(block) for block in self.blocks],
            **self._stop,
            "usage": self._usage(jobs),
        }

    def failure(self, error: ApiError) -> Json:
        """The error in its own event."""
        return error_body(error)

    @property
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
            "output_tokens": usage["completion_tokens"],
        }


def error_body(error: ApiError) -> Json:
    """An error in Anthropic's form."""
    usual = "api_error" if error.status_code >= 500 else "invalid_request_error"
    kind = ERRORS.get(error.status_code, usual)
    message = error.detail
    if error.code == "context_length_exceeded":  # Claude Code summarises at these words
        message = f"prompt is too long: {message}"
    body: Json = {"type": kind, "message": message}
    if error.param == "thread":  # at this code, Anthropic's clients send whole conversations
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body}


def _content(block: Block) -> Json:
    """A block of a message."""
    if block.kind == "call":
        arguments = _arguments(block.text) if block.text else {}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
    key = KEYS[block.kind]
    signature = {"signature": ""} if block.kind == "reasoning" else {}
    return {"type": key, key: block.text, **signature}


def _arguments(text: str) -> Any:
    """The arguments of a call: of one that is cut, those that are whole. None of JSON that cannot
    be sent again, as of a number beyond floats.
    """
    try:
        arguments = from_json(text, allow_partial=True)
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return {}
    return arguments
