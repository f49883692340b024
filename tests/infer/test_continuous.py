"""The promise: continuous batching writes what a row alone would, whatever happens beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import decoding_modes
import pytest
import torch
from decoding_modes import MODES, Manner, Question
from tiny_heads import VARIANTS, random_head
from tiny_targets import some_prompts, tiny_target

from draftheads.heads.cache import SlotCache, SlotLayer
from draftheads.heads.target.model import Target
from draftheads.infer.accept import Acceptance
from draftheads.infer.continuous import Request, answer_all, checked
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


PLACES = {
    "prompts": (Target, "prefill_chunks", lambda prompts, *_: len(prompts)),
    "steps": (Target, "verify", lambda tree, *_: len(tree.tokens_BN)),
    "joins": (SlotLayer, "join", lambda *_: None),
}
"""Where memory may end, and for how many rows it is asked there."""


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize(
    ("mode", "place"),
    [
        *(("continuous", place) for place in ("prompts", "steps")),
        *(("served", place) for place in ("steps", "joins")),
    ],
)
@pytest.mark.parametrize("name", [None, "eagle3"])
def test_a_batch_that_is_too_large_is_halved_and_nothing_is_lost(name, place, mode, monkeypatch):
    """On a device on which no more than three rows find room."""
    monkeypatch.setattr(decoding_modes, "SLOTS", 12)
    target, rows = tiny_target(), list[int]()
    asked = [Question(each.prompt, each.max_new_tokens, n) for n, each in enumerate(requests())]
    manner = Manner(rule)
    plain = MODES["generate"](Speculator(target), asked, manner)
    owner, method, rows_of = PLACES[place]
    original = getattr(owner, method)

    def bounded(self: Any, *given: Any) -> Any:
        rows.append(rows_of(*given) or len(self.table.lengths))
        if rows[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, *given)

    monkeypatch.setattr(owner, method, bounded)
    drafts = random_head(name, target) if name else None
    assert MODES[mode](Speculator(target, drafts), asked, manner) == plain
    assert 1 <= sum(count > 3 for count in rows) <= 2, "12, 6, and then it is known"
