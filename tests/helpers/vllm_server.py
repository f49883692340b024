"""`vllm serve` of a real vLLM for CPUs, on a free port of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import httpx
from launching import free_port

SECONDS = 180
"""Until it answers."""
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CPU |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Serving:
    """A server."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """With all its processes, as kill -9 does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def serving(
    python: str, target: str, log: Path, *words: str, **environment: str
) -> Iterator[Serving]:
    """A server of the vLLM of this Python, killed at the end."""
    port = str(free_port())
    command = [str(Path(python).with_name("vllm")), "serve", target, "--port", port]
    command += ["--host", "127.0.0.1", "--enforce-eager", *words]
    own = {key: each for key, each in os.environ.items() if key != "PYTHONPATH"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env={**own, **CPU, **environment},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server = Serving(f"http://127.0.0.1:{port}", process)
    try:
        _wait_for(server, log)
        yield server
    finally:
        server.kill()


def _wait_for(server: Serving, log: Path) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if httpx.get(f"{server.url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])
