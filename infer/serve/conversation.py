"""Conversations of Responses and Messages, which become chats: their items and blocks are the same
things under other names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field

from draftheads.infer.serve.protocol import (
    MOST_MESSAGES,
    MOST_PARTS,
    Body,
    CalledFunction,
    ChatRequest,
    Described,
    Function,
    Json,
    ResponseFormat,
    Text,
)
from draftheads.infer.text import THOUGHT_KEY, assistant, tool_call

FUNCTION_KEYS = {"name", "description", "parameters"}
"""What templates read of a function."""


def _in_parts(content: Any) -> Any:
    """A content in parts; it may also be a text, or nothing."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [] if content is None else content


def _with_type(item: Any) -> Any:
    """Messages may leave out their type."""
    return {"type": "message", **item} if isinstance(item, dict) else item


def _as_choice(choice: Any) -> Any:
    return {"type": choice} if isinstance(choice, str) else choice


class TextItem(Described):
    """A text."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str

    def message(self, role: str) -> Json:
        """As chats have it."""
        return {"role": role, "content": self.text}


Texts = Annotated[list[TextItem], Field(fail_fast=True), BeforeValidator(_in_parts)]


class ReasoningItem(Described):
    """The reasoning of an answer; of what another server has encrypted, nothing."""

    type: Literal["reasoning", "thinking", "redacted_thinking"]
    thinking: str = ""
    content: Texts = []
    summary: Texts = []

    def message(self, role: str) -> Json:
        """As chats have it."""
        text = self.thinking or text_of(self.content or self.summary)
        return {**assistant(""), THOUGHT_KEY: text}


class CallItem(CalledFunction):
    """A call of a function."""

    type: Literal["function_call", "tool_use"]
    call_id: Text = Field(validation_alias=AliasChoices("call_id", "id"))

    def message(self, role: str) -> Json:
        """As chats have it."""
        call = tool_call(self.name, self.arguments, self.call_id)
        return {**assistant(""), "tool_calls": [call]}


class PictureItem(Described):
    """A picture in the result of a call, in whose place the model reads that it cannot see it: its
    agent looked at a file, and would end at a refusal.
    """

    type: Literal["image", "input_image"]
    text: ClassVar = "[a picture, which this model cannot see]"


class ResultItem(Described):
    """The result of a call. Templates have no key for an error; the text says it."""

    type: Literal["function_call_output", "tool_result"]
    call_id: Text = Field(validation_alias=AliasChoices("call_id", "tool_use_id"))
    content: Annotated[
        list[Annotated[TextItem | PictureItem, Field(discriminator="type")]],
        Field(fail_fast=True, validation_alias=AliasChoices("output", "content")),
        BeforeValidator(_in_parts),
    ] = []

    def message(self, role: str) -> Json:
        """As chats have it."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.content)}


Part = Annotated[
    TextItem | ReasoningItem | CallItem | ResultItem,
    Field(discriminator="type"),
]


class MessageItem(Described):
    """A message."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        list[Part],
        Field(max_length=MOST_PARTS, fail_fast=True),
        BeforeValidator(_in_parts),
    ]


Item = Annotated[
    Annotated[MessageItem | Part, Field(discriminator="type")],
    BeforeValidator(_with_type),
]
Items = Annotated[
    list[Item],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(_in_parts),
]


class ToolChoice(Described):
    """Which tools may be called."""

    type: Literal["auto", "none", "required", "any", "function", "tool"] = "auto"
    name: Text | None = None
    disable_parallel_tool_use: bool | None = False

    @property
    def choice(self) -> Any:
        """As chats have it."""
        if self.type in ("function", "tool"):
            return {"function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class TextFormat(ResponseFormat):
    """The form of a text, which may have a name."""

    model_config = ConfigDict(extra="ignore")


class Options(Described):
    """Options that the protocols have in objects of their own."""

    type: Literal["enabled", "adaptive", "disabled"] | None = None
    effort: Text | None = None
    format: TextFormat | None = None

    @property
    def variables(self) -> Json:
        """Variables of chat templates. Those that a template does not read are ignored, because
        agents always say how much to reason.
        """
        if self.type == "disabled" or self.effort == "none":
            return {"enable_thinking": False}
        return {"reasoning_effort": self.effort} if self.effort else {}


class ConversationBody(Body):
    """What bodies of Responses and Messages have in common."""

    tool_choice: Annotated[ToolChoice, BeforeValidator(_as_choice)] | None = None

    def chat(
        self,
        system: Sequence[TextItem],
        items: Sequence[Item],
        tools: Iterable[Function],
        options: Iterable[Options | None],
        **more: Any,
    ) -> ChatRequest:
        """The same as a chat. more: its other options."""
        for option in filter(None, options):
            more.setdefault("chat_template_kwargs", {}).update(option.variables)
            more["response_format"] = more.get("response_format") or option.format
        if self.tool_choice is not None:
            more["tool_choice"] = self.tool_choice.choice
        functions = [tool.model_dump(include=FUNCTION_KEYS) for tool in tools]
        return ChatRequest.model_validate(
            {
                **self.model_dump(include={*Body.model_fields}),
                "messages": chat_messages(text_of(system), items),
                "tools": [{"type": "function", "function": each} for each in functions],
                **more,
            }
        )


def text_of(texts: Iterable[TextItem | PictureItem]) -> str:
    """Texts with blank lines between them."""
    return "\n\n".join(each.text for each in texts)


def chat_messages(system: str, items: Iterable[Item]) -> list[Json]:
    """The messages of a conversation as templates expect them: one of the system, at the beginning,
    and one for each turn. A later system message becomes the user's.
    """
    chat: list[Json] = [{"role": "system", "content": system}] if system else []
    for item in items:
        role = item.role if isinstance(item, MessageItem) else "user"
        if role in ("system", "developer"):
            role = "system" if all(each["role"] == "system" for each in chat) else "user"
        for part in item.content if isinstance(item, MessageItem) else [item]:
            _append(chat, part.message(role))
    return chat


def _append(chat: list[Json], message: Json) -> None:
    """Append a message, or add it to the last one of its role."""
    last: Json = chat[-1] if chat else {"role": None}
    if message["role"] == "tool" or message["role"] != last["role"]:
        chat.append(message)
        return
    for key in message.keys() & {"content", THOUGHT_KEY}:
        last[key] = "\n\n".join(filter(None, (last.get(key), message[key])))
    last["tool_calls"] = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
