"""Run a job of `engines.py` in vLLM, with the Python that has it: python -P vllm.py JOB OUT.

On a CPU: VLLM_CPU_KVCACHE_SPACE, in GiB, is how much room for keys and values it takes (1 here).
Sources: entrypoints/llm.py, config/speculative.py and v1/spec_decode/metrics.py of vLLM 0.32.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # OMP_NUM_THREADS says how many
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
os.environ["VLLM_NO_USAGE_STATS"] = "1"

DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    import vllm  # `python -P` does not find this file in its place

    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    drafting = {"method": job["method"], "model": job["head"]}
    drafting["num_speculative_tokens"] = job["draft_tokens"]
    engine = vllm.LLM(
        model=job["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # else nothing is counted
        speculative_config=drafting if job["head"] else None,
    )
    rule = vllm.SamplingParams(temperature=0, max_tokens=job["new_tokens"], detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    answers, began = [], time.perf_counter()
    for prompt in prompts:  # one at a time, as we do
        (result,) = engine.generate(prompt, rule, use_tqdm=False)
        answers.append(list(result.outputs[0].token_ids))
    seconds = time.perf_counter() - began
    counts = {each.name: each for each in engine.get_metrics()}
    out = {
        "version": f"vllm {vllm.__version__}",
        "answers": answers,
        "drafts": counts[DRAFTS].value if DRAFTS in counts else 0,
        "accepted": list(counts[ACCEPTED].values) if ACCEPTED in counts else [],
        "seconds": seconds,
    }
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
