"""The promise: every learned token is trained on once per epoch, documents do not see each other,
and a step's rows do not depend on how many processes share them.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiny_training import random_answers, tiny_target

from draftheads.heads.batch import Batch
from draftheads.train.batches import DataAmount, Documents, Order, Rows, share
from draftheads.train.data.answers import Answer

LENGTH = 48
SPLIT_OF_20 = [3, 11, 13, 19]
"""Which documents runs have held out of 20 since there were runs."""


@pytest.fixture(scope="module")
def documents() -> Documents:
    return Documents.read(random_answers(50))


def sides(documents: Documents, heldout: float) -> tuple[list[Any], list[Any]]:
    train, apart = documents.split(heldout)
    return train.tolist(), apart.tolist()


def whole(rows: Rows) -> Batch:
    return rows.batch(range(len(rows)))


def test_rows_look_like_this():
    answers = [Answer([11, 12, 13, 14], [(1, 4)]), Answer([21, 22, 23], [(1, 2)])]
    documents = Documents.read(answers)
    batch = Rows(documents, documents.spans, 9, pack=True, seed=2).batch([0])
    tall = Rows(Documents.read(answers[:1] * 3), [(0, 4), (4, 8), (8, 12)], 9, pack=True, seed=0)
    order = [answers[n] for n in (0, 1)]
    if batch.tokens_BT[0, 0] == 21:
        order.reverse()
    tokens = [token for answer in order for token in answer.tokens]
    assert batch.tokens_BT.tolist() == [tokens]
    first = len(order[0].tokens)
    assert batch.positions_BT.tolist() == [[*range(first), *range(7 - first)]]
    assert batch.documents_BT.tolist() == [[0] * first + [1] * (7 - first)]
    padded = tall.batch([0, 1])
    assert padded.tokens_BT[1].tolist() == [11, 12, 13, 14, 0, 0, 0, 0]
    assert padded.loss_mask_BT[1].int().tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert padded.positions_BT[1].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert padded.documents_BT[1].tolist() == [0, 0, 0, 0, -1, -1, -1, -1]


def test_packed_features_equal_those_of_a_document_alone(documents):
    target = tiny_target()
    rows = Rows(documents, documents.spans[:12], LENGTH, pack=True, seed=0)
    batch = whole(rows)
    features_BTD = target.features(batch, [-1])
    seen = 0
    for row in range(len(rows)):
        end = 0
        for start, stop in rows.pieces(row):
            ids = torch.tensor(documents.tokens(start, stop).tolist())[None]
            with torch.no_grad():
                states = target.model.model(ids, use_cache=False).last_hidden_state[0]
            got = features_BTD[row, end + 1 : end + stop - start]  # the law: state i predicts i + 1
            torch.testing.assert_close(got, states[:-1], rtol=1e-5, atol=1e-5)
            end += stop - start
            seen += 1
    assert seen == 12
    assert len(rows) < 12, "some rows must hold several documents for this to mean anything"


def test_an_epoch_is_every_row_once():
    order = Order(rows=21, rows_per_step=7, seed=5)
    epochs = [[row for s in (0, 1, 2) for row in order.step(3 * e + s)] for e in range(3)]
    assert all(sorted(epoch) == list(range(21)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order.steps(2) == 6


def test_processes_and_accumulation_only_divide_a_step():
    order = Order(rows=100, rows_per_step=16, seed=1)
    for step in (0, 6, 1000):
        rows = order.step(step)
        assert rows == Order(100, 16, 1).step(step), "nothing is remembered between steps"
        for world, size in itertools.product([1, 2, 4], [1, 2, 4]):
            parts = [share(rows, size, rank, world) for rank in range(world)]
            assert len({len(part) for part in parts}) == 1
            numbered = sorted(micro for part in parts for micro in part)
            assert [number for number, _ in numbered] == list(range(len(rows) // size))
            assert [row for _, micro in numbered for row in micro] == rows


@pytest.mark.parametrize(
    ("reading", "asked", "per_batch", "rows", "is_noted"),
    [
        (DataAmount(None, 256, None, 2), 4096, 4, 16, False),
        (DataAmount(None, 256, None, 1), 5000, 4, 20, True),
        (DataAmount(None, 256, None, 1), 10, 4, 4, True),
        (
            DataAmount(10**6, 2048, 2.0, 1),
            None,
            8,
            32,
            False,
        ),  # the greatest that follows from data
        (DataAmount(None, 2048, 2.0, 1), None, 8, 32, False),
        (DataAmount(22, 2048, 2.0, 1), None, 8, 1, True),  # 300 answers of 150 tokens
        (DataAmount(22, 2048, 2.0, 2), None, 8, 2, True),
        (DataAmount(600, 2048, 4.0, 1), None, 8, 24, True),
        (DataAmount(22, 2048, 2.0, 1), 131072, 8, 16, True),
        (DataAmount(22, 2048, 0.2, 1), 131072, 8, 4, True),
        (DataAmount(22, 2048, None, 1), None, 8, 16, True),
        (DataAmount(5, 2048, 2.0, 2), 131072, 8, 4, True),
        (DataAmount(1, 64, 0.1, 1), 64, 1, 1, False),
    ],
)
def test_rows_of_a_step_follow_from_the_data_and_changes_are_said(
    reading, asked, per_batch, rows, is_noted
):
    count, said = reading.rows_per_step(asked, per_batch)
    assert count == rows
    assert said.startswith(f"run.tokens_per_step: using {rows * reading.length}") is is_noted
    assert bool(said) is is_noted
    if reading.rows:
        order = Order(reading.rows, count, 0)
        assert len(set(order.step(0))) == count, "no row twice"
        assert len(share(order.step(0), per_batch, 0, reading.world)) >= 1


def test_no_more_passes_are_made_than_asked_for():
    for rows, step, epochs in itertools.product([16, 22, 37], [1, 3, 8, 16], [1, 2, 0.5, 3]):
        steps = Order(rows, step, 0).steps(epochs)
        assert steps == 1 or steps * step <= epochs * rows < (steps + 1) * step
    assert Order(100, 1, 0).steps(0.29) == 29


@pytest.mark.parametrize(
    ("reading", "rows", "steps", "is_warned"),
    [
        (DataAmount(600, 2048, 2.0, 1), 64, 18, True),
        (DataAmount(600, 2048, 2.0, 1), 24, 50, False),
        (DataAmount(600, 2048, None, 1), 64, 5, False),  # as many as were asked for
    ],
)
def test_a_run_of_few_steps_is_warned_of(reading, rows, steps, is_warned):
    said = reading.warning(steps, rows)
    assert bool(said) is is_warned
    if is_warned:
        assert said.startswith("warning: 18 steps of 131072 tokens are few to learn from; distill")


def test_more_processes_than_rows_are_refused():
    with pytest.raises(ValueError, match="for each of 4 processes, got 3 rows; use fewer proc"):
        DataAmount(3, 64, 1.0, 4).rows_per_step(None, 1)


def test_a_run_goes_on_only_where_its_step_can_be_shared_evenly():
    assert share(range(16), 2, 7, 8) == [(7, [14, 15])]
    with pytest.raises(ValueError, match=r"that processes \(4\) .* divide evenly, got 12"):
        share(range(12), 2, 0, 4)


def test_a_digest_names_the_tokens_and_what_is_learned(documents):
    assert documents.digest() == Documents.read(random_answers(50)).digest()
    other = random_answers(50)
    first = other[0]
    first.tokens[-1] = (first.tokens[-1] + 1) % 97
    assert documents.digest() != Documents.read(other).digest()
    learned = [Answer(other[0].tokens, [(1, 2)]), *random_answers(50)[1:]]
    assert Documents.read(other).digest() != Documents.read(learned).digest()


def test_heldout_documents_are_apart_and_always_the_same(documents):
    train, apart = sides(documents, 0.1)
    assert len(apart) == 5
    assert sorted(train + apart) == documents.spans.tolist()
    assert sides(documents, 0.1) == (train, apart)
    assert len(documents.split(0.001)[1]) == 1
    single = Documents.read(random_answers(1))
    assert sides(single, 0.02) == (single.spans.tolist(), single.spans.tolist())
    pair = Documents.read(random_answers(2))
    assert [len(part) for part in pair.split(0.5)] == [1, 1]


def test_single_documents_are_divided_as_ever():
    documents = Documents.read(random_answers(20))
    apart = sides(documents, 0.2)[1]
    assert [documents.spans.tolist().index(span) for span in apart] == SPLIT_OF_20
