"""Calls of tools: how a chat template writes them, and how they are read from answers.

Templates write a call in one of three forms, with marks of their own around it. OOO is the opening
of an answer's calls, SSS the start of each, CCC the closing after the last.

JSON with the name, as a value or as a key (`NamedJson`; Qwen 2.5, Llama 3.1, Apertus):

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    OOOOOOOOOOO                                    CCCCCCCCCCCC
    SSSSSSSSSSS
    {"name": "f", "parameters": {"a": 1}}

    <|tools_prefix|>[{"f": {"a": 1}}, {"g": {"b": 2}}]<|tools_suffix|>
    OOOOOOOOOOOOOOOO                                  CCCCCCCCCCCCCCCC
    SSSSSSSSSSSSSSSS

JSON after the name (`JsonAfterName`; Ministral, and gpt-oss, which has a header, HHH):

    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": 2}
    OOOOOOOOOOOO
    SSSSSSSSSSSS               SSSSSSSSSSSS
    <|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>
    HHHHHHHHHHHHHHHHHH OOOOOOOOOOOOO                                              CCCCCCCC
                       SSSSSSSSSSSSS

Parameters, each between FFF and EEE, with M between key and value (`Parameters`; Qwen 3 Coder):

    <function=f><parameter=a>1</parameter><parameter=b>2</parameter></function>
    OOOOOOOOOO CFFFFFFFFFFF M EEEEEEEEEEEEFFFFFFFFFFF M EEEEEEEEEEEECCCCCCCCCCC
    SSSSSSSSSS

`find_form` renders a call of `ONE` with ARGUMENTS, and takes the marks from the text around them.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any, ClassVar
from uuid import uuid4

from jinja2.exceptions import TemplateError

from draftheads.infer.grammar import lark, one_of, with_options
from draftheads.infer.prompt import ANSWER, CLOSE, QUESTION, PromptRenderer, TextSource
from draftheads.infer.serve.protocol import Function, Json, Tool
from draftheads.infer.text import (
    ARGUMENT_KEYS,
    CALL_ID,
    assistant,
    begun,
    read_arguments,
    tool_call,
    without_blanks,
)

Schemas = Mapping[str, Json]
"""Those of each tool's arguments, by the tool's name."""
Found = tuple[list[tuple[Any, Any]], str]
"""Names and arguments with which a text begins, and the rest of the text."""
ONE, TWO = "draftheads_one", "draftheads_two"
"""Names of tools that are searched for in a rendered conversation."""
ARGUMENTS = {"key_a": "value_a", "key_b": 47}
DATA = re.compile(r'(?:\[\s*)?\{(?=\s*["}])')
KEY = re.compile(rf'"(\w+)":\s*(?:"{ONE}"|\{{\s*"key_a")')
NAME = re.compile(r"\s*([\w.-]+)")
EXAMPLE = re.compile(r'(.*?)\{\s*"key_a".*?47\s*\}(.*)', re.DOTALL)
PARAMETERS = re.compile(r"(.*?)key_a(.*?)value_a(.*?)key_b(.*?)47(.*)", re.DOTALL)
NO_HEADER = re.compile("(?!)")
LABELS = {"id", "type", "index", "tool_call_id"}
"""Keys of a call besides its name and arguments."""
DECODER = json.JSONDecoder(strict=False)
"""Takes line breaks in strings, as models write them."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What the text of a target may raise."""


@dataclass(frozen=True)
class Syntax(ABC):
    """The syntax between the marks of a call. start: the end of what stands before each call."""

    start: str
    is_json: ClassVar[bool] = True  # so that its end is known without a closing

    @abstractmethod
    def read(self, text: str, schemas: Schemas) -> Found:
        """Read the text after a start. Raises one of UNREADABLE if it has no whole call."""

    def read_json(self, text: str) -> tuple[str, list[Any], str]:
        """The text before the JSON of this call, the objects in it, and the rest."""
        head, *data = DATA.split(text)
        if not data or (self.start and self.start in head):
            raise ValueError("expected JSON before the next call")
        value, end = DECODER.raw_decode(text, len(head))
        return head, value if isinstance(value, list) else [value], text[end:]


@dataclass(frozen=True)
class NamedJson(Syntax):
    """JSON with the name. keys: of name and arguments; None: the name itself is the key of the
    arguments.
    """

    keys: tuple[str, str] | None

    def read(self, text: str, schemas: Schemas) -> Found:
        _, entries, rest = self.read_json(text)
        pairs: list[tuple[Any, Any]] = []
        for entry in entries:
            if self.keys:
                name, key = self.keys
                pairs.append((entry[name], _arguments(entry, name, key)))
            else:
                pairs += entry.items()
        return pairs, rest


def _arguments(entry: Json, name: str, key: str) -> Json:
    """The arguments of a call as JSON. Raises ValueError if it has others than expected in their
    place.
    """
    if not entry.keys() <= {name, *LABELS} and not entry.keys() & {key, *ARGUMENT_KEYS}:
        raise ValueError("expected arguments, or none")
    return read_arguments({"arguments": entry.get(key), **entry})


class JsonAfterName(Syntax):
    """A name, marks, and the arguments as JSON."""

    def read(self, text: str, schemas: Schemas) -> Found:
        head, entries, rest = self.read_json(text)
        name, _ = _name(head)
        return [(name, entry) for entry in entries], rest


def _name(text: str) -> tuple[str, int]:
    """The name with which a text begins, and its end. Raises ValueError."""
    match = NAME.match(text)
    if match is None:
        raise ValueError("expected a name")
    return match[1], match.end()


@dataclass(frozen=True)
class Parameters(Syntax):
    """A name, and parameters with marks. parameter: an expression for one, with groups for key and
    value. frame: what is left of a call without name and parameters, and without blanks.
    """

    parameter: re.Pattern[str]
    frame: str
    is_json: ClassVar[bool] = False

    @classmethod
    def of(cls, call: str, start: str) -> Parameters | None:
        """call: an example."""
        example = call.partition(ONE)[2]
        match = PARAMETERS.fullmatch(example)
        if match is None:
            return None
        before, middle, between, other, after = match.groups()
        first = _common_end(before, between)
        end = between.removesuffix(first)
        if not first or not after.startswith(end):
            return None
        marks = [re.escape(mark) for mark in (first, middle, other, end)]
        parameter = re.compile("{}([^<>]+?)(?:{}|{})(.*?){}".format(*marks), re.DOTALL)
        return cls(start, parameter, without_blanks(parameter.sub("", example)))

    def read(self, text: str, schemas: Schemas) -> Found:
        name, end = _name(text)
        arguments = {}
        around = ""  # the parameters
        for match in self.parameter.finditer(text, end):
            before = around + text[end : match.start()]
            if not self.frame.startswith(without_blanks(before)):
                break  # it is of the next call
            around = before
            end = match.end()
            key, value = match.groups()
            arguments[key] = _value(value, schemas.get(name, {}).get(key))
        rest = around + text[end:]
        after = without_blanks(rest.partition(self.start)[0])
        if not after or not (self.frame.startswith(after) or after.startswith(self.frame)):
            raise ValueError("expected the end of a call")
        return [(name, arguments)], rest


def _value(text: str, schema: Any) -> Any:
    """The value that a text stands for."""
    is_text = isinstance(schema, dict) and schema.get("type") == "string"
    try:
        return text if is_text else DECODER.decode(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class CallForm:
    """The form in which a template writes calls.

    example: a call of `ONE` with ARGUMENTS. opening: the text before the first call; "": an answer
    that is JSON is a call. closing: the text after the last. header: what models write before the
    opening, where that is not the first mark of a call.
    """

    example: str
    opening: str
    closing: str
    syntax: Syntax
    header: re.Pattern[str] = NO_HEADER

    def divide(self, text: str) -> tuple[str, str]:
        """The text before calls, and the rest, which begins with them; "": there are none."""
        if self.opening:
            before, opening, rest = text.partition(self.opening)
            return before, opening + rest
        return ("", text) if text.lstrip().startswith(("{", "[")) else (text, "")

    def outside(self, text: str, is_whole: bool) -> str:
        """A text before or after calls as it is shown: without headers, and, unless it `is_whole`,
        without what may be the beginning of an opening.
        """
        if not is_whole:
            text = text[: len(text) - begun(text, self.opening)]
        return self.header.sub("", text)

    def read_all(self, text: str, schemas: Schemas, is_cut: bool) -> tuple[list[Json], str]:
        """Calls as messages have them, and the text that is left: all of it if one of them cannot
        be read, but nothing of the last one if the answer `is_cut` at its limit.

        schemas: of the tools that may be called.
        """
        calls: list[Json] = []
        prose = ""
        start = self.syntax.start
        rest = text
        try:
            rest = text[text.index(start) + len(start) :]
            has_more = True
            while has_more:
                pairs, rest = self.syntax.read(rest, schemas)
                after, next_start, rest = rest.partition(start) if start else (rest, "", "")
                has_more = bool(next_start)
                closed = re.match(loose(self.closing), after)
                if is_cut and not closed and not self.syntax.is_json:
                    raise ValueError("expected the last of the parameters")
                for name, arguments in pairs:
                    if name not in schemas and not self.opening:
                        raise ValueError("expected the name of a tool")
                    calls.append(call_entry(len(calls), name, arguments))
                if closed:
                    prose += after[closed.end() :].strip()
                elif not without_blanks(self.closing).startswith(without_blanks(after)):
                    prose += after.strip()
        except UNREADABLE:
            if not is_cut or not self.opening:
                return [], text
        return calls, self.outside(prose, not is_cut)

    def partial_call(self, text: str, names: Iterable[str]) -> tuple[str, str] | None:
        """The name of the call with which a text begins, one of these names, and its arguments
        as far as they are written, as they are written; None before they begin.
        """
        match = EXAMPLE.fullmatch(self.example)
        if match is None or ONE not in match[1]:
            return None
        for name in names:
            start = re.match(loose(match[1].replace(ONE, name)) + r"\s*(?=\{)", text)
            if start:
                arguments = text[start.end() :]
                with suppress(ValueError, RecursionError):
                    arguments = arguments[: DECODER.raw_decode(arguments)[1]]
                return name, arguments
        return None

    def grammar(self, tools: Sequence[Tool], tokenizer: Any) -> str:
        """The language of one call of one of these tools, in Lark's syntax. Raises ValueError for a
        form whose arguments are no JSON.
        """
        match = EXAMPLE.fullmatch(self.example)
        if match is None:
            raise ValueError(
                "tool_choice: expected auto or none, and no format of answers beside tools, as "
                "this chat template writes arguments in another way than JSON; leave it out"
            )
        before, after = match.groups()
        ids = tokenizer.get_added_vocab()
        end = lark(after, ids)
        calls = []
        for tool in tools:
            start = lark(before.lstrip("\n").replace(ONE, tool.function.name), ids)
            schema = with_options(tool.function.parameters.closed)
            calls.append(f"{start} %json {json.dumps(schema)} {end}")
        return "start: " + "\n | ".join(calls)


def loose(text: str) -> str:
    """An expression for a text whose blanks may differ."""
    return r"\s*" + r"\s*".join(map(re.escape, without_blanks(text)))


def all_whole(calls: Sequence[Json]) -> bool:
    """True if there are calls, and none has arguments that break off."""
    try:
        return bool([json.loads(call["function"]["arguments"]) for call in calls])
    except (ValueError, RecursionError):
        return False


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
    if ONE not in plain or ONE not in call:
        return None
    form = _form(call, both)
    return form and replace(form, header=_header(form, renderer.tokenizer.get_added_vocab()))


def _common_end(*texts: str) -> str:
    return commonprefix([text[::-1] for text in texts])[::-1]


def _form(call: str, both: str) -> CallForm | None:
    """call: an example. both: this one and another."""
    name = call.find(ONE)
    data = DATA.search(call)
    core = min(name, data.start()) if data else name
    opening = call[:core].strip()
    before = both.partition(TWO)[0]
    start = _common_end(call[:core], before[: len(before) - (name - core)]).strip() or opening
    keys = KEY.findall(call) if core < name else []
    if not (opening or keys):
        return None
    syntax: Syntax | None
    if data is None:
        syntax = Parameters.of(call, start)
    elif keys:
        syntax = NamedJson(start, tuple(keys) if len(keys) == 2 else None)
    else:
        syntax = JsonAfterName(start)
    if syntax is None:
        return None
    try:
        pairs, closing = syntax.read(call[core:], {})
    except UNREADABLE:
        return None
    if pairs != [(ONE, ARGUMENTS)]:
        return None
    return CallForm(call, opening, closing.strip(), syntax)


def _header(form: CallForm, ids: Mapping[str, int]) -> re.Pattern[str]:
    """gpt-oss writes <|start|>assistant<|channel|>commentary before to=functions.f, in the header
    of a message, and before a text the same with <|message|>, the mark before the arguments.
    """
    marked = re.search(rf"({one_of(ids)})\s*\{{", form.example)
    if marked is None or re.match(one_of(ids), form.opening):
        return NO_HEADER
    others = one_of({mark: ids[mark] for mark in ids if mark != marked[1]})
    return re.compile(rf"({CLOSE})?(({others})\w*\s*)+({re.escape(marked[1])}|$)")
