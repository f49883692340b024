"""The promise: training means the same on any number of processes and with every engine, and goes
on bit for bit; a checkpoint does not know which of them wrote it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from launching import (
    ENGINES,
    ROOT,
    exit_code_of_a_fork,
    free_port,
    launch_environment,
    outputs_of_two_forks,
)
from safetensors.torch import load_file
from tiny_training import (
    assert_same,
    random_answers,
    tiny_recipe,
    weights,
    write_answers,
    write_target,
)

from draftheads.heads.formats.hub import HEADS, load_head
from draftheads.train.checkpoint import newest
from draftheads.train.medusa import main
from draftheads.train.metrics import read_metrics

pytestmark = pytest.mark.slow
WORKERS = str(ROOT / "tests" / "helpers" / "workers.py")
LAUNCHERS = {
    "zero2": [
        *("accelerate.commands.launch", "--config_file", "recipes/accelerate-zero2.yaml"),
        *("--num_processes=2", "--main_process_port={port}"),
    ],
}
"""A real one: the other engines are told the same, in forks of this process. Those of torchrun are
in test_launch.py.
"""
INSIDE = ("fsdp2", "zero2", "zero3")
JOINT = "joint"
"""In the place of a kind: Medusa heads and an adapter of the target."""
KINDS = {
    "ddp": ["medusa", "eagle", "mtp", JOINT],
    "fsdp2": ["sequential", "eagle3", "block"],
    "zero1": [JOINT],
    "zero2": ["medusa", "block"],
    "zero3": ["sequential", "eagle3", "mtp"],
}
"""What the gate trains: each kind by two engines, where two can."""
OTHERS = {
    "ddp": ["sequential", "eagle3", "block"],
    "fsdp2": ["medusa", "mtp"],
    "zero1": ["medusa"],
    "zero2": ["sequential", "eagle3", JOINT],
    "zero3": ["medusa", "block"],
}
"""The rest of what an engine can train."""


def recipe_for(made: Path, folder: Path, kind: str) -> Path:
    is_joint = kind == JOINT
    head = "medusa" if is_joint else kind
    values = tiny_recipe(made, head, output=str(folder / "one"), save_every=3)
    if is_joint:
        values["adapter"] = {"rank": 4, "lr": 0.02, "start": 0.3}
    values["data"]["rows_per_batch"] = 1
    if kind == "block":  # random, by numbers that belong to a micro batch, not to a process
        values["head"]["anchors"] = 3
    folder.mkdir()
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """A folder for each kind: recipe.yaml, and `one`, what one process made of it."""
    folder = tmp_path_factory.mktemp("alone")
    write_target(folder / "target")
    write_answers(folder / "data", random_answers(60))
    for kind in [*HEADS, JOINT]:
        assert exit_code_of_a_fork(main, [str(recipe_for(folder, folder / kind, kind))]) == 0
    return folder


def launched(folder: Path, engine: str, *arguments: str) -> None:
    if engine not in LAUNCHERS:
        outputs_of_two_forks(folder, WORKERS, "engines", *arguments, told=ENGINES[engine])
        return
    launcher = [word.format(port=free_port()) for word in LAUNCHERS[engine]]
    result = subprocess.run(
        [sys.executable, "-m", *launcher, WORKERS, "engines", *arguments],
        **{"env": launch_environment(cpu=False), "cwd": ROOT, "timeout": 300},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param(
                (engine, kinds), id=engine, marks=[pytest.mark.inside] * (engine in INSIDE)
            )
            for engine, kinds in KINDS.items()
        ),
        *(
            pytest.param((engine, kinds), id=f"{engine}, others", marks=pytest.mark.thorough)
            for engine, kinds in OTHERS.items()
        ),
    ],
)
def together(request, alone, tmp_path_factory) -> tuple[str, Path]:
    """An engine, and a folder for each kind: what two processes made with it."""
    engine, kinds = request.param
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed", reason="the extra `deepspeed` is not installed")
    folder = tmp_path_factory.mktemp(engine)
    for kind in kinds:
        (folder / kind).mkdir()
    recipes = [str(alone / kind / "recipe.yaml") for kind in kinds]
    launched(folder, engine, str(folder), *recipes)
    return engine, folder


def learned(output: Path) -> dict[str, torch.Tensor]:
    """The weights at the end: the heads', and the adapter's."""
    adapter = output / "step-000006" / "adapter" / "adapter_model.safetensors"
    return weights(output, 6) | (load_file(adapter) if adapter.is_file() else {})


def optimizer_state(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "step-000006" / "trainer" / "optimizer.safetensors")


def kinds_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@pytest.mark.mend("an MTP head was refused by DeepSpeed ZeRO-3 with a traceback")
def test_two_processes_train_as_one(alone, together):
    engine, folder = together
    for kind in kinds_in(folder):
        one, two = (read_metrics(x) for x in (alone / kind / "one", folder / kind / "whole"))
        assert len(one) == len(two)
        for single, shared in zip(one, two, strict=True):
            assert single["step"] == shared["step"]
            for key in single.keys() & {"loss", "gradient_norm", "top1", "chain"}:
                expected = pytest.approx(single[key], rel=1e-4)
                assert shared[key] == expected, (engine, kind, single["step"], key)
        left, right = learned(alone / kind / "one"), learned(folder / kind / "whole")
        assert left.keys() == right.keys()
        assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in left)


def test_all_processes_have_the_same_weights_and_random_numbers_of_their_own(together):
    _, folder = together
    for kind in kinds_in(folder):
        ranks = [torch.load(folder / kind / f"rank-{n}.pt", weights_only=True) for n in (0, 1)]
        assert_same(ranks[0]["head"], ranks[1]["head"])
        assert_same(ranks[0]["head"], learned(folder / kind / "whole"))
        assert ranks[0]["drawn"] != ranks[1]["drawn"]


def test_a_continued_run_equals_an_uninterrupted_one_bit_for_bit(together):
    _, folder = together
    for kind in kinds_in(folder):
        assert_same(learned(folder / kind / "whole"), learned(folder / kind / "resumed"))
        assert_same(
            optimizer_state(folder / kind / "whole"), optimizer_state(folder / kind / "resumed")
        )
        assert load_head(folder / kind / "resumed").tree == load_head(folder / kind / "whole").tree


def test_any_engine_goes_on_with_what_one_process_began(alone, together):
    _, folder = together
    for kind in kinds_in(folder):
        for read in (learned, optimizer_state):
            left, right = read(alone / kind / "one"), read(folder / kind / "moved")
            assert left.keys() == right.keys()
            assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in left)


def test_processes_go_by_the_clock_of_the_first(together):
    """That of the others stands still."""
    _, folder = together
    [output] = folder.glob("*/minutes")
    saved, _ = newest(output)
    assert saved.state.step == saved.state.steps >= 1 and saved.state.seconds >= 0.6


def test_one_process_goes_on_with_what_any_engine_began(alone, together, tmp_path):
    _, folder = together
    kind = kinds_in(folder)[0]
    shutil.copytree(folder / kind / "whole", tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "step-000006")
    assert main([str(alone / kind / "recipe.yaml"), f"run.output={tmp_path / 'run'}"]) == 0
    left, right = learned(alone / kind / "one"), learned(tmp_path / "run")
    assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in left)
