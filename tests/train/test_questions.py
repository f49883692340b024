"""The promise: a chat model asks itself questions, where its template opens the user's turn."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
from tiny_chat import llama

from draftheads.infer.continuous import Request
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import PromptRenderer
from draftheads.train.data import questions as module
from draftheads.train.data.prompts import read_prompts
from draftheads.train.data.questions import LONGEST, opening, questions


@pytest.fixture
def target():
    return llama()


def test_a_question_begins_where_the_user_would(target):
    renderer = PromptRenderer(target, {})
    asked = renderer.prompt_ids([{"role": "user", "content": "Hi"}])
    start = opening(renderer, "tiny")
    assert asked[: len(start)] == start
    rest = target.tokenizer.decode(asked[len(start) :])
    assert rest.startswith("Hi")


def test_questions_differ_and_depend_on_the_seed_alone(target):
    engine = Speculator(target)
    found = list(questions(engine, 6, rows=4))
    assert len(set(found)) == 6 and all(found)
    assert sorted(questions(engine, 6, rows=6)) != sorted(questions(engine, 6, rows=6, seed=1))
    assert set(questions(engine, 6, rows=1)) <= set(questions(engine, 40, rows=4))
    assert max(len(target.tokenizer(each)["input_ids"]) for each in found) <= LONGEST


def test_a_question_is_kept_once(target, monkeypatch):
    """The same random numbers for all: a seed with which the question ends."""
    engine = Speculator(target)
    for seed in range(40):
        same = partial(Request, seed=f"{seed}")
        monkeypatch.setattr(module, "Request", lambda ids, limit, _, same=same: same(ids, limit))
        with suppress(ValueError):
            assert len(list(questions(engine, 4, rows=4))) == 1
            return
    pytest.fail("no question ended")


def test_a_model_for_no_chats_is_refused():
    target = llama(template=None)
    with pytest.raises(ValueError, match="expected a chat template that opens the user's turn"):
        next(questions(Speculator(target), 1, rows=1))
    target = llama(template="{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match=r"renders a question, got one that fails \(no\)"):
        next(questions(Speculator(target), 1, rows=1))
    target = llama(eos=())
    with pytest.raises(ValueError, match="expected questions of at most 160 tokens, got none of 4"):
        list(questions(Speculator(target), 2, rows=4))


@pytest.mark.slow
def test_the_file_is_one_of_prompts(target, run, tmp_path):
    folder = tmp_path / "target"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    out = tmp_path / "new" / "asked.jsonl"
    command = ["questions", "--target", folder, "--out", out]
    code, printed, _ = run(*command, "--count", 3)
    assert code == 0 and "3 of 3 questions" in printed
    prompts = read_prompts(out)
    assert len(prompts) == 3 and all(each.messages for each in prompts)
    before = out.read_bytes()
    code, _, errors = run(*command)
    assert code == 2 and "asked.jsonl already exists" in errors[-1]
    assert out.read_bytes() == before


@pytest.mark.slow
def test_what_was_asked_before_ctrl_c_is_kept(target, run, tmp_path, monkeypatch):
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")

    def two(*_):
        yield from ("What?", "Why?")
        raise KeyboardInterrupt

    monkeypatch.setattr("draftheads.train.data.questions.questions", two)
    out = tmp_path / "asked.jsonl"
    code, _, _ = run("questions", "--target", tmp_path / "target", "--out", out)
    assert code == 130
    assert [each.messages[0]["content"] for each in read_prompts(out)] == ["What?", "Why?"]
