"""The promise: with a session a prompt is computed from where it differs; nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recorder import recorded
from tiny_heads import KINDS, in_turns, random_head
from tiny_targets import (
    VOCABULARY,
    generated,
    greedy,
    random_model,
    some_prompts,
    tiny_target,
)

from draftheads.heads.target.model import Target
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.infer.reading import Session
from draftheads.infer.rows import Step

NEW = 12


@contextmanager
def counted(target: Target) -> Iterator[list[int]]:
    """The number of tokens that each forward of a target reads."""
    widths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        widths.append(args[0].shape[1])

    hook = target.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield widths
    finally:
        hook.remove()


def turns(seed: int = 0) -> Iterator[tuple[list[int], int]]:
    """Prompts of a conversation, as edits of what was written so far, and when to stop each."""
    draw, text = random.Random(seed), some_prompts(9, seed=seed)[0]
    target = tiny_target()
    for stop in (99, 3, 99, 1, 99, 99):
        yield text, stop
        text = text + greedy(target, text, NEW)
        text = text[: draw.choice([len(text), len(text) - 5, 4])]  # all, less of the answer, little
        text = text + [draw.randrange(3, VOCABULARY) for _ in range(draw.choice([1, 7]))]


def drafts_of(name: str, target: Target) -> Any:
    """A head, or another drafter by its name."""
    others = {"ngram": NGram(), "model": DraftModel(tiny_target("qwen3"))}
    return others.get(name) or random_head(name, target)


def steps_of(engine: Speculator, prompt: list[int], stop: int, **options: Any) -> list[Step]:
    """The first `stop` steps of an answer."""
    steps = engine.generate(prompt, max_new_tokens=NEW, **options)
    return [step for step, _ in zip(steps, range(stop), strict=False)]


def shown(steps: list[Step]) -> list[tuple[list[int], int, int]]:
    return [(step.tokens, step.accepted, step.drafted) for step in steps]


SLOW = pytest.mark.slow
RUNS = [
    *(pytest.param(*each.values, "eager", marks=each.marks) for each in KINDS),
    *(
        pytest.param(name, way, marks=SLOW)
        for name in ("eagle3", "block", "sequential")
        for way in ("recorded", "compiled")
    ),
]


@pytest.mark.parametrize(("name", "way"), RUNS)
def test_answers_drafts_and_their_acceptance_stay_the_same(name, way, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    if way == "recorded":
        monkeypatch.setitem(RECORDERS, "cpu", recorded)
    target, session = tiny_target(), Session()
    head = random_head(name, target)
    plain, engine = (Speculator(target, head, compile=each) for each in (False, way == "compiled"))
    plain.maker.recorder = None
    for prompt, stop in turns():
        expected = steps_of(plain, prompt, stop)
        assert shown(steps_of(engine, prompt, stop, session=session)) == shown(expected)


def test_only_what_is_new_is_computed():
    target, session = tiny_target(), Session()
    engine = Speculator(target, random_head("eagle3", target))
    [prompt] = some_prompts(40)
    answer = steps_of(engine, prompt, 99, session=session)
    assert session.reused == 0
    written = [token for step in answer for token in step.tokens]
    seen = len(prompt) + len(written) - len(answer[-1].tokens)
    with counted(target) as widths:
        steps_of(engine, [*prompt, *written, 5, 6, 7], 99, session=session)
    assert session.reused == seen
    assert widths[0] == len(prompt) + len(written) + 3 - seen + 1


def test_a_draft_model_reads_only_what_is_new():
    model, session = Target(tiny_target("qwen3").model), Session()
    engine = Speculator(tiny_target(), DraftModel(model))
    [prompt] = some_prompts(40)
    steps_of(engine, prompt, 99, session=session)
    with counted(model) as widths:
        steps_of(engine, [*prompt, 5, 6, 7], 99, session=session)
    assert widths[0] <= 5


@pytest.mark.parametrize("place", ["drafting", "verifying"])
def test_a_step_that_is_interrupted_spoils_nothing(place, monkeypatch):
    target, session = tiny_target(), Session()
    engine = Speculator(target, random_head("eagle3", target))
    [prompt] = some_prompts(9)
    steps = engine.generate(prompt, max_new_tokens=NEW, session=session)
    next(steps), next(steps)
    with monkeypatch.context() as patch:
        owner, name = (
            (session.slots.drafter, "propose") if place == "drafting" else (target, "verify")
        )
        done = getattr(owner, name)

        def interrupted(*given: Any) -> Any:
            done(*given)
            raise KeyboardInterrupt

        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    longer = [*prompt, *greedy(target, prompt, NEW), 4]
    again = steps_of(engine, longer, 99, session=session)
    assert session.reused >= len(prompt)
    assert shown(again) == shown(steps_of(engine, longer, 99))


def test_another_engine_starts_anew():
    target, session = tiny_target(), Session()
    [prompt] = some_prompts(9)
    for engine in (Speculator(target), Speculator(target, random_head("medusa", target))):
        steps = steps_of(engine, prompt, 99, session=session)
        assert session.reused == 0
        assert [t for step in steps for t in step.tokens] == greedy(target, prompt, NEW)


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_two_live_generations_cannot_share_a_session(name):
    """The first one went on with other tokens, in silence."""
    target, session = tiny_target(), Session()
    engine = Speculator(target, random_head(name, target))
    first, second = some_prompts(9, 12)
    one = engine.generate(first, max_new_tokens=NEW, session=session)
    two = engine.generate(second, max_new_tokens=NEW, session=session)
    next(one), next(one)
    written = next(two).tokens
    with pytest.raises(ValueError, match="session of a generation for it alone, .* a Session"):
        next(one)
    written += [token for step in two for token in step.tokens]
    assert written == greedy(target, second, NEW)
    again = steps_of(engine, [*second, *written, 4], 99, session=session)
    assert session.reused > len(second)
    assert shown(again) == shown(steps_of(engine, [*second, *written, 4], 99))


GROWING = ("eagle3", "block", "medusa")


@pytest.mark.mend("the whole context is not reserved")
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, "plain") for name in GROWING),
        ("eagle3", "recorded"),
        *(pytest.param(name, "recorded", marks=SLOW) for name in GROWING if name != "eagle3"),
        *(pytest.param(name, "compiled", marks=SLOW) for name in GROWING),
    ],
)
def test_caches_grow_with_their_text_and_shrink_when_it_is_cut(name, steps, monkeypatch):
    """The whole context is not reserved for an answer that may be that long, nor kept after it."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    if steps == "recorded":
        monkeypatch.setitem(RECORDERS, "cpu", recorded)
        monkeypatch.setattr(compiled, "BUCKET", 4)
    for place in ("heads.cache", "heads.drafting", "infer.engine"):
        monkeypatch.setattr(f"draftheads.{place}.ROOM", 2)
    target, session, [prompt] = tiny_target(), Session(), some_prompts(6)
    engine = Speculator(target, random_head(name, target), compile=steps == "compiled")
    capacities: list[int] = []
    for _ in range(2):  # the second time from slots that were given back
        answer = engine.generate(prompt, max_new_tokens=90, session=session)
        tokens = list(next(answer).tokens)
        capacities.append(session.slots.cache.table.capacity)
        tokens += [token for step in answer for token in step.tokens]
        assert tokens == greedy(target, prompt, 90)[: len(tokens)]
        assert len(tokens) == 90 or tokens[-1] in target.eos_ids
        if len(tokens) > 60:
            assert session.slots.cache.table.capacity > 60
        prompt = [*prompt[:5], 9]
    nodes = engine.tree.nodes
    assert max(capacities) <= (len(prompt) + 2 + nodes) * 4, "not 90"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target_name", "name"),
    [
        *(pytest.param("llama", *each.values, marks=each.marks) for each in KINDS),
        *(("mistral-window", name) for name in ("medusa", "eagle3")),
        ("mistral-window", "block"),
        *(("llama", name) for name in ("ngram", "model")),
    ],
)
def test_a_prompt_that_is_read_in_turns_changes_nothing(name, target_name):
    target, session = tiny_target(target_name), Session()
    engine = Speculator(target, drafts_of(name, target))
    for prompt, stop in turns():
        expected = shown(steps_of(engine, prompt, stop))
        for chunk, kept in ((1, None), (5, session), (99, None)):
            steps = list(in_turns(engine, prompt, NEW, chunk, kept))
            read = steps.count(None)
            assert shown(steps[read:][:stop]) == expected
            assert steps[:read] == [None] * read, "before the first token"
            if kept is None:
                assert read == (len(prompt) - 1) // chunk


@pytest.mark.parametrize("name", ["medusa", "eagle3", "block"])
def test_a_copy_of_a_beginning_has_its_keys_alone_and_leaves_the_owner_as_it_was(name):
    target, owner, [prompt] = tiny_target(), Session(), some_prompts(40)
    engine = Speculator(target, random_head(name, target))
    steps_of(engine, prompt, 3, session=owner)
    layers = [layer for cache in owner.slots.caches for layer in cache.layers]
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    copy = Session()
    copy.slots = engine.new_slots(1)
    copy.slots.take(owner.slots, owner.slots.rows[0], 20)
    copies = [layer for cache in copy.slots.caches for layer in cache.layers]
    for layer, (keys, values) in zip(copies, before, strict=True):
        assert layer.keys.shape[2] == 20, "however long the owner's text is"
        assert torch.equal(layer.keys, keys[:, :, :20])
        assert torch.equal(layer.values, values[:, :, :20])
    other = [*prompt[:20], 3, 4, 5]
    assert shown(steps_of(engine, other, 99, session=copy)) == shown(steps_of(engine, other, 99))
    assert copy.reused == 20
    for layer, (keys, values) in zip(layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_a_prompt_given_up_halfway_leaves_the_session_right():
    target, session, [prompt] = tiny_target(), Session(), some_prompts(23)
    engine = Speculator(target, random_head("eagle3", target))
    for stop, reused in ((2, 0), (3, 8)):
        steps = in_turns(engine, prompt, NEW, 4, session)
        for _ in range(stop):
            assert next(steps) is None
        assert session.reused == reused, "what was read is kept"
        del steps
    assert shown(steps_of(engine, prompt, 99, session=session)) == shown(
        steps_of(engine, prompt, 99)
    )


@pytest.mark.mend("masks, keys and compiled steps of the dtype that a target had before")
@pytest.mark.mend("wrong texts of a user's own model that was moved to another dtype")
@pytest.mark.parametrize("drafts", ["ngram", "model", "eagle3"])
def test_a_target_that_was_moved_decodes_in_its_new_dtype(drafts):
    """Also with an engine and a session of before."""
    target, [prompt] = Target(random_model("llama")), some_prompts(9)
    source = DraftModel(target) if drafts == "model" else drafts_of(drafts, target)
    engine, session = Speculator(target, source), Session()
    text = prompt
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        target.model.to(dtype)
        steps = engine.generate(text, max_new_tokens=NEW, session=session)
        answer = [token for step in steps for token in step.tokens]
        assert answer == generated(target, text, NEW)
        text = text + answer
        assert session.reused == 0
