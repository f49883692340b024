"""The promise: continuous batching writes what a row alone would, whatever happens beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from tiny_heads import KINDS, VARIANTS, random_head
from tiny_targets import random_model, some_prompts, tiny_target

from draftheads.heads.cache import SlotCache, SlotLayer
from draftheads.heads.target.model import Target
from draftheads.infer.accept import Acceptance
from draftheads.infer.continuous import Request, answer_all, checked
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.rows import Row
from draftheads.infer.slots import Slots

LENGTHS = (1, 9, 3, 30, 2, 14, 5, 1, 40, 7, 21, 4)


def requests(copies: int = 1) -> list[Request]:
    """Prompts and answers of many lengths."""
    prompts = some_prompts(*LENGTHS * copies)
    return [Request(ids, 3 + n * 7 % 20, f"seed {n}") for n, ids in enumerate(prompts)]


def run(
    engine: Speculator, rule: Acceptance, most: int, asked: Sequence[Request]
) -> list[list[int]]:
    """The answers, in the order of the requests."""
    waiting = iter(asked)
    found = {}
    for request, ids, error in answer_all(engine, rule, most, lambda: next(waiting, None)):
        assert error is None
        found[request] = ids
    return [found[request] for request in asked]


def rule(temperature: float = 1.0) -> Acceptance:
    return checked(temperature, 0.95, 0)


def read(engine: Speculator, accept: Acceptance, rows: list[Row]) -> Slots:
    reading = engine.read(rows, accept, reserved=32)
    reading.finish()
    return reading.slots


def alone(engine: Speculator, accept: Acceptance, request: Request) -> tuple[list[int], int]:
    """The answer to a request, decoded by itself, and the number of forwards after its prompt."""
    row = Row(engine.target, request.prompt, request.max_new_tokens, seed=request.seed)
    with torch.inference_mode():
        slots, steps = read(engine, accept, [row]), 0
        while not row.finish:
            slots.step()
            steps += 1
    return row.text[row.prompt :], steps


def test_what_a_failed_row_leaves_is_gone_when_its_place_is_taken():
    """Masked keys and values weigh nothing, but 0 times nan is nan."""
    target = tiny_target()
    with torch.inference_mode():
        rows = [Row(target, prompt, 32) for prompt in some_prompts(9, 12, 4)]
        first = read(Speculator(target), rule(), rows[:2])
        new = read(Speculator(target), rule(), rows[2:])
        for layer in first.cache.layers:
            layer.keys[0] = layer.values[0] = torch.nan
        first.rows[0].finish = "failed"
        first.join(new)
        kept = [pair for layer in first.cache.layers for pair in (layer.keys, layer.values)]
        assert kept and torch.stack([pair.isfinite().all() for pair in kept]).all()


GATED = [(0.0, "eagle3"), (1.0, "medusa")]
HEADS_AND_RULES = [
    *((0.0, name) for name in ("medusa", "eagle3", "block")),
    *((1.0, name) for name in VARIANTS),
]


@pytest.mark.parametrize(
    ("temperature", "name"),
    [
        pytest.param(*each, marks=[pytest.mark.thorough] * (each not in GATED))
        for each in HEADS_AND_RULES
    ],
)
@pytest.mark.usefixtures("steps")
def test_heads_accept_as_alone(name, temperature, monkeypatch):
    target, asked = tiny_target(), requests()
    plain = run(Speculator(target), rule(temperature), 1, asked)
    engine = Speculator(target, random_head(name, target))
    rows: list[int] = []
    noted(monkeypatch, rows)
    assert run(engine, rule(temperature), 4, asked) == plain
    taken = sum(rows)
    monkeypatch.undo()
    each = [alone(engine, rule(temperature), request) for request in asked]
    assert [ids for ids, _ in each] == plain
    assert taken == sum(steps for _, steps in each)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("places", [(2, 0, 1, 3), (0, 2, 1, 3, 4), (0, 1, 2)])
def test_rows_that_end_at_their_first_token_leave_before_anything_is_drafted(name, places):
    """`distill --head` died of it, at every launch again: two such rows were enough."""
    target = Target(random_model("llama"))
    asked = [Request(ids, 9) for ids in some_prompts(4, 7, 5, 1, 6)]
    plain = [alone(Speculator(target), rule(0.0), request)[0] for request in asked]
    target.eos_ids = (plain[0][0], plain[1][0])
    running = [place for place in places if place not in (0, 1)]
    assert not {plain[place][0] for place in running} & set(target.eos_ids)
    asked = [asked[place] for place in places]
    expected = [alone(Speculator(target), rule(0.0), request)[0] for request in asked]
    engine = Speculator(target, random_head(name, target))
    assert run(engine, rule(0.0), len(asked), asked) == expected


def test_compiled_rows_are_left_alone():
    """Rows join between steps; nothing is compiled for a batch that changes."""
    target, asked = tiny_target(), requests()
    engine = Speculator(target, random_head("eagle3", target), compile=True)
    plain = run(Speculator(target), rule(), 1, asked)
    assert run(engine, rule(), 4, asked) == plain


def noted(monkeypatch: Any, rows: list[int]) -> None:
    """Note how many rows are decoded in each step."""
    step = Slots.step

    def note(slots: Slots) -> Any:
        steps = step(slots)
        rows.append(len(steps))
        return steps

    monkeypatch.setattr(Slots, "step", note)


def test_most_places_decode_a_token(monkeypatch):
    engine, rows = Speculator(tiny_target()), list[int]()
    noted(monkeypatch, rows)
    run(engine, rule(), 8, requests(copies=12))
    assert sum(rows) >= 0.9 * 8 * len(rows)


def test_places_are_kept_for_the_prompts_that_wait(monkeypatch):
    """To drop finished rows copies the caches, and to add rows again, too."""
    waiting, left = requests(copies=12), list[int]()
    select = SlotCache.select

    def noted_select(cache: SlotCache, rows: Any) -> None:
        left.append(len(waiting))
        select(cache, rows)

    monkeypatch.setattr(SlotCache, "select", noted_select)
    engine = Speculator(tiny_target())
    answered = list(answer_all(engine, rule(), 8, lambda: waiting.pop() if waiting else None))
    assert len(answered) == len(requests(copies=12))
    assert left and not any(left), "rows are dropped at the end alone"


@pytest.fixture(params=["prompts", "steps"])
def small_memory(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A device on which no more than three rows find room, at first or later."""
    name = "prefill_chunks" if request.param == "prompts" else "verify"
    original, rows = getattr(Target, name), list[int]()

    def bounded(self: Target, given: Any, *more: Any) -> Any:
        rows.append(len(given if name == "prefill_chunks" else given.tokens_BN))
        if rows[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, given, *more)

    monkeypatch.setattr(Target, name, bounded)
    yield rows


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("name", [None, "eagle3"])
def test_a_batch_that_is_too_large_is_halved_and_nothing_is_lost(name, small_memory):
    target, asked = tiny_target(), requests()
    plain = run(Speculator(target), rule(), 1, asked)
    small_memory.clear()
    drafts = random_head(name, target) if name else None
    assert run(Speculator(target, drafts), rule(), 12, asked) == plain
    assert sum(rows > 3 for rows in small_memory) <= 2  # 12, 6, and then it is known


@pytest.mark.parametrize("failing", [1, 2])
def test_rows_that_cannot_join_are_decoded_again_with_all_others(failing, monkeypatch):
    """Memory may end when some caches have grown and others have not."""
    target, asked = tiny_target(), requests()
    plain = run(Speculator(target), rule(), 1, asked)
    join, calls = SlotLayer.join, count()

    def growing(self: SlotLayer, *given: Any) -> None:
        if next(calls) == failing:  # the first layer of the first join is done
            raise torch.OutOfMemoryError("CUDA out of memory")
        join(self, *given)

    monkeypatch.setattr(SlotLayer, "join", growing)
    engine = Speculator(target, random_head("eagle3", target))
    waiting = iter([*asked[:2], None, *asked[2:]])  # the batch grows from two rows to four
    outcomes = answer_all(engine, rule(), 4, lambda: next(waiting, None))
    found = {request: ids for request, ids, _ in outcomes}
    assert [found[request] for request in asked] == plain
    assert next(calls) > failing


def test_a_request_that_fails_alone_ends_with_its_error(monkeypatch):
    target, asked = tiny_target(), requests()
    plain = run(Speculator(target), rule(), 1, asked)
    bad = asked[3]
    prefill = Target.prefill_chunks

    def failing(self: Target, prompts: Any, *more: Any) -> Any:
        if any(list(prompt) == list(bad.prompt) for prompt in prompts):
            raise RuntimeError("too long")
        return prefill(self, prompts, *more)

    monkeypatch.setattr(Target, "prefill_chunks", failing)
    waiting, found = iter(asked), {}
    outcomes = answer_all(Speculator(target), rule(), 4, lambda: next(waiting, None))
    for request, ids, error in outcomes:
        found[request] = ids
        assert (error is not None) == (request is bad)
    assert [found[request] for request in asked] == [
        [] if request is bad else ids for request, ids in zip(asked, plain, strict=True)
    ]


def test_a_request_may_follow_from_an_answer():
    """As the next turn of a conversation does."""
    target = tiny_target()
    waiting = [Request(some_prompts(5)[0], 4, "first")]
    answers = []
    for request, ids, _ in answer_all(
        Speculator(target), rule(), 4, lambda: waiting.pop() if waiting else None
    ):
        answers.append(ids)
        if len(answers) < 3:
            waiting.append(Request([*request.prompt, *ids], 4, f"{len(answers)}"))
    assert len(answers) == 3 and all(answers)


def test_drafts_that_are_no_heads_are_refused():
    with pytest.raises(ValueError, match="expected draft heads or none, got other drafts"):
        run(Speculator(tiny_target(), NGram()), rule(), 4, requests())
