"""What the bodies of Responses and Messages have in common: how they become a chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from draftheads.infer.serve.protocol import Json
from draftheads.infer.text import THOUGHT_KEY, assistant, tool_call


class HasText(Protocol):
    """A part of a message."""

    text: str


def joined(content: str | Iterable[HasText] | None) -> str:
    """The text of a content that is a text or has parts, with blank lines between them."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n\n".join(part.text for part in content)


def thought(text: str) -> Json:
    """Reasoning as a message."""
    return {**assistant(""), THOUGHT_KEY: text}


def call(name: str, arguments: Json, call_id: str) -> Json:
    """A call as a message."""
    return {**assistant(""), "tool_calls": [tool_call(name, arguments, call_id)]}


def result(text: str, call_id: str) -> Json:
    """The result of a call as a message."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def chat_messages(messages: Iterable[Json]) -> list[Json]:
    """The messages of a conversation in which templates find what they expect: one system message,
    at the beginning, and one message for each turn. A later system message becomes the user's.
    """
    chat: list[Json] = []
    for message in messages:
        role = message["role"]
        if role in ("system", "developer"):
            is_first = all(each["role"] == "system" for each in chat)
            role = "system" if is_first else "user"
        if role == "tool" or not chat or chat[-1]["role"] != role:
            chat.append({**message, "role": role})
            continue
        last = chat[-1]
        for key in message.keys() & {"content", THOUGHT_KEY}:
            last[key] = "\n\n".join(filter(None, (last.get(key), message[key])))
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    return chat


def thinking_variables(effort: str | None, thinks: bool | None = None) -> Json:
    """Variables of chat templates that say how much to reason; a template that does not read them
    ignores them, because agents always send an effort.
    """
    if effort == "none" or thinks is False:
        return {"enable_thinking": False}
    variables: Json = {} if thinks is None else {"enable_thinking": True}
    return variables if effort is None else {**variables, "reasoning_effort": effort}
