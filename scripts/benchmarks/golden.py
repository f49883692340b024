"""Did a rebuilding of the code change what it computes? Records what the commands come to on the
demo target, and compares two records.

    python scripts/benchmarks/golden.py record golden.json [--kinds medusa ...]
    python scripts/benchmarks/golden.py compare before.json after.json
    python scripts/benchmarks/golden.py since COMMIT [--kinds medusa ...]

A record holds, for every head kind: the losses of 20 seeded training steps, the checkpoint's hash,
the same after a SIGKILL and a resume, tokens per step and text of greedy decoding, the hashes of
all conversions (or why one is refused), and operators per decoding and training step. And the
hashes of a distillation of 200 prompts. Everything runs on one thread, so records of one machine
are equal to the bit. `since` records a commit and the working tree, and compares both.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TARGET = Path("target")  # relative, like all that is made: configs and cards hold such paths
KINDS = {
    "medusa": {"layers": 2, "depth": 4},
    "sequential": {"conditioning": "recurrent", "depth": 6, "layers": 2, "rank": 64},
    "eagle3": {},
    "eagle": {},
    "block": {},
}
READERS = (
    "draftheads",
    "vllm",
    "sglang",
    "speculators",
    "gguf",
    "openvino",
    "mlx",
)
CLOCK = "seconds"
"""The key of a config.json, and row of a card, that differs between two runs of the same code."""
STEPS, NEW_TOKENS = 20, 48
PROMPTS = ("What does os.path.join do?", "Show me json.dumps.", "How do I sort a list?")


def record(kinds: list[str]) -> dict[str, Any]:
    """Everything, made in the working folder."""
    shutil.copytree(ROOT / "recipes/demo-target", TARGET)
    data = Path("data")
    distill = ["--prompts", str(ROOT / "recipes/demo-prompts.jsonl"), "--limit", "200"]
    _draftheads("distill", "--target", TARGET, "--out", data, "--max-new-tokens", "64", *distill)
    answers = list(_find("train.data.answers:read_answers")(data))
    made: dict[str, Any] = {"distill": _digest(sorted(map(_content, answers)))}
    for kind in kinds:
        made[kind] = _head(kind)
        print(kind, json.dumps(made[kind])[:200], flush=True)
    return made


def _content(answer: Any) -> str:
    """The parts of an answer that training reads, however else it is stored."""
    return json.dumps([answer.tokens, answer.learn])


def _head(kind: str) -> dict[str, Any]:
    recipe, out = Path(f"{kind}.yaml"), Path(kind)
    sections = {
        "target": str(TARGET),
        "data": {"path": "data", "sequence_length": 256, "rows_per_batch": 4},
        "head": {"kind": kind, **KINDS[kind]},
        "optim": {"lr": 3e-3},
        "eval": {"every": 0},
        "run": {"steps": STEPS, "tokens_per_step": 2048, "log_every": 1, "save_every": 5},
    }
    recipe.write_text(json.dumps(sections))  # JSON is YAML
    _draftheads("train", recipe, f"run.output={out}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    folder = out / f"step-{STEPS:06}"
    weights = _digest_file(folder / "model.safetensors")
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "weights": weights,
        "resumed equally": _digest_file(_killed(recipe, Path(f"{kind}-killed"))) == weights,
        "conversions": {name: _converted(folder, Path(f"{kind}-{name}"), name) for name in READERS},
        **_decoded(folder),
        "operators per training step": _training_operators(recipe),
    }


def _killed(recipe: Path, out: Path) -> Path:
    """The weights of a run that was killed after its second checkpoint, and resumed."""
    command = [*_command("train"), str(recipe), f"run.output={out}"]
    run = subprocess.Popen(command, env=_environment(), start_new_session=True)
    while run.poll() is None and not (out / "step-000010").exists():
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    subprocess.run(command, env=_environment(), check=True)
    return out / f"step-{STEPS:06}" / "model.safetensors"


def _converted(head: Path, folder: Path, reader: str) -> dict[str, Any] | str:
    command = [
        *_command("convert"),
        str(head),
        str(folder),
        "--to",
        reader,
        "--target",
        str(TARGET),
    ]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): _digest_of_conversion(file) for file in files}


def _digest_of_conversion(file: Path) -> Any:
    """A hash; of config.json its values, so that a comparison names the keys that differ."""
    if file.name == "README.md":
        lines = file.read_text().splitlines()
        return _digest([line for line in lines if not line.startswith(f"| {CLOCK} |")])
    if file.name != "config.json":
        return _digest_file(file)
    return _without_clock(json.loads(file.read_text()))


def _without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_clock(each) for key, each in value.items() if key != CLOCK}
    return value


def _decoded(folder: Path) -> dict[str, Any]:
    target = _find("heads.target:Target", "heads:Target").load(TARGET)
    head = _find("heads.hub:load_head", "heads:load_head")(folder, target=target)
    engine = _find("infer.engine:Speculator", "infer:Speculator")(target, head)
    statistics = _find("infer.engine:Statistics", "infer:Statistics")()
    texts = []
    for prompt in PROMPTS:
        message = [{"role": "user", "content": prompt}]
        ids = target.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
        steps = list(engine.generate(ids, max_new_tokens=NEW_TOKENS))
        texts.append([token for step in steps for token in step.tokens])
        for step in steps:
            statistics.add(step)
    oracle = lambda new: list(engine.generate(ids, max_new_tokens=new))  # noqa: E731
    few, many = _count(lambda: oracle(8)), _count(lambda: oracle(32))
    between = sum(1 for _ in oracle(32)) - sum(1 for _ in oracle(8))
    return {
        "texts": texts,
        "tokens per step": statistics.tokens_per_step,
        "acceptance by depth": statistics.acceptance_by_depth,
        "operators per decoding step": (many - few) / max(between, 1),
    }


def _training_operators(recipe: Path) -> float:
    fit = _find("train.loop:fit", "train:fit")
    load = _find("train.recipe:load_recipe", "train:load_recipe")
    counts = []
    for steps in (2, 6):
        out = f"{recipe.stem}-operators-{steps}"
        chosen = [f"run.output={out}", f"run.steps={steps}", "run.save_every=100"]
        counts.append(_count(lambda chosen=chosen: fit(load(recipe, chosen))))
    return (counts[1] - counts[0]) / 4


def _count(run: Callable[[], Any]) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            return function(*args, **(kwargs or {}))

    with Operators() as operators:
        run()
    return operators.count


def _find(*places: str) -> Any:
    """The first of "module:name" that exists, so that one script reads old code and new."""
    for place in places:
        module, _, name = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(f"draftheads.{module}"), name)
    raise ImportError(f"none of {', '.join(places)}")


def _draftheads(*arguments: object) -> None:
    command = [*_command(str(arguments[0])), *map(str, arguments[1:])]
    subprocess.run(command, env=_environment(), check=True, stdout=subprocess.DEVNULL)


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "draftheads.scripts.cli", name]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _digest_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """One line for each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{where}/{key}")
    elif old != new:
        yield f"{where}: {old} -> {new}"


def since(commit: str, kinds: list[str]) -> list[str]:
    """What differs between a commit and the working tree."""
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(before), commit], check=True)
        try:
            records = []
            for tree in (before, ROOT):
                out = Path(folder) / f"{len(records)}.json"
                command = [sys.executable, __file__, "record", str(out), "--kinds", *kinds]
                code = {"PYTHONPATH": str(tree / "src")}
                subprocess.run(command, env=_environment() | code, check=True)
                records.append(json.loads(out.read_text()))
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    return list(differences(*records))


def main() -> int:
    """Exit code 1 where two records differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    sincer = commands.add_parser("since")
    sincer.add_argument("commit")
    for each in (recorder, sincer):
        each.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    chosen = parser.parse_args()
    if chosen.command != "record":
        if chosen.command == "since":
            found = since(chosen.commit, chosen.kinds)
        else:
            before, after = (json.loads(file.read_text()) for file in (chosen.before, chosen.after))
            found = list(differences(before, after))
        print("\n".join(found) or "equal")
        return bool(found)
    import torch

    torch.set_num_threads(1)
    out = chosen.out.absolute()
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        made = record(chosen.kinds)
    out.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
