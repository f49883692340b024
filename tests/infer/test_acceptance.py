"""The promise: sampled output follows the target's own distribution; lossy rules follow their
formulas.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from exact_laws import (
    RUNS,
    FreshDraws,
    MarkovTarget,
    chi_square,
    small_head,
    surely_below,
    two_tokens,
    whole_engine_statistic,
)
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftheads.heads.tree import StaticTree, TokenTree, Topology
from draftheads.infer.accept import Greedy, Sampled, filtered_logits
from draftheads.infer.draws import Draws
from draftheads.infer.lossy import Lenient, Typical
from draftheads.infer.paths import stacked

RULES = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.8, 0), (1.0, 1.0, 3), (0.9, 0.9, 4)]


@pytest.mark.parametrize("widths", [(1, 1), (3, 2), (6, 6)])
@pytest.mark.parametrize("rule", RULES)
def test_sampled_distribution_is_exact(rule, widths):
    """The first two tokens of a step (accepted or bonus, then drawn onwards) have the plain chain's
    law.
    """
    target, root = MarkovTarget(), 2
    shape = StaticTree.from_widths(widths)
    guesses = target.logits_VV.argsort(-1, descending=True)
    tokens = [root]
    for path in shape.paths:
        parent = tokens[0] if len(path) == 1 else tokens[1 + shape.paths.index(path[:-1])]
        tokens.append(int(guesses[parent, path[-1]]))
    tokens_BN = torch.tensor([tokens]).expand(RUNS, -1)
    accept = Sampled(*rule, draws=FreshDraws(RUNS, 1))
    observed = two_tokens(target, TokenTree(tokens_BN, shape.topology()), accept)
    statistic, freedom = chi_square(observed, target.two_token_law(root, *rule))
    assert statistic < surely_below(freedom)


def test_the_chi_square_test_notices_a_bias():
    law = MarkovTarget().two_token_law(2, 1.0, 1.0, 0)
    wrong = MarkovTarget().two_token_law(2, 1.15, 1.0, 0)
    observed = Counter({key: round(p * RUNS) for key, p in wrong.items()})
    statistic, freedom = chi_square(observed, law)
    assert statistic > surely_below(freedom)


@pytest.mark.slow
def test_sampled_output_of_the_whole_engine_has_the_targets_law(small_target):
    """With one head: by the same draws, test_conformance.py has every text of all drafters."""
    head = small_head("eagle3", small_target, [0, 2, 3, 5])
    for tree in (StaticTree.from_widths((3, 2)), head.tree):
        statistic, freedom = whole_engine_statistic(small_target, head, tree)
        assert statistic < surely_below(freedom)


def test_the_test_of_the_whole_engine_notices_places_that_share_a_number(small_target, monkeypatch):
    head = small_head("eagle3", small_target)
    right = Draws.next

    def shared(draws: Draws, count: int) -> torch.Tensor:
        numbers_BK = right(draws, count)
        return numbers_BK[:, :1].expand_as(numbers_BK)

    monkeypatch.setattr(Draws, "next", shared)
    statistic, freedom = whole_engine_statistic(small_target, head, head.tree)
    assert statistic > surely_below(freedom)


@pytest.mark.parametrize("rule", RULES)
def test_filters_are_those_of_transformers(rule):
    temperature, top_p, top_k = rule
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers.append(TopPLogitsWarper(top_p))
    torch.testing.assert_close(filtered_logits(logits, *rule), warpers(None, logits))


def test_typical_equals_the_formula_on_a_drawn_table():
    r"""Four words, temperature 1. The tree, and p at each parent:

        root                    p(.|root) = .60 .25 .10 .05    H = 1.0333, .3 exp(-H) = .1067
       /    \                   threshold min(.09, .1067) = .09: words 0, 1 and 2 pass
      1      2                  p(.|1)    = .97 .01 .01 .01    H = 0.1677, threshold .09
     / \      \                 p(.|2)    = .25 .25 .25 .25    H = 1.3863, .3 exp(-H) = .075
    0   3      1                so under 1 only word 0 passes, under 2 all do
    """
    tree = TokenTree(
        torch.tensor([[0, 1, 2, 0, 3, 1]]), Topology(torch.tensor([[-1, 0, 0, 1, 1, 2]]))
    )
    p_NV = torch.tensor(
        [
            [0.60, 0.25, 0.10, 0.05],
            [0.97, 0.01, 0.01, 0.01],
            [0.25, 0.25, 0.25, 0.25],
            [0.02, 0.02, 0.94, 0.02],
            [0.25, 0.25, 0.25, 0.25],
            [0.25, 0.25, 0.25, 0.25],
        ]
    )
    rule = Typical(epsilon=0.09, delta=0.3, temperature=1.0, draws=FreshDraws(1, 0))
    accepted = rule(p_NV.log()[None], tree)
    # root-1-0 (.25 * .97) and root-2-1 (.10 * .25) are both two long: the likelier wins
    assert accepted.path_BN[:, :3].tolist() == [[0, 1, 3]]
    assert accepted.count_B.tolist() == [3]
    assert accepted.bonus_B.tolist() == [2], "only word 2 passes after node 3"


@pytest.mark.parametrize(
    ("epsilon", "delta", "passes"),
    [
        (0.09, 0.3, [True, True, True, False]),
        (0.30, 0.3, [True, True, False, False]),  # threshold .1067, the entropy term
        (0.04, 0.3, [True, True, True, True]),
        (0.90, 9.0, [True, False, False, False]),  # nothing passes: the argmax always counts
    ],
)
def test_typical_threshold(epsilon, delta, passes):
    p = torch.tensor([[0.60, 0.25, 0.10, 0.05]])
    rule = Typical(epsilon, delta, temperature=1.0, draws=FreshDraws(1, 0))
    drawn = Counter(int(rule.choose(p.log())) for _ in range(2000))
    assert [drawn[word] > 0 for word in range(4)] == passes


TABLE = torch.tensor([0.45, 0.30, 0.20, 0.05]).log()
"""Log-probabilities of four words: gaps of 0, .405, .811 and 2.197 nats."""


@pytest.mark.parametrize(
    ("rule", "passes"),
    [
        (Lenient(top=1), [True, False, False, False]),
        (Lenient(top=2), [True, True, False, False]),
        (Lenient(gap=0.5), [True, True, False, False]),
        (Lenient(gap=1.0), [True, True, True, False]),
        (Lenient(top=2, gap=1.0), [True, True, False, False]),
        (Lenient(top=3, gap=0.5), [True, True, False, False]),
        (Lenient(gap=-math.log(0.05)), [True, True, True, True]),  # lenience .05
        (Lenient(surprise=1.5), [True, True, False, False]),  # -log .20 = 1.609
        (Lenient(surprise=1.7), [True, True, True, False]),
        (Lenient(surprise=0.1), [True, False, False, False]),  # the target's choice always counts
        (Lenient(gap=0.0), [True, False, False, False]),
        (Lenient(top=99), [True, True, True, True]),  # more than there are words
    ],
    ids=repr,
)
def test_lenient_keeps_what_the_target_nearly_chose(rule, passes):
    """In any order of the children; the longest path counts, then the likelier one."""
    words = [3, 1, 0, 2]
    tree = TokenTree(torch.tensor([[0, *words]]), Topology(torch.tensor([[-1, 0, 0, 0, 0]])))
    for word in range(4):
        alone = TokenTree(torch.tensor([[0, word]]), Topology(torch.tensor([[-1, 0]])))
        accepted = rule(TABLE.expand(1, 2, 4), alone)
        assert accepted.count_B.tolist() == [1 + passes[word]]
        assert accepted.bonus_B.tolist() == [0], "the target's own choice"
    together = rule(TABLE.expand(1, 5, 4), tree)
    assert together.path_BN[0, :2].tolist() == [0, 1 + words.index(0)]
    chain = TokenTree(torch.tensor([[0, 0, 1, 0]]), Topology(torch.tensor([[-1, 0, 0, 2]])))
    deeper = rule(TABLE.expand(1, 4, 4), chain)
    assert deeper.count_B.tolist() == [3 if passes[1] else 2]


@pytest.mark.mend(
    "a token without probability was near the target's choice where fewer than `top` were allowed"
)
@pytest.mark.parametrize("rule", [Lenient(top=3), Lenient(top=99), Lenient(gap=9.0)], ids=repr)
def test_lenient_keeps_nothing_that_is_forbidden(rule):
    """A constraint gives it no probability; the other words are compared as without it."""
    words = [3, 1, 0, 2]
    tree = TokenTree(torch.tensor([[0, *words]]), Topology(torch.tensor([[-1, 0, 0, 0, 0]])))
    for allowed in ([0, 1, 2], [2]):
        table = torch.full_like(TABLE, -torch.inf)
        table[allowed] = TABLE[allowed]
        for word in range(4):
            alone = TokenTree(torch.tensor([[0, word]]), Topology(torch.tensor([[-1, 0]])))
            accepted = rule(table.expand(1, 2, 4), alone)
            assert accepted.count_B.tolist() == [1 + (word in allowed)]
        together = rule(table.expand(1, 5, 4), tree)
        assert together.path_BN[0, :2].tolist() == [0, 1 + words.index(allowed[0])]
        chain = TokenTree(torch.tensor([[0, 0, 2, 0]]), Topology(torch.tensor([[-1, 0, 0, 1]])))
        deeper = rule(table.expand(1, 4, 4), chain)
        assert deeper.count_B.tolist() == [3 if 0 in allowed else 2]


@pytest.mark.mend(
    "lossy rules kept copies of the last token that padded a row's tree, and a grammar beside "
    "other rows ended the batch"
)
@pytest.mark.parametrize(
    "rule",
    [Greedy(), Sampled(draws=FreshDraws(3, 0)), Typical(draws=FreshDraws(3, 0)), Lenient(gap=1.0)],
    ids=repr,
)
@pytest.mark.parametrize("word", range(4))
def test_no_rule_keeps_a_node_that_pads_a_tree(rule, word):
    """The target is sure of a word that no row drafted, or that one did."""
    tree = stacked([0] * 3, [[(1,), (1, 1), (1, 1, 1)], [(2,)], []], torch.device("cpu"))
    assert tree.drafted() == [3, 1, 0]
    logits_BNV = torch.zeros(3, 4, 4)
    logits_BNV[..., word] = 30.0
    counts = [4 if word == 1 else 1, 2 if word == 2 else 1, 1]
    assert rule(logits_BNV, tree).count_B.tolist() == counts


def test_rules_that_change_the_output_are_labelled_lossy():
    assert (Greedy().lossless, Sampled().lossless) == (True, True)
    assert (Typical().lossless, Lenient(top=2).lossless) == (False, False)
