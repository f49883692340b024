"""Training processes start together, agree, and are asked to stop."""

from __future__ import annotations

import gc
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    gather_object,
    str_to_bool,
)

from draftheads.train.faults import lost_processes, memory_errors
from draftheads.train.recipe import Recipe
from draftheads.train.signals import REQUESTS, handling

PATIENCE = timedelta(minutes=30)
"""Time-out of collectives; the first process may be downloading the target."""
STOP_FILE = "checkpoint-now"
"""A file of this name in run.output is a request to save and stop."""
UNUSED = {"mixed_precision": "run.precision", "gradient_accumulation_steps": "run.tokens_per_step"}
"""Settings of accelerate's -> keys that say it here, alike for all engines."""
logger = logging.getLogger("draftheads")

Log = Callable[[str], None]


@contextmanager
def launched(recipe: Recipe, accelerator: Accelerator | None = None) -> Iterator[Accelerator]:
    """The processes of a run, which end with the block. accelerator: of processes that have already
    joined; left running.

    Memory that runs out, and a process that is gone, are errors of one line. After the block,
    torch's random numbers go on where they were. Raises as `make_accelerator`.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a Recipe, as of load_recipe, got {recipe!r:.80}")
    use_huge_pages()
    rows, length = recipe.data.rows_per_batch, recipe.data.sequence_length
    advice = f"lower data.rows_per_batch ({rows}), data.sequence_length ({length}) or sizes in head"
    if not recipe.run.gradient_checkpointing:
        advice += ", or set run.gradient_checkpointing=true"
    with lost_processes(), memory_errors(advice), ExitStack() as ends:
        if accelerator is None:
            accelerator = make_accelerator(recipe)
            ends.callback(accelerator.end_training)
            if accelerator.distributed_type is not DistributedType.NO:
                ends.callback(gc.collect)  # FSDP2 must release the process group first
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        ends.enter_context(torch.random.fork_rng(devices))
        yield accelerator


def use_huge_pages() -> None:
    """Have torch ask for huge pages for large tensors in main memory: a CPU spends a tenth of a
    step on faults of small ones. It reads this variable at its first tensor, and never again.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The Accelerator of this process. Raises ValueError if the processes of this launch would not
    train together.
    """
    installed = [str(name) for name in get_available_trackers()]
    for name in recipe.run.trackers:
        if name not in installed:
            raise ValueError(
                f"run.trackers: expected some of {', '.join(installed)}, got {name!r}; install the "
                "package of this tracker, or leave it out"
            )
    has_gpu = torch.cuda.is_available()
    check_environment(os.environ, has_gpu=has_gpu)
    _join_restarted(os.environ, "nccl" if has_gpu else "gloo")
    uses_deepspeed = _is_true(os.environ, "ACCELERATE_USE_DEEPSPEED")
    if uses_deepspeed and os.environ.get("LOCAL_RANK", "0") == "0":
        warn_of_locks()
    # DeepSpeed on CPU: without a backend accelerate would see a single process
    gloo = not has_gpu and uses_deepspeed
    output = str(recipe.run.output)
    accelerator = Accelerator(
        mixed_precision="no",  # the learner applies run.precision, the same for all engines
        log_with=list(recipe.run.trackers) or None,
        project_config=ProjectConfiguration(project_dir=output, logging_dir=f"{output}/logs"),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),  # without a copy
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
    if accelerator.is_main_process:
        warn_of_unused(os.environ, recipe.run.precision)
    return accelerator


def warn_of_unused(environ: Mapping[str, str], precision: str) -> None:
    """Name settings of accelerate's that say something else than what holds here."""
    for name, key in UNUSED.items():
        value = environ.get(f"ACCELERATE_{name.upper()}", "no")
        if value not in ("no", "1", precision):
            logger.warning("accelerate's %s, %s, is not used: set %s", name, value, key)


def warn_of_locks() -> None:
    """Name the locks of torch's compiler that are older than this process. DeepSpeed compiles
    extensions, and waits for them without a word: for ever, if a launch was killed meanwhile.
    """
    from torch.utils import cpp_extension  # it looks for compilers

    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    began = psutil.Process().create_time()
    for lock in Path(folder).rglob("lock"):
        with suppress(FileNotFoundError):  # its process is done
            if lock.stat().st_mtime < began:
                logger.warning(
                    "DeepSpeed may wait for %s: another process compiles there, or was killed "
                    "while it did; delete this file if nothing compiles",
                    lock,
                )


def check_environment(environ: Mapping[str, str], *, has_gpu: bool) -> None:
    """Raise ValueError for launches whose processes would each train on their own, for FSDP1, and
    for DeepSpeed that accelerate would leave out.

    `srun` starts processes that know only Slurm's variables. `accelerate launch --cpu
    --num_processes N` starts one process, with a master address but no WORLD_SIZE.
    """
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and environ.get("WORLD_SIZE", "1") == environ.get("LOCAL_WORLD_SIZE", "1"):
        raise ValueError(
            f"srun started {tasks} tasks, but each would train on its own; start one task per node "
            "that runs torchrun --nnodes N --node-rank $SLURM_NODEID --master-addr HOST"
        )
    if asked_for_fsdp(environ) and environ.get("FSDP_VERSION") != "2":
        raise ValueError("expected fsdp_version: 2, got 1; use recipes/accelerate-fsdp2.yaml")
    if _is_true(environ, "ACCELERATE_USE_DEEPSPEED") and _is_true(environ, "ACCELERATE_USE_CPU"):
        raise ValueError(
            "expected DeepSpeed, as in the accelerate config, but ACCELERATE_USE_CPU (there "
            "use_cpu) turns it off; leave that out: DeepSpeed without a GPU trains on the CPU"
        )
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in environ
    if by_accelerate and "MASTER_ADDR" in environ and "WORLD_SIZE" not in environ:
        raise ValueError(
            "accelerate launch started only one of the --num_processes; use "
            f"`{right_command(has_gpu, 'N')}`, or leave --num_processes out"
        )


def right_command(has_gpu: bool, world: str) -> str:
    """The command that starts `world` processes of this program that train together."""
    started = shlex.join(sys.argv)
    if has_gpu:
        return f"accelerate launch --multi_gpu --num_processes {world} {started}"
    return f"ACCELERATE_USE_CPU=true torchrun --nproc-per-node {world} {started}"


def asked_for_fsdp(environ: Mapping[str, str]) -> bool:
    """True if the accelerate config has `distributed_type: FSDP`."""
    return _is_true(environ, "ACCELERATE_USE_FSDP")


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    """True if a switch of accelerate is on."""
    return bool(str_to_bool(environ.get(name, "no")))


def main_process_log(accelerator: Accelerator) -> Log:
    """A function that prints a line, on the main process only."""
    return print if accelerator.is_main_process else lambda _: None


@contextmanager
def agreeing(accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """Compare processes: the values that each puts into the dictionary must be equal. A ValueError
    or OSError of one process in the block is raised on all of them.

    Raises ValueError naming the first process that fails or differs; if all fail alike, their own
    error.
    """
    values: dict[str, Any] = {}
    error: Exception | None = None
    try:
        yield values
    except (ValueError, OSError) as caught:
        # not raised yet: the others are on their way to the collective below, and one that does not
        # come would let them wait for PATIENCE and then report a lost process, not this error
        error = caught
    everyone = [(values, str(error or ""))]
    if accelerator.num_processes > 1:
        everyone = gather_object(everyone)
    if error and all(reason == str(error) for _, reason in everyone):
        raise error
    first = everyone[0][0]
    for rank, (other, reason) in enumerate(everyone):
        if reason:
            raise ValueError(f"process {rank}: {reason}") from error
        differing = [
            f"{key} {other.get(key)} instead of {first.get(key)}"
            for key in {**first, **other}
            if other.get(key) != first.get(key)
        ]
        if differing:
            raise ValueError(
                f"process {rank} differs from process 0: {', '.join(differing)}; give all of them "
                "one recipe, and keep run.output, data and target on disks that they share"
            )


def _join_restarted(environ: Mapping[str, str], backend: str) -> None:
    """Start the process group of processes that torchrun has restarted (`--max-restarts`) under a
    prefix of its own: the default one still has the addresses of the dead processes.
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
    """Records Ctrl-C, SIGTERM, SIGHUP or a file `checkpoint-now`, so that the loop can finish its
    step and save. A second Ctrl-C is immediate.

    torchrun sends SIGTERM after the terminal's SIGINT: both are one request.
    """

    def __init__(self, output: Path) -> None:
        self.by = ""  # the signal or file, once there is one
        self._file = output / STOP_FILE

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take requests in the block."""
        self._file.unlink(missing_ok=True)  # left from an earlier launch
        with handling(self._record, *REQUESTS):
            try:
                yield
            finally:
                self._file.unlink(missing_ok=True)

    def pending(self) -> bool:
        """True if this process was asked to stop."""
        if not self.by and self._file.exists():
            self.by = STOP_FILE
        return bool(self.by)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.by and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name
