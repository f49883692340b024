"""The promise: a sequential head computes what a slow restatement of the papers does: in training
its loss, ranks and every gradient, in drafting every tree, whichever way its levels are computed.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from plain_eagle import plain_loss, plain_rank
from plain_hydra import PlainSequential, awake
from test_training_time_test import assert_equal
from test_tree_drafting import paths_of, searched
from tiny_heads import make_head
from tiny_targets import VOCABULARY, tiny_target

from draftheads.heads.batch import Batch
from draftheads.heads.drafting import Committed
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.losses import RANKS
from draftheads.heads.sequential import CONDITIONINGS, SequentialHead
from draftheads.heads.target import Target
from draftheads.heads.tree import DynamicTree, StaticTree

DEPTH = 3
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
def target() -> Target:
    return tiny_target()


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


COMMITS = [[7, 4], [2, 3], [1, 3]]  # tokens that each of two rows gets in each step
FIXED = StaticTree(((1,), (0,), (0, 0), (0, 2), (1, 1), (3,), (0, 2, 0), (1, 1, 4), (0, 2, 1)))
TREES = [FIXED, StaticTree.from_widths((2, 1)), DynamicTree(12, 3, 3), DynamicTree(5, 2, 4)]


def two_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and features, drawn."""
    torch.manual_seed(9)
    return torch.randint(0, VOCABULARY, (2, 13)), torch.randn(2, 13, 32)


def committed_steps(tokens_BT, features_BTD) -> list[Committed]:
    """What a drafter is handed when two texts grow by COMMITS; the padding is not zero."""
    steps, done = [], [0, 0]
    for counts in COMMITS:
        places_BC = torch.tensor(done)[:, None] + torch.arange(max(counts))
        rows_B1 = torch.arange(2)[:, None]
        new = (tokens_BT[rows_B1, places_BC], features_BTD[rows_B1, places_BC])
        steps.append(Committed(*new, torch.tensor(counts), counts))
        done = [before + count for before, count in zip(done, counts, strict=True)]
    return steps


def expected_paths(model, root: int, tree, names) -> list[tuple[int, ...]]:
    """The token paths of a tree, in the order of its nodes."""
    if isinstance(tree, DynamicTree):
        return searched(model, root, tree, names)
    tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for ranks in sorted(tree.paths, key=lambda path: (len(path), path)):
        before = tokens[ranks[:-1]]
        logits = model(root, before)
        order = sorted(range(len(names)), key=lambda place: -logits[place])  # noqa: B023
        tokens[ranks] = (*before, names[order[ranks[-1]]])
    return list(tokens.values())[1:]


def plain_drafts(plain: Any, tokens_BT, features_BTD) -> list[Any]:
    """Token paths of each row, in each step, for each of TREES, as a restatement drafts them."""
    texts = [plain.inputs(features_TD) for features_TD in features_BTD]
    drafts, done = [], [0, 0]
    for counts in COMMITS:
        done = [before + count for before, count in zip(done, counts, strict=True)]
        for row, length in enumerate(done):
            known: dict[Any, Any] = {}

            def model(root, path, state_D=texts[row][length - 1], known=known):
                if path not in known:
                    known[path] = plain.logits(state_D, (root, *path)).tolist()
                return known[path]

            root = int(tokens_BT[row, length - 1])
            drafts.append([expected_paths(model, root, tree, plain.vocabulary) for tree in TREES])
    return drafts


def drafts_of(head: SequentialHead, target: Target, tokens_BT, features_BTD) -> list[Any]:
    """The same, as the head drafts them."""
    drafters, drafts = [head.drafter(target, tree) for tree in TREES], []
    for committed in committed_steps(tokens_BT, features_BTD):
        trees = [drafter.propose(committed) for drafter in drafters]
        drafts += [[paths_of(tree, row) for tree in trees] for row in range(2)]
    return drafts


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
            assert (products.logits_rv is None) == (conditioning != "markov" and not is_thin)
        assert drafts_of(head, target, tokens_BT, features_BTD) == expected


def test_a_recurrent_head_of_depth_one_is_read_back(target, tmp_path):
    folder = save_head(make_head(SequentialHead, target, depth=1), tmp_path / "head", target=target)
    assert load_head(folder, target=target).config()["conditioning"] == "recurrent"
