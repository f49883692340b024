"""The promise: the tree that `tune` chooses is the fastest for what was measured, and a head in
whose folder it was written decodes with it.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from itertools import combinations, count, product

import pytest
import torch
from tiny_heads import KINDS, decode, random_head
from tiny_targets import greedy, some_prompts, tiny_target

from draftheads.heads.formats.hub import load_head, record_tuned, save_head
from draftheads.heads.tree import DynamicTree, StaticTree
from draftheads.infer import threads
from draftheads.infer.costs import (
    NONE,
    Costs,
    Trial,
    finalists,
    fitted_costs,
    predict,
    replayed_steps,
    search,
)
from draftheads.infer.measure.tune import (
    Track,
    Tuned,
    TuneOptions,
    cost_trees,
    tune,
    winner,
)
from draftheads.infer.race import describe_machine, fitting_prompts, race
from draftheads.infer.rows import Step
from draftheads.infer.turns import TimedRun, Turns
from draftheads.scripts.printing import print_tuned

OPTIONS = TuneOptions(max_new_tokens=12, nodes=8)
FREE = (0.0, 0.0, 0.0, 0.0)
CURVES = {
    "nodes cost nothing": Costs({0: 1.0, 12: 1.0}, FREE),
    "nodes cost": Costs({0: 1.0, 12: 2.5}, FREE),
    "few nodes cost nothing": Costs({0: 1.0, 4: 1.1, 12: 4.0}, FREE),
    "levels cost": Costs({0: 1.0, 12: 1.5}, (0.1, 0.45, 0.0, 0.0)),
    "a draft costs": Costs({0: 1.0, 12: 1.5}, (1.0, 0.0, 0.0, 0.0)),
    "prompts cost": Costs({0: 1.0, 12: 3.0}, FREE, prompt=500.0),
}


def observed(length: int, seed: int) -> torch.Tensor:
    """Ranks of a draft of two levels, drawn for each place of a text by itself; level 2 depends on
    level 1.
    """
    chances = random.Random(seed)
    rows = []
    for _ in range(length):
        (first,) = chances.choices((0, 1, 2, -1), (5, 2, 1, 2))
        (second,) = chances.choices((0, 1, 2, -1), (4, 1, 1, 2) if first == 0 else (1, 4, 1, 3))
        rows.append([first, second])
    return torch.tensor(rows)


def all_trees() -> list[StaticTree]:
    """Every tree of up to 12 nodes of ranks 0 to 2, two deep."""
    families = []
    for rank in range(3):
        children = [
            [(rank, each) for each in chosen]
            for count in range(4)
            for chosen in combinations(range(3), count)
        ]
        families.append([(), *(((rank,), *chosen) for chosen in children)])
    return [StaticTree(tuple(sum(map(tuple, parts), ()))) for parts in product(*families)]


TREES = all_trees()


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return observed(1500, seed=1)


@pytest.fixture(scope="module")
def all_steps(text) -> dict[StaticTree, float]:
    """The steps that each tree takes to write the text."""
    return {tree: 1499 / predict(tree, [text], Costs({0: 1, 9: 1})).predicted_tau for tree in TREES}


@pytest.mark.parametrize("costs", CURVES.values(), ids=CURVES)
def test_search_finds_the_best_of_all_trees(costs, text, all_steps):
    """As far as another text tells: trees are ordered by one, and predicted on the other."""
    order = StaticTree.most_frequent(observed(1500, seed=0), 12)
    found = [*search([order], [text], costs, nodes=12), predict(NONE, [text], costs)]
    best = max(
        1500 / (costs.prompt + steps * costs.step_seconds(tree))
        for tree, steps in all_steps.items()
    )
    assert 0.97 * best < max(each.predicted for each in found) <= best * (1 + 1e-9)


def test_costs_decide_between_many_nodes_few_and_none(text):
    def best(costs: Costs) -> StaticTree:
        found = search([StaticTree.most_frequent(text, 12)], [text], costs, nodes=12)
        chosen = max([*found, predict(NONE, [text], costs)], key=lambda each: each.predicted).tree
        assert isinstance(chosen, StaticTree)
        return chosen

    assert len(TREES) == 9**3
    assert best(CURVES["nodes cost nothing"]).nodes == 13
    assert best(CURVES["few nodes cost nothing"]).draft_nodes == 4
    assert best(CURVES["levels cost"]).depth == 1
    assert best(Costs({0: 1.0, 12: 9.0}, (3.0, 0.0, 0.0, 0.0))) == NONE


def test_a_prediction_is_tokens_over_the_time_of_prompts_and_steps():
    """From token 0, the tree accepts two and the target adds one; from token 3, nothing; and so
    on up to the last of seven tokens.
    """
    ranks_TK = torch.tensor([[0, 1], [0, 0], [0, 0], [2, 0], [0, 0], [0, -1], [-1, -1]])
    tree = StaticTree(((0,), (0, 1)))
    costs = Costs({0: 1.0, 4: 3.0}, (0.5, 0.25, 0.0, 0.0), prompt=10.0)
    assert costs.step_seconds(tree) == 2.0 + 0.5 + 2 * 0.25
    bushy = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    assert Costs({0: 0.0, 5: 0.0}, (4.0, 3.0, 5.0, 7.0)).step_seconds(bushy) == 4 + 6 + 15 + 35
    assert costs.step_seconds(NONE) == 1.0
    trial = predict(tree, [ranks_TK, ranks_TK], costs)
    assert trial.predicted_tau == 6 / 3  # steps at tokens 0, 3 and 4
    assert trial.predicted == 14 / (2 * 10.0 + 6 * 3.0)
    assert [replayed_steps([[0, 1]] * 7, nodes) for nodes in (0, 1, 2)] == [6, 3, 2]


@pytest.mark.parametrize("name", KINDS)
def test_replayed_observations_are_what_decoding_does(name):
    """Not a product of marginals, nor a mean over places where no step begins."""
    target = tiny_target()
    head = random_head(name, target)
    prompts = some_prompts(5, 9)
    widths = (3, 2, 1)[: head.depth]
    tree = StaticTree.from_widths(widths)
    track = Track(target, head, TuneOptions(max_new_tokens=40), Turns())
    texts = track.observe(fitting_prompts(target, prompts, 40), 1.0)
    for prompt, ranks_TK in zip(prompts, texts, strict=True):
        _, [statistics] = decode(target, head, [prompt], tree=tree, max_new_tokens=40)
        assert predict(tree, [ranks_TK], CURVES["nodes cost"]).predicted_tau == pytest.approx(
            39 / statistics.steps
        )


def test_costs_are_found_again_behind_noise():
    """A fifth of all steps take ten times as long, as when another process takes the core."""
    true = Costs({0: 1.0, 3: 1.5, 8: 2.0, 20: 5.0}, (0.3, 0.2, 0.05, 0.01), prompt=7.0)
    trees = {str(n): tree for n, tree in enumerate(cost_trees(4, 20))}
    noise, runs = random.Random(0), {}
    for name, tree in trees.items():
        verify = true.verify_seconds(tree.draft_nodes)
        draft = true.step_seconds(tree) - verify
        steps = []
        for _ in range(50):
            slow = 10.0 if noise.random() < 0.2 else 1.0
            steps.append(Step([1], 0, None, draft * slow, verify * slow))
        steps[0] = Step([1], 0, None, draft, verify)
        seconds = 7.0 + 50 * (draft + verify)  # by a clock that does not see the others
        steps = [Step([1], -1, None, 0.0, 7.0), *steps]
        runs[name] = [TimedRun(steps, 3 * seconds), TimedRun(steps, seconds)]
    costs = fitted_costs({tree: runs[name] for name, tree in trees.items()})
    assert costs.prompt == pytest.approx(true.prompt)
    assert costs.draft == pytest.approx(true.draft)
    for tree in trees.values():
        assert costs.verify_seconds(tree.draft_nodes) == pytest.approx(
            true.verify_seconds(tree.draft_nodes)
        )


def test_no_tree_takes_longer_to_verify_than_a_larger_one():
    """Noise only adds."""
    runs, trees = {}, {str(n): StaticTree.from_widths([1] * n) for n in range(4)}
    for (name, tree), seconds in zip(trees.items(), (1.0, 9.0, 2.0, 3.0), strict=True):
        steps = [Step([1], -1, None, 0.0, 1.0), *[Step([1], 0, None, 0.5, seconds)] * 8]
        runs[name] = [TimedRun(steps, 1.5 + 8 * seconds + 4 * bool(tree.paths))]
    verify = fitted_costs({tree: runs[name] for name, tree in trees.items()}).verify
    assert verify[1] == pytest.approx(verify[2])
    assert verify[0] < verify[2] < verify[3]


def timed_runs(seconds: dict[StaticTree, tuple[float, float]], prompt: float = 7.0):
    """One run of ten steps with each tree, which drafts and verifies for so many seconds."""
    runs = {}
    for tree, (draft, verify) in seconds.items():
        steps = [Step([1], -1, None, 0.0, 7.0), *[Step([1], 0, None, draft, verify)] * 10]
        runs[tree] = [TimedRun(steps, prompt + 10 * (draft + verify))]
    return runs


@pytest.mark.mend("drafts that cost less than nothing")
def test_nothing_costs_less_than_nothing():
    """Although noise makes drafts of more nodes and levels look cheaper."""
    trees = cost_trees(3, 8)
    seconds = {tree: (1.0 / tree.nodes if tree.paths else 0.0, 1.0) for tree in trees}
    costs = fitted_costs(timed_runs(seconds))
    assert min(costs.draft) >= 0.0 and max(costs.draft) > 0.0 and costs.prompt == 7.0
    for tree in (*trees, StaticTree.from_widths([1] * 30)):
        assert costs.step_seconds(tree) >= costs.verify_seconds(0) > 0.0


@pytest.mark.mend("a tree tuned by times that contradict each other")
def test_times_that_contradict_each_other_write_no_tree():
    """Steps that take no time, by a clock that stands still."""
    seconds = {tree: (0.0, 0.0) for tree in cost_trees(5, 20)}
    with pytest.raises(ValueError, match="times that add up.*nothing was written.*tune again"):
        fitted_costs(timed_runs(seconds))


@pytest.mark.mend("costs of drafts from two clocks: negative seconds on a busy machine")
def test_costs_are_taken_by_one_clock(monkeypatch):
    """Ten seconds of the wall go by at each look at it, as where other processes have the cores:
    those of the CPU count, in whole runs and in their steps.
    """
    wall = count(0, 10)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr("draftheads.infer.engine.perf_counter", lambda: next(wall), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    track = Track(tiny_target(), random_head("medusa", tiny_target()), OPTIONS, Turns())
    costs = track.costs(fitting_prompts(tiny_target(), some_prompts(5, 9), 12))
    assert 0.0 <= costs.prompt < 5.0 and 0.0 < max(costs.verify.values()) < 5.0
    assert 0.0 <= min(costs.draft) <= max(costs.draft) < 5.0


def test_measured_trees_have_every_size_and_depth():
    trees = cost_trees(5, 40)
    assert {tree.draft_nodes for tree in trees} >= {0, 1, 3, 7, 15, 31, 40}
    assert {tree.depth for tree in trees} >= {0, 1, 2, 3, 5}
    assert StaticTree.from_widths([1] * 5) in trees


def trial(nodes: int, measured: float, low: float) -> Trial:
    tree = StaticTree.from_widths([nodes])
    return Trial(tree, 1.0, measured, measured=measured, gain_ci95=(low, 2.0))


def test_a_tree_that_may_be_no_faster_does_not_replace_the_present_one():
    present = trial(9, 100.0, 1.0)
    unsure, sure, faster = trial(8, 150.0, 0.99), trial(4, 110.0, 1.01), trial(3, 120.0, 1.1)
    assert winner([present, unsure]) is present
    assert winner([present, unsure, sure]) is sure
    assert winner([present, unsure, sure, faster]) is faster


def test_a_race_compares_with_the_present_tree_and_scales_predictions_by_plain_decoding(
    monkeypatch,
):
    present, faster, slower = (StaticTree.from_widths([n]) for n in (3, 2, 1))
    seconds = {NONE: 2.0, present: 1.0, faster: 0.5, slower: 4.0}

    def race(candidates, prompts, *_, **__):
        steps = [Step([1] * 4, 3, None, 0.0, 0.0)]
        return prompts, {
            each.name: [
                TimedRun(steps, 4 * seconds[each.engine.tree] * (1 + prompt.number))
                for prompt in prompts
            ]
            for each in candidates
        }

    monkeypatch.setattr("draftheads.infer.measure.tune.race", race)
    target = tiny_target()
    track = Track(target, random_head("medusa", target), OPTIONS, Turns())
    chosen = [Trial(tree, 1.0, 3.0) for tree in (present, NONE, faster, slower)]
    trials = track.trials(chosen, fitting_prompts(target, some_prompts(5, 9), 12))
    per_token = [1.5 * seconds[each.tree] for each in trials]
    assert [each.measured for each in trials] == pytest.approx([1 / each for each in per_token])
    assert [each.predicted for each in trials] == pytest.approx([1 / 3.0] * 4)
    for each, gain in zip(trials, (1.0, 0.5, 2.0, 0.25), strict=True):
        assert each.gain_ci95 == pytest.approx((gain, gain))
    assert winner(trials).tree == faster


@pytest.mark.mend("tune without nodes")
def test_a_tree_of_no_nodes_is_explained(capsys, monkeypatch):
    """What the best tree with drafts brings, what it costs, and the next step."""
    monkeypatch.setenv("COLUMNS", "300")
    none = Trial(NONE, 1.0, 100.0, tau=1.0, measured=100.0)
    drafted = replace(trial(4, 60.0, 0.5), tau=1.5)
    costs = Costs({0: 0.01, 4: 0.02, 8: 0.03}, (0.005, 0.0, 0.0, 0.0))
    machine = describe_machine(tiny_target())
    found = Tuned(machine, {"turns_left_out": 0}, costs, [drafted, none], none)
    print_tuned(found)
    printed = " ".join(capsys.readouterr().out.split())
    assert "a new tree: 0 draft nodes" in printed and "decode without drafts" in printed
    assert "of 4 nodes, brings τ 1.50, and a step with it costs 2.50 plain ones" in printed
    assert "0.60 times plain decoding. Next: train longer" in printed and "--dtype bf" in printed
    assert found.facts()["break_even_tokens_per_step"] == 1.0


def test_a_tree_that_pays_is_not_explained(capsys):
    costs = Costs({0: 0.01, 4: 0.011}, (0.0, 0.0, 0.0, 0.0))
    none, drafted = replace(trial(1, 50.0, 0.5), tree=NONE), replace(trial(4, 90.0, 1.0), tau=2.0)
    machine = describe_machine(tiny_target())
    found = Tuned(machine, {"turns_left_out": 0}, costs, [drafted, none], drafted)
    print_tuned(found)
    assert "Why" not in capsys.readouterr().out
    assert found.facts()["break_even_tokens_per_step"] == pytest.approx(1.1)
    assert found.facts()["tokens_per_step"] == 2.0


def test_finalists_differ_in_size():
    found = [trial(nodes, 100.0 - abs(nodes - 9), 1.0) for nodes in range(1, 40)]
    sizes = [each.tree.nodes for each in finalists(found)]
    assert sizes == [10, 6, 15, 4]


@pytest.mark.parametrize("kind", ["medusa", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_the_result_is_one_of_the_trees_that_raced(kind):
    target = tiny_target()
    head = random_head(kind, target)
    found = tune(target, head, some_prompts(5, 9, 7, 4), OPTIONS)
    assert found.trials[0].tree == head.tree
    assert found.plain.tau == 1.0
    assert found.best in found.trials
    assert len({each.tree for each in found.trials}) == len(found.trials) > 3
    for each in found.trials:
        head.check_tree(each.tree)
        if isinstance(each.tree, StaticTree):
            assert each.predicted_tau == pytest.approx(each.tau)
    facts = json.loads(json.dumps(found.facts()))
    assert facts == found.facts()
    assert json.loads(json.dumps(asdict(found)))["best"]["measured"] == found.best.measured


def test_trees_race_on_prompts_that_neither_costs_nor_trees_were_fitted_to(monkeypatch):
    raced = []

    def noted(candidates, prompts, *rest, **more):
        if len(candidates) > 1:  # one writes the texts to which trees are fitted
            raced.append([prompt.number for prompt in prompts])
        return race(candidates, prompts, *rest, **more)

    monkeypatch.setattr("draftheads.infer.measure.tune.race", noted)
    target = tiny_target()
    tune(target, random_head("medusa", target), some_prompts(5, 9, 7, 4), OPTIONS)
    assert raced == [[0, 2], [1, 3]]


def test_every_command_uses_the_tree_that_is_written(tmp_path):
    target = tiny_target()
    head = random_head("medusa", target)
    trained = head.tree
    folder = save_head(head, tmp_path / "head", target=target)
    for tree in (StaticTree.from_widths((2, 1)), DynamicTree(3, 2, 2)):
        record_tuned(folder, tree, {"machine": "this one"})
    record_tuned(folder, StaticTree.from_widths((1, 1)), {"machine": "this one"})
    assert load_head(folder, target=target).tree == StaticTree.from_widths((1, 1))
    recorded = json.loads((folder / "config.json").read_text())["draftheads"]["tuned"]
    assert recorded == {"machine": "this one", "trained_tree": trained.to_json()}
    assert "2 draft nodes" in (folder / "README.md").read_text()


def test_larger_trees_than_the_written_one_are_found_again(tmp_path):
    """After saving and after tuning, in the order of training; a head of an earlier version has
    its own tree alone.
    """
    target = tiny_target()
    head = random_head("medusa", target)
    order = head.tree.order
    assert head.tree.draft_nodes == 8 < len(order) == 64
    folder = save_head(head, tmp_path / "head", target=target)
    loaded = load_head(folder, target=target).tree
    assert loaded == head.tree and loaded.order == order
    record_tuned(folder, StaticTree.from_widths((1, 1)), {"machine": "this one"})
    tuned = load_head(folder, target=target).tree
    assert tuned == StaticTree.from_widths((1, 1)) and set(tuned.order) == set(order)
    config = json.loads((folder / "config.json").read_text())
    for damaged in ([[0, 0]], [["x"]], 3):
        config["draftheads"]["tree_order"] = damaged
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="tree"):
            load_head(folder, target=target)
    del config["draftheads"]["tree_order"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_head(folder, target=target).tree.order == ((0,), (0, 0))


def test_a_head_without_drafts_decodes_plainly_and_says_so(tmp_path):
    target = tiny_target()
    folder = save_head(random_head("eagle3", target), tmp_path / "head", target=target)
    record_tuned(folder, NONE, {"machine": "this machine"})
    with pytest.warns(UserWarning, match="without drafts.*this machine.*tune"):
        head = load_head(folder, target=target)
    [prompt] = some_prompts(6)
    [text], [statistics] = decode(target, head, [prompt], max_new_tokens=9)
    assert text == greedy(target, prompt, 9)
    assert statistics.tokens_per_step == 1.0
