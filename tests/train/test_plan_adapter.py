"""The promise: a plan knows what an adapter of the target costs, before it begins to learn and
after.
"""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_targets import random_model
from tiny_training import random_answers, recipe_of, run, tiny_model, tiny_recipe, tiny_target

from draftheads.scripts.plan_table import print_plan
from draftheads.train.data.answers import read_manifest
from draftheads.train.plan import (
    ALONE,
    JOINT,
    Launch,
    Pace,
    Probe,
    Prober,
    Trial,
    activation_bytes,
    count_documents,
    count_sizes,
    make_plan,
    plan_steps,
    read_trial,
    read_workload,
    write_answers,
)
from draftheads.train.recipe import Recipe

ONE = Launch(1, "ddp", "cpu")


def joint_recipe(made: Path, **adapter: Any) -> Recipe:
    return recipe_of({**tiny_recipe(made), "adapter": {"rank": 4, **adapter}})


@pytest.mark.parametrize(
    "choices", [{}, {"layers": 1}, {"modules": ["q_proj", "down_proj"]}, {"rank": 7}]
)
def test_shapes_count_what_a_real_adapter_holds(made, choices):
    sizes = count_sizes(joint_recipe(made, **choices)).adapter
    adapter = tiny_target().adapt(**{"rank": 4, "alpha": 16.0, **choices})
    state = adapter.state()
    assert sizes.bytes == sum(tensor.nbytes for tensor in state.values())
    assert sizes.tensors == len(state)
    assert sizes.layers == choices.get("layers", 2)
    assert sizes.largest == max(tensor.numel() for tensor in state.values())


def test_a_checkpoint_with_an_adapter_is_as_large_as_predicted(made, tmp_path):
    assert run(made, tmp_path / "run", "run.steps=1", "adapter.rank=4") == 0
    files = [path for path in (tmp_path / "run" / "step-000001").rglob("*") if path.is_file()]
    plan = make_plan(joint_recipe(made), ONE, probe=False)
    assert plan.disk.checkpoint == pytest.approx(sum(x.stat().st_size for x in files), rel=0.02)


def test_what_an_adapter_learns_with_is_in_memory(made):
    alone = make_plan(recipe_of(tiny_recipe(made)), ONE, probe=False)
    joint = make_plan(joint_recipe(made), ONE, probe=False)
    size = joint.sizes.adapter.bytes
    parts = ("weights", "gradients", "optimizer")
    more = [getattr(joint.memory, x) - getattr(alone.memory, x) for x in parts]
    assert more == [size, size, 2 * size]
    with pytest.raises(ValueError, match="ddp, zero1 or zero2 with an adapter, got zero3"):
        make_plan(joint_recipe(made), Launch(2, "zero3", "cpu"), probe=False)


def test_layers_that_learn_are_kept_for_the_backward_pass(made, tmp_path):
    deep = deep_recipe(made, tmp_path)

    def bound(recipe: Recipe) -> int:
        return activation_bytes(recipe, count_sizes(recipe), 64)

    frozen = bound(deep.model_copy(update={"adapter": None}))
    few, many = (
        bound(deep.model_copy(update={"adapter": deep.adapter.model_copy(update={"layers": n})}))
        for n in (1, 12)
    )
    frugal = deep.run.model_copy(update={"gradient_checkpointing": True})
    assert frozen < few < many
    assert (many - frozen) > 5 * (few - frozen)
    assert few < bound(deep.model_copy(update={"run": frugal})) < many


def deep_recipe(made: Path, folder: Path, **adapter: Any) -> Recipe:
    """Of a target of 12 layers without weights."""
    config = tiny_model().config
    config.num_hidden_layers = 12
    config.save_pretrained(folder / "deep")
    recipe = joint_recipe(made, **adapter)
    return recipe.model_copy(update={"target": str(folder / "deep")})


@pytest.mark.parametrize(
    ("layers", "depths"),
    [
        (None, [(1, 1), (4, 4)]),
        (12, [(1, 1), (4, 4)]),
        (3, [(1, 1), (4, 1), (4, 4)]),
    ],
)
def test_trials_tell_layers_that_learn_from_others(made, tmp_path, layers, depths):
    recipe = deep_recipe(made, tmp_path, layers=layers)
    sizes = count_sizes(recipe)
    work = read_workload(recipe, sizes.target.context)
    assert Prober(recipe, sizes, work, plan_steps(recipe, work, 1)).depths() == depths


def linear(depth: tuple[int, int]) -> Trial:
    """Of a target of which a layer costs 10, and 100 more when it learns."""
    cost = 1000 + 10 * depth[0] + 100 * depth[1]
    pace = Pace(cost, 2 * cost)
    peaks = {"load": cost, "train": 2 * cost, "save": 3 * cost}
    paces = {ALONE: pace, JOINT: pace}
    return Trial(depth, 1, 7, peaks, cost, paces, cost, cost, cost, cost)


@pytest.mark.parametrize(
    ("tried", "whole"),
    [
        ([(1, 1), (4, 4)], (32, 32)),
        ([(1, 1), (4, 1), (4, 4)], (32, 8)),
        ([(1, 1), (4, 1), (4, 4)], (32, 2)),
        ([(2, 1)], (2, 1)),
    ],
)
def test_both_kinds_of_layers_are_extrapolated(tried, whole):
    probe = Probe([linear(depth) for depth in tried], heldout=1, rows=1)
    got, expected = probe.at(whole), linear(whole)
    assert replace(got, peaks={}, paces={}) == replace(expected, peaks={}, paces={})
    assert got.peaks == expected.peaks
    assert got.paces == expected.paces


def test_steps_with_and_without_the_adapter_are_told_apart():
    marks, at = [("begin", 0.0)], 0.0
    for step in range(6):  # 1 s features, 2 s head; from step 3 on 4 s adapted; 0.5 s optimizer
        for _ in range(2):
            marks += [("target", at), ("target end", at := at + 1)]
            if step >= 3:
                marks += [("adapted", at), ("adapted end", at := at + 4)]
            marks.append(("head", at))
            at += 2
        marks += [("optimizer", at), ("optimizer end", at := at + 0.5)]
    marks += [("forward end", at), ("end", at)]
    trial = read_trial({"base": 1, "peaks": {}, "marks": marks}, (2, 2), 1, 7)
    assert trial.features == 1
    assert trial.paces == {ALONE: Pace(2, 4.5), JOINT: Pace(6, 12.5)}
    assert trial.step(5, JOINT) == 5 * 6 + 0.5


def test_both_kinds_of_steps_are_probed_and_shown(made, tmp_path, monkeypatch):
    monkeypatch.setattr("draftheads.train.plan.MOST", 4)
    plan = make_plan(joint_recipe(made, start=0.3), ONE)
    assert plan.reason == "" and plan.time is not None
    assert plan.steps.alone == 2 / 6, "of 6 steps, 0.3 are two, as the learner counts"
    time = plan.time
    assert time.step == pytest.approx(time.alone / 3 + time.joint * 2 / 3)
    assert time.later < time.step <= time.first_pass
    print_plan(plan, Console(file=(said := StringIO()), width=200))
    text = said.getvalue()
    assert f"and {plan.sizes.adapter.parameters:,} of an adapter of 2 layers trained" in text
    assert f"{time.alone:.3g} s while heads learn alone (33% of the steps)" in text
    assert f"{time.joint:.3g} s together with the adapter" in text


def test_an_adapter_that_learns_at_once_has_one_kind_of_step(made, monkeypatch):
    monkeypatch.setattr("draftheads.train.plan.MOST", 4)
    plan = make_plan(joint_recipe(made, start=0), ONE)
    assert plan.time is not None, plan.reason
    assert plan.time.alone is None and plan.time.joint == plan.time.step


def test_what_cannot_be_probed_is_not_told(made, tmp_path):
    config = random_model("gemma2-window").config
    config.final_logit_softcapping = 0.1
    config.save_pretrained(tmp_path / "target")
    recipe = joint_recipe(made)
    data = recipe.data.model_copy(update={"path": tmp_path / "missing"})
    other = {"target": str(tmp_path / "target"), "data": data}
    plan = make_plan(recipe.model_copy(update=other), ONE)
    assert plan.time is None
    assert "adapter: its divergence cannot be measured" in plan.reason
    print_plan(plan, Console(file=(said := StringIO()), width=100, soft_wrap=True))
    assert f"time   unknown: {plan.reason}" in said.getvalue()


def test_held_out_features_are_not_stored_where_an_adapter_changes_them(made):
    values = {"mode": "cached", "dtype": "bf16"}
    sizes = []
    for recipe in (recipe_of(tiny_recipe(made)), joint_recipe(made)):
        features = recipe.features.model_copy(update=values)
        plan = make_plan(recipe.model_copy(update={"features": features}), ONE, probe=False)
        sizes.append(plan.disk.features)
    assert sizes[0] - sizes[1] == plan.work.heldout * 32 * 2


def test_documents_are_counted_and_not_conversations(tmp_path):
    answers = [replace(x, follows=n % 3 > 0) for n, x in enumerate(random_answers(12))]
    write_answers(tmp_path / "data", answers)
    manifest = read_manifest(tmp_path / "data")
    assert manifest["prompts"]["count"] == manifest["counts"]["done"] == 4
    assert count_documents(tmp_path / "data", {**manifest, "complete": False}) == 12
    known = {**manifest, "counts": {"done": 4, "documents": 12}}
    assert count_documents(tmp_path / "data", known) == 12
    assert count_documents(tmp_path / "data", manifest) == 4, "written before there were several"
