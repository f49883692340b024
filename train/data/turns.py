"""The turns of a conversation, under whatever names people give them, as messages for a template.

Roles are recognised by name. A tool call is a turn of its own (`function_call`, ShareGPT), or an
assistant's `tool_calls` (OpenAI); both become the latter. What a tool answers has the role "tool".
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from draftheads.train.data.prompt_files import describe

USER_ROLES = frozenset({"user", "human", "prompter"})
SYSTEM_ROLES = frozenset({"system", "developer"})
ANSWER_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"})
CALL_ROLES = frozenset({"function_call", "tool_call"})
RESULT_ROLES = frozenset({"tool", "function", "observation", "tool_response", "ipython"})
THOUGHT_ROLES = frozenset({"thinking"})
"""Left out: no template has a place for a turn of thoughts."""

SKIP = "remove the record, or pass --skip-empty"
THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)

Message = dict[str, Any]
Messages = tuple[Message, ...]


class EmptyPromptError(ValueError):
    """A record without anything to ask or to learn; `skip_empty` leaves such records out."""


@dataclass(frozen=True)
class Reading:
    """What of a conversation is kept beside system and user turns.

    tools: calls and results. answers: what the assistant said. reasoning: <think> ... </think> in
    answers. left_out: counts what is not text, by its kind.
    """

    tools: Literal["keep", "drop"] = "drop"
    reasoning: Literal["keep", "drop"] = "keep"
    answers: bool = False
    left_out: Counter[str] = field(default_factory=Counter)

    def text(self, where: str, value: Any) -> str:
        """A text, or the texts of OpenAI's content parts. Raises ValueError for anything else."""
        if isinstance(value, list):
            parts = [part if isinstance(part, dict) else {"text": part} for part in value]
            for part in parts:
                kind = str(part.get("type", "text"))
                # data sets give all parts the same keys, null where a part has no text
                self.left_out[kind] += not part.get("text") and "text" not in kind
            value = [part["text"] for part in parts if part.get("text") is not None]
            odd = next((text for text in value if not isinstance(text, str)), None)
            value = odd if odd is not None else "".join(value)
        if not isinstance(value, str):
            raise ValueError(
                f"{where}: expected a string, got {describe(value)}; give the text itself"
            )
        return value

    def asked(self, where: str, value: Any) -> str:
        """As `text`; raises EmptyPromptError for an empty one."""
        text = self.text(where, value)
        if not text.strip():
            raise EmptyPromptError(f"{where}: expected a question, got an empty string; {SKIP}")
        return text


def read_turns(where: str, turns: list[Any], reading: Reading) -> Messages:
    """Messages of a conversation that ends with what is asked, or with `answers` said.

    Raises ValueError, naming the turn; EmptyPromptError where nothing is asked or said.
    """
    kept: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        message = _message(f"{where}, turn {number}", turn, reading)
        if message is not None:
            _link(kept, message)
            kept.append(message)
    last = {"assistant"} if reading.answers else {"user", "tool"}
    while kept and kept[-1]["role"] not in last:
        kept.pop()  # nothing is asked, or said, after it
    if not any(message["role"] == "user" for message in kept):
        raise EmptyPromptError(f"{where}: expected a user turn, found none; {SKIP}")
    return tuple(kept)


def with_tools(messages: Sequence[Message]) -> bool:
    """Whether a conversation has tool calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def check_tools(tokenizer: Any, template_args: dict[str, Any]) -> None:
    """Raises ValueError for a chat template that does not show tool calls and their results."""
    call = {"name": "look_up", "arguments": {"word": "heron"}}
    talk: list[Message] = [
        {"role": "user", "content": "What is a heron?"},
        {"role": "assistant", "content": "", "tool_calls": [_call("call00000", call)]},
        {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "A bird."},
    ]
    try:
        shown = tokenizer.chat_template and tokenizer.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True, **template_args
        )
        problem = "drops them"
    except (TemplateError, TypeError) as error:  # raised by the template
        shown, problem = "", f"refuses them ({error})"
    if not (shown and "look_up" in shown and "A bird." in shown):
        problem = problem if tokenizer.chat_template else "is missing"
        raise ValueError(
            f"--tools: expected a chat template that shows tool calls and results, the one of "
            f"{tokenizer.name_or_path} {problem}; leave them out with --tools drop"
        )


def _message(where: str, turn: Any, reading: Reading) -> Message | None:
    """A turn as a message; None: it is left out."""
    if not isinstance(turn, dict) or not (turn.get("role") or turn.get("from")):
        raise ValueError(
            f'{where}: expected {{"role", "content"}} or {{"from", "value"}}, '
            f"got {describe(turn)}; rename the keys"
        )
    role = str(turn.get("role") or turn["from"]).lower()
    content = turn["content"] if "content" in turn else turn.get("value")
    if role in USER_ROLES:
        return {"role": "user", "content": reading.asked(where, content)}
    if role in SYSTEM_ROLES:
        text = "" if content is None else reading.text(where, content)
        return {"role": "system", "content": text} if text.strip() else None
    if role in CALL_ROLES:
        return _calls(where, "", content) if reading.tools == "keep" else None
    if role in ANSWER_ROLES:
        return _answer(where, turn, content, reading)
    if role in RESULT_ROLES:
        return _result(where, turn, content, reading) if reading.tools == "keep" else None
    if role in THOUGHT_ROLES:
        return None
    raise ValueError(
        f"{where}: expected a user, system, assistant or tool role, got {role!r}; rename it"
    )


def _answer(where: str, turn: Message, content: Any, reading: Reading) -> Message | None:
    calls = turn.get("tool_calls") or turn.get("function_call")
    calls = calls if reading.tools == "keep" else None
    if not (calls or reading.answers):
        return None
    text = "" if not content else reading.asked(where, content)
    if reading.reasoning == "drop":
        text = THOUGHT.sub("", text)
    if calls:
        return _calls(where, text, calls)
    return {"role": "assistant", "content": text} if text else None


def _calls(where: str, text: str, value: Any) -> Message:
    """An assistant's message that calls tools, given as JSON text or as objects."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # they do not know where they are
            raise ValueError(
                f"{where}: expected a tool call as JSON, got {value[:40]!r} ({error}); repair it, "
                "or leave tools out"
            ) from error
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{where}: expected a tool call {{"name", "arguments"}}, got {describe(call)}; '
                "repair it, or leave tools out"
            )
        calls.append(_call(call.get("id"), function))
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _call(name: str | None, function: Message) -> Message:
    """As chat templates want it: arguments are an object."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # a tool that takes plain text
            arguments = {"input": arguments}
    function = {"name": function["name"], "arguments": arguments or {}}
    return {"id": name, "type": "function", "function": function}


def _result(where: str, turn: Message, content: Any, reading: Reading) -> Message:
    if content is not None and not isinstance(content, str | list):
        content = json.dumps(content)
    message = {"role": "tool", "content": reading.asked(where, content) if content else ""}
    return message | {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}


def _link(kept: list[Message], message: Message) -> None:
    """Name calls, and results after what they answer, where the source did not."""
    before = sum(len(other.get("tool_calls", ())) for other in kept)
    for place, call in enumerate(message.get("tool_calls", ()), start=before):
        call["id"] = call["id"] or f"call{place:05d}"  # nine letters, as Mistral's templates demand
    if message["role"] != "tool":
        return
    results = 0
    while results < len(kept) and kept[-1 - results]["role"] == "tool":
        results += 1
    calls = kept[-1 - results].get("tool_calls", ()) if results < len(kept) else ()
    if results < len(calls):
        message.setdefault("name", calls[results]["function"]["name"])
        message.setdefault("tool_call_id", calls[results]["id"])
