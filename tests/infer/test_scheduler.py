"""The promise: requests share the engine fairly, keep what they can reuse, and all of them end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from asked import Asked
from hybrid_targets import hybrid_model
from served import Scripted
from tiny_heads import random_head
from tiny_targets import greedy, random_model, some_prompts, tiny_target
from torch import Tensor

from draftheads.heads.cpu.linear import has_int8
from draftheads.heads.target.model import Target
from draftheads.infer.accept import Greedy, Sampled
from draftheads.infer.constraint import Constraint, ConstraintError
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.paths import TokenPath
from draftheads.infer.reading import Reading
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


TOOLS = 24
"""Tokens at the beginning of every agent's prompts, of 28 in the first turn."""


class Agents:
    """Conversations that begin with the same tools, each with what it is asked next. Templates
    leave out the ends of earlier answers.
    """

    def __init__(self, engine: Speculator, number: int) -> None:
        self.engine = engine
        tools, *own = some_prompts(TOOLS, *[4] * number)
        self.texts = [[*tools, number, *text] for number, text in enumerate(own, start=3)]

    def fresh(self, agent: int) -> list[int]:
        """The answer of an engine that has read nothing before."""
        steps = self.engine.generate(self.texts[agent], max_new_tokens=NEW)
        return [token for step in steps for token in step.tokens]

    def turn(self, scheduler: Any, *agents: int) -> list[int]:
        """Ask these at the same time, which get the answers of `fresh`; returns the tokens of each
        prompt that were not computed again.
        """
        asked = [Asked(self.texts[agent]) for agent in agents]
        scheduler.submit(*(each.job for each in asked))
        for agent, each in zip(agents, asked, strict=True):
            answer = each.answer()
            assert answer == self.fresh(agent)
            self.texts[agent] = [*self.texts[agent], *answer[:-3], 5, 6, 7]
        return [each.job.reused for each in asked]


@pytest.fixture
def short_texts(monkeypatch) -> None:
    """Texts of tests are shorter than those of agents."""
    for name, tokens in {"TURN": 5, "OPENING": 2, "FEWEST": 4}.items():
        monkeypatch.setattr(f"draftheads.infer.serve.scheduler.{name}", tokens)


AGENTS = [
    *(("llama", name) for name in ("medusa", "eagle3", "")),
    ("gemma3-window", "eagle3"),
    ("int8", "eagle3"),
    ("qwen3.5", "medusa"),
]


@pytest.mark.usefixtures("short_texts")
@pytest.mark.mend("agents with the same tools took each other's slots, or read the tools again")
@pytest.mark.parametrize(("name", "head"), AGENTS)
def test_agents_with_the_same_tools_read_them_once(schedulers, steps, name, head):
    """Each in a slot of its own, with answers as if all were read."""
    if name == "int8" and not has_int8():
        pytest.skip("torch has no int8 products for this CPU")
    engine_of_int8 = "torch" if steps == "recorded" else "onnx"
    makers = {
        "int8": lambda: Target(random_model("llama")).pack(8, engine_of_int8),
        "qwen3.5": lambda: Target(hybrid_model(name)),
    }
    target = makers[name]() if name in makers else tiny_target(name)
    engine = Speculator(target, random_head(head, target) if head else None)
    agents, scheduler = Agents(engine, 2), schedulers(engine, slots=3)
    asked = [len(text) for text in agents.texts]
    assert agents.turn(scheduler, 0) == [0]
    # the states of a hybrid are known after each part of a prompt
    assert agents.turn(scheduler, 1) == [21 if target.is_hybrid else TOOLS]
    for _ in range(2):
        for agent in range(2):
            [reused] = agents.turn(scheduler, agent)
            assert reused >= asked[agent]
            asked[agent] = len(agents.texts[agent]) - NEW
    later = agents.turn(scheduler, 0, 1)
    assert all(reused >= length for reused, length in zip(later, asked, strict=True))


@pytest.mark.usefixtures("short_texts", "steps")
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("head", ["medusa", "eagle3"])
def test_what_is_being_decoded_is_copied_too(schedulers, head, others):
    """From the slots of a row alone, or from its place in a batch; its own text stays the same."""
    target = tiny_target()
    engine = Speculator(target, random_head(head, target))
    agents, scheduler = Agents(engine, 2), schedulers(engine, slots=4)
    prompts = [agents.texts[0], *some_prompts(*[9] * others)]
    long = [Asked(prompt, new=90) for prompt in prompts]
    scheduler.submit(*(each.job for each in long))
    beginnings = [each.events.get(timeout=20).tokens for each in long]
    assert agents.turn(scheduler, 1) == [TOOLS]
    for prompt, beginning, each in zip(prompts, beginnings, long, strict=True):
        assert beginning + each.answer() == greedy(target, prompt, 90)


@pytest.mark.usefixtures("short_texts")
def test_agents_that_begin_together_read_what_they_share_in_turns(schedulers, monkeypatch):
    parts: list[int] = []
    advance = Reading.advance

    def note(reading: Reading) -> bool:
        parts.append(1)
        return advance(reading)

    engine = Speculator(tiny_target(), random_head("eagle3", tiny_target()))
    agents, scheduler = Agents(engine, 4), schedulers(engine, slots=4)
    monkeypatch.setattr(Reading, "advance", note)
    agents.turn(scheduler, 0, 1, 2, 3)
    fresh = 4  # readings of one part, for the comparison
    assert len(parts) - fresh <= 5 + 4 * 2, "alone, each reads 6 parts"


@pytest.mark.usefixtures("short_texts")
def test_of_more_agents_than_slots_the_least_recently_used_goes(schedulers):
    engine = Speculator(tiny_target(), random_head("eagle3", tiny_target()))
    agents, scheduler = Agents(engine, 3), schedulers(engine, slots=2)
    for agent in range(3):
        agents.turn(scheduler, agent)
    length = len(agents.texts[1]) - NEW
    assert agents.turn(scheduler, 1)[0] >= length
    assert agents.turn(scheduler, 0) == [TOOLS], "the tools alone, from another slot"


@pytest.mark.usefixtures("short_texts")
def test_drafts_that_cannot_be_copied_take_the_slot_with_most_of_a_prompt(schedulers):
    engine = Speculator(tiny_target(), NGram())
    agents, scheduler = Agents(engine, 2), schedulers(engine, slots=3)
    assert [agents.turn(scheduler, agent) for agent in range(2)] == [[0], [TOOLS]]


@pytest.mark.mend("with n-grams, a prompt with a longer answer was read again when it was repeated")
def test_a_repeated_prompt_is_known_however_long_its_answer_was(schedulers):
    scheduler = schedulers(Speculator(tiny_target(), NGram()), slots=3)
    [prompt] = some_prompts(6)
    for known in (0, len(prompt) - 1):
        asked = Asked(prompt)
        scheduler.submit(asked.job)
        assert asked.answer() == greedy(tiny_target(), prompt, NEW)
        assert asked.job.reused == known


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
