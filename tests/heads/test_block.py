"""The promise: a block head computes what a slow restatement of the papers does: in training its
loss, ranks and every gradient, in drafting every tree; both see the same, and neither sees more.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import tiny_heads
import torch
import torch.nn.functional as F
from plain_block import PlainBlock
from plain_drafting import committed_steps, drafts_of, plain_drafts, two_texts
from plain_eagle import plain_rank
from plain_hydra import awake
from plain_losses import LLAMA3, assert_equal, plain_row_loss
from tiny_chat import byte_tokenizer
from tiny_heads import make_head
from tiny_targets import VOCABULARY, random_model

from draftheads.heads.batch import Batch
from draftheads.heads.block import BlockHead, mask_token
from draftheads.heads.conditioning import codes_along
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.losses import RANKS, linear_cross_entropy
from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.heads.tree_drafting import TreeBuilder, tree_builder

ODD = list(range(1, VOCABULARY, 2))
SIZES: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate_size": 24, "rope_theta": 20.0,
    "feature_layers": [0, 2, 3], "layers": 2, "block_size": 4, "rank": 5, "conditioning": "none",
}  # fmt: skip
DOMINO: dict[str, Any] = {"conditioning": "none", "design": tiny_heads.DOMINO}
SELECTOR = {"rank": 5, "candidates": 6}
CHOICES: dict[str, dict[str, Any]] = {
    "none": {},
    "markov": {"conditioning": "markov", "confidence": True, "mask": 3},
    "own slots": {
        "conditioning": "rnn",
        "sample_from_anchor": False,
        "kv_heads": 4,
        "rope_scaling": LLAMA3,
    },
    "rnn": {"conditioning": "rnn", "confidence": True, "decay_tokens": 2.0},
    "own lm_head": {"labels": "soft", "lm_head": "own"},
    "one group": {"labels": "soft", "kv_heads": 1, "conditioning": "rnn"},
    "soft markov": {"labels": "soft", "conditioning": "markov", "confidence": True},
    "soft": {"labels": "soft", "conditioning": "rnn", "embeddings": "own"},
    "reduced": {"vocabulary": ODD, "conditioning": "rnn", "confidence": True},
    "reduced soft": {"vocabulary": ODD, "labels": "soft", "sample_from_anchor": False},
    "window": {"sliding_window": 4, "layers": 3, "confidence": True, "conditioning": "rnn"},
    "domino": {**DOMINO, "confidence": True, "embeddings": "own"},
    "domino of few tokens": {**DOMINO, "vocabulary": ODD, "sample_from_anchor": False},
    "domino soft": {**DOMINO, "labels": "soft", "mask": 3, "sliding_window": 4},
    "convolutions": {"design": {"convolutions": True}, "mask": 3, "layers": 1},
    "dflash window": {"sliding_window": 5, "sample_from_anchor": False, "block_size": 5, "mask": 7},
}
OF_OTHERS: dict[str, dict[str, Any]] = {
    "selector": {"design": SELECTOR},
    "dflash 2": {"sample_from_anchor": False, "design": {**SELECTOR, "convolutions": True}},
}
"""Heads that are not trained here."""

# Four documents, and two tokens of padding; l marks what is learned.
#     A  A  A  A  A  A  B  B  B  B  B
#     l  l  l  l  l  l     l  l  l  l
#     C  C  C  C  C  C  C  C  D  -  -
#        l  l  l     l  l  l  l
LEARN = [[1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0]]
POSITIONS = [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0]]
DOCUMENTS = [[0] * 6 + [1] * 5, [0] * 8 + [1] + [-1] * 2]
JUDGED = [12, 8, 4, 2]  # at each depth, counted by hand
ANCHORS = [[0, 1, 2, 3, 4, 7, 8, 9], [1, 2, 5, 6]]


@pytest.fixture(scope="module")
def batch() -> Batch:
    tokens_BT = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(4))
    loss_mask_BT = torch.tensor(LEARN).bool()
    return Batch(tokens_BT, loss_mask_BT, torch.tensor(POSITIONS), torch.tensor(DOCUMENTS))


def new_head(target: Target, **choices: Any) -> BlockHead:
    return awake(make_head(BlockHead, target, **{**SIZES, **choices}))


def documents_of(batch: Batch) -> list[tuple[int, list[int]]]:
    """(row, its places) of every document."""
    found = []
    for row, numbers in enumerate(batch.documents_BT.tolist()):
        for document in sorted(set(numbers) - {-1}):
            found.append((row, [i for i, number in enumerate(numbers) if number == document]))
    return found


class Judge:
    """Loss, acceptance and rank of single predictions, by the head's choices."""

    def __init__(self, head: BlockHead, plain: PlainBlock, target: Target) -> None:
        self.head, self.vocabulary = head, plain.vocabulary
        self.lm_head_VD = target.model.lm_head.weight.double()

    def __call__(self, logits_v, token: int, last_D) -> tuple[torch.Tensor, float]:
        """(loss, acceptance). last_D: the target's last state, from which the token came."""
        log_q_v = logits_v - logits_v.exp().sum().log()
        place = self.vocabulary.index(token) if token in self.vocabulary else -1
        if self.head.choices.labels == "hard":
            if place < 0:
                return 0.0 * logits_v[0], 0.0
            return -log_q_v[place], float(log_q_v[place].detach().exp())
        teacher_V = self.lm_head_VD @ last_D.double()
        p_v = F.softmax(teacher_V[self.vocabulary], dim=0)
        loss = plain_row_loss(log_q_v, teacher_V, self.vocabulary, "ce")
        return loss, float(torch.minimum(p_v, log_q_v.detach().exp()).sum())


def plain_training(head: BlockHead, batch: Batch, features_BTX, target: Target):
    """(loss, ranks_KR, weights) of the restatement, over all anchors."""
    plain = PlainBlock(head, target)
    judge, width = Judge(head, plain, target), head.fc.in_features
    loss = torch.zeros((), dtype=torch.float64)
    ranks_KR = torch.zeros(head.depth, RANKS + 1, dtype=torch.long)
    decay_K = torch.exp(-torch.arange(head.depth) / head.choices.decay_tokens)
    decay_K = decay_K / decay_K.sum()
    for row, places in documents_of(batch):
        features_TX = features_BTX[row, places]
        contexts = plain.inputs(features_TX[:, :width])
        tokens, learned = batch.tokens_BT[row, places].tolist(), batch.loss_mask_BT[row, places]
        for anchor, context_CD in enumerate(contexts):
            states_KD = plain.states(context_CD, tokens[anchor])
            losses, accepted, confidences = [], [], []
            for k in range(1, head.depth + 1):
                if anchor + k >= len(tokens) or not all(learned[anchor : anchor + k + 1]):
                    break
                came = tokens[anchor + k]
                logits_v, confidence = plain.given(states_KD, tokens[anchor : anchor + k])
                ranks_KR[k - 1, plain_rank(logits_v, came, plain.vocabulary)] += 1
                last_D = features_TX[anchor + k, -head.hidden_size :]
                row_loss, row_accepted = judge(logits_v, came, last_D)
                losses.append(row_loss)
                accepted.append(row_accepted)
                confidences.append(confidence)
            weights = decay_K.tolist()
            loss = loss + sum(w * each for w, each in zip(weights, losses, strict=False))
            if head.confidence_head is not None:
                for w, c, a in zip(decay_K.tolist(), confidences, accepted, strict=False):
                    loss = loss - w * (a * F.logsigmoid(c) + (1 - a) * F.logsigmoid(-c))
    return loss, ranks_KR, plain.weights


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_training_equals_its_restatement(target, batch, choices):
    head = new_head(target, **choices)
    features_BTX = target.features(batch, head.training_layers)
    got = head(batch, features_BTX, target)
    assert_equal(head, got, *plain_training(head, batch, features_BTX, target))
    assert got.ranks_KR.sum(1).tolist() == JUDGED[: head.depth]


@pytest.mark.parametrize("choices", [*CHOICES.values(), *OF_OTHERS.values()])
@torch.no_grad()
def test_drafting_equals_its_restatement(target, choices):
    """Fixed and dynamic trees, in a batch of ragged rows, committed in pieces."""
    head = new_head(target, **choices).eval()
    tokens_BT, _ = two_texts()
    features_BTX = torch.randn(2, 13, head.fc.in_features)
    expected = plain_drafts(PlainBlock(head, target), tokens_BT, features_BTX)
    assert drafts_of(head, target, tokens_BT, features_BTX) == expected


@pytest.fixture
def noted(monkeypatch) -> list[torch.Tensor]:
    """The logits of the levels that drafters grow, as long as a test runs."""
    logits = []

    def build(*arguments: Any) -> TreeBuilder:
        builder = tree_builder(*arguments)
        add = builder.add

        def add_and_note(logits_BFv: torch.Tensor, ids_Bv: torch.Tensor | None) -> bool:
            logits.append(logits_BFv)
            return add(logits_BFv, ids_Bv)

        builder.add = add_and_note  # type: ignore[method-assign]
        return builder

    monkeypatch.setattr("draftheads.heads.base.tree_builder", build)
    return logits


def trained_logits(head: BlockHead, batch: Batch, features_BTX, target: Target, chains_MK):
    """What training computes after these tokens, (M, K, v), for one anchor per row, which
    `batch.loss_mask_BT` marks.
    """
    marked_BT = batch.loss_mask_BT.numpy()
    blocks = head._blocks(batch, features_BTX, target, [marked_BT] * head.depth, marked_BT)
    states_MKD = blocks.states_MKD
    logits_MKv = F.linear(states_MKD, head.lm_head.weight).float()
    if conditioning := head.conditioning:
        embed = partial(head.embed, target=target)
        codes_MKr = codes_along(conditioning, chains_MK, states_MKD, embed)
        logits_MKv = logits_MKv + conditioning.output(codes_MKr)
    selector = head.candidate_selector
    if selector is not None:
        best = logits_MKv.flatten(0, 1).topk(head.design.candidates)
        before_R1 = chains_MK.flatten()[:, None]
        scores_R1k = selector(before_R1, states_MKD.flatten(0, 1), *best)
        return scores_R1k.view(*chains_MK.shape, -1).float()
    return logits_MKv.float()


ALIKE: dict[str, dict[str, Any]] = {
    "none": {},
    "markov": {"conditioning": "markov", "sample_from_anchor": False},
    "window": {"conditioning": "rnn", "sliding_window": 5},
    "rnn": {"conditioning": "rnn", "mask": 3},
    "domino": {**DOMINO, "mask": 3},
    "domino own slots": {**DOMINO, "sample_from_anchor": False},
    "dflash 2": {"design": {**SELECTOR, "convolutions": True}, "mask": 3},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("room", [1, 1024], ids=["growing", "roomy"])
@pytest.mark.parametrize("choices", ALIKE.values(), ids=ALIKE)
@torch.no_grad()
def test_drafting_has_the_very_logits_of_training(target, monkeypatch, noted, choices, room, dtype):
    """Bit for bit once what was computed in float64 is rounded: for texts committed in pieces and
    in chunks, in ragged rows, in caches that have to grow.
    """
    monkeypatch.setattr("draftheads.heads.drafting.PREFILL_CHUNK", 3)
    monkeypatch.setattr("draftheads.heads.drafting.ROOM", room)
    head = new_head(target, lm_head="own", **choices).eval().to(dtype)
    tokens_BT, _ = two_texts()
    features_BTX = torch.randn(2, 13, head.fc.in_features)
    positions_BT = torch.arange(13).expand(2, -1)
    drafter = head.drafter(target, StaticTree.from_widths([1] * head.depth))
    lengths_B = torch.zeros(2, dtype=torch.long)
    for committed in committed_steps(tokens_BT, features_BTX):
        noted.clear()
        tree = drafter.propose(committed)
        lengths_B = lengths_B + committed.count_B
        anchors_BT = positions_BT == lengths_B[:, None] - 1
        text = Batch(tokens_BT, anchors_BT, positions_BT, torch.zeros_like(tokens_BT))
        chains_BK = tree.tokens_BN[:, :-1]  # the last is behind no prediction
        expected = trained_logits(head, text, features_BTX, target, chains_BK)
        drafted = torch.cat(noted, dim=1).float()
        if dtype == torch.float64:
            assert torch.equal(drafted, expected)
        torch.testing.assert_close(drafted, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_features_that_reach_a_slot_are_exactly_those_before_its_token(target, batch, window):
    """Of its own document, up to the anchor's, never the first token's; by autograd, so that zero
    means zero.
    """
    head = new_head(target, sliding_window=window, layers=1)
    features_BTX = torch.randn(2, 11, head.fc.in_features, requires_grad=True)
    masks = batch.root_masks(head.depth)
    states_MKD = head._blocks(batch, features_BTX, target, masks, masks[0]).states_MKD
    anchors = [(row, place) for row in range(2) for place in ANCHORS[row]]
    assert len(states_MKD) == len(anchors)
    document = {(row, i): places for row, places in documents_of(batch) for i in places}
    for (row, anchor), states_KD in zip(anchors, states_MKD, strict=True):
        first = document[row, anchor][0]
        for slot, state_D in enumerate(states_KD):
            (grad_BTX,) = torch.autograd.grad(
                state_D @ torch.randn(len(state_D)), features_BTX, retain_graph=True
            )
            reached = {tuple(place) for place in (grad_BTX != 0).any(-1).nonzero().tolist()}
            # feature i is the state at position i - 1
            near = [
                i for i in range(first + 1, anchor + 1) if anchor + slot - (i - 1) < (window or 99)
            ]
            assert reached == {(row, i) for i in near}


def anchors_of(head: BlockHead, batch: Batch, features_BTX, target: Target) -> list[list[int]]:
    """The anchors that a step draws, by row."""
    drawn: list[list[int]] = [[] for _ in batch.tokens_BT]
    blocks_of = head._blocks

    def note(batch, features_BTX, target, masks, chosen_BT):
        for row, place in np.argwhere(chosen_BT).tolist():
            drawn[row].append(place)
        return blocks_of(batch, features_BTX, target, masks, chosen_BT)

    head._blocks = note
    head(batch, features_BTX, target)
    head._blocks = blocks_of
    return drawn


def test_anchors_are_random_sorted_few_and_a_function_of_the_seed(target, batch):
    head = new_head(target, anchors=3)
    features_BTX = target.features(batch, head.training_layers)

    def drawn(seed):
        torch.manual_seed(seed)
        return anchors_of(head, batch, features_BTX, target)

    seen: list[set[int]] = [set(), set()]
    for seed in range(30):
        for row, anchors in enumerate(drawn(seed)):
            assert len(anchors) == 3 and anchors == sorted(anchors)
            seen[row] |= set(anchors)
    assert [sorted(row) for row in seen] == ANCHORS, "all are drawn, and nothing else"
    assert drawn(1) == drawn(1) != drawn(2)
    assert anchors_of(head, batch, features_BTX, target) != drawn(2), "a step after it draws others"


@torch.no_grad()
def test_the_loss_of_few_anchors_is_on_average_that_of_all(target, batch):
    """Though one row has twice as many anchors as the other."""
    head = new_head(target, layers=1, conditioning="markov")
    features_BTX = target.features(batch, head.training_layers)
    wanted = float(head(batch, features_BTX, target).loss)
    head.choices, draws = head.choices.model_copy(update={"anchors": 3}), 100
    torch.manual_seed(0)
    drawn = torch.stack([head(batch, features_BTX, target).loss for _ in range(draws)])
    error = float(drawn.std()) / draws**0.5
    assert abs(float(drawn.mean()) - wanted) < 3 * error < 0.1 * wanted


def test_each_label_is_asked_once_and_only_what_can_be_drafted_is_scored(
    target, batch, monkeypatch
):
    """Anchors share the tokens that they draft; a document's end lies within many blocks. And the
    codes of all tokens are one look-up.
    """
    head = new_head(target, labels="soft", conditioning="rnn")
    features_BTX = target.features(batch, head.training_layers)
    asked, scored, looked_up = [], [], []
    unembed = target.unembed

    def note(states_UD):
        asked.append(len(states_UD))
        return unembed(states_UD)

    def score(states_RD, *arguments, **named):
        scored.append(len(states_RD))
        return linear_cross_entropy(states_RD, *arguments, **named)

    monkeypatch.setattr(target, "unembed", note)
    monkeypatch.setattr("draftheads.heads.block.linear_cross_entropy", score)
    head.markov_head.markov_w1.register_forward_hook(lambda *_: looked_up.append(1))
    head(batch, features_BTX, target)
    masks = batch.root_masks(head.depth)
    places = {int(i) + k for k, mask in enumerate(masks, 1) for i in mask.ravel().nonzero()[0]}
    assert (asked, scored, looked_up) == ([len(places)], [sum(JUDGED)], [1])


def test_a_short_row_counts_no_more_for_the_long_one_beside_it(target, batch):
    """With two anchors a row, a row of two candidates is always whole, whatever the other draws."""
    head = new_head(target, anchors=2)
    first = batch.loss_mask_BT.clone()
    first[1] = False
    second = batch.loss_mask_BT.clone()
    second[0], second[1, 4:] = False, False
    features_BTX = target.features(batch, head.training_layers)

    def loss(mask_BT):
        torch.manual_seed(3)
        given = Batch(batch.tokens_BT, mask_BT, batch.positions_BT, batch.documents_BT)
        return head(given, features_BTX, target).loss.detach()

    torch.testing.assert_close(loss(first | second), loss(first) + loss(second))


@pytest.mark.parametrize("choices", [{}, {"conditioning": "rnn"}, DOMINO])
def test_gradient_checkpointing_changes_nothing(target, batch, choices):
    head = new_head(target, **choices, anchors=3, labels="soft")
    features_BTX = target.features(batch, head.training_layers)
    results = []
    for head.recompute in (False, True):
        torch.manual_seed(2)
        loss = head(batch, features_BTX, target).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, list(head.parameters()))])
    plain, recomputed = results
    assert len(plain) > 1 and [tensor for tensor in plain if not tensor.any()] == []
    assert [*map(torch.equal, plain, recomputed)] == [True] * len(recomputed)


@pytest.mark.parametrize("length", [2, 12])
@pytest.mark.parametrize("choices", [{"conditioning": "rnn"}, DOMINO])
def test_nothing_to_learn_costs_nothing_and_leaves_zero_gradients(target, length, choices):
    head = new_head(target, **choices, confidence=True)
    tokens_BT = torch.randint(0, VOCABULARY, (2, length))
    nothing_BT = torch.zeros_like(tokens_BT)
    batch = Batch(tokens_BT, nothing_BT.bool(), torch.arange(length).expand(2, -1), nothing_BT)
    out = head(batch, target.features(batch, head.training_layers), target)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert out.ranks_KR.tolist() == [[0] * (RANKS + 1)] * head.depth
    gradients = [parameter.grad for parameter in head.parameters()]
    assert [grad is not None and not grad.any() for grad in gradients] == [True] * len(gradients)
    assert gradients


@pytest.mark.parametrize(
    "choices", [{"conditioning": "rnn", "vocabulary": ODD}, *OF_OTHERS.values()]
)
@torch.no_grad()
def test_observed_ranks_equal_the_restatement(target, batch, monkeypatch, choices):
    """However many blocks are evaluated together; a draft vocabulary lacks some tokens, and so do
    the candidates of a slot.
    """
    monkeypatch.setattr("draftheads.heads.block.EVALUATED", 3)
    head = new_head(target, anchors=1, **choices)
    plain = PlainBlock(head, target)
    features_BTX = target.features(batch, head.feature_layers)
    learned = batch.loss_mask_BT.nonzero().tolist()
    expected = torch.full((len(learned), head.depth), -1)
    for row, places in documents_of(batch):
        contexts = plain.inputs(features_BTX[row, places])
        tokens = batch.tokens_BT[row, places].tolist()
        for anchor, k in product(range(len(places)), range(1, head.depth + 1)):
            here = places[anchor : anchor + k + 1]
            if anchor + k < len(places) and all(batch.loss_mask_BT[row, here]):
                logits_v = plain.logits(contexts[anchor], tuple(tokens[anchor : anchor + k]))
                rank = plain_rank(logits_v, tokens[anchor + k], plain.vocabulary)
                line = learned.index([row, places[anchor]])
                expected[line, k - 1] = rank if rank < RANKS else -1
    assert head.token_ranks(batch, features_BTX, target).tolist() == expected.tolist()


def test_a_new_head_of_any_conditioning_is_one_without(target, batch):
    losses = []
    for choices in (*({"conditioning": each} for each in ("none", "markov", "rnn")), DOMINO):
        torch.manual_seed(0)
        head = make_head(BlockHead, target, **{**SIZES, "mask": 3, **choices})
        features_BTX = target.features(batch, head.training_layers)
        losses.append(float(head(batch, features_BTX, target).loss.detach()))
    assert losses == [losses[0]] * 4


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (
            {"mask": VOCABULARY},
            rf"a mask token from 0 to {VOCABULARY - 1}, got 19; correct head.mask",
        ),
        ({"feature_layers": [1, 4]}, r"head.feature_layers: expected indices from 0.*to 3.*got"),
        ({"sliding_window": 3}, "sliding window of at least the 4 slots.*got 3"),
        ({"kv_heads": 3}, "expected heads to be a multiple of kv_heads"),
        ({"vocabulary": [0, VOCABULARY]}, "expected distinct target ids from 0 to"),
    ],
)
def test_choices_that_do_not_fit_are_refused_in_one_line(target, choices, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        make_head(BlockHead, target, **{**SIZES, **choices})
    assert "\n" not in str(refused.value)


def test_selectors_are_not_trained(target):
    """By whoever would: a recipe that continues one, and a chat that learns."""
    head = new_head(target, **OF_OTHERS["selector"])
    with pytest.raises(ValueError, match="expected a head without a selector.*or train another"):
        head.train_with(head.choices)


@pytest.mark.parametrize("id", [-1, VOCABULARY])
def test_a_stored_mask_token_that_no_target_knows_is_refused(target, tmp_path, id):
    folder = save_head(new_head(target, mask=3), tmp_path / "head", target=target)
    config = json.loads((folder / "config.json").read_text()) | {"mask_token_id": id}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"mask.token.* 0.*, got {id}"):
        load_head(folder, target=target)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (StaticTree.from_widths([1] * 5), "5 deep, the head predicts only 4 tokens ahead"),
        (DynamicTree(8, 5, 2), "5 deep, the head predicts only 4 tokens ahead"),
        (StaticTree(((9,),)), "uses the 10 best tokens, the head knows only 9"),
    ],
)
def test_trees_that_a_block_cannot_fill_are_refused(target, tree, reason):
    with pytest.raises(ValueError, match=reason):
        new_head(target, vocabulary=ODD).drafter(target, tree)


def test_a_target_that_embeds_in_another_width_is_refused():
    target = Target(random_model("llama"), name="narrow")
    target.model.set_input_embeddings(torch.nn.Embedding(VOCABULARY, 16))
    with pytest.raises(ValueError, match="narrow embeds tokens in 16 dimensions.*of 32"):
        BlockHead.create(target)


@pytest.mark.parametrize(
    ("more", "rows", "choice", "expected"),
    [
        ((), 256, "auto", None),
        ((), 262, "auto", 259),
        (("<tool>", "<file>"), 261, "auto", 260),
        (("<tool>", "<|reserved_2|>", "<|reserved_3|>"), 262, "auto", 260),
        (("<tool>", "<mask>", "<|reserved_2|>"), 300, "auto", 260),
        (("<mask>",), 259, "auto", 256),
        (("<|reserved_2|>",), 300, "learned", None),
        (("<tool>",), 260, 7, 7),
    ],
    ids=["none", "padding", "special", "reserved", "known", "unknown", "learned", "chosen"],
)
def test_the_mask_is_a_token_that_no_text_contains(more, rows, choice, expected):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*more], special_tokens=True)
    if "<mask>" in more:
        tokenizer.mask_token = "<mask>"
    target = Target(random_model("llama"), tokenizer, name="padded")
    target.model.resize_token_embeddings(rows)
    target.vocab_size = rows
    assert mask_token(target, choice) == expected


def test_a_reduced_lm_head_begins_as_the_targets_rows(target):
    head = make_head(BlockHead, target, **SIZES, vocabulary=ODD)
    assert torch.equal(head.lm_head.weight, target.model.lm_head.weight[ODD])
