"""The promise: the chunked loss is the plain one; head k learns tokens[i + k] from features[i]."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_training import VOCABULARY, random_answers, tiny_target

from draftheads.heads import losses
from draftheads.heads.base import RANKS, Batch
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target import Target
from draftheads.train.batches import Documents, Rows

DEPTH = 3


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def batch() -> Batch:
    documents = Documents.read(random_answers(12))
    rows = Rows(documents, documents.spans, 64, pack=True, seed=0)
    return rows.batch(range(len(rows)))


def make_head(target: Target, **choices) -> MedusaHead:
    head = MedusaHead.create(target, depth=DEPTH, layers=2, decay=0.7, **choices)
    torch.manual_seed(1)
    for block in head.blocks:  # zero at first; gradients of all parts are wanted
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return head


def judged(batch: Batch):
    """(row, i, k) of everything that head k learns at position i, by explicit loops."""
    rows, length = batch.tokens_BT.shape
    for row in range(rows):
        for k in range(1, DEPTH + 1):
            for i in range(length - k):
                same = batch.documents_BT[row, i] == batch.documents_BT[row, i + k]
                if same and batch.learn_BT[row, i] and batch.learn_BT[row, i + k]:
                    yield row, i, k


def plain_logits(head: MedusaHead, target: Target, feature_D, k: int):
    hidden = feature_D
    for layer in head.blocks[k - 1].layers:
        hidden = hidden + F.silu(hidden @ layer.weight.T + layer.bias)
    weight = target.model.lm_head.weight
    if head.token_map is not None:
        weight = weight[head.token_map]
    return hidden @ (head.lm_heads[k - 1].weight if head.own_lm_head else weight).T


def plain(head: MedusaHead, target: Target, batch: Batch, features_BTD):
    """Loss and rank counts, one position at a time."""
    vocabulary = list(range(VOCABULARY)) if head.token_map is None else head.token_map.tolist()
    loss = torch.zeros(())
    counts = torch.zeros(DEPTH, RANKS + 1, dtype=torch.long)
    for row, i, k in judged(batch):
        token = int(batch.tokens_BT[row, i + k])
        if token not in vocabulary:
            counts[k - 1, RANKS] += 1
            continue
        logits = plain_logits(head, target, features_BTD[row, i], k)
        place = vocabulary.index(token)
        wanted = F.one_hot(torch.tensor(place), len(vocabulary)).float()
        if head.labels == "soft":
            teacher = target.model.lm_head(features_BTD[row, i + k])
            wanted = teacher[torch.tensor(vocabulary)].softmax(-1)
        loss = loss - head.decay**k * (wanted * logits.log_softmax(-1)).sum()
        counts[k - 1, min(int((logits > logits[place]).sum()), RANKS)] += 1
    return loss, counts


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("vocabulary", [None, list(range(0, VOCABULARY, 2))])
def test_chunked_loss_equals_the_plain_one(target, batch, labels, lm_head, vocabulary, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_LOGITS", 5 * VOCABULARY)  # five positions at a time
    head = make_head(target, labels=labels, lm_head=lm_head, vocabulary=vocabulary)
    features_BTD = target.features(batch, head.feature_layers)
    got = head(batch, features_BTD, target)
    loss, counts = plain(head, target, batch, features_BTD)
    torch.testing.assert_close(got.loss, loss, rtol=1e-5, atol=1e-4)
    assert got.ranks_KR.tolist() == counts.tolist()
    expected = torch.autograd.grad(loss, list(head.parameters()))
    for name, parameter in head.named_parameters():
        assert parameter.requires_grad, name
    actual = torch.autograd.grad(got.loss, list(head.parameters()))
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_observed_ranks_are_those_of_the_token_k_places_ahead(target, batch):
    head = make_head(target)
    features_BTD = target.features(batch, head.feature_layers)
    places = [(row, i) for row, i in batch.learn_BT.nonzero().tolist()]
    expected = torch.full((len(places), DEPTH), -1)
    for row, i, k in judged(batch):
        logits = plain_logits(head, target, features_BTD[row, i], k)
        rank = int((logits > logits[batch.tokens_BT[row, i + k]]).sum())
        expected[places.index((row, i)), k - 1] = rank if rank < RANKS else -1
    assert head.observe(batch, features_BTD, target).tolist() == expected.tolist()


def test_a_batch_without_learned_tokens_still_has_gradients(target, batch):
    head = make_head(target)
    empty = Batch(
        batch.tokens_BT,
        torch.zeros_like(batch.learn_BT),
        batch.positions_BT,
        batch.documents_BT,
    )
    out = head(empty, target.features(batch, head.feature_layers), target)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())
