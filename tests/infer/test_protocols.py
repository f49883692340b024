"""The promise: Responses and Messages say what chat completions say, in their own forms, which the
protocols' own clients accept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from calling import COUNT, HERMES, HISTORY, LOOK_UP, QUESTION, TOOLS, Calls, use
from pydantic import TypeAdapter
from served import Says, running
from starlette.testclient import TestClient
from tiny_chat import END, llama

from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.serve import service
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.service import ServeOptions

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)
HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS = ServeOptions("tiny")
FUNCTIONS = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
CUSTOM = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]
LISTED = {CHAT: TOOLS, RESPONSES: FUNCTIONS, MESSAGES: CUSTOM}
REQUIRED = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}
WHOLE = {RESPONSES: openai.types.responses.Response, MESSAGES: anthropic.types.Message}
EVENT = {
    RESPONSES: TypeAdapter(openai.types.responses.ResponseStreamEvent),
    MESSAGES: TypeAdapter(anthropic.types.RawMessageStreamEvent),
}


@pytest.fixture(scope="module")
def says() -> Iterator[tuple[Calls, TestClient]]:
    engine = Calls()
    with TestClient(create_app(engine, OPTIONS)) as client:
        yield engine, client


def asked(path: str, **options: Any) -> dict[str, Any]:
    """The body of a request of one protocol, with what each must have."""
    body: dict[str, Any] = {"input" if path == RESPONSES else "messages": HELLO}
    return {**body, **({"max_tokens": 999} if path == MESSAGES else {}), **options}


def events(text: str) -> list[dict[str, Any]]:
    """Those of a stream, whose names are their types."""
    found = []
    for event in text.split("\n\n")[:-1]:
        *name, data = event.splitlines()
        if data not in ("data: [DONE]", ": waiting"):
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == [f"event: {found[-1][key]}" for key in found[-1] if key == "type"]
    return found


Parts = tuple[str, str, list[tuple[str, str]], str | None]
"""Reasoning, text, names and arguments of calls, why it ended."""


def of_chat(message: dict[str, Any], finish: str) -> Parts:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(each["name"], each["arguments"]) for each in functions]
    return message.get("reasoning_content", ""), message["content"], calls, finish


def of_response(response: dict[str, Any]) -> Parts:
    items = response["output"]
    texts = {"reasoning": "", "message": ""}
    for item in items:
        for part in item.get("content", ()):
            texts[item["type"]] += part["text"]
    called = [each for each in items if each["type"] == "function_call"]
    calls = [(each["name"], each["arguments"]) for each in called]
    finish = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return texts["reasoning"], texts["message"], calls, finish


FINISH = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls"}


def of_message(message: dict[str, Any]) -> Parts:
    blocks = message["content"]
    thinking = "".join(each["thinking"] for each in blocks if each["type"] == "thinking")
    text = "".join(each["text"] for each in blocks if each["type"] == "text")
    used = [each for each in blocks if each["type"] == "tool_use"]
    calls = [(each["name"], json.dumps(each["input"], ensure_ascii=False)) for each in used]
    return thinking, text, calls, FINISH.get(message["stop_reason"], "length")


def whole(says: tuple[Calls, TestClient], path: str, text: str, **options: Any) -> Parts:
    """The parts of an answer that is this text."""
    says[0].text = text
    response = says[1].post(path, json=asked(path, **options))
    assert response.status_code == 200, response.text
    body = response.json()
    if path == CHAT:
        [choice] = body["choices"]
        return of_chat(choice["message"], choice["finish_reason"])
    WHOLE[path].model_validate(body, strict=False)
    return of_response(body) if path == RESPONSES else of_message(body)


def streamed(says: tuple[Calls, TestClient], path: str, text: str, **options: Any) -> Parts:
    """The same from the deltas of a stream alone; of Messages, arguments are their text."""
    says[0].text = text
    response = says[1].post(path, json=asked(path, stream=True, **options))
    assert response.status_code == 200, response.text
    parts = {"reasoning": "", "text": ""}
    calls: list[list[str]] = []
    finish = None
    for event in events(response.text):
        if path in EVENT and event["type"] != "ping":
            EVENT[path].validate_python(event)
        match event:
            case {"choices": [{"delta": delta, "finish_reason": finish}]}:
                parts["reasoning"] += delta.get("reasoning_content", "")
                parts["text"] += delta.get("content", "")
                for call in delta.get("tool_calls", ()):
                    if "id" in call:
                        calls.append([call["function"]["name"], ""])
                    calls[-1][1] += call["function"]["arguments"]
            case {"type": "response.reasoning_text.delta", "delta": delta}:
                parts["reasoning"] += delta
            case {"type": "response.output_text.delta", "delta": delta}:
                parts["text"] += delta
            case {"type": "response.output_item.added", "item": {"type": "function_call"} as item}:
                calls.append([item["name"], item["arguments"]])
            case {"type": "response.function_call_arguments.delta", "delta": delta}:
                calls[-1][1] += delta
            case {"type": "response.completed" | "response.incomplete", "response": response}:
                finish = of_response(response)[3]
            case {"type": "content_block_start", "content_block": {"type": "tool_use"} as block}:
                calls.append([block["name"], ""])
            case {"type": "content_block_delta", "delta": delta}:
                parts["reasoning"] += delta.get("thinking", "")
                parts["text"] += delta.get("text", "")
                if "partial_json" in delta:
                    calls[-1][1] += delta["partial_json"]
            case {"type": "message_delta", "delta": delta}:
                finish = FINISH.get(delta["stop_reason"], "length")
    return parts["reasoning"], parts["text"], [(name, text) for name, text in calls], finish


TEXTS = [
    "Hello, 世界! 👋🏽",
    "",
    "<think>\nhm\n</think>\n\nyes",
    "<think>hm",
    LOOK_UP,
    f"<think>\nhm\n</think>\n\nI look.\n{LOOK_UP}\n{COUNT}\nThere.",
    f"{LOOK_UP[:-20]}",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("path", PATHS)
def test_all_protocols_say_the_same_in_one_piece_and_in_a_stream(says, path, text):
    expected = whole(says, CHAT, text, tools=TOOLS)
    assert whole(says, path, text, tools=LISTED[path]) == expected
    assert streamed(says, path, text, tools=LISTED[path]) == expected


ODD_ARGUMENTS = [
    '{"word": "heron"}',
    '{"word":"h\\u00e9ron" , "n":1e2}',
    "{}",
    '{"word": "a}{\\"</tool_call>"}',
]


@pytest.mark.mend("arguments of a required call came in one piece at the end")
@pytest.mark.parametrize("arguments", ODD_ARGUMENTS)
@pytest.mark.parametrize("path", PATHS)
def test_a_required_call_streams_as_it_is_written(says, path, arguments):
    """Byte for byte, and the whole answer has the same text."""
    text = LOOK_UP.replace('{"word": "heron"}', arguments)
    options = {"tools": LISTED[path], "tool_choice": REQUIRED[path]}
    assert streamed(says, path, text, **options) == ("", "", [("look_up", arguments)], "tool_calls")
    [(name, said)] = whole(says, path, text, **options)[2]
    if path == MESSAGES:  # an object, as its protocol has it
        said, arguments = json.loads(said), json.loads(arguments)
    assert (name, said) == ("look_up", arguments)


@pytest.mark.parametrize("value", ["1e999", "1" * 5000, '"\\ud800"', '"a'])
def test_arguments_that_json_cannot_hold_are_an_empty_object(says, value):
    """They are sent as they are where a protocol has their text."""
    text = LOOK_UP.replace('{"word": "heron"}', f'{{"n": {value}}}')
    options = {"tools": CUSTOM, "tool_choice": {"type": "any"}}
    assert whole(says, MESSAGES, text, **options)[2] == [("look_up", "{}")]
    [(_, said)] = streamed(says, MESSAGES, text, **options)[2]
    assert said.startswith(f'{{"n": {value}')


@pytest.mark.mend("arguments of a required call came in one piece at the end")
@pytest.mark.parametrize("path", PATHS)
def test_each_step_of_a_required_call_is_an_event(says, path):
    counts = []
    for word in ("heron", "heron" * 9):
        says[0].text = LOOK_UP.replace("heron", word)
        options = {"tools": LISTED[path], "tool_choice": REQUIRED[path], "stream": True}
        said = says[1].post(path, json=asked(path, **options)).text
        counts.append(len(events(said)))
    assert counts[1] == counts[0] + 10, "40 characters more, four of them in a step"


@pytest.fixture(scope="module")
def constrained() -> Iterator[tuple[Any, TestClient]]:
    """A target that knows no script: only the grammar makes it write a call."""
    target = llama(eos=(END,), template=HERMES)
    target.context = 2048
    engine = Speculator(target, NGram())
    with TestClient(create_app(engine, OPTIONS)) as client:
        yield engine, client


@pytest.mark.parametrize("limit", [999, 52])
@pytest.mark.parametrize("path", PATHS)
def test_a_grammar_holds_a_call_while_it_streams(constrained, path, limit):
    """Also one that the limit cuts: a stream cannot take back what it said of it."""
    schema = {"type": "object", "properties": {"bird": {"enum": ["heron", "egret"]}}}
    schema |= {"required": ["bird"], "additionalProperties": False}
    body = {
        CHAT: {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
        RESPONSES: {"tools": [{"type": "function", "name": "f", "parameters": schema}]},
        MESSAGES: {"tools": [{"name": "f", "input_schema": schema}]},
    }[path]
    limits = {"max_output_tokens" if path == RESPONSES else "max_tokens": limit}
    body = {**body, **limits, "tool_choice": REQUIRED[path]}
    *_, [(name, arguments)], finish = streamed(constrained, path, "", **body)
    birds = ['{"bird": "heron"}', '{"bird": "egret"}']
    *_, [(_, said)], reason = whole(constrained, path, "", **body)
    assert (name, finish, reason) == ("f", *["length" if limit == 52 else "tool_calls"] * 2)
    if limit == 52:
        assert arguments[0] == "{" and "}" not in arguments
        assert said == (arguments if path != MESSAGES else "{}")
    else:
        assert arguments in birds and said == arguments


@pytest.mark.parametrize("stream", [False, True])
def test_openai_calls_tools_with_responses(stream):
    """An agent's loop; every item of an answer is sent back as it came."""
    engine = Calls()
    items: list[Any] = [QUESTION]
    seen = []
    with (
        running(engine) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for _ in range(2):
            options: dict[str, Any] = {"model": "tiny", "input": items, "tools": FUNCTIONS}
            if stream:
                with client.responses.stream(**options) as parts:
                    numbers = [event.sequence_number for event in parts]
                    response = parts.get_final_response()
                assert numbers == [*range(len(numbers))]
            else:
                response = client.responses.create(**options)
            seen.append((response.output[0].content[0].text, response.output_text))
            items += [item.to_dict() for item in response.output]
            for item in response.output:
                if item.type == "function_call":
                    result = use(item.name, json.loads(item.arguments))
                    call = {"type": "function_call_output", "call_id": item.call_id}
                    items.append({**call, "output": result})
    assert seen == [("Both tools.", "I look."), ("Done.", "A bird; 2.")]
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert engine.asked[-1].endswith(HISTORY)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_calls_tools(stream):
    """The same loop; results are blocks of one message, the text beside them another turn."""
    engine = Calls()
    messages: list[Any] = [QUESTION]
    seen = []
    with (
        running(engine) as (url, _),
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        for _ in range(2):
            options: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": CUSTOM}
            if stream:
                with client.messages.stream(max_tokens=999, **options) as parts:
                    message = parts.get_final_message()
            else:
                message = client.messages.create(max_tokens=999, **options)
            thinking, text, *uses = message.content
            seen.append((thinking.thinking, text.text, message.stop_reason))
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": use(call.name, call.input),
                }
                for call in uses
            ]
            messages.append({"role": "user", "content": results})
        counted = client.messages.count_tokens(**{**options, "messages": messages[:3]})
        usage = message.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert seen == [("Both tools.", "I look.", "tool_use"), ("Done.", "A bird; 2.", "end_turn")]
    assert engine.asked[-1].endswith(HISTORY)


def shown(says: tuple[Calls, TestClient], path: str, **body: Any) -> str:
    """What the target sees of a conversation."""
    says[0].text = "Hi."
    response = says[1].post(path, json=asked(path, **body))
    assert response.status_code == 200, response.text
    return says[0].asked[-1].removesuffix("<|im_start|>assistant\n")


def turns(*pairs: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in pairs)


BRIEF = ("system", "Be brief.")
TEXT = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
READ: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"input": "a", "instructions": "Be brief."}, turns(BRIEF, ("user", "a"))),
    (
        RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "c"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "message", "role": "user", "id": "m", "content": "b"},
            ],
        },
        turns(("system", "Be brief.\n\nc"), ("user", "a\n\nb")),
    ),
    (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, TEXT]}],
        },
        turns(BRIEF, ("user", "a\n\nb")),
    ),
    (
        MESSAGES,
        {"system": "Be brief.", "messages": [*HELLO, {"role": "system", "content": "Now."}]},
        turns(BRIEF, ("user", "Hello\n\nNow.")),
    ),
    (
        MESSAGES,
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": [{"type": "redacted_thinking"}, TEXT],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, TEXT]},
                        {"type": "tool_result", "tool_use_id": "u", "is_error": True},
                        TEXT,
                    ],
                },
            ],
        },
        turns(
            *(("user", "Hello"), ("assistant", "b"), ("tool", "b\n\nb"), ("tool", "")),
            ("user", "b"),
        ),
    ),
]


@pytest.mark.parametrize(("path", "body", "text"), READ)
def test_conversations_are_shown_as_templates_expect_them(says, path, body, text):
    """One system message at the beginning, and turns that alternate."""
    assert shown(says, path, **body) == text


AGENTS: list[tuple[str, dict[str, Any]]] = [
    (  # Codex
        RESPONSES,
        {
            "tools": [*FUNCTIONS, {"type": "namespace", "name": "a", "tools": FUNCTIONS}]
            + [{"type": "web_search", "external_web_access": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "high", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "a",
            "client_metadata": {"session_id": "a"},
        },
    ),
    (  # Claude Code
        f"{MESSAGES}?beta=true",
        {
            "messages": HELLO,
            "max_tokens": 32000,
            "tools": [{**tool, "cache_control": {"type": "ephemeral"}} for tool in CUSTOM],
            "metadata": {"user_id": "a"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), AGENTS)
def test_what_agents_send_is_taken(says, path, body):
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    says[0].text = "Hi."
    response = says[1].post(path, json={**asked(path), **body}, headers=headers)
    assert response.status_code == 200, response.text
    assert says[0].asked[-1].count('"function"') == 2 * len(TOOLS), "hosted tools are not shown"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_said", [False, True])
def test_the_stop_sequence_that_ended_an_answer_is_told(is_said, stream):
    options: dict[str, Any] = {"max_tokens": 20}
    with TestClient(create_app(Speculator(llama(eos=())), OPTIONS)) as client:
        whole = client.post(MESSAGES, json=asked(MESSAGES, **options)).json()
        text = whole["content"][0]["text"]
        stop = text[6:9]
        options["stop_sequences"] = ["never said", *[stop] * is_said]
        said = client.post(MESSAGES, json=asked(MESSAGES, stream=stream, **options))
    last = events(said.text)[-2]["delta"] if stream else said.json()
    expected = ("stop_sequence", stop) if is_said else ("max_tokens", None)
    assert (last["stop_reason"], last["stop_sequence"]) == expected
    if not stream:
        assert last["content"][0]["text"] == (text[: text.index(stop)] if is_said else text)


def test_an_answer_that_is_cut_is_incomplete():
    with TestClient(create_app(Speculator(llama(eos=())), OPTIONS)) as client:
        body = client.post(RESPONSES, json={"input": "Hello", "max_output_tokens": 9}).json()
        usage = body["usage"]
        assert (body["status"], usage["output_tokens"]) == ("incomplete", 9)
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        again = client.post(MESSAGES, json=asked(MESSAGES, max_tokens=9)).json()
        cached = again["usage"]["cache_read_input_tokens"]
        assert cached > 0, "the prompt is the same"
        assert again["usage"]["input_tokens"] + cached == usage["input_tokens"]


FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"previous_response_id": "r"}, "previous_response_id is not supported; send the"),
    (RESPONSES, {"background": True}, "background is not supported; stream the answer"),
    (RESPONSES, {"n": 2}, "n is not supported"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "got 'item_reference'"),
    (RESPONSES, {"input": [{**HELLO[0], "content": [{"type": "input_image"}]}]}, "'input_image'"),
    (RESPONSES, {"tools": [{"type": "local_shell"}]}, "tools.0.type: expected one of 'function'"),
    (RESPONSES, {"tools": [{"type": "custom", "name": "f"}]}, "got 'custom'"),
    (RESPONSES, {"tools": FUNCTIONS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    (RESPONSES, {"tool_choice": "required"}, "expected one of `tools`, got 'required'"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include.0"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "call_id": "a"}] * 1025}, "1024"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens: expected greater"),
    (MESSAGES, {"max_tokens": None}, "max_tokens: expected a valid integer, got None"),
    (MESSAGES, {"messages": [{**HELLO[0], "content": [{"type": "image"}]}]}, "got 'image'"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "f"}]}, "tools.0.type: expected"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "expected one of `tools`"),
    (MESSAGES, {"tools": CUSTOM, "tool_choice": {"type": "tool"}}, "tool_choice"),
    (MESSAGES, {"thinking": {"type": "on"}}, "thinking.type: expected 'enabled'"),
    (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers is not supported"),
    (MESSAGES, {"stop_sequences": ["a"] * 17}, "at most 16"),
    (MESSAGES, {"messages": [{"role": "user", "content": "x" * 5000}]}, "shorter than the context"),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused_in_one_line(says, path, body, message):
    response = says[1].post(path, json=asked(path, **body))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize(
    ("send", "status", "kind"),
    [
        ({"content": b"{"}, 400, "invalid_request_error"),
        ({"json": asked(MESSAGES, model="claude-haiku")}, 404, "not_found_error"),
        ({"json": asked(MESSAGES), "path": "/v1/messages/batches"}, 404, "not_found_error"),
        ({"json": asked(MESSAGES), "headers": {"x-api-key": "no"}}, 401, "authentication_error"),
        ({"json": asked(MESSAGES), "headers": {"Content-Type": "x"}}, 400, "invalid_request_error"),
        ({"content": b"x" * 5_000_000}, 413, "invalid_request_error"),
        ({"path": "/v1/messages/count_tokens", "json": {}}, 400, "invalid_request_error"),
    ],
)
def test_errors_of_messages_have_anthropics_form(says, send, status, kind):
    headers = {"Content-Type": "application/json", "x-api-key": "key", **send.pop("headers", {})}
    path = send.pop("path", MESSAGES)
    with TestClient(create_app(says[0], replace(OPTIONS, key="key"))) as client:
        response = client.post(path, headers=headers, **send)
    assert response.status_code == status
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"]["message"]


def test_a_full_queue_and_a_failure_in_a_stream_are_told_in_each_form():
    engine = Says()
    with (
        running(engine, replace(OPTIONS, slots=1, waiting=1)) as (url, server),
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as other,
    ):
        scheduler = server.scheduler
        options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 99}
        engine.text, engine.pause = "word " * 400, 0.01
        with (
            client.messages.stream(**options) as first,
            client.messages.stream(**options) as second,
        ):
            next(iter(first))
            next(iter(second))
            with pytest.raises(anthropic.RateLimitError) as full:
                client.messages.create(**options)
            assert full.value.body["error"]["type"] == "rate_limit_error"
        while scheduler.active or scheduler.waiting:
            time.sleep(0.02)
        engine.text, engine.pause, engine.failure = "Hello there.", 0.0, RuntimeError("broken")
        with pytest.raises(anthropic.APIStatusError) as failed:
            list(client.messages.create(**options, stream=True))
        assert failed.value.body["error"]["type"] == "api_error"
        *_, last = other.responses.create(model="tiny", input="Hello", stream=True)
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert "the engine failed" in last.response.error.message


def test_pings_are_sent_while_a_token_is_awaited(monkeypatch):
    engine = Says()
    engine.pause = 0.05
    monkeypatch.setattr(service, "QUIET", 0.01)
    with TestClient(create_app(engine, OPTIONS)) as client:
        said = events(client.post(MESSAGES, json=asked(MESSAGES, stream=True)).text)
    types = [event["type"] for event in said]
    assert "ping" in types
    assert (types[0], types[-1]) == ("message_start", "message_stop")
