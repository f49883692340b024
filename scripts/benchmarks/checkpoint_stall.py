"""How long does training wait for a checkpoint?

    python scripts/benchmarks/checkpoint_stall.py --millions 100

Steps of AdamW on random gradients, with checkpoints written in a thread and waited for, in turn:
the wait of the loop at a save, and the time of all steps around it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from draftheads.heads.medusa import MedusaChoices, MedusaHead
from draftheads.heads.target import Target
from draftheads.train.checkpoint import Checkpoints, Content, RunState
from draftheads.train.engines import Engine, make_engine, make_learner
from draftheads.train.recipe import load_recipe

WIDTH, VOCABULARY, DEPTH = 1024, 1024, 4


def random_target() -> Target:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=8,
    )
    return Target(LlamaForCausalLM(config).eval(), name="random")


def train(engine: Engine, steps: int) -> None:
    """Steps on random features, as costly as those of a small micro batch."""
    for _ in range(steps):
        features_BD = torch.randn(128, WIDTH)
        matrices = [p for p in engine.learner.trained().values() if p.shape[-1] == WIDTH]
        loss = sum(
            (features_BD @ matrix.mT).square().mean() for matrix in matrices if matrix.ndim > 1
        )
        engine.backward(loss, last=True)
        engine.update({"heads": 1e-4})


def measure(millions: float, steps: int, rounds: int, output: Path) -> None:
    """Print the medians of both ways."""
    accelerator, target = Accelerator(cpu=True), random_target()
    layers = round(millions * 1e6 / DEPTH / WIDTH**2) - VOCABULARY // WIDTH
    # more layers than a recipe takes
    head = MedusaHead.create(target, MedusaChoices.model_construct(depth=DEPTH, layers=layers))
    recipe = load_recipe("recipes/demo-medusa.yaml", [f"run.output={output}", "run.keep=1"])
    engine = make_engine(make_learner(recipe, head, target), recipe.optim, accelerator)
    state = RunState(0, 1, 0, 0.0, None, 1.0, 0, 1, recipe, "", {}, {})
    checkpoints = Checkpoints(recipe, accelerator, None, 0)
    found: dict[str, list[tuple[float, float]]] = {"in a thread": [], "waited for": []}
    train(engine, 1)
    for number in range(2 * rounds):
        way = list(found)[number % 2]
        began = time.perf_counter()
        checkpoints.wait()
        copies = engine.on_host(head), engine.optimizer_state(keep=True)
        checkpoints.save(Content(*copies, replace(state, step=number + 1), target, {}))
        del copies
        if way == "waited for":
            checkpoints.wait()
        waited = time.perf_counter() - began
        train(engine, steps)
        found[way].append((waited, time.perf_counter() - began))
        checkpoints.wait()
    checkpoints.close()
    numbers = sum(parameter.numel() for parameter in engine.learner.trained().values())
    print(f"{numbers / 1e6:.0f} M parameters, checkpoints of {12 * numbers / 1e9:.2f} GB")
    for way, times in found.items():
        wait, total = (median(each) for each in zip(*times, strict=True))
        print(f"written {way}: the loop waits {wait:.2f} s; with {steps} steps {total:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    asked = vars(parser.parse_args())
    folder = Path(tempfile.mkdtemp(dir="."))
    try:
        measure(**asked, output=folder / "run")
    finally:
        shutil.rmtree(folder)
