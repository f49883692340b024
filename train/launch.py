"""How training processes start together, agree, and are asked to stop."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    gather_object,
)

from draftheads.train.recipe import Recipe

PATIENCE = timedelta(minutes=30)
"""How long processes wait for one another; the first may be downloading the target."""
STOP_FILE = "checkpoint-now"
"""A file of this name in run.output is a request to save and stop."""


@contextmanager
def launched(recipe: Recipe) -> Iterator[Accelerator]:
    """The Accelerator of this process; the process group ends with the block."""
    accelerator = make_accelerator(recipe)
    try:
        yield accelerator
    finally:
        gc.collect()  # what FSDP2 holds of the process group, before that is torn down
        accelerator.end_training()


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The Accelerator of this process. Raises ValueError for a launch whose processes would not
    train together.
    """
    has_gpu = torch.cuda.is_available()
    check_environment(os.environ, has_gpu=has_gpu)
    _join_restarted(os.environ, "nccl" if has_gpu else "gloo")
    # accelerate sees one process, DeepSpeed several, when nobody names a backend that a CPU has
    gloo = not has_gpu and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    output = str(recipe.run.output)
    accelerator = Accelerator(
        mixed_precision="no",  # the engines see to run.precision, all in the same way
        log_with=list(recipe.run.trackers) or None,
        project_config=ProjectConfiguration(project_dir=output, logging_dir=f"{output}/logs"),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # sent from where they are
            InitProcessGroupKwargs(backend="gloo" if gloo else None, timeout=PATIENCE),
        ],
    )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    alone = accelerator.distributed_type == DistributedType.NO
    if accelerator.num_processes != world or (world > 1 and alone):
        raise ValueError(
            f"{world} processes were started, but each would train on its own; "
            f"use `{right_command(has_gpu, str(world))}`"
        )
    plugin = accelerator.state.deepspeed_plugin
    if plugin and not plugin.zero_stage:
        raise ValueError("expected ZeRO stage 1, 2 or 3, got 0; use recipes/accelerate-ddp.yaml")
    return accelerator


def check_environment(environ: Mapping[str, str], *, has_gpu: bool) -> None:
    """Raise ValueError for launches of several processes that would not know of each other.

    `accelerate launch --cpu --num_processes N` starts one process, with a master address and no
    WORLD_SIZE. `srun` starts several that know only Slurm's variables.
    """
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and environ.get("WORLD_SIZE", "1") == environ.get("LOCAL_WORLD_SIZE", "1"):
        raise ValueError(
            f"srun started {tasks} tasks, but each would train on its own; start one task per node "
            "and in it `torchrun --nnodes N --node-rank $SLURM_NODEID --master-addr HOST "
            f"--nproc-per-node G {shlex.join(sys.argv)}`"
        )
    if asked_for_fsdp(environ) and environ.get("FSDP_VERSION") != "2":
        raise ValueError(
            f"expected fsdp_version: 2, got {environ.get('FSDP_VERSION', 1)}; "
            "use recipes/accelerate-fsdp2.yaml"
        )
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environ
    if by_accelerate and "MASTER_ADDR" in environ and "WORLD_SIZE" not in environ:
        raise ValueError(
            "`accelerate launch --cpu --num_processes N` starts only one process; for N processes "
            f"on CPU use `{right_command(has_gpu, 'N')}`, for one leave --num_processes out"
        )


def right_command(has_gpu: bool, world: str) -> str:
    """The command that starts what runs here as `world` processes that train together."""
    started = shlex.join(sys.argv)
    if has_gpu:
        return f"accelerate launch --multi_gpu --num_processes {world} {started}"
    return f"ACCELERATE_USE_CPU=true torchrun --nproc-per-node {world} {started}"


def asked_for_fsdp(environ: Mapping[str, str]) -> bool:
    """Whether the accelerate config says `distributed_type: FSDP`."""
    return environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def main_process_log(accelerator: Accelerator) -> Callable[[str], None]:
    """Prints a line, once for all processes of all nodes."""
    return print if accelerator.is_main_process else lambda _: None


@contextmanager
def agreeing(accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """What is put into the dictionary inside must be what the first process puts there; a
    ValueError or OSError that one process raises inside is raised on all of them.

    Raises ValueError that names a process that differs, else what was raised inside.
    """
    said: dict[str, Any] = {}
    fault: Exception | None = None
    try:
        yield said
    except (ValueError, OSError) as error:
        fault = error
    everyone = [(said, str(fault or ""))]
    if accelerator.num_processes > 1:
        everyone = gather_object(everyone)
    if fault and all(reason == str(fault) for _, reason in everyone):
        raise fault
    first = everyone[0][0]
    for rank, (each, reason) in enumerate(everyone):
        other = [
            f"{key} {each.get(key)} where process 0 has {first.get(key)}"
            for key in {**first, **each}
            if each.get(key) != first.get(key)
        ]
        if reason or other:
            raise ValueError(
                f"of {len(everyone)} processes expected all to see the same, got process {rank}: "
                f"{reason or ', '.join(other)}; give all of them one recipe, and run.output, data "
                "and target on disks that they share"
            ) from fault


def _join_restarted(environ: Mapping[str, str], backend: str) -> None:
    """Let processes that torchrun has restarted (`--max-restarts`) meet under a prefix of their
    own: under the usual one they would find the addresses of those that are gone.
    """
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    world, address = int(environ["WORLD_SIZE"]), environ["MASTER_ADDR"]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, int(environ["MASTER_PORT"]), world, is_master=False, timeout=PATIENCE
    )
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt-{attempt}", store),  # type: ignore[attr-defined]
        rank=int(environ["RANK"]),
        world_size=world,
        timeout=PATIENCE,
    )


class StopRequest:
    """Notes Ctrl-C, SIGTERM and a file `checkpoint-now`, so that the loop can finish its step and
    save; a second Ctrl-C is immediate.

    torchrun sends SIGTERM after the terminal sent SIGINT: that counts as one request.
    """

    def __init__(self, output: Path) -> None:
        self.by = ""
        """Who asked, or ""."""
        self._file = output / STOP_FILE

    def heard(self) -> bool:
        """Whether this process was asked to stop."""
        if not self.by and self._file.exists():
            self.by = STOP_FILE
        return bool(self.by)

    def __enter__(self) -> StopRequest:
        self._file.unlink(missing_ok=True)  # meant for a launch that is gone
        signals = (signal.SIGINT, signal.SIGTERM)
        self._old = {number: signal.signal(number, self._note) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        self._file.unlink(missing_ok=True)
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.by and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name
