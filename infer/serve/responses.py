"""OpenAI's Responses: a body becomes a chat, and its answer a list of items. Nothing is stored, so
each request has the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from draftheads.infer.serve.blocks import Block, BlockReply
from draftheads.infer.serve.conversation import (
    ConversationBody,
    Items,
    Options,
    Texts,
)
from draftheads.infer.serve.jobs import Job
from draftheads.infer.serve.protocol import (
    HARMLESS,
    MOST_TOOLS,
    ApiError,
    ChatRequest,
    Described,
    Function,
    Json,
    ToolName,
)

TYPES = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""Of the parts of items, and of their events."""


class FunctionTool(Function):
    """A function that may be called."""

    type: Literal["function"]


class UnshownTool(Described):
    """A tool that Codex lists in every request. The model is not shown it, so it never calls it."""

    type: Literal["web_search", "namespace"]


Tools = list[Annotated[FunctionTool | UnshownTool, Field(discriminator="type")]]


class ResponsesBody(ConversationBody):
    """A request of Responses."""

    harmless = HARMLESS | {"client_metadata", "stream_options"}

    input: Items
    instructions: Texts = []
    tools: Tools | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    parallel_tool_calls: bool | None = True
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: Options | None = None
    reasoning: Options | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # not read

    def generation(self) -> ChatRequest:
        """The same as a chat."""
        return self.chat(
            self.instructions,
            self.input,
            [tool for tool in self.tools or () if isinstance(tool, FunctionTool)],
            (self.text, self.reasoning),
            max_tokens=self.max_output_tokens,
            parallel_tool_calls=self.parallel_tool_calls,
        )


class ResponsesReply(BlockReply):
    """The answer to a request of Responses."""

    sent = 0  # events

    def start(self) -> Iterator[Json]:
        """The answer without items."""
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def open(self, block: Block) -> Iterator[Json]:
        """An item, and the part in it."""
        item = {**_item(block), "status": "in_progress"}
        yield self._event("output_item.added", output_index=block.number, item=item)
        if block.kind != "call":
            yield self._event("content_part.added", **_place(block), part=_part(block))

    def delta(self, block: Block, text: str) -> Json:
        """A piece of a text or of arguments."""
        return self._event(f"{TYPES[block.kind]}.delta", **_text_event(block), delta=text)

    def close(self, block: Block) -> Iterator[Json]:
        """The whole text or arguments, part and item."""
        key = "arguments" if block.kind == "call" else "text"
        whole = {**_text_event(block), key: block.text}
        yield self._event(f"{TYPES[block.kind]}.done", **whole)
        if block.kind != "call":
            yield self._event("content_part.done", **_place(block), part=_part(block))
        yield self._event("output_item.done", output_index=block.number, item=_item(block))

    def finish(self, jobs: Sequence[Job]) -> Iterator[Json]:
        """The whole answer."""
        answer = self.answer(jobs)
        yield self._event(answer["status"], response=answer)

    def answer(self, jobs: Sequence[Job]) -> Json:
        """The answer with its items and usage."""
        is_cut = self.choice.finish == "length"
        usage = self.usage(jobs)
        return {
            **self._response("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }

    def failure(self, error: ApiError) -> Json:
        """The answer as far as it has come, and the error."""
        code = "server_error" if error.status_code >= 500 else "invalid_prompt"
        fault = {"code": code, "message": error.detail}
        return self._event("failed", response={**self._response("failed"), "error": fault})

    def _response(self, status: str) -> Json:
        request = self.request
        assert isinstance(request, ChatRequest)
        choice: Any = request.tool_choice or "auto"
        if isinstance(choice, ToolName):
            choice = {"type": "function", "name": choice.function.name}
        tools = [{"type": "function", **tool.function.model_dump()} for tool in request.tools or ()]
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "error": None,
            "model": self.head["model"],
            "output": [_item(block) for block in self.blocks],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": choice,
            "tools": tools,
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        number = self.sent
        self.sent += 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}


def _place(block: Block) -> Json:
    """Where a block is; calls have no parts."""
    place = {"item_id": f"item_{block.id}", "output_index": block.number}
    return place if block.kind == "call" else {**place, "content_index": 0}


def _text_event(block: Block) -> Json:
    """What events about the text of a block have besides it."""
    return {**_place(block), "logprobs": []} if block.kind == "text" else _place(block)


def _part(block: Block) -> Json:
    part = {"type": TYPES[block.kind], "text": block.text}
    return {**part, "annotations": []} if block.kind == "text" else part


def _item(block: Block) -> Json:
    """A block as an item; one that has just been opened has no content."""
    head = {"id": f"item_{block.id}", "status": "completed"}
    if block.kind == "call":
        call = {"call_id": block.id, "name": block.name, "arguments": block.text}
        return {**head, "type": "function_call", **call}
    content = [_part(block)] if block.text else []
    if block.kind == "reasoning":
        return {**head, "type": "reasoning", "summary": [], "content": content}
    return {**head, "type": "message", "role": "assistant", "content": content}
