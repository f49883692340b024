"""The promise: a plan knows what an adapter of the target costs, before it begins to learn and
after.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_targets import random_model
from tiny_training import (
    recipe_of,
    tiny_model,
    tiny_recipe,
    tiny_target,
)

from draftheads.scripts.printing import print_plan
from draftheads.train.plan import Shapes, make_plan
from draftheads.train.recipe import Recipe


def joint_recipe(made: Path, **adapter: Any) -> Recipe:
    return recipe_of({**tiny_recipe(made), "adapter": {"rank": 4, **adapter}})


@pytest.mark.parametrize(
    "choices", [{}, {"layers": 1}, {"modules": ["q_proj", "down_proj"]}, {"rank": 7}]
)
def test_shapes_count_what_a_real_adapter_holds(made, choices):
    sizes = Shapes(joint_recipe(made, **choices))
    adapter = tiny_target().adapt(**{"rank": 4, "alpha": 16.0, **choices})
    assert sizes.adapter == sum(tensor.numel() for tensor in adapter.state().values())
    assert sizes.adapted == choices.get("layers", 2)


def test_what_an_adapter_learns_with_is_in_memory(made):
    alone = make_plan(recipe_of(tiny_recipe(made)), probe=False)
    joint = make_plan(joint_recipe(made), probe=False)
    size = 4 * joint.shapes.adapter
    parts = ("weights", "gradients", "optimizer")
    more = [joint.memory[x] - alone.memory[x] for x in parts]
    assert more == [size, size, 2 * size]
    with pytest.raises(ValueError, match="ddp, zero1 or zero2 with an adapter, got zero3"):
        make_plan(joint_recipe(made), 2, "zero3", probe=False)


def deep_recipe(made: Path, folder: Path, **adapter: Any) -> Recipe:
    """Of a target of 12 layers without weights."""
    config = tiny_model().config
    config.num_hidden_layers = 12
    config.save_pretrained(folder / "deep")
    recipe = joint_recipe(made, **adapter)
    return recipe.model_copy(update={"target": str(folder / "deep")})


@pytest.mark.slow
def test_a_deep_target_with_an_adapter_is_tried_with_few_layers(made, tmp_path, monkeypatch):
    monkeypatch.setattr("draftheads.train.plan.MOST", 4)
    plan = make_plan(deep_recipe(made, tmp_path, layers=6))
    assert plan.trial is not None and plan.trial.layers == 4, plan.reason
    assert plan.time and min(plan.time["joint"], plan.time["alone"]) > 0


@pytest.mark.slow
def test_both_kinds_of_steps_are_probed_and_shown(made, tmp_path, monkeypatch):
    monkeypatch.setattr("draftheads.train.plan.MOST", 4)
    plan = make_plan(joint_recipe(made, start=0.3))
    assert plan.reason == "" and plan.time
    assert plan.work.alone == 2 / 6, "of 6 steps, 0.3 are two, as the learner counts"
    time = plan.time
    assert time["step"] == pytest.approx(time["alone"] / 3 + time["joint"] * 2 / 3)
    assert min(time["alone"], time["joint"]) > 0 and time["alone"] != time["joint"]
    print_plan(plan, Console(file=(said := StringIO()), width=200))
    text = said.getvalue()
    assert f"and {plan.shapes.adapter:,} of an adapter of 2 layers trained" in text
    assert f"{time['alone']:.3g} s for heads alone, {time['joint']:.3g} s with the adapter" in text


@pytest.mark.slow
def test_an_adapter_that_learns_at_once_has_one_kind_of_step(made, monkeypatch):
    monkeypatch.setattr("draftheads.train.plan.MOST", 4)
    plan = make_plan(joint_recipe(made, start=0))
    assert plan.time, plan.reason
    assert plan.time["alone"] == 0 and plan.time["joint"] == plan.time["step"]


@pytest.mark.slow
def test_what_cannot_be_probed_is_not_told(made, tmp_path):
    config = random_model("gemma2-window").config
    config.final_logit_softcapping = 0.1
    config.save_pretrained(tmp_path / "target")
    recipe = joint_recipe(made)
    data = recipe.data.model_copy(update={"path": tmp_path / "missing"})
    other = {"target": str(tmp_path / "target"), "data": data}
    plan = make_plan(recipe.model_copy(update=other))
    assert not plan.time
    assert "adapter: its divergence cannot be measured" in plan.reason
    print_plan(plan, Console(file=(said := StringIO()), width=100, soft_wrap=True))
    assert f"time   unknown: {plan.reason}" in said.getvalue()


def test_held_out_features_are_not_stored_where_an_adapter_changes_them(made):
    values = {"mode": "cached", "dtype": "bf16"}
    sizes = []
    for recipe in (recipe_of(tiny_recipe(made)), joint_recipe(made)):
        features = recipe.features.model_copy(update=values)
        plan = make_plan(recipe.model_copy(update={"features": features}), probe=False)
        sizes.append(plan.disk["features"])
    assert sizes[0] - sizes[1] == plan.work.heldout * 32 * 2
