"""The promise: random heads of every kind draft at any shape, and what a step reads is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftheads.infer.engine import Speculator
from draftheads.scripts.benchmarks.random_models import (
    KINDS,
    SHAPES,
    Reads,
    create_head,
    create_target,
)
from draftheads.scripts.benchmarks.shapes import tree_of

TINY = replace(SHAPES["tiny"], draft_vocab=13, rank=5, depth=3)


@pytest.fixture(scope="module")
def target():
    return create_target(TINY)


@pytest.mark.parametrize("kind", KINDS)
def test_all_weights_are_drawn_and_every_kind_drafts(target, kind):
    head = create_head(kind, TINY, target)
    assert all(0 < p.detach().std() < 0.1 for p in head.parameters() if p.numel() > 9)
    engine = Speculator(target, head, tree=tree_of(kind, 6, head.depth))
    steps = list(engine.generate([5, 7, 9], max_new_tokens=9))
    assert [step.drafted for step in steps[1:]] == [6] * len(steps[1:])
    if kind != "eagle":  # guesses with the target's own matrix
        assert len(set(head.token_map.tolist())) == 13


def test_reads_counts_what_stood_before():
    weight_VD, rows = torch.randn(10, 6), torch.tensor([[1, 2]])
    matrix, row = 10 * 6 * 4, 6 * 4
    with Reads() as reads:
        embedded = torch.nn.functional.embedding(rows, weight_VD)
        assert reads.bytes == 2 * row
        made = embedded @ weight_VD.T
        assert reads.bytes == 2 * row + matrix
        made.softmax(-1)
        assert reads.bytes == 2 * row + matrix, "what was made counts not at all"
        embedded @ weight_VD[:5].T
    assert reads.bytes == 2 * row + matrix + matrix // 2
