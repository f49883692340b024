"""The promise: a launch that would not train what was meant is refused."""

from __future__ import annotations

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
import yaml
from launching import CPU, ENGINES, NODE, ROOT, free_port, outputs_of_two_forks, torchrun, two_forks
from safetensors.torch import load_file, save_file
from tiny_training import random_answers, recipe_of, tiny_recipe, weights, write_answers

from draftheads.train import launch
from draftheads.train.launch import check_environment, right_command
from draftheads.train.medusa import main

WORKERS = str(ROOT / "tests" / "helpers" / "workers.py")


@pytest.mark.slow
def test_processes_that_do_not_know_each_other_are_refused(made, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("with a GPU accelerate joins the processes")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, output=str(tmp_path / "run"))))
    script = str(ROOT / "train" / "eagle.py")
    ended = two_forks(tmp_path, script, str(recipe), told={})
    assert [code for code, _ in ended] == [2, 2]
    said = "".join(output for _, output in ended)
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert f"`ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 {script} {recipe}`" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_nodes_train_as_one_launch(made, tmp_path):
    """Each process is the first of its machine; both machines are this one."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, output=str(tmp_path / "run"), steps=2)))
    script = str(ROOT / "train" / "medusa.py")
    said = outputs_of_two_forks(tmp_path, script, str(recipe), told=CPU | NODE)
    assert "done: 2 steps" in said[0]
    assert said[1] == "", "one process speaks for all nodes"
    facts = json.loads((tmp_path / "run" / "step-000002" / "config.json").read_text())
    assert facts["draftheads"]["training"]["hardware"].startswith("2 x ")


@pytest.mark.thorough  # the gate has a death under torchrun, and two processes that resume
def test_processes_that_torchrun_starts_again_go_on(made, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    values = tiny_recipe(made, output=str(tmp_path / "run"), save_every=2)
    recipe.write_text(yaml.safe_dump(values))
    result = torchrun("--max-restarts=1", WORKERS, "restart", str(recipe))
    assert result.returncode == 0, result.stderr[-2000:]
    assert "at step 2 of 6" in result.stdout
    assert "done: 6 steps" in result.stdout
    assert main([str(recipe), f"run.output={tmp_path / 'alone'}"]) == 0
    left, right = (weights(tmp_path / name, 6) for name in ("run", "alone"))
    assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in left)


@pytest.mark.mend("a dead process of a launch")
@pytest.mark.slow
def test_a_process_that_dies_is_one_line_of_each_that_is_left(made, tmp_path):
    """The launcher ends them as well: that must not hide why."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, output=str(tmp_path / "run"))))
    result = torchrun(WORKERS, "restart", str(recipe))
    assert result.returncode != 0
    ours, _, launchers = result.stderr.partition("failed (exitcode: -9)")
    [line] = [line for line in ours.splitlines() if line.startswith(("error", "interrupted"))]
    assert line.startswith("error: another process of this launch is gone or never came (")
    assert line.endswith(
        "); its own last line, or the launcher's report, says why; run the same command again to "
        "resume"
    )
    assert "Traceback" not in ours
    assert "exitcode  : 2" in launchers


def test_a_process_that_never_comes_is_one_line(made, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, output=str(tmp_path / "run"))))
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "ACCELERATE_USE_CPU": "true"}
    for name, value in {**alone, **place}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch, "PATIENCE", timedelta(seconds=2))
    assert main([str(recipe)]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert line.startswith("error: another process of this launch is gone or never came (")
    assert "Timed out after" in line


APART = {
    "alike": ((), (), None),
    "another folder": (
        (),
        ("run.output={0}/nowhere",),
        "process 1 differs from process 0: checkpoint none instead of step-000003;",
    ),
    "another checkpoint": (
        ("run.output={0}/older",),
        (),
        "process 1 differs from process 0: checkpoint step-000003 instead of step-000002;",
    ),
    "another recipe": (
        (),
        ("run.save_every=2", "data.rows_per_batch=1"),
        "process 1 differs from process 0: data.rows_per_batch 1 instead of 2, run.save_every 2 ",
    ),
    "another data set": (
        (),
        ("data.path={0}/data",),
        "process 1: {0}/run holds a run with other data in {0}/data ",
    ),
    "other weights": ((), ("target={0}/target",), "process 1 differs from process 0: target "),
    "no data": ((), ("data.path={0}/none",), "process 1: {0}/none: expected a distillation folder"),
    "no target": ((), ("target={0}/none",), "process 1: target {0}/none: expected a model"),
    "no target on the first": (("target={0}/none",), (), "process 0: target {0}/none: expected a"),
}
"""What either process is told beside the recipe, and the line that follows."""


@pytest.fixture(scope="module")
def apart(made, tmp_path_factory) -> dict[str, list[list]]:
    """By case, exit code and lines of two processes that see different things."""
    folder = tmp_path_factory.mktemp("apart")
    write_answers(folder / "data", random_answers(61))
    shutil.copytree(made / "target", folder / "target")
    tensors = load_file(folder / "target" / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, folder / "target" / "model.safetensors", metadata={"format": "pt"})
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, output=str(folder / "run"), steps=3)))
    assert main([str(recipe)]) == 0
    assert main([str(recipe), f"run.output={folder / 'older'}", "run.steps=2"]) == 0
    told = [
        [[str(recipe), "run.steps=4", *(x.format(folder) for x in each)] for each in case[:2]]
        for case in APART.values()
    ]
    cases = [{"port": free_port(), "arguments": arguments} for arguments in told]
    (folder / "cases.json").write_text(json.dumps(cases[1:] + cases[:1]))
    cases = str(folder / "cases.json")
    outputs = outputs_of_two_forks(folder, WORKERS, "apart", cases, told=CPU | NODE)
    said = [output.splitlines() for output in outputs]
    names = [*APART][1:] + [*APART][:1]
    found = zip(names, *([json.loads(line) for line in lines] for lines in said), strict=True)
    return {name: [str(folder), *each] for name, *each in found}


@pytest.mark.slow
@pytest.mark.parametrize("case", APART)
def test_processes_that_see_different_things_are_refused(apart, case):
    """Each machine says so in one line, and no process waits for the other or takes a step."""
    folder, *found = apart[case]
    expected = APART[case][2]
    if expected is None:
        assert [code for code, _ in found] == [0, 0]
        assert (Path(folder) / "run" / "step-000004").is_dir()
        return
    assert [code for code, _ in found] == [2, 2]
    for (_, lines), where in zip(found, ("", " on process 1"), strict=True):
        [line] = lines
        assert line.startswith(f"error{where}: {expected.format(folder)}"), line
        if "differs" in expected:
            assert line.endswith("keep run.output, data and target on disks that they share")


SRUN = {"SLURM_STEP_NUM_TASKS": "4"}
FSDP = {"ACCELERATE_USE_FSDP": "true"}
BY_LAUNCH = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
ALONE = "srun started 4 tasks, but each would train on its own"
ENVIRONMENTS: list[tuple[dict[str, str], bool, str]] = [
    (SRUN, True, ALONE),
    ({**SRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, True, ALONE),
    ({**SRUN, "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}, True, ""),
    ({"SLURM_STEP_NUM_TASKS": "1"}, True, ""),
    (FSDP, True, "expected fsdp_version: 2, got 1"),
    ({**FSDP, "FSDP_VERSION": "2"}, True, ""),
    # accelerate takes ACCELERATE_USE_CPU first, and would train with DDP without a word
    *(
        (DEEPSPEED | {"ACCELERATE_USE_CPU": value}, False, "leave that out: DeepSpeed without")
        for value in ("true", "True", "1", "yes")
    ),
    (DEEPSPEED | {"ACCELERATE_USE_CPU": "false"}, False, ""),
    (DEEPSPEED, False, ""),
    (BY_LAUNCH, False, "started only one"),
    ({**BY_LAUNCH, "WORLD_SIZE": "2"}, False, ""),
    ({"ACCELERATE_MIXED_PRECISION": "no"}, False, ""),
]
"""What a process is told, whether it has a GPU, and what is said."""


@pytest.mark.mend("ACCELERATE_USE_CPU with DeepSpeed")
@pytest.mark.parametrize(("told", "has_gpu", "said"), ENVIRONMENTS)
def test_a_launch_that_would_leave_something_out_is_refused(told, has_gpu, said):
    if not said:
        check_environment(told, has_gpu=has_gpu)
        return
    with pytest.raises(ValueError, match=said):
        check_environment(told, has_gpu=has_gpu)


@pytest.mark.mend(
    "mixed_precision and gradient_accumulation_steps of accelerate's config were passed over "
    "without a word"
)
@pytest.mark.parametrize(
    ("name", "value", "precision", "said"),
    [
        (
            "MIXED_PRECISION",
            "fp16",
            "fp32",
            "mixed_precision, fp16, is not used: set run.precision",
        ),
        ("MIXED_PRECISION", "bf16", "bf16", ""),
        ("MIXED_PRECISION", "no", "fp32", ""),
        ("GRADIENT_ACCUMULATION_STEPS", "4", "fp32", "_steps, 4, is not used: set run.tokens_per_"),
        ("GRADIENT_ACCUMULATION_STEPS", "1", "fp32", ""),
    ],
)
def test_settings_of_accelerate_that_are_not_used_are_named(
    made, tmp_path, monkeypatch, caplog, name, value, precision, said
):
    recipe = recipe_of(tiny_recipe(made, output=str(tmp_path / "run"), precision=precision))
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    accelerator = launch.make_accelerator(recipe)
    assert accelerator.mixed_precision == "no"
    assert said in caplog.text and bool(caplog.records) == bool(said)


@pytest.mark.mend(
    "after a launch that was killed while it compiled, the next waited for its lock without a word"
)
@pytest.mark.parametrize(
    ("rank", "age", "is_named"), [("0", 9, True), ("0", -9, False), ("1", 9, False)]
)
def test_a_lock_that_a_killed_compiler_left_is_named(
    made, tmp_path, monkeypatch, caplog, rank, age, is_named
):
    """DeepSpeed waits for it. A lock that is younger than this process is one of its launch."""
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    began = psutil.Process().create_time()
    os.utime(lock, (began - age, began - age))
    for name, value in {
        "TORCH_EXTENSIONS_DIR": tmp_path,
        "LOCAL_RANK": rank,
        **ENGINES["zero1"],
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch, "Accelerator", Mock(side_effect=KeyboardInterrupt))  # would wait
    with pytest.raises(KeyboardInterrupt):
        launch.make_accelerator(recipe_of(tiny_recipe(made, output=str(tmp_path / "run"))))
    named = f"DeepSpeed may wait for {lock}: another process compiles there, or was killed"
    assert (named in caplog.text) == is_named
    assert lock.exists()


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


def test_huge_pages_are_asked_for_unless_the_user_said_otherwise(monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    launch.use_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    launch.use_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
