"""The promise: unrolled training computes what a slow restatement of the papers does, position by
position: loss, ranks and every gradient.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from plain_eagle import PlainEagle, PlainEagle3, awake, plain_loss, plain_rank, plain_unroll
from plain_losses import LLAMA3, assert_equal
from tiny_heads import make_head
from tiny_targets import VOCABULARY
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftheads.heads.batch import Batch
from draftheads.heads.eagle import SWITCHES, Eagle3Head, EagleHead
from draftheads.heads.layers import Rope, rotate
from draftheads.heads.losses import RANKS
from draftheads.heads.target.model import Target
from draftheads.heads.training_time_test import RowMemory, Sight, UnrolledMemory
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer

STEPS = 4
ODD = list(range(1, VOCABULARY, 2))
SIZES: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 24,
    "rope_theta": 20.0, "steps": STEPS, "depth": 3, "top_k": 4, "nodes": 6,
}  # fmt: skip
EAGLE3 = {**SIZES, "feature_layers": [0, 2, 3], "vocabulary": ODD, "decay": 0.8}
SCALINGS = [
    None,
    LLAMA3,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
]


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Rows of 13 and 11 tokens: packed documents, unlearned prompts, one answer of two turns."""
    spans = {8: [(2, 8)], 5: [(3, 5)], 11: [(1, 4), (6, 11)]}
    generator = torch.Generator().manual_seed(4)
    answers = [
        Answer(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist(), learn)
        for length, learn in spans.items()
    ]
    documents = Documents.read(answers)
    rows = Rows(documents, documents.spans, 13, pack=True, seed=0)
    batch = rows.batch(range(len(rows)))
    assert sorted(rows.sizes) == [11, 13]
    return batch


def eagle3_by_hand(head: Eagle3Head, batch: Batch, features_BTD, target: Target):
    """(loss, ranks_KR, weights) of the restatement."""
    plain, steps = PlainEagle3(head), head.choices.steps
    is_soft = head.has_soft_labels
    vocabulary = list(range(VOCABULARY)) if head.token_map is None else head.token_map.tolist()
    width = head.fc.in_features
    said = plain_unroll(plain, batch, features_BTD[..., :width], target, steps)
    loss = torch.zeros((), dtype=torch.float64)
    ranks_KR = torch.zeros(steps, RANKS + 1, dtype=torch.long)
    for (row, root, step), hidden in said.items():
        place = root + step + 1
        token = int(batch.tokens_BT[row, place])
        logits = plain.linear("lm_head", plain.state(hidden))
        ranks_KR[step, plain_rank(logits, token, vocabulary)] += 1
        last_state = features_BTD[row, place, width:].double()
        teacher = target.model.lm_head.weight.double() @ last_state if is_soft else token
        weight = head.choices.decay**step / sum(head.choices.decay**k for k in range(steps))
        loss = loss + weight * plain_loss(logits, teacher, vocabulary)
    return loss, ranks_KR, plain.weights


def eagle_by_hand(head: EagleHead, batch: Batch, features_BTD, target: Target):
    """(loss, ranks_KR, weights) of the restatement."""
    plain, steps = PlainEagle(head), head.choices.steps
    everything = list(range(VOCABULARY))
    lm_head_VD = target.model.lm_head.weight.double()
    loss = torch.zeros((), dtype=torch.float64)
    ranks_KR = torch.zeros(steps, RANKS + 1, dtype=torch.long)
    for (row, root, step), hidden in plain_unroll(
        plain, batch, features_BTD, target, steps
    ).items():
        place = root + step + 1
        token, feature = int(batch.tokens_BT[row, place]), features_BTD[row, place].double()
        logits = lm_head_VD @ hidden
        ranks_KR[step, plain_rank(logits, token, everything)] += 1
        teacher = lm_head_VD @ feature if head.choices.labels == "soft" else token
        weight = head.choices.decay**step / sum(head.choices.decay**k for k in range(steps))
        loss = loss + weight * plain_loss(logits, teacher, everything)
    return loss, ranks_KR, plain.weights


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "full vocabulary": {"vocabulary": None},
    "no groups": {"kv_heads": 4},
    "one group": {"kv_heads": 1},
    "two layers": {"layers": 2},
    "window": {"sliding_window": 3},
    "window of one": {"sliding_window": 1},
    "two layers and a window": {"layers": 2, "sliding_window": 3},
    "llama3 rope": {"rope_scaling": LLAMA3},
    "hard labels": {"labels": "hard"},
    "last features only": {"feature_layers": [3]},
    "one step": {"steps": 1},
    "decay": {"decay": 0.5},
    **{switch: {switch: True} for switch in (*SWITCHES, "qk_norm")},
    "all switches, two layers": {
        "layers": 2,
        "qk_norm": True,
        "unchecked": dict.fromkeys(SWITCHES, True),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3_equals_its_restatement(target, batch, variant):
    head = awake(make_head(Eagle3Head, target, **{**EAGLE3, **VARIANTS[variant]}))
    features_BTD = target.features(batch, head.training_layers)
    got = head(batch, features_BTD, target)
    assert_equal(head, got, *eagle3_by_hand(head, batch, features_BTD, target))
    assert got.ranks_KR.sum(1).tolist() == [12, 8, 5, 3][: head.choices.steps]  # counted by hand


@pytest.mark.parametrize(
    "choices",
    [{"steps": 1}, {}, {"steps": 1, "labels": "hard"}, {"layers": 2, "sliding_window": 3}],
    ids=["one step", "unrolled", "hard labels", "two layers and a window"],
)
def test_eagle_equals_its_restatement(target, batch, choices):
    head = awake(make_head(EagleHead, target, **{**SIZES, **choices}))
    features_BTD = target.features(batch, head.training_layers)
    got = head(batch, features_BTD, target)
    assert_equal(head, got, *eagle_by_hand(head, batch, features_BTD, target))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_attention_equals_one_softmax_over_both_lists_of_entries(dtype, rounding):
    """In bfloat16 up to its rounding, even of scores as large as 30."""
    torch.manual_seed(8)
    heads, groups, width, places, steps = 4, 2, 16, 9, 3
    roots = [2, 5, 8]
    tokens_BT, places_BT = torch.zeros(1, places + 1).long(), torch.arange(places + 1)[None]
    # the first token of a document forms no pair
    batch = Batch(tokens_BT, tokens_BT == 0, places_BT, tokens_BT)
    memory = UnrolledMemory(RowMemory(batch), Sight(batch, None, np.array([roots]) + 1))

    def drawn(*shape):
        return torch.randn(1, *shape, width).to(dtype)

    first_k, first_v = drawn(groups, places + 1), drawn(groups, places + 1)
    memory.attend(drawn(heads, places + 1), first_k, first_v)
    first_k, first_v = first_k[:, :, 1:], first_v[:, :, 1:]
    keys, values = [], []
    for memory.step in range(1, steps + 1):
        q = 3 * drawn(heads, len(roots))
        keys.append(3 * drawn(groups, len(roots)))
        values.append(drawn(groups, len(roots)))
        got = memory.attend(q, keys[-1], values[-1])[0].double()
        for head, (number, root) in product(range(heads), enumerate(roots)):
            group = head * groups // heads
            k = [*first_k[0, group, : root + 1], *(each[0, group, number] for each in keys)]
            v = [*first_v[0, group, : root + 1], *(each[0, group, number] for each in values)]
            scores = torch.stack(k).double() @ q[0, head, number].double() / width**0.5
            expected = scores.softmax(0) @ torch.stack(v).double()
            torch.testing.assert_close(got[head, number], expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_observed_ranks_equal_the_restatement(target, batch, kind):
    if kind == "eagle3":
        head: Any = awake(make_head(Eagle3Head, target, **EAGLE3))
        plain: Any = PlainEagle3(head)
        weight, vocabulary = plain.weights["lm_head.weight"], ODD
    else:
        head = awake(make_head(EagleHead, target, **SIZES))
        plain, vocabulary = PlainEagle(head), list(range(VOCABULARY))
        weight = target.model.lm_head.weight.double()
    features_BTD = target.features(batch, head.feature_layers)
    places = batch.loss_mask_BT.nonzero().tolist()
    expected = torch.full((len(places), 3), -1)
    for (row, root, step), hidden in plain_unroll(plain, batch, features_BTD, target, 3).items():
        token = int(batch.tokens_BT[row, root + step + 1])
        rank = plain_rank(weight @ plain.state(hidden), token, vocabulary)
        expected[places.index([row, root]), step] = rank if rank < RANKS else -1
    assert head.token_ranks(batch, features_BTD, target).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", [Eagle3Head, EagleHead])
@pytest.mark.parametrize("length", [2, 12])
def test_nothing_to_learn_costs_nothing_and_leaves_zero_gradients(target, kind, length):
    head = make_head(kind, target, **SIZES)
    tokens_BT = torch.randint(0, VOCABULARY, (2, length))
    positions_BT = torch.arange(length).repeat(2, 1)
    nothing_BT = torch.zeros_like(tokens_BT)
    batch = Batch(tokens_BT, nothing_BT.bool(), positions_BT, nothing_BT)
    out = head(batch, target.features(batch, head.training_layers), target)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert out.ranks_KR.tolist() == [[0] * (RANKS + 1)] * STEPS
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "llama3", "linear", "yarn"])
def test_rope_turns_as_transformers_does(scaling):
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 20.0}
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, rope_parameters=parameters)
    q_BHQW, positions_BQ = torch.randn(2, 3, 7, 8), torch.randint(0, 90, (2, 7))
    expected, _ = apply_rotary_pos_emb(
        q_BHQW, q_BHQW, *LlamaRotaryEmbedding(config)(q_BHQW, positions_BQ)
    )
    got = rotate(q_BHQW, Rope(8, 20.0, scaling)(positions_BQ))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_rope_that_depends_on_the_length_is_refused():
    with pytest.raises(ValueError, match="rope_scaling 'dynamic': expected one of"):
        Rope(8, 20.0, {"rope_type": "dynamic", "factor": 2.0})
