"""The promise: requests share the engine fairly, keep what they can reuse, and all of them end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from asked import Asked
from served import Scripted
from tiny_heads import random_head
from tiny_targets import greedy, some_prompts, tiny_target
from torch import Tensor

from draftheads.infer.accept import Greedy, Sampled
from draftheads.infer.constraint import Constraint, ConstraintError
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.paths import TokenPath
from draftheads.infer.rows import Step
from draftheads.infer.serve.protocol import ApiError
from draftheads.infer.serve.scheduler import Closing

NEW = 12


class Timed(Scripted):
    """Steps of given lengths: a step writes the tokens of `sizes`, and sleeps for each."""

    def __init__(self, pauses: dict[int, float]) -> None:
        super().__init__(tiny_target())
        self.pauses = pauses
        self.order: list[int] = []

    def generate(self, prompt: Any, **options: Any) -> Iterator[Step]:
        def steps() -> Iterator[Step]:
            for _ in range(NEW - 1):
                time.sleep(self.pauses[prompt[0]])
                self.order.append(prompt[0])
                yield Step([1], 0, None, 0.0, 0.0)
            yield Step([1], 0, "length", 0.0, 0.0)

        return steps()


@pytest.mark.parametrize("name", ["eagle3", "ngram"])
def test_many_requests_at_a_time_are_answered_as_alone(schedulers, name):
    """Those without drafts beside the others, which are batched or take turns."""
    target = tiny_target()
    drafts = NGram() if name == "ngram" else random_head(name, target)
    scheduler = schedulers(Speculator(target, drafts), slots=3)
    asked = [Asked(prompt, draft=n % 3 > 0) for n, prompt in enumerate(some_prompts(*range(4, 24)))]
    for each in asked:
        scheduler.submit(each.job)
    for each in asked:
        assert each.answer() == greedy(target, each.job.prompt, NEW)


def test_a_newcomer_does_not_wait_for_the_others_to_end(schedulers):
    engine = Timed({1: 0.01, 2: 0.01})
    scheduler = schedulers(engine, slots=2)
    first, second = Asked([1, 1]), Asked([2, 2])
    scheduler.submit(first.job)
    for _ in range(6):
        first.events.get(timeout=5)
    scheduler.submit(second.job)
    second.answer()
    assert engine.order.index(2) < len(engine.order) - engine.order[::-1].index(1), "between"


def test_the_queue_is_bounded(schedulers):
    scheduler = schedulers(Timed({1: 0.02}), slots=1, waiting=2)
    asked = [Asked([1, n]) for n in range(3)]
    scheduler.submit(asked[0].job)
    asked[0].events.get(timeout=5)  # it has the slot
    for each in asked[1:]:
        scheduler.submit(each.job)
    with pytest.raises(ApiError, match="2 requests are waiting already"):
        scheduler.submit(Asked([1, 9]).job)
    assert [len(each.answer()) for each in asked] == [NEW - 1, NEW, NEW]


def test_a_cancelled_request_ends_at_once_and_frees_its_slot(schedulers):
    scheduler = schedulers(Timed({1: 0.05, 2: 0.0}), slots=1)
    slow, queued, quick = Asked([1, 1]), Asked([1, 2]), Asked([2, 2])
    for each in (slow, queued, quick):
        scheduler.submit(each.job)
    slow.events.get(timeout=5)
    for each in (queued, slow):
        scheduler.cancel(each.job)
    assert len(quick.answer()) == NEW
    assert slow.events.qsize() <= 2
    assert queued.events.empty()
    assert not scheduler.active


def test_a_wrong_prompt_is_refused_before_it_waits(schedulers):
    scheduler = schedulers(Speculator(tiny_target()))
    with pytest.raises(ValueError, match="token ids"):
        scheduler.submit(Asked([10_000]).job)
    assert not scheduler.waiting


def test_closing_fails_those_that_wait_and_lets_the_others_end(schedulers):
    scheduler = schedulers(Timed({1: 0.01}), slots=1)
    active, waiting = Asked([1, 1]), Asked([1, 2])
    for each in (active, waiting):
        scheduler.submit(each.job)
    active.events.get(timeout=5)
    scheduler.close(grace=10)
    with pytest.raises(Closing):
        waiting.answer()
    assert len(active.answer()) == NEW - 1
    with pytest.raises(Closing, match="shutting down"):
        scheduler.submit(Asked([1, 3]).job)


def test_grace_ends(schedulers):
    scheduler = schedulers(Timed({1: 0.05}), slots=1)
    asked = Asked([1, 1])
    scheduler.submit(asked.job)
    asked.events.get(timeout=5)
    scheduler.close(grace=0.1)
    with pytest.raises(Closing, match="before the end"):
        asked.answer()


@pytest.mark.slow
def test_compiled_steps_are_those_of_the_start_alone(schedulers, monkeypatch):
    """Another rule takes a minute to compile, in which nobody would be answered."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    target = tiny_target()
    engine = Speculator(target, random_head("medusa", target), compile=True)
    scheduler = schedulers(engine)
    scheduler.warm_up([Greedy()])
    [step] = engine.maker._compiled.values()
    [prompt] = some_prompts(9)
    for rule in (Greedy(), Sampled(0.5)):
        asked = Asked(prompt, rule)
        scheduler.submit(asked.job)
        answer = asked.answer()
        assert isinstance(rule, Sampled) or answer == greedy(target, prompt, NEW)
    assert list(engine.maker._compiled.values()) == [step]


def test_the_queue_takes_all_jobs_of_a_request_or_none(schedulers):
    scheduler = schedulers(Timed({1: 0.02}), slots=1, waiting=2)
    with pytest.raises(ApiError):
        scheduler.submit(*(Asked([1, n]).job for n in range(4)))
    assert not scheduler.waiting and not scheduler.active
    asked = [Asked([1, n]) for n in range(3)]
    scheduler.submit(*(each.job for each in asked))
    assert [len(each.answer()) for each in asked] == [NEW] * 3


@dataclass
class FailsAfter(Constraint):
    """It forbids nothing, and cannot be followed after so many tokens."""

    tokens: int

    def row(self, number: int, prompt: Sequence[int]) -> Constraint:
        return self

    def after(self, answer: list[int], path: TokenPath, logits_V: Tensor) -> Tensor:
        if len(answer) + len(path) == self.tokens:
            raise ConstraintError("too complex")
        return logits_V


@pytest.mark.mend(
    "a grammar that failed while decoding let all answers beside it be read again, in smaller "
    "batches"
)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("kind", ["", "eagle3"])
def test_a_constraint_that_fails_ends_its_answer_alone(schedulers, monkeypatch, tokens, kind):
    """And no text beside it is read again."""
    target = tiny_target()
    starts: list[list[int]] = []
    read = Speculator.read

    def note(engine, rows, *more):
        starts.extend(list(row.text) for row in rows)
        return read(engine, rows, *more)

    monkeypatch.setattr(Speculator, "read", note)
    scheduler = schedulers(Speculator(target, random_head(kind, target) if kind else None), slots=3)
    asked = [Asked(prompt) for prompt in some_prompts(6, 7, 8, 9)]
    asked[1].job.constraint = FailsAfter(tokens)
    scheduler.submit(*(each.job for each in asked))
    for place, each in enumerate(asked):
        if place == 1:
            with pytest.raises(ConstraintError, match="too complex"):
                each.answer()
            assert each.job.row.answer[:tokens] == greedy(target, each.job.prompt, NEW)[:tokens]
            assert len(each.job.row.answer) == tokens + 1, "no draft ends it before"
        else:
            assert each.answer() == greedy(target, each.job.prompt, NEW)
    assert sorted(starts, key=len) == [each.job.prompt for each in asked]
