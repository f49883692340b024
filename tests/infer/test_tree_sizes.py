"""The promise: a batch drafts as many nodes as are fastest for its rows, and answers stay the same
whatever is drafted.
"""

from __future__ import annotations

from itertools import count, cycle, islice
from typing import Any

import pytest
import torch
from asked import Asked
from recorder import recorded
from tiny_heads import KINDS, random_head
from tiny_targets import greedy, some_prompts, tiny_target

from draftheads.heads.target.model import Target
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Tree
from draftheads.infer.accept import Greedy, Sampled
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.infer.lossy import Typical
from draftheads.infer.rows import Row
from draftheads.infer.serve.logprobs import ScoredRule
from draftheads.infer.slots import Slots
from draftheads.infer.tree_sizes import TRIAL, TreeSizes

TREE = StaticTree.unfitted(4).resized(8)
BROUGHT = {8: 3.2, 4: 2.8, 2: 2.0, 0: 1.0}
"""Draft nodes -> tokens per step and row."""


def decode(sizes: TreeSizes, rows: int, seconds_per_token: float, steps: int) -> list[int]:
    """The draft nodes of each step, if a step takes 1 second and more for each token of it."""
    nodes = []
    for _ in range(steps):
        nodes.append(sizes.choose(rows).nodes - 1)
        tokens = round(rows * BROUGHT[nodes[-1]])
        sizes.learn(rows, tokens, 1 + seconds_per_token * rows * (1 + nodes[-1]))
    return nodes


@pytest.mark.parametrize(("seconds_per_token", "fastest"), [(0.0, 8), (0.02, 4), (5.0, 0)])
def test_the_fastest_size_is_found(seconds_per_token, fastest):
    rates = {
        nodes: tokens / (1 + seconds_per_token * 10 * (1 + nodes))
        for nodes, tokens in BROUGHT.items()
    }
    nodes = decode(TreeSizes(TREE), 10, seconds_per_token, 2000)
    found = max(BROUGHT, key=nodes[1000:].count)
    assert rates[found] * 1.05 >= max(rates.values()) and found == fastest
    others = [each for each in nodes[1000:] if each != found]
    assert 0 < len(others) < 200, "it goes on to try, not often"


def test_each_number_of_rows_has_its_own_and_starts_with_that_of_fewer():
    sizes = TreeSizes(TREE)
    assert set(decode(sizes, 1, 5.0, 1000)) == {8}, "a row alone has what its user chose"
    decode(sizes, 10, 5.0, 1000)
    assert sizes.choose(11).nodes == 1 and sizes.choose(9).nodes == 9


def test_a_tree_that_is_no_tree_stays():
    sizes = TreeSizes(StaticTree(()))
    assert [sizes.choose(4).nodes for _ in range(3)] == [1, 1, 1]
    for _ in range(TRIAL * 20):
        assert sizes.choose(4).nodes == 1
        sizes.learn(4, 4, 1.0)
    assert [tree.nodes for tree in TreeSizes(DynamicTree(20, 4, 4)).trees] == [21, 11, 6, 3, 1]


@pytest.fixture
def changing(monkeypatch) -> list[Tree]:
    """Lets every step of a batch have another tree; returns those that were used."""
    used: list[Tree] = []
    steps = count()
    original = Slots.use

    def choose(self: TreeSizes, rows: int) -> Tree:
        return self.trees[next(steps) % len(self.trees) if rows > 1 else 0]

    def use(self: Slots, tree: Tree) -> None:
        used.append(tree)
        original(self, tree)

    monkeypatch.setattr(TreeSizes, "choose", choose)
    monkeypatch.setattr(TreeSizes, "learn", lambda *_: None)
    monkeypatch.setattr(Slots, "use", use)
    return used


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_the_same_whatever_is_drafted(schedulers, changing, name):
    target = tiny_target()
    engine = Speculator(target, random_head(name, target))
    prompts = some_prompts(3, 30, 9, 14, 2, 21)
    scheduler = schedulers(engine, slots=4)
    rules = [Greedy(), ScoredRule(Greedy(), 2)]
    asked = [Asked(prompt, rules[n % 2], 12 + n) for n, prompt in enumerate(prompts)]
    scheduler.submit(*(each.job for each in asked))
    for each in asked:
        assert each.answer() == greedy(target, each.job.prompt, each.job.max_new_tokens)
    assert len(set(changing)) > 2
    rule = Sampled(0.9)
    rule.seed(5)
    steps = Speculator(target).generate(prompts[0], sampling=rule, max_new_tokens=20)
    expected = [token for step in steps for token in step.tokens]
    rule.seed(5)
    sampled = Asked(prompts[0], rule, 20)
    scheduler.submit(sampled.job, Asked(prompts[1], new=20).job)
    assert sampled.answer() == expected


@pytest.mark.parametrize("is_scored", [False, True])
def test_lossy_rules_keep_the_whole_tree(schedulers, changing, is_scored):
    target = tiny_target()
    head = random_head("medusa", target)
    scheduler = schedulers(Speculator(target, head), slots=4)
    asked = []
    for prompt in some_prompts(3, 5):
        rule = ScoredRule(Typical(), 2) if is_scored else Typical()
        asked.append(Asked(prompt, rule, 20))
    scheduler.submit(*(each.job for each in asked))
    for each in asked:
        each.answer()
    assert set(changing) == {head.tree}


@torch.inference_mode()
@pytest.mark.parametrize("name", KINDS)
def test_a_tree_that_comes_back_is_drafted_as_if_it_had_never_left(name):
    """Caches of heads take what was committed meanwhile: drafts depend on the text alone."""
    target = tiny_target()
    engine = Speculator(target, random_head(name, target))
    [prompt] = some_prompts(9)

    def begin(text: list[int]) -> Slots:
        reading = engine.read([Row(target, text, None)], Greedy(), reserved=40)
        reading.finish()
        return reading.slots

    slots, compared = begin(prompt), 0
    for tree in islice(cycle([*TreeSizes(engine.tree).trees[1:], engine.tree]), 20):
        slots.use(tree)
        drafted = slots.drafter.propose(slots.committed)
        [row] = slots.rows
        if tree == engine.tree:
            anew = begin(row.text[:-1])
            expected = anew.drafter.propose(anew.committed)
            assert torch.equal(drafted.tokens_BN, expected.tokens_BN)
            compared += 1
        [tokens] = slots.verify(drafted)
        row.step(tokens[: slots.committed.counts[0]], 0, 0, (0.0, 0.0))
    assert compared > 3


@torch.inference_mode()
def test_another_tree_ends_steps_that_were_recorded(monkeypatch):
    """Their replays would go on drafting the old one."""
    monkeypatch.setitem(RECORDERS, "cpu", recorded)
    target = tiny_target()
    reading = Speculator(target, random_head("eagle3", target)).read(
        [Row(target, some_prompts(9)[0], 60)], Greedy(), reserved=60
    )
    reading.finish()
    slots = reading.slots
    while not slots.runner.was_recorded:
        slots.step()
    widths: list[int] = []
    verify = Target.verify

    def note(self: Target, tree: TokenTree, *more: Any) -> Any:
        widths.append(tree.tokens_BN.shape[1])
        return verify(self, tree, *more)

    monkeypatch.setattr(Target, "verify", note)
    smaller = TreeSizes(slots.tree).trees[1]
    slots.use(smaller)
    slots.step()
    assert widths == [smaller.nodes]
