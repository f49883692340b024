"""The promise: training is drafting. What an unrolled head says at a root, with the tokens of a
draft given, is what the drafter said when it drafted them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_eagle import awake
from tiny_heads import make_head
from tiny_targets import VOCABULARY, some_prompts, tiny_target
from torch import Tensor

from draftheads.heads.batch import Batch
from draftheads.heads.drafting import Committed
from draftheads.heads.eagle import Eagle3Head, EagleDrafter, EagleHead
from draftheads.heads.training_time_test import unroll
from draftheads.heads.tree import StaticTree, TokenTree

TARGET = tiny_target()
SIZES: dict[str, Any] = {"head_dim": 8, "kv_heads": 2, "rope_theta": 20.0}
ODD = list(range(1, VOCABULARY, 2))
HEADS = {
    "eagle3": (Eagle3Head, {"vocabulary": ODD}),
    "eagle3, two layers and a window": (Eagle3Head, {"layers": 2, "sliding_window": 4}),
    "eagle3.1": (Eagle3Head, {"fc_norm": True, "norm_output": True}),
    "eagle3, Qwen3's layers": (Eagle3Head, {"qk_norm": True, "layers": 2}),
    "eagle": (EagleHead, {}),
    "eagle, two layers and a window": (EagleHead, {"layers": 2, "sliding_window": 4}),
}
SHAPES = {"chain": StaticTree.from_widths((1,) * 5), "tree": StaticTree.from_widths((3, 2, 2))}

TEXTS = some_prompts(14, 14, seed=8)
COMMITS = [[7, 5], [2, 3], [1, 4], [0, 1], [0, 1]]  # tokens of both rows; the first one ends early


def document(tokens: list[int], learned_from: int) -> Batch:
    loss_mask_BT = torch.arange(len(tokens))[None] >= learned_from
    positions_BT = torch.arange(len(tokens))[None]
    return Batch(torch.tensor([tokens]), loss_mask_BT, positions_BT, torch.zeros_like(positions_BT))


def committed(head: Any, done: list[int], counts: list[int]) -> Committed:
    """The next `counts` tokens of each text; what pads them is noise."""
    longest = max(counts)
    tokens_BC = torch.full((2, longest), 3)
    features = []
    for row, (start, count) in enumerate(zip(done, counts, strict=True)):
        text = document(TEXTS[row], 0)
        tokens_BC[row, :count] = text.tokens_BT[0, start : start + count]
        features_TD = TARGET.features(text, head.feature_layers)[0]
        padding_CD = torch.full((longest - count, features_TD.shape[1]), 9.0)
        features.append(torch.cat([features_TD[start : start + count], padding_CD]))
    return Committed(tokens_BC, torch.stack(features), torch.tensor(counts), counts)


def drafted(head: Any, shape: StaticTree) -> list[tuple[list[int], TokenTree, list[Tensor]]]:
    """After each commit: (tokens committed so far, the tree, logits of each level (B, F, v))."""
    drafter = EagleDrafter(head, TARGET, shape)
    told: list[Tensor] = []
    states = head.states
    head.states = lambda hidden: told.append(states(hidden)) or told[-1]
    done, steps = [0, 0], []
    for counts in COMMITS:
        told.clear()
        tree = drafter.propose(committed(head, done, counts))
        done = [old + new for old, new in zip(done, counts, strict=True)]
        logits = [states_BFD @ head.unembed_weight(TARGET).T for states_BFD in told]
        steps.append((done, tree, logits))
    head.states = states
    return steps


def trained(head: Any, text: list[int], drafts: list[int]) -> Tensor:
    """Logits (steps, v) of the last token of `text` as a root, with the drafts given."""
    batch = document([*text, *drafts, 0], len(text) - 1)
    features_BTD = TARGET.features(batch, head.feature_layers)
    features_BTD[:, len(text) :] = 9.0  # these no drafter would have
    steps = len(drafts) + 1
    unrolled = unroll(head, batch, head.fuse(features_BTD), TARGET, steps)
    of_root_R = unrolled.places_R - unrolled.steps_R - 1 == len(text) - 1
    assert unrolled.steps_R[of_root_R].tolist() == list(range(steps))
    return head.states(unrolled.hidden_RH[of_root_R]) @ head.unembed_weight(TARGET).T


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_drafting_says_what_training_says(name, shape):
    """In two rows of different lengths, for every node that has children."""
    kind, choices = HEADS[name]
    head = awake(make_head(kind, TARGET, **{**SIZES, **choices})).eval()
    names = torch.arange(VOCABULARY) if head.token_map is None else head.token_map
    parents = shape.topology().parents_BN[0].tolist()
    for (done, tree, logits), counts in zip(drafted(head, shape), COMMITS, strict=True):
        for row in (row for row in (0, 1) if counts[row]):
            tokens = tree.tokens_BN[row].tolist()
            assert tokens[0] == TEXTS[row][done[row] - 1]
            drafts: list[list[int]] = [[]]
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                drafts.append([*drafts[parent], token])
            for depth, told_BFv in enumerate(logits):
                asked = [node for node in range(len(tokens)) if len(drafts[node]) == depth]
                for place, node in enumerate(asked):
                    said_v = trained(head, TEXTS[row][: done[row]], drafts[node])[depth]
                    torch.testing.assert_close(told_BFv[row, place], said_v, rtol=1e-4, atol=1e-4)
                    children = [tokens[n] for n, parent in enumerate(parents) if parent == node]
                    best = names[said_v.topk(len(children)).indices]
                    assert children == best.tolist()
