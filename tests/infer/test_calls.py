"""The promise: agents can be pointed at the server. Calls of tools and reasoning are told apart
from the text, in the form of the chat template, and nothing that a target writes is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from os.path import commonprefix
from pathlib import Path
from typing import Any

import pytest
from calling import CALLS, COUNT, HERMES, LOOK_UP, SCHEMA, TOOLS, Calls
from jinja2.exceptions import TemplateError
from llguidance import LLMatcher, grammar_from
from llguidance.hf import from_tokenizer
from served import Says
from starlette.testclient import TestClient
from tiny_chat import stand_in

from draftheads.infer.prompt import PromptRenderer
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.calls import ONE, CallForm, find_form
from draftheads.infer.serve.parts import AnswerForm
from draftheads.infer.serve.protocol import Tool
from draftheads.infer.serve.service import ServeOptions
from draftheads.train.data.text_side import TextSide

TEMPLATES = Path(__file__).parents[3] / "shared" / "data" / "chat-templates"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def says() -> Iterator[tuple[Says, TestClient]]:
    engine = Calls()
    with TestClient(create_app(engine, ServeOptions("tiny"))) as client:
        yield engine, client


def ask(says: tuple[Says, TestClient], text: str, **body: Any) -> tuple[Any, Any]:
    """The message of an answer that is this text, and why it ended; streams are joined."""
    engine, client = says
    engine.text = text
    body = {"messages": HELLO, "tools": TOOLS, **body}
    said = client.post("/v1/chat/completions", json=body)
    assert said.status_code == 200, said.text
    if not body.get("stream"):
        [choice] = said.json()["choices"]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {}
    for event in said.text.split("\n\n")[:-2]:
        [choice] = json.loads(event.removeprefix("data: "))["choices"]
        for key, value in choice["delta"].items():
            if value:
                message[key] = message.get(key, type(value)()) + value
    message["content"] = message.get("content") or ""
    return message, choice["finish_reason"]


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (LOOK_UP, "", 1),
        (f"I look.\n{LOOK_UP}", "I look.", 1),
        (f"{LOOK_UP}\n{COUNT}", "", 2),
        (f"{LOOK_UP}{COUNT}\n", "", 2),
        (f"{LOOK_UP}\nThere.", "There.", 1),
        ("No <tool is needed.\n", "No <tool is needed.\n", 0),
        (LOOK_UP[:-3], "", 1),
    ],
)
def test_calls_are_told_from_the_text(says, text, content, count, stream):
    message, finish = ask(says, text, stream=stream)
    assert message["content"] == content
    assert calls_of(message) == CALLS[:count]
    assert finish == ("tool_calls" if count else "stop")
    calls = message.get("tool_calls", ())
    assert len({call["id"] for call in calls}) == count
    assert [call["index"] for call in calls] == [*range(count)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        LOOK_UP.replace('"heron"', "heron"),
        LOOK_UP.replace("}}", "}"),
        LOOK_UP[:40],
        "I look.\n<tool_call>",
        "<tool_call>\n[1]\n</tool_call>",
        "<tool_call>\n[]\n</tool_call>",
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "look_up", "arguments": "heron"}\n</tool_call>',
        "<tool_call>" + "[" * 900,
        LOOK_UP.replace("heron", "\\ud800"),
        LOOK_UP.replace('"heron"', "NaN"),
        LOOK_UP.replace("look_up", "look up\\ud800"),
        f"{LOOK_UP}\n" + LOOK_UP.replace('"heron"', "heron"),
    ],
)
def test_what_is_no_whole_call_stays_text(says, text, stream):
    message, finish = ask(says, text, stream=stream)
    assert message == {"role": "assistant", "content": text}
    assert finish == "stop"


def test_only_as_many_calls_as_may_be(says):
    message, _ = ask(says, f"{LOOK_UP}\n{COUNT}", parallel_tool_calls=False)
    assert calls_of(message) == CALLS[:1]
    message, finish = ask(says, LOOK_UP, tool_choice="none")
    assert (message["content"], finish) == (LOOK_UP, "stop")
    assert "look_up" not in says[0].asked[-1]
    message, _ = ask(says, LOOK_UP, tools=None)
    assert message["content"] == LOOK_UP


def test_histories_have_calls_and_results_as_the_template_writes_them(says):
    message, _ = ask(says, f"I look.\n{LOOK_UP}")
    message |= {"refusal": None, "audio": None, "function_call": None}
    [call] = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "A bird."}
    ask(says, "A bird.", messages=[*HELLO, message, result])
    shown = f"assistant\nI look.\n{LOOK_UP}<|im_end|>\n<|im_start|>tool\nA bird.<|im_end|>\n"
    assert shown in says[0].asked[-1]
    assert says[0].asked[-1].startswith('{"type": "function", "function": {"name": "look_up"')
    ask(says, "Hi.", messages=[*HELLO, {"role": "assistant", "tool_calls": []}, *HELLO])
    assert "tool_call" not in says[0].asked[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<think>\n\n</think>\n\nyes", None, "yes"),
        ("<think>hm", "hm", ""),
        (" <thing> yes", None, " <thing> yes"),
        ("yes <think>hm</think>", None, "yes <think>hm</think>"),
    ],
)
def test_reasoning_is_apart(says, text, reasoning, content, stream):
    message, _ = ask(says, text, stream=stream)
    assert message.get("reasoning_content") == message.get("reasoning") == reasoning
    assert message["content"] == content
    message, _ = ask(says, text, stream=stream, reasoning_format="none")
    assert message == {"role": "assistant", "content": text}


NO_WORD = LOOK_UP.replace('"word": "heron"', "")
IN_TEXT = json.dumps(json.dumps({"word": "heron"}))
MARKED = "<tool_call> and </tool_call>"
PARAMETERS = HERMES.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>{% for key, value in call.function.arguments.items() %}"
    "{{ '\n' }}<parameter={{ key }}>\n{{ value }}\n</parameter>{% endfor %}{{ '\n' }}</function>",
)
CHANNELS = (  # as gpt-oss
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
    "<|start|>{{ m.role }}{% if m.tool_calls %}{% for call in m.tool_calls %} to=functions."
    "{{ call.function.name }}<|channel|>commentary json<|message|>"
    "{{ call.function.arguments | tojson }}<|call|>{% endfor %}{% else %}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NAMES = HERMES.replace("<tool_call>\n", "").replace("\n</tool_call>", "")  # as Llama 3.1
MARKED_NAMES = HERMES.replace(
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | '
    "tojson }}}\n</tool_call>",
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
)
COMMENTARY = "<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
TO = 'to=functions.look_up<|channel|>commentary json<|message|>{"word": "heron"}'
WORD = "<tool_call>\n<function=look_up>\n<parameter=word>\n{}\n</parameter>\n"
END = "</function>\n</tool_call>"
WRITTEN = [  # template, what a target writes, the text and the arguments of the calls in it
    (HERMES, LOOK_UP.replace('{"word": "heron"}', IN_TEXT), "", ["heron"]),
    (HERMES, LOOK_UP.replace('{"word": "heron"}', json.dumps(IN_TEXT)), "", ["heron"]),
    (HERMES, LOOK_UP.replace("arguments", "parameters"), "", ["heron"]),
    (HERMES, '<tool_call>\n{"name": "look_up"}\n</tool_call>', "", [None]),
    (HERMES, '<tool_call>\n{"name": "look_up", "id": "a"}\n</tool_call>', "", [None]),
    (HERMES, NO_WORD, "", [None]),
    *((HERMES, NO_WORD.replace("{}", empty), "", [None]) for empty in ('""', "null", '" "')),
    (HERMES, NO_WORD.replace('"arguments": {}', '"word": "heron"'), None, []),
    (HERMES, LOOK_UP.replace("heron", MARKED) + f"\n{LOOK_UP}", "", [MARKED, "heron"]),
    (HERMES, f"<tool_call>heron {LOOK_UP}", None, []),
    (PARAMETERS, WORD.format("heron") + END, "", ["heron"]),
    (
        PARAMETERS,
        WORD.format("heron") + END + "\n" + WORD.format("egret") + END,
        "",
        ["heron", "egret"],
    ),
    (PARAMETERS, "See.\n" + WORD.format("heron") + END + "\nThere.", "See.There.", ["heron"]),
    (PARAMETERS, WORD.format(f"a\n{MARKED}") + END, "", [f"a\n{MARKED}"]),
    (PARAMETERS, "<tool_call>\n<function=look_up>\n" + END, "", [None]),
    (PARAMETERS, WORD.format("heron") + "</tool_call>", None, []),
    (CHANNELS, f" {TO}", "", ["heron"]),
    (CHANNELS, COMMENTARY + '{"word": "heron"}', "", ["heron"]),
    (
        CHANNELS,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + COMMENTARY + "{}",
        "I look.",
        [None],
    ),
    (CHANNELS, "I am <|start|> to be", "I am <|start|> to be", []),
]
"""None: all of it stays text, or the call has no argument."""


def form_of(template: str) -> CallForm:
    form = find_form(TextSide("t", stand_in(template), ()))
    assert form is not None
    return form


@pytest.mark.mend(
    "arguments as JSON text, no arguments, marks of calls inside arguments, gpt-oss' header "
    "before a call"
)
@pytest.mark.parametrize(("template", "written", "text", "words"), WRITTEN)
def test_calls_are_read_as_models_write_them(template, written, text, words):
    form = AnswerForm(calls=form_of(template), schemas={"look_up": SCHEMA["properties"]})
    parts = form.parts(written, "stop")
    assert parts["content"] == (written if text is None else text)
    expected = [("look_up", {"word": word} if word else {}) for word in words]
    assert calls_of(parts) == expected
    shown = beginning = ""
    tokenizer = stand_in(template)
    for token in tokenizer(written, add_special_tokens=False)["input_ids"]:
        content = form.parts(beginning, None)["content"]
        beginning += tokenizer.decode([token])
        assert content.startswith(shown), "a stream takes nothing back"
        shown = content
    assert parts["content"].startswith(shown)


@pytest.mark.mend("raw marks of a call that is cut by the limit")
@pytest.mark.parametrize("template", [HERMES, PARAMETERS, CHANNELS])
def test_a_call_that_is_cut_is_left_out(template):
    """At the limit of tokens: what is whole is told, and no mark stays in the text."""
    form = AnswerForm(calls=form_of(template), schemas={"look_up": SCHEMA["properties"]})
    whole = next(text for each, text, _, words in WRITTEN if (each, words) == (template, ["heron"]))
    for end in range(1, len(whole)):
        parts = form.parts(f"I look.{whole}{whole[:end]}", "length")
        assert parts["content"].rstrip() == "I look."
        assert calls_of(parts) in (CALLS[:1], CALLS[:1] * 2)
        cut = form.parts(f"I look.{whole[:end]}", "length")
        assert cut["content"].rstrip() == "I look."
        assert calls_of(cut) in ([], CALLS[:1])


@pytest.mark.mend("arguments of a required call came in one piece at the end")
@pytest.mark.parametrize("template", [HERMES, CHANNELS, NAMES, MARKED_NAMES])
@pytest.mark.parametrize("arguments", ['{"word":"h\\u00e9ron" , "n":1e2}', "{}", '{"word": "}"}'])
def test_arguments_of_a_constrained_call_grow_as_they_are_written(template, arguments):
    """Wherever the answer ends, nothing that was told is taken back or told in other words."""
    calls = form_of(template)
    form = AnswerForm(
        calls=calls, schemas={"look": {}, "look_up": {}, "a": {}}, is_constrained=True
    )
    example = re.sub(r'\{\s*"key_a".*?47\s*\}', lambda _: arguments, calls.example, flags=re.DOTALL)
    whole = example.lstrip("\n").replace(ONE, "look_up")
    shown = ""
    for end in range(len(whole) + 1):
        for finish in (None, "length", "stop"):
            parts = form.parts(whole[:end], finish)
            said = [call["function"]["arguments"] for call in parts["tool_calls"]]
            if finish is None and said:
                assert said[0].startswith(shown) and arguments.startswith(said[0])
                [shown] = said
            assert not shown or (said, parts["content"]) == ([shown], "")
    assert shown == arguments
    [call] = form.parts(whole, "stop")["tool_calls"]
    assert (call["function"]["name"], call["id"]) == ("look_up", form.call_id)


@pytest.mark.mend("conversations refused for calls with empty arguments")
@pytest.mark.parametrize("arguments", ["", " ", None, "null", "{}", '"{}"', {}, json.dumps('"{}"')])
def test_arguments_of_a_history_may_be_empty(says, arguments):
    for given in ({"arguments": arguments}, {}):
        call = {"id": "a", "type": "function", "function": {"name": "look_up", **given}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        ask(says, "Hi.", messages=[*HELLO, asked, {"role": "tool", "content": "1"}])
        assert NO_WORD in says[0].asked[-1]


def test_reasoning_then_calls(says):
    message, finish = ask(says, f"<think>\n{COUNT}?\n</think>\n\n{LOOK_UP}", stream=True)
    assert message["reasoning_content"] == f"{COUNT}?"
    assert (calls_of(message), message["content"], finish) == (CALLS[:1], "", "tool_calls")


def test_a_prompt_that_opens_reasoning():
    engine = Calls(HERMES.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"))
    with TestClient(create_app(engine, ServeOptions("tiny"))) as client:
        message, _ = ask((engine, client), "hm\n</think>\nyes", stream=True)
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        message, _ = ask((engine, client), "hm")
        assert (message["reasoning_content"], message["content"]) == ("hm", "")


def test_a_template_without_tools_is_told():
    engine = Says()
    with TestClient(create_app(engine, ServeOptions("tiny"))) as client:
        said = client.post("/v1/chat/completions", json={"messages": HELLO, "tools": TOOLS})
    assert said.status_code == 400
    error = said.json()["error"]
    assert error["param"] == "tools"
    assert "expected a chat template that shows tools" in error["message"]


def answers(renderer: PromptRenderer) -> Iterator[tuple[str, int]]:
    """Conversations that end with calls, as a template writes them, and how many calls."""
    for count in (1, 2):
        calls = [
            {"id": "a1b2c3d4e", "type": "function", "function": {"name": name, "arguments": given}}
            for name, given in CALLS[:count]
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            text = renderer.text([*HELLO, answer], ask=False)
        except TemplateError:
            continue
        if count == 1 or "count" in text.rpartition("heron")[2]:
            yield text, count


@pytest.mark.slow
def test_calls_of_real_templates_are_read():
    """As each template writes them itself."""
    if not TEMPLATES.is_dir():
        pytest.skip(f"no chat templates at {TEMPLATES}")
    schemas = {tool["function"]["name"]: SCHEMA["properties"] for tool in TOOLS}
    read = []
    for path in sorted(TEMPLATES.glob("*/*.jinja")):
        side = TextSide(path.stem, stand_in(path.read_text()), ())
        renderer = PromptRenderer(side, {"tools": TOOLS})
        form = find_form(side)
        if form is None:
            continue
        for text, count in answers(renderer):
            plain = renderer.text([*HELLO, {"role": "assistant", "content": "@"}], ask=False)
            start = len(commonprefix([plain, text])) - 40
            place = text.find(form.opening or "{", start)
            end = len(commonprefix([plain[::-1], text[::-1]]))  # of the turn
            whole = text[place : len(text) - end]
            answer = AnswerForm(calls=form, schemas=schemas)
            assert calls_of(answer.parts(whole, "stop")) == CALLS[:count], path.stem
            begun = whole[: whole.find("heron")]
            for finish, left in (("stop", begun), ("length", "" if form.opening else begun)):
                cut = answer.parts(begun, finish)
                assert (cut["tool_calls"], cut["content"]) == ([], left), path.stem
            read.append((path.stem, count))
    assert len(read) > 100


def test_the_grammar_of_a_call_has_the_tokens_that_mark_it():
    tokenizer = stand_in(HERMES)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    form = find_form(TextSide("hermes", tokenizer, ()))
    assert form is not None
    grammar = form.grammar([Tool.model_validate(tool) for tool in TOOLS], tokenizer)
    ids = tokenizer(LOOK_UP, add_special_tokens=False)["input_ids"]
    assert len(ids) < len(LOOK_UP) - len("<tool_call></tool_call>") + 3
    masks = from_tokenizer(tokenizer, len(tokenizer), [0])
    matcher = LLMatcher(masks, grammar_from("grammar", grammar))
    assert matcher.try_consume_tokens(ids) == len(ids)


@pytest.mark.slow
def test_the_grammars_of_real_templates_are_of_their_own_calls():
    if not TEMPLATES.is_dir():
        pytest.skip(f"no chat templates at {TEMPLATES}")
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    followed = []
    for path in sorted(TEMPLATES.glob("*/*.jinja")):
        tokenizer = stand_in(path.read_text())
        form = find_form(TextSide(path.stem, tokenizer, ()))
        if form is None:
            continue
        try:
            grammar = form.grammar(tools, tokenizer)
        except ValueError as error:
            assert "expected auto or none" in str(error)
            continue
        example = form.example.lstrip("\n").replace(ONE, "count")
        example = re.sub(r'\{\s*"key_a".*?47\s*\}', '{"n": 2}', example, flags=re.DOTALL)
        ids = tokenizer(example, add_special_tokens=False)["input_ids"]
        matcher = LLMatcher(
            from_tokenizer(tokenizer, len(tokenizer), [0]), grammar_from("grammar", grammar)
        )
        assert matcher.try_consume_tokens(ids) == len(ids), path.stem
        followed.append(path.stem)
    assert len(followed) > 30


FUNCTION = {"name": "look_up"}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "a", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
ODD: list[Any] = [7, 1.5, [1], [[]], {"a": 1}]


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies that are no requests, each with the option that is wrong."""

    def tool(**parts: Any) -> dict[str, Any]:
        return {"tools": [{**TOOL, "function": {**FUNCTION, **parts}}]}

    def answer(**parts: Any) -> dict[str, Any]:
        return {"messages": [*HELLO, {"role": "assistant", "content": "", **parts}]}

    def call(**parts: Any) -> dict[str, Any]:
        return answer(tool_calls=[{**CALL, "function": {**CALL["function"], **parts}}])

    for odd in ODD:
        for body in ({"tools": odd}, {"tools": [odd]}, tool(name=odd), tool(description=odd)):
            yield "tools", body
        for part in ("type", "function"):
            yield "tools", {"tools": [{**TOOL, part: odd}]}
            yield "messages", answer(tool_calls=[{**CALL, part: odd}])
        for key in ("tool_calls", "reasoning_content", "content"):
            yield "messages", answer(**{key: odd})
        for key in ("tool_choice", "reasoning_format", "parallel_tool_calls"):
            yield key, {"tools": TOOLS, key: odd}
        yield "messages", call(name=odd)
        if odd != {"a": 1}:
            yield "messages", call(arguments=odd)
            yield "tools", tool(parameters=odd)
            yield "tools", tool(parameters={"properties": odd})
    for text in ("{", "[]", "1", '{"a": }', '"1"', "true"):
        yield "messages", call(arguments=text)
    yield "messages", answer(tool_calls=[{"id": "a", "type": "function"}])
    yield "messages", answer(function_call=FUNCTION)
    yield "messages", answer(tool_calls=[CALL] * 129)
    yield "tools", {"tools": [{"type": "function"}]}
    yield "tools", {"tools": [{"function": FUNCTION}]}
    yield "tools", {"tools": [TOOL] * 129}
    yield "tools", {"tools": [{**TOOL, "function": {"name": "x" * 129}}]}
    yield "tools", {"tools": [{**TOOL, "function": {"name": ""}}]}
    yield "tool_choice", {"tool_choice": "required"}
    yield "tool_choice", {"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}
    yield "functions", {"functions": [FUNCTION]}
    yield "function_call", {"function_call": "auto"}


def test_a_hundred_bad_bodies_are_refused_in_one_line_each(says):
    count = 0
    for option, body in bodies():
        said = says[1].post("/v1/chat/completions", json={"messages": HELLO, **body})
        error = said.json()["error"]
        assert said.status_code == 400, (body, said.text)
        assert (error["param"] or "").startswith(option), (body, error)
        assert option in error["message"] and "\n" not in error["message"], (body, error)
        assert len(error["message"]) < 200, (body, error)
        count += 1
    assert count > 100
