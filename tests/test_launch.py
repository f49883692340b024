"""The promise: training means the same on any number of processes, and a launch that would not is
refused.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from tiny_training import (
    assert_same,
    random_answers,
    tiny_recipe,
    weights,
    write_answers,
    write_target,
)

from draftheads.heads.hub import HEADS
from draftheads.train.launch import check_environment, right_command
from draftheads.train.medusa import main
from draftheads.train.progress import read_metrics

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """target and data."""
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_answers(folder / "data", random_answers(60))
    return folder


def torchrun(*arguments: str, cpu: bool = True) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    return subprocess.run(
        [sys.executable, *launch, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def by_two(made, tmp_path_factory) -> Path:
    """A folder for each kind: recipe.yaml, and what two processes made of it."""
    folder = tmp_path_factory.mktemp("two")
    recipes = []
    for kind in HEADS:
        values = tiny_recipe(made, kind, output=str(folder / kind / "two"))
        values["data"]["rows_per_batch"] = 1
        if kind == "eagle":
            values["head"]["noise"] = 0.0  # which each process draws for itself
        (folder / kind).mkdir()
        recipes.append(folder / kind / "recipe.yaml")
        recipes[-1].write_text(yaml.safe_dump(values))
    result = torchrun(str(ROOT / "tests" / "ddp_worker.py"), *map(str, recipes))
    assert result.returncode == 0, result.stderr[-2000:]
    return folder


@pytest.mark.parametrize("kind", HEADS)
def test_two_processes_train_as_one(by_two, kind):
    folder = by_two / kind
    assert main([str(folder / "recipe.yaml"), f"run.output={folder / 'one'}"]) == 0
    left, right = (torch.load(folder / f"rank-{n}.pt", weights_only=True) for n in (0, 1))
    first, second = left["head"], right["head"]
    assert_same(first, second)
    assert left["drawn"] != right["drawn"], "each process draws noise of its own"
    one, two = read_metrics(folder / "one"), read_metrics(folder / "two")
    for alone, shared in zip(one, two, strict=True):
        assert alone["step"] == shared["step"]
        for key in alone.keys() & {"loss", "gradient_norm", "top1", "chain", "heldout_top5"}:
            assert shared[key] == pytest.approx(alone[key], rel=1e-4), (alone["step"], key)
    single = weights(folder / "one", 6)
    assert all(torch.allclose(single[name], first[name], atol=1e-4) for name in single)


def test_processes_that_do_not_know_each_other_are_refused(made, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("with a GPU accelerate joins the processes")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, output=str(tmp_path / "run"))))
    script = str(ROOT / "train" / "eagle.py")
    result = torchrun(script, str(recipe), cpu=False)
    assert result.returncode != 0
    assert "exitcode  : 2" in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert f"`ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 {script} {recipe}`" in lines[0]
    assert not (tmp_path / "run").exists()


def test_accelerate_launch_on_cpu_with_several_processes_is_refused():
    by_launch = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
    with pytest.raises(ValueError, match="starts only one process"):
        check_environment(by_launch, has_gpu=False)
    check_environment({**by_launch, "WORLD_SIZE": "2"}, has_gpu=False)
    check_environment({"ACCELERATE_MIXED_PRECISION": "no"}, has_gpu=False)


@pytest.mark.parametrize(
    "started", [["train/eagle.py", "r.yaml", "run.steps=2"], [".venv/bin/draftheads", "train", "r"]]
)
def test_the_right_command_starts_what_was_started(monkeypatch, started):
    monkeypatch.setattr("sys.argv", started)
    words = " ".join(started)
    assert right_command(False, "2") == (
        f"ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 {words}"
    )
    assert right_command(True, "2") == f"accelerate launch --multi_gpu --num_processes 2 {words}"
