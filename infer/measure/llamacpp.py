"""llama.cpp's server, with and without a head, as candidates of a bench: the same file, the same
prompts.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # re-exported

from draftheads.heads.target.placement import is_gguf
from draftheads.heads.terminal import said_if_long
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.rows import Step
from draftheads.recipes import target_path

logger = logging.getLogger(__name__)

PLACE = "DRAFTHEADS_LLAMACPP"
"""Environment variable: a folder with the program."""
PROGRAM = "llama-server"
RIVAL = "llama.cpp"
PROBE = (1, 2, 3)
"""Token ids that any target has."""
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
        """Continue a prompt, greedily: equal steps, as many as it took, with the mean time by the
        server's own clock. It does not say which tokens are drafts.
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
            tokens, timings = answer["tokens"], answer["timings"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise OSError(f"{self.url}: expected an answer of llama.cpp, got {error!r}") from error
        yield Step(tokens[:1], -1, None, 0.0, 0.0)
        steps = len(tokens) - 1 - timings.get("draft_n_accepted", 0)
        for part in np.array_split(tokens[1:], steps) if steps > 0 else ():
            yield Step(part.tolist(), 0, None, 0.0, timings["predicted_ms"] / 1e3 / steps)


@dataclass(frozen=True)
class Chain:
    """Drafts of llama.cpp: a head's GGUF file, and draft tokens of a step."""

    head: Path
    method: str
    tokens: int

    def options(self) -> list[object]:
        """Words of the command line."""
        words = ["-md", self.head, "--spec-type", f"draft-{self.method}"]
        return [*words, "--spec-draft-n-max", self.tokens]


@contextmanager
def rivals_of(
    target: str, tokens: int, chains: Mapping[str, Chain]
) -> Iterator[dict[str, LlamaServer]]:
    """llama.cpp with the same file and threads, if it is here and the target is a GGUF file: RIVAL
    without drafts, and a server of each chain by its name. A warning for those that do not start or
    do not answer. tokens: of the longest prompt and answer.
    """
    program = find_server() if is_gguf(target) else None
    with ExitStack() as stack:
        rivals: dict[str, LlamaServer] = {}
        if program:
            file = Path(target_path(target))
            options = ["-m", file, "-c", tokens + MORE_CONTEXT, "-t", torch.get_num_threads()]
            # with AMX it crashes on quantised files (docs/serving.md)
            if CPUINFO.is_file() and "amx" in CPUINFO.read_text():
                options += ["--no-repack"]
            drafts = {RIVAL: [], **{name: chain.options() for name, chain in chains.items()}}
            for name, more in drafts.items():
                try:
                    with said_if_long(f"starting {name}, for {PATIENCE_S} s at most"):
                        server = stack.enter_context(serving(program, [*options, "-np", 1, *more]))
                        # some crash at their first tokens only
                        list(server.generate(PROBE, sampling=Greedy(), max_new_tokens=len(PROBE)))
                    rivals[name] = server
                except OSError as error:
                    logger.warning("without %s: %s", name, error)
                    if name == RIVAL:  # nothing to compare its drafts with
                        break
        yield rivals


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
