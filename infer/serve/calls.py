"""Calls of tools: how a chat template writes them, and how they are read from answers.

The form is found by rendering an example with the template itself. A call has its arguments as
JSON, with its name inside the same JSON or in the text before, or one parameter after another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import commonprefix
from typing import Any
from uuid import uuid4

from jinja2.exceptions import TemplateError

from draftheads.infer.grammar import SPACING, lark
from draftheads.infer.prompt import ANSWER, CLOSE, QUESTION, PromptRenderer, TextSource
from draftheads.infer.serve.protocol import Function, Json, Tool
from draftheads.infer.text import CALL_ID, assistant, tool_call, without_blanks

Schemas = Mapping[str, Json]
"""Those of each tool's arguments, by the tool's name."""
Found = tuple[list[tuple[Any, Any]], str]
"""Names and arguments with which a text begins, and the rest of the text."""
Reader = Callable[[str, Schemas], Found]
ONE, TWO = "draftheads_one", "draftheads_two"
"""Names of tools that are searched for in a rendered conversation."""
ARGUMENTS = {"key_a": "value_a", "key_b": 47}
DATA = re.compile(r'(?:\[\s*)?\{(?=\s*["}])')
KEY = re.compile(rf'"(\w+)":\s*(?:"{ONE}"|\{{\s*"key_a")')
NAME = re.compile(r"\s*([\w.-]+)(.*)", re.DOTALL)
EXAMPLE = re.compile(r'(.*?)\{\s*"key_a".*?47\s*\}(.*)', re.DOTALL)
PARAMETERS = re.compile(r"(.*?)key_a(.*?)value_a(.*?)key_b(.*?)47(.*)", re.DOTALL)
DECODER = json.JSONDecoder(strict=False)
"""Takes line breaks in strings, as models write them."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What the text of a target may raise."""


@dataclass(frozen=True)
class CallForm:
    """How a template writes calls.

    example: a call of `ONE` with ARGUMENTS. opening: the text before the first call; "": an answer
    that is JSON is a call. start: the end of what stands before each. closing: the text after the
    last. read: of the text after a start; raises one of UNREADABLE if it has no whole call.
    """

    example: str
    opening: str
    start: str
    closing: str
    read: Reader

    def divide(self, text: str) -> tuple[str, str]:
        """What stands before calls, and the rest, which begins with them; "": there are none."""
        if self.opening:
            before, opening, rest = text.partition(self.opening)
            return before, opening + rest
        return ("", text) if text.lstrip().startswith(("{", "[")) else (text, "")

    def grammar(self, tools: Sequence[Tool], tokenizer: Any) -> str:
        """The language of one call of one of these tools, in Lark's syntax. Raises ValueError for a
        form whose arguments are no JSON.
        """
        match = EXAMPLE.fullmatch(self.example)
        if match is None:
            raise ValueError(
                "tool_choice: expected auto or none, as this chat template writes arguments in "
                "another way than JSON, got another choice; leave it out"
            )
        before, after = match.groups()
        ids = tokenizer.get_added_vocab()
        end = lark(after, ids)
        calls = []
        for tool in tools:
            start = lark(before.lstrip().replace(ONE, tool.function.name), ids)
            schema = {"x-guidance": SPACING, **tool.function.parameters.model_dump()}
            calls.append(f"{start} %json {json.dumps(schema)} {end}")
        return "start: " + "\n | ".join(calls)

    def read_all(self, text: str, schemas: Schemas) -> tuple[list[Json], str]:
        """Calls as messages have them, and the text that is left: all of it if one of them cannot
        be read. schemas: of the tools that may be called.
        """
        calls: list[Json] = []
        left = ""
        try:
            for part in text.split(self.start)[1:] if self.start else [text]:
                found, rest = self.read(part, schemas)
                for name, arguments in found:
                    if name not in schemas and not self.opening:
                        raise ValueError("expected the name of a tool")
                    calls.append(call_entry(len(calls), name, arguments))
                if not without_blanks(self.closing).startswith(without_blanks(rest)):
                    left += rest.strip().removeprefix(self.closing).strip()
        except UNREADABLE:
            return [], text
        return calls, left


def call_entry(index: int, name: Any, arguments: Any) -> Json:
    """A call as choices have it. Raises one of UNREADABLE for what is none."""
    if not re.fullmatch(r"[\w.-]+", name) or not isinstance(arguments, dict):
        raise ValueError("expected a name and an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # fails for half a character
    return {"index": index, **tool_call(name, text, uuid4().hex[: len(CALL_ID)])}


def find_form(side: TextSource) -> CallForm | None:
    """None if the chat template leaves out tools or calls, or writes calls in another way."""
    tools = [
        Tool(type="function", function=Function(name=name)).model_dump() for name in (ONE, TWO)
    ]
    renderer = PromptRenderer(side, {**side.template_args, "tools": tools})

    def rendered(content: str, *names: str) -> str:
        answer = assistant(content)
        if names:
            answer["tool_calls"] = [tool_call(name, ARGUMENTS) for name in names]
        try:
            return renderer.text([QUESTION, answer], ask=False)
        except TemplateError:
            return ""

    plain = rendered(ANSWER)
    first = rendered("", ONE)
    head = re.sub(r"[<\[][^<>\[\]\s]*$", "", commonprefix([first, plain]))
    tail = re.sub(r"^[^<>\[\]]*[>\]]", "", _common_end(first, plain))
    call = first[len(head) : len(first) - len(tail)]
    for ids, text in (renderer.marks or {}).items():
        call = call.replace(renderer.tokenizer.decode(ids), text)
    call = call.rpartition(CLOSE)[2]
    both = rendered("", ONE, TWO)[len(head) :]
    return _form(call, both) if ONE in plain and ONE in call else None


def _common_end(*texts: str) -> str:
    return commonprefix([text[::-1] for text in texts])[::-1]


def _form(call: str, both: str) -> CallForm | None:
    """call: an example. both: this one and another."""
    name = call.find(ONE)
    data = DATA.search(call)
    core = min(name, data.start()) if data else name
    opening = call[:core].strip()
    keys = KEY.findall(call) if core < name else []
    read = partial(_read_json, keys) if data else _parameters(call)
    if read is None or not (opening or keys):
        return None
    try:
        found, closing = read(call[core:], {})
    except UNREADABLE:
        return None
    if found != [(ONE, ARGUMENTS)]:
        return None
    before = both.partition(TWO)[0]
    start = _common_end(call[:core], before[: len(before) - (name - core)]).strip()
    return CallForm(call, opening, start or opening, closing.strip(), read)


def _read_json(keys: list[str], text: str, schemas: Schemas) -> Found:
    """JSON. keys: of names and arguments; if there is one, names are keys; without, a name and
    marks stand before.
    """
    head, *_ = DATA.split(text)
    value, end = DECODER.raw_decode(text, len(head))
    found: list[tuple[Any, Any]] = []
    for entry in value if isinstance(value, list) else [value]:
        if len(keys) == 2:
            found.append((entry[keys[0]], entry[keys[1]]))
        else:
            found += entry.items() if keys else [(NAME.findall(head)[0][0], entry)]
    return found, text[end:]


def _parameters(call: str) -> Reader | None:
    """Reads a name and parameters with such marks around keys and values."""
    example = call.partition(ONE)[2]
    match = PARAMETERS.fullmatch(example)
    if match is None:
        return None
    before, middle, between, other, after = match.groups()
    start = _common_end(before, between)
    end = between.removesuffix(start)
    if not start or not after.startswith(end):
        return None
    marks = [re.escape(mark) for mark in (start, middle, other, end)]
    parameter = re.compile("{}([^<>]+?)(?:{}|{})(.*?){}".format(*marks), re.DOTALL)
    closing = without_blanks(parameter.sub("", example))

    def read(text: str, schemas: Schemas) -> Found:
        name, text = NAME.findall(text)[0]
        arguments = {
            key: _value(value, schemas.get(name, {}).get(key))
            for key, value in parameter.findall(text)
        }
        text = parameter.sub("", text)
        if not text.strip() or not closing.startswith(without_blanks(text)):
            raise ValueError("expected the end of a call")
        return [(name, arguments)], text

    return read


def _value(text: str, schema: Any) -> Any:
    """What a text stands for."""
    is_text = isinstance(schema, dict) and schema.get("type") == "string"
    try:
        return text if is_text else DECODER.decode(text)
    except ValueError:
        return text
