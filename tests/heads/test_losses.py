"""The promise: the chunked loss is the plain one, for every objective; Medusa's head k learns
tokens[i + k] from features[i].
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain_losses import plain_row_loss
from tiny_heads import make_head
from tiny_training import VOCABULARY, random_answers, tiny_target

from draftheads.heads import losses
from draftheads.heads.batch import Batch
from draftheads.heads.losses import (
    RANKS,
    Teacher,
    chunked_ranks,
    linear_cross_entropy,
)
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target.model import Target
from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer

DEPTH = 3
OBJECTIVES = ["ce", "kl"]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def batch() -> Batch:
    two_turns = Answer(list(range(20)), [(3, 9), (11, 16)])
    documents = Documents.read([*random_answers(12), two_turns])
    rows = Rows(documents, documents.spans, 64, pack=True, seed=0)
    return rows.batch(range(len(rows)))


@pytest.fixture
def five_rows_at_a_time(monkeypatch):
    monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", 5 * VOCABULARY)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)


def medusa_head(target: Target, **choices) -> MedusaHead:
    head = make_head(MedusaHead, target, depth=DEPTH, layers=2, decay=0.7, **choices)
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
                if same and all(batch.loss_mask_BT[row, i : i + k + 1]):
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
        logits = plain_logits(head, target, features_BTD[row, i], k)
        if token in vocabulary:
            place = vocabulary.index(token)
            counts[k - 1, min(int((logits > logits[place]).sum()), RANKS)] += 1
        else:
            counts[k - 1, RANKS] += 1
        if head.choices.labels == "soft":
            teacher = target.model.lm_head(features_BTD[row, i + k])
            if int(teacher.argmax()) not in vocabulary:
                continue
            wanted = teacher[torch.tensor(vocabulary)].softmax(-1)
        elif token in vocabulary:
            wanted = F.one_hot(torch.tensor(place), len(vocabulary)).float()
        else:
            continue
        loss = loss - head.choices.decay**k * (wanted * logits.log_softmax(-1)).sum()
    return loss, counts


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("vocabulary", [None, list(range(0, VOCABULARY, 2))])
@pytest.mark.usefixtures("five_rows_at_a_time")
def test_chunked_loss_equals_the_plain_one(target, batch, labels, lm_head, vocabulary):
    head = medusa_head(target, labels=labels, lm_head=lm_head, vocabulary=vocabulary)
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
    head = medusa_head(target)
    features_BTD = target.features(batch, head.feature_layers)
    places = [(row, i) for row, i in batch.loss_mask_BT.nonzero().tolist()]
    expected = torch.full((len(places), DEPTH), -1)
    for row, i, k in judged(batch):
        logits = plain_logits(head, target, features_BTD[row, i], k)
        rank = int((logits > logits[batch.tokens_BT[row, i + k]]).sum())
        expected[places.index((row, i)), k - 1] = rank if rank < RANKS else -1
    assert head.token_ranks(batch, features_BTD, target).tolist() == expected.tolist()


def test_a_batch_without_learned_tokens_still_has_gradients(target, batch):
    head = medusa_head(target)
    empty = Batch(
        batch.tokens_BT,
        torch.zeros_like(batch.loss_mask_BT),
        batch.positions_BT,
        batch.documents_BT,
    )
    out = head(empty, target.features(batch, head.feature_layers), target)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def rows_to_judge(rows: int, states: int, width: int):
    """Hidden rows, a draft vocabulary of every third token, a teacher for every few rows, the
    tokens that came, and weights.
    """
    torch.manual_seed(2)
    hidden_RD = torch.randn(rows, width, requires_grad=True)
    token_map = torch.arange(1, VOCABULARY, 3)
    weight_vD = torch.randn(len(token_map), width, requires_grad=True)
    logits_UV = 3 * torch.randn(states, VOCABULARY)
    logits_UV[1::3, token_map[5]] = 12.0  # sure, and in the draft vocabulary
    states_R = torch.randint(states, (rows,)).sort().values
    labels_R = torch.randint(-1, len(token_map), (rows,))
    weights_R = torch.rand(rows) + 0.1
    return hidden_RD, weight_vD, token_map, logits_UV, states_R, labels_R, weights_R


@pytest.mark.parametrize("piece", [1, 3, 100])
@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_and_its_gradients_equal_the_formula(objective, reduced, piece, monkeypatch):
    hidden, weight, token_map, logits_UV, states_R, labels, weights_R = rows_to_judge(23, 9, 8)
    if not reduced:
        logits_UV, token_map = logits_UV[:, token_map], torch.arange(len(token_map))
    monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", 7 * len(token_map))  # of 23: a ragged end
    monkeypatch.setitem(losses.PIECE_LOGITS, "cpu", piece * len(token_map))
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    given = token_map if reduced else None
    teacher = Teacher(states_R.numpy(), lambda states: logits_UV[states], given, objective)
    got, *_ = linear_cross_entropy(hidden, weight, labels, weights_R=weights_R, teacher=teacher)

    vocabulary = token_map.tolist()
    wide_hidden, wide_weight = hidden.double(), weight.double()
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(len(hidden)):
        logits_v = wide_weight @ wide_hidden[row]
        log_q_v = logits_v - logits_v.exp().sum().log()
        teacher_V = logits_UV[states_R[row]].double()
        row_loss = plain_row_loss(log_q_v, teacher_V, vocabulary, objective)
        expected = expected + weights_R[row] * row_loss
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected, [hidden, weight])
    for left, right in zip(
        torch.autograd.grad(got / 2, [hidden, weight]), wanted, strict=True
    ):  # the outer factor must reach the gradients, too
        torch.testing.assert_close(left, right / 2, rtol=1e-4, atol=1e-5)


def scored(objective: str | None, plus: bool, dtype: torch.dtype):
    """Loss, ranks, acceptance and gradients of 23 rows, a few of them without a label. dtype: of
    the products, by autocast.
    """
    hidden, weight, token_map, logits_UV, states_R, labels, weights_R = rows_to_judge(23, 9, 8)
    leaves = [hidden, weight]
    more = None
    if plus:
        more = torch.randn(23, 5, requires_grad=True), torch.randn(len(weight), 5)
        more[1].requires_grad_()
        leaves += more
    teacher = None
    if objective:
        logits = lambda states: logits_UV[states]  # noqa: E731
        teacher = Teacher(states_R.numpy(), logits, token_map, objective, acceptance=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss, *observed = linear_cross_entropy(
            hidden, weight, labels, more, weights_R=weights_R, teacher=teacher
        )
    return loss.detach(), *observed, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("objective", [None, "ce", "kl"])
def test_pieces_and_slabs_of_any_size_change_nothing(objective, plus, dtype, monkeypatch):
    """They divide the rows of a chunk, and those of a matrix."""
    whole = scored(objective, plus, dtype)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]  # of a slab's product
    for piece, slab in [(1, 4), (3, 3), (5, 100), (22, 1)]:
        monkeypatch.setitem(losses.PIECE_LOGITS, "cpu", piece * VOCABULARY // 3)
        monkeypatch.setitem(losses.SLAB_ROWS, "cpu", slab)
        for left, right in zip(scored(objective, plus, dtype), whole, strict=True):
            torch.testing.assert_close(left, right, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("objective", [None, "ce", "kl"])
def test_gradients_in_bfloat16_are_those_in_float32_but_for_rounding(objective, plus, monkeypatch):
    """Also where several chunks, of unequal size, add to the gradient of a matrix."""
    monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", 7 * VOCABULARY // 3)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    exact = scored(objective, plus, torch.float32)
    rounded = scored(objective, plus, torch.bfloat16)
    for left, right in zip(rounded[3:], exact[3:], strict=True):
        assert left.dtype == right.dtype == torch.float32
        torch.testing.assert_close(left, right, rtol=0, atol=0.02 * float(right.abs().max()))


@pytest.mark.mend(
    "in bfloat16, autocast rounded the reported loss and a factor of DSpark's gradient to eight "
    "bits"
)
@pytest.mark.parametrize("objective", [None, *OBJECTIVES])
def test_autocast_narrows_logits_alone(objective):
    """Loss and gradients are as exact as float32 makes them of logits in bfloat16."""
    _, _, token_map, logits_UV, states_R, labels, weights_R = rows_to_judge(23, 9, 8)
    logits_Rv = (3 * torch.randn(23, len(token_map))).bfloat16().float()
    eye = torch.eye(len(token_map))
    teacher = None
    if objective:
        logits = lambda states: logits_UV[states]  # noqa: E731
        teacher = Teacher(states_R.numpy(), logits, token_map, objective)

    def asked():
        rows = logits_Rv.clone().requires_grad_()
        loss, *_ = linear_cross_entropy(rows, eye, labels, weights_R=weights_R, teacher=teacher)
        return loss, torch.autograd.grad(loss, rows)[0]

    loss, exact = asked()
    with torch.autocast("cpu", torch.bfloat16):
        narrow_loss, narrow = asked()
    torch.testing.assert_close(narrow_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(narrow, exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 7, 8])
def test_memory_that_was_used_before_does_not_reach_gradients(rows, monkeypatch):
    """The first chunk sets them, so they begin as whatever the memory holds."""
    monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", 7 * 6)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    labels = torch.arange(rows) % 6

    def asked(loss):
        return torch.autograd.grad(loss, [hidden, weight])

    expected = asked(F.cross_entropy(hidden @ weight.T, labels, reduction="sum"))
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **more: empty_like(x, **more).fill_(torch.nan)
    )
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = linear_cross_entropy(hidden, weight, labels)[0]
        for left, right in zip(asked(loss), expected, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0.05 if dtype else 1e-5)


def test_a_retained_graph_can_be_passed_again():
    hidden, weight, _, _, _, labels, _ = rows_to_judge(9, 3, 4)
    loss, *_ = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    again = torch.autograd.grad(3 * loss, [hidden, weight])
    for left, right in zip(again, first, strict=True):
        torch.testing.assert_close(left, 3 * right)


@pytest.mark.parametrize("objective", [None, *OBJECTIVES])
def test_acceptance_is_the_overlap_of_both_distributions(objective, monkeypatch):
    """Of a row without teacher: the probability of its label."""
    hidden, weight, token_map, logits_UV, states_R, labels, weights_R = rows_to_judge(23, 9, 7)
    monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", 5 * len(token_map))
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    teacher = None
    q_Rv = (hidden @ weight.T).softmax(-1)
    if objective:
        logits = lambda states: logits_UV[states]  # noqa: E731
        teacher = Teacher(states_R.numpy(), logits, token_map, objective, acceptance=True)
        expected_R = torch.minimum(logits_UV[states_R][:, token_map].softmax(-1), q_Rv).sum(1)
    else:
        expected_R = q_Rv[range(23), labels] * (labels >= 0)
    *_, accepted_R = linear_cross_entropy(hidden, weight, labels, teacher=teacher)
    torch.testing.assert_close(accepted_R, expected_R.detach())
    assert not accepted_R.requires_grad


@pytest.mark.parametrize(
    ("times", "expected"), [(1, [[0, 1], [1, 2]]), (2, [[0], [1], [1, 2], [2]])]
)
def test_equal_states_are_asked_once_per_chunk(times, expected, monkeypatch):
    """A chunk has as many rows as the wider of both vocabularies allows."""
    hidden, weight, token_map, logits_UV, _, labels, _ = rows_to_judge(12, 3, 4)
    monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", 6 * len(token_map))
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    asked = []

    def logits(states_U):
        asked.append(states_U.tolist())
        return logits_UV[states_U]

    states_R = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2])
    teacher = Teacher(states_R.numpy(), logits, token_map, vocab_size=times * len(token_map))
    linear_cross_entropy(hidden, weight, labels, teacher=teacher)
    assert asked == expected


def test_ranks_equal_those_of_a_stable_sort(monkeypatch):
    """Small whole numbers, so that many logits are exactly equal: the lower index comes first."""
    monkeypatch.setitem(losses.CHUNK_LOGITS, "cpu", 7 * 14)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 1)
    torch.manual_seed(3)
    hidden_RD = torch.randint(-1, 2, (60, 3)).float()
    weight_vD = torch.randint(-1, 2, (14, 3)).float()
    labels_R = torch.randint(-1, 14, (60,))
    expected = []
    for hidden_D, label in zip(hidden_RD, labels_R.tolist(), strict=True):
        logits = [float(hidden_D @ row) for row in weight_vD]
        order = sorted(range(14), key=lambda index, logits=logits: (-logits[index], index))
        expected.append(min(order.index(label), RANKS) if label >= 0 else RANKS)
    assert {0, 1, RANKS} < set(expected)
    assert chunked_ranks(hidden_RD, weight_vD, labels_R).tolist() == expected
    _, ranks_R, _ = linear_cross_entropy(hidden_RD, weight_vD, labels_R)
    assert ranks_R.tolist() == expected


@pytest.mark.parametrize("objective", [None, *OBJECTIVES])
def test_no_rows_cost_nothing_and_leave_zero_gradients(objective):
    hidden_RD = torch.zeros(0, 4, requires_grad=True)
    weight_vD = torch.randn(6, 4, requires_grad=True)
    none_R = torch.zeros(0, dtype=torch.long)
    teacher = Teacher(
        none_R.numpy(), lambda states: torch.zeros(len(states), 6), None, objective or "ce"
    )
    loss, ranks_R, _ = linear_cross_entropy(
        hidden_RD, weight_vD, none_R, teacher=teacher if objective else None
    )
    loss.backward()
    assert (float(loss.detach()), ranks_R.tolist()) == (0.0, [])
    assert weight_vD.grad is not None and not weight_vD.grad.any()
    assert chunked_ranks(hidden_RD, weight_vD, none_R).tolist() == []


def test_a_frozen_matrix_still_passes_gradients_on():
    hidden, weight, _, _, _, labels, _ = rows_to_judge(9, 3, 4)
    frozen = weight.detach()
    loss, *_ = linear_cross_entropy(hidden, frozen, labels)
    kept = labels >= 0
    expected = F.cross_entropy(hidden[kept] @ frozen.T, labels[kept], reduction="sum")
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden), wanted)
