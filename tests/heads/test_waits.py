"""The promise: training never waits for the device, and long rows need no T x T masks.

On the CPU nothing waits, so operators are counted that would on a GPU: those whose result's size or
value the host must know.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_heads import EACH, new_head
from tiny_targets import VOCABULARY, tiny_target
from waits import Operators

from draftheads.heads import training_time_test
from draftheads.heads.batch import Batch
from draftheads.heads.target import packing, trial


def rows(*documents: tuple[int, ...], seed: int = 0) -> Batch:
    """Rows of random documents of these lengths, of which most tokens are learned; padded."""
    torch.manual_seed(seed)
    width = max(map(sum, documents))
    shape = (len(documents), width)
    positions_BT, documents_BT = torch.zeros(shape).long(), torch.full(shape, -1)
    learned_BT = torch.zeros(shape, dtype=torch.bool)
    for row, sizes in enumerate(documents):
        start = 0
        for number, size in enumerate([*sizes, width - sum(sizes)]):
            place = slice(start, start + size)
            positions_BT[row, place] = torch.arange(size)
            if number < len(sizes):
                documents_BT[row, place] = number
                learned_BT[row, start + 2 : start + size] = torch.rand(size - 2) < 0.9
            start += size
    return Batch(torch.randint(3, VOCABULARY, shape), learned_BT, positions_BT, documents_BT)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_a_micro_batch_waits_for_nothing(name, labels):
    target, batch = tiny_target(), rows((20, 31), (40,), (7, 30, 12))
    head = new_head(name, target, labels=labels).train()
    with Operators() as operators:
        features_BTD = target.features(batch, head.training_layers)
        loss = head(batch, features_BTD, target).loss
        loss.backward()
    assert operators.waits == [] and loss > 0


LONG = ["eagle", "eagle3", "sequential-prefix"]


def loss_and_gradients(name: str, batch: Batch, **choices: Any) -> tuple[Any, ...]:
    """As a function of the seed."""
    target = tiny_target()
    torch.manual_seed(0)
    head = new_head(name, target, labels="hard", **choices).train()
    features_BTD = target.features(batch, head.training_layers)
    torch.manual_seed(1)
    out = head(batch, features_BTD, target)
    out.loss.backward()
    gradients = [p.grad for p in head.parameters() if p.grad is not None]
    return out.loss.detach(), out.ranks_KR, *gradients


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("recompute", [False, True])
def test_long_rows_have_the_same_loss_in_chunks(name, window, recompute, monkeypatch):
    batch = rows((50, 31), (81,), (7, 30, 12), seed=2)
    choices = {} if window is None or name == "sequential-prefix" else {"sliding_window": window}
    whole = loss_and_gradients(name, batch, **choices)
    monkeypatch.setattr(training_time_test, "CHUNK", 16)
    monkeypatch.setattr("draftheads.heads.base.DraftHead.recompute", recompute)
    for part, each in zip(loss_and_gradients(name, batch, **choices), whole, strict=True):
        torch.testing.assert_close(part, each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*LONG, "block"])
@pytest.mark.parametrize("documents", ["one", "many"])
def test_a_row_twice_as_long_needs_no_more_than_twice_the_memory(name, documents, monkeypatch):
    monkeypatch.setattr(training_time_test, "CHUNK", 64)
    largest = []
    for length in (1024, 2048):
        sizes = (length,) if documents == "one" else (128,) * (length // 128)
        with Operators() as operators:
            target, batch = tiny_target(), rows(sizes)
            choices = {"steps": 3, "depth": 3, "labels": "hard", "anchors": 8}
            head = new_head(name, target, **choices).train()
            width = head.hidden_size * len(head.training_layers)
            operators.largest = 0
            head(batch, torch.randn(1, length, width), target).loss.backward()
        largest.append(operators.largest)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 2048 * 2048


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "opt"])
@pytest.mark.parametrize("size", [1, 20, 45, 60])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_long_row_has_the_features_of_a_short_one(name, size, device, monkeypatch):
    """It is computed in pieces of whole documents, or those alone."""
    monkeypatch.setattr(trial, "ALONE", {device})
    target, batch = tiny_target(name), rows((20, 31), (40,), (7, 30, 12))
    layers = [0, 1, target.layers]
    expected = target.features(batch, layers)
    monkeypatch.setattr("draftheads.heads.target.packing.PIECE", size)
    found = target.features(batch, layers)
    paired_BT = batch.positions_BT > 0
    paired_BT &= batch.documents_BT >= 0
    assert found.shape == expected.shape
    torch.testing.assert_close(found[paired_BT], expected[paired_BT], rtol=1e-3, atol=1e-4)


def test_pieces_end_with_documents():
    batch = rows((20, 31), (40,), (7, 30, 12))
    cuts = {45: [[0, 20, 51], [0, 40], [0, 37, 49]], 1: [[0, 20, 51], [0, 40], [0, 7, 37, 49]]}
    cuts[100] = [[0, 51], [0, 40], [0, 49]]
    for size, expected in cuts.items():
        spans = [(row, *span) for row, each in enumerate(expected) for span in pairwise(each)]
        assert list(packing.spans(batch, size)) == spans
