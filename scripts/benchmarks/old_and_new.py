"""Is the code of one checkout as fast as that of another? Both run in turns on the demo target.

    python scripts/benchmarks/old_and_new.py OLD/.venv/bin/python NEW/.venv/bin/python [--rounds 6]

Per head kind: seconds for decoding with it, and seconds per training step, as the ratio new / old
with a 95 % interval over rounds. The heads are trained by OLD for a few steps, and read by both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = {
    "medusa": {"layers": 2, "depth": 4},
    "sequential": {"conditioning": "recurrent", "depth": 6, "layers": 2, "rank": 64},
    "eagle3": {},
    "eagle": {},
}
STEPS, NEW_TOKENS, REPEATS = 12, 96, 3
PROMPTS = ("What does os.path.join do?", "Show me json.dumps.", "How do I sort a list?")


def write_recipe(kind: str, folder: Path) -> Path:
    """A recipe that both checkouts read."""
    recipe = folder / f"{kind}.yaml"
    sections = {
        "target": str(ROOT / "recipes/demo-target"),
        "data": {"path": str(folder / "data"), "sequence_length": 256, "rows_per_batch": 4},
        "head": {"kind": kind, **KINDS[kind]},
        "eval": {"every": 0},
        "run": {"steps": STEPS, "tokens_per_step": 2048, "log_every": 1, "save_every": 1000},
    }
    recipe.write_text(json.dumps(sections))  # JSON is YAML
    return recipe


def train(python: str, recipe: Path, out: Path) -> float:
    """Median seconds per step, without the first two."""
    command = [python, "-m", "draftheads.scripts.cli", "train", str(recipe), f"run.output={out}"]
    subprocess.run(command, env=_environment(), check=True, capture_output=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return statistics.median(2048 / rate for rate in rates[2:])


def decode(python: str, heads: dict[str, Path]) -> dict[str, float]:
    """CPU seconds per kind, in a process of that checkout."""
    command = [python, __file__, "--decode", json.dumps({k: str(v) for k, v in heads.items()})]
    done = subprocess.run(command, env=_environment(), check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def decode_here(heads: dict[str, str]) -> dict[str, float]:
    """CPU seconds of decoding some prompts with each head, the least of some repeats."""
    target = _find("heads:Target", "heads.target:Target").load(ROOT / "recipes/demo-target")
    load_head = _find("heads:load_head", "heads.hub:load_head")
    speculator = _find("infer:Speculator", "infer.engine:Speculator")
    prompts = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]
    seconds = {}
    for kind, folder in heads.items():
        engine = speculator(target, load_head(folder, target=target))
        times = []
        for _ in range(REPEATS + 1):  # the first warms up
            start = time.process_time()
            for prompt in prompts:
                list(engine.generate(prompt, max_new_tokens=NEW_TOKENS))
            times.append(time.process_time() - start)
        seconds[kind] = min(times[1:])
    return seconds


def _find(*places: str) -> Any:
    for place in places:
        module, _, name = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(f"draftheads.{module}"), name)
    raise ImportError(f"none of {', '.join(places)}")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def interval(ratios: list[float]) -> str:
    """The mean ratio and its bootstrap interval."""
    draws = random.Random(0)
    means = sorted(statistics.mean(draws.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.mean(ratios):.3f} | {means[50]:.3f} to {means[1949]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("pythons", nargs="*")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--decode", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.decode:
        print(json.dumps(decode_here(chosen.decode)))
        return
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        prompts = ROOT / "recipes/demo-prompts.jsonl"
        target = ROOT / "recipes/demo-target"
        command = [chosen.pythons[0], "-m", "draftheads.scripts.cli", "distill", "--limit", "200"]
        options = ["--target", target, "--prompts", prompts, "--out", folder / "data"]
        subprocess.run([*command, *options], check=True, capture_output=True)
        recipes = {kind: write_recipe(kind, folder) for kind in KINDS}
        for number in range(chosen.rounds):
            order = [0, 1] if number % 2 == 0 else [1, 0]
            for kind, recipe in recipes.items():
                seconds = {i: 0.0 for i in order}
                for i in order:
                    out = folder / f"{kind}-{number}-{i}"
                    seconds[i] = train(chosen.pythons[i], recipe, out)
                ratios.setdefault(f"training step, {kind}", []).append(seconds[1] / seconds[0])
            heads = {kind: folder / f"{kind}-0-0" for kind in KINDS}
            both = {i: decode(chosen.pythons[i], heads) for i in order}
            for kind in KINDS:
                ratio = both[1][kind] / both[0][kind]
                ratios.setdefault(f"decoding, {kind}", []).append(ratio)
            print(f"round {number + 1}", file=sys.stderr)
    print("| | new / old, time | 95 % interval |\n| --- | --- | --- |")
    for row, values in ratios.items():
        print(f"| {row} | {interval(values)} |")


if __name__ == "__main__":
    main()
