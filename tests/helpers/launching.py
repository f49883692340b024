"""Launches of several processes on this machine."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

from accelerate.state import AcceleratorState

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


def fork(function: Callable[..., None], *arguments: object) -> ForkProcess:
    """Start a function in a copy of this process, which has imported everything: milliseconds,
    where a new process takes seconds.
    """
    wait_for_idle_threads()
    told = function, *arguments
    process = multiprocessing.get_context("fork").Process(target=_call, args=told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of this process
        process.start()
    return process


def wait_for_idle_threads() -> None:
    """Until no other thread of this process runs. One that does may hold a lock of MKL, also while
    it ends, after Python has joined it; a fork would then have that lock for ever.
    """
    own = threading.get_native_id()
    tasks = [each / "stat" for each in Path("/proc/self/task").glob("*") if each.name != str(own)]
    while any(_state(each) == "R" for each in tasks):
        time.sleep(0.001)


def _state(stat: Path) -> str:
    """Of a thread, by Linux: R runs or could; none if it has ended."""
    try:
        return stat.read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _call(function: Callable[..., None], *arguments: object) -> None:
    """One that hangs says where, and ends."""
    faulthandler.dump_traceback_later(150, exit=True, file=sys.__stderr__)
    function(*arguments)


def exit_code_of_a_fork(function: Callable[..., None], *arguments: object) -> int | None:
    """Minus the number of the signal that ended it, if one did."""
    process = fork(function, *arguments)
    process.join(timeout=180)
    return process.exitcode


NODE = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Of a process that has a machine to itself."""
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
CPU = {"ACCELERATE_USE_CPU": "true"}
ENGINES = {"ddp": CPU, "fsdp2": CPU | FSDP} | {
    f"zero{stage}": {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(ROOT / "recipes" / f"deepspeed-zero{stage}.json"),
    }
    for stage in (1, 2, 3)
}
"""What `accelerate launch` tells each process of the engine."""


def place(rank: int, port: int, processes: int = 2) -> dict[str, str]:
    """What a launcher tells each of several processes on this machine."""
    if processes == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    numbers |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(each) for name, each in numbers.items()}


def become_one_of_a_launch(told: dict[str, str], output: Path) -> None:
    """In a fork, whose standard output and error then go to one file."""
    environment = launch_environment(cpu=False)
    os.environ.clear()
    os.environ.update(environment | told)
    AcceleratorState._reset_state(reset_partial_state=True)
    file = output.open("wb")
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file.fileno(), number)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    warnings.resetwarnings()  # those of libraries are errors in this process alone


def run_script(
    together: Barrier, told: dict[str, str], output: Path, script: str, *words: str
) -> None:
    """together: none begins before all are there. A server in this process that the first one asks
    would compute while the next is forked.
    """
    together.wait()
    become_one_of_a_launch(told, output)
    os.chdir(ROOT)
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def forks(
    folder: Path, script: str, *arguments: str, told: dict[str, str], processes: int
) -> list[tuple[int | None, str]]:
    """Exit code and output of a script in each process of a launch, with nothing to load and
    without a launcher. told: their environment, as by ENGINES.
    """
    port = free_port()
    files = [folder / f"output-{rank}" for rank in range(processes)]
    together = multiprocessing.get_context("fork").Barrier(processes)
    started = [
        fork(run_script, together, place(rank, port, processes) | told, file, script, *arguments)
        for rank, file in enumerate(files)
    ]
    for process in started:
        process.join(timeout=240)
    return [
        (process.exitcode, file.read_text()) for process, file in zip(started, files, strict=True)
    ]


def two_forks(
    folder: Path, script: str, *arguments: str, told: dict[str, str] = CPU
) -> list[tuple[int | None, str]]:
    """Those of two processes."""
    return forks(folder, script, *arguments, told=told, processes=2)


def outputs_of_two_forks(
    folder: Path, script: str, *arguments: str, told: dict[str, str] = CPU
) -> list[str]:
    """What both print; they must not fail."""
    ended = two_forks(folder, script, *arguments, told=told)
    outputs = [output for _, output in ended]
    assert [code for code, _ in ended] == [0, 0], outputs
    return outputs
