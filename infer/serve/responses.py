"""OpenAI's Responses: a body becomes a chat, and its answer a list of items. Nothing is stored, so
each request has the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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
    Body,
    CalledFunction,
    ChatRequest,
    Function,
    Json,
    Text,
    ToolName,
)

STRICT = ConfigDict(strict=True)
PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
"""Of the ids of items."""
TEXT_TYPES = {"reasoning": "reasoning_text", "text": "output_text"}
"""Types of the parts of items, and of their events."""


class ItemText(BaseModel):
    """A part of an item."""

    model_config = STRICT

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Parts = Annotated[list[ItemText], Field(max_length=MOST_PARTS, fail_fast=True)]


class MessageItem(BaseModel):
    """A message."""

    model_config = STRICT

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts

    def message(self) -> Json:
        """As chats have it."""
        return {"role": self.role, "content": joined(self.content)}


class ReasoningItem(BaseModel):
    """The reasoning of an answer."""

    model_config = STRICT

    type: Literal["reasoning"]
    content: Parts | None = None
    summary: Parts = []

    def message(self) -> Json:
        """As chats have it."""
        return thought(joined(self.content or self.summary))


class CallItem(CalledFunction):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: Text

    def message(self) -> Json:
        """As chats have it."""
        return call(self.name, self.arguments, self.call_id)


class ResultItem(BaseModel):
    """The result of a call."""

    model_config = STRICT

    type: Literal["function_call_output"]
    call_id: Text
    output: str | Parts

    def message(self) -> Json:
        """As chats have it."""
        return result(joined(self.output), self.call_id)


def _with_type(item: Any) -> Any:
    """Messages may leave out their type."""
    return {"type": "message", **item} if isinstance(item, dict) else item


Item = Annotated[
    Annotated[MessageItem | ReasoningItem | CallItem | ResultItem, Field(discriminator="type")],
    BeforeValidator(_with_type),
]


class FunctionTool(Function):
    """A function that may be called. Calls follow its schema if one is required, strict or not."""

    type: Literal["function"]


class HostedTool(BaseModel):
    """A tool that Codex always lists. It is not shown to the model, so it is never called."""

    type: Literal["web_search", "namespace"]


ToolItem = Annotated[FunctionTool | HostedTool, Field(discriminator="type")]


class NamedFunction(BaseModel):
    """The only tool that may be called."""

    model_config = STRICT

    type: Literal["function"]
    name: Text


class TextFormat(BaseModel):
    """The form of a text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    schema_: Json | None = Field(None, alias="schema")

    def response_format(self) -> Json:
        """As chats have it."""
        return {"type": self.type, "schema": self.schema_}


class TextOptions(BaseModel):
    """The form of a text, and how long it is."""

    model_config = STRICT

    format: TextFormat | None = None
    verbosity: Text | None = None


class ReasoningOptions(BaseModel):
    """How much to reason."""

    model_config = STRICT

    effort: Text | None = None


class ResponsesBody(Body):
    """A request of Responses."""

    harmless = HARMLESS | {"client_metadata", "stream_options"}

    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    tools: list[ToolItem] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = True
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # not read
    store: bool | None = None  # false: not kept for learning

    def generation(self) -> ChatRequest:
        """The same as a chat."""
        items = self.input
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(items, str):
            messages.append({"role": "user", "content": items})
        else:
            messages += [item.message() for item in items]
        text = self.text or TextOptions()
        variables = thinking_variables(self.reasoning.effort if self.reasoning else None)
        if text.verbosity:
            variables["verbosity"] = text.verbosity
        choice: Any = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"function": {"name": choice.name}}
        return ChatRequest.model_validate(
            {
                **self.model_dump(include=SAME),
                "messages": chat_messages(messages),
                "tools": [
                    {"type": "function", "function": tool.model_dump(include=FUNCTION)}
                    for tool in self.tools or ()
                    if isinstance(tool, FunctionTool)
                ],
                "tool_choice": choice,
                "max_tokens": self.max_output_tokens,
                "response_format": text.format and text.format.response_format(),
                "chat_template_kwargs": variables,
            }
        )


SAME = {"model", "stream", "temperature", "top_p", "store", "parallel_tool_calls"}
"""Options that chats have, too."""
FUNCTION = {"name", "description", "parameters"}
"""What templates read of a function."""


class ResponsesReply(BlockReply):
    """The answer to a request of Responses."""

    sent = 0  # events

    def begun(self) -> Iterator[Json]:
        """The answer without items."""
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def opened(self, block: Block) -> Iterator[Json]:
        """An item, and the part in it."""
        item = _item(block, "in_progress")
        yield self._event("output_item.added", output_index=block.number, item=item)
        if block.kind != "call":
            yield self._event("content_part.added", block, part=_part(block))

    def grown(self, block: Block, text: str) -> Json:
        """A piece of a text or of arguments."""
        more: Json = {"logprobs": []} if block.kind == "text" else {}
        return self._event(f"{_name(block)}.delta", block, delta=text, **more)

    def closed(self, block: Block) -> Iterator[Json]:
        """The whole text or arguments, part and item."""
        more: Json = {"text": block.text}
        if block.kind == "call":
            more = {"arguments": block.text, "name": block.call["function"]["name"]}
        elif block.kind == "text":
            more["logprobs"] = []
        yield self._event(f"{_name(block)}.done", block, **more)
        if block.kind != "call":
            yield self._event("content_part.done", block, part=_part(block))
        item = _item(block, self._item_status(block))
        yield self._event("output_item.done", output_index=block.number, item=item)

    def ended(self, jobs: Sequence[Job]) -> Iterator[Json]:
        """The whole answer."""
        answer = self.answer(jobs)
        yield self._event(answer["status"], response=answer)

    def answer(self, jobs: Sequence[Job]) -> Json:
        """The answer with its items and usage."""
        usage = self.usage(jobs)
        return {
            **self._response(self._status),
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
        code = error.code or "server_error"
        fault = {"code": code, "message": error.detail}
        return self._event("failed", response={**self._response("failed"), "error": fault})

    @property
    def _status(self) -> str:
        return "incomplete" if self.choice.finish == "length" else "completed"

    def _item_status(self, block: Block) -> str:
        """Of a closed item: the last one may be cut."""
        return self._status if block is self.blocks[-1] else "completed"

    def _response(self, status: str) -> Json:
        request = self.request
        assert isinstance(request, ChatRequest)
        choice: Any = request.tool_choice or "auto"
        if isinstance(choice, ToolName):
            choice = {"type": "function", "name": choice.function.name}
        is_cut = status == "incomplete"
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "model": self.head["model"],
            "output": [_item(block, self._item_status(block)) for block in self.blocks],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "tool_choice": choice,
            "tools": [
                {"type": "function", "strict": None, **tool.function.model_dump()}
                for tool in request.tools or ()
            ],
            "max_output_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "usage": None,
        }

    def _event(self, name: str, block: Block | None = None, **fields: Any) -> Json:
        """An event, and the place of its block."""
        number = self.sent
        self.sent += 1
        place: Json = {}
        if block is not None:
            place = {"item_id": _id(block), "output_index": block.number}
            if block.kind != "call":
                place["content_index"] = 0
        return {"type": f"response.{name}", "sequence_number": number, **place, **fields}


def _id(block: Block) -> str:
    return PREFIXES[block.kind] + block.id


def _name(block: Block) -> str:
    return TEXT_TYPES.get(block.kind, "function_call_arguments")


def _part(block: Block) -> Json:
    part = {"type": TEXT_TYPES[block.kind], "text": block.text}
    return part if block.kind == "reasoning" else {**part, "annotations": [], "logprobs": []}


def _item(block: Block, status: str) -> Json:
    """A block as an item; an open one has no content yet."""
    head = {"id": _id(block), "status": status}
    content = [_part(block)] if block.text else []
    if block.kind == "reasoning":
        return {**head, "type": "reasoning", "summary": [], "content": content}
    if block.kind == "text":
        return {**head, "type": "message", "role": "assistant", "content": content}
    called = {"call_id": block.call["id"], "name": block.call["function"]["name"]}
    return {**head, "type": "function_call", **called, "arguments": block.text}
