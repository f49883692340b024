"""The promise: what coding agents send is answered as they expect. tests/engines/test_agents.py
asks the agents themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted import RESULT, scripted_target
from starlette.testclient import TestClient

from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.service import ServeOptions

QUESTION = {"role": "user", "content": "What is in a.png?"}
PICTURE = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
CALLED = {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"}
USED = {"type": "tool_use", "id": "a", "name": "see", "input": {}}
SEEN: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [
            QUESTION,
            CALLED,
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": [{"type": "input_image", "image_url": PICTURE, "detail": "high"}],
            },
        ]
    },
    "/v1/messages": {
        "max_tokens": 50,
        "messages": [
            QUESTION,
            {"role": "assistant", "content": [USED]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [{"type": "image", "source": SOURCE}],
                    }
                ],
            },
        ],
    },
}
"""Bodies in which an agent has looked at a picture."""


def echo(prompt: str) -> str:
    """What the newest result says."""
    return prompt.rpartition(RESULT)[2].partition("<|im_end|>")[0]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    engine = Speculator(scripted_target(echo), NGram())
    with TestClient(create_app(engine, ServeOptions("tiny"))) as client:
        yield client


def said(answer: Any) -> str:
    """The text of an answer in blocks."""
    [block] = answer.get("content") or answer["output"][0]["content"]
    return str(block["text"])


@pytest.mark.mend("a picture in the result of a call ended the task of Codex and Claude Code")
@pytest.mark.parametrize("path", SEEN)
def test_the_model_reads_that_it_cannot_see_a_picture(client, path):
    answer = client.post(path, json=SEEN[path])
    assert answer.status_code == 200, answer.text
    assert said(answer.json()) == "[a picture, which this model cannot see]"


@pytest.mark.mend("Claude Code did not summarise a conversation that had become too long")
def test_a_prompt_that_is_too_long_is_named_as_agents_know_it(client):
    text = {"role": "user", "content": "heron " * client.app.state.service.target.context}
    errors = {
        path: client.post(path, json={"max_tokens": 9, key: [text]}).json()["error"]
        for path, key in (("/v1/messages", "messages"), ("/v1/chat/completions", "messages"))
    }
    assert errors["/v1/messages"]["message"].startswith("prompt is too long: expected a prompt")
    assert errors["/v1/chat/completions"]["code"] == "context_length_exceeded"


@pytest.mark.mend("the tool runner of Anthropic's client ended at the thread that it asks for")
def test_a_client_that_asks_for_a_thread_goes_on_without(client):
    body = {"max_tokens": 9, "messages": [QUESTION], "thread": {"type": "create"}}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == "thread is not supported; leave it out"
    assert error["details"]["error_code"] == "thread_unsupported_request"


@pytest.mark.mend("Claude Code's first request was refused with 405")
def test_the_page_has_a_head(client):
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(client.get("/").content))
