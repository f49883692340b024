"""The promise: OpenAI's interface, and answers that are the engine's own."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from served import Says
from starlette.testclient import TestClient
from tiny_chat import END, TEMPLATE, llama, spaced_tokenizer
from tiny_heads import random_head
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftheads.heads.target.model import Target
from draftheads.infer.accept import Sampled
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.serve import app
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.service import ServeOptions

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BEGUN = [{"role": "assistant", "content": "It is"}]
OPTIONS = ServeOptions("tiny")


@pytest.fixture(scope="module")
def engine() -> Speculator:
    target = llama(eos=())
    return Speculator(target, random_head("medusa", target))


@pytest.fixture(scope="module")
def client(engine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, OPTIONS)) as client:
        yield client


def ask(client: TestClient, path: str = CHAT, **body: Any) -> Any:
    body = {"messages": HELLO, **body} if path == CHAT else body
    content = json.dumps({"max_tokens": 20, **body})  # with lone surrogates, too
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


def chunks(client: TestClient, path: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    """Those of a stream."""
    response = ask(client, path, stream=True, **body)
    assert response.status_code == 200
    *events, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def tokens(engine: Speculator, prompt: list[int], count: int = 20, **options: Any) -> list[int]:
    steps = engine.generate(prompt, max_new_tokens=count, **options)
    return [token for step in steps for token in step.tokens]


def hello(engine: Speculator) -> list[int]:
    return encode_prompt(engine.target, HELLO)


def decoded(engine: Speculator, ids: list[int]) -> str:
    return engine.target.tokenizer.decode(ids, skip_special_tokens=True)


def test_an_answer_is_the_engines_own(client, engine):
    body = ask(client, return_token_ids=True).json()
    expected = tokens(engine, hello(engine))
    [choice] = body["choices"]
    assert choice["token_ids"] == expected
    assert body["prompt_token_ids"] == hello(engine)
    assert choice["message"] == {"role": "assistant", "content": decoded(engine, expected)}
    assert (choice["finish_reason"], body["object"]) == ("length", "chat.completion")
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(hello(engine))
    assert usage["completion_tokens"] == 20
    assert usage["total_tokens"] == 20 + len(hello(engine))
    drafts = usage["completion_tokens_details"]
    assert sum(drafts.values()) == (usage["steps"] - 1) * engine.tree.draft_nodes


def test_a_stream_adds_up_to_the_whole_answer(client, engine):
    whole = ask(client).json()
    stream = chunks(client, return_token_ids=True)
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert stream[0]["prompt_token_ids"] == hello(engine)
    choices = [chunk["choices"][0] for chunk in stream]
    content = "".join(choice["delta"]["content"] for choice in choices)
    assert content == whole["choices"][0]["message"]["content"]
    ids = [token for choice in choices[1:] for token in choice["token_ids"]]
    assert ids == tokens(engine, hello(engine))
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [
        "length"
    ]
    assert {chunk["object"] for chunk in stream} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in stream}) == 1
    assert not any("usage" in chunk or "step" in chunk["choices"][0] for chunk in stream)


def test_steps_and_usage_come_on_request(client):
    *stream, last = chunks(client, stream_options={"include_usage": True, "include_steps": True})
    assert last["choices"] == []
    steps = [chunk["choices"][0]["step"] for chunk in stream[1:]]
    assert sum(step["tokens"] for step in steps) == last["usage"]["completion_tokens"]
    assert len(steps) == last["usage"]["steps"]
    assert [step["prefill"] for step in steps] == [True] + [False] * (len(steps) - 1)
    assert all(chunk["usage"] is None for chunk in stream)
    assert 0 < sum(step["seconds"] for step in steps) <= last["usage"]["seconds"] + 1e-3


def test_completions_continue_text_or_token_ids(client, engine):
    expected = decoded(engine, tokens(engine, engine.target.tokenizer("Once")["input_ids"]))
    for prompt in ("Once", ["Once"], engine.target.tokenizer("Once")["input_ids"]):
        body = ask(client, COMPLETE, prompt=prompt).json()
        assert (body["object"], body["choices"][0]["text"]) == ("text_completion", expected)
    text = "".join(c["choices"][0]["text"] for c in chunks(client, COMPLETE, prompt="Once"))
    assert text == expected


@pytest.mark.mend("an assistant's last message was answered, not continued")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{}, {"continue_final_message": True}])
def test_an_answer_that_was_begun_is_continued(client, engine, stream, options):
    """What the target sees ends with its beginning, and the answer is the rest."""
    asked = {"messages": [*HELLO, *BEGUN], "max_tokens": 6, **options}
    body = ask(client, **asked, return_token_ids=True).json()
    begun = engine.target.tokenizer("It is", add_special_tokens=False)["input_ids"]
    assert body["prompt_token_ids"] == [*hello(engine), *begun]
    ids = tokens(engine, body["prompt_token_ids"], 6)
    assert body["choices"][0]["token_ids"] == ids
    said = body["choices"][0]["message"]["content"]
    if stream:
        parts = chunks(client, **asked)
        said = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert said == decoded(engine, ids)


def test_the_rest_of_an_answer_keeps_its_first_space():
    """Which decoders drop at the beginning of a text."""
    engine = Says()
    engine.target.tokenizer = spaced_tokenizer()
    engine.target.tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    engine.text = "the end"
    with TestClient(create_app(engine, OPTIONS)) as client:
        for last, text in (("user", "the end"), ("assistant", " the end")):
            messages = [{"role": "user", "content": "once"}, {"role": last, "content": "upon a"}]
            [choice] = ask(client, messages=messages).json()["choices"]
            assert choice["message"]["content"] == text
        asked = {"prompt": "once upon a", "max_tokens": 3}
        [choice] = ask(client, COMPLETE, **asked).json()["choices"]
        said = "".join(chunk["choices"][0]["text"] for chunk in chunks(client, COMPLETE, **asked))
        assert choice["text"] == said == " the end"


def test_reasoning_that_was_begun_is_continued():
    """In its own key, as the message has opened it."""
    target = llama(eos=())
    with TestClient(create_app(Speculator(target), OPTIONS)) as client:
        for begun, key in (("<think>\nhm", "reasoning_content"), ("<think>a</think>b", "content")):
            messages = [*HELLO, {"role": "assistant", "content": begun}]
            [choice] = ask(client, messages=messages, max_tokens=8).json()["choices"]
            assert choice["message"][key]


@pytest.mark.mend("lm-eval's loglikelihood tasks")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["abc", "a longer prompt"], [[72, 73, END, 74], [75]]])
def test_an_echo_is_the_prompt_and_its_log_probabilities(engine, stream, prompts):
    """As lm-eval reads them: sum(token_logprobs[context:-1]), and whether each is the likeliest."""
    target = llama(eos=(END,))
    ids = [p if isinstance(p, list) else target.tokenizer(p)["input_ids"] for p in prompts]
    asked = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1}
    choices: list[dict[str, Any]] = [{"text": "", "logprobs": []} for _ in prompts]
    with TestClient(create_app(Speculator(target, NGram()), OPTIONS)) as client:
        bodies = (
            chunks(client, COMPLETE, **asked) if stream else [ask(client, COMPLETE, **asked).json()]
        )
        plain = ask(client, COMPLETE, prompt=prompts, max_tokens=1).json()["choices"]
    for part in (part for body in bodies for part in body["choices"]):
        choices[part["index"]]["text"] += part["text"]
        choices[part["index"]]["logprobs"] += [part["logprobs"]] * bool(part["logprobs"])
    for prompt, choice, answer in zip(ids, choices, plain, strict=True):
        assert (
            choice["text"]
            == target.tokenizer.decode(prompt, skip_special_tokens=True) + answer["text"]
        )
        [scored] = choice["logprobs"]
        logp = plain_logprobs(Speculator(target), prompt, [])
        expected = [float(logp[place, token]) for place, token in enumerate(prompt[1:])]
        assert scored["token_logprobs"][0] is None and scored["top_logprobs"][0] is None
        assert scored["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-3)
        best = [max(top.values()) for top in scored["top_logprobs"][1:-1]]
        assert best == pytest.approx(logp[:-1].amax(-1).tolist(), abs=1e-3)
        lengths = map(len, scored["tokens"])
        assert scored["text_offset"] == [0, *accumulate(lengths)][:-1]


@pytest.mark.parametrize("of", ["request", "server"])
def test_sampling_follows_its_options_and_seed(engine, of):
    """Those of the request, or of the server where it says nothing."""
    rule = Sampled(0.9, 0.8, 7)
    rule.seed(5)
    expected = tokens(engine, hello(engine), sampling=rule)
    sampling = {"temperature": 0.9, "top_p": 0.8, "top_k": 7}
    options, asked = (OPTIONS, sampling) if of == "request" else (replace(OPTIONS, **sampling), {})
    with TestClient(create_app(engine, options)) as client:

        def ids(**more: Any) -> list[int]:
            body = ask(client, return_token_ids=True, **{**asked, **more}).json()
            return body["choices"][0]["token_ids"]

        assert ids(seed=5) == ids(seed=5) == expected
        assert len({tuple(ids()) for _ in range(4)}) > 1
        assert ids(temperature=0) == tokens(engine, hello(engine))


def test_the_plain_model_can_be_asked(client, engine):
    whole, plain = ask(client).json(), ask(client, draft=False).json()
    assert plain["choices"][0]["message"] == whole["choices"][0]["message"]
    assert plain["usage"]["steps"] == 20
    assert sum(plain["usage"]["completion_tokens_details"].values()) == 0


def test_the_next_turn_reuses_the_last(client, engine):
    messages = [{"role": "user", "content": "What is a draft head? Tell me all."}]
    first = ask(client, messages=messages).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "Why?"}]
    usage = ask(client, messages=messages).json()["usage"]
    prompt = encode_prompt(engine.target, messages[:1])
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(prompt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", range(4, 16, 3))
def test_stop_strings_end_an_answer_before_them(client, engine, stream, place):
    text = decoded(engine, tokens(engine, hello(engine)))
    stop = text[place : place + 3]
    asked = {"stop": ["never said", stop]}
    if stream:
        said = chunks(client, **asked)
        content = "".join(chunk["choices"][0]["delta"]["content"] for chunk in said)
        finish = said[-1]["choices"][0]["finish_reason"]
    else:
        [choice] = ask(client, **asked).json()["choices"]
        content, finish = choice["message"]["content"], choice["finish_reason"]
    assert content == text[: text.index(stop)]
    assert finish == "stop"


def test_stop_tokens_end_an_answer(client, engine):
    expected = tokens(engine, hello(engine))
    place = next(n for n, token in enumerate(expected) if n > 2 and token not in expected[:n])
    asked = {"stop_token_ids": [expected[place]], "return_token_ids": True}
    [choice] = ask(client, **asked).json()["choices"]
    assert choice["token_ids"] == expected[: place + 1]
    assert choice["message"]["content"] == decoded(engine, expected[:place])
    assert choice["finish_reason"] == "stop"


def test_an_end_token_is_not_shown():
    target = llama()  # many end tokens
    with TestClient(create_app(Speculator(target), OPTIONS)) as client:
        body = ask(client, max_tokens=200, return_token_ids=True).json()
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] in target.eos_ids
    text = target.tokenizer.decode(choice["token_ids"][:-1], skip_special_tokens=True)
    assert choice["message"]["content"] == text


def test_an_answer_ends_with_the_context(client, engine):
    for limit in ({"max_tokens": 10_000}, {"max_tokens": None}, {"max_completion_tokens": 999}):
        usage = ask(client, **limit).json()["usage"]
        assert usage["total_tokens"] == engine.target.context


PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
SURROGATE = {"role": "user", "content": "\ud800"}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


def test_parts_of_text_are_one_text(client):
    parts = ask(client, messages=[{"role": "user", "content": PARTS}]).json()
    assert parts["choices"][0]["message"] == ask(client).json()["choices"][0]["message"]


AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}
BAD_FORMATS = (
    {"type": "json_schema", "json_schema": {"schema": {"type": "text"}}},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "person"}},
    {"type": "text", "schema": {}},
    {**AS_SCHEMA, "schema": {}},
)
BAD_OUTPUTS = (
    {"json": {}, "choice": ["a"]},
    {"regex": "("},
    {"grammar": "start: nothing"},
    {"json": "{"},
    {"json": {"enum": []}},
)
AS_IT_IS = {"type": "json_schema", "json_schema": {"properties": {}}}
"""A schema that nothing names."""
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"max_tokens": -1}, "max_tokens", "expected greater than or equal to 1, got -1"),
    ({"max_tokens": "x"}, "max_tokens", "expected a valid integer, got 'x'"),
    ({"messages": None}, "messages", "expected a valid array, got None"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"n": 129}, "n", "less than or equal to 128"),
    ({"n": 100}, "n", "at most 68 answers"),
    ({"stop": ["x"] * 100}, "stop", "at most 16"),
    ({"stop": ""}, "stop", "at least 1"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "messages.0", "'text'"),
    ({"messages": [SURROGATE]}, None, "Invalid JSON: unexpected end of hex escape"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, None, "shorter than the context"),
    ({"frequency_penalty": 0.5}, None, "frequency_penalty is not supported; leave it out"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "expected a value, got none"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"top_logprobs": 2}, None, "set logprobs"),
    ({"generation_config": "{}"}, None, "generation_config is not supported"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "expected a JSON object, got 'x'"),
    (
        {"chat_template_kwargs": {"padding": True, "messages": []}},
        "chat_template_kwargs",
        "expected variables of the chat template, got messages, padding, which is always set",
    ),
    (
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs",
        "the chat template is the server's own; leave chat_template out",
    ),
    ({"chat_template_kwargs": {"mood": 1, "tools": [1]}}, None, "tokenizer accept"),
    *(
        (body, None, "expected")
        for body in (
            *({"response_format": form} for form in BAD_FORMATS),
            *({"structured_outputs": form} for form in BAD_OUTPUTS),
            {"response_format": AS_SCHEMA, "structured_outputs": {"regex": "a"}},
        )
    ),
    *(
        ({"prompt": prompt, "path": COMPLETE}, "prompt", "expected a valid ")
        for prompt in (["1", 2], [1.0, 2.0], [True], [[1], "a"], [[True]])
    ),
    *(
        ({"prompt": prompt, "path": COMPLETE}, None, message)
        for prompt, message in (
            ([], "at least 1"),
            ("", "at least 1"),
            ([10_000], "token ids from 0 to"),
            (["a", ""], "at least 1"),
            (["a"] * 200, "at most 128"),
            (["a"] * 100, "at most 68 answers"),
        )
    ),
]
NOT_KNOWN: list[tuple[dict[str, Any], str]] = [
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"include_reasoning": False}, "include_reasoning"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"messages": [*HELLO, *BEGUN], "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": [{"role": "assistant", "reasoning": 3}, *HELLO]}, "messages.0.reasoning"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"echo": True}, "echo"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning_format": "xml"}, "reasoning_format"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"temprature": 0.5}, "temprature"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format"),
    ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
    ({"response_format": AS_IT_IS}, "response_format"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ({"prompt": "x"}, "prompt"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": "0.5"}, "temperature"),
    ({"x" * 100_000: 1, "y": 2}, "x"),
]
"""Options that are refused by name, not answered as if they were not there."""


@pytest.mark.mend("options that are not supported")
@pytest.mark.mend("token ids given as text, numbers, booleans")
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [*REFUSED, *((body, param, param) for body, param in NOT_KNOWN)],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(client, body, param, message):
    response = ask(client, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert "\n" not in error["message"] and len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param or "")


SWITCHED = TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif",
    "<|im_start|>assistant\n{{ mood }}{% if not enable_thinking | default(true) %}<think></think>"
    "{% endif %}{% endif",
)
"""As Qwen3's: a variable puts an empty reasoning block in front of the answer."""


def test_variables_of_the_template_are_added_to_the_servers_own():
    target = llama(eos=(), template=SWITCHED)
    target.template_args = {"mood": "calm"}
    asked: dict[str, Any] = {"return_token_ids": True, "max_tokens": 1}
    with TestClient(create_app(Speculator(target), OPTIONS)) as client:

        def prompt(**variables: Any) -> str:
            answer = ask(client, chat_template_kwargs=variables, **asked).json()
            return target.tokenizer.decode(answer["prompt_token_ids"])

        assert prompt().endswith("assistant\ncalm")
        assert prompt(enable_thinking=False).endswith("assistant\ncalm<think></think>")
        assert prompt(mood="glad", unread=[1]).endswith("assistant\nglad")
        asked["reasoning_effort"] = "none"
        assert prompt().endswith("assistant\ncalm<think></think>")
        del asked["reasoning_effort"]
        assert prompt().endswith("assistant\ncalm"), "of one request"
        assert ask(client, chat_template_kwargs=None, **asked).status_code == 200
        ids = encode_prompt(target, HELLO, {"enable_thinking": False})
        assert prompt(enable_thinking=False) == target.tokenizer.decode(ids)
        refused = ask(client, COMPLETE, prompt="x", chat_template_kwargs={"mood": "glad"})
    assert refused.json()["error"]["message"].startswith("chat_template_kwargs is not supported")


def test_another_model_and_another_path_are_not_found(client):
    response = ask(client, model="gpt")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "expected model 'tiny'" in response.json()["error"]["message"]
    assert client.get("/v1/models/gpt").status_code == 404
    said = client.get("/nowhere").json()["error"]["message"]
    assert said == "expected a path such as /v1/chat/completions, got /nowhere"
    assert client.get(CHAT).status_code == 405


def test_models_health_and_metrics(client, engine):
    [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", engine.target.context)
    assert client.get("/v1/models/tiny").json() == model
    assert client.get("/health").json() == {"status": "ok"}
    before = counted(client)
    usage = ask(client).json()["usage"]
    after = counted(client)
    assert after["completion_tokens_total"] - before["completion_tokens_total"] == 20
    assert after["steps_total"] - before["steps_total"] == usage["steps"]
    assert after["active_requests"] == after["waiting_requests"] == 0
    drafts = usage["completion_tokens_details"]
    rise = {name: after[name] - before[name] for name in after if name.startswith("spec_decode")}
    assert rise.pop("spec_decode_num_drafts_total") == usage["steps"] - 1
    assert (
        rise.pop("spec_decode_num_draft_tokens_total")
        == sum(drafts.values()) - (drafts["reasoning_tokens"])
    )
    by_depth = [count for name, count in rise.items() if "per_pos_total" in name]
    assert sum(by_depth) == drafts["accepted_prediction_tokens"] > 0
    assert by_depth == sorted(by_depth, reverse=True)


def counted(client: TestClient) -> dict[str, float]:
    """The samples of /metrics without labels."""
    lines = [line for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
    pairs = [line.removeprefix("draftheads_").rsplit(" ", 1) for line in lines]
    return {name: float(value) for name, value in pairs}


def test_a_target_without_a_template_answers_no_chat():
    with TestClient(create_app(Speculator(llama(template=None)), OPTIONS)) as client:
        response = ask(client)
        assert response.status_code == 400
        assert "use /v1/completions" in response.json()["error"]["message"]


def test_a_target_without_a_tokenizer_is_refused_at_the_start(engine):
    with pytest.raises(ValueError, match="has no tokenizer; a server needs one"):
        create_app(Speculator(Target(engine.target.model, name="bare")), OPTIONS)


@pytest.mark.mend("n and several prompts")
def test_several_prompts_and_n_are_answered_as_if_asked_alone(client, engine):
    """In OpenAI's order, with the seed of an answer by its number alone."""
    prompts = ["Once", "Upon a time", "There"]
    asked = {"temperature": 0.9, "seed": 5, "n": 2, "return_token_ids": True}
    body = ask(client, COMPLETE, prompt=prompts, **asked).json()
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for place, text in enumerate(prompts):
        alone = ask(client, COMPLETE, prompt=text, **asked).json()
        both = [choice["token_ids"] for choice in choices[2 * place : 2 * place + 2]]
        assert [choice["token_ids"] for choice in alone["choices"]] == both
        assert both[0] != both[1], "another seed"
        first = ask(client, COMPLETE, prompt=text, **{**asked, "n": 1}).json()
        assert first["choices"][0]["token_ids"] == both[0]
        assert choices[2 * place]["prompt_token_ids"] == alone["prompt_token_ids"]
    usage = body["usage"]
    assert usage["prompt_tokens"] == sum(len(text) for text in prompts), "a prompt counts once"
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    drafts = usage["completion_tokens_details"]
    assert sum(drafts.values()) == (usage["steps"] - 6) * engine.tree.draft_nodes


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_stream_of_several_answers_is_told_apart_by_index(client, path):
    asked = {"temperature": 0.9, "seed": 5, "n": 3}
    if path == COMPLETE:
        asked["prompt"] = ["Once", "Upon"]
    whole = ask(client, path, **asked).json()["choices"]
    texts, ends = [""] * len(whole), [None] * len(whole)
    for chunk in chunks(client, path, **asked):
        [choice] = chunk["choices"]
        assert ends[choice["index"]] is None, "nothing after the end"
        said = choice["text"] if path == COMPLETE else choice["delta"]["content"]
        texts[choice["index"]] += said
        ends[choice["index"]] = choice["finish_reason"]
    if path == COMPLETE:
        assert texts == [choice["text"] for choice in whole]
    else:
        assert texts == [choice["message"]["content"] for choice in whole]
    assert ends == ["length"] * len(whole)


def test_one_of_several_answers_may_stop_before_the_others(client, engine):
    asked = {"temperature": 0.9, "seed": 3, "n": 3, "return_token_ids": True}
    before = [choice["token_ids"] for choice in ask(client, **asked).json()["choices"]]
    end = next(token for token in before[0][5:] if all(token not in each for each in before[1:]))
    body = ask(client, **asked, stop_token_ids=[end]).json()
    ids = [choice["token_ids"] for choice in body["choices"]]
    assert ids == [before[0][: before[0].index(end) + 1], *before[1:]]
    finish = [choice["finish_reason"] for choice in body["choices"]]
    assert finish == ["stop", "length", "length"]
    assert body["usage"]["completion_tokens"] == sum(map(len, ids))


def plain_logprobs(engine: Speculator, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Of all tokens, after each token of prompt and answer; the model's own, without our cache."""
    out = engine.target.model(torch.tensor([prompt + answer]), use_cache=False)
    return torch.log_softmax(out.logits[0].float(), -1)


@pytest.mark.mend("logprobs")
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logprobs_of_a_chat_are_the_targets_own(client, engine, temperature):
    asked = {"temperature": temperature, "top_k": 5, "seed": 1, "logprobs": True, "top_logprobs": 3}
    body = ask(client, **asked, return_token_ids=True).json()
    [choice] = body["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    assert sum(body["usage"]["completion_tokens_details"].values()), "with drafts"
    expected = plain_logprobs(engine, hello(engine), ids)[len(hello(engine)) - 1 :]
    assert len(content) == len(ids) == 20
    assert b"".join(bytes(each["bytes"]) for each in content) == b"".join(
        bytes([byte]) for byte in raw(engine, ids)
    )
    for each, token, logp in zip(content, ids, expected, strict=False):
        assert math.isclose(each["logprob"], logp[token], abs_tol=1e-3)
        best = logp.topk(3).values.tolist()
        assert [top["logprob"] for top in each["top_logprobs"]] == pytest.approx(best, abs=1e-3)
    streamed = [
        part
        for chunk in chunks(client, **asked)
        for part in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [part["token"] for part in streamed] == [part["token"] for part in content]


def raw(engine: Speculator, ids: list[int]) -> list[int]:
    """The bytes of the tokens: this tokenizer has one for each."""
    names = engine.target.tokenizer.convert_ids_to_tokens(ids)
    values = {char: byte for byte, char in bytes_to_unicode().items()}
    return [
        byte for name in names for byte in ([values[name]] if name in values else name.encode())
    ]


def test_an_end_token_has_a_logprob_too():
    target = llama(eos=tuple(range(259)))
    with TestClient(create_app(Speculator(target), OPTIONS)) as client:
        asked = {"prompt": [72, 73, 74], "logprobs": 1, "max_tokens": 1}
        [choice] = ask(client, COMPLETE, **asked).json()["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 1 and choice["text"] == ""


def test_options_of_no_consequence_are_taken(client):
    asked = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
    asked |= {"parallel_tool_calls": True, "tool_choice": "auto", "guided_json": None}
    asked |= {"modalities": ["text"], "verbosity": "medium", "reasoning_effort": "medium"}
    asked |= {"include_reasoning": True, "length_penalty": 1.0, "priority": 0}
    asked |= {"continue_final_message": False, "add_generation_prompt": True}
    asked |= {"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "tools": []}
    asked |= {"n": 1, "min_p": 0.0, "repetition_penalty": 1.0, "top_k": -1}
    asked |= dict.fromkeys(("seed", "stop"))
    assert ask(client, **asked).status_code == 200


@pytest.mark.mend("long texts")
def test_a_text_much_longer_than_the_context_is_not_tokenized(client, engine, monkeypatch):
    lengths: list[int] = []
    tokenizer = engine.target.tokenizer
    encode = type(tokenizer).__call__

    def note(self: Any, text: str, *more: Any, **options: Any) -> Any:
        lengths.append(len(text))
        return encode(self, text, *more, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", note)
    for asked in (
        {"prompt": "word " * 600_000},
        {"messages": [{"role": "user", "content": "x" * 10**6}]},
    ):
        response = ask(client, COMPLETE if "prompt" in asked else CHAT, **asked)
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert max(lengths) <= 16 * engine.target.context


@pytest.mark.mend("bearer")
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        *((sent, 200) for sent in ("Bearer s3cret", "bearer s3cret", "BEARER s3cret")),
        *((sent, 401) for sent in ("", "Bearer s3cre", "s3cret", "Basic s3cret")),
        ({"x-api-key": "s3cret"}, 200),
        ({"x-api-key": "s3cret", "Authorization": "Bearer none"}, 200),
        *(({"x-api-key": key}, 401) for key in ("", "s3cre", "Bearer s3cret")),
    ],
)
def test_a_key_is_asked_for(engine, sent, status):
    with TestClient(create_app(engine, replace(OPTIONS, key="s3cret"))) as client:
        client.headers |= {"Authorization": sent} if isinstance(sent, str) else sent
        paths = ("/v1/models", "/v1/learning")
        for response in (ask(client), *map(client.get, paths)):
            assert response.status_code == status
            assert "s3cret" not in response.text
        assert client.get("/health").status_code == 200


@pytest.mark.mend("--root-path")
def test_a_proxy_may_offer_it_below_a_path(engine):
    """Whether the proxy takes the path away or leaves it, and no path leads around the key."""
    with TestClient(create_app(engine, replace(OPTIONS, key="k", root_path="/llm"))) as client:
        for path in ("/v1/models", "/llm/v1/models"):
            assert client.get(path).status_code == 401
            headers = {"Authorization": "Bearer k"}
            assert client.get(path, headers=headers).status_code == 200
        assert client.get("/llm", follow_redirects=False).headers["location"].endswith("/llm/")
        assert "<title>" in client.get("/llm/").text


@pytest.mark.mend("--allowed-host")
@pytest.mark.parametrize(
    ("header", "passes"),
    [
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.0.0.2:8000", True),
        ("[::1]:8000", True),
        ("192.168.1.5", True),
        ("model.example.com", True),
        ("a.b.lan:443", True),
        ("lan", False),
        ("evil.example", False),
        ("model.example.com.evil", False),
        ("evil@localhost", False),
        ("localhost:x", False),
        ("", False),
    ],
)
def test_hosts_by_which_it_is_called(engine, header, passes):
    with TestClient(create_app(engine, OPTIONS, ["model.example.com", "*.lan"])) as client:
        response = client.get("/health", headers={"Host": header})
    assert response.status_code == (200 if passes else 400)
    if not passes:
        assert "see --allowed-host" in response.json()["error"]["message"]


@pytest.mark.mend("the first token waited 40 ms for an acknowledgement")
def test_a_token_is_sent_at_once(engine, monkeypatch):
    """Not after the client's system has acknowledged what was sent before, which takes 40 ms."""
    sent_at_once: list[int] = []

    def accept(self: Any, sockets: list[socket.socket]) -> None:
        with socket.create_connection(sockets[0].getsockname()):
            connection, _ = sockets[0].accept()
            sent_at_once.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            connection.close()
        sockets[0].close()

    monkeypatch.setattr(app._Server, "run", accept)
    app.serve(engine, OPTIONS, "127.0.0.1", 0)
    assert sent_at_once[0]
