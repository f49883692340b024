"""The promise, on a GPU: losses and gradients are those of the CPU, every engine trains what one
process alone trains, and a run is resumed as if it had never stopped.
"""

from __future__ import annotations

import copy
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hybrid_targets import hybrid_model
from tiny_heads import VARIANTS, random_head, written_by
from tiny_targets import random_model, some_prompts
from tiny_training import run, tiny_recipe, weights
from turns import conversation, rows_of

from draftheads.heads.formats.hub import HEADS
from draftheads.heads.target.model import Target
from draftheads.heads.target.packing import shares_prefixes
from draftheads.train.batches import Documents
from draftheads.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
LAUNCHES = {
    "ddp": ["torch.distributed.run", "--nproc-per-node=1"],
    **{
        name: ["accelerate.commands.launch", "--config_file", f"recipes/accelerate-{name}.yaml"]
        for name in ("fsdp2", "zero1", "zero2", "zero3")
    },
}


@pytest.mark.parametrize("rows", ["apart", "branches"])
@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_loss_and_gradients_are_those_of_the_cpu(kind, name, rows):
    model = random_model(name) if name == "llama" else hybrid_model(name)
    found = []
    for device in ("cpu", "cuda"):
        target = Target(copy.deepcopy(model).to(device))
        head = random_head(kind, target, steps=3, anchors=99).to(device)
        batch = written_by(target, some_prompts(5, 5), 12)
        if rows == "branches":
            batch = rows_of(Documents.read(conversation(5, 1)), 64).batch([0])
            assert batch.reach_BT is not None and shares_prefixes(target)
        batch = batch.to(device)
        loss = head(batch, target.features(batch, head.training_layers), target).loss
        loss.backward()
        gradients = {n: x.grad.cpu() for n, x in head.named_parameters() if x.grad is not None}
        found.append((loss.item(), gradients))
    (loss, gradients), (other, others) = found
    assert other == pytest.approx(loss, rel=1e-4)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("how", [["run.precision=bf16"], ["run.precision=fp32"]], ids=str)
def test_the_loss_falls(made, tmp_path, kind, how):
    assert run(made, tmp_path / "run", "run.steps=30", "optim.lr=1e-2", *how, kind=kind) == 0
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("kind", HEADS)
def test_resume_equals_uninterrupted(made, tmp_path, kind):
    assert run(made, tmp_path / "run", "run.save_every=3", kind=kind) == 0
    whole = weights(tmp_path / "run", 6)
    shutil.rmtree(tmp_path / "run" / "step-000006")
    assert run(made, tmp_path / "run", "run.save_every=3", kind=kind) == 0
    assert_close(whole, weights(tmp_path / "run", 6))


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "mtp"])
def test_every_engine_trains_the_same(made, tmp_path, kind, launch):
    assert run(made, tmp_path / "alone", kind=kind) == 0
    recipe = tmp_path / "other.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, kind, output=str(tmp_path / "other"))))
    result = launched(LAUNCHES[launch], "train/medusa.py", str(recipe))
    assert result.returncode == 0, result.stderr[-3000:]
    assert_close(weights(tmp_path / "alone", 6), weights(tmp_path / "other", 6))


def launched(launch: list[str], *script: str) -> subprocess.CompletedProcess[str]:
    """A training script of one process, on this machine's GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if launch[:1] == ["accelerate.commands.launch"]:
        launch = [*launch, "--num_processes=1", f"--main_process_port={port}"]
    else:
        launch = [*launch, f"--master-port={port}"]
    return subprocess.run(
        [sys.executable, "-m", *launch, *script],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=180,
    )


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """But for the order in which a GPU adds."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.allclose(tensor.float(), right[name].float(), atol=2e-4), name
