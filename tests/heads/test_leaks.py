"""The promise: in training, nobody sees what a drafter could not: no other document (nor does the
target), no feature behind the root, no first token of a text.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_hydra import awake
from tiny_heads import DOMINO, make_head
from tiny_targets import (
    CONFIGS,
    MASKLESS,
    UNEVEN,
    some_prompts,
    tiny_target,
)

from draftheads.heads.batch import Batch
from draftheads.heads.block import BlockHead
from draftheads.heads.eagle import Eagle3Head, EagleHead
from draftheads.heads.sequential import SequentialHead
from draftheads.heads.training_time_test import Sight, unroll

# Two documents, A and B, and one token of padding; l marks what is learned.
#     A  A  A  A  A  B  B  B  B  -
#           l  l  l     l  l  l
BATCH = Batch(
    torch.tensor([[3, 5, 7, 9, 11, 4, 6, 8, 10, 0]]),
    torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 0]]).bool(),
    torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0]]),
    torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, -1]]),
)
VISIBLE = """
    T F F F F F F F F F
    F T F F F F F F F F
    F T T F F F F F F F
    F T T T F F F F F F
    F T T T T F F F F F
    F F F F F T F F F F
    F F F F F F T F F F
    F F F F F F T T F F
    F F F F F F T T T F
    F F F F F F F F F T
"""
VISIBLE_IN_A_WINDOW_OF_2 = """
    T F F F F F F F F F
    F T F F F F F F F F
    F T T F F F F F F F
    F F T T F F F F F F
    F F F T T F F F F F
    F F F F F T F F F F
    F F F F F F T F F F
    F F F F F F T T F F
    F F F F F F F T T F
    F F F F F F F F F T
"""

# Everything that is judged, as (root, step); which features and which tokens change it.
JUDGED = [(2, 0), (2, 1), (3, 0), (6, 0), (6, 1), (7, 0)]
FEATURES = """
    F T T F F F F F F F
    F T T F F F F F F F
    F T T T F F F F F F
    F F F F F F T F F F
    F F F F F F T F F F
    F F F F F F T T F F
"""
TOKENS = """
    F T T F F F F F F F
    F T T T F F F F F F
    F T T T F F F F F F
    F F F F F F T F F F
    F F F F F F T T F F
    F F F F F F T T F F
"""
THE_ROOT_ALONE = """
    F F T F F F F F F F
    F F T F F F F F F F
    F F F T F F F F F F
    F F F F F F T F F F
    F F F F F F T F F F
    F F F F F F F T F F
"""
TOKENS_BEHIND_THE_ROOT = """
    F F T F F F F F F F
    F F T T F F F F F F
    F F F T F F F F F F
    F F F F F F T F F F
    F F F F F F T T F F
    F F F F F F F T F F
"""


def packed(*documents: list[int]) -> Batch:
    """One row of these documents, and a token of padding."""
    tokens = [token for document in documents for token in document]
    positions = [place for document in documents for place in range(len(document))]
    numbers = [number for number, document in enumerate(documents) for _ in document]
    tokens_BT = torch.tensor([[*tokens, 0]])
    return Batch(
        tokens_BT, tokens_BT > 0, torch.tensor([[*positions, 0]]), torch.tensor([[*numbers, -1]])
    )


@pytest.mark.parametrize("name", sorted({**CONFIGS, **UNEVEN, **MASKLESS}))
def test_features_of_packed_documents_are_those_of_each_alone(name):
    """Longer than the windows of those that have one; a document of one token, too."""
    target, documents = tiny_target(name), some_prompts(11, 1, 14, 5)
    layers = [0, 1, target.layers]
    together = target.features(packed(*documents), layers)
    start = 0
    for document in documents:
        alone = target.features(packed(document), layers)[:, 1 : len(document)]
        here = together[:, start + 1 : start + len(document)]
        torch.testing.assert_close(here, alone, rtol=1e-3, atol=1e-3 * float(together.abs().max()))
        prefilled = target.prefill([document], target.new_cache(1, 32), layers).features_BND
        torch.testing.assert_close(
            here, prefilled[:, :-1], rtol=1e-3, atol=1e-3 * float(together.abs().max())
        )
        start += len(document)


@pytest.mark.parametrize("name", sorted({**CONFIGS, **UNEVEN}.keys() - MASKLESS.keys()))
def test_where_position_resets_are_enough_training_makes_no_mask(name, monkeypatch):
    target, masks = tiny_target(name), []
    monkeypatch.setattr(target.masks, "packed", lambda batch: masks.append(batch))
    target.features(packed(*some_prompts(4, 3)), [-1])
    assert not masks


def drawn(table: str) -> list[list[bool]]:
    return [[letter == "T" for letter in line.split()] for line in table.strip().splitlines()]


def test_step_0_sees_what_is_drawn():
    for window, table in ((None, VISIBLE), (2, VISIBLE_IN_A_WINDOW_OF_2)):
        mask_B1TT = Sight(BATCH, window).mask(slice(0, 10), torch.float32)
        assert (mask_B1TT[0, 0] == 0).tolist() == drawn(table)


@pytest.fixture(params=[Eagle3Head, EagleHead], ids=lambda kind: kind.kind)
def said(request):
    """A function: (tokens_BT, hidden_BTH) -> hidden states (R, H) in the order of JUDGED."""
    head = make_head(request.param, tiny_target(), layers=2)

    def log(tokens_BT, hidden_BTH):
        unrolled = unroll(head, replace(BATCH, tokens_BT=tokens_BT), hidden_BTH, tiny_target(), 4)
        roots_R = unrolled.places_R - unrolled.steps_R - 1
        rows = list(zip(roots_R.tolist(), unrolled.steps_R.tolist(), strict=True))
        assert sorted(rows) == JUDGED
        return unrolled.hidden_RH[[rows.index(each) for each in JUDGED]]

    with torch.no_grad():
        yield log


@pytest.fixture(params=["recurrent", "hydra"])
def said_behind_a_prefix(request):
    """The same of a sequential head: its prefix layer reads the features alone, its heads read the
    root and the tokens behind it.
    """
    target = tiny_target()
    head = make_head(SequentialHead, target, conditioning=request.param, depth=2, prefix=True)
    head = awake(head)

    def log(tokens_BT, hidden_BTH):
        batch, said = replace(BATCH, tokens_BT=tokens_BT), {}
        for step, (roots_M, hidden_MD, _) in enumerate(head.predictions(batch, hidden_BTH, target)):
            places = zip(roots_M.tolist(), hidden_MD, strict=True)
            said |= {(root, step): row for root, row in places}
        assert sorted(said) == JUDGED
        return torch.stack([said[each] for each in JUDGED])

    with torch.no_grad():
        yield log


@pytest.fixture(params=["none", "markov", "rnn", "domino"])
def block(request):
    choices = {"block_size": 2, "mask": 3, "feature_layers": [3], "rank": 4}
    choices["conditioning"] = request.param
    if request.param == "domino":
        choices |= {"conditioning": "none", "design": DOMINO}
    return awake(make_head(BlockHead, tiny_target(), **choices))


@pytest.fixture
def said_by_a_block(block):
    """The same of a block head: the logits of each slot, with what its conditioning adds."""

    def log(tokens_BT, hidden_BTH):
        batch, target = replace(BATCH, tokens_BT=tokens_BT), tiny_target()
        masks = BATCH.root_masks(2)
        blocks = block._blocks(batch, hidden_BTH, target, masks, masks[0])
        states_MD, weight_vD, _, plus = block._factors(batch, blocks, target)
        logits_Mv = states_MD @ weight_vD.T + (plus[0] @ plus[1].T if plus else 0.0)
        real = np.argwhere(np.stack(masks, axis=-1)[0])
        assert [tuple(each) for each in real] == JUDGED
        return logits_Mv.view(*blocks.real_MK.shape, -1)[blocks.real_MK]

    with torch.no_grad():
        yield log


def influence(said, changes) -> list[list[bool]]:
    """Line per thing judged, column per change: whether it made a difference."""
    torch.manual_seed(7)
    tokens_BT, hidden_BTH = BATCH.tokens_BT, torch.randn(1, 10, 32)
    before_RH = said(tokens_BT, hidden_BTH)
    columns = []
    for place in range(10):
        after_RH = said(*changes(place, tokens_BT.clone(), hidden_BTH.clone()))
        columns.append((after_RH - before_RH).abs().amax(1) > 1e-5)
    return torch.stack(columns, dim=1).tolist()


def other_feature(place, tokens_BT, hidden_BTH):
    hidden_BTH[0, place] = -hidden_BTH[0, place]
    return tokens_BT, hidden_BTH


def other_token(place, tokens_BT, hidden_BTH):
    tokens_BT[0, place] = 15
    return tokens_BT, hidden_BTH


def test_features_reach_what_is_drawn(said):
    assert influence(said, other_feature) == drawn(FEATURES)


def test_tokens_reach_what_is_drawn(said):
    assert influence(said, other_token) == drawn(TOKENS)


def test_behind_a_prefix_layer_features_reach_the_same(said_behind_a_prefix):
    assert influence(said_behind_a_prefix, other_feature) == drawn(FEATURES)


def test_behind_a_prefix_layer_tokens_since_the_root_matter(said_behind_a_prefix):
    assert influence(said_behind_a_prefix, other_token) == drawn(TOKENS_BEHIND_THE_ROOT)


def test_blocks_see_the_features_up_to_their_anchor(said_by_a_block):
    assert influence(said_by_a_block, other_feature) == drawn(FEATURES)


def test_blocks_see_their_anchor_and_what_their_conditioning_brings(block, said_by_a_block):
    """Never a token of another block, nor one that is still to be predicted."""
    seen = THE_ROOT_ALONE if block.conditioning is None else TOKENS_BEHIND_THE_ROOT
    assert influence(said_by_a_block, other_token) == drawn(seen)
