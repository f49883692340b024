"""The promise: requests that are decoded together are answered as alone, and none waits for a long
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from asked import Asked
from hybrid_targets import hybrid_model
from tiny_heads import random_head
from tiny_targets import greedy, some_prompts, tiny_target
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from draftheads.heads.cache import SlotCache
from draftheads.heads.target.model import Target
from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.constraint import Constraint
from draftheads.infer.continuous import ContinuousBatch
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.generate import Processed
from draftheads.infer.lossy import Lenient, Typical
from draftheads.infer.rows import Row
from draftheads.infer.serve.logprobs import ScoredRule
from draftheads.infer.slots import Slots

LENGTHS = (1, 9, 3, 30, 2, 14, 5, 1, 40, 7, 21, 4)
SCHEDULER = "draftheads.infer.serve.scheduler"


def several(**options: Any) -> list[Asked]:
    """Prompts and answers of many lengths."""
    prompts = some_prompts(*LENGTHS)
    return [Asked(ids, new=3 + n * 7 % 20, **options) for n, ids in enumerate(prompts)]


def check_greedy(target: Target, asked: list[Asked]) -> None:
    for each in asked:
        assert each.answer() == greedy(target, each.job.prompt, each.job.max_new_tokens)


def rule(number: int) -> Acceptance:
    """Rules of every kind, with a seed of their own."""
    warm = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    rules: list[Acceptance] = [
        Greedy(),
        Sampled(0.9, 0.9),
        Sampled(0.9, 0.9),
        Sampled(1.3, top_k=7),
        Typical(temperature=0.9),
        Processed(warm, sample=True),
        Lenient(gap=2.0),
    ]
    chosen = rules[number % len(rules)]
    chosen.seed(number)
    return chosen


class Even(Constraint):
    """Answers of even tokens, which drafts more than others do."""

    def row(self, number: int, prompt: Sequence[int]) -> Even:
        return self

    def after(self, answer: list[int], path: Any, logits_V: torch.Tensor) -> torch.Tensor:
        assert not any(token % 2 for token in (*answer, *path))
        return logits_V.masked_fill(torch.arange(len(logits_V)) % 2 == 1, -torch.inf)

    def drafts(self, answer: list[int], paths: Any) -> list[Any]:
        forced = [(2,) * length for length in range(1, 12)]
        return [*dict.fromkeys([*paths, *forced])]


@pytest.mark.mend(
    "a server's seed gave another text with other drafts, from the second request on or beside a "
    "grammar"
)
@pytest.mark.parametrize("name", ["medusa", "eagle3", "ngram", None])
def test_each_row_has_a_rule_of_its_own_and_its_seed_gives_the_same_text(schedulers, steps, name):
    """Whatever is drafted, unless the rule is lossy, beside rows with a constraint, too, and from
    what slots keep.
    """
    target, prompts = tiny_target(), some_prompts(*LENGTHS)
    others = {"ngram": NGram(shortest=1), None: None}
    engine = Speculator(target, others[name] if name in others else random_head(name, target))

    def alone(engine: Speculator, constraints: list[Even | None]) -> list[list[int]]:
        texts = []
        for number, (prompt, constraint) in enumerate(zip(prompts, constraints, strict=True)):
            options = {"sampling": rule(number), "max_new_tokens": 12, "constraint": constraint}
            each = engine.generate(prompt, **options)
            texts.append([token for step in each for token in step.tokens])
        return texts

    for slots, some in ((3, None), (12, Even())):
        constraints = [some if number % 3 == 1 else None for number in range(len(prompts))]
        expected = alone(engine, constraints)
        plain = alone(Speculator(target), constraints)
        for number, texts in enumerate(zip(expected, plain, strict=True)):
            assert rule(number).sees_drafts or texts[0] == texts[1]
        scheduler = schedulers(engine, slots=slots)
        for is_scored in (False, False, True):
            if is_scored and steps == "recorded":  # scores are noted on the host
                continue
            asked = [
                Asked(p, ScoredRule(rule(n), 2) if is_scored else rule(n), 12, constraint=each)
                for n, (p, each) in enumerate(zip(prompts, constraints, strict=True))
            ]
            scheduler.submit(*(each.job for each in asked))
            assert [each.answer() for each in asked] == expected


@pytest.mark.parametrize("length", [9, 90])
def test_log_probabilities_of_a_row_are_its_own(schedulers, length):
    target, notes = tiny_target(), []
    engine = Speculator(target, random_head("medusa", target))
    [prompt] = some_prompts(length)
    for others in (0, 3):
        rule, noted = ScoredRule(Greedy(), 3), []
        asked = Asked(prompt, rule)
        deliver = asked.job.deliver

        def note(event: Any, rule: Any = rule, noted: Any = noted, deliver: Any = deliver) -> None:
            noted.extend(rule.newest)
            deliver(event)

        asked.job.deliver = note
        beside = [Asked(ids, new=30) for ids in some_prompts(4, 6, 8)[:others]]
        scheduler = schedulers(engine, slots=4)
        scheduler.submit(*(each.job for each in [*beside, asked]))
        asked.answer()
        notes.append(noted)
    assert [score.token for score in notes[0]] == [score.token for score in notes[1]]
    for one, other in zip(*notes, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-3


@pytest.mark.mend("a long prompt holds up nobody")
@pytest.mark.parametrize("plain", [False, True])
def test_a_long_prompt_delays_others_by_at_most_two_steps(schedulers, monkeypatch, plain):
    """Between two steps of a row: a part of one prompt, and a step of those that decode without
    drafts.
    """
    monkeypatch.setattr(f"{SCHEDULER}.TURN", 4)
    target, passes = tiny_target(), list[None]()
    forward = target._decode

    def note(*given: Any, **options: Any) -> Any:
        passes.append(None)
        return forward(*given, **options)

    monkeypatch.setattr(target, "_decode", note)
    scheduler = schedulers(Speculator(target, random_head("medusa", target)), slots=5)
    writing = [Asked(some_prompts(2)[0], new=100)]
    if plain:
        writing.append(Asked(some_prompts(6)[0], new=60, draft=False))
    places: list[list[int]] = []
    for each in writing:
        places.append([])
        each.job.deliver = delivered_at(each, passes, places[-1])
    long = [Asked(ids) for ids in some_prompts(92, 31)]
    scheduler.submit(*(each.job for each in [*writing, *long]))
    check_greedy(target, [*writing, *long])
    for times in places:
        others = [after - before - 1 for before, after in pairwise(times[1:])]
        assert max(others) == 1 + plain
        assert others.count(1 + plain) >= 25, "they grow while prompts are read"


def delivered_at(asked: Asked, passes: list[None], places: list[int]) -> Any:
    """Deliver, and note after how many passes."""

    def deliver(event: Any) -> None:
        places.append(len(passes))
        asked.events.put(event)

    return deliver


def test_rows_that_leave_give_back_memory_and_keep_their_text(schedulers, monkeypatch):
    for place in ("heads.cache", "heads.drafting", "infer.engine", "infer.serve.scheduler"):
        monkeypatch.setattr(f"draftheads.{place}.ROOM", 2)
    monkeypatch.setattr("draftheads.heads.cache.SPARE", 2)
    held: list[tuple[int, int, int]] = []  # rows, longest text, slots
    verify = Target.verify

    def note(self: Target, tree: Any, cache: SlotCache, layers: Any) -> Any:
        out = verify(self, tree, cache, layers)
        [rows, _, slots, _] = cache.layers[0].keys.shape
        held.append((rows, cache.table.longest, slots))
        return out

    monkeypatch.setattr(Target, "verify", note)
    target = tiny_target()
    engine = Speculator(target, random_head("eagle3", target))
    scheduler = schedulers(engine, slots=4)
    long, *short = [Asked(ids) for ids in some_prompts(90, 3, 4, 5)]
    short[-1].job.max_new_tokens = 30
    scheduler.submit(long.job, *(each.job for each in short))
    check_greedy(target, [long, *short])
    assert max(rows for rows, _, _ in held) == 4
    assert max(slots for _, _, slots in held) > 90
    rows, longest, slots = held[-1]
    assert rows == 1, "rows that ended are removed"
    assert longest < 40 and slots < 80, "slots of the long text are given back"
    assert scheduler._drafting.slots is None
    texts = sorted(session.slots.cache.table.capacity for session in scheduler._idle)
    lengths = sorted(session.length for session in scheduler._idle)
    assert lengths[-1] > 90
    assert texts[-1] < 100 + engine.tree.nodes


def test_caches_of_a_row_are_in_the_batch_or_in_its_session_but_not_twice(schedulers, monkeypatch):
    target = tiny_target()
    scheduler = schedulers(Speculator(target, random_head("eagle3", target)), slots=3)
    twice: list[int] = []
    step = Slots.step

    def note(self: Slots) -> Any:
        own = [job.session.slots for job in scheduler._jobs(scheduler._drafting)]
        for each in own:
            if each is not self:
                caches = each.cache.layers + each.drafter.cache.cache.layers
                twice.append(sum(layer.is_initialized for layer in caches))
        return step(self)

    monkeypatch.setattr(Slots, "step", note)
    asked = several()
    scheduler.submit(*(each.job for each in asked))
    check_greedy(target, asked)
    assert len(twice) > 10 and not any(twice)


def test_the_others_do_not_attend_over_the_slots_of_a_row_that_left():
    """Its place may stay, as to remove it copies the caches."""
    target = tiny_target()
    engine = Speculator(target, random_head("eagle3", target))
    rows = [Row(target, prompt, 40) for prompt in some_prompts(40, 7, 5)]
    reading = engine.read(rows, Greedy(), reserved=64)
    reading.finish()
    slots = reading.slots
    slots.step()
    slots.leave(rows[0], None)
    drafts = slots.drafter.cache.table
    assert slots.cache.table.longest < 20 and drafts.longest < 20
    for _ in range(8):
        slots.step()
    for row, length in ((rows[1], 7), (rows[2], 5)):
        prompt, answer = row.text[:length], row.text[length:]
        assert len(answer) > 8 and answer == greedy(target, prompt, len(answer))


def reused_in_conversations(schedulers: Any, target: Target, head: Any) -> list[list[int]]:
    """Three turns of four conversations side by side, each answered as alone; returns the prompt
    tokens that were not computed again, by turn.
    """
    scheduler = schedulers(Speculator(target, head), slots=4)
    texts = some_prompts(20, 21, 17, 30)
    turns = []
    for turn in range(3):
        asked = [Asked(text, new=8) for text in texts]
        scheduler.submit(*(each.job for each in asked))
        answers = [each.answer() for each in asked]
        assert answers == [greedy(target, text, 8) for text in texts]
        for session in scheduler._idle:  # both caches have what is said to be known
            assert session.slots is not None and session.length <= session.slots.known()
        turns.append([each.job.reused for each in asked])
        texts = [[*text, *answer, 3 + turn] for text, answer in zip(texts, answers, strict=True)]
    return turns


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("name", ["eagle3", "block", "medusa"])
def test_conversations_side_by_side_compute_only_what_is_new(schedulers, name):
    target = tiny_target()
    first, *later = reused_in_conversations(schedulers, target, random_head(name, target))
    assert first == [0] * 4
    lengths = [20, 21, 17, 30]
    for turn, reused in enumerate(later, start=1):
        texts = [length + 9 * turn for length in lengths]
        assert all(n >= text - 3 - 4 for n, text in zip(reused, texts, strict=True))


def test_a_conversation_with_a_hybrid_goes_on_from_its_prompt_or_later(schedulers):
    target = Target(hybrid_model("qwen3.5"))
    first, *later = reused_in_conversations(schedulers, target, random_head("medusa", target))
    assert first == [0] * 4
    assert all(n >= 17 for reused in later for n in reused)


@pytest.mark.usefixtures("steps")
def test_a_client_that_leaves_changes_no_other_answer_and_its_slot_is_free(schedulers):
    target = tiny_target()
    scheduler = schedulers(Speculator(target, random_head("eagle3", target)), slots=3)
    [prompt] = some_prompts(33)
    leaving = Asked(prompt, new=90)
    others = [Asked(ids, new=40) for ids in some_prompts(4, 9)]
    scheduler.submit(leaving.job, *(each.job for each in others))
    got: list[int] = []
    while len(got) < 4:
        got += leaving.events.get(timeout=20).tokens
    scheduler.cancel(leaving.job)
    again = Asked([*prompt, *got, 5], new=6)
    scheduler.submit(again.job)
    check_greedy(target, [*others, again])
    assert again.job.reused >= len(prompt), "what was computed for it is kept"


@pytest.mark.mend("a request that ran out of memory alone left a server with one row at a time")
def test_a_row_that_needs_too_much_memory_alone_makes_no_batch_smaller():
    batch = ContinuousBatch(Speculator(tiny_target()), 4)
    batch.shrink(1, torch.OutOfMemoryError())
    assert batch.room == 4
    batch.shrink(4, torch.OutOfMemoryError())
    assert batch.room == 2


class Broken(Greedy):
    """Fails from its third choice on."""

    def __call__(self, logits: Any, tree: Any) -> Any:
        if next(self.calls) >= 2:
            raise RuntimeError("broken")
        return super().__call__(logits, tree)


@pytest.mark.mend("a server sampled tokens from logits that are not finite")
def test_logits_that_are_not_finite_end_their_row_alone(schedulers, monkeypatch):
    target = tiny_target()
    scheduler = schedulers(Speculator(target, random_head("medusa", target)), slots=4)
    scores = Sampled.scores
    monkeypatch.setattr(
        Sampled, "scores", lambda rule, logits: scores(rule, logits) / (rule.top_k - 7)
    )
    asked = [Asked(ids, Sampled(top_k=k), 8) for k, ids in enumerate(some_prompts(4, 9), start=7)]
    scheduler.submit(*(each.job for each in asked))
    assert len(asked[1].answer()) == 8
    with pytest.raises(RuntimeError, match="logits are not finite; load it with"):
        asked[0].answer()


@pytest.mark.parametrize(("fault", "place"), [("step", 0), ("step", 2), ("prompt", 2)])
def test_a_row_that_fails_ends_alone(schedulers, fault, place, monkeypatch):
    """The others are read again, and go on where they were."""
    target = tiny_target()
    scheduler = schedulers(Speculator(target, random_head("medusa", target)), slots=4)
    asked = [Asked(ids, new=30) for ids in some_prompts(4, 9, 6, 12)]
    bad = asked.pop(place)
    prefill = Target.prefill_chunks

    def failing(self: Target, prompts: Any, *more: Any) -> Any:
        if list(prompts[0]) == bad.job.prompt:
            raise RuntimeError("broken")
        return prefill(self, prompts, *more)

    if fault == "prompt":
        monkeypatch.setattr(Target, "prefill_chunks", failing)
    else:
        bad.job.sampling = Broken()
        object.__setattr__(bad.job.sampling, "calls", count())
    jobs = [each.job for each in asked]
    scheduler.submit(*jobs[:place], bad.job, *jobs[place:])
    with pytest.raises(RuntimeError, match="broken"):
        bad.answer()
    last = Asked(some_prompts(7)[0])
    scheduler.submit(last.job)
    check_greedy(target, [*asked, last])


@pytest.mark.slow
def test_caches_that_find_no_room_when_a_row_leaves_are_given_up(schedulers, monkeypatch):
    """They are only a saving: the answer is there."""
    target, calls = tiny_target(), count()
    take = SlotCache.take

    def failing(self: SlotCache, *more: Any) -> None:
        if next(calls) % 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        take(self, *more)

    monkeypatch.setattr(SlotCache, "take", failing)
    scheduler = schedulers(Speculator(target, random_head("eagle3", target)), slots=4)
    for _ in range(2):
        asked = several()
        scheduler.submit(*(each.job for each in asked))
        check_greedy(target, asked)
    assert next(calls) > 4


@pytest.mark.slow
def test_a_row_alone_is_compiled_and_goes_on_when_others_join_it(schedulers, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    target = tiny_target()
    engine = Speculator(target, random_head("eagle3", target), compile=True)
    fixed: list[int] = []
    call = compiled.FixedSteps.__call__

    def note(self: Any, committed: Any, tree: Any, running: list[bool]) -> Any:
        fixed.append(len(running))
        return call(self, committed, tree, running)

    monkeypatch.setattr(compiled.FixedSteps, "__call__", note)
    scheduler = schedulers(engine, slots=3)
    scheduler.warm_up([Greedy()])
    first = Asked(some_prompts(5)[0], new=100)
    scheduler.submit(first.job)
    fixed.clear()
    while not fixed:
        first.events.get(timeout=20)
    others = [Asked(ids, new=6) for ids in some_prompts(8, 3)]
    scheduler.submit(*(each.job for each in others))
    texts = [[token for token in each.answer()] for each in others]
    assert texts == [greedy(target, each.job.prompt, 6) for each in others]
    first.answer()
    assert set(fixed) == {1}
    again = Asked([*some_prompts(5)[0], *greedy(target, some_prompts(5)[0], 40), 3])
    scheduler.submit(again.job)
    check_greedy(target, [again])
