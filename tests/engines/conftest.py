"""Real engines, and heads for them: trained once on the demo target and its relatives, in minutes.

DRAFTHEADS_ENGINE_HEADS: a folder to keep the trained heads in; default: they are trained anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from real_engines import write_relative

from draftheads.heads.target.model import Target
from draftheads.recipes import FOLDER as RECIPES
from draftheads.train.data.distill import DistillOptions, distill
from draftheads.train.data.prompts import read_prompts
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe

SOME = 200
"""Prompts that a relative of the demo target answers."""


@pytest.fixture(scope="session")
def demo_target() -> Target:
    return Target.load(RECIPES / "demo-target", dtype="float32")


@pytest.fixture(scope="session")
def heads_home(tmp_path_factory) -> Path:
    kept = os.environ.get("DRAFTHEADS_ENGINE_HEADS")
    return Path(kept) if kept else tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="session")
def relative(demo_target, heads_home) -> Callable[[str], Target]:
    """relative(model_type): the demo target's weights in another architecture (real_engines.py)."""

    @cache
    def load(model_type: str) -> Target:
        folder = heads_home / "targets" / model_type
        if not folder.is_dir():
            write_relative(demo_target, model_type, folder)
        return Target.load(folder, dtype="float32")

    return load


@pytest.fixture(scope="session")
def trained(demo_target, heads_home) -> Callable[..., Path]:
    """trained(name, *overrides, target=None): the run folder of the demo's recipe for a kind of
    head, on the demo target, or on another one with fewer answers of its own.
    """

    def train(kind: str, *overrides: str, target: Target | None = None) -> Path:
        name, data, limit = kind, heads_home / "data", None
        if target is not None:
            model_type = Path(target.name).name
            name, data, limit = f"{model_type}-{kind}", heads_home / f"data-{model_type}", SOME
        target = target or demo_target
        out = heads_home / "-".join([name, *overrides]).replace("/", "_")
        if not (data / "manifest.json").is_file():
            prompts = read_prompts(RECIPES / "demo-prompts.jsonl", limit=limit)
            options = DistillOptions(out=data, max_new_tokens=128, batch_size=64)
            distill(target, prompts, options)
        places = [f"target={target.name}", f"data.path={data}", f"run.output={out}"]
        fit(load_recipe(RECIPES / f"demo-{kind}.yaml", [*places, *overrides]))
        return out

    return train
