"""The promise: whatever happens to a run, what was saved stays whole, and what happened is said."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from launching import exit_code_of_a_fork, fork
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_training import (
    assert_same,
    in_step,
    random_answers,
    rewrite_state,
    run,
    tiny_recipe,
    weights,
    write_answers,
)

from draftheads.heads.batch import Batch
from draftheads.heads.files import staged, sweep, write_text
from draftheads.heads.formats.hub import HEADS, open_head, write_head
from draftheads.heads.target.model import Target
from draftheads.scripts.convert import converted, merged
from draftheads.train import checkpoint, loop
from draftheads.train.checkpoint import Checkpoints
from draftheads.train.launch import STOP_FILE
from draftheads.train.medusa import main
from draftheads.train.metrics import Progress, read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory) -> Path:
    """A run of six steps, saved after three and six."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert run(made, output, "run.save_every=3") == 0
    return output


@pytest.fixture
def half(whole, tmp_path) -> Path:
    """The same run, its last checkpoint gone."""
    output = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    shutil.rmtree(output / "step-000006")
    return output


def steps(output: Path) -> list[str]:
    return sorted(path.name for path in output.glob("step-*"))


def assert_like_uninterrupted(whole: Path, output: Path) -> None:
    assert_same(weights(whole, 6), weights(output, 6))
    assert_same(*(checkpoint.load_optimizer_state(x / "step-000006") for x in (whole, output)))


def by_signal(number: signal.Signals):
    return lambda output: os.kill(os.getpid(), number)


STOPS = {
    "SIGTERM": by_signal(signal.SIGTERM),
    "SIGINT": by_signal(signal.SIGINT),
    "SIGHUP": by_signal(signal.SIGHUP),
    "checkpoint-now": lambda output: (output / STOP_FILE).touch(),
}
STOPPED = [(stop, kind, gb) for stop, kind, gb in itertools.product(STOPS, HEADS, (0, 1))]
GATE = [
    ("SIGTERM", "medusa", 0),
    ("SIGINT", "sequential", 0),
    ("SIGHUP", "eagle3", 1),
    ("checkpoint-now", "eagle3", 0),
    ("SIGTERM", "eagle", 0),
    ("SIGINT", "block", 0),
    ("SIGHUP", "mtp", 0),
]
"""What stops a run, the kind of its heads, and the gigabytes of its cache: each value once."""
UNTRAINED = {"fc.bias", "d2t", "t2d", "token_map"}
"""Buffers in a folder."""


@pytest.mark.usefixtures("hang_ups_are_heeded")
@pytest.mark.parametrize(
    ("name", "kind", "gb"),
    [pytest.param(*x, marks=[pytest.mark.thorough] * (x not in GATE)) for x in STOPPED],
)
def test_a_run_that_is_stopped_is_saved_and_the_next_launch_equals_an_uninterrupted_one(
    made, tmp_path, monkeypatch, capsys, name, kind, gb
):
    whole, output = tmp_path / "whole", tmp_path / "run"
    depth = "head.anchors=3" if kind == "block" else "head.depth=3"
    choices = ["run.save_every=3", f"data.cache_gb={gb}", depth]
    assert run(made, whole, *choices, kind=kind) == 0
    torch.manual_seed(99)  # what a process drew before a step must not matter
    with monkeypatch.context() as patch:
        in_step(patch, 3, lambda: STOPS[name](output))
        assert run(made, output, *choices, kind=kind) == 130
    # it arrives after the step's check: one more step is finished, then saved
    said = capsys.readouterr().out
    assert f"interrupted by {name} at step 4 of 6, saved in {output}/step-000004" in said
    assert steps(output) == ["step-000003", "step-000004"]
    assert not (output / STOP_FILE).exists()
    torch.manual_seed(98)
    assert run(made, output, *choices, kind=kind) == 0
    assert "at step 4 of 6" in capsys.readouterr().out
    assert_like_uninterrupted(whole, output)
    moments = checkpoint.load_optimizer_state(output / "step-000006")
    assert len(moments) == 3 * len(weights(whole, 6).keys() - UNTRAINED)
    one, two = ([x for x in read_metrics(folder) if "loss" in x] for folder in (whole, output))
    assert [x | {"tokens_per_second": 0} for x in one] == [
        x | {"tokens_per_second": 0} for x in two
    ]


@pytest.mark.usefixtures("hang_ups_are_heeded")
def test_signals_that_the_process_was_started_to_ignore_are_ignored(made, tmp_path, monkeypatch):
    """As under nohup, and in a background job of a script."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    in_step(monkeypatch, 2, lambda: [os.kill(os.getpid(), number) for number in numbers])
    assert run(made, tmp_path / "run") == 0
    assert all(signal.getsignal(number) is signal.SIG_IGN for number in numbers)


def wait_in_a_fork(ours: int, theirs: int, made: Path, output: Path) -> None:
    """Train in a terminal of its own, or in front of a program that reads what it prints."""
    os.close(ours)
    if os.isatty(theirs):
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
    for number in (1, 2):
        os.dup2(theirs, number)
    os.close(theirs)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    step = Progress.step

    def wait(self, number, *rest):
        if number == 1:
            (output / "waiting").touch()
            while not (output / "go-on").exists():
                time.sleep(0.01)
        step(self, number, *rest)

    Progress.step = wait
    sys.exit(run(made, output))


@pytest.mark.mend("SIGHUP")
@pytest.mark.usefixtures("hang_ups_are_heeded")
@pytest.mark.parametrize("place", [os.openpty, os.pipe])
def test_a_run_whose_connection_drops_is_saved(made, whole, tmp_path, place):
    """SIGHUP, and nobody left to read: each line printed after it would be an OSError."""
    output = tmp_path / "run"
    ours, theirs = place()
    process = fork(wait_in_a_fork, ours, theirs, made, output)
    os.close(theirs)
    while not (output / "waiting").exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.close(ours)
    os.kill(process.pid, signal.SIGHUP)  # by the shell
    (output / "go-on").touch()
    process.join(timeout=60)
    assert process.exitcode == 130
    assert steps(output) == ["step-000002"]
    assert run(made, output, "run.save_every=3") == 0
    assert_like_uninterrupted(whole, output)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def digit(path: Path) -> None:
    """The state of another step, as one flipped digit makes it."""
    text = path.read_text()
    assert text.count('"step": 6,') == 1
    path.write_text(text.replace('"step": 6,', '"step": 7,'))


def holding(text: bytes):
    """A damage: the file's whole content is this."""
    return lambda path: path.write_bytes(text)


def without(key: str):
    def forget(path: Path) -> None:
        values = json.loads(path.read_text())
        del values[key]
        path.write_text(json.dumps(values))

    return forget


STATES = [
    Path.unlink,
    holding(b""),
    holding(b"[1, 2]"),
    holding(b"null"),
    holding(b"[" * 200_000),
    holding(bytes(200)),
    holding(b"\xff\xfe{}"),
    holding(b'{"format": 4}'),
    holding(b'{"format": 4, "files": []}'),
    without("step"),
    without("recipe"),
]


DAMAGES = [
    ("model.safetensors", cut),
    ("model.safetensors", Path.unlink),
    ("config.json", Path.unlink),
    ("config.json", cut),
    ("trainer/optimizer.safetensors", cut),
    ("trainer/optimizer.safetensors", flip),
    ("trainer/state.json", digit),
    ("trainer/state.json", cut),
    *(("trainer/state.json", damage) for damage in STATES),
]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(whole, tmp_path):
    for number, (name, damage) in enumerate(DAMAGES):
        output = Path(shutil.copytree(whole, tmp_path / f"{number}", symlinks=True))
        damage(output / "step-000006" / name)
        saved, [fault] = checkpoint.newest(output)
        assert saved.folder.name == "step-000003" and f"{name} is missing or damaged" in fault


@pytest.mark.parametrize(("name", "damage"), DAMAGES[1:8:4])
def test_a_run_passes_over_a_damaged_checkpoint(made, whole, tmp_path, capsys, name, damage):
    output = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    damage(output / "step-000006" / name)
    assert run(made, output, "run.save_every=3") == 0
    said = capsys.readouterr().out
    assert f"warning: skipped and set aside {output}/step-000006: " in said
    assert f"{name} is missing or damaged" in said
    assert "step-000003 at step 3 of 6" in said
    assert_like_uninterrupted(whole, output)
    assert (output / "damaged-step-000006").is_dir()
    assert (output / "best").resolve().name in steps(output)


@pytest.mark.mend("a flipped digit in state.json")
def test_every_digit_of_a_state_is_under_its_seal(whole, tmp_path):
    """One that flips would put a step's weights at another step, or its sums at other files."""
    step = Path(shutil.copytree(whole / "step-000006", tmp_path / "step-000006"))
    path = step / "trainer" / "state.json"
    text = path.read_text()
    digits = [place for place, letter in enumerate(text) if letter.isdigit()]
    assert len(digits) > 100
    for place in digits:
        flipped = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
        path.write_text(flipped)
        with suppress(ValueError):
            if json.loads(flipped) == json.loads(text):  # the 17th digit of a float
                continue
        with pytest.raises(ValueError, match=r"state\.json (is missing or damaged|has format 5,)"):
            checkpoint.read_state(step)
    path.write_text(text)
    assert checkpoint.read_state(step).step == 6


TORN = "Error while serializing: I/O error: File too large (os error 27)"
DISKS = {
    "No space left on device": "free space there",
    "Disk quota exceeded": "free space there",
    "File too large": "raise the limit on the size of a file (ulimit",
    "Permission denied": "make it writable",
    "Read-only file system": "make it writable",
    "Input/output error": "check this disk",
    TORN: "raise the limit on the size of a file (ulimit -f)",
}
"""Why a file cannot be written, and what to do about it."""
NUMBERS = {os.strerror(number): number for number in errno.errorcode}


@pytest.mark.mend("advice by the reason")
@pytest.mark.parametrize("reason", DISKS)
def test_a_checkpoint_that_cannot_be_written_says_what_to_do(
    made, half, monkeypatch, capsys, reason
):
    def refuse(*_: object) -> None:
        raise SafetensorError(TORN) if reason == TORN else OSError(NUMBERS[reason], reason)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", refuse)
        assert run(made, half, "run.save_every=3") == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    said = "File too large" if reason == TORN else reason
    assert "step-000006 was not written: " in line and said in line
    assert f"; the newest checkpoint is step-000003; {DISKS[reason]}" in line
    assert line.endswith(" and run the same command again")
    assert steps(half) == ["step-000003"] and not list(half.glob(".step*"))
    if reason == "No space left on device":
        assert run(made, half, "run.save_every=3") == 0


@pytest.mark.parametrize("overrides", [[], ["adapter.rank=2"]], ids=["heads", "with adapter"])
def test_a_checkpoint_holds_its_own_step_however_late_it_is_written(
    made, tmp_path, monkeypatch, overrides
):
    def slow(*arguments: object, **more: object) -> None:
        assert later.wait(60)
        write_head(*arguments, **more)

    assert run(made, tmp_path / "at-once", "run.steps=6", "run.save_every=2", *overrides) == 0
    later = threading.Event()
    monkeypatch.setattr(checkpoint, "write_head", slow)
    in_step(monkeypatch, 5, later.set)
    assert run(made, tmp_path / "late", "run.save_every=4", "run.keep=9", *overrides) == 0
    at_once, late = (
        {path.relative_to(folder): load_file(path) for path in folder.rglob("*.safetensors")}
        for folder in (tmp_path / "at-once" / "step-000004", tmp_path / "late" / "step-000004")
    )
    assert at_once.keys() == late.keys()
    for name, tensors in at_once.items():
        assert_same(tensors, late[name])


def test_a_write_that_failed_ends_the_run_at_the_next_step(made, tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def noted(run, *rest):
        runs.append(run)
        return train_step(run, *rest)

    def wait_for_the_failure() -> None:
        while not runs[-1].checkpoints.failed:
            time.sleep(0.01)

    runs, train_step = [], loop.train_step
    monkeypatch.setattr(checkpoint, "save_file", full)
    monkeypatch.setattr(loop, "train_step", noted)
    in_step(monkeypatch, 4, wait_for_the_failure)
    assert run(made, tmp_path / "run", "run.save_every=3") == 2
    assert "step-000003 was not written: [Errno 28]" in capsys.readouterr().err
    assert len(runs) == 5


def test_a_run_that_fails_meanwhile_still_writes_its_checkpoint(
    made, tmp_path, monkeypatch, poisoned
):
    def slow(*arguments: object) -> None:
        time.sleep(0.5)
        save_file(*arguments)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    in_step(monkeypatch, 3, lambda: poisoned.__setitem__(0, 1000))
    assert run(made, tmp_path / "run", "run.save_every=3", "run.max_skipped=1") == 2
    assert checkpoint.newest(tmp_path / "run")[0].folder.name == "step-000003"


def test_a_disk_without_room_for_one_checkpoint_is_refused_at_start(
    made, tmp_path, monkeypatch, capsys
):
    nearly_full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: nearly_full)
    assert run(made, tmp_path / "run") == 2
    assert "expected room for a checkpoint of 0.00015 GB, got 1e-06 GB" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.mend("run.output without permission")
@pytest.mark.parametrize("place", ["forbidden", "a file", "below a file"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_loaded(
    made, tmp_path, monkeypatch, capsys, place
):
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the target is loaded, which may take minutes")

    output, file = tmp_path / "runs" / "run", tmp_path / "file"
    file.touch()
    if place == "forbidden":  # root may write everywhere
        monkeypatch.setattr(checkpoint, "takes_files", lambda path: Path(path) != tmp_path)
    else:
        output = file if place == "a file" else file / "run"
    monkeypatch.setattr(Target, "load", load)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_recipe(made, output=str(output))))
    assert main([str(recipe)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: run.output: expected a folder to write to, got {output}, but ")
    assert "may not be written to" in line if place == "forbidden" else f"{file} is a file" in line
    assert line.endswith("; change that, or set another run.output")


def exhausted(text: str) -> None:
    raise torch.OutOfMemoryError(text)


LOWER = (
    "; lower data.rows_per_batch (2), data.sequence_length (64) or sizes in head, or set "
    "run.gradient_checkpointing=true"
)
FAULTS = {
    "CPU, which was asked for 4.5e+06 GB more": lambda _: torch.empty(1 << 50),
    "CPU, which was asked for 1.00 EiB more": lambda _: np.empty(1 << 60, np.int8),
    "GPU, which was asked for 20.00 GiB more": lambda _: exhausted(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a"
    ),
    "CPU": lambda _: bytes(1 << 62),
    "file": lambda patch: patch.setattr(json, "dumps", Mock(side_effect=OSError(27, "too large"))),
}


@pytest.mark.mend("out of memory")
@pytest.mark.parametrize("place", FAULTS)
def test_memory_or_room_for_a_file_that_runs_out_is_one_line(
    made, tmp_path, monkeypatch, capsys, place
):
    in_step(monkeypatch, 2, lambda: FAULTS[place](monkeypatch))
    assert run(made, tmp_path / "run") == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    if place == "file":  # an error of a full disk names none
        assert line.startswith(f"error: [Errno 27] too large: '{tmp_path}/run/metrics.jsonl'")
    else:
        assert line == f"error: out of memory on the {place}{LOWER}"


def test_keeping_fewer_checkpoints_makes_room_before_the_next_one(made, half, monkeypatch):
    other = half / "step-000002"
    shutil.copytree(half / "step-000003", other)
    rewrite_state(other, lambda state: {**state, "tokens_per_step": 0.5})
    in_step(monkeypatch, 4, lambda: seen.extend(steps(half)))
    seen: list[str] = []
    assert run(made, half, "run.keep=1", "run.save_every=3") == 0
    assert seen == ["step-000003"]


def renumbered(output: Path, old: int, new: int) -> None:
    """As if a checkpoint were of another step."""
    folder = (output / f"step-{old:06d}").rename(output / f"step-{new:06d}")
    rewrite_state(folder, lambda state: {**state, "step": new})


def test_steps_are_ordered_by_number_beyond_a_million(made, half):
    renumbered(half, 3, 999_999)
    assert run(made, half, "run.steps=1000002", "run.save_every=1") == 0
    kept = {path.name for path in half.glob("step-*")}
    assert {"step-1000001", "step-1000002"} <= kept
    assert kept <= {"step-999999", "step-1000000", "step-1000001", "step-1000002"}
    assert checkpoint.read_state(half / "step-1000002").step == 1_000_002
    (half / "best").unlink()
    assert open_head(half).path.name == "step-1000002"
    cut(half / "step-1000002" / "model.safetensors")
    assert run(made, half, "run.steps=1000002", "run.save_every=1") == 0
    assert (half / "damaged-step-1000002").is_dir()


@pytest.mark.mend("a link to a checkpoint that was moved could not be deleted, and ended the run")
def test_what_a_user_keeps_beside_the_checkpoints_stays(made, half, tmp_path):
    """Copies under other names are neither counted nor deleted; a `best` that is a folder, as a
    copy without links has it, is put aside; of a link to a checkpoint the link alone is deleted.
    """
    mine = ["step-000002-backup", "step-1", "step-000009.old", ".step-backup"]
    for name in mine:
        shutil.copytree(half / "step-000003", half / name)
    (half / "best").unlink()
    shutil.copytree(half / "step-000003", half / "best")
    elsewhere = (half / "step-000003").rename(tmp_path / "elsewhere")
    (half / "step-000003").symlink_to(elsewhere)
    assert run(made, half, "run.save_every=1", "run.keep=1") == 0
    assert (elsewhere / "trainer" / "state.json").is_file()
    assert not (half / "step-000003").is_symlink()
    assert all((half / name / "trainer" / "state.json").is_file() for name in mine)
    assert (half / "damaged-best" / "model.safetensors").is_file()
    assert (half / "best").is_symlink()
    (half / "best").unlink()
    assert open_head(half).path.name == "step-000006"


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("mask", "files", "folders"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)]
)
def test_written_files_have_the_modes_that_the_umask_gives(made, tmp_path, mask, files, folders):
    old = os.umask(mask)
    try:
        cached = ["features.mode=cached", f"features.path={tmp_path / 'features'}"]
        assert run(made, tmp_path / "run", "run.steps=1", "adapter.rank=2") == 0
        assert run(made, tmp_path / "cached", "run.steps=1", *cached) == 0
        step = tmp_path / "run" / "step-000001"
        converted(step.parent.parent / "cached", tmp_path / "vllm", "vllm")
        merged(str(step), tmp_path / "merged", None, "auto")
    finally:
        os.umask(old)
    for folder in (step, tmp_path / "features", tmp_path / "vllm", tmp_path / "merged"):
        assert any(folder.rglob("*.safetensors"))
        assert modes(folder) == {files}, folder
        assert {path.stat().st_mode & 0o777 for path in (folder, *folder.glob("*/"))} == {folders}


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def while_saving(output: Path) -> None:
    """Weights and moments are written, and have no name yet."""
    checkpoint.save_file = lambda *given: (save_file(*given), die())


def before_best(output: Path) -> None:
    """The last checkpoint has its name."""
    rotate = Checkpoints._rotate
    Checkpoints._rotate = lambda self: die() if (output / "step-000006").is_dir() else rotate(self)


def while_deleting(output: Path) -> None:
    """An old checkpoint has lost its name."""
    shutil.rmtree = lambda path, **_: str(path).endswith(".gone") and die()


ONE_KEPT = ["run.save_every=3", "run.keep=1", "eval.best=simulated"]


@pytest.mark.mend("killed between the last checkpoint and best")
@pytest.mark.parametrize("moment", [while_saving, before_best, while_deleting])
def test_a_run_killed_at_its_last_checkpoint_is_completed(made, tmp_path, capsys, moment):
    """By the same command: the checkpoint, `best`, the removal of what is old or unfinished."""

    def killed() -> None:
        moment(output)
        run(made, output, *ONE_KEPT)

    output = tmp_path / "run"
    assert run(made, output, *ONE_KEPT, "run.steps=3") == 0
    assert exit_code_of_a_fork(killed) == -signal.SIGKILL
    is_there = moment is not while_saving
    assert (output / "step-000006").is_dir() == is_there
    assert len(steps(output)) == 2 or list(output.glob(".*step-*"))
    capsys.readouterr()
    assert run(made, output, *ONE_KEPT) == 0
    said = capsys.readouterr().out
    assert (f"{output}/step-000006: this run is finished" in said) == is_there
    key = "heldout_tokens_per_step"
    taus = {x["step"]: x[key] for x in read_metrics(output) if key in x}
    best = max(taus, key=lambda step: (taus[step], step))
    assert (output / "best").resolve().name == f"step-{best:06d}"
    assert steps(output) == sorted({f"step-{best:06d}", "step-000006"})
    assert not list(output.glob(".*step*"))
    assert checkpoint.read_state(output / "step-000006").step == 6


@pytest.mark.mend("temporary files of killed processes beside files")
@pytest.mark.parametrize("owner", ["gone", "self", "alive", "elsewhere"])
def test_what_a_killed_process_left_of_a_folder_is_removed(tmp_path, owner):
    """A `convert` or `merge` has no lock: only what this machine's dead processes left is."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    number = {"gone": gone.pid, "self": os.getpid()}.get(owner, os.getppid())
    host = "another" if owner == "elsewhere" else socket.gethostname()
    left = tmp_path / f".head[1].{host}.{number}"
    left.mkdir()
    file = left.with_name(left.name.replace("head", "file"))
    file.touch()
    with staged(tmp_path / "head[1]") as staging:
        (staging / "new").touch()
    write_text(tmp_path / "file[1]", "new")
    assert [path.name for path in (tmp_path / "head[1]").iterdir()] == ["new"]
    is_kept = owner in ("alive", "elsewhere")
    assert (left.exists(), file.exists()) == (is_kept, is_kept)


@pytest.mark.mend(
    "a process killed while it replaced a folder left that under a hidden name for ever"
)
@pytest.mark.parametrize("moves", range(3))
def test_a_folder_that_is_replaced_is_never_lost(tmp_path, moves):
    """Killed before it is moved away, before the new one has its name, before it is deleted."""
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "old").touch()
    done = itertools.count()

    def move_or_die(move: Callable[..., Any], *paths: Path) -> Any:
        if next(done) == moves:
            os.kill(os.getpid(), signal.SIGKILL)
        return move(*paths)

    def replace() -> None:
        rename, delete = partial(move_or_die, Path.rename), partial(move_or_die, shutil.rmtree)
        with (
            mock.patch.object(Path, "rename", lambda *paths: rename(*paths)),
            mock.patch("shutil.rmtree", delete),
            staged(folder) as staging,
        ):
            (staging / "new").touch()

    assert exit_code_of_a_fork(replace) == -signal.SIGKILL
    sweep(tmp_path, "head")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [
        Path("head"),
        Path("head") / ("new" if moves == 2 else "old"),
    ]


@pytest.mark.mend("what replaced a symbolic link was written, and then ended as an error")
def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "old").touch()
    (tmp_path / "head").symlink_to(tmp_path / "mine")
    with staged(tmp_path / "head") as staging:
        (staging / "new").touch()
    names = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))]
    assert names == ["head", "head/new", "mine", "mine/old"]


LINES = [b"{\xff", bytes(30), b"[1]", b'{"loss": 1.0}', b"[" * 200_000]


@pytest.mark.mend("a note about metrics.jsonl was printed among the results, on stdout")
@pytest.mark.parametrize("line", [None, *LINES])
def test_damaged_metrics_are_passed_over_and_said(made, whole, half, capfd, line):
    """A line, or, with None, the end that a kill has cut."""
    path = half / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    inserted = [first, line + b"\n", *others] if line else [first, *others[:-1], others[-1][:-7]]
    path.write_bytes(b"".join(inserted))
    assert run(made, half, "run.save_every=3") == 0
    said = f"note: {path}: skipped 1 damaged lines" in capfd.readouterr().err
    assert said == (line is not None)
    lines = [[x["step"] for x in read_metrics(out) if "loss" in x] for out in (whole, half)]
    assert lines[0] == lines[1] == [1, 2, 3, 4, 5, 6]
    assert_like_uninterrupted(whole, half)


def test_a_run_goes_on_when_target_and_data_have_moved(made, whole, half, tmp_path, capsys):
    """Also where less of the target is in memory: where matrices are on disk or quantised, a
    fingerprint is the first part of the whole one.
    """
    rewrite_state(half / "step-000003", lambda x: {**x, "target": x["target"].partition("-")[0]})
    shutil.copytree(made, tmp_path / "moved")
    assert run(tmp_path / "moved", half, "run.save_every=3") == 0
    assert "at step 3 of 6" in capsys.readouterr().out
    assert_like_uninterrupted(whole, half)
    recipe = json.loads((half / "step-000006" / "trainer" / "state.json").read_text())["recipe"]
    assert recipe["target"] == str(tmp_path / "moved" / "target")


def test_a_step_that_follows_from_few_data_resumes_exactly(made, tmp_path, monkeypatch, capsys):
    """Smaller than a batch, and never more passes than asked for; the warning says what to do."""
    choices = [
        "run.epochs=2",
        "run.steps=null",
        "run.tokens_per_step=null",
        "data.rows_per_batch=8",
    ]
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert run(made, tmp_path / "whole" / "run", *choices) == 0
    said = capsys.readouterr().out
    [rows] = re.findall(r"tokens in (\d+) rows of 64", said)
    steps = 2 * int(rows)
    assert f"done: {steps} steps" in said and "run.tokens_per_step: using 64, whole" in said
    assert f"warning: {steps} steps of 64 tokens are few to learn from; distill" in said
    with monkeypatch.context() as patch:
        in_step(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run(made, tmp_path / "parts" / "run", *choices) == 130
    assert run(made, tmp_path / "parts" / "run", *choices) == 0
    folders = [tmp_path / name / "run" for name in ("whole", "parts")]
    assert_same(*(weights(folder, steps) for folder in folders))
    assert_same(*(checkpoint.load_optimizer_state(x / f"step-{steps:06d}") for x in folders))


def test_a_step_larger_than_the_data_is_one_pass(made, tmp_path, capsys):
    choices = ["run.epochs=2", "run.steps=null", "run.tokens_per_step=131072"]
    assert run(made, tmp_path / "run", *choices) == 0
    said = capsys.readouterr().out
    [rows] = re.findall(r"tokens in (\d+) rows of 64", said)
    assert f"run.tokens_per_step: using {int(rows) // 2 * 2 * 64}, whole batches" in said
    assert "warning: 2 steps of " in said
    [found] = (tmp_path / "run").glob("step-*")
    state = json.loads((found / "trainer" / "state.json").read_text())
    assert state["step"] * state["rows_per_step"] <= 2 * int(rows)


def test_a_run_keeps_the_step_and_the_length_that_it_began_with(made, tmp_path, capsys):
    """Earlier versions rounded epochs up and had one default step: neither changes on the way."""
    choices = ["run.epochs=1", "run.steps=null", "run.save_every=2", "run.keep=9"]
    assert run(made, tmp_path / "run", *choices) == 0
    for later in steps(tmp_path / "run")[1:]:
        shutil.rmtree(tmp_path / "run" / later)
    step = tmp_path / "run" / "step-000002"
    state = json.loads((step / "trainer" / "state.json").read_text())
    more = {"steps": state["steps"] + 3, "rows_per_step": 2}
    rewrite_state(step, lambda state: {**state, **more})
    assert run(made, tmp_path / "run", *choices, "run.tokens_per_step=null") == 0
    assert f"done: {state['steps'] + 3} steps" in capsys.readouterr().out
    path = tmp_path / "run" / f"step-{state['steps'] + 3:06d}" / "trainer" / "state.json"
    assert json.loads(path.read_text())["rows_per_step"] == 2


def test_two_launches_do_not_train_into_one_folder(made, tmp_path, monkeypatch, capsys):
    output, seen = tmp_path / "run", []
    AcceleratorState._reset_state(reset_partial_state=True)
    with monkeypatch.context() as patch:
        in_step(patch, 2, lambda: seen.append(run(made, output)))
        run(made, output)
    assert seen == [2]
    assert "another process trains into it" in capsys.readouterr().err


def other_weights(folder: Path, output: Path) -> None:
    tensors = load_file(folder / "target" / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, folder / "target" / "model.safetensors", metadata={"format": "pt"})


def other_data(folder: Path, output: Path) -> None:
    shutil.rmtree(folder / "data")
    answers = random_answers(60)
    answers[0].tokens[0] = (answers[0].tokens[0] + 1) % 97
    write_answers(folder / "data", answers)


def other_format(folder: Path, output: Path) -> None:
    rewrite_state(output / "step-000003", lambda state: {**state, "format": 3})


def all_damaged(folder: Path, output: Path) -> None:
    for name in steps(output):
        cut(output / name / "model.safetensors")


ANEW = "restore one, or delete them to start over"
REFUSED = [
    (other_weights, [], "other weights of"),
    (other_data, [], "holds a run with other data in"),
    (other_format, [], "state.json has format 3, expected 4", ANEW),
    (all_damaged, [], "no checkpoint is intact", ANEW),
    (None, ["head.layers=2"], "other choices (head.layers: 1 -> 2)"),
    (None, ["head.labels=soft"], "other choices (head.labels: hard -> soft)"),
    (None, ["optim.lr=1", "head.depth=2"], "optim.lr: 0.003 -> 1.0", "head.depth: 3 -> 2"),
    (None, ["head.kind=eagle3"], "head.kind: medusa -> eagle3"),
    (None, ["features.mode=cached"], "features.mode: online -> cached"),
    (None, ["data.rows_per_batch=3"], "expected rows per step that processes (1)"),
]
"""What is changed, in the folder of target and data or in that of the run, and what is said."""
CASES = [("half", *row) for row in REFUSED]
CASES += [("whole", *row) for row in (*REFUSED[1:2], *REFUSED[3:9])]
"""A finished run looks neither at weights nor at the newest checkpoint but one."""


@pytest.mark.mend("a finished run said so for data that it had never seen")
@pytest.mark.parametrize(("state", "change", "overrides", "said"), [(*x[:3], x[3:]) for x in CASES])
def test_going_on_with_something_else_is_refused_in_one_line(
    made, whole, half, tmp_path, capsys, state, change, overrides, said
):
    def moved(state: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(state).replace(f"{made}/", f"{folder}/"))

    folder = Path(shutil.copytree(made, tmp_path / "changed"))
    finished = Path(shutil.copytree(whole, tmp_path / "whole", symlinks=True))
    output = finished if state == "whole" else half
    for step in output.glob("step-*"):  # as if the run had begun with what stands there
        rewrite_state(step, moved)
    if change is not None:
        change(folder, output)
    before = steps(output)
    assert run(folder, output, *overrides) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert [words for words in said if words not in line] == []
    assert steps(output) == before


@pytest.fixture
def poisoned(monkeypatch):
    """As many calls of the target as poisoned[0] says come out not finite."""
    original = Target.features

    def features(self, batch: Batch, layers) -> torch.Tensor:
        features_BTD = original(self, batch, layers).clone()
        if remaining[0]:
            remaining[0] -= 1
            features_BTD[:, 1:, 5] = torch.nan
        return features_BTD

    remaining = [0]
    monkeypatch.setattr(Target, "features", features)
    return remaining


@pytest.mark.parametrize("spoilt", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_and_its_documents_named(
    made, tmp_path, monkeypatch, capsys, poisoned, spoilt
):
    """Those of one of its two micro batches, or of both."""
    output, seen = tmp_path / "run", {}
    original = loop.train_step
    monkeypatch.setattr(
        loop, "train_step", lambda run, *rest: seen.update(run=run) or original(run, *rest)
    )
    in_step(monkeypatch, 2, lambda: poisoned.__setitem__(0, spoilt))  # step 3
    assert run(made, output, "run.tokens_per_step=256") == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "skipped" in x]
    rows = seen["run"].order.step(2)[: 2 * spoilt]
    documents = sorted(set(seen["run"].data.train.document_numbers(rows)))[:8]
    start, _, named = line.partition(" in documents ")
    assert start == "step 3 skipped: loss nan, gradient norm nan"
    assert named.removesuffix(" ...") == ", ".join(map(str, documents))
    assert all(tensor.isfinite().all() for tensor in weights(output, 6).values())
    optimizer_state = checkpoint.load_optimizer_state(output / "step-000006")
    assert {int(value) for key, value in optimizer_state.items() if key.startswith("step.")} == {5}
    assert [x["step"] for x in read_metrics(output) if "skipped" in x] == [3]
    assert checkpoint.read_state(output / "step-000006").skipped == 0, "in a row"


def test_a_run_whose_steps_stay_not_finite_ends(made, tmp_path, monkeypatch, capsys, poisoned):
    """After `run.max_skipped` of them, which are counted over launches."""
    output = tmp_path / "run"
    poisoned[0] = 1000
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "skipped", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert run(made, output) == 130
    assert run(made, output) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert "not finite in 3 steps up to 3; loss nan" in line and "in documents " in line
    assert "lower optim.lr" in line


def test_weights_that_are_not_finite_are_not_saved(made, tmp_path, monkeypatch, capsys):
    """A run may end before the next loss shows what the last step made of them."""

    def overflow(run, *rest):
        result = train_step(run, *rest)
        with torch.no_grad():
            next(run.head.parameters()).fill_(torch.inf if run.state.step == 5 else 0.1)
        return result

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", overflow)
    assert run(made, tmp_path / "run", "run.save_every=3") == 2
    assert (
        "error: weights are not finite after step 6, which was not saved; lower optim.lr, then run "
        "again from the last checkpoint" in capsys.readouterr().err
    )
    assert steps(tmp_path / "run") == ["step-000003"]
