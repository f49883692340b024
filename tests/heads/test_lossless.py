"""The promise: greedy output equals `generate`'s token for token, whatever is drafted, on every
architecture.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_heads import (
    BLOCKS,
    EACH,
    KINDS,
    SMALL,
    Oracle,
    decode,
    drafts_of,
    make_head,
    overfitted,
    random_head,
    written_by,
)
from tiny_targets import (
    CONFIGS,
    CONTEXT,
    OTHER_LOGITS,
    UNEVEN,
    UNSUPPORTED,
    VOCABULARY,
    greedy,
    random_model,
    some_prompts,
    tiny_target,
)

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import HEADS
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree

NEW = 31  # one token from the prefill and six steps of depth 4 + 1
SHAPES = {
    "chain": StaticTree.from_widths((1, 1, 1, 1)),
    "wide": StaticTree.from_widths((3, 2, 1, 1)),
    "ragged": StaticTree(
        ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1))
    ),
}
LENGTHS = (19, 11, 5)
CAPPED = "gemma2-window"
PAIRS = [
    (name, kind)
    for name in [*CONFIGS, *UNEVEN]
    for kind in HEADS
    if kind not in ("eagle", "mtp") or name not in OTHER_LOGITS
    if (name, kind) != ("gemma4", "mtp")
]
"""EAGLE-1 and MTP heads have no last matrix of their own, and the target's gives no logits where
they are capped. Layers of Gemma 4 read more than states.
"""
TREES = {"own": None, "fixed": SHAPES["ragged"], "chain": SHAPES["chain"]}


UNLIKE = ("llama", CAPPED, "gpt2")
"""Targets that differ most: in positions, windows, logits."""


def is_thorough(name: str, kind: str, tree: str) -> bool:
    """Left to thorough runs: chains, and but where targets differ most all kinds and trees that
    read no more of the target than EAGLE-3's own. Noisy drafts take each tree on every target.
    """
    return tree == "chain" or (name not in UNLIKE and (kind, tree) != ("eagle3", "own"))


CASES = [
    pytest.param(*pair, tree, rows, marks=[pytest.mark.thorough] * is_thorough(*pair, tree))
    for pair in [*PAIRS, *(("llama", kind) for kind in BLOCKS)]
    for tree in TREES
    if tree != "chain" or pair[1].startswith("block")
    for rows in (1, 3)
    if rows == 3 or (tree == "own" and pair[0] in UNLIKE)
]
"""One row alone is decoded on every target with noisy drafts."""


@cache
def greedy_rows(name: str) -> list[list[int]]:
    """What a target writes after prompts of `LENGTHS`, and more than `NEW`, for an oracle."""
    return [greedy(tiny_target(name), prompt, NEW + 5) for prompt in some_prompts(*LENGTHS)]


@pytest.mark.parametrize(
    "shape", ["chain", pytest.param("wide", marks=pytest.mark.inside), "ragged"]
)
@pytest.mark.parametrize("name", [*CONFIGS, *UNEVEN])
def test_oracle_commits_depth_plus_one_per_step(name, shape):
    target, (prompt,) = tiny_target(name), some_prompts(LENGTHS[0])
    truth = greedy_rows(name)[0]
    oracle = lambda: Oracle(SHAPES[shape], [truth], vocab_size=VOCABULARY)  # noqa: E731
    (tokens,), (statistics,) = decode(target, oracle, [prompt], max_new_tokens=NEW)
    assert tokens == truth[:NEW]
    assert statistics.tokens_per_step == 5.0
    assert statistics.acceptance_by_depth == [1.0] * 4


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*CONFIGS, *UNEVEN])
def test_output_equals_greedy_decoding_with_noisy_drafts(name, shape, rows):
    target, prompts = tiny_target(name), some_prompts(*LENGTHS[:rows])
    truth = greedy_rows(name)[:rows]
    oracle = lambda: Oracle(SHAPES[shape], truth, vocab_size=VOCABULARY, noise=0.4, seed=3)  # noqa: E731
    tokens, statistics = decode(target, oracle, prompts, max_new_tokens=NEW)
    assert tokens == [row[:NEW] for row in truth]
    assert len({row.steps for row in statistics}) > 1 or rows == 1, (
        "rows should need different steps"
    )


@cache
def taught_head(kind: str, name: str) -> DraftHead:
    """A head that has learned a little of what the target writes after the first prompt."""
    text = written_by(tiny_target(name), some_prompts(LENGTHS[0]), NEW)
    own = {"lm_head": "own"} if name in OTHER_LOGITS else {}
    return overfitted(kind, tiny_target(name), text, updates=30, **{**SMALL, "steps": 2, **own})


@pytest.mark.parametrize(("name", "kind", "tree", "rows"), CASES)
def test_output_equals_greedy_decoding_with_real_heads(name, kind, tree, rows):
    target, prompts = tiny_target(name), some_prompts(*LENGTHS[:rows])
    head = taught_head(kind, name)
    tokens, statistics = decode(target, head, prompts, tree=TREES[tree], max_new_tokens=NEW)
    assert tokens == [row[:NEW] for row in greedy_rows(name)[:rows]]
    assert statistics[0].tokens_per_step > 2, "drafts must be kept for this to prove anything"


def test_output_is_right_where_token_zero_is_the_commonest():
    """Medusa's padding bug: short paths were padded with id 0, which was then "accepted"."""
    model = random_model("llama")
    (prompt,) = some_prompts(LENGTHS[0])
    text = greedy(Target(model), prompt, 80)
    commonest = max(set(text), key=text.count)
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[[0, commonest]] = weight[[commonest, 0]]
    target, prompt = (
        Target(model),
        [commonest if t == 0 else 0 if t == commonest else t for t in prompt],
    )
    truth = greedy(target, prompt, 80)
    assert truth.count(0) == text.count(commonest) >= 8
    for kind in HEADS:
        head = random_head(kind, target)
        assert decode(target, head, [prompt], max_new_tokens=80)[0] == [truth]
    oracle = lambda: Oracle(SHAPES["ragged"], [truth], vocab_size=VOCABULARY, noise=0.4)  # noqa: E731
    assert decode(target, oracle, [prompt], max_new_tokens=80)[0] == [truth]


@pytest.mark.parametrize("name", ["llama", "gemma3-window"])
def test_eager_attention_gives_the_same(name):
    model = random_model(name)
    model.set_attn_implementation("eager")
    target, prompts = Target(model, name=name), some_prompts(*LENGTHS)
    truth = [greedy(target, prompt, NEW) for prompt in prompts]
    oracle = lambda: Oracle(SHAPES["ragged"], truth, vocab_size=VOCABULARY, noise=0.3)  # noqa: E731
    assert decode(target, oracle, prompts, max_new_tokens=NEW)[0] == truth


def test_without_drafts_one_token_per_step():
    target, prompts = tiny_target(), some_prompts(*LENGTHS)
    tokens, statistics = decode(target, None, prompts, max_new_tokens=NEW)
    assert tokens == [greedy(target, prompt, NEW) for prompt in prompts]
    assert {row.tokens_per_step for row in statistics} == {1.0}


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_output_is_right_up_to_the_last_position_of_the_context(name):
    target, (prompt,) = tiny_target(name), some_prompts(CONTEXT - 13)
    truth = greedy(target, prompt, 13)
    oracle = lambda: Oracle(SHAPES["wide"], [truth + [0] * 5], vocab_size=VOCABULARY)  # noqa: E731
    assert decode(target, oracle, [prompt])[0] == [truth]
    for kind in HEADS:
        assert decode(target, random_head(kind, target), [prompt])[0] == [truth]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_longer_than_a_prefill_chunk_changes_no_draft(monkeypatch, kind):
    target, prompts = tiny_target("mistral-window"), some_prompts(40, 23, 7)
    truth = [greedy(target, prompt, NEW) for prompt in prompts]
    head = random_head(kind, target, layers=2, sliding_window=9)
    before = drafts_of(head, target, prompts, NEW)
    for place in ("target.model", "drafting"):  # the target's own prompt, and the head's
        monkeypatch.setattr(f"draftheads.heads.{place}.PREFILL_CHUNK", 7)
    assert decode(target, head, prompts, max_new_tokens=NEW)[0] == truth
    assert drafts_of(head, target, prompts, NEW) == before


@pytest.mark.parametrize("kind", KINDS)
def test_caches_that_are_too_small_grow_and_change_no_draft(monkeypatch, kind):
    target, prompts = tiny_target(), some_prompts(*LENGTHS)
    truth = [greedy(target, prompt, NEW) for prompt in prompts]
    head = random_head(kind, target, layers=2)
    before = drafts_of(head, target, prompts, NEW)
    make = target.new_cache
    monkeypatch.setattr(target, "new_cache", lambda batch, capacity: make(batch, 4))
    monkeypatch.setattr("draftheads.heads.drafting.ROOM", 1)
    assert decode(target, head, prompts, max_new_tokens=NEW)[0] == truth
    assert drafts_of(head, target, prompts, NEW) == before


@pytest.mark.parametrize("kind", EACH)
def test_rows_draft_in_a_batch_what_they_draft_alone(kind):
    target, prompts = tiny_target(), some_prompts(*LENGTHS)
    head = random_head(kind, target, layers=2, sliding_window=9)
    together = drafts_of(head, target, prompts, NEW)
    for row, prompt in enumerate(prompts):
        alone = drafts_of(head, target, [prompt], NEW)
        for (tokens, parents), (own_tokens, own_parents) in zip(together, alone, strict=False):
            assert tokens[row] == own_tokens[0]
            assert parents[row if len(parents) > 1 else 0] == own_parents[0]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_targets_that_cannot_roll_back_are_refused(name):
    with pytest.raises(ValueError, match="rolled back|no position_ids|cannot follow a token tree"):
        Target(random_model(name))


def test_unembed_refuses_capped_logits_with_the_reason():
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        tiny_target(CAPPED).unembed(torch.zeros(1, 32))


def test_unembed_refuses_logits_of_a_layer_after_the_last_state():
    target = tiny_target("modernbert-decoder")
    with pytest.raises(ValueError, match="another layer comes between them.*own lm_head and hard"):
        HEADS["eagle"].create(target)


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("medusa", {"lm_head": "shared"}),
        ("medusa", {"labels": "soft"}),
        ("block", {}),
        ("block", {"lm_head": "own", "labels": "soft"}),
        ("eagle3", {"labels": "soft"}),
        ("eagle", {}),
        ("eagle", {"labels": "hard"}),
    ],
)
def test_heads_that_need_uncapped_logits_are_refused_at_once_with_the_reason(kind, choices):
    with pytest.raises(ValueError, match=r"final_logit_softcapping.*own lm_head and hard labels"):
        make_head(HEADS[kind], tiny_target(CAPPED), **choices)
