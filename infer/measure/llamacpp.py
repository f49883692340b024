"""llama.cpp's server without drafts, as a candidate of a bench: the same file, the same prompts."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # re-exported

from draftheads.heads.target.placement import is_gguf
from draftheads.infer.accept import Acceptance
from draftheads.infer.rows import Step
from draftheads.recipes import target_path

logger = logging.getLogger(__name__)

PLACE = "DRAFTHEADS_LLAMACPP"
"""Environment variable: a folder with the program."""
PROGRAM = "llama-server"
PATIENCE_S = 60
"""Until the server answers."""
MORE_CONTEXT = 8
"""Tokens beyond prompt and answer."""
CPUINFO = Path("/proc/cpuinfo")


def find_server() -> Path | None:
    """llama.cpp's server on this machine: in the folder that the environment names, else on the
    PATH.
    """
    found = shutil.which(PROGRAM, path=os.environ.get(PLACE) or None)
    return Path(found) if found else None


@dataclass(frozen=True)
class LlamaServer:
    """A server that runs."""

    url: str
    process: psutil.Process

    def clock(self) -> float:
        """CPU seconds of the process, in which other processes hardly count."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def generate(
        self, prompt: Sequence[int], *, sampling: Acceptance, max_new_tokens: int
    ) -> Iterator[Step]:
        """Continue a prompt, greedily: a step per token, which takes the mean by the server's own
        clock.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": max_new_tokens,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        try:
            reply = httpx.post(f"{self.url}/completion", json=body, timeout=None)
            answer = reply.raise_for_status().json()
        except httpx.HTTPError as error:
            raise OSError(f"{self.url}: expected an answer of llama.cpp, got {error}") from error
        seconds = answer["timings"]["predicted_per_token_ms"] / 1e3
        tokens = answer["tokens"]
        yield Step(tokens[:1], -1, None, 0.0, 0.0)
        for token in tokens[1:]:
            yield Step([token], 0, None, 0.0, seconds)


@contextmanager
def rival_of(target: str, tokens: int) -> Iterator[LlamaServer | None]:
    """llama.cpp with the same file and threads, if it is here and the target is a GGUF file; a
    warning if it does not start. tokens: of the longest prompt and answer.
    """
    file = Path(target_path(target))
    program = find_server() if is_gguf(target) else None
    with ExitStack() as stack:
        rival = None
        if program:
            options = ["-m", file, "-c", tokens + MORE_CONTEXT, "-t", torch.get_num_threads()]
            # with AMX it crashes on quantised files (docs/serving.md)
            if CPUINFO.is_file() and "amx" in CPUINFO.read_text():
                options += ["--no-repack"]
            try:
                rival = stack.enter_context(serving(program, [*options, "-np", 1]))
            except OSError as error:
                logger.warning("without llama.cpp: %s", error)
        yield rival


@contextmanager
def serving(program: Path, options: Sequence[object]) -> Iterator[LlamaServer]:
    """A server on the CPU, which ends with the block. Raises OSError if it does not answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, *options, "--port", port, "-ngl", 0, "--metrics", "--offline"]
    own = str(program.parent)
    libraries = os.pathsep.join(filter(None, [own, os.environ.get("LD_LIBRARY_PATH")]))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=log,
            stderr=log,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            start_new_session=True,  # Ctrl-C is for this process
        )
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + PATIENCE_S
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise OSError(f"{program}: expected a server, got none: {log.read()[-3000:]}")
                time.sleep(0.1)
            yield LlamaServer(url, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait()


def is_healthy(url: str) -> bool:
    """True if a server has loaded its model."""
    try:
        return bool(httpx.get(f"{url}/health").is_success)
    except httpx.HTTPError:  # not listening yet, or busy with loading
        return False
