"""The promise: expand and rerank keeps what a slow search with plain lists keeps, in the same
order; fixed trees take the ranks that their paths say.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import pytest
import torch
from plain_drafting import Model, Path, paths_of, searched
from safetensors.torch import load_file, save_file
from tiny_heads import make_head
from tiny_targets import tiny_target

from draftheads.heads.formats.hub import HEADS, load_head, save_head
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree
from draftheads.heads.tree_drafting import DynamicTreeBuilder, tree_builder

ROOTS = [5, 6, 7]  # what follows differs, so that each row of a batch grows a tree of its own


def drawn_at_random(vocabulary: int, seed: int = 0) -> Model:
    """A model whose logits are a function of root and path."""

    def logits(root: int, path: Path) -> list[float]:
        name = zlib.crc32(repr((seed, root, path)).encode())
        return (2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(name))).tolist()

    return logits


def grow(builder, model: Model, roots: Sequence[int]) -> TokenTree:
    """Ask the model as a drafter does, level by level."""
    builder.start()
    paths: list[list[Path]] = [[()] for _ in roots]

    def answers():
        return torch.tensor(
            [[model(root, path) for path in row] for root, row in zip(roots, paths, strict=True)]
        )

    while builder.add(answers()):
        nodes = zip(builder.tokens_BF.tolist(), builder.parents_BF.tolist(), strict=True)
        paths = [
            [(*before[parent], token) for token, parent in zip(tokens, parents, strict=True)]
            for before, (tokens, parents) in zip(paths, nodes, strict=True)
        ]
    return builder.tree(torch.tensor(list(roots)))


#                        .6 a     .5 a        .7 b    The tree drafts the four likeliest of all
#   root is followed by  .35 b    .4 b        .2 a    candidates: a .6, b .35, bc .315 and, before
#                        .05 c    .1 c        .1 c    aa with .30, bca with .3087:
#                                after a    after aa
#                                                        root -- a
#                                .9 c      .98 a             `-- b -- c -- a
#                                .06 a      .01 b
#                                .04 b      .01 c
#                                after b    after bc
A, B, C = 0, 1, 2
CHANCES: dict[Path, dict[int, float]] = {
    (): {A: 0.6, B: 0.35, C: 0.05},
    (A,): {A: 0.5, B: 0.4, C: 0.1},
    (B,): {A: 0.06, B: 0.04, C: 0.9},
    (A, A): {A: 0.2, B: 0.7, C: 0.1},
    (B, C): {A: 0.98, B: 0.01, C: 0.01},
}


def test_the_tree_that_is_drawn():
    limits = DynamicTree(draft_nodes=4, depth=3, top_k=2)
    asked = []

    def model(root: int, path: Path) -> list[float]:
        asked.append(path)
        return [math.log(CHANCES[path][token]) for token in (A, B, C)]

    tree = grow(DynamicTreeBuilder(limits, None), model, [C])
    assert asked == [(), (A,), (B,), (B, C), (A, A)]  # the best two of a level, best first
    assert tree.tokens_BN.tolist() == [[C, A, B, C, A]]
    assert tree.topology.parents_BN.tolist() == [[-1, 0, 0, 2, 3]]


@pytest.mark.parametrize(
    ("likeliest", "levels", "depth"),
    [
        (1 / 12, 1, 1),  # all first tokens before any second one
        (0.3, 3, 2),  # .3, .09, twice .064; then .027
        (0.97, 4, 4),  # four in a chain
    ],
)
def test_a_search_ends_where_no_deeper_token_can_be_drafted(likeliest, levels, depth):
    """The best four nodes, where one token is as likely as said, and all others are alike."""
    asked = []

    def model(root: int, path: Path) -> list[float]:
        asked.append(len(path))
        others = (1 - likeliest) / 11
        return [math.log(likeliest if token == A else others) for token in range(12)]

    tree = grow(DynamicTreeBuilder(DynamicTree(4, 8, 4), None), model, [C])
    assert max(asked) + 1 == levels
    assert tree.topology.depths_BN.max() == depth and tree.tokens_BN.shape == (1, 5)


LIMITS = [
    DynamicTree(59, 8, 10),
    DynamicTree(16, 5, 4),
    DynamicTree(60, 4, 5),
    DynamicTree(10, 3, 2),
    DynamicTree(10, 10, 1),
    DynamicTree(4, 1, 5),
    DynamicTree(1, 3, 3),
]


@pytest.mark.parametrize("reduced", [False, True], ids=["all tokens", "draft vocabulary"])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_growing_equals_searching_with_plain_lists(limits, reduced):
    for seed in range(3):
        model = drawn_at_random(12, seed)
        token_map = torch.arange(12) * 3 + 1 if reduced else None
        names = token_map.tolist() if token_map is not None else list(range(12))
        tree = grow(tree_builder(limits, token_map, torch.device("cpu")), model, ROOTS)
        expected = [searched(model, root, limits, names) for root in ROOTS]
        assert [paths_of(tree, row) for row in range(3)] == expected
        assert tree.tokens_BN[:, 0].tolist() == ROOTS


def test_rows_of_a_batch_grow_their_own_trees():
    tree = grow(DynamicTreeBuilder(DynamicTree(16, 5, 4), None), drawn_at_random(12), ROOTS)
    assert len({tuple(parents) for parents in tree.topology.parents_BN.tolist()}) == 3
    assert tree.topology.depths_BN.amax(1).tolist() != [5, 5, 5]


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 9, 14, 30])
def test_searching_less_for_a_smaller_tree_loses_nothing(nodes):
    large = DynamicTree(30, 6, 5)
    for seed in range(10):
        model = drawn_at_random(9, seed)
        small = grow(DynamicTreeBuilder(large.resized(nodes), None), model, ROOTS)
        for row, root in enumerate(ROOTS):
            whole = DynamicTree(nodes, large.depth, large.top_k)
            assert paths_of(small, row) == searched(model, root, whole, range(9))


def certain(path: Path) -> list[float]:
    """Probability 1 for the token whose number is the depth."""
    return [1000.0 if token == len(path) else 0.0 for token in range(6)]


EQUAL = {
    "one certain token": certain,
    "all alike": lambda path: [0.0] * 6,
    "most impossible": lambda path: [0.0, 0.0] + [-math.inf] * 4,
    "no numbers": lambda path: [math.nan] * 6,
    "no number among them": lambda path: [0.0, math.nan, 1.0, 2.0, 3.0, 4.0],
    "no numbers after one token": lambda path: [
        math.nan if 2 in path else 0.1 * n for n in range(6)
    ],
    "no numbers deeper down": lambda path: [
        math.nan if len(path) > 1 else 0.1 * n for n in range(6)
    ],
    "infinite": lambda path: [math.inf, math.inf, 0.0, 0.0, 0.0, math.inf],
}


@pytest.mark.parametrize("logits", EQUAL.values(), ids=EQUAL)
@pytest.mark.parametrize("limits", [DynamicTree(7, 4, 3), DynamicTree(30, 4, 3)], ids=str)
def test_equal_scores_still_give_a_tree(limits, logits):
    tree = grow(DynamicTreeBuilder(limits, None), lambda root, path: logits(path), ROOTS)
    paths = [paths_of(tree, row) for row in range(3)]
    assert [len(row) for row in paths] == [limits.draft_nodes] * 3


def test_certain_tokens_are_kept_before_any_other():
    limits = DynamicTree(4, 4, 3)
    tree = grow(DynamicTreeBuilder(limits, None), lambda root, path: certain(path), [C])
    assert paths_of(tree, 0) == [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)]


SHAPES = {
    "expansion": StaticTree.from_widths((3, 2, 1)),
    "chain": StaticTree.from_widths((1, 1, 1, 1)),
    "ragged": StaticTree(((1,), (1, 0), (0,), (3,), (1, 0, 2), (3, 1), (1, 0, 2, 0), (3, 1, 0))),
    "one": StaticTree(((0,),)),
    "nothing": StaticTree(()),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fixed_trees_take_the_ranks_of_their_paths(shape):
    model, token_map = drawn_at_random(8), torch.arange(8) * 2 + 1
    builder = tree_builder(shape, token_map, torch.device("cpu"))
    tree = grow(builder, model, ROOTS)
    for row, root in enumerate(ROOTS):
        tokens: dict[Path, Path] = {(): ()}
        for ranks in sorted(shape.paths, key=lambda path: (len(path), path)):
            before = tokens[ranks[:-1]]
            logits = model(root, before)
            order = sorted(range(8), key=lambda place, logits=logits: -logits[place])
            tokens[ranks] = (*before, int(token_map[order[ranks[-1]]]))
        assert paths_of(tree, row) == list(tokens.values())[1:]
    again = grow(builder, model, ROOTS)
    assert torch.equal(tree.tokens_BN, again.tokens_BN)


@pytest.mark.parametrize("unfit", [(1, 1, 5), (1, 5, 1)], ids=["side by side", "apart"])
@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("medusa", "token_map", "distinct target ids from 0 to 18, got 2 distinct of 3"),
        ("eagle3", "d2t", "for each token in t2d, got 3 ids from 1 to 5"),
    ],
)
def test_a_draft_vocabulary_with_an_id_twice_is_refused(tmp_path, kind, name, message, unfit):
    """Equal children after one token would make sampling inexact."""
    head = make_head(HEADS[kind], tiny_target(), vocabulary=[1, 5, 9])
    folder = save_head(head, tmp_path / "head", target=tiny_target())
    weights = load_file(folder / "model.safetensors")
    weights[name] = torch.tensor(unfit) - (torch.arange(3) if name == "d2t" else 0)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_head(folder)
