"""How a training process starts and is asked to stop: launch checks, the Accelerator, signals."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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

SUPPORTED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
}
PATIENCE = timedelta(minutes=30)
"""Of processes that wait for another one; the first may be downloading the target."""
STOP_FILE = "checkpoint-now"
"""A file of this name in run.output is a request to save and stop."""


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The Accelerator of this process. Raises ValueError for a launch that would not train what was
    meant.
    """
    check_environment(os.environ, has_gpu=torch.cuda.is_available())
    on_cpu = not torch.cuda.is_available()
    # accelerate sees one process, DeepSpeed several, when nobody names a backend that a CPU has
    gloo = on_cpu and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    _meet_again(os.environ, "gloo" if on_cpu else "nccl")
    accelerator = Accelerator(
        mixed_precision="no",  # run.precision is seen to by `train.engines`, for all of them alike
        log_with=list(recipe.run.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=str(recipe.run.output), logging_dir=str(recipe.run.output / "logs")
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # sent from where they are
            InitProcessGroupKwargs(backend="gloo" if gloo else None, timeout=PATIENCE),
        ],
    )
    check_processes(accelerator, os.environ)
    count = torch.cuda.device_count()
    if count > accelerator.num_processes == 1 and recipe.target_placement != "split":
        print(f"note: one of {count} GPUs is used; all: `{right_command(True, str(count))}`")
    return accelerator


def _meet_again(environ: Mapping[str, str], backend: str) -> None:
    """Join processes that torchrun has started again (`--max-restarts`) at a place of their own: at
    the usual one they would find the addresses of those that are gone.
    """
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    world = int(environ["WORLD_SIZE"])
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = dist.TCPStore(*address, world, is_master=False, timeout=PATIENCE)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"attempt-{attempt}", store),  # type: ignore[attr-defined]
        rank=int(environ["RANK"]),
        world_size=world,
        timeout=PATIENCE,
    )


def check_environment(environ: Mapping[str, str], *, has_gpu: bool) -> None:
    """Refuse launches of several processes that do not come to know of each other.

    `accelerate launch --cpu --num_processes N` starts one process and says nothing; it leaves a
    master address for those that it does not start, and no WORLD_SIZE. `srun` starts several that
    know only Slurm's variables.
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


def check_processes(accelerator: Accelerator, environ: Mapping[str, str]) -> None:
    """Refuse processes that were started together but do not know of each other, and unsupported
    sharding.
    """
    world = int(environ.get("WORLD_SIZE", "1"))
    kind = accelerator.distributed_type
    if accelerator.num_processes != world or (world > 1 and kind == DistributedType.NO):
        raise ValueError(
            f"{world} processes were started, but each would train on its own; "
            f"use `{right_command(torch.cuda.is_available(), str(world))}`"
        )
    if kind not in SUPPORTED:
        raise ValueError(
            f"expected DDP, FSDP2 or DeepSpeed, got {kind}; "
            "use one of recipes/accelerate-{ddp,fsdp2,zero1,zero2,zero3}.yaml"
        )
    if kind == DistributedType.DEEPSPEED and not accelerator.state.deepspeed_plugin.zero_stage:
        raise ValueError(
            "expected DeepSpeed ZeRO stage 1, 2 or 3, got 0, which is DDP; "
            "use recipes/accelerate-ddp.yaml"
        )


@contextmanager
def agreeing(accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """What is put into the dictionary inside must be what the first process puts there. A mistake
    that one process finds inside is raised on all of them, which would wait for it otherwise.

    Raises ValueError that names the processes, and on one process alone what was raised inside.
    """
    said: dict[str, Any] = {}
    fault: Exception | None = None
    try:
        yield said
    except (ValueError, OSError) as error:
        fault = error
    if accelerator.num_processes > 1:
        _compare(gather_object([(said, str(fault) if fault else None)]))
    if fault:
        raise fault


def _compare(everyone: Sequence[tuple[dict[str, Any], str | None]]) -> None:
    first, alone = everyone[0][0], dict[str, list[str]]()
    for rank, (said, fault) in enumerate(everyone):
        other = [
            f"{key} {said[key]} where process 0 has {value}"
            for key, value in first.items()
            if key in said and said[key] != value
        ]
        if fault or other:
            alone.setdefault(fault or ", ".join(other), []).append(str(rank))
    if alone and len(everyone) > len(next(iter(alone.values()))):
        found = "; ".join(f"process {', '.join(who)}: {what}" for what, who in alone.items())
        raise ValueError(
            f"of {len(everyone)} processes expected all to see the same, got {found}; give all of "
            "them one recipe, and run.output, data and target on disks that they share"
        )


@contextmanager
def first_process_first(accelerator: Accelerator) -> Iterator[None]:
    """The others begin when the first process has ended, also with an error."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    try:
        yield
    finally:
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()


def main_process_log(accelerator: Accelerator) -> Callable[[str], None]:
    """Prints a line, once for all processes of all nodes."""
    return print if accelerator.is_main_process else lambda _: None


def right_command(has_gpu: bool, world: str) -> str:
    """The launch line that starts what runs here as `world` processes that train together."""
    started = shlex.join(sys.argv)
    if has_gpu:
        return f"accelerate launch --multi_gpu --num_processes {world} {started}"
    return f"ACCELERATE_USE_CPU=true torchrun --nproc-per-node {world} {started}"


def asked_for_fsdp(environ: Mapping[str, str]) -> bool:
    """Whether the accelerate config says `distributed_type: FSDP`."""
    return environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


class StopRequest:
    """Notes Ctrl-C, SIGTERM and a file `checkpoint-now`, so that the loop can finish its step and
    save; a second Ctrl-C is immediate.

    torchrun sends its processes SIGTERM after the terminal sent them SIGINT: that counts as one
    request.
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

    def granted(self) -> None:
        """Forget the file: it asked once."""
        self._file.unlink(missing_ok=True)

    def __enter__(self) -> StopRequest:
        self.granted()  # what was asked of a launch that is gone
        self._old = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.by and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name
