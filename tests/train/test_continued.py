"""The promise: any head can be the start of a run; what it was is measured, kept and recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_training import (
    HEAD_SECTIONS,
    assert_same,
    random_answers,
    recipe_of,
    run,
    tiny_model,
    tiny_recipe,
    weights,
    write_answers,
    write_target,
)

from draftheads.heads.formats.hub import load_head
from draftheads.heads.target.model import Target
from draftheads.scripts.convert import converted
from draftheads.train.advice.plan import make_plan
from draftheads.train.checkpoint import read_state
from draftheads.train.medusa import fit, main

LAYOUTS = {"medusa": "vllm", "eagle3": "speculators", "eagle": "vllm", "block": "speculators"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A target, its data, and a trained head of each kind."""
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_answers(folder / "data", random_answers(40))
    for kind in HEAD_SECTIONS:
        mask = ["head.mask=96"] if kind == "block" else []  # a learned one is for our layout alone
        assert run(folder, folder / kind, *mask, kind=kind) == 0
    return folder


def bare(made: Path, kind: str, output: Path, **head: Any) -> dict[str, Any]:
    """A recipe that says nothing of the sizes of a head."""
    recipe = tiny_recipe(made, kind, output=str(output))
    sizes = recipe["head"]
    recipe["head"] = {"kind": kind, "nodes": 7, "from": str(made / kind), **head}
    if kind.startswith("eagle"):  # else its tree is larger
        recipe["head"] |= {key: sizes[key] for key in ("depth", "top_k", "steps")}
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEAD_SECTIONS)
def test_a_run_starts_from_a_head_of_any_kind(made, tmp_path, capsys, kind):
    outcome = fit(recipe_of(bare(made, kind, tmp_path / "run")))
    source = load_file(made / kind / "best" / "model.safetensors")
    assert_same(weights(tmp_path / "run", 0), source)
    trained = load_file(outcome.checkpoint / "model.safetensors")
    assert {name: x.shape for name, x in trained.items()} == {
        name: x.shape for name, x in source.items()
    }
    assert any(not torch.equal(trained[name], source[name]) for name in source)
    facts = load_facts(outcome.checkpoint)["continued"]
    assert facts["name"] == str(made / kind)
    assert facts["tokens_per_step"] == read_state(tmp_path / "run" / "step-000000").tokens_per_step
    assert "on the target that it was trained on" in capsys.readouterr().out
    assert f"| continued.name | {made / kind} |" in (outcome.checkpoint / "README.md").read_text()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_heads_of_other_layouts_are_continued_and_exported(made, tmp_path, kind):
    target = Target(tiny_model(), name=str(made / "target"))
    foreign = tmp_path / "foreign"
    converted(made / kind / "best", foreign, to=LAYOUTS[kind], target=target)
    fit(recipe_of(bare(made, kind, tmp_path / "run", **{"from": str(foreign)})))
    again = tmp_path / "again"
    converted(tmp_path / "run" / "step-000000", again, to=LAYOUTS[kind], target=target)
    for path in foreign.glob("*.safetensors"):
        assert_same(load_file(path), load_file(again / path.name))


def test_a_continued_run_resumes_without_its_source(made, tmp_path):
    whole = fit(recipe_of(bare(made, "medusa", tmp_path / "whole"))).checkpoint
    shutil.copytree(made / "medusa", tmp_path / "source", symlinks=True)
    recipe = bare(made, "medusa", tmp_path / "run", **{"from": str(tmp_path / "source")})
    recipe["run"]["save_every"] = 2
    fit(recipe_of(recipe), on_evaluation=lambda step, figures: step != 2)
    shutil.rmtree(tmp_path / "source")
    fit(recipe_of(recipe))
    assert_same(weights(tmp_path / "run", 6), load_file(whole / "model.safetensors"))
    assert read_state(tmp_path / "run" / "step-000006").origin is not None


def test_training_ends_when_it_stops_paying(made, tmp_path, capsys):
    recipe = bare(made, "medusa", tmp_path / "run")
    recipe["optim"]["lr"] = 1e-12
    recipe["run"] |= {"steps": 40, "save_every": 1}
    fit(recipe_of(recipe))
    assert "ended at step 3 of 40, after" in capsys.readouterr().out


@pytest.mark.slow
def test_an_mtp_head_takes_another_draft_vocabulary(made, tmp_path):
    for name, more in (("start", {"vocabulary": 60}), ("run", {"vocabulary": 50})):
        recipe = bare(made, "mtp", tmp_path / name, **more)
        if name == "run":
            recipe["head"]["from"] = str(tmp_path / "start")
        fit(recipe_of(recipe))
    before = load_head(tmp_path / "start")
    after = load_head(tmp_path / "run" / "step-000000")
    new = after.token_map.tolist()
    assert len(new) == 50 and set(new) < set(before.token_map.tolist()), "the most frequent ones"


def test_what_differs_from_its_target_is_said(made, tmp_path, capsys):
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.add_(0.1)
    model.save_pretrained(tmp_path / "tuned")
    recipe = bare(made, "medusa", tmp_path / "run") | {"target": str(tmp_path / "tuned")}
    recipe["head"].pop("from")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert main([str(path), f"head.from={made / 'medusa'}"]) == 0
    name = made / "target"
    assert f"on another target than {name}, on which it was trained" in capsys.readouterr().out


def test_heads_that_cannot_be_continued(made, tmp_path, capsys):
    def refusal(kind: str, **changes: Any) -> str:
        recipe = bare(made, kind, tmp_path / "run") | changes
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        assert main([str(path)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    other = {"kind": "medusa", "from": str(made / "eagle3")}
    assert "got eagle3; set head.kind=eagle3" in refusal("medusa", head=other)
    wide = tiny_model().config
    wide.hidden_size = 64
    type(tiny_model())(wide).save_pretrained(tmp_path / "wide")
    assert "hidden size 32" in refusal("medusa", target=str(tmp_path / "wide"))
    narrow = tiny_model()
    narrow.resize_token_embeddings(80)
    narrow.save_pretrained(tmp_path / "narrow")
    answers = [a for a in random_answers(400) if max(a.tokens) < 80]
    data = {**tiny_recipe(made)["data"], "path": str(write_answers(tmp_path / "few", answers))}
    line = refusal("medusa", target=str(tmp_path / "narrow"), data=data)
    assert "vocabulary 97" in line and "80" in line
    line = refusal("medusa", head={"kind": "medusa", "from": str(tmp_path / "none")})
    assert "none" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.mend("sizes beside head.from were ignored and recorded as true")
def test_sizes_that_the_head_does_not_have_are_refused(made, tmp_path, capsys):
    wrong = [
        ("medusa", "depth", 5),
        ("medusa", "vocabulary", 50),
        ("sequential", "conditioning", "hydra"),
        ("eagle3", "feature_layers", [0, 1]),
        ("eagle3", "vocabulary", 50),
        ("block", "block_size", 5),
        ("eagle", "intermediate_size", 64),
    ]
    for kind, key, value in wrong:
        with pytest.raises(ValueError, match=f"head.{key}: expected .*, which the head has"):
            fit(recipe_of(bare(made, kind, tmp_path / kind, **{key: value})))
        assert not list(tmp_path.glob(f"{kind}/step-*"))


@pytest.mark.mend("defaults were recorded as the sizes of a head that was continued")
def test_the_sizes_of_the_head_are_recorded(made, tmp_path):
    """Not the defaults of a recipe that says nothing of them."""
    outcome = fit(recipe_of(bare(made, "medusa", tmp_path / "run")))
    assert load_facts(outcome.checkpoint)["recipe"]["head"]["depth"] == 3
    outcome = fit(recipe_of(bare(made, "block", tmp_path / "block")))
    assert load_facts(outcome.checkpoint)["recipe"]["head"]["block_size"] == 3


def test_plan_counts_the_head_that_is_continued(made, tmp_path):
    plan = make_plan(recipe_of(bare(made, "medusa", tmp_path / "run")), probe=False)
    source = load_file(made / "medusa" / "best" / "model.safetensors")
    assert plan.shapes.head == sum(tensor.numel() for tensor in source.values())


def load_facts(checkpoint: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())["draftheads"]
    return facts["training"]
