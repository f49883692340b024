"""Run a job of `engines.py` with OpenVINO GenAI, on the CPU: openvino.py JOB.json OUT.json

The target, and the head as `draftheads convert --to openvino` writes it, are exported to float32
once and kept in DRAFTHEADS_OPENVINO_EXPORTS (default: a folder for temporary files).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
EXPORT = "--task text-generation-with-past --weight-format fp32"


def exported(model: str, *, is_head: bool = False) -> Path:
    """The OpenVINO model of a folder or Hub id, made if it is not there yet."""
    temporary = Path(tempfile.gettempdir()) / "draftheads-openvino"
    home = Path(os.environ.get("DRAFTHEADS_OPENVINO_EXPORTS", temporary))
    digest = hashlib.sha256(version("optimum-intel").encode())
    if not Path(model).is_dir():
        digest.update(model.encode())
    for file in sorted(each for each in Path(model).glob("*") if each.is_file()):
        digest.update(file.name.encode() + file.read_bytes())
    folder = home / digest.hexdigest()[:16]
    if not folder.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as staging:
            program, made = Path(sys.executable).with_name("optimum-cli"), Path(staging) / "made"
            options = [*EXPORT.split(), *["--trust-remote-code"] * is_head]
            command = [program, "export", "openvino", "--model", model, *options, made]
            subprocess.run(command, check=True)
            if is_head and "eagle_config" in json.loads((made / "config.json").read_text()):
                tell_layers(made)  # of DFlash, the exporter does
            made.rename(folder)
    return folder


def tell_layers(folder: Path) -> None:
    """Tell an exported head which layers it reads: the exporter does not, and without it the engine
    takes outputs [2, n // 2, n - 3].
    """
    file, config = folder / "openvino_model.xml", json.loads((folder / "config.json").read_text())
    layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]  # these are outputs, too
    text, mode = file.read_text(), "<eagle3_mode "
    if text.count(mode) != 1:
        raise ValueError(f"{file}: expected {mode}once, got {text.count(mode)}; is this a head?")
    value = " ".join(map(str, layers))
    file.write_text(text.replace(mode, f'<hidden_layers_list value="{value}" />{mode}'))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """What `engines.Outcome` holds."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler, options = genai.SchedulerConfig(), {}
    scheduler.enable_prefix_caching = False  # a prompt costs the same in every run
    scheduler.cache_size = 1
    if job["head"]:
        options["draft_model"] = genai.draft_model(
            exported(job["head"], is_head=True), "CPU", **EXACT
        )
    folder = exported(job["target"])
    pipe = genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler, **options, **EXACT)
    config = pipe.get_generation_config()
    config.max_new_tokens, config.do_sample = job["new_tokens"], False
    if tree := job["tree"]:
        config.num_assistant_tokens = tree["nodes"]
        config.tree_depth, config.branching_factor = tree["depth"], tree["top_k"]
    elif job["head"]:
        config.num_assistant_tokens = job["draft_tokens"]
    answers, steps, began = [], [], time.perf_counter()
    for prompt in job["prompts"]:
        result = pipe.generate(openvino.Tensor(np.array([prompt])), config)
        answers.append(list(result.tokens[0]))
        if job["head"]:  # tokens of each step; the first is the prefill's
            measured = result.extended_perf_metrics.main_model_metrics.raw_metrics
            steps += list(measured.m_batch_sizes)[1:]
    longest = tree["depth"] if tree else job["draft_tokens"]
    return {
        "version": f"openvino-genai {genai.__version__}",
        "answers": answers,
        "drafts": len(steps),
        "accepted": [sum(count > place for count in steps) for place in range(1, longest + 1)],
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    job, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(run(json.loads(job.read_text()))))
