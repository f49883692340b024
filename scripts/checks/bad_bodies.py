"""Does a server answer every wrong request with one clear error, and stay as it was?

    python scripts/checks/bad_bodies.py [--bodies 300] [--seed 0] [--verbose]

Starts `draftheads serve` on the demo target and sends it requests that are drawn with the seed: a
good one with a strange value, a missing or unknown key, broken JSON, a wrong content type, deep
nesting, endless lists. A fault of ours is

* a status of 500 or more, or none within 30 s,
* an error without the shape of its protocol, or with a message that is not one short line,
* a good request that is answered otherwise afterwards, or waits while a bad one is read,
* memory that grows by more than 300 MB.

Prints a table of statuses and every fault; the exit code is 1 if there are any.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from typer import Option

TARGET = Path(__file__).parents[2] / "recipes" / "demo-target"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
QUESTION = {"role": "user", "content": "What does os.path.join do?"}
CALLING = {"role": "assistant", "content": None}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [QUESTION], "max_tokens": 8, "temperature": 0},
    TEXT: {"prompt": "What does", "max_tokens": 8, "temperature": 0},
    RESPONSES: {"input": [QUESTION], "max_output_tokens": 8, "temperature": 0},
    MESSAGES: {"messages": [QUESTION], "max_tokens": 8, "temperature": 0},
}
KEYS = (
    *("messages", "prompt", "max_tokens", "temperature", "top_p", "stop", "stream", "n", "seed"),
    *("model", "logprobs", "top_logprobs", "echo", "suffix", "logit_bias", "presence_penalty"),
    *("frequency_penalty", "tools", "tool_choice", "response_format", "stream_options", "user"),
    *("max_completion_tokens", "best_of", "top_k", "min_p", "chat_template_kwargs"),
    *("structured_outputs", "allowed_token_ids", "bad_words", "length_penalty", "nothing"),
    *("reasoning_effort", "verbosity", "documents", "modalities", "audio"),
    *("continue_final_message", "add_generation_prompt", "parallel_tool_calls"),
    *("input", "instructions", "text", "reasoning", "include", "previous_response_id"),
    *("background", "max_output_tokens", "truncation", "system", "thinking", "stop_sequences"),
    *("output_config", "context_management", "mcp_servers"),
)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, "", "x", "1", -1, 0, 1, 1.5, 1e308, -1e308, 10**30, -(2**63), [], {}),
    *([[]], [None], [True], [1.0, 2.0], ["1", "2"], [-1], [10**9], {"a": 1}, "\x00", "\ud800"),
    *([1, 2, 3], [[1, 2], [3]], ["a"] * 3, "a" * 5000, [QUESTION] * 2, [{"role": "user"}]),
    *([{"role": "x", "content": "a"}], [{"role": "user", "content": [{"type": "image_url"}]}]),
    *([{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": None}]),
    *({"json": {"pattern": "("}}, {"choice": [""]}, {"type": "json_object", "schema": {"a": 1}}),
    *([{"type": "function", "function": {"name": "f", "parameters": None}}], ["text"]),
    *([QUESTION, {"role": "assistant", "content": "\ud83d"}], [{"role": "assistant"}]),
    *([{**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 2000}}]}],),
    *([{"type": "function_call", "name": "f", "arguments": "{", "call_id": "a"}],),
    *([{"type": "function_call_output", "call_id": 1, "output": [{"type": "input_image"}]}],),
    *([{"type": "reasoning", "summary": None}], [{"type": "item_reference", "id": "a"}]),
    *([{**QUESTION, "content": [{"type": "tool_use", "id": "a", "name": "", "input": 1}]}],),
    *([{**QUESTION, "content": [{"type": "tool_result", "tool_use_id": "a", "content": [1]}]}],),
    *([{**QUESTION, "content": []}], [{"type": "reasoning"}], {"type": "tool"}, {"type": "any"}),
    *([{"name": "f", "input_schema": None}], [{"name": "f", "input_schema": {"type": "x"}}]),
    *([{"type": "custom", "name": "f"}], {"effort": 1}, {"format": {"type": "json_schema"}}),
)
SLOWEST_S, WAIT_S, GROWTH_MB, LONGEST = 30, 8, 300, 400


@dataclass
class Body:
    """One request and what came of it."""

    path: str
    fault: str
    content: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    status: int = 0
    answer: str = ""
    seconds: float = 0.0
    complaints: list[str] = field(default_factory=list)


def strange_value(draw: random.Random) -> Body:
    """A good request with one strange value, at a key that it had or not."""
    path = draw.choice(list(GOOD))
    key, value = draw.choice(KEYS), draw.choice(STRANGE)
    content = json.dumps({**GOOD[path], key: value}).encode()
    return Body(path, f"{key} = {str(value)[:30]!a}", content)


def missing_key(draw: random.Random) -> Body:
    """A good request without one of its keys."""
    path = draw.choice(list(GOOD))
    request = dict(GOOD[path])
    key = draw.choice(list(request))
    del request[key]
    if key == "max_tokens":
        request["stop"] = "e"
    return Body(path, f"without {key}", json.dumps(request).encode())


def broken_json(draw: random.Random) -> Body:
    """Bytes that are not a JSON object."""
    path = draw.choice(list(GOOD))
    good = json.dumps(GOOD[path]).encode()
    place = draw.randrange(len(good))
    ways = {
        "cut": good[:place],
        "a byte changed": good[:place] + draw.randbytes(1) + good[place + 1 :],
        "noise": draw.randbytes(200),
        "empty": b"",
        "a list": b"[1, 2]",
        "a number": b"7",
        "NaN": good.replace(b'"temperature": 0', b'"temperature": NaN'),
        "Infinity": good.replace(b'"max_tokens": 8', b'"max_tokens": Infinity'),
        "UTF-16": good.decode().encode("utf-16"),
        "twice the same key": good[:-1] + b', "max_tokens": "x"}',
        "a comment": b"/* */" + good,
        "many digits": good.replace(b"8", b"8" * 5000),
    }
    how = draw.choice(list(ways))
    return Body(path, how, ways[how])


def wrong_type(draw: random.Random) -> Body:
    """A content type that is not JSON."""
    path = draw.choice(list(GOOD))
    kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x", "")
    kind = draw.choice(kinds)
    body = Body(path, f"content type {kind!r}", json.dumps(GOOD[path]).encode())
    body.headers = {"Content-Type": kind}
    return body


def large(draw: random.Random) -> Body:
    """Megabytes, or thousands of levels."""
    ways: dict[str, Callable[[], Any]] = {
        "messages of 1": lambda: {"messages": [1] * 2_000_000},
        "messages of {}": lambda: {"messages": [{}] * 1_000_000},
        "many small messages": lambda: {"messages": [QUESTION] * 50_000},
        "many parts": lambda: {"messages": [{**QUESTION, "content": [{"type": "text"}] * 90_000}]},
        "a long text": lambda: {"messages": [{"role": "user", "content": "a b " * 1_000_000}]},
        "many stops": lambda: {**GOOD[CHAT], "stop": ["x"] * 500_000},
        "many ids": lambda: {"prompt": [1] * 1_500_000, "messages": [QUESTION]},
        "many prompts": lambda: {"prompt": ["a"] * 700_000, "messages": [QUESTION]},
        "a large bias": lambda: {**GOOD[CHAT], "logit_bias": {str(i): 1 for i in range(200_000)}},
        "unknown keys": lambda: {**GOOD[CHAT], **{f"k{i}": i for i in range(200_000)}},
    }
    how = draw.choice([*ways, "nesting", "nested objects"])
    path = draw.choice(list(GOOD))
    if how == "nesting":
        return Body(path, how, b'{"messages": ' + b"[" * 200_000)
    if how == "nested objects":
        return Body(path, how, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    return Body(path, how, json.dumps(ways[how]()).encode())


def wrong_place(draw: random.Random) -> Body:
    """A path or a model that is not there."""
    paths = ("/v1/nothing", "/v1/models/none", "/v1/embeddings", "/../etc/passwd", "/v1/models")
    return Body(draw.choice(paths), "another path", json.dumps(GOOD[CHAT]).encode())


MAKERS = (
    *[strange_value] * 6,
    missing_key,
    broken_json,
    broken_json,
    wrong_type,
    large,
    wrong_place,
)


class Server:
    """A running `draftheads serve`."""

    def __init__(self, process: subprocess.Popen[str], host: str, log: Path) -> None:
        self.process, self.host, self.log = process, host, log

    def send(self, body: Body) -> Body:
        """POST it and read all of the answer."""
        began = time.monotonic()
        connection = http.client.HTTPConnection(self.host, timeout=SLOWEST_S)
        try:
            connection.request("POST", body.path, body.content, body.headers)
            response = connection.getresponse()
            body.status, body.answer = response.status, response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            body.complaints.append(f"no answer: {error!r}")
        finally:
            connection.close()
        body.seconds = time.monotonic() - began
        return body

    def megabytes(self) -> float:
        """Resident memory."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)


@contextmanager
def serving(log: Path) -> Any:
    """A server on a free port, ended afterwards."""
    command = [sys.executable, "-m", "draftheads.scripts.cli", "serve", "--target", str(TARGET)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://(\S+)", line):
                yield Server(process, found[1], log)
                return
        raise SystemExit(f"the server did not start: {log.read_text()[-1000:]}")
    finally:
        process.terminate()
        process.wait()


def judge(body: Body) -> None:
    """Note what an answer must not be."""
    if body.status >= 500:
        body.complaints.append(f"status {body.status}")
    if not 400 <= body.status < 500:
        return
    try:
        answer = json.loads(body.answer)
        message = answer["error"]["message"]
        is_whole = answer.get("type") == "error" or "param" in answer["error"]
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole or (body.path == MESSAGES) != (answer.get("type") == "error"):
        body.complaints.append(f"not the shape of its protocol: {body.answer[:80]!r}")
        return
    if not message or "\n" in message or len(message) > LONGEST:
        body.complaints.append(f"a message of {len(message)} characters")
    if re.search(r"pydantic|Traceback|Input should|Field required|Extra inputs", message):
        body.complaints.append(f"not our words: {message[:80]!r}")


def probe(server: Server, waits: list[float], done: threading.Event) -> None:
    """Ask something cheap, again and again, and note how long it waits."""
    while not done.wait(0.2):
        connection = http.client.HTTPConnection(server.host, timeout=60)
        began = time.monotonic()
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            waits.append(float("inf"))
        finally:
            connection.close()
        waits.append(time.monotonic() - began)


def bad_bodies(
    bodies: Annotated[int, Option(min=1)] = 300,
    seed: int = 0,
    verbose: Annotated[bool, Option("--verbose", help="print every answer")] = False,
    log: Annotated[Path, Option(help="the server's messages")] = Path("out/bad-bodies.log"),
) -> None:
    """Send wrong requests to a server."""
    draw = random.Random(seed)
    log.parent.mkdir(parents=True, exist_ok=True)
    statuses: Counter[tuple[str, int]] = Counter()
    faults: list[str] = []
    waits: list[float] = []
    done = threading.Event()
    good = {path: json.dumps(request).encode() for path, request in GOOD.items()}

    with serving(log) as server:
        before = {path: answer_text(server.send(Body(path, "", good[path]))) for path in GOOD}
        memory = server.megabytes()
        prober = threading.Thread(target=probe, args=(server, waits, done))
        prober.start()
        for number in range(bodies):
            maker = draw.choice(MAKERS)
            body = server.send(maker(draw))
            judge(body)
            statuses[maker.__name__, body.status] += 1
            faults += [f"{number} {body.path} [{body.fault}]: {each}" for each in body.complaints]
            if verbose or body.complaints:
                shown = f"{number} {body.path} [{body.fault}] {body.status} {body.seconds:.1f} s"
                print(shown, body.answer[:300], *body.complaints, sep="  !! ", flush=True)
        done.set()
        prober.join()
        for path, text in before.items():
            if answer_text(server.send(Body(path, "", good[path]))) != text:
                faults.append(f"{path}: a good request is answered otherwise")
        growth = server.megabytes() - memory
        if server.process.poll() is not None:
            faults.append("the server ended")
    if growth > GROWTH_MB:
        faults.append(f"memory grew by {growth:.0f} MB")
    if waits and max(waits) > WAIT_S:
        faults.append(f"another client waited {max(waits):.1f} s")
    if "Traceback" in log.read_text():
        faults.append(f"a traceback in {log}")
    show(statuses)
    print(f"memory {memory:.0f} MB, {growth:+.0f}; others waited {max(waits):.2f} s at most")
    print(f"{bodies} requests, seed {seed}: {len(faults)} faults", *faults, sep="\n")
    raise typer.Exit(bool(faults))


def answer_text(body: Body) -> str:
    """The text of an answer."""
    assert body.status == 200, (body.status, body.answer)
    answer = json.loads(body.answer)
    if body.path == RESPONSES:
        answer = answer["output"][0]
    if body.path in (RESPONSES, MESSAGES):
        return str(answer["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice.get("text") or choice["message"]["content"])


def show(statuses: Counter[tuple[str, int]]) -> None:
    """Print how often each kind of request got each status."""
    codes = sorted({status for _, status in statuses})
    print("\n| request | " + " | ".join(map(str, codes)) + " |")
    print("| --- " * (len(codes) + 1) + "|")
    for kind in dict.fromkeys(maker.__name__ for maker in MAKERS):
        print(f"| {kind} | " + " | ".join(str(statuses[kind, code]) for code in codes) + " |")


if __name__ == "__main__":
    typer.run(bad_bodies)
