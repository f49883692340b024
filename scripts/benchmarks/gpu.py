"""Ask a GPU all that this project wants to know of one, in order of worth.

    python scripts/benchmarks/gpu.py --out DIR [--minutes 8] [--device cpu]

Each stage is a process with a time limit of its own, and what it has measured by then is kept. A
second call goes on with the stages that did not end. DIR gets a JSON file per stage and
`report.md`. On a CPU, shapes are tiny: so the kit is tried before it meets a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftheads.heads.files import write_text
from draftheads.heads.tables import markdown_table
from draftheads.infer.continuous import Request, answer_all, checked
from draftheads.infer.engine import Speculator
from draftheads.infer.race import machine_line
from draftheads.scripts.benchmarks.random_models import SHAPES, Shape, create_target
from draftheads.scripts.benchmarks.shapes import CALLS
from draftheads.train.entry import mistakes_in_one_line

ROOT = Path(__file__).parents[2]
BENCHMARKS = Path(__file__).parent
ENDED, STOPPED = "ended", "stopped by its time limit"


@dataclass(frozen=True)
class Stage:
    """One process. command: with OUT for its JSON file; seconds: at most."""

    name: str
    seconds: int
    command: tuple[str, ...]


def stages(device: str) -> list[Stage]:
    """The most valuable first."""
    is_small = device == "cpu"
    large, small = ("tiny", "tiny") if is_small else ("llama-3.1-8b", "qwen3-0.6b")
    dtype = "float32" if is_small else "bfloat16"
    rounds = "2" if is_small else "9"
    context = "20" if is_small else "256"
    many = "40" if is_small else "8192"

    def steps(shape: str, *more: str) -> tuple[str, ...]:
        options = ("--shape", shape, "--device", device, "--dtype", dtype, "--rounds", rounds)
        return tool("shapes.py", *options, "--json", "OUT", *more)

    def itself(*more: str) -> tuple[str, ...]:
        return tool("gpu.py", "--device", device, "--dtype", dtype, "--json", "OUT", *more)

    both = ("--modes", "eager", "recorded")
    compiled = ("--modes", "compiled", "--nodes", "8")
    training = ("--device", device, "--dtype", dtype, "--json", "OUT", "--repetitions", rounds)
    return [
        Stage("steps", 100, steps(large, "--context", context, "--nodes", "4", "8", *both)),
        Stage(
            "steps of a small target", 60, steps(small, "--context", context, "--nodes", "8", *both)
        ),
        Stage("distilling", 80, itself("--distil", large)),
        Stage("training", 100, tool("step_time.py", *sizes(SHAPES[large], is_small), *training)),
        Stage("tests of decoding", 120, itself("--tests", "tests/gpu/test_decoding.py")),
        Stage("compiled", 120, steps(large, "--context", context, *compiled)),
        Stage(
            "eight rows",
            60,
            steps(large, "--context", context, "--batch", "8", "--nodes", "8", *both),
        ),
        Stage("long texts", 60, steps(large, "--context", many, "--nodes", "8", *both)),
        Stage("large trees", 60, steps(large, "--context", context, "--nodes", "16", "60", *both)),
        Stage("tests of training", 180, itself("--tests", "tests/gpu/test_training.py")),
    ]


def tool(script: str, *options: str) -> tuple[str, ...]:
    """One of these scripts."""
    return sys.executable, str(BENCHMARKS / script), *options


def sizes(shape: Shape, is_small: bool) -> list[str]:
    """Options of step_time."""
    numbers = {
        "hidden-size": shape.hidden,
        "intermediate-size": shape.intermediate,
        "layers": shape.layers,
        "heads": shape.heads,
        "kv-heads": shape.kv_heads,
        "vocabulary": shape.vocab,
        "draft-vocabulary": min(shape.draft_vocab, shape.vocab),
        "rows": 2,
        "length": 64 if is_small else 2048,
        "documents": 4,
    }
    return [word for name, number in numbers.items() for word in (f"--{name}", str(number))]


def run(stage: Stage, out: Path, seconds: float) -> dict[str, Any]:
    """How a stage ended, and the last of what it said."""
    path = out / f"{stage.name.replace(' ', '-')}.json"
    command = [str(path) if word == "OUT" else word for word in stage.command]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=min(stage.seconds, seconds)
        )
        end = ENDED if done.returncode == 0 else f"failed with {done.returncode}"
        said = done.stderr
    except subprocess.TimeoutExpired as late:
        end = STOPPED
        said = (late.stderr or b"").decode(errors="replace")
    last = "" if end == ENDED else said.strip()[-200:]
    return {"end": end, "seconds": time.monotonic() - began, "said": last, "file": path.name}


def distil(
    shape: Shape, prompts: int = 64, rows: int = 32, new: int = 128
) -> Iterator[dict[str, Any]]:
    """Tokens per second of a continuous batch, operator by operator and recorded, and of
    transformers' `generate_batch`.
    """
    target = create_target(shape)
    texts = [torch.arange(n, n + 32).remainder(shape.vocab).tolist() for n in range(prompts)]
    for mode in ("eager", "recorded"):
        engine = Speculator(target)
        if mode == "eager":
            engine.maker.recorder = None
        waiting = iter([Request(text, new - number % 32) for number, text in enumerate(texts)])
        began = time.perf_counter()
        outcomes = answer_all(engine, checked(0.0, 1.0, 0), rows, lambda: next(waiting, None))  # noqa: B023
        answers = [ids for _, ids, _ in outcomes]
        yield {"name": mode, **rate(answers, began)}
    config = target.model.generation_config
    config.update(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    outputs = target.model.generate_batch(texts, config).values()
    yield {"name": "generate_batch", **rate([each.generated_tokens for each in outputs], began)}


def rate(answers: Sequence[Sequence[int]], began: float) -> dict[str, float]:
    """Tokens per second since then."""
    tokens = sum(map(len, answers))
    return {"tokens": tokens, "tokens_per_second": tokens / (time.perf_counter() - began)}


def run_tests(path: str) -> list[dict[str, Any]]:
    """What pytest says at the end, failures named."""
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--timeout=60", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return [{"said": line} for line in [*(each for each in lines if "FAILED" in each), lines[-1]]]


def report(out: Path, ends: dict[str, dict[str, Any]]) -> str:
    """A page of all numbers that there are."""
    rows = [
        [name, each["end"], f"{each['seconds']:.0f}", each["said"]] for name, each in ends.items()
    ]
    parts = [markdown_table(["stage", "end", "s", "last said"], rows)]
    for name, each in ends.items():
        path = out / each["file"]
        if path.exists():
            parts += [f"## {name}", *tables(json.loads(path.read_text()))]
    return "\n\n".join(parts) + "\n"


def tables(numbers: Any) -> Iterator[str]:
    """Of the JSON of one stage."""
    if isinstance(numbers, dict):  # step_time
        pieces = [
            [kind, piece, f"{seconds * 1e3:.1f}", f"{each['reached'][piece]:.0%}"]
            for kind, each in numbers["heads"].items()
            for piece, seconds in each["seconds"].items()
        ]
        yield markdown_table(["kind", "piece", "ms", "of the matrix rate"], pieces)
    elif numbers and "rows" in numbers[0]:  # shapes
        yield from map(steps_table, numbers)
    else:
        yield markdown_table(list(numbers[0]), [list(each.values()) for each in numbers])


def steps_table(numbers: dict[str, Any]) -> str:
    """Milliseconds, c, the share of reading the weights, and what the host asked of the GPU."""
    setup = numbers["setup"]
    speed = next(iter(numbers["bandwidth"].values()))
    read = {(row["name"], row["nodes"]): row.get("bytes") or 0 for row in numbers["rows"]}
    rows = [
        [
            row["mode"],
            row["name"],
            row["nodes"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row.get('c', 0):.2f}",
            f"{read[row['name'], row['nodes']] / speed / row['seconds']:.0%}",
            f"{row.get('first', 0):.1f}",
            *(row.get(call, "") for call in CALLS),
        ]
        for row in numbers["rows"]
    ]
    titles = ["mode", "step", "nodes", "ms", "c", "of reading weights", "first, s", *CALLS]
    place = f"{setup['shape']}, {setup['dtypes'][0]}, {setup['batches'][0]} rows, "
    note = f"{place}{setup['context']} tokens before; {speed / 1e9:.0f} GB/s. "
    return f"{note}{machine_line(numbers['machine'])}.\n\n{markdown_table(titles, rows)}"


def main(argv: Sequence[str] | None = None) -> None:
    """All stages that are left, or one of those that are functions here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help=argparse.SUPPRESS)
    parser.add_argument("--distil", choices=list(SHAPES), help=argparse.SUPPRESS)
    parser.add_argument("--tests", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("--device: expected a GPU, found none; try --device cpu")
    if chosen.tests:
        write_text(chosen.json, json.dumps(run_tests(chosen.tests), indent=1))
    elif chosen.distil:
        shape = replace(SHAPES[chosen.distil], device=chosen.device, dtype=chosen.dtype)
        rows: list[dict[str, Any]] = []
        for row in distil(shape):
            rows.append(row)
            write_text(chosen.json, json.dumps(rows, indent=1))
    elif chosen.out is None:
        raise ValueError("--out: expected a folder for the numbers, got none; give one")
    else:
        run_all(chosen.out, chosen.device, chosen.minutes)


def run_all(out: Path, device: str, minutes: float) -> None:
    """Those that did not end, as long as there is time."""
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    kept = out / "stages.json"
    ends: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    deadline = time.monotonic() + 60 * minutes
    for stage in stages(device):
        left = deadline - time.monotonic()
        if ends.get(stage.name, {}).get("end") == ENDED or left < 5:
            continue
        console.print(f"{stage.name}: at most {min(stage.seconds, left):.0f} s", highlight=False)
        ends[stage.name] = run(stage, out, left)
        console.print(f"  {ends[stage.name]['end']}", highlight=False)
        write_text(kept, json.dumps(ends, indent=1))
        write_text(out / "report.md", report(out, ends))


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
