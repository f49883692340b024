"""The promise: a server's answers are learned as those of a target in this process, whatever goes
wrong.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from local_server import CUT, DRIP, HANG, Fault, Json, LocalServer
from tiny_chat import CONTEXT, END, files, llama, options, prompts, records, saved
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from draftheads.heads.terminal import printable
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import PromptRenderer
from draftheads.infer.remote import ServerError, ServerOptions, without_secret
from draftheads.scripts import cli
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.data.conversation import LOSSY, TOO_LONG, Conversation
from draftheads.train.data.distill import distill
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.server import ServedTarget
from draftheads.train.data.text_side import TextSide

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def many_ends(tmp_path_factory):
    """A target that ends by itself, and its folder."""
    target = llama()
    return target, saved(target, tmp_path_factory.mktemp("many-ends"))


@pytest.fixture
def folder(one_end):
    return one_end


def served(folder: Path, *servers: LocalServer, **changes: Any) -> ServedTarget:
    urls = [server.url for server in servers]
    return ServedTarget(str(folder), ServerOptions(urls=urls, pause=0.01, **changes))


# ---------------------------------------------------------------- what is learned


def test_answers_equal_those_of_the_target_in_this_process(many_ends, start, tmp_path):
    target, folder = many_ends
    turn = threading.Lock()

    def choice(request: Json) -> Json:
        limit = request["max_tokens"]
        with turn:
            steps = Speculator(target).generate(request["prompt"], max_new_tokens=limit)
            ids = [token for step in steps for token in step.tokens]
        ended = ids[-1] in target.eos_ids
        return {"text": "", "token_ids": ids, "finish_reason": "stop" if ended else "length"}

    asked = [*prompts(13, turns=2), Prompt(13, text="x" * 250), Prompt(14, text="x" * CONTEXT)]
    chosen = {"temperature": 0, "batch_size": 4}
    distill(target, asked, options(tmp_path / "local", **chosen))
    report = distill(served(folder, start(choice)), asked, options(tmp_path / "o", **chosen))
    assert records(tmp_path / "o") == records(tmp_path / "local")
    assert {record.get("finish") for record in records(tmp_path / "o")} == {"eos", "length", None}
    assert report.counts.reasons == {f"skipped: {TOO_LONG}": 1} and report.complete


def test_text_alone_gives_the_same_answers_and_is_counted(folder, start, tmp_path):
    by_ids = start()
    by_text = start(lambda request: by_ids.choice(request) | {"token_ids": None})
    for name, server in (("ids", by_ids), ("text", by_text)):
        target = served(folder, server)
        report = distill(target, prompts(9, 2), options(tmp_path / name, max_new_tokens=30))
        assert report.counts.retokenized == (report.counts.turns if name == "text" else 0)
    assert read_manifest(tmp_path / "text").counts.retokenized == report.counts.turns == 15
    assert "15 answers came as text and were tokenized here" in str(report)
    stored = [r | {"retokenized": None} for r in records(tmp_path / "text")]
    assert stored == [r | {"retokenized": None} for r in records(tmp_path / "ids")]
    assert all(record["tokens"][-1] == END for record in stored)


def test_text_that_does_not_come_back_is_skipped_and_counted(folder, start, tmp_path):
    def choice(request: Json) -> Json:  # cut in the middle of a character
        return {
            "text": "caf\ufffd" if len(request["prompt"]) % 2 else "tea",
            "finish_reason": "length",
        }

    asked = [Prompt(index, text="x" * (index + 1)) for index in range(6)]
    report = distill(served(folder, start(choice)), asked, options(tmp_path / "o"))
    assert report.counts.reasons == {f"skipped: {LOSSY}": 3}
    assert (report.counts.done, report.counts.skipped, report.counts.retokenized) == (3, 3, 3)
    assert [record["finish"] for record in records(tmp_path / "o")[1::2]] == ["length"] * 3


def test_text_is_tokenised_as_inside_a_text():
    """With a tokenizer that, like Llama 2's, puts a blank before every text."""
    alphabet = ["</s>", "\u2581", *"\nabc", "\u2581a"]
    model = models.BPE({piece: place for place, piece in enumerate(alphabet)}, [("\u2581", "a")])
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    renderer = PromptRenderer(TextSide("blank", wrapped, (0,)), {})
    conversation = Conversation(Prompt(0, text="c"), renderer, CONTEXT)
    conversation.tokens = wrapped("c", add_special_tokens=False)["input_ids"]
    for text, pieces in ((" a", ["\u2581a"]), ("ab", ["a", "b"]), ("", [])):
        assert conversation.retokenize(text) == wrapped.convert_tokens_to_ids(pieces)


def test_end_token_left_out_by_the_server_is_learned(many_ends, start, tmp_path):
    _, folder = many_ends
    for told, last in (({}, END), ({"stop_reason": 18}, 18), ({"matched_stop": 27}, 27)):
        choice = {"text": "", "token_ids": [1, 2], "finish_reason": "stop", **told}
        server = start(lambda request, choice=choice: choice)
        out = tmp_path / str(last)
        distill(served(folder, server), prompts(1), options(out))
        [record] = records(out)
        [(begin, _)] = record["learn"]
        assert record["tokens"][begin:] == [1, 2, last] and record["finish"] == "eos"


@pytest.mark.mend("a server whose pages claim charset=utf-16")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("speculates", [False, True])
def test_a_vllm_that_speculates_is_named_where_it_samples(
    folder, start, tmp_path, caplog, temperature, speculates
):
    server = start()
    server.metrics = b"vllm:num_requests_running 0\n"
    if speculates:
        server.metrics += b'vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n'
    chosen = options(tmp_path / "o", temperature=temperature)
    assert distill(served(folder, server), prompts(2), chosen).complete
    warned = f"{server.url}/v1 speculates: where vLLM 0.32 runs on a CPU" in caplog.text
    assert warned == (speculates and temperature > 0)


def test_sampling_is_sent_and_recorded_and_seeds_differ(folder, start, tmp_path):
    server = start()
    chosen = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 20}
    for out in ("a", "b"):
        distill(served(folder, server), prompts(6, 2), options(tmp_path / out, **chosen))
    first = server.asked[0]
    assert (first["temperature"], first["top_p"], first["max_tokens"]) == (0.7, 0.9, 20)
    assert (first["top_k"], first["repetition_penalty"], first["min_p"]) == (-1, 1.0, 0.0)
    assert first["model"] == "tiny" and first["stop_token_ids"] == [END]
    seeds = [request["seed"] for request in server.asked]
    assert sorted(seeds[:10]) == sorted(seeds[10:]) and len(set(seeds)) == 10
    manifest = read_manifest(tmp_path / "a")
    assert manifest.sampling.top_p == 0.9 and manifest.target.fingerprint is None
    where = {"urls": [server.url + "/v1"], "model": "tiny", "context": CONTEXT}
    assert manifest.as_written()["target"]["server"] == where


def test_servers_shorter_context_is_kept(folder, start, tmp_path):
    server = start(models=({"id": "tiny", "max_model_len": 30},))
    asked = [Prompt(0, text="x" * 20), Prompt(1, text="x" * 30)]
    report = distill(served(folder, server), asked, options(tmp_path / "o"))
    assert [request["max_tokens"] for request in server.asked] == [10]
    assert (report.counts.done, report.counts.skipped) == (1, 1)


def test_other_models_tokens_end_the_run(folder, start, tmp_path):
    server = start(lambda request: {"token_ids": [10**30, 1], "finish_reason": "length"})
    with pytest.raises(ServerError, match="expected token ids below 259.*is it the same model"):
        distill(served(folder, server), prompts(2), options(tmp_path / "o"))
    assert records(tmp_path / "o") == []


def test_requests_are_bounded_and_go_over_the_borders_of_batches(folder, start, tmp_path):
    width, lock = 6, threading.Lock()
    together = threading.Barrier(width, timeout=30)
    active: list[int] = [0, 0]

    def choice(request: Json) -> Json:
        with lock:
            active[0] += 1
            active[1] = max(active)
        together.wait()
        time.sleep(0.05)  # for one that should not be here
        with lock:
            active[0] -= 1
        return {"text": "", "token_ids": [1], "finish_reason": "length"}

    target = served(folder, start(choice), concurrency=width)
    for out in ("a", "b"):  # one after the other, with the same target
        report = distill(target, prompts(12), options(tmp_path / out, batch_size=4))
        assert (report.counts.done, active) == (12, [0, width])


# ---------------------------------------------------------------- what goes wrong


def test_passing_faults_change_nothing(folder, start, tmp_path):
    healthy, failing = start(), start()
    kinds = (500, 429, HANG, CUT, DRIP, 503)
    faults = {number: kinds[number // 20 % 6] for number in range(7, 200, 20)}
    failing.fault = lambda number, request: faults.get(number)
    distill(served(folder, healthy), prompts(100, 2), options(tmp_path / "whole"))
    report = distill(served(folder, failing, timeout=0.5), prompts(100, 2), options(tmp_path / "o"))
    assert (report.counts.done, report.counts.failed, report.complete) == (100, 0, True)
    assert records(tmp_path / "o") == records(tmp_path / "whole")
    assert len(failing.asked) >= len(healthy.asked) + 8  # each fault was asked again


def test_faults_are_the_prompts_or_the_servers(folder, start, tmp_path):
    """The prompts' are counted, the server's asked again: at once, and by the next launch."""
    healthy, server = start(), start()
    asked = [Prompt(index, text="x" * (index + 1)) for index in range(20)]
    distill(served(folder, healthy), asked, options(tmp_path / "whole"))
    statuses = (400, 413, 422, 500, 503, 408, 425, 429, CUT, b"<html>busy</html>")
    broken: dict[int, Fault] = dict(enumerate(statuses, start=7))
    server.fault = lambda number, request: broken.get(len(request["prompt"]))
    report = distill(served(folder, server, tries=3), asked, options(tmp_path / "o"))
    assert (report.counts.done, report.counts.failed, report.missing) == (10, 3, 7)
    assert not report.complete and not read_manifest(tmp_path / "o").complete
    assert "+ 7 not answered yet" in str(report)
    assert "the server failed on 7 prompts; run the same command again" in str(report)
    sizes = [len(request["prompt"]) for request in server.asked]
    assert [sizes.count(size) for size in (6, *broken)] == [1, *[1] * 3, *[3] * 7]
    failed = [record for record in records(tmp_path / "o") if "failed" in record]
    assert [record["id"] for record in failed] == [6, 7, 8]
    assert failed[0]["failed"] == "HTTP 400: fault of N"
    server.fault = lambda number, request: None
    report = distill(served(folder, server), asked, options(tmp_path / "o"))
    assert (report.counts.done, report.missing, report.complete) == (17, 0, True)
    assert sorted(len(request["prompt"]) for request in server.asked[len(sizes) :]) == [
        *range(10, 17)
    ]
    answers, whole = list(read_answers(tmp_path / "o")), list(read_answers(tmp_path / "whole"))
    assert answers == [*whole[:6], *whole[9:]]


@pytest.mark.parametrize("status", [401, 402, 403, 404, 307])
def test_what_all_prompts_would_meet_ends_the_run_at_once(folder, start, tmp_path, status):
    server = start()
    server.fault = lambda number, request: status if number >= 4 else None
    with pytest.raises(ServerError, match=rf"HTTP {status}: fault.* run the same command again"):
        distill(served(folder, server, concurrency=1), prompts(40), options(tmp_path / "o"))
    assert len(server.asked) < 8
    assert len(records(tmp_path / "o")) == 4  # what was answered before is kept


JUNK = {
    "nothing": {},
    "null": None,
    "no text": {"text": None, "finish_reason": "stop"},
    "text missing": {"finish_reason": "stop"},
    "text is a list": {"text": [[]], "finish_reason": "stop"},
    "text of half a character": {"text": "\ud83d", "finish_reason": "stop"},
    "negative": {"token_ids": [1, -1], "finish_reason": "length"},
    "fraction": {"token_ids": [1, 1.5], "finish_reason": "length"},
    "whole fraction": {"token_ids": [1, 1.0], "finish_reason": "length"},
    "boolean": {"token_ids": [1, True], "finish_reason": "length"},
    "text for ids": {"token_ids": ["1"], "finish_reason": "length"},
    "nested ids": {"token_ids": [[1]], "finish_reason": "length"},
    "ids are no list": {"token_ids": {"a": 1}, "finish_reason": "length"},
    "no tokens": {"text": "", "token_ids": [], "finish_reason": "length"},
    "too many": {"token_ids": [1] * 13, "finish_reason": "length"},
    "given up": {"text": "a", "token_ids": [1], "finish_reason": "abort"},
    "no reason": {"text": "a", "token_ids": [1]},
    **{
        f"{status} with {body[:20]!r}": (status, {}, body)
        for body in (b"", b"null", b"[]", b'{"choices": []}', b'{"choices": {}}', b"[" * 200_000)
        for status in (200, 500)
    },
    "no Unicode": (200, {}, b"\xff"),
}


@pytest.mark.parametrize("kind", JUNK)
def test_junk_is_not_learned_and_asked_again(folder, start, tmp_path, kind):
    whole = {"text": "", "token_ids": [1, 2], "finish_reason": "length"}
    server, junk = start(lambda request: whole), JUNK[kind]

    def fault(number, request):
        if len(request["prompt"]) != 3:
            return None
        return junk if isinstance(junk, tuple) else json.dumps({"choices": [junk]}).encode()

    server.fault = fault
    asked = [Prompt(index, text="x" * (index + 1)) for index in range(5)]
    report = distill(served(folder, server, tries=2), asked, options(tmp_path / "o"))
    assert (report.counts.done, report.counts.failed, report.missing) == (4, 0, 1)
    assert [record["id"] for record in records(tmp_path / "o")] == [0, 1, 3, 4]


@pytest.mark.mend("a server that answers nothing")
@pytest.mark.parametrize("count", [3, 40])
def test_empty_answers_alone_end_the_run_after_a_few(folder, start, tmp_path, count):
    """They used to fill a folder with end tokens, with exit code 0."""
    nothing = {"text": "", "finish_reason": "stop"}
    server = start(lambda request: nothing)
    complaint = r"expected answers with text, got empty ones alone; .* run the same command again"
    target = served(folder, server, concurrency=1)
    with pytest.raises(OSError, match=complaint):
        distill(target, prompts(count), options(tmp_path / "o"))
    assert records(tmp_path / "o") == [] and len(server.asked) < 12
    server.choice = start().choice
    assert distill(served(folder, server), prompts(count), options(tmp_path / "o")).complete


def test_an_empty_answer_among_others_is_learned(folder, start, tmp_path):
    whole = {"text": "", "token_ids": [70, 71, END], "finish_reason": "stop"}
    nothing = {"text": "", "token_ids": [END], "finish_reason": "stop"}
    server = start(lambda request: whole if len(request["prompt"]) % 3 == 0 else nothing)
    asked = [Prompt(index, text="x" * (index + 1)) for index in range(30)]
    target = served(folder, server, concurrency=1)
    assert distill(target, asked, options(tmp_path / "o")).counts.done == 30


@pytest.mark.mend("a server that answers with another model")
@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        (None, True),
        ("tiny", True),
        ("alias", True),
        ("models/Tiny.gguf", True),
        ("tiny:latest", True),
        ("tiny-2026-01-31", True),
        ("", True),
        ("other", False),
        ("listed", False),
        ("tiny-large", False),
        ("\x1b[31mtiny", False),
    ],
)
def test_a_completion_of_another_model_is_refused(folder, start, tmp_path, name, is_same):
    """Other names of the same weights are not: vLLM answers with the first of its names."""
    models = (
        {"id": "tiny", "root": "/weights"},
        {"id": "alias", "root": "/weights"},
        {"id": "listed", "root": "/others"},
    )
    server = start(models=models)
    choice = {"text": "", "token_ids": [70], "finish_reason": "length"}
    body = json.dumps({"model": name, "choices": [choice]}).encode()
    server.fault = lambda number, request: body
    target = served(folder, server, model="tiny")
    if is_same:
        assert distill(target, prompts(2), options(tmp_path / "o")).complete
        return
    with pytest.raises(ServerError, match="expected completions of model 'tiny', got") as error:
        distill(target, prompts(2), options(tmp_path / "o"))
    assert f"got some of {str(name).lstrip(chr(27))!r};" in str(error.value)
    assert records(tmp_path / "o") == []


def test_text_longer_than_asked_for_is_not_learned(folder, start, tmp_path):
    """From a server that does not know max_tokens: it would leave the context."""
    server = start(lambda request: {"text": "a" * 300, "finish_reason": "length"})
    report = distill(served(folder, server), prompts(2), options(tmp_path / "o"))
    assert report.counts.reasons == {f"skipped: {LOSSY}": 2}


# ---------------------------------------------------------------- several servers


def test_several_servers_give_the_answers_of_one_each_at_its_own_pace(folder, start, tmp_path):
    """The slow one holds its places until all else is done."""
    healthy, *fast, slow = start(), start(), start(), start()
    rest = threading.Event()

    def waits(request: Json) -> Json:
        rest.wait(10)
        return healthy.choice(request)

    def counts(request: Json) -> Json:
        if sum(len(server.asked) for server in fast) == 38:
            rest.set()
        return healthy.choice(request)

    slow.choice, fast[0].choice, fast[1].choice = waits, counts, counts
    distill(served(folder, healthy), prompts(40), options(tmp_path / "whole"))
    target = served(folder, slow, *fast, concurrency=2)
    assert distill(target, prompts(40), options(tmp_path / "o")).complete
    assert records(tmp_path / "o") == records(tmp_path / "whole")
    assert rest.is_set() and len(slow.asked) == 2
    assert all(len(server.asked) > 8 for server in fast)


@pytest.mark.parametrize(("concurrency", "count"), [(2, 12), (4, 6)])
def test_all_servers_are_asked_at_a_time_by_the_places_of_each(
    folder, start, tmp_path, concurrency, count
):
    together = threading.Barrier(6, timeout=10)

    def choice(request: Json) -> Json:
        together.wait()
        return {"text": "", "token_ids": [1], "finish_reason": "length"}

    servers = [start(choice) for _ in range(3)]
    target = served(folder, *servers, concurrency=concurrency)
    assert distill(target, prompts(count), options(tmp_path / "o")).counts.done == count
    assert [len(server.asked) for server in servers] == [count // 3] * 3


def closed(server: LocalServer) -> None:
    """Nothing listens there any more, and what was under way is cut."""
    server.fault = lambda number, request: CUT
    threading.Thread(target=server.close).start()


def failing(server: LocalServer) -> None:
    server.fault = lambda number, request: 500


def denying(server: LocalServer) -> None:
    server.fault = lambda number, request: 401


@pytest.mark.parametrize(
    ("ends", "said"), [(closed, "attempts failed"), (failing, "HTTP 500"), (denying, "HTTP 401")]
)
def test_a_server_that_dies_is_dropped_and_the_others_answer_all(
    folder, start, tmp_path, caplog, ends, said
):
    """In the middle of second turns, too, and with requests that hang there."""
    healthy, first, second, dies = start(), start(), start(), start()

    def fault(number: int, request: Json) -> Fault | None:
        if number == 25:
            ends(dies)
        return HANG if number in (20, 21) else None

    dies.fault = fault
    distill(served(folder, healthy), prompts(120, 2), options(tmp_path / "whole"))
    target = served(folder, first, dies, second, concurrency=12, tries=2)
    report = distill(target, prompts(120, 2), options(tmp_path / "o"))
    assert report.complete and report.missing == 0
    assert records(tmp_path / "o") == records(tmp_path / "whole")
    dropped = [line for line in caplog.messages if "dropped until the next launch, 2 other" in line]
    assert len(dropped) == 1 and dies.url in dropped[0] and said in dropped[0]


def test_only_when_all_servers_are_down_the_run_ends(folder, start, tmp_path):
    healthy, *servers = start(), start(), start()
    distill(served(folder, healthy), prompts(40), options(tmp_path / "whole"))
    for server, lives in zip(servers, (4, 9), strict=True):
        server.fault = lambda number, request, lives=lives: 401 if number >= lives else None
    target = served(folder, *servers, concurrency=1)
    with pytest.raises(ServerError, match=r"HTTP 401.*run the same command again to resume"):
        distill(target, prompts(40), options(tmp_path / "o"))
    assert len(records(tmp_path / "o")) == 13
    for server in servers:
        server.fault = lambda number, request: None
    distill(served(folder, *servers), prompts(40), options(tmp_path / "o"))
    assert records(tmp_path / "o") == records(tmp_path / "whole")


def test_what_one_server_refuses_another_may_answer(folder, start, tmp_path):
    """A prompt has failed when all of them refuse it."""
    able, refuses = start(), start()
    refuses.fault = lambda number, request: 400
    able.fault = lambda number, request: 422 if len(request["prompt"]) == 3 else None
    asked = [Prompt(index, text="x" * (index + 1)) for index in range(20)]
    report = distill(served(folder, able, refuses), asked, options(tmp_path / "o"))
    assert (report.counts.done, report.counts.failed, report.missing) == (19, 1, 0)


def test_servers_of_several_models_are_refused_and_the_shortest_context_holds(
    folder, start, tmp_path
):
    def listed(*models: tuple[str, int]) -> LocalServer:
        return start(models=tuple({"id": name, "max_model_len": size} for name, size in models))

    tiny, short, other = listed(("tiny", 100)), listed(("tiny", 40)), listed(("huge", 100))
    both = listed(("tiny", 90), ("huge", 90))
    with pytest.raises(ValueError) as raised:
        served(folder, tiny, other)
    assert f"one model at all servers, got tiny at {tiny.url}/v1, huge at {other.url}/v1" in str(
        raised.value
    )
    with pytest.raises(ValueError, match="expected model 'tiny', got huge"):
        served(folder, tiny, other, model="tiny")
    assert served(folder, tiny, short, both, model="tiny").context == 40


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def typed(folder, tmp_path, monkeypatch, capsys):
    """Type `draftheads distill` for three prompts; gives exit code and error line."""
    impatient = functools.partial(ServerOptions, pause=0.01)
    monkeypatch.setattr("draftheads.infer.remote.ServerOptions", impatient)
    asked = tmp_path / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(3)))
    where = ["--target", folder, "--prompts", asked, "--out", tmp_path / "o"]

    def run(*words: object) -> tuple[int, str]:
        argv = ["draftheads", "distill", *map(str, where), *map(str, words)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        errors = capsys.readouterr().err
        lines = [line for line in errors.splitlines() if line.startswith("error:")]
        return int(stopped.value.code or 0), "\n".join(lines)

    return run


def test_mistakes_are_named(typed, start, tmp_path):
    two, down = start(models=({"id": "one"}, {"id": "two"})), start()
    down.close()
    for words, complaint in (
        (("--server", two.url), "expected one model, got one, two; set --server-model"),
        (("--server", two.url, "--server-model", "x"), "expected model 'x', got one, two"),
        (
            ("--server", two.url + "/api"),
            "a list of models, got HTTP 404: Not Found; start it, or check its address",
        ),
        (("--server", down.url), "refused; start it, or check its address"),
        (("--server", "localhost:8000"), "expected http://HOST:PORT, got 'localhost:8000'"),
        (("--server", "http://me:secret@host"), "expected no password in the address"),
        (("--server", "me:secret@host:80"), "expected no password in the address"),
        (("--server", "http://me:sec/ret@host"), "expected no password in the address"),
        (("--server", "http://host:port"), "expected http://HOST:PORT, got 'http://host:port'"),
        (("--server", "http://[::1"), "expected http://HOST:PORT, got"),
        (("--server", start().url, "--server", "host"), "expected http://HOST:PORT, got 'host'"),
        (("--server-model", "x"), "--server-model: expected --server, too, got none"),
    ):
        code, error = typed(*words)
        assert code == 2 and complaint in error and "secret" not in error
    assert not (tmp_path / "o").exists()


def test_key_is_sent_and_never_written(typed, start, tmp_path, monkeypatch):
    server = start()
    server.key = "sk-very-secret"
    assert (
        "got HTTP 401: Unauthorized; start it, or check its address and --api-key-env"
        in typed("--server", server.url)[1]
    )
    complaint = typed("--server", server.url, "--api-key-env", "MY_KEY")[1]
    assert "expected the name of an environment variable with a key" in complaint
    monkeypatch.setenv("MY_KEY", server.key)
    assert typed("--server", server.url + "/v1/", "--api-key-env", "MY_KEY") == (0, "")
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-very-secret"}
    assert len(records(tmp_path / "o")) == 3
    assert not [name for name, text in files(tmp_path / "o").items() if b"secret" in text]


@pytest.mark.parametrize("status", [200, 400, 401, 422, 500])
def test_key_that_the_server_echoes_is_hidden(
    folder, typed, start, tmp_path, monkeypatch, capsys, caplog, status
):
    key = "sk-very/secret-0123456789"
    monkeypatch.setenv("MY_KEY", key)
    server = start()
    said = {"error": {"message": "x" * 170 + f" key {key}, Bearer {key}"}}
    body = json.dumps(said).replace("/", "\\/").encode()  # as PHP writes it
    server.fault = lambda number, request: (status, {}, body)
    with caplog.at_level(logging.DEBUG):
        code, error = typed("--server", server.url, "--api-key-env", "MY_KEY")
    assert code and error.count("error:") == (status != 200 and status != 500)
    server.fault = lambda number, request: (400, {}, body) if number % 3 == 1 else None
    typed("--server", server.url, "--api-key-env", "MY_KEY")
    stored = "".join(text.decode(errors="replace") for text in files(tmp_path / "o").values())
    assert "HTTP 400" in stored and "***" in stored
    for words in (error, stored, caplog.text, *capsys.readouterr()):
        assert "secret" not in words and "sk-" not in words
    with pytest.raises(ServerError) as raised:
        server.fault = lambda number, request: (401, {}, body)
        options_ = ServerOptions(urls=[server.url], api_key_env="MY_KEY")
        distill(ServedTarget(str(folder), options_), prompts(1), options(tmp_path / "p"))
    assert key not in "".join(traceback.format_exception(raised.value))


SECRET = "sk-proj-Very+long/Secret-0123456789"


@pytest.mark.mend("an echoed key")
@pytest.mark.parametrize(
    "echo",
    [
        SECRET,
        SECRET.upper(),
        SECRET[:14] + "...",
        f"...{SECRET[-9:]}",
        SECRET[5:20],
        f"{SECRET[:9]}\x00\x1b{SECRET[9:]}",
    ],
)
def test_no_part_of_a_key_that_a_server_quotes_is_shown(echo):
    shown = without_secret(printable(f"wrong key <{echo}> for llama-3"), SECRET)
    assert shown == "wrong key *** for llama-3"


@pytest.mark.parametrize(("key", "size"), [("", 9), ("ab", 2), ("EMPTY", 4), ("hunter2hunter", 6)])
def test_short_keys_hide_themselves_and_no_key_hides_nothing(key, size):
    assert without_secret(f"say {key[:size]}.", key) == ("say ***" if key else "say .")
    assert without_secret("no such model", key) == "no such model"


@pytest.mark.mend("escape sequences of servers")
def test_what_a_server_says_reaches_neither_terminal_nor_files_with_its_escapes(
    typed, start, tmp_path, capsys, caplog
):
    server = start()
    evil = "\x1b]52;c;cm0=\x07\u202egpj.exe\x9b2J\ud800"
    body = json.dumps({"error": {"message": f"no {evil}"}}).encode()
    server.fault = lambda number, request: (400, {}, body)
    code, error = typed("--server", server.url)
    assert code and "HTTP 400: no ]N;c;cmN=gpj.exeNJ" in error + caplog.text
    stored = [text.decode() for text in files(tmp_path / "o").values()]
    for words in (error, caplog.text, *capsys.readouterr(), *stored):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"}.intersection(words)
        assert "\\u001b" not in words and "\\u202e" not in words, "nor in JSON"


@pytest.mark.parametrize(
    "key", ["sk-very\nsecret", "sk-very secret", "sk-very\x07secret", "sk-s\xe9cret"]
)
def test_key_that_no_header_can_hold_is_one_line_without_it(typed, start, monkeypatch, key):
    server = start()
    monkeypatch.setenv("MY_KEY", key)
    code, error = typed("--server", server.url, "--api-key-env", "MY_KEY")
    assert code == 2 and "a key of printable ASCII characters, found none" in error
    assert "cret" not in error and not server.asked
    monkeypatch.setenv("MY_KEY", "sk-very-secret\r\n")  # as `$(cat file)` of a Windows file
    assert typed("--server", server.url, "--api-key-env", "MY_KEY") == (0, "")
    code, error = typed("--server", server.url, "--api-key-env", "sk-very-secret")
    assert code == 2 and "expected the name of an environment variable with" in error
    assert "secret" not in error


def test_exit_code_says_whether_all_was_answered(typed, start, capsys):
    server = start()
    server.fault = lambda number, request: (
        CUT if request["prompt"] == server.asked[0]["prompt"] else None
    )
    assert typed("--server", server.url) == (1, "")
    server.fault = lambda number, request: None
    assert typed("--server", server.url) == (0, "")
    assert typed("--server", server.url) == (0, "")


@pytest.mark.parametrize(
    "models",
    [b"", b"[]", b'{"data": 5}', b'{"data": [5]}', b'{"data": {"a": 1}}', b'{"data": [{}]}'],
)
def test_model_list_that_is_none_is_one_line(typed, start, models):
    server = start()
    server.listed = models
    code, error = typed("--server", server.url)
    assert code == 2 and "a list of models, got an unexpected response (" in error
