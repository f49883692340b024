"""The promise: `bench --server` reports what a serving engine itself counted for exactly the
requests that were timed, says where its figures cannot be trusted, and fails in one line.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_server import CUT, Json, LocalServer
from tiny_chat import END, llama
from typed_commands import failed, questions

from draftheads.infer.measure.served import by_position, counts_of

DRAFTED = 3
KEY = "sk-0123456789abcdef"


class Engine:
    """A server like vLLM's, over two engine processes. Answers depend on the prompt alone; drafts
    are accepted by a pattern that goes on from request to request, and beyond an answer's end.
    """

    def __init__(self, drafts: bool = True) -> None:
        self.drafts = drafts
        self.pattern = cycle([3, 0, 1, 2, 0, 0, 3])
        self.log: list[tuple[int, Counter[int]]] = []  # drafts and accepted positions per request
        self.counts = [Counter[str](), Counter[str]()]
        self.lock = threading.Lock()
        self.busy = self.busiest = 0
        self.pause = 0.0
        self.ids = True
        self.change: Callable[[int, list[int]], list[int]] = lambda number, ids: ids
        self.server = LocalServer(self.choice)
        self.show()

    def choice(self, request: Json) -> Json:
        with self.lock:
            self.busy += 1
            self.busiest = max(self.busy, self.busiest)
        time.sleep(self.pause)
        first = sum(request["prompt"]) % 20
        text = "abcdefghijklmnopqrstuvwxyz"[first:] + "." * (first % 3)
        ids = [*text.encode(), END][: request["max_tokens"]]
        with self.lock:
            ids = self.change(len(self.log), ids)
            self.count(ids)
            self.show()
            self.busy -= 1
        is_whole = ids[-1] == END
        choice: Json = {"text": bytes(ids[: len(ids) - is_whole]).decode()}
        choice["finish_reason"] = "stop" if is_whole else "length"
        return choice | ({"token_ids": ids} if self.ids else {})

    def count(self, ids: list[int]) -> None:
        counts = self.counts[len(self.log) % 2]
        drafts, accepted, length = 0, Counter[int](), 1  # the first token has no draft
        while self.drafts and length < len(ids):
            right = next(self.pattern)
            drafts += 1
            accepted.update(range(right))
            length += 1 + right
        self.log.append((drafts, accepted))
        counts["drafts"] += drafts
        counts["accepted"] += accepted.total()
        counts.update({f"position {place}": count for place, count in accepted.items()})
        counts["tokens"] += len(ids)

    def show(self) -> None:
        lines = ["# HELP vllm:generation_tokens_total Number of generation tokens."]
        for engine, counts in enumerate(self.counts):
            label = f'engine="{engine}",model_name="a{{b}}, position=\\"9\\""'
            names = {"vllm:generation_tokens_total": "tokens"}
            if self.drafts:
                names["vllm:spec_decode_num_drafts_total"] = "drafts"
                names["vllm:spec_decode_num_accepted_tokens_total"] = "accepted"
                lines.append(f"vllm:spec_decode_num_drafts_created{{{label}}} 1.79e+09")
                lines += [
                    f"vllm:spec_decode_num_accepted_tokens_per_pos_total"
                    f'{{{label},position="{place}"}} {counts[f"position {place}"]:.1f}'
                    for place in range(DRAFTED)
                ]
            lines += [f"{name}{{{label}}} {counts[key]:.1f}" for name, key in names.items()]
        self.server.metrics = "\n".join(lines).encode()


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    """With drafts, and without."""
    pair = Engine(), Engine(drafts=False)
    yield pair
    for engine in pair:
        engine.server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny = llama(eos=(END,))
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def measured(run, folder, tmp_path, engines) -> Callable[..., Any]:
    """Type `bench --server`; gives its answer, and the figures of --json if any."""

    def typed(*words: object) -> tuple[Any, Json | None]:
        urls = ["--server", engines[0].server.url, "--server-plain", engines[1].server.url]
        out = tmp_path / "figures.json"
        answer = run("bench", *urls, "--target", folder, "--prompts", questions(tmp_path, 7),
                     "--max-new-tokens", 16, "--json", out, *words)  # fmt: skip
        return answer, json.loads(out.read_text()) if out.exists() else None

    return typed


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize("concurrency", [1, 3])
def test_acceptance_is_what_the_engine_counted_for_the_timed_requests(
    measured, engines, concurrency
):
    (code, out, errors), figures = measured("--repetitions", 2, "--concurrency", concurrency)
    assert (code, errors) == (0, [])
    timed = engines[0].log[-14:]
    assert len(engines[0].log) > 14, "others warmed up"
    drafts = sum(count for count, _ in timed)
    accepted = sum((positions for _, positions in timed), Counter())
    assert figures["drafts"] == drafts
    assert figures["acceptance_by_depth"] == [accepted[place] / drafts for place in range(DRAFTED)]
    assert figures["tokens_per_step"] == 1 + accepted.total() / drafts
    assert figures["foreign_tokens"] == 0, "drafts beyond an answer's end are its own"
    assert figures["different_texts"] == 0
    assert figures["tokens"] == sum(len(a) for a in sent(engines[0], 14))
    low, high = figures["speedup_ci95"]
    ratio = figures["tokens_per_second"] / figures["plain_tokens_per_second"]
    assert figures["speedup"] == pytest.approx(ratio) and low <= ratio <= high
    for text in (f"{figures['tokens_per_step']:.2f}", "draft token", "95 %", "yes"):
        assert text in out
    assert "token for token" in " ".join(out.split())


def sent(engine: Engine, last: int) -> list[list[int]]:
    """The answers to the last requests."""
    engine.change = lambda number, ids: ids
    answers = [engine.choice(request) for request in engine.server.asked[-last:]]
    return [answer["token_ids"] for answer in answers]


def test_requests_are_greedy_and_in_turns(measured, engines):
    measured("--repetitions", 1)
    for engine in engines:
        timed = engine.server.asked[-7:]
        assert {request["temperature"] for request in timed} == {0.0}
        assert len({str(request["prompt"]) for request in timed}) == 7
        assert all(request["max_tokens"] == 16 for request in timed)
    assert len(engines[0].server.asked) == len(engines[1].server.asked)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_requests_are_under_way(measured, engines, concurrency):
    for engine in engines:
        engine.pause = 0.05
    measured("--repetitions", 1, "--concurrency", concurrency)
    assert [engine.busiest for engine in engines] == [concurrency] * 2


def test_sampled_texts_are_not_compared(measured, engines):
    engines[0].change = lambda number, ids: [120, *ids[1:]]
    (code, out, _), figures = measured("--repetitions", 1, "--temperature", 0.8, "--top-p", 0.9)
    assert code == 0 and figures["different_texts"] is None
    assert {request["temperature"] for request in engines[0].server.asked} == {0.8}
    assert "n/a" in out and "temperature=0.8" in figures["settings"]["sampling"]


def test_a_text_that_differs_is_counted(measured, engines):
    """Prompt 2 at token 4, and prompt 5 by an answer that ends earlier, in one repetition."""
    seen: Counter[int] = Counter()

    def change(number: int, ids: list[int]) -> list[int]:
        if number < 1:  # warming up
            return ids
        prompt = (number - 1) % 7
        seen[prompt] += 1
        if prompt == 2:
            return [*ids[:4], 35, *ids[5:]]
        return ids[:3] if prompt == 5 and seen[5] == 2 else ids

    engines[0].change = change
    (code, out, _), figures = measured("--repetitions", 2)
    assert code == 0 and figures["different_texts"] == 2
    said = " ".join(out.split())
    assert "NO" in out and "THE TEXT DIFFERS" in said
    assert "differ in 2 prompts" in said and "half precision" in said


def test_the_target_is_what_the_servers_say_that_they_serve(run, folder, tmp_path, engines):
    urls = []
    for name, engine in zip(("--server", "--server-plain"), engines, strict=True):
        engine.server.models = [{"id": "tiny", "root": str(folder), "max_model_len": 256}]
        urls += [name, engine.server.url]
    answer = run("bench", *urls, "--prompts", questions(tmp_path, 2), "--repetitions", 1)
    assert answer[0] == 0


def test_prompts_fit_into_the_smaller_context(measured, engines):
    engines[1].server.models = [{"id": "tiny", "max_model_len": 30}]
    (code, _, errors), _ = measured("--repetitions", 1)
    assert (code, errors) == (0, [])
    asked = engines[0].server.asked
    assert {request["max_tokens"] + len(request["prompt"]) for request in asked} == {30}


# ---------------------------------------------------------------- figures that mislead


def test_other_peoples_requests_are_noticed(measured, engines):
    def change(number: int, ids: list[int]) -> list[int]:
        if number == 4:
            engines[0].counts[0]["tokens"] += 25
        return ids

    engines[0].change = change
    (code, out, _), figures = measured("--repetitions", 1)
    assert code == 0 and figures["foreign_tokens"] == 25
    assert "+25 tokens beside" in " ".join(out.split())


def test_an_engine_without_counters_is_said_in_a_line(measured, engines):
    for page in (b"", b"<html>hello</html>", b"llamacpp:tokens_predicted_total 5\n"):
        for engine in engines:
            engine.server.metrics, engine.show = page, lambda: None
        (code, out, _), figures = measured("--repetitions", 1)
        assert code == 0 and figures["tokens_per_step"] is None
        assert figures["speedup"] > 0 and figures["different_texts"] == 0
        assert "counts no drafts in /metrics" in " ".join(out.split())


def test_answers_of_text_alone_are_tokenized_here(measured, engines):
    for engine in engines:
        engine.ids = False
    _, figures = measured("--repetitions", 1)
    assert figures["different_texts"] == 0 and figures["foreign_tokens"] == 0


# ---------------------------------------------------------------- faults


def page_of(engine: Engine, pattern: str, to: str) -> None:
    """From the third request on, /metrics is written otherwise."""
    show = engine.show

    def changed() -> None:
        show()
        if len(engine.log) >= 3:
            text = engine.server.metrics.decode()
            engine.server.metrics = re.sub(pattern, to, text).encode()

    engine.show = changed  # type: ignore[method-assign]


DRAFTS = r"(?m)^(vllm:spec_decode_num_drafts_total\{.*\}) .*$"


@pytest.mark.parametrize(
    ("pattern", "to", "line"),
    [
        (DRAFTS, r"\1 -3", "that grow and agree"),
        (DRAFTS, r"\1 0.0", "expected counters in its /metrics that grow and agree"),
        (r"(?m)^vllm:generation_tokens_total.*$", "", "that grow and agree"),
        (r"(?s).*", "", "that grow and agree"),
        (r'(per_pos_total.*position="1"\}) .*', r"\1 9999", "that grow and agree"),
    ],
)
def test_counters_that_cannot_be_right(measured, engines, pattern, to, line):
    page_of(engines[0], pattern, to)
    answer, figures = measured("--repetitions", 1)
    failed(answer, engines[0].server.url, line)
    assert figures is None and answer[1] == "", "nothing is half-written"


def test_servers_that_are_swapped(measured, engines, run, folder, tmp_path):
    first, second = engines[0].server.url, engines[1].server.url
    words = ["--target", folder, "--prompts", questions(tmp_path), "--repetitions", 1]
    answer = run("bench", "--server", second, "--server-plain", first, *words)
    failed(answer, f"{first}/v1: expected a server without drafts", "swap --server")
    engines[1].drafts = True
    answer, _ = measured("--repetitions", 1)
    failed(answer, f"{second}/v1: expected a server without drafts", "swap --server")
    answer = run("bench", "--server", first, "--server-plain", f"{first}/v1/", *words)
    failed(answer, "--server-plain: expected another server than --server")


FAULTS: dict[str, tuple[Any, str]] = {
    "an error": (500, "HTTP 500: fault of N"),
    "busy": (429, "HTTP 429"),
    "a refusal": (400, "HTTP 400: fault of N"),
    "cut": (CUT, "peer closed connection"),
    "garbage": (b"<html>", "an unexpected response"),
    "aborted": (
        b'{"choices": [{"text": "a", "finish_reason": "abort"}]}',
        "an unexpected response (choices.0.finish",
    ),
    "empty": (
        b'{"choices": [{"token_ids": [], "finish_reason": "length"}]}',
        "answer without tokens",
    ),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_an_answer_that_fails_ends_the_bench_in_one_line(measured, engines, name, place):
    fault, line = FAULTS[name]
    server = engines[place].server
    server.fault = lambda number, request: fault if number == 5 else None
    answer, figures = measured("--concurrency", 2, "--repetitions", 2)
    failed(answer, f"{server.url}/v1: {line}", "check the server, then run the same command again")
    assert figures is None and answer[1] == ""
    assert len(server.asked) <= 6 + 1, "another try would be timed: there is none"


def test_a_server_that_is_gone(measured, engines):
    url = engines[1].server.url
    engines[0].change = lambda number, ids: (engines[1].server.close(), ids)[1]
    engines[1].server.fault = lambda number, request: CUT if number > 3 else None
    answer, figures = measured("--repetitions", 1)
    failed(answer, url)
    assert figures is None
    failed(measured("--repetitions", 1)[0], url, "start it, or check --server")


def test_servers_of_two_models(measured, engines):
    engines[1].server.models = [{"id": "other"}]
    answer, _ = measured()
    failed(answer, "expected one model at all servers, got tiny at ", "other at ")
    assert engines[0].server.asked == []
    engines[1].server.models = [{"id": "tiny"}, {"id": "other"}]
    failed(measured()[0], "expected one model, got tiny, other; set --server-model")
    assert measured("--server-model", "tiny", "--repetitions", 1)[0][0] == 0
    failed(measured("--server-model", "large")[0], "expected model 'large', got tiny")


def test_the_key_is_sent_and_never_shown(measured, engines, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    for engine in engines:
        engine.server.key = KEY
    (code, out, errors), figures = measured("--api-key-env", "THE_KEY", "--repetitions", 1)
    assert (code, errors) == (0, [])
    assert figures["tokens_per_step"] > 1, "/metrics was asked with the key, too"
    assert KEY not in out + json.dumps(figures)
    body = json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()
    engines[0].server.fault = lambda number, request: (401, {}, body)
    answer, _ = measured("--api-key-env", "THE_KEY")
    failed(answer, "HTTP 401: bad key ***")
    assert KEY not in str(answer)
    failed(measured()[0], "HTTP 401")
    failed(measured("--api-key-env", KEY)[0], "--api-key-env: expected the name of")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--head ngram", "--head: omit these with --server"),
        ("--tree 1,1 --nodes 4", "--nodes, --tree: omit these with --server, the server decodes"),
        ("--compile --dtype float32", "--compile, --dtype: omit"),
        ("--typical", "--typical: omit"),
        ("--bits 8 --device cpu --threads 1", "--bits, --device, --threads: omit"),
        ("--concurrency 0", "--concurrency: expected greater than or equal to 1"),
        ("--server ftp://x", "--server: expected http://HOST:PORT, got 'ftp://x'"),
    ],
)
def test_options_that_make_no_sense_with_a_server(measured, engines, words, line):
    failed(measured(*words.split())[0], line)
    assert engines[0].server.asked == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--head ngram", "expected --target and --head, or --server; pass them"),
        ("", "expected --target and --head, or --server; pass them"),
        ("--server-plain http://x:1", "--server-plain: expected --server, too, got none; pass it"),
        ("--server http://x:1", "--server: expected --server-plain, too, got none"),
        ("--concurrency 2 --api-key-env K", "--api-key-env, --concurrency: expected --server"),
    ],
)
def test_options_that_need_a_server(run, tmp_path, words, line):
    failed(run("bench", "--prompts", questions(tmp_path), *words.split()), line)


def test_a_name_with_brackets_and_commas_is_no_position():
    page = (
        'vllm:spec_decode_num_drafts_total{model_name="a} 7 \\"position=\\"5\\""} 4\n'
        "vllm:spec_decode_num_accepted_tokens_total 3 1700000000000\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1",engine="0"} 1\r\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 2\n'
        "vllm:generation_tokens_total 9e0\n"
    )
    engine = SimpleNamespace(url="x", metrics=lambda: page)
    expected = {"drafts": 4, "accepted": 3, "position 1": 1, "position 0": 2, "tokens": 9}
    assert counts_of(engine) == expected and by_position(expected) == [2, 1]
