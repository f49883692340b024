"""The promise: a launch that would not train what was meant is refused."""

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
    random_answers,
    tiny_recipe,
    write_answers,
    write_target,
)

from draftheads.train.launch import check_environment, right_command

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
