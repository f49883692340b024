"""The promise: trees are what they say, masks show ancestors only, and builders find the best
nodes.
"""

from __future__ import annotations

import pytest
import torch

from draftheads.heads.cache import SlotTable
from draftheads.heads.tree import StaticTree, Topology, check_fits, parse_tree

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


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (((0,), (0,)), "got one twice"),
        (((0,), (1, 0)), r"no parent; add \[1\]"),
        (((),), "one or more ranks"),
        (((-1,),), "ranks from 0 on"),
    ],
)
def test_bad_trees_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        StaticTree(paths)


def test_a_tree_deeper_than_the_head_is_refused():
    with pytest.raises(ValueError, match="3 deep, the head predicts only 2"):
        check_fits(StaticTree.from_widths((1, 1, 1)), 9, 2)
    with pytest.raises(ValueError, match="the 9 best tokens, the head knows only 8"):
        check_fits(StaticTree.from_widths((9,)), 8)


def test_trees_from_the_command_line():
    assert parse_tree("2,1") == StaticTree.from_widths((2, 1))
    assert parse_tree("[[0],[0,0],[1]]") == StaticTree(((0,), (0, 0), (1,)))
