"""The promise: greedy output equals `generate`'s token for token, whatever is drafted, on every
architecture.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_heads import (
    DRAFTING,
    KINDS,
    Oracle,
    decode,
    drafts_of,
    make_head,
    random_head,
)
from tiny_targets import (
    CONFIGS,
    CONTEXT,
    UNEVEN,
    UNSUPPORTED,
    VOCABULARY,
    greedy,
    random_model,
    some_prompts,
    tiny_target,
)

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


@pytest.mark.parametrize("kind", DRAFTING)
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
