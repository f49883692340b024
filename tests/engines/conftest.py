"""Real engines, and heads for them: trained once on the demo target, in a few minutes.

DRAFTHEADS_ENGINE_HEADS: a folder to keep the trained heads in; default: they are trained anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from draftheads.heads.target import Target
from draftheads.scripts.demo import RECIPES
from draftheads.train.data.distill import DistillOptions, distill
from draftheads.train.data.prompts import read_prompts
from draftheads.train.loop import fit
from draftheads.train.recipe import load_recipe


@pytest.fixture(scope="session")
def demo_target() -> Target:
    return Target.load(RECIPES / "demo-target", dtype="float32")


@pytest.fixture(scope="session")
def trained(demo_target, tmp_path_factory) -> Callable[..., Path]:
    """trained(name, *overrides): the run folder of the demo's recipe for a kind of head."""
    kept = os.environ.get("DRAFTHEADS_ENGINE_HEADS")
    home = Path(kept) if kept else tmp_path_factory.mktemp("heads")

    def train(kind: str, *overrides: str) -> Path:
        out = home / "-".join([kind, *overrides]).replace("/", "_")
        if not (home / "data" / "manifest.json").is_file():
            prompts = read_prompts(RECIPES / "demo-prompts.jsonl")
            options = DistillOptions(out=home / "data", max_new_tokens=128, batch_size=64)
            distill(demo_target, prompts, options)
        places = [f"target={demo_target.name}", f"data.path={home / 'data'}", f"run.output={out}"]
        fit(load_recipe(RECIPES / f"demo-{kind}.yaml", [*places, *overrides]))
        return out

    return train
