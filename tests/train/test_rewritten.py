"""Under a template that rewrites earlier turns, answers are learned behind what a chat shows the
target, in documents that add up and survive interruptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_server import Json, LocalServer
from tiny_chat import CONTEXT, END, TEMPLATE, llama, options, records

from draftheads.heads.target import Target
from draftheads.infer.chat.repl import History
from draftheads.infer.continuous import Request
from draftheads.scripts.commands import data_preview
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.data.distill import Answerer, distill
from draftheads.train.data.prompts import Prompt
from draftheads.train.data.server import ServedTarget, ServerOptions
from draftheads.train.data.shards import documents_of

FORGETFUL = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")
TURNS = 3
CHOSEN = {"max_new_tokens": 40, "batch_size": 2}


def asked(count: int = 5) -> list[Prompt]:
    """Conversations of three turns; the third prompt does not fit into the context."""
    talks = [[f"{n}, {turn}?" for turn in range(TURNS)] for n in range(count)]
    talks[2:3] = [["x" * CONTEXT]] * (count > 2)
    messages = [tuple({"role": "user", "content": text} for text in talk) for talk in talks]
    return [Prompt(n, messages=talk) for n, talk in enumerate(messages)]


def answer(tokens: list[int]) -> list[int]:
    """What the thinking target says behind these tokens; no thoughts in every fifth case."""
    drawn = sum(tokens) % 97
    text = f"<think>hm {drawn}</think>so {drawn}" if drawn % 5 else f"so {drawn}"
    return [*llama().tokenizer(text)["input_ids"], END]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = llama(eos=(END,), template=FORGETFUL)
    made = tmp_path_factory.mktemp("forgetful")
    target.model.save_pretrained(made)
    target.tokenizer.save_pretrained(made)
    return made


class Thinking:
    """Takes the place of the engine, and answers one request after the other."""

    asked = 0
    interrupted_at: int | None = None

    def __init__(self, *_: Any) -> None:
        pass

    def run(self, take: Callable[[], Request | None]) -> Iterator[tuple[Request, list[int], None]]:
        while (request := take()) is not None:
            if Thinking.asked == Thinking.interrupted_at:
                raise KeyboardInterrupt
            Thinking.asked += 1
            yield request, answer(list(request.prompt)), None


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """It thinks, and its template forgets the thoughts of earlier turns."""
    monkeypatch.setattr("draftheads.train.data.distill.ContinuousBatch", Thinking)
    monkeypatch.setattr(Thinking, "asked", 0)
    monkeypatch.setattr(Thinking, "interrupted_at", None)
    return llama(eos=(END,), template=FORGETFUL)


def log(request: Json) -> Json:
    """A server's answer."""
    return {"text": "", "token_ids": answer(request["prompt"]), "finish_reason": "stop"}


@pytest.mark.parametrize("place", ["here", "server"])
def test_target_sees_in_training_what_it_sees_in_a_chat(
    place: str, target: Target, folder: Path, tmp_path: Path
) -> None:
    server = LocalServer(log)
    answering: Target | Answerer = target
    if place == "server":
        answering = ServedTarget(str(folder), ServerOptions(urls=[server.url]))
    report = distill(answering, asked(), options(tmp_path / "o", **CHOSEN))
    server.close()
    assert (report.counts.done, report.counts.skipped, report.complete) == (4, 1, True)
    for prompt, record in zip(asked(), records(tmp_path / "o"), strict=True):
        learned = [
            (document["tokens"][:start], document["tokens"][start:stop])
            for document in documents_of(record)
            for start, stop in document["learn"]
        ]
        if prompt.index == 2:
            assert not learned and "skipped" in record
            continue
        chat = History(target, None, 1)
        assert len(learned) == TURNS
        for message, (seen, said) in zip(prompt.messages or (), learned, strict=True):
            tokens, forgotten = chat.prompt(message["content"])
            assert (seen, forgotten) == (tokens, 0)
            assert said == answer(tokens)
            text = target.tokenizer.decode(said, skip_special_tokens=True)
            chat.add(message["content"], text)


def test_documents_conversations_and_prompts_add_up(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = distill(target, asked(), options(tmp_path / "o", **CHOSEN))
    documents = list(read_answers(tmp_path / "o"))
    counts = read_manifest(tmp_path / "o")["counts"]
    assert (report.prompts, counts["done"], counts["skipped"], counts["turns"]) == (5, 4, 1, 12)
    assert counts["documents"] == len(documents) > counts["done"]
    assert counts["tokens"] == sum(len(document.tokens) for document in documents)
    said = f"4 conversations became {len(documents)} documents, because the chat template rewrites"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("calls", [1, 4, 7])
def test_interrupted_run_asks_nothing_twice(target: Target, tmp_path: Path, calls: int) -> None:
    distill(target, asked(), options(tmp_path / "whole", **CHOSEN))
    turns, Thinking.asked, Thinking.interrupted_at = Thinking.asked, 0, calls
    with pytest.raises(KeyboardInterrupt):
        distill(target, asked(), options(tmp_path / "o", **CHOSEN))
    assert Thinking.asked == calls
    Thinking.interrupted_at = None
    distill(target, asked(), options(tmp_path / "o", **CHOSEN))
    assert records(tmp_path / "o") == records(tmp_path / "whole")
    assert Thinking.asked == turns + calls % TURNS, "only the conversation that was not whole"
    distill(target, asked(), options(tmp_path / "o", **CHOSEN))
    assert Thinking.asked == turns + calls % TURNS


def test_thoughts_that_are_dropped_are_seen_and_not_learned(
    target: Target, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distill(target, asked(2), options(tmp_path / "o", reasoning="drop", **CHOSEN))
    data_preview(str(tmp_path / "o"), target=str(folder), count=99)
    shown = capsys.readouterr().out
    assert shown.count("</think>[[so ") == shown.count("</think>") > 0
    assert "[[<think>" not in shown
