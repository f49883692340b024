"""The promise: drafts stop where they do not pay and come back where they do, and the output stays
the same.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from exact_laws import RUNS, chi_square, small_head, surely_below, whole_law
from tiny_heads import EACH, committed, decode, random_head
from tiny_targets import greedy, some_prompts, tiny_target

from draftheads.heads.drafting import Committed
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Topology
from draftheads.infer.accept import Sampled
from draftheads.infer.drafters import adaptive
from draftheads.infer.drafters.adaptive import PAUSES, Adaptive, AdaptiveDrafter
from draftheads.infer.drafters.draft_model import DraftModel
from draftheads.infer.measure.costs import Costs

NEW = 31
WORTH = 1.5


class Chain:
    """Drafts two tokens."""

    feature_layers = ()
    cache = None

    def propose(self, committed: Committed) -> TokenTree:
        tokens_B1 = committed.last_tokens_B()[:, None]
        return TokenTree(tokens_B1.repeat(1, 3), Topology(torch.tensor([[-1, 0, 1]])))


def drafted(counts: list[list[int]], worth: float = WORTH) -> list[bool]:
    """Whether each step drafts, if it then adds `counts` tokens to each row, else one."""
    drafter, given, made = AdaptiveDrafter(Chain(), worth), [[1] * 5 for _ in counts[0]], []
    for rows in counts:
        made.append(drafter.propose(committed(given)).tokens_BN.shape[1] > 1)
        given = [[1] * (count if made[-1] else min(count, 1)) for count in rows]
    return made


def test_hopeless_drafts_are_tried_ever_more_seldom():
    made = drafted([[1]] * 600)
    assert sum(made[:100]) < 30 and sum(made[-200:]) < 20
    gaps = [len(gap) for gap in "".join("x" if each else "." for each in made).split("x") if gap]
    assert gaps[:4] == [PAUSES[0] * 2**each for each in range(4)] and max(gaps) == PAUSES[1]


def test_good_drafts_come_back_after_hopeless_ones():
    made = drafted([[1]] * 300 + [[3]] * 300)
    assert all(made[300 + PAUSES[1] :])
    made = drafted([[1]] * 300 + [[3]] * 300 + [[1]] * 100)
    first = made.index(False, 600)
    assert made[first : first + PAUSES[0] + 1] == [False] * PAUSES[0] + [True]


def test_a_few_unlucky_steps_among_good_ones_count_for_nothing():
    assert all(drafted(([[1]] * 3 + [[3]] * 2) * 60))


def test_the_rows_of_a_batch_decide_together_and_finished_ones_not_at_all():
    assert all(drafted([[1, 3]] * 100))
    assert not all(drafted([[1, 1, 3]] * 100, worth=2.0))
    assert all(drafted([[0, 0, 3]] * 100, worth=2.0))


@pytest.mark.parametrize("tree", [StaticTree.from_widths((2, 1)), DynamicTree(4, 2, 2)])
def test_drafts_pay_if_their_tokens_per_step_cover_their_cost(tree):
    """A step takes 2 + 0.1 x 4 with drafts and 1 without."""
    target = tiny_target()
    source = Adaptive(random_head("eagle3", target), Costs({0: 1.0, 4: 2.0}, (0.0, 0.0, 0.0, 0.1)))
    assert source.drafter(target, tree).worth == pytest.approx(2.4)


class Twins:
    """Compares an adaptive drafter's trees with those of one that drafts in each step."""

    cache = None

    def __init__(self, source: Adaptive, target) -> None:
        self.ours, self.theirs = source.drafter(target), source.drafts.drafter(target)
        self.feature_layers, self.made = self.ours.feature_layers, []

    def propose(self, committed: Committed) -> TokenTree:
        ours, theirs = self.ours.propose(committed), self.theirs.propose(committed)
        self.made.append(ours.tokens_BN.shape[1] > 1)
        if self.made[-1]:
            running = committed.count_B > 0
            assert torch.equal(ours.tokens_BN[running], theirs.tokens_BN[running])
            assert torch.equal(ours.topology.parents_BN, theirs.topology.parents_BN)
        return ours


def that_need(tokens: float) -> Costs:
    """With drafts, a step takes as long as so many without."""
    return Costs({0: 1.0, 64: 1.0}, (tokens - 1.0, 0.0, 0.0, 0.0))


def check(source: Adaptive, target, rows: int) -> None:
    """Greedy output stays, and so do the drafts after a pause."""
    prompts, twins = some_prompts(*(19, 11, 5)[:rows]), Twins(source, target)
    tokens, _ = decode(target, lambda: twins, prompts, tree=source.tree, max_new_tokens=NEW)
    assert tokens == [greedy(target, prompt, NEW) for prompt in prompts]
    pause = twins.made.index(False)
    assert True in twins.made[pause:], "drafts after a pause"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", EACH)
def test_output_and_drafts_stay_the_same(name, rows):
    target = tiny_target()
    head = random_head(name, target)
    check(Adaptive(head, that_need(4.0)), target, rows)


@pytest.mark.parametrize("rows", [1, 3])
def test_output_and_drafts_of_a_draft_model_stay_the_same(rows):
    check(Adaptive(DraftModel(tiny_target("qwen2")), that_need(4.0)), tiny_target(), rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_sampled_output_has_the_targets_law(small_target, kind, monkeypatch):
    """Each step drafts or not by what was accepted in the one before."""
    monkeypatch.setattr(adaptive, "CREDIT", 1.0)
    monkeypatch.setattr(adaptive, "PAUSES", (1, 1))
    monkeypatch.setattr(adaptive, "NEWEST", 1.0)
    prompt, rule = [3, 1, 4, 1, 5], Sampled(temperature=4.0, top_k=4)
    rule.seed(2)
    source, texts, steps = Adaptive(small_head(kind, small_target), that_need(1.5)), [], set()
    for _ in range(RUNS // 8):
        choices = {"sampling": rule, "max_new_tokens": 4}
        rows, statistics = decode(small_target, source, [prompt], **choices)
        texts += [tuple(row) for row in rows]
        steps |= {each.steps for each in statistics}
    assert steps == {1, 2, 3}
    statistic, freedom = chi_square(Counter(texts), whole_law(small_target, prompt, 4, rule))
    assert statistic < surely_below(freedom)
