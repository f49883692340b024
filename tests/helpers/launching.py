"""Launches of several processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch_environment(*, cpu: bool) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment | ({"ACCELERATE_USE_CPU": "true"} if cpu else {})


def torchrun(*arguments: str, cpu: bool = True) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    return subprocess.run(
        [sys.executable, *launch, *arguments],
        env=launch_environment(cpu=cpu),
        capture_output=True,
        text=True,
        timeout=120,
    )


def exit_code_of_a_fork(function: Callable[..., None], *arguments: object) -> int | None:
    """Call a function in a copy of this process, which has imported everything; minus the number of
    the signal that ended it.
    """
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of this process
        process.start()
    process.join(timeout=60)
    return process.exitcode
