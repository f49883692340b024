"""The promise: the clients that people have work with the server as they are."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calling import HISTORY, QUESTION, TOOLS, Calls, use
from served import Says, running
from tiny_chat import EOS, llama, options, prompts, saved
from tiny_heads import random_head

from draftheads.infer.engine import Speculator
from draftheads.infer.remote import ServerOptions
from draftheads.infer.serve import service
from draftheads.train.data.answers import read_answers
from draftheads.train.data.distill import distill
from draftheads.train.data.server import ServedTarget

openai = pytest.importorskip("openai")
TEXT = "Grüße, 世界! 👋🏽 «naïve» ﷽ — Ω≈ç√ 🏳️‍🌈."
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def says() -> Iterator[tuple[Says, str]]:
    engine = Says()
    with running(engine) as (url, _):
        yield engine, url


@pytest.fixture
def client(says) -> Iterator[openai.OpenAI]:
    says[0].text, says[0].pause = TEXT, 0.0
    with openai.OpenAI(base_url=f"{says[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_reads_answers_and_streams(client):
    whole = client.chat.completions.create(model="tiny", messages=HELLO)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens > 0
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    said = [chunk.choices[0].delta.content for chunk in parts if chunk.choices]
    assert "".join(said) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in said), "whole characters"
    assert len(said) > 10
    assert parts[-1].usage == whole.usage.model_copy(update={"seconds": parts[-1].usage.seconds})


def test_openai_reads_a_stream_that_waits(client, says, monkeypatch):
    monkeypatch.setattr(service, "QUIET", 0.01)
    says[0].pause = 0.05
    for stream in (
        client.chat.completions.create(model="tiny", messages=HELLO, stream=True),
        client.completions.create(model="tiny", prompt="Hello", stream=True),
    ):
        choices = [chunk.choices[0] for chunk in stream]
        said = [each.text if hasattr(each, "text") else each.delta.content for each in choices]
        assert "".join(said) == TEXT
        assert choices[-1].finish_reason == "stop"


def test_openai_completes_text_and_lists_models(client, says):
    extra = {"return_token_ids": True}
    made = client.completions.create(model="tiny", prompt="Once", extra_body=extra)
    assert made.choices[0].text == TEXT
    tokenizer = says[0].target.tokenizer
    assert tokenizer.decode(made.choices[0].token_ids, skip_special_tokens=True) == TEXT
    stream = client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.mend('a client that asked for another path read "Not Found" alone')
def test_openai_knows_the_errors(client, says):
    with pytest.raises(openai.NotFoundError, match="expected model 'tiny'") as caught:
        client.chat.completions.create(model="gpt", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="presence_penalty is not supported"):
        client.chat.completions.create(model="tiny", messages=HELLO, presence_penalty=1.0)
    with pytest.raises(openai.NotFoundError, match="chat/completions, got /v1/embeddings"):
        client.embeddings.create(model="tiny", input="x")
    says[0].failure = RuntimeError("broken")
    try:
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    finally:
        says[0].failure = None


@pytest.mark.parametrize("stream", [False, True])
def test_openai_calls_tools(stream):
    """An agent's loop: a question, two calls, their results, the answer."""
    engine = Calls()
    messages: list[Any] = [QUESTION]
    seen = []
    with (
        running(engine) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        for _ in range(2):
            asked: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": TOOLS}
            if stream:
                with client.chat.completions.stream(**asked) as events:
                    types = {event.type for event in events}
                    [choice] = events.get_final_completion().choices
            else:
                [choice] = client.chat.completions.create(**asked).choices
            message = choice.message
            seen.append((choice.finish_reason, message.content, message.reasoning_content))
            messages.append(message.model_dump())  # with many nulls
            for call in message.tool_calls or ():
                result = use(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            assert not stream or "content.delta" in types
    assert seen == [("tool_calls", "I look.", "Both tools."), ("stop", "A bird; 2.", "Done.")]
    assert engine.asked[-1].endswith(HISTORY)


def test_curl_streams(client, says):
    if not shutil.which("curl"):
        pytest.skip("no curl on this machine")
    body = json.dumps({"messages": HELLO, "stream": True})
    kind = "Content-Type: application/json"
    command = ["curl", "-sN", f"{says[1]}/v1/chat/completions", "-H", kind, "-d", body]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *events, end, rest = said.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    parts = [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events]
    assert "".join(parts) == TEXT


def test_distill_gets_the_token_ids_that_the_target_writes(tmp_path):
    target = llama(EOS)
    saved(target, tmp_path / "model")
    asked = prompts(9, turns=2)
    greedy = {"temperature": 0.0, "max_new_tokens": 24}
    distill(target, asked, options(tmp_path / "here", **greedy))
    with running(Speculator(target, random_head("eagle3", target))) as (url, _):
        served = ServedTarget(str(tmp_path / "model"), ServerOptions(urls=[url]))
        report = distill(served, asked, options(tmp_path / "there", **greedy))
    assert report.complete and not report.missing

    def answers(folder: Path) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return sorted((answer.tokens, answer.learn) for answer in read_answers(folder))

    assert answers(tmp_path / "there") == answers(tmp_path / "here")
    lengths = {stop - start for _, learn in answers(tmp_path / "here") for start, stop in learn}
    assert len(lengths) > 3, "answers of many lengths, with and without an end token"
