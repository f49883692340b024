"""The promise: output ends exactly where it should, in every row, and steps add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding_modes import written
from tiny_heads import Made, Oracle, random_head
from tiny_targets import VOCABULARY, greedy, random_model, some_prompts, tiny_target

from draftheads.heads.formats.hub import HEADS
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.engine import Speculator
from draftheads.infer.rows import Statistics

SHAPE = StaticTree.from_widths((2, 1, 1, 1))


def ending_with(eos) -> Target:
    """The tiny Llama with these end tokens in its generation config."""
    model = random_model("llama")
    model.generation_config.eos_token_id = eos
    return Target(model)


def oracle_for(prompts, new: int = 60):
    """A drafter that knows what the tiny Llama writes without any end token."""
    truth = [greedy(tiny_target(), prompt, new) for prompt in prompts]
    return truth, Made(lambda: Oracle(SHAPE, truth, vocab_size=VOCABULARY))


def test_rows_end_independently():
    prompts = some_prompts(9, 4, 13)
    truth, oracle = oracle_for(prompts)
    end = truth[0][7]
    expected = [row[: row.index(end) + 1] if end in row[:30] else row[:30] for row in truth]
    assert len({len(row) for row in expected}) > 1
    rows = [[] for _ in prompts]
    finishes = {}
    for steps in Speculator(ending_with(end), oracle).generate_batch(prompts, max_new_tokens=30):
        for row, step in enumerate(steps):
            assert (step is None) == (row in finishes), (
                "one step per running row, none after its end"
            )
            if step is not None:
                rows[row] += step.tokens
                if step.finish:
                    finishes[row] = step.finish
    assert rows == expected
    assert finishes == {row: "eos" if t[-1] == end else "length" for row, t in enumerate(expected)}


@pytest.mark.mend("a program that left a generation ended with a traceback")
def test_a_generation_that_waits_at_the_end_of_a_program_asks_nothing_of_torch(monkeypatch):
    """By then its modules are gone; Python would print a traceback."""
    steps = Speculator(tiny_target()).generate([1, 2], max_new_tokens=9)
    next(steps)

    def gone(*_: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'is_scripting'")

    monkeypatch.setattr(torch.autograd.grad_mode.inference_mode, "__init__", gone)
    steps.close()


def test_ids_of_numpy_and_torch_are_taken():
    (prompt,) = some_prompts(9)
    expected = [greedy(tiny_target(), prompt, 5)]
    for ids in (np.array(prompt), list(np.array(prompt)), torch.tensor(prompt)):
        steps = Speculator(tiny_target()).generate(ids, max_new_tokens=np.int64(5))
        assert [[t for step in steps for t in step.tokens]] == expected


def slots_of(monkeypatch, target: Target) -> list:
    """The caches that a target makes from now on."""
    caches, make = [], target.new_cache
    monkeypatch.setattr(
        target, "new_cache", lambda *sizes: caches.append(make(*sizes)) or caches[-1]
    )
    return caches


def test_without_a_bound_the_cache_grows_with_the_text(monkeypatch):
    model = random_model("llama")
    model.config.max_position_embeddings = 1 << 30  # keys and values of all of it fit nowhere
    target, (prompt,) = Target(model), some_prompts(9)
    caches = slots_of(monkeypatch, target)
    truth = greedy(target, prompt, 60)
    monkeypatch.setattr("draftheads.infer.engine.ROOM", 8)
    oracle = Made(lambda: Oracle(SHAPE, [truth + [0] * 4], vocab_size=VOCABULARY))
    written, capacities = [], []
    for step in Speculator(target, oracle, tree=SHAPE).generate(prompt):
        written += step.tokens
        capacities.append(caches[0].layers[0].keys.shape[2])
        if len(written) >= 60:
            break
    assert written[:60] == truth
    assert capacities[0] == len(prompt) + 8 + SHAPE.nodes
    assert len(prompt) + 60 <= capacities[-1] < 2 * (len(prompt) + 60)


def test_with_a_bound_the_cache_is_allocated_once(monkeypatch):
    target, (prompt,) = Target(random_model("llama")), some_prompts(9)
    caches = slots_of(monkeypatch, target)
    stores = set()
    for _ in Speculator(target).generate(prompt, max_new_tokens=40):
        stores.add(caches[0].layers[0].keys.data_ptr())
    assert len(stores) == 1 and caches[0].layers[0].keys.shape[2] == 9 + 40 + 1


def test_steps_add_up():
    prompts = some_prompts(9)
    (truth,), _ = oracle_for(prompts)
    noisy = Oracle(SHAPE, [truth], vocab_size=VOCABULARY, noise=0.3, seed=2)
    statistics, written = Statistics(), 0
    engine = Speculator(tiny_target(), Made(lambda: noisy))
    for step in engine.generate(prompts[0], max_new_tokens=40):
        statistics.add(step)
        written += len(step.tokens)
    assert written == 40 == statistics.tokens + 1, "the prefill's token is not a step's"
    by_depth = statistics.acceptance_by_depth
    assert by_depth == sorted(by_depth, reverse=True)
    # the last step may be cut, so it gives at most what was accepted
    assert statistics.tokens_per_step <= 1 + sum(by_depth) < statistics.tokens_per_step + 1


@pytest.mark.parametrize("kind", HEADS)
def test_an_empty_tree_drafts_nothing(kind):
    target, (prompt,) = tiny_target(), some_prompts(9)
    engine = Speculator(target, HEADS[kind].create(target), tree=StaticTree(()))
    steps = list(engine.generate(prompt, max_new_tokens=8))
    assert [t for step in steps for t in step.tokens] == greedy(target, prompt, 8)
    assert {len(step.tokens) for step in steps} == {1}


def test_the_target_is_frozen_and_no_part_of_a_head():
    target = tiny_target()
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not isinstance(target, torch.nn.Module)


@pytest.mark.parametrize("kind", HEADS)
def test_rows_that_have_ended_are_not_computed(kind, monkeypatch):
    """And the others write what they would write alone, with caches of the head's own, too."""
    target = tiny_target()
    head, prompts = random_head(kind, target), some_prompts(9, 4, 13)
    truth = [greedy(target, prompt, 40) for prompt in prompts]
    end = truth[1][7]
    monkeypatch.setattr(target, "eos_ids", (end,))
    expected = [row[: row.index(end) + 1] if end in row else row for row in truth]
    sizes, verify = [], target.verify
    monkeypatch.setattr(
        target, "verify", lambda tree, *a: sizes.append(len(tree.tokens_BN)) or verify(tree, *a)
    )
    assert written(Speculator(target, head), prompts, max_new_tokens=40) == expected
    assert sizes[0] == 3 and sizes[-1] == 1 and sizes == sorted(sizes, reverse=True)
