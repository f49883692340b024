"""The promise: a sequential head computes what a slow restatement of the papers does: in training
its loss, ranks and every gradient, in drafting every tree, whichever way its levels are computed.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from plain_drafting import (
    DEPTH,
    drafts_of,
    plain_drafts,
    two_texts,
)
from plain_eagle import plain_loss, plain_rank
from plain_hydra import PlainSequential, awake
from plain_losses import assert_equal
from tiny_heads import make_head
from tiny_targets import VOCABULARY

from draftheads.heads.batch import Batch
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.losses import RANKS
from draftheads.heads.sequential import CONDITIONINGS, SequentialHead
from draftheads.heads.target.model import Target

ODD = list(range(1, VOCABULARY, 2))
RANK = 6
SIZES: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 24, "rope_theta": 20.0,
}  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {
    "hard": {},
    "soft": {"labels": "soft", "layers": 2},
    "shared": {"lm_head": "shared", "labels": "soft"},
    "reduced": {"vocabulary": ODD, "labels": "soft"},
    "shared and reduced": {"lm_head": "shared", "vocabulary": ODD, "layers": 2, "decay": 0.5},
    "raw embeddings": {"normed": False},
}

# Three documents, and two tokens of padding; l marks what is learned.
#     A  A  A  A  A  A  B  B  B  B  B
#           l  l  l  l     l  l  l  l
#     C  C  C  C  C  C  C  C  C  -  -
#        l  l  l     l  l  l  l
LEARN = [[0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0]]
POSITIONS = [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]]
DOCUMENTS = [[0] * 6 + [1] * 5, [0] * 9 + [-1] * 2]
JUDGED = [11, 7, 3]  # at each depth, counted by hand


@pytest.fixture(scope="module")
def batch() -> Batch:
    tokens_BT = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(4))
    loss_mask_BT = torch.tensor(LEARN).bool()
    return Batch(tokens_BT, loss_mask_BT, torch.tensor(POSITIONS), torch.tensor(DOCUMENTS))


def new_head(target: Target, conditioning: str, prefix: bool, **choices: Any) -> SequentialHead:
    normed = choices.pop("normed", True)
    rank = None if conditioning == "hydra" else RANK
    sizes = {**SIZES, "prefix": True} if prefix else {}
    head = make_head(
        SequentialHead,
        target,
        conditioning=conditioning,
        depth=DEPTH,
        rank=rank,
        **sizes,
        **choices,
    )
    head.normed = normed
    return awake(head)


def plain_training(head: SequentialHead, batch: Batch, features_BTD, target: Target):
    """(loss, ranks_KR, weights) of the restatement."""
    plain = PlainSequential(head, target)
    loss = torch.zeros((), dtype=torch.float64)
    ranks_KR = torch.zeros(DEPTH, RANKS + 1, dtype=torch.long)
    for row, document in [(0, 0), (0, 1), (1, 0)]:
        places = [i for i, number in enumerate(DOCUMENTS[row]) if number == document]
        inputs = plain.inputs(features_BTD[row, places])
        tokens, learned = batch.tokens_BT[row, places].tolist(), batch.loss_mask_BT[row, places]
        for root, k in product(range(1, len(tokens)), range(1, DEPTH + 1)):
            if root + k >= len(tokens) or not all(learned[root : root + k + 1]):
                continue
            logits_v = plain.logits(inputs[root], tokens[root : root + k])
            came = tokens[root + k]
            ranks_KR[k - 1, plain_rank(logits_v, came, plain.vocabulary)] += 1
            teacher = came
            if head.choices.labels == "soft":
                feature_D = features_BTD[row, places[root + k]].double()
                teacher = target.model.lm_head.weight.double() @ feature_D
            loss = loss + head.choices.decay**k * plain_loss(logits_v, teacher, plain.vocabulary)
    return loss, ranks_KR, plain.weights


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("prefix", [False, True], ids=["alone", "prefix"])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_training_equals_its_restatement(target, batch, conditioning, prefix, choices):
    head = new_head(target, conditioning, prefix, **choices)
    features_BTD = target.features(batch, head.training_layers)
    got = head(batch, features_BTD, target)
    assert_equal(head, got, *plain_training(head, batch, features_BTD, target))
    assert got.ranks_KR.sum(1).tolist() == JUDGED


PER_TOKEN = DEPTH * RANK * 4  # bytes
KEPT = [VOCABULARY * PER_TOKEN, (VOCABULARY - 1) * PER_TOKEN, 0]


@pytest.mark.parametrize(
    "choices", [{}, {"lm_head": "shared", "layers": 2}, {"vocabulary": ODD}, {"normed": False}],
    ids=["own", "shared", "reduced", "raw embeddings"],
)  # fmt: skip
@pytest.mark.parametrize("prefix", [False, True], ids=["alone", "prefix"])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@torch.no_grad()
def test_drafting_equals_its_restatement(target, monkeypatch, conditioning, prefix, choices):
    """However much is kept of the products that all steps share."""
    tokens_BT, features_BTD = two_texts()
    expected = None
    for kept in KEPT:
        monkeypatch.setattr("draftheads.heads.sequential.KEPT_BYTES", {"cpu": kept})
        head = new_head(target, conditioning, prefix, **choices).eval()
        plain = PlainSequential(head, target)
        expected = expected or plain_drafts(plain, tokens_BT, features_BTD)
        words = len(plain.vocabulary)
        if conditioning != "hydra":
            products, is_thin = head.products(target), kept >= words * PER_TOKEN
            assert (products.codes_Vr is None) == (kept < KEPT[0])
            assert (products.logits_rv is None) == (not is_thin)
        assert drafts_of(head, target, tokens_BT, features_BTD) == expected


def test_a_recurrent_head_of_depth_one_is_read_back(target, tmp_path):
    folder = save_head(make_head(SequentialHead, target, depth=1), tmp_path / "head", target=target)
    assert load_head(folder, target=target).config()["conditioning"] == "recurrent"
