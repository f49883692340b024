"""How a training process starts and is asked to stop: launch checks, the Accelerator, signals."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from types import FrameType

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs, ProjectConfiguration

from draftheads.train.recipe import Recipe

SUPPORTED = {
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.DEEPSPEED,
}


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The Accelerator of this process. Raises ValueError for a launch that would not train what was
    meant.
    """
    check_environment(os.environ, has_gpu=torch.cuda.is_available())
    on_cpu = not torch.cuda.is_available()
    # accelerate sees one process, DeepSpeed several, when nobody names a backend that a CPU has
    gloo = on_cpu and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    accelerator = Accelerator(
        mixed_precision="bf16" if recipe.run.precision == "bf16" else "no",
        log_with=list(recipe.run.trackers) or None,
        project_config=ProjectConfiguration(
            project_dir=str(recipe.run.output), logging_dir=str(recipe.run.output / "logs")
        ),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if gloo else [],
    )
    check_processes(accelerator, os.environ)
    available = {str(tracker) for tracker in accelerator.log_with}
    if missing := set(recipe.run.trackers) - available:
        raise ValueError(
            f"run.trackers: {', '.join(sorted(missing))} is not installed; "
            "pip install it or remove it"
        )
    return accelerator


def check_environment(environ: Mapping[str, str], *, has_gpu: bool) -> None:
    """Refuse `accelerate launch --cpu --num_processes N`, which starts one process and says
    nothing.

    It leaves a master address for the processes that it does not start, and no WORLD_SIZE.
    """
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
            f"expected DDP or DeepSpeed ZeRO-2, got {kind}; only the head is trained, so "
            "use recipes/accelerate-ddp.yaml or recipes/accelerate-zero2.yaml"
        )
    if kind == DistributedType.DEEPSPEED and accelerator.state.deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            "expected DeepSpeed ZeRO stage 1 or 2, got 3, which would also partition the frozen "
            "target; use recipes/accelerate-zero2.yaml"
        )


def right_command(has_gpu: bool, world: str) -> str:
    """The launch line that starts what runs here as `world` processes that train together."""
    started = shlex.join(sys.argv)
    if has_gpu:
        return f"accelerate launch --multi_gpu --num_processes {world} {started}"
    return f"ACCELERATE_USE_CPU=true torchrun --nproc-per-node {world} {started}"


def prepare_deepspeed(
    accelerator: Accelerator, *, rows_per_batch: int, accumulation: int, clip: float
) -> None:
    """Tell DeepSpeed what it would read from a DataLoader, which there is not."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.state.deepspeed_plugin.deepspeed_config.update(
            train_micro_batch_size_per_gpu=rows_per_batch,
            gradient_accumulation_steps=accumulation,
            gradient_clipping=clip,
        )


class StopRequest:
    """Notes Ctrl-C and SIGTERM, so that the loop can finish its step and save; a second Ctrl-C is
    immediate.

    torchrun sends its processes SIGTERM after the terminal sent them SIGINT: that counts as one
    request.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> StopRequest:
        self._old = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
