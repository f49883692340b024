"""The promise: a background works when nothing is asked, and no request notices: none waits for
more than a piece, sees two heads, gets another answer, or fails with it.
"""

from __future__ import annotations

import io
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from asked import Asked
from rich.console import Console
from served import Pieces, Scripted, fails, same
from starlette.testclient import TestClient
from tiny_chat import END, llama
from tiny_heads import random_head, written_by
from tiny_targets import generated, greedy, some_prompts, tiny_target

from draftheads.heads.kinds import HEADS
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.infer.background import Point
from draftheads.infer.chat import idle
from draftheads.infer.chat.repl import ChatOptions, chat
from draftheads.infer.drafters.merged import Merged
from draftheads.infer.drafters.ngram import NGram, NGramIndex
from draftheads.infer.drafters.parts import head_of, replace_head, with_memory
from draftheads.infer.engine import Speculator
from draftheads.infer.serve import scheduler as scheduling
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.service import ServeOptions

NEW = 12
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def no_quiet(monkeypatch):
    for module in (scheduling, idle):
        monkeypatch.setattr(module, "QUIET", 0.01)


SOURCES: dict[str, Callable[[Any], Any]] = {
    "head": lambda head: head,
    "merged": lambda head: Merged([head, NGram(longest=4, shortest=1)]),
}


def answers(
    target: Target, scheduler: Any, texts: list[list[int]], during: Pieces | None = None
) -> list[Asked]:
    """Ask, and compare each answer with the target's own. during: ask in its next piece."""
    asked = [Asked(text) for text in texts]
    if during is not None:
        during.wait()
    scheduler.submit(*(each.job for each in asked))
    if during is not None:
        during.allow()
    for each in asked:
        assert each.answer() == greedy(target, each.job.prompt, NEW)
    return asked


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
@pytest.mark.parametrize("source", SOURCES)
def test_another_head_is_used_from_the_next_request_on(schedulers, kind, source):
    """Answers stay the target's, before, during and after, also of continued conversations."""
    target = tiny_target()
    old, new = random_head(kind, target), random_head(kind, target, nodes=9)
    background = Pieces(same, lambda engine: engine.with_drafts(replace_head(engine.drafts, new)))
    scheduler = schedulers(Speculator(target, SOURCES[source](old)), slots=2, background=background)
    uses, drafter = [], new.drafter
    new.drafter = lambda *more: uses.append(more) or drafter(*more)
    texts = some_prompts(20, 9, 31)
    answers(target, scheduler, texts, background)
    assert not uses
    texts = [[*text, *greedy(target, text, NEW), 5] for text in texts]
    waiting = answers(target, scheduler, texts, background)
    assert uses and head_of(scheduler.speculator.drafts) is new
    assert [each.job.reused for each in waiting[:2]] == [0, 0], "caches of the old head"
    text = waiting[2].job.prompt
    [again] = answers(target, scheduler, [[*text, *greedy(target, text, NEW), 7]])
    assert again.job.reused > len(text) // 2
    assert background.number == 2


def test_a_request_waits_for_one_piece_and_none_is_done_beside_it(schedulers):
    order: list[str] = []
    active: list[int] = []

    def note(engine: Speculator) -> Speculator:
        order.append("work")
        active.append(len(scheduler.active))
        return engine

    target = tiny_target()
    background = Pieces(*[note] * 3)
    scheduler = schedulers(Speculator(target), background=background)
    background.wait()
    [prompt] = some_prompts(6)
    asked = Asked(prompt)
    deliver = asked.job.deliver
    asked.job.deliver = lambda event: (order.append("step"), deliver(event))
    scheduler.submit(asked.job)
    background.allow()
    assert asked.answer() == greedy(target, prompt, NEW)
    assert order == ["work"] + ["step"] * NEW
    for _ in range(2):  # they go on afterwards
        background.wait()
        background.allow()
    answers(target, scheduler, [prompt])
    assert active == [0, 0, 0]


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_can_be_trained_where_requests_are_decoded(schedulers, kind):
    """With gradients, although requests are decoded without."""
    target = tiny_target("qwen2")
    head = random_head(kind, target)
    losses: list[float] = []

    def train(engine: Speculator) -> Speculator:
        batch = written_by(target, some_prompts(8, 8), 12)
        with torch.no_grad():
            features_BTD = target.features(batch, head.training_layers)
        loss = head(batch, features_BTD, target).loss
        loss.backward()
        losses.append(loss.item())
        assert any(parameter.grad is not None for parameter in head.parameters())
        return engine

    background = Pieces(same, train, train, same)
    scheduler = schedulers(Speculator(target, head), background=background)
    answers(target, scheduler, some_prompts(5, 9), background)
    for _ in range(2):
        background.wait()
        background.allow()
    answers(target, scheduler, some_prompts(9, 5), background)
    assert len(losses) == 2


@pytest.mark.parametrize("place", ["work", "answered"])
def test_a_background_that_fails_ends_alone(schedulers, caplog, place):
    target = tiny_target()
    background = Pieces(fails, same) if place == "work" else Pieces()
    if place == "answered":
        background.answered = lambda prompt, answer: fails(None)
    scheduler = schedulers(Speculator(target), background=background)
    during = background if place == "work" else None
    for prompt in some_prompts(4, 5):
        answers(target, scheduler, [prompt], during)
        during = None
    assert scheduler.background is None and background.number == (place == "work")
    assert caplog.text.count("learning has failed") == 1 and "the disk is full" in caplog.text


@pytest.mark.parametrize("outcome", [(None, 0.0), math.inf, 7])
def test_a_background_that_returns_nonsense_harms_nobody(schedulers, outcome):
    target = tiny_target()
    background = Pieces()
    calls: list[Speculator] = []

    def work(engine: Speculator) -> Any:
        calls.append(engine)
        return (engine, outcome) if outcome == math.inf else outcome

    background.work = work
    engine = Speculator(target)
    scheduler = schedulers(engine, background=background)
    while not calls:
        time.sleep(0.001)
    for prompt in some_prompts(4, 5):
        answers(target, scheduler, [prompt])
    assert scheduler.speculator is engine


def test_closing_waits_for_the_piece_and_begins_none(schedulers):
    background = Pieces(same, same)
    scheduler = schedulers(Speculator(tiny_target()), background=background)
    background.wait()
    scheduler.close()
    scheduler.join(0.05)
    assert scheduler._thread.is_alive()
    background.allow()
    scheduler.join(20)
    assert not scheduler._thread.is_alive() and background.number == 1


def test_answers_that_were_cancelled_or_failed_are_not_given(schedulers):
    gone, failed, whole = (Asked(prompt) for prompt in some_prompts(4, 5, 6))

    class Broken(Scripted):
        def generate(self, prompt: list[int], **options: Any) -> Any:
            size = len(prompt)
            steps = Speculator(self.target).generate(list(prompt), max_new_tokens=NEW)
            for number, step in enumerate(steps):
                if number == 3 and size == 4:
                    scheduler.cancel(gone.job)
                if number == 3 and size == 5:
                    raise RuntimeError("out of memory")
                yield step

    background = Pieces()
    scheduler = schedulers(Broken(tiny_target()), background=background)
    scheduler.submit(gone.job, failed.job, whole.job)
    tokens = whole.answer()
    assert background.answers.get(timeout=20) == (whole.job.prompt, tokens)
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.answer()
    assert background.answers.empty()


@pytest.mark.parametrize("background", [None, Pieces(same)])
def test_the_end_of_a_cancelled_request_is_no_time_for_work(schedulers, monkeypatch, background):
    """Work begins after a quiet time, and the engine goes on with or without a background."""
    monkeypatch.setattr(scheduling, "QUIET", 60.0)
    target = tiny_target()
    scheduler = schedulers(Speculator(target), background=background)
    [prompt] = some_prompts(7)
    for _ in range(3):
        gone = Asked(prompt, new=90)
        scheduler.submit(gone.job)
        gone.events.get(timeout=20)
        scheduler.cancel(gone.job)
        while scheduler.active:
            time.sleep(0.001)
    answers(target, scheduler, [prompt])
    assert background is None or background.number == 0


@pytest.fixture(scope="module")
def tiny() -> Speculator:
    target = llama(eos=())
    return Speculator(target, random_head("medusa", target))


@pytest.fixture
def learning(tiny) -> Iterator[tuple[TestClient, Pieces]]:
    background = Pieces()
    with TestClient(create_app(tiny, ServeOptions("tiny"), background=background)) as client:
        yield client, background


def ask(client: TestClient, **body: Any) -> Any:
    asked = {"messages": HELLO, "max_tokens": 20, "return_token_ids": True, **body}
    return client.post("/v1/chat/completions", json=asked)


def test_each_answer_is_given_once_as_the_client_has_it(learning):
    client, background = learning
    whole = ask(client).json()["choices"][0]["token_ids"]
    background.answers.get(timeout=20)
    text = ask(client).json()["choices"][0]["message"]["content"]
    background.answers.get(timeout=20)
    cases: list[dict[str, Any]] = [
        {"n": 3, "temperature": 1.0},
        {"stop": [text[5:7]]},
        {"stop_token_ids": [whole[9]]},
        {"draft": False},
    ]
    for case in cases:
        body = ask(client, **case).json()
        prompt = body["prompt_token_ids"]
        expected = sorted((prompt, choice["token_ids"]) for choice in body["choices"])
        answered = sorted(background.answers.get(timeout=20) for _ in expected)
        assert answered == expected
    ends = [choice["finish_reason"] for choice in ask(client, **cases[2]).json()["choices"]]
    assert ends == ["stop"]
    background.answers.get(timeout=20)
    events = ask(client, **cases[2], stream=True).text.split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    streamed = [token for chunk in chunks for token in chunk.get("token_ids") or []]
    assert background.answers.get(timeout=20)[1] == streamed
    assert background.answers.empty()


@pytest.mark.mend('a request with "store": false was kept for learning')
def test_an_answer_that_is_not_to_be_stored_is_not_given(learning):
    client, background = learning
    for stored in (False, None, True):
        assert ask(client, store=stored).status_code == 200
    assert ask(client, store=False, stream=True).status_code == 200
    for _ in range(2):
        background.answers.get(timeout=20)
    assert background.answers.empty()


CURVE = [Point(1e9, 1, 2.31, 0, False), Point(1e9 + 60, 2, 2.58, 12300, True)]


def test_the_quality_over_time_is_told(learning):
    client, background = learning
    assert client.get("/v1/learning").json() == {"object": "list", "data": []}
    background.curve = CURVE
    [first, newest] = client.get("/v1/learning").json()["data"]
    assert (first["tokens_per_step"], first["adopted"]) == (2.31, False)
    assert newest == {
        "time": 1e9 + 60,
        "version": 2,
        "tokens_per_step": 2.58,
        "tokens": 12300,
        "adopted": True,
    }
    assert client.get("/v1/models/tiny").json()["learns"] is True


def test_a_server_that_does_not_learn_says_so(tiny):
    with TestClient(create_app(tiny, ServeOptions("tiny"))) as client:
        assert client.get("/v1/learning").json()["data"] == []
        assert client.get("/v1/models/tiny").json()["learns"] is False


def test_the_models_entry_is_of_the_engine_in_use(tiny):
    background = Pieces(lambda engine: Speculator(engine.target))
    with TestClient(create_app(tiny, ServeOptions("tiny"), background=background)) as client:
        background.wait()
        assert client.get("/v1/models/tiny").json()["drafts"].endswith(" draft nodes")
        background.allow()
        ask(client)
        assert client.get("/v1/models/tiny").json()["drafts"] == ""


def talk(engine: Speculator, background: Pieces, lines: Iterator[str]) -> str:
    """What a chat prints for these lines."""

    def read(cursor: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    out = io.StringIO()
    options = ChatOptions(max_new_tokens=NEW)
    chat(engine, options, read=read, console=Console(file=out), background=background)
    return out.getvalue()


def test_a_chat_learns_while_its_user_types(tiny):
    heads: list[Any] = [tiny.drafts]

    class Watched(Speculator):
        """Sees no piece of work while it answers."""

        def generate(self, prompt: Any, **options: Any) -> Any:
            assert background.number == len(heads) - 1 + 1, "the piece has ended"
            heads.append(self.drafts)
            return super().generate(prompt, **options)

    target = tiny.target
    new = random_head("eagle3", target)
    background = Pieces(
        lambda engine: Watched(target, engine.drafts), lambda engine: Watched(target, new), same
    )

    def lines() -> Iterator[str]:
        for line in ("Hello", "And then?", "/quit"):
            background.wait()
            background.allow()
            yield line

    printed = talk(tiny, background, lines())
    assert [type(head).kind for head in heads[1:]] == ["medusa", "eagle3"]
    assert "Learning" not in printed
    assert background.number == 3
    for turn in range(2):
        prompt, answer = background.answers.get(timeout=20)
        assert answer == generated(target, prompt, NEW)
        assert ("And then?" in target.tokenizer.decode(prompt)) == (turn == 1)
    assert background.answers.empty()


@pytest.mark.parametrize("place", ["work", "answered"])
def test_a_chat_goes_on_when_its_background_fails(tiny, place):
    background = Pieces(fails, same) if place == "work" else Pieces()
    if place == "answered":
        background.answered = lambda prompt, answer: fails(None)

    def lines() -> Iterator[str]:
        if place == "work":
            background.wait()
            background.allow()
        yield from ("Hello", "Again")

    printed = talk(tiny, background, lines())
    fault = "Learning has failed and ends: RuntimeError: the disk is full"
    assert printed.count(fault) == 1 and printed.count(f"{NEW} tokens") == 2
    assert background.number == (place == "work") and background.answers.empty()


def test_a_chat_gives_no_answer_that_was_stopped_and_ends_with_the_piece():
    target = llama(eos=(END,))

    class Stopped(Speculator):
        def generate(self, prompt: Any, **options: Any) -> Any:
            for step in super().generate(prompt, **options):
                signal.raise_signal(signal.SIGINT)
                yield step

    background = Pieces(same, same)

    def lines() -> Iterator[str]:
        background.wait()
        background.allow()
        yield "Hello"
        background.wait()
        background.allow()
        raise KeyboardInterrupt

    printed = talk(Stopped(target), background, lines())
    assert "stopped by you" in printed
    assert background.answers.empty() and background.number == 2


def test_the_head_of_what_drafts_is_found_and_replaced():
    target = tiny_target()
    old, new = random_head("medusa", target), random_head("eagle3", target)
    for make in SOURCES.values():
        source = make(old)
        assert head_of(source) is old
        other = replace_head(source, new)
        assert head_of(other) is new and head_of(source) is old
        assert type(other) is type(new if source is old else source)
    for none in (None, NGram(), Merged([old, new])):
        with pytest.raises(ValueError, match="expected one draft head to train, got [02]"):
            head_of(none)


def test_an_engine_keeps_a_tree_that_was_chosen():
    target = tiny_target()
    old, new = random_head("medusa", target), random_head("medusa", target)
    new.tree = StaticTree.from_widths((2, 1))
    assert Speculator(target, old).with_drafts(new).tree == new.tree
    assert Speculator(target, old, tree=old.tree).with_drafts(new).tree == new.tree
    chosen = StaticTree.from_widths((1, 1, 1))
    engine = Speculator(target, old, tree=chosen, profile=True).with_drafts(new)
    assert engine.tree == chosen and engine.profile
    assert engine.with_drafts(old).tree == chosen


def test_a_memory_reaches_the_ngrams_of_what_drafts():
    memory, head = NGramIndex(), random_head("medusa", tiny_target())
    ngram = NGram(DynamicTree(6, 4, 3), longest=2, shortest=1)
    assert with_memory(head, memory) is head
    assert with_memory(ngram, memory) == NGram(ngram.tree, 2, 1, memory)
    merged = with_memory(Merged([head, ngram]), memory)
    assert merged.parts[0].memory is memory and merged.parts[1] is head
    named = NGram(memory=NGramIndex())  # texts that a user named
    assert with_memory(named, memory).memory is named.memory
