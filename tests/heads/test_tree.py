"""The promise: trees are what they say or refused, masks show ancestors only, builders find the
best nodes, and every tree survives being written down.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftheads.heads.cache import SlotTable
from draftheads.heads.formats.facts import HeadFacts
from draftheads.heads.tree import (
    NODES,
    ORDERED,
    DynamicTree,
    StaticTree,
    Topology,
    check_fits,
    parse_tree,
    tree_from_json,
)

#       0
#      / \
#     1   2
#    / \   \
#   3   4   5
#   |
#   6
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
DRAWN = """
    T F F F F F F
    T T F F F F F
    T F T F F F F
    T T F T F F F
    T T F F T F F
    T F T F F T F
    T T F T F F T
"""


def drawn(table: str) -> list[list[bool]]:
    return [[letter == "T" for letter in line.split()] for line in table.strip().splitlines()]


def test_ancestors_as_drawn():
    topology = Topology(torch.tensor([PARENTS]))
    assert topology.ancestors_BNN[0].tolist() == drawn(DRAWN)
    assert topology.depths_BN[0].tolist() == [0, 1, 1, 2, 2, 2, 3]


def test_rows_may_have_their_own_topology():
    chain = [-1, 0, 1, 2, 3, 4, 5]
    topology = Topology(torch.tensor([PARENTS, chain]))
    assert topology.ancestors_BNN[0].tolist() == drawn(DRAWN)
    assert topology.ancestors_BNN[1].tolist() == torch.ones(7, 7).tril().bool().tolist()


def test_visibility_of_rows_with_different_lengths():
    """Two rows of 3 and 1 committed tokens, a tree 0-1, 0-2 behind them; slots 0..5."""
    table = SlotTable(2, 6, "cpu")
    table.set_lengths([3, 1])
    table.reserve(3)
    topology = Topology(torch.tensor([[-1, 0, 0]]))
    visible_BNS = table.visible(topology.ancestors_BNN)
    positions_BS = table.positions(topology.depths_BN)
    assert visible_BNS[0].tolist() == drawn("T T T T F F \n T T T T T F \n T T T T F T")
    assert visible_BNS[1].tolist() == drawn("T T F F F F \n T T T F F F \n T T F T F F")
    assert positions_BS[0].tolist() == [0, 1, 2, 3, 4, 4]
    assert positions_BS[1].tolist()[:4] == [0, 1, 2, 2]


def test_uniform_rows_take_the_short_way_to_the_same_mask():
    topology = Topology(torch.tensor([PARENTS]))
    short, long = SlotTable(2, 20, "cpu"), SlotTable(2, 20, "cpu")
    for table in (short, long):
        table.set_lengths([4, 4])
        table.reserve(7)
    long.uniform = False
    visible = long.visible(topology.ancestors_BNN)
    assert torch.equal(short.visible(topology.ancestors_BNN).expand_as(visible), visible)
    positions = long.positions(topology.depths_BN)
    assert torch.equal(short.positions(topology.depths_BN).expand_as(positions), positions)


def test_expansion():
    shape = StaticTree.from_widths((2, 1, 2))
    assert set(shape.paths) == {
        (0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)
    }  # fmt: skip
    assert (shape.depth, shape.width, shape.nodes) == (3, 2, 9)
    assert shape.topology().parents_BN.tolist() == [[-1, 0, 0, 1, 2, 3, 3, 4, 4]]


def test_best_first_takes_the_likeliest_nodes():
    shape = StaticTree.best_first([[0.5, 0.3, 0.1], [0.6, 0.1, 0.0]], 5)
    # .5, .3, .5*.6 = .30, .3*.6 = .18, then .1 (path 2) before .5*.1 = .05
    assert shape.paths == ((0,), (1,), (0, 0), (1, 0), (2,)) or shape.paths == (
        (0,), (0, 0), (1,), (1, 0), (2,)
    )  # fmt: skip


def test_best_first_equals_exhaustive_choice():
    generator = torch.Generator().manual_seed(0)
    accuracies = torch.rand(3, 4, generator=generator).sort(1, descending=True).values / 2
    everything = StaticTree.from_widths((4, 4, 4))
    value = {
        path: float(torch.stack([accuracies[d, r] for d, r in enumerate(path)]).prod())
        for path in everything.paths
    }
    best = sorted(value, key=lambda path: -value[path])[:12]
    assert set(StaticTree.best_first(accuracies.tolist(), 12).paths) == set(best)


def test_most_frequent_is_the_best_tree_for_what_was_observed():
    ranks_MK = torch.tensor([[0, 0, 1]] * 5 + [[1, 0, -1]] * 3 + [[0, 2, 0]] * 2 + [[-1, 0, 0]])
    shape = StaticTree.most_frequent(ranks_MK, 4)
    # counts: (0,) 7, (0,0) 5, (0,0,1) 5, (1,) 3, (1,0) 3, (0,2) 2, (0,2,0) 2
    assert shape.paths == ((0,), (0, 0), (0, 0, 1), (1,))
    assert shape.expected_tokens(ranks_MK) == pytest.approx(1 + (7 + 5 + 5 + 3) / 11)
    assert shape.resized(2).paths == ((0,), (0, 0))


NO_TREES = [
    "[]", "", "null", "[null]", "1.5", "true", "[[1.5]]", "[[true]]", '[["0"]]', "[[0],1]", "[{}]",
    "NaN", "1e400", "[[1e400]]", "[" * 20000, "9" * 5000, "4;2",
]  # fmt: skip
NO_JSON = [None, 3, "4,2", [0], [[0.5]], [None], {"nodes": 3}, {"depth": 2.5}]
CHAIN, WIDE = StaticTree.from_widths((1, 1, 1)), StaticTree.from_widths((9,))
WIDTHS = "expected widths like 4,2,1, paths"
OF_SEARCHES = "nodes=16,depth=5,top_k=4|1 or more of each"
REFUSED: list[tuple[Callable[..., object], Any, str]] = [
    (StaticTree, ((0,), (0,)), "got one twice"),
    (StaticTree, ((0,), (1, 0)), r"no parent; add \[1\]"),
    (StaticTree, ((),), "one or more ranks"),
    (StaticTree, ((-1,),), "ranks from 0 on"),
    (lambda tree: check_fits(tree, 9, 2), CHAIN, "3 deep, the head predicts only 2"),
    (lambda tree: check_fits(tree, 8), WIDE, "the 9 best tokens, the head knows only 8"),
    *((parse_tree, text, f"^tree .*{WIDTHS}") for text in NO_TREES),
    *(
        (parse_tree, text, OF_SEARCHES)
        for text in ("nodes=", "nodes=x", "width=3", "nodes=16,4", "nodes=-1")
    ),
    *(
        (parse_tree, text, "at most 1024 draft nodes, got")
        for text in ("1000,1000,1000,1000", "5000", "nodes=99999,depth=99,top_k=400")
    ),
    *((tree_from_json, value, WIDTHS) for value in NO_JSON),
    # a published head may ask for one: it loaded, and drafted for minutes
    (tree_from_json, [[0] * depth for depth in range(1, 200)], "at most 128 levels, got 199"),
    (tree_from_json, [[rank] for rank in range(4095)], "at most 1024 draft nodes, got 4095"),
    *(
        (tree_from_json, {"draft_nodes": nodes, "depth": depth, "top_k": top_k}, said)
        for nodes, depth, top_k, said in (
            (4095, 8, 60, "at most 1024 draft nodes, got 4095"),
            (8, 1000, 8, "at most 128 levels, got 1000"),
            (8, 100, 1000, "at most 65536 candidates, got 99001000; lower depth or top_k"),
        )
    ),
    *(
        (lambda limits: DynamicTree(*limits), limits, "expected 1 or more of each")
        for limits in ((0, 5, 4), (16, 0, 4), (16, 5, 0))
    ),
]


@pytest.mark.parametrize(("made", "value", "said"), REFUSED, ids=lambda x: str(x)[:20])
def test_what_is_no_tree_or_too_large_is_refused_in_one_line(made, value, said):
    with pytest.raises(ValueError, match=said) as refusal:
        made(value)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_trees_from_the_command_line():
    assert parse_tree("2,1") == StaticTree.from_widths((2, 1))
    assert parse_tree("[[0],[0,0],[1]]") == StaticTree(((0,), (0, 0), (1,)))
    assert parse_tree("nodes=16,depth=5,top_k=4") == DynamicTree(16, 5, 4)
    assert parse_tree("nodes=16") == DynamicTree(16) == DynamicTree(16, 8, 4)
    assert parse_tree("top_k=4, nodes=16") == DynamicTree(16, 8, 4)
    assert parse_tree(str(DynamicTree(16, 5, 4))) == DynamicTree(16, 5, 4)


TREES = [
    StaticTree.from_widths((4, 2, 1)),
    StaticTree(((1,), (0,), (1, 3))),
    StaticTree(()),
    DynamicTree(),
    DynamicTree(16, 5, 4),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_trees_survive_json(tree):
    assert tree_from_json(json.loads(json.dumps(tree.to_json()))) == tree


def test_a_search_has_as_many_candidates_as_it_verifies():
    assert DynamicTree(4 + 2 * 16, 3, 4).nodes == 37
    with pytest.raises(ValueError, match="has 36 candidates, got 37 draft nodes; use fewer"):
        DynamicTree(37, 3, 4)


def test_every_smaller_tree_of_a_search_exists():
    for tree in (DynamicTree(), DynamicTree(16, 2, 4), DynamicTree(6, 6, 1), DynamicTree(5, 1, 5)):
        sizes = [tree.resized(nodes).draft_nodes for nodes in range(1, tree.draft_nodes + 1)]
        assert sizes == [*range(1, tree.draft_nodes + 1)]
    assert DynamicTree(59, 8, 10).resized(3) == DynamicTree(3, 3, 3)


def test_every_size_is_cut_from_the_paths_that_are_known():
    """A new head drafts few nodes; `resized` finds the larger trees, too, in order of use."""
    for order in (StaticTree.unfitted(5), StaticTree.most_frequent(torch.randint(6, (500, 4)), 8)):
        assert (order.draft_nodes, len(order.order)) == (NODES, ORDERED) == (8, 64)
        for nodes in (1, 8, 9, 64):
            tree = order.resized(nodes)
            assert tree == StaticTree(order.order[:nodes]) and tree.order == order.order
        assert order.resized(99) == order.resized(64)
    recorded = {"tree": [[1], [0]], "tree_order": [[0], [0, 0], [1], [0, 1]]}
    assert HeadFacts(recorded).tree.order == ((1,), (0,), (0, 0), (0, 1))


def test_a_search_grows_up_to_its_candidates():
    assert DynamicTree(8, 5, 4).resized(60) == DynamicTree(60, 5, 4)
    assert DynamicTree(8, 5, 4).resized(99) == DynamicTree(68, 5, 4)
    assert DynamicTree(60, 5, 4).resized(3) == DynamicTree(3, 3, 3)
    assert DynamicTree(4, 4, 1).resized(60) == DynamicTree(4, 4, 1), "a chain"


def test_the_tree_of_the_root_alone():
    nothing = StaticTree(())
    assert (nothing.depth, nothing.width, nothing.draft_nodes, nothing.nodes) == (0, 0, 0, 1)
    assert nothing.topology().parents_BN.tolist() == [[-1]]
    assert nothing.topology().ancestors_BNN.tolist() == [[[True]]]
    assert nothing.topology().depths_BN.tolist() == [[0]]
    assert StaticTree.from_widths((4, 2)).resized(0) == nothing
