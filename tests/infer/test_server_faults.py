"""The promise: whatever a client sends or does, it gets one clean answer or error, and the next
client is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import httpx
from served import Says, running
from tiny_chat import llama, saved

from draftheads.infer.serve import app, gate, protocol, reader, reply, responses, service
from draftheads.infer.serve.service import ServeOptions, Service

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
OPTIONS = ServeOptions("tiny")


@pytest.fixture(scope="module")
def says() -> Iterator[tuple[Says, str, Service]]:
    engine = Says()
    with running(engine, replace(OPTIONS, slots=2, waiting=3, timeout=20)) as (url, service):
        yield engine, url, service


@pytest.fixture
def client(says) -> Iterator[Any]:
    """Asserts, at the end, that the server still answers."""
    says[0].text, says[0].pause, says[0].failure = "Hello.", 0.0, None
    with httpx.Client(base_url=says[1], timeout=30) as client:
        yield client
        says[0].text, says[0].pause = "Hello.", 0.0
        until_idle(client)
        answer = client.post(CHAT, json=ASKED)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello."


def active(client: Any) -> float:
    text = client.get("/metrics").text
    return sum(map(float, re.findall(r"(?m)^draftheads_(?:active|waiting)_requests (\S+)", text)))


def until_idle(client: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while active(client):
        assert time.monotonic() < until, "the engine is still busy"
        time.sleep(0.02)


def error(response: Any, status: int) -> dict[str, Any]:
    """The error of a response of this status, in OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    return body["error"]


DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.fixture
def usual_recursion():
    """Python's own limit, which other tests' libraries may have raised: deep bodies then pass."""
    raised = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(raised)


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b"", "Invalid JSON: EOF while parsing"),
        (b'{"messages": [}', "Invalid JSON: expected value at line 1 column 15"),
        (b"[1, 2, 3]", "expected a JSON object"),
        (b'{"a": "\xff"}', "Invalid JSON: invalid unicode code point at line 1 column 8"),
        (DEEP, "Invalid JSON: recursion limit exceeded"),
        (b'{"prompt": [%s]}' % (b"[1]," * 200_000), "at most 131072 brackets, got more"),
        (b"{", 400),
        (b"nonsense", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"messages": "Hello"}', 400),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
        (json.dumps({**ASKED, "stop": [str(n) for n in range(100)]}).encode(), 400),
        (json.dumps({**ASKED, "max_tokens": -5}).encode(), 400),
        (json.dumps({**ASKED, "max_tokens": 10**400}).encode(), 400),
        (json.dumps({**ASKED, "model": "other"}).encode(), 404),
        (json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode(), 413),
        (json.dumps({**ASKED, "seed": 1}).replace("1}", "1" * 5000 + "}").encode(), 400),
        (b'{"messages": [], "\\ud800\\n": 1}', 400),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "stream_options": {"\\ud800": 1}}',
            400,
        ),
    ],
    ids=range(22),
)
def test_bodies_that_are_wrong(client, body, wrong, usual_recursion):
    """wrong: what is said of it, or the status."""
    headers = {"Content-Type": "application/json"}
    status, said = (400, wrong) if isinstance(wrong, str) else (wrong, "")
    message = error(client.post(CHAT, content=body, headers=headers), status)["message"]
    assert message and said in message
    assert "\n" not in message


def test_a_body_as_deep_as_python_goes_is_refused_or_answered(client, usual_recursion):
    """Which of them, libraries decide: each takes some of the depth."""
    body = b'{"messages": [{"role": "user", "name": ' + b"[" * 900 + b"]" * 900 + b"}]}"
    response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200 or error(response, 400)["message"]


FLOODS = {
    "messages": b'{"messages": [%s]}' % b",".join([b"1"] * 200_000),
    "parts": b'{"messages": [{"role": "user", "content": [%s]}]}' % b",".join([b"1"] * 200_000),
    "good messages": b'{"messages": [%s]}' % b",".join([b'{"role":"u"}'] * 30_000),
    "stops": b'{"messages": [{"role": "user"}], "stop": [%s]}' % b",".join([b"1"] * 200_000),
    "tokens": b'{"prompt": [%s]}' % b",".join([b"true"] * 80_000),
    "prompts": b'{"prompt": [%s]}' % b",".join([b"[1]"] * 100_000),
    "options": b"{%s}" % b",".join(b'"x%d": 1' % n for n in range(30_000)),
    "items": b'{"input": [%s]}' % b",".join([b"1"] * 200_000),
    "good items": b'{"input": [%s]}' % b",".join([b'{"role":"user","content":"a"}'] * 30_000),
    "parts of items": b'{"input": [{"role": "u", "content": [%s]}]}' % b",".join([b"1"] * 200_000),
    "summaries": b'{"input": [{"type": "reasoning", "summary": [%s]}]}'
    % b",".join([b"1"] * 90_000),
    "functions": b'{"input": "a", "tools": [%s]}' % b",".join([b"1"] * 200_000),
}


@pytest.mark.mend("4 MiB of wrong messages")
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_wrong_values_is_one_error_made_off_the_event_loop(name, monkeypatch):
    """Not one error for each value, which takes gigabytes."""
    counts: list[int] = []
    one_line = protocol._in_one_line

    def note(fault: Any) -> Any:
        counts.append(fault.error_count())
        return one_line(fault)

    monkeypatch.setattr(protocol, "_in_one_line", note)
    kinds = {b'{"prompt"': protocol.CompletionRequest, b'{"input"': responses.ResponsesBody}
    kind = kinds.get(FLOODS[name].partition(b":")[0], protocol.ChatRequest)
    tracemalloc.start()
    with pytest.raises(protocol.ApiError) as caught:
        protocol.parsed(kind, FLOODS[name])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(str(caught.value.detail)) < 400
    assert max(counts, default=0) <= 8
    assert peak < 40 * len(FLOODS[name])


def test_bodies_are_read_and_tokenized_by_other_threads_than_the_event_loops(client, monkeypatch):
    threads: set[str] = set()
    for name in ("parsed", "encode_prompt"):
        work = getattr(reader, name)

        def note(*given: Any, work: Any = work) -> Any:
            threads.add(threading.current_thread().name)
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return work(*given)

        monkeypatch.setattr(reader, name, note)
    assert client.post(CHAT, json=ASKED).status_code == 200
    assert len(threads) >= 1


def test_a_body_of_unknown_length_is_limited_too(client):
    parts = (b"x" * 65536 for _ in range(200))
    headers = {"Content-Type": "application/json"}
    error(client.post(CHAT, content=parts, headers=headers), 413)


@pytest.mark.mend("content types")
def test_another_content_type_is_refused(client):
    """A form on another site can send no other."""
    body = json.dumps(ASKED)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": kind}
        message = error(client.post(CHAT, content=body, headers=headers), 400)["message"]
        said = f"expected Content-Type: application/json, got {kind!r}; set this header"
        assert message == said
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post(CHAT, content=body, headers=headers).status_code == 200


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_a_body_that_comes_slowly_is_cut_off(client, says, monkeypatch):
    monkeypatch.setattr(gate, "ARRIVAL_SECONDS", 0.3)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with connect(says[1]) as slow:
        slow.sendall(f"{head}Content-Length: 1000\r\n\r\nx".encode())
        assert b"408" in slow.recv(4096)


@pytest.mark.slow
def test_a_client_that_reads_nothing_holds_up_nobody(client, says, monkeypatch):
    monkeypatch.setattr(reply, "STALL_SECONDS", 0.5)
    says[0].text = "word " * 40_000
    body = json.dumps({**ASKED, "stream": True}).encode()
    with connect(says[1]) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.3)
        until, tasks = time.monotonic() + 10, says[2].uvicorn.server_state.tasks
        assert tasks, "it is being answered"
        while tasks:
            assert time.monotonic() < until, "it is still being answered"
            time.sleep(0.05)


def test_fifty_clients_that_vanish_leave_an_idle_engine(client, says):
    says[0].text, says[0].pause = "word " * 400, 0.01

    async def leave() -> int:
        async with httpx.AsyncClient(base_url=says[1], timeout=30) as many:
            seen = 0

            async def ask() -> None:
                nonlocal seen
                async with many.stream("POST", CHAT, json={**ASKED, "stream": True}) as response:
                    async for _ in response.aiter_lines():
                        seen += 1

            tasks = [asyncio.create_task(ask()) for _ in range(50)]
            while seen < 20:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return seen

    assert asyncio.run(leave()) >= 20
    until_idle(client, 2)


def test_a_client_that_leaves_several_answers_frees_all_their_slots(client, says):
    says[0].text, says[0].pause = "word " * 400, 0.01
    with client.stream("POST", CHAT, json={**ASKED, "stream": True, "n": 4}) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        with httpx.Client(base_url=says[1]) as other:
            assert active(other) == 4
    until_idle(client, 2)


def test_a_client_that_leaves_before_a_whole_answer_frees_the_engine(client, says):
    says[0].text, says[0].pause = "word " * 400, 0.01
    with pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=ASKED, timeout=0.3)
    until_idle(client, 2)


def test_more_requests_than_fit_are_refused_and_the_others_answered(client, says):
    says[0].text, says[0].pause = "Hello again.", 0.05

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(base_url=says[1], timeout=30) as many:
            return await asyncio.gather(*(many.post(CHAT, json=ASKED) for _ in range(20)))

    responses = asyncio.run(ask())
    refused = [each for each in responses if each.status_code != 200]
    assert len(responses) - len(refused) >= 5, "two slots and three that wait"
    for each in refused:
        assert error(each, 429)["code"] == "queue_full"
        assert int(each.headers["Retry-After"]) >= 1
    for each in responses:
        if each.status_code == 200:
            assert each.json()["choices"][0]["message"]["content"] == "Hello again."


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_told_so(stream):
    engine = Says()
    engine.text, engine.pause = "word " * 400, 0.05
    with running(engine, replace(OPTIONS, timeout=0.5)) as (url, _), httpx.Client() as client:
        response = client.post(url + CHAT, json={**ASKED, "stream": stream})
        if stream:
            *_, last, rest = response.text.split("\n\n")
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
            assert rest == ""
        else:
            assert error(response, 504)["code"] == "timeout"
        client.base_url = url
        until_idle(client, 2)


def test_a_failure_in_the_middle_ends_one_stream_alone(client, says):
    says[0].text, says[0].pause = "Hello you there.", 0.05
    with client.stream("POST", CHAT, json={**ASKED, "stream": True}) as good:
        lines = good.iter_lines()
        next(lines)
        says[0].failure = RuntimeError("broken")
        response = client.post(CHAT, json={**ASKED, "stream": True})
        says[0].failure = None
    assert '"the engine failed at this request (RuntimeError)"' in response.text
    assert "[DONE]" not in response.text


@pytest.mark.mend("a stream behind busy slots had no byte until its first token")
def test_a_stream_that_waits_for_a_slot_speaks_at_once(client, says, monkeypatch):
    """Headers and the role, then comments until its turn comes; one that is left takes no place."""
    monkeypatch.setattr(service, "QUIET", 0.05)
    says[0].text, says[0].pause = "word " * 400, 0.01
    body = {**ASKED, "stream": True}
    with ExitStack() as streams:
        slots = [streams.enter_context(client.stream("POST", CHAT, json=body)) for _ in range(2)]
        answers = [slot.iter_lines() for slot in slots]
        for lines in answers:
            while '"content": "w' not in next(lines):
                pass
        with client.stream("POST", CHAT, json=body) as waiting:
            assert waiting.status_code == 200
            first, blank, second, *_ = islice(waiting.iter_lines(), 4)
            assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"] == {
                "role": "assistant",
                "content": "",
            }
            assert (blank, second) == ("", ": waiting")
            assert active(client) == 3
        until = time.monotonic() + 10
        while active(client) > 2:
            assert time.monotonic() < until, "it still waits"
            time.sleep(0.02)
        refused = [client.post(CHAT, json={**body, **more}) for more in ({"n": 9}, {"model": "x"})]
        assert [each.status_code for each in refused] == [400, 404], "known before it waits"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The folder of a tiny target."""
    folder = tmp_path_factory.mktemp("model")
    target = llama(eos=())
    target.model.config.max_position_embeddings = 4096
    saved(target, folder)
    return folder


@contextlib.contextmanager
def serving(model: Path, *options: str) -> Iterator[tuple[Any, str]]:
    """A `draftheads serve` process and its address."""
    command = [sys.executable, "-m", "draftheads.scripts.cli", "serve", "--target", str(model)]
    started = subprocess.Popen(
        [*command, "--head", "ngram", "--port", "0", "--threads", "1", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with started as process:
        try:
            line = process.stdout.readline()
            assert "http://127.0.0.1:" in line, process.stderr.read()
            yield process, line.split()[1]
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["one signal", "two signals"])
def test_signals_under_load_leave_no_request_without_an_end(model, again):
    """Those being answered are answered, unless a second signal comes; the others get an error."""
    with serving(model, "--slots", "2", "--queue", "30") as (process, url):
        got: list[tuple[int, str]] = []

        def ask(stream: bool) -> None:
            body = {**ASKED, "max_tokens": 400, "stream": stream}
            with httpx.Client(timeout=60) as client:
                response = client.post(url + CHAT, json=body)
                got.append((response.status_code, response.text))

        threads = [threading.Thread(target=ask, args=(n % 2 == 0,)) for n in range(20)]
        for thread in threads:
            thread.start()
        with httpx.Client(base_url=url) as client:
            while active(client) < 20:
                time.sleep(0.02)
        process.send_signal(signal.SIGINT if again else signal.SIGTERM)
        if again:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        for thread in threads:
            thread.join(60)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    assert len(got) == 20
    whole = [text for status, text in got if status == 200 and "error" not in text]
    assert len(whole) >= (0 if again else 2)
    assert all("[DONE]" in text or '"finish_reason":"length"' in text for text in whole)
    failed = [
        (status, text) for status, text in got if (status, text) not in [(200, t) for t in whole]
    ]
    assert failed
    for status, text in failed:
        assert status == 503 or '"code": "shutting_down"' in text, (status, text)


@pytest.mark.mend(
    "a server that was interrupted in its first milliseconds printed a coroutine that was never "
    "awaited, or a traceback"
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_request_ends_a_server_as_any_other(number, monkeypatch):
    """It is sent as soon as the address is printed."""
    monkeypatch.setattr(app, "print", lambda *_, **__: signal.raise_signal(number), raising=False)
    engine = Says()
    app.serve(engine, OPTIONS, "127.0.0.1", 0)
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "draftheads.scripts.cli", "serve", "--target", str(model)]
        done = subprocess.run([*command, "--port", port], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r".*expected a free address, got .*; choose another\n", done.stderr)
