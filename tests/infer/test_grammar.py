"""The promise: answers follow their schema, expression or grammar, and are those of the plain
model under the same masks, whatever is drafted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from calling import HERMES, TOOLS
from grammars import drawn
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from rich.console import Console
from starlette.testclient import TestClient
from tiny_chat import llama
from tiny_heads import Oracle, decode, random_head
from typed_commands import failed

from draftheads.heads.base import DraftHead
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.accept import Sampled
from draftheads.infer.chat.repl import ChatOptions, chat
from draftheads.infer.continuous import checked
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.grammar import SPACING, Grammar
from draftheads.infer.pipeline.generator import TextGenerator
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.service import ServeOptions

NEW = 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo() -> Target:
    return Target.load(str(Path(__file__).parents[2] / "recipes" / "demo-target"))


@cache
def masks(target: Target) -> LLTokenizer:
    return from_tokenizer(target.tokenizer, target.vocab_size, list(target.eos_ids))


@cache
def head(target: Target) -> DraftHead:
    return random_head("medusa", target)


def matcher(target: Target, kind: str, text: Any) -> LLMatcher:
    if kind == "json_schema":
        text = json.dumps({"x-guidance": SPACING, **text})
    return LLMatcher(masks(target), grammar_from(kind, text))


def allowed(target: Target, kind: str, text: Any, answer: list[int]) -> list[int]:
    """The tokens that may follow, by a matcher that has read nothing else."""
    fresh = matcher(target, kind, text)
    assert fresh.consume_tokens(answer), "a forbidden token was chosen"
    return [token for token, bias in enumerate(fresh.compute_logit_bias()) if bias]


def plain(target: Target, kind: str, text: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """What transformers' own constrained greedy decoding writes."""
    out = target.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=list(target.eos_ids),
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda _, ids_T: allowed(
            target, kind, text, ids_T[len(prompt) :].tolist()
        ),
    )
    return out[0, len(prompt) :].tolist()


def question(target: Target, text: str = "Who is Lily?") -> list[int]:
    return encode_prompt(target, [{"role": "user", "content": text}])


def followed(target: Target, seed: int) -> tuple[int, bool]:
    """Decode a drawn grammar with all drafts; returns the most steps saved, and if it ended."""
    kind, text, is_right = drawn(seed)
    prompt = question(target, f"Question {seed}")
    expected = plain(target, kind, text, prompt)
    has_ended = expected[-1] in target.eos_ids
    grammar = Grammar(target, kind, text)
    chain = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
    oracle = {"vocab_size": target.vocab_size, "noise": 0.3}
    sources = [None, head(target), NGram()]
    sources.append(lambda: Oracle(chain, [expected], **oracle))
    saved = 0
    for drafts in sources:
        [row], [counts] = decode(
            target, drafts, [prompt], max_new_tokens=NEW, constraint=grammar
        )  # fmt: skip
        assert row == expected, (seed, drafts)
        saved = max(saved, counts.tokens - counts.steps)
    for rule in (Sampled(1.3), Sampled(1.0, 0.9, 8), checked(0.8, 1.0, 0)):
        [row], _ = decode(
            target, head(target), [prompt], sampling=rule, seeds=["s"],
            max_new_tokens=NEW, constraint=grammar,
        )  # fmt: skip
        if row[-1] in target.eos_ids:
            assert is_right(target.tokenizer.decode(row[:-1])), (seed, row)
    if has_ended:
        assert is_right(target.tokenizer.decode(expected[:-1])), seed
    return saved, has_ended


@pytest.mark.parametrize("seed", range(18))
def test_greedy_answers_are_those_of_plain_constrained_decoding(demo, seed):
    followed(demo, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_many_grammars(demo, first):
    results = [followed(demo, seed) for seed in range(first, first + 50)]
    assert sum(saved > 0 for saved, _ in results) > 25
    assert sum(has_ended for _, has_ended in results) > 25


def test_forced_tokens_are_drafted_without_other_drafts(demo):
    [row], [counts] = decode(
        demo, None, [question(demo)], max_new_tokens=NEW,
        constraint=Grammar(demo, "json_schema", PERSON),
    )  # fmt: skip
    assert counts.tokens_per_step > 1.5
    assert json.loads(demo.tokenizer.decode(row[:-1])).keys() == PERSON["properties"].keys()


def test_forbidden_drafts_are_not_verified(demo):
    grammar = Grammar(demo, "regex", "[0-9]{4}").row(0, [])
    digits = [demo.tokenizer(str(n), add_special_tokens=False)["input_ids"][0] for n in (1, 2)]
    [letter] = demo.tokenizer("a", add_special_tokens=False)["input_ids"]
    paths = [(digits[0],), (letter,), (letter, digits[0]), (digits[0], digits[1])]
    kept = grammar.drafts([], paths)
    assert list(kept) == [paths[0], paths[3]]
    ended = grammar.drafts(digits * 2, [(digits[0],)])
    assert len(demo.eos_ids) > 1 or list(ended) == [(demo.eos_ids[0],)]


def test_a_limit_cuts_and_an_end_token_ends(demo):
    engine = Speculator(demo, NGram())
    finish = {}
    for text in ("[a-z ]{400}", "[a-z ]{5}"):
        grammar = Grammar(demo, "regex", text)
        *_, last = engine.generate(question(demo), max_new_tokens=20, constraint=grammar)
        finish[text] = last.finish
    assert list(finish.values()) == ["length", "eos"]
    grammar = Grammar(demo, "regex", "(abc )+")
    steps = engine.generate(question(demo), max_new_tokens=20, stop=["c a"], constraint=grammar)
    assert [*steps][-1].finish == "stop"


def test_the_pipeline_takes_a_schema(demo):
    model = TextGenerator(Speculator(demo, NGram()))
    prompts = ["Who is Lily?", "And Tom?"]
    answers = model.generate(prompts, schema=PERSON, temperature=0.7, seed=1)
    assert all(json.loads(str(each)).keys() == {"name", "age"} for each in answers)
    assert str(model.generate(prompts[0], schema=json.dumps(PERSON))) == demo.tokenizer.decode(
        plain(demo, "json_schema", PERSON, question(demo)), skip_special_tokens=True
    )
    assert json.loads("".join(model.stream(prompts[0], schema=PERSON)))


BAD: list[tuple[str, Any]] = [
    *[("json_schema", text) for text in ("", "{", "3", "[]", "null", "{'a': 1}", "[" * 9999)],
    *[("json_schema", value) for value in (3, [], True, {1}, {"type": {1}}, {"a": float("nan")})],
    ("json_schema", {"type": "text"}),
    ("json_schema", {"type": 3}),
    ("json_schema", {"enum": []}),
    ("json_schema", {"properties": 3}),
    ("json_schema", {"$ref": "#/nowhere"}),
    ("json_schema", {"$ref": "https://example.com/schema.json"}),
    ("json_schema", {"type": "string", "pattern": "("}),
    ("any", [("json_schema", {"enum": []})]),
    ("choice", 3),
    ("json_schema", {"type": "string", "minLength": 5, "maxLength": 2}),
    ("json_schema", {"type": "integer", "minimum": 5, "maximum": 2}),
    *[("regex", text) for text in ("(", "[", "a{2,1}", r"\1", "(?=a)b", "*", 3, None)],
    *[("grammar", text) for text in ("", 'x: "a"', "start: x", "start: /(/", 3)],
    ("grammar", "start: start"),
    ("grammar", 'root ::= root "a"'),
    ("grammar", 'root ::= "a'),
    ("nonsense", "a"),
]


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_what_cannot_be_compiled_is_refused_in_one_line(demo, kind, text):
    named = "json_schema" if kind == "any" else kind
    with pytest.raises(
        ValueError, match=f"^{named}: expected one that llguidance can follow"
    ) as refusal:
        Grammar(demo, kind, text)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300


@pytest.mark.mend(
    "tools and schemas refused for an unknown format, not, if, oneOf, propertyNames, look-around"
)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "nonsense"},
        {"type": "array", "uniqueItems": True},
        {"type": "integer", "not": {"const": 3}},
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        {"type": "object", "properties": {"pattern": {"type": "string", "pattern": "^(?!a).*@"}}},
        {"type": "string", "pattern": "(?<=a)b\n\x1b[2J"},
    ],
)
def test_what_no_grammar_can_hold_is_said_and_refuses_nothing(client, caplog, schema):
    """Of an answer, and of a tool that has to be called."""
    [answer] = content(ask(client, structured_outputs={"json": schema}, max_tokens=1))
    [line] = [record.getMessage() for record in caplog.records if record.name == "draftheads"]
    assert "not held: " in line and line.isprintable() and len(line) < 400
    assert answer


def test_an_answer_follows_any_of_several_grammars(demo):
    parts = [("json_schema", PERSON), ("regex", "[0-9]+/x"), ("choice", ['"é', "start ::= 😀"])]
    grammar = Grammar(demo, "any", [*parts, ("grammar", 'start: "<" /a+/ ">"')])
    texts = ['{"name": "a", "age": 3}', "12/x", '"é', "start ::= 😀", "<aa>"]
    for text in [*texts, "{}", "x", "<>"]:
        ids = demo.tokenizer(text, add_special_tokens=False)["input_ids"]
        paths = [tuple(ids[:end]) for end in range(1, len(ids) + 1)]
        kept = grammar.row(0, []).drafts([], paths)
        assert (paths[-1] in kept) == (text in texts), text


def test_a_target_without_an_end_is_refused():
    with pytest.raises(ValueError, match="eos"):
        Grammar(llama(eos=()), "regex", "a")


def test_without_llguidance_a_line_says_how_to_install_it(client, demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        Grammar(demo, "regex", "a")
    response = ask(client, structured_outputs={"regex": "a"})
    assert response.status_code == 400 and "pip install" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def client(demo) -> Iterator[TestClient]:
    """Of a server whose drafts are a head's, so that requests are decoded together."""
    with TestClient(create_app(Speculator(demo, head(demo)), ServeOptions("demo"))) as client:
        yield client


def ask(client: TestClient, **body: Any) -> Any:
    messages = [{"role": "user", "content": "Who is Lily?"}]
    return client.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": NEW, **body}
    )


def content(response: Any) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["message"]["content"] for choice in response.json()["choices"]]


AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
AS_JSON: list[dict[str, Any]] = [
    {"response_format": AS_SCHEMA},
    {"response_format": {"type": "json_schema", "schema": PERSON}},
    {"response_format": {"type": "json_object", "schema": PERSON}},
    {"response_format": {"type": "json_object", "json_schema": {"schema": PERSON}}},
    {"structured_outputs": {"json": json.dumps(PERSON)}},
    {"structured_outputs": {"json": PERSON, "regex": None, "disable_any_whitespace": True}},
]


@pytest.mark.mend("schemas in json_object or at the top level, structured_outputs")
def test_the_server_constrains_answers(client, demo):
    expected = demo.tokenizer.decode(
        plain(demo, "json_schema", PERSON, question(demo)), skip_special_tokens=True
    )
    for asked in AS_JSON:
        for draft in (True, False):
            assert content(ask(client, **asked, draft=draft)) == [expected]
    for asked in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        [object_] = content(ask(client, **asked, max_tokens=200))
        assert object_.startswith("{")
    for kind, value, pattern in (
        ("regex", "[0-9]{3}", "[0-9]{3}"),
        ("grammar", 'root ::= "yes" | "no"', "yes|no"),
        ("choice", ["yes", "no"], "yes|no"),
    ):
        assert re.fullmatch(pattern, *content(ask(client, structured_outputs={kind: value})))
    assert content(ask(client, response_format={"type": "text"})) == content(ask(client))


def test_answers_with_different_grammars_are_decoded_together(client):
    """And each has its own random numbers, log-probabilities and stream."""
    asked: list[dict[str, Any]] = [
        {"response_format": AS_SCHEMA, "temperature": 1.0, "seed": 1, "n": 3},
        {"structured_outputs": {"regex": "[a-f]{20}"}, "logprobs": True, "top_logprobs": 2},
        {},
        {
            "structured_outputs": {"regex": "(yes, )*no"},
            "temperature": 1.5,
            "seed": 2,
            "draft": False,
        },
    ]
    alone = [content(ask(client, **body)) for body in asked]
    with ThreadPoolExecutor() as threads:
        together = list(threads.map(lambda body: content(ask(client, **body)), asked))
    assert together[1:3] == alone[1:3], "what is greedy is the same in any batch"
    assert all(json.loads(each)["age"] <= 150 for each in alone[0] + together[0])
    assert alone[0] != alone[0][:1] * 3
    assert all(re.fullmatch("(yes, )*(no)?", each[0]) or len(each[0]) > 50 for each in alone[3:])


def test_a_constrained_answer_is_streamed_and_scored(client):
    whole = ask(client, response_format=AS_SCHEMA, logprobs=True).json()["choices"][0]
    assert len(whole["logprobs"]["content"]) > 3
    stream = ask(client, response_format=AS_SCHEMA, stream=True).text
    *events, _, _ = stream.split("\n\n")
    parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    text = "".join(part["delta"].get("content", "") for part in parts)
    assert text == whole["message"]["content"] and json.loads(text)
    assert [part["finish_reason"] for part in parts][-1] == "stop"
    cut = ask(client, response_format=AS_SCHEMA, max_tokens=5).json()["choices"][0]
    assert cut["finish_reason"] == "length"


def test_chat_takes_a_schema(demo, tmp_path, run, monkeypatch):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(PERSON))
    monkeypatch.setattr("sys.stdin", StringIO("Who is Lily?\nAnd Tom?\n"))
    words = ["chat", "--target", demo.name, "--head", "ngram", "--dtype", "float32", "--schema"]
    code, output, _ = run(*words, file)
    answers = [line for line in output.splitlines() if line.startswith("{")]
    assert code == 0 and len(answers) == 2
    assert all(json.loads(each).keys() == {"name", "age"} for each in answers)


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "a JSON schema"), ('{"type": "text"}', "text"), (None, "schema.json")],
)
def test_chat_refuses_a_bad_schema_in_one_line(demo, tmp_path, run, text, word):
    file = tmp_path / "schema.json"
    if text:
        file.write_text(text)
    failed(run("chat", "--target", demo.name, "--dtype", "float32", "--schema", file), word)


@pytest.fixture(scope="module")
def caller(demo) -> Iterator[TestClient]:
    """A server whose template has tools in the form of Hermes, and no reasoning, of which this
    target would write without end.
    """
    target = Target(demo.model, copy(demo.tokenizer), name="demo")
    target.tokenizer.chat_template = HERMES.replace(".split('</think>')[-1].lstrip()", "")
    with TestClient(create_app(Speculator(target, NGram()), ServeOptions("demo"))) as client:
        yield client


DIGIT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
NAMES = [tool["function"]["name"] for tool in TOOLS]
DIGITS = [
    {"type": "function", "function": {"name": name, "parameters": DIGIT}} for name in NAMES
]  # fmt: skip


def called(response: Any) -> tuple[dict[str, Any], str]:
    """The function of the only call of an answer or a stream, and why it ended."""
    assert response.status_code == 200, response.text
    events = response.text.split("\n\n")[:-2]
    bodies = [json.loads(event.removeprefix("data: ")) for event in events] or [response.json()]
    choices = [body["choices"][0] for body in bodies]
    messages = [choice.get("delta") or choice.get("message", {}) for choice in choices]
    assert not any(message.get("content") for message in messages)
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert ["id" in call for call in calls] == [True] + [False] * (len(calls) - 1)
    arguments = "".join(call["function"]["arguments"] for call in calls)
    return {**calls[0]["function"], "arguments": arguments}, choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", *NAMES])
def test_a_tool_that_has_to_be_called_is_called(caller, choice, stream):
    named = {"type": "function", "function": {"name": choice}}
    asked = choice if choice == "required" else named
    function, finish = called(ask(caller, tools=DIGITS, tool_choice=asked, stream=stream))
    assert finish == "tool_calls"
    assert function["name"] == choice or choice == "required"
    assert function["name"] in NAMES
    assert re.fullmatch(r'\{"n": [0-9]\}', function["arguments"])


@pytest.mark.mend("any keys until the limit for a function without parameters")
@pytest.mark.parametrize(
    "given",
    [{}, *({"parameters": each} for each in (None, {}, {"type": "object", "properties": {}}))],
)
def test_a_function_without_parameters_is_called_without_arguments(caller, given):
    tools = [{"type": "function", "function": {"name": "look_up", **given}}]
    function, finish = called(ask(caller, tools=tools, tool_choice="required"))
    assert (function["arguments"], finish) == ("{}", "tool_calls")


def test_a_call_that_has_to_be_is_cut_without_its_marks(caller):
    said = ask(caller, tools=DIGITS, tool_choice="required", max_tokens=6).json()
    [choice] = said["choices"]
    assert choice["message"] == {"role": "assistant", "content": ""}
    assert choice["finish_reason"] == "length"


@pytest.mark.mend("tools that no answer could call beside response_format")
@pytest.mark.parametrize("draft", [True, False])
def test_tools_stay_callable_beside_a_format_of_answers(caller, draft):
    """An answer is a call or what follows the format, and both come."""
    kind = {"type": "json_schema", "json_schema": {"schema": {"const": "only"}}}
    asked = {"tools": DIGITS, "response_format": kind, "temperature": 2.0, "seed": 3, "n": 40}
    choices = ask(caller, **asked, draft=draft).json()["choices"]
    calls = [choice for choice in choices if choice["finish_reason"] == "tool_calls"]
    texts = [choice["message"]["content"] for choice in choices if choice not in calls]
    assert {choice["message"]["content"] for choice in calls} == {""}
    assert set(texts) == {'"only"'} and calls
    assert content(ask(caller, **{**asked, "tool_choice": "none", "n": 1})) == ['"only"']


def test_what_has_to_be_called_must_be_there(caller):
    for body, message in (
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}, "got 'other'"),
        ({"tool_choice": "required"}, "expected one of `tools`, got 'required'"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "got several",
        ),
    ):
        said = ask(caller, **body)
        assert said.status_code == 400
        assert message in said.json()["error"]["message"]


COMPLEX = "start: " + " ".join(f"(/[a-z]*{place}[a-z]*/)?" for place in range(1100))
"""Llguidance compiles it, and gives up after the first letter."""
GIVES_UP = r"grammar: expected one that llguidance can follow, got: [^\n]*Current row has [^\n]*"


@pytest.mark.mend("a schema that failed while decoding ended a chat")
def test_a_grammar_that_becomes_too_complex_is_one_line_in_python_and_chat(demo):
    engine = Speculator(demo, NGram())
    grammar = Grammar(demo, "grammar", COMPLEX)
    with pytest.raises(ValueError, match=f"^{GIVES_UP}$"):
        list(engine.generate(question(demo), constraint=grammar))
    lines = iter(["Who is Lily?", "/stats"])
    out = StringIO()
    chat(
        engine,
        ChatOptions(constraint=grammar),
        read=lambda _: next(lines, "/quit"),
        console=Console(file=out, width=999),
    )
    assert re.search(rf"\n{GIVES_UP}\n", out.getvalue())
    assert out.getvalue().endswith("No answers yet.\n")


@pytest.mark.mend("a grammar that failed while decoding was an error 500 with a traceback")
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_becomes_too_complex_is_the_clients_mistake(client, caplog, stream):
    """An error of that request alone, and none of the server."""
    said = ask(client, structured_outputs={"grammar": COMPLEX}, stream=stream)
    assert said.status_code == (200 if stream else 400)
    last = said.text.strip().split("\n\n")[-1].removeprefix("data: ")
    fault = json.loads(last)["error"]
    assert fault["type"] == "invalid_request_error"
    assert re.fullmatch(GIVES_UP, fault["message"])
    assert not caplog.records
