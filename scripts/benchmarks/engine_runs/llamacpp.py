"""One job of `engines.py` in llama.cpp's server: JOB.json OUT.json.

DRAFTHEADS_LLAMACPP: a folder that install_llamacpp.sh made. A target that is not a GGUF file is
made one by llama.cpp's own converter, and the head by `draftheads convert --to gguf`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftheads.heads.formats.llamacpp import server_options
from draftheads.infer.measure.llamacpp import find_server, serving

PROGRAM = find_server() or Path("llama-server")
EXACT = ["--flash-attn", "off", "-ctk", "f32", "-ctv", "f32"]
EXACT_DRAFTS = ["-ctkd", "f32", "-ctvd", "f32", "--spec-draft-p-min", "0"]
# Files in Q8_0 or Q4 end llama.cpp on CPUs with AMX (docs/serving.md); others are not repacked.
SAFE = ["--no-repack"]


def target_gguf(target: str, folder: Path) -> Path:
    """The target as a GGUF file in float32."""
    if target.endswith(".gguf"):
        return Path(target)
    file, script = folder / "target.gguf", Path(__file__).with_name("llamacpp_target.py")
    run_command([sys.executable, script, target, "--outtype", "f32", "--outfile", file])
    return file


def head_gguf(head: str, target: Path, folder: Path) -> Path:
    """The head as a GGUF file."""
    file = folder / "head.gguf"
    command = [sys.executable, "-c", "from draftheads.scripts.cli import main; main()", "convert"]
    run_command([*command, head, file, "--to", "gguf", "--target", target])
    return file


def run_command(command: Sequence[str | Path]) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout + done.stderr


def read(url: str, body: dict[str, Any] | None = None) -> str:
    """What the server answers to a GET, or to a POST of JSON."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        text: str = reply.read().decode()
    return text


def counts(metrics: str) -> tuple[int, list[int]]:
    """Verified drafts, and accepted tokens at every position of a chain, from the text of
    /metrics.
    """
    drafts = re.search(r"^llamacpp:spec_decode_num_drafts_total (\d+)", metrics, re.M)
    positions = re.findall(r'_per_pos_total\{position="\d+"\} (\d+)', metrics)
    return int(drafts[1]) if drafts else 0, list(map(int, positions))


def end_tokens(target: str) -> list[int]:
    """The end tokens that transformers knows."""
    file = Path(target) / "generation_config.json"
    eos = json.loads(file.read_text()).get("eos_token_id", []) if file.is_file() else []
    return eos if isinstance(eos, list) else [eos]


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    target = target_gguf(job["target"], folder)
    slots = job["slots"]
    longest = max(map(len, job["prompts"])) + job["new_tokens"] + 2 * job["draft_tokens"] + 8
    options = ["-m", target, "-np", str(slots), "-c", str(slots * longest), *EXACT, *SAFE]
    options += server_options(job["method"], end_tokens(job["target"]))
    options += ["-t", os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count())]
    if job["head"]:
        if job["method"] != "mtp":  # which is in the target's file
            options += ["-md", head_gguf(job["head"], target, folder)]
        options += [*EXACT_DRAFTS, "--spec-type", f"draft-{job['method']}"]
        options += ["--spec-draft-n-max", str(job["draft_tokens"])]
    asked = {"n_predict": job["new_tokens"], "temperature": 0, "return_tokens": True}
    with serving(PROGRAM, options) as server, ThreadPoolExecutor(slots) as requests:
        url = server.url

        def answer(prompt: list[int]) -> list[int]:
            body = {**asked, "prompt": prompt, "cache_prompt": False}
            tokens: list[int] = json.loads(read(f"{url}/completion", body))["tokens"]
            return tokens

        began = time.perf_counter()
        answers = list(requests.map(answer, job["prompts"]))
        seconds = time.perf_counter() - began
        drafts, accepted = counts(read(f"{url}/metrics"))
    version = re.search(r"build (\d+)", run_command([PROGRAM, "--version"]))
    return {
        "version": f"llama.cpp b{version[1] if version else '?'}",
        "answers": answers,
        "drafts": drafts,
        "accepted": accepted,
        "seconds": seconds,
    }


def main() -> None:
    job, out = map(Path, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        out.write_text(json.dumps(run(json.loads(job.read_text()), Path(folder))))


if __name__ == "__main__":
    main()
