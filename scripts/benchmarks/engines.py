"""Do serving engines run our heads as we do? Runs them side by side and makes the table.

    python scripts/benchmarks/engines.py --target TARGET --prompts PROMPTS \\
        --head HEAD [--head ...] [--draft-tokens 3] [--tree nodes=16,depth=4,top_k=3] \\
        [--vllm PYTHON] [--llamacpp FOLDER] [--openvino PYTHON] [--mlx PYTHON] [--json OUT]

All decoding is greedy and in float32. For each head: the texts of the engine with it are compared
with ours without drafts, and its verified drafts and the accepted tokens by position with ours,
with the same tree. Rates are of this machine and exclude loading; each engine's are given with and
without the head. `engine_runs/` has a script for each engine, which its own Python runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftheads.heads.formats import card
from draftheads.heads.formats.hub import load_head, open_head
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree, Tree, parse_tree
from draftheads.infer.engine import Speculator
from draftheads.infer.rows import Statistics, Step
from draftheads.scripts.convert import converted, with_mtp
from draftheads.scripts.openings import opening_ids
from draftheads.train.entry import mistakes_in_one_line

RUNS = Path(__file__).parent / "engine_runs"
VARIABLES = {
    "vllm": "DRAFTHEADS_VLLM",  # a Python with vLLM
    "llamacpp": "DRAFTHEADS_LLAMACPP",  # a folder with llama-server
    "openvino": "DRAFTHEADS_OPENVINO",  # a Python with openvino-genai and optimum-intel
    "mlx": "DRAFTHEADS_MLX",  # a Python with mlx-lm and mlx-vlm
}
"""Environment variables that say where engines are."""
OWN_PYTHON = ("vllm", "openvino", "mlx")
CONVERTED = {
    "vllm": ("eagle", "medusa", "dspark"),
    "openvino": ("eagle3", "dflash"),
    "mlx": ("eagle3", "dflash", "dspark"),
}
"""Methods whose heads an engine reads in another layout than ours."""
TIMEOUT = 1800


@dataclass(frozen=True)
class Job:
    """What to decode. head: None for the plain model. tree: a dynamic tree instead of a chain of
    draft_tokens, as {"nodes", "depth", "top_k"}. slots: requests decoded together, in llama.cpp.
    """

    target: str
    prompts: Sequence[Sequence[int]]
    head: str | None = None
    method: str | None = None  # the engine's own name of the head's kind
    draft_tokens: int = 3
    new_tokens: int = 64
    tree: dict[str, int] | None = None
    slots: int = 1
    eos: Sequence[int] = ()  # the target's end tokens, for engines that do not know them

    @property
    def plain(self) -> Job:
        """The same without a head."""
        return replace(self, head=None, method=None, tree=None)

    @property
    def shape(self) -> Tree:
        """What we verify."""
        if self.tree:
            return parse_tree(",".join(f"{name}={count}" for name, count in self.tree.items()))
        return StaticTree.from_widths([1] * self.draft_tokens)


@dataclass(frozen=True)
class Outcome:
    """drafts: verified chains or trees. accepted: accepted tokens at position 1, 2, ..."""

    version: str
    answers: list[list[int]]
    drafts: int
    accepted: list[int]
    seconds: float

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return sum(map(len, self.answers)) / self.seconds

    def equal(self, other: Outcome, eos: Sequence[int]) -> int:
        """How many answers are equal, but for the end token, which engines may leave out."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(_cut(mine, eos) == _cut(theirs, eos) for mine, theirs in pairs)


def _cut(ids: list[int], eos: Sequence[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in eos else ids


def ours(job: Job, target: Target, engine: str = "") -> Outcome:
    """Decode with our engine, and count the last drafts of an answer as `engine` does."""
    head = load_head(job.head, target=target) if job.head else None
    speculator = Speculator(target, head, tree=job.shape if head is not None else None)
    total, answers, began = Statistics(), [], time.perf_counter()
    for prompt in job.prompts:
        steps = list(speculator.generate(prompt, max_new_tokens=job.new_tokens))
        answers.append([token for step in steps for token in step.tokens])
        for step in counted(steps, job, target.eos_ids, engine):
            total.add(step)
    seconds = time.perf_counter() - began
    accepted = total.accepted + [0] * (job.shape.depth - len(total.accepted))
    return Outcome("draftheads", answers, total.steps, accepted, seconds)


def counted(steps: Sequence[Step], job: Job, eos: Collection[int], engine: str) -> Iterable[Step]:
    """The steps as an engine counts them, which matters at the end of an answer."""
    if engine == "llamacpp":
        return cut_at_the_end(steps, job, eos)
    if engine == "openvino":  # it tells how many tokens a step gave, one its own
        return [replace(step, accepted=min(step.accepted, len(step.tokens) - 1)) for step in steps]
    return steps


def cut_at_the_end(steps: Sequence[Step], job: Job, eos: Collection[int]) -> Iterator[Step]:
    """The steps as llama.cpp counts them: no draft reaches the last token that may be generated,
    and an end token, unless it is its draft's last, is not accepted; nor is what follows it.
    """
    left = job.new_tokens
    for step in steps:
        count, longest = len(step.tokens), min(job.draft_tokens, left - 1)
        ends = step.tokens[-1] in eos and count < longest
        if longest:
            yield replace(step, accepted=min(step.accepted, count - 1 if ends else longest))
        left -= count


def theirs(engine: str, place: str, job: Job) -> Outcome:
    """Decode with an engine, in a process of its own. place: as VARIABLES tell.

    Raises ValueError with the end of what it printed if it fails.
    """
    python = place if engine in OWN_PYTHON else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "job.json", Path(folder) / "out.json"
        if job.head and job.method == "mtp":  # engines read it as a part of its target
            target = Target.load(job.target, dtype="float32")
            whole = str(with_mtp(job.head, Path(folder) / "target", target))
            job = replace(job, target=whole, head=whole)
        elif job.method in CONVERTED.get(engine, ()):
            target = Target.load(job.target, dtype="float32")
            job = replace(job, head=str(converted(job.head, Path(folder) / "head", engine, target)))
        elif job.head and Path(job.head).is_dir():  # engines know no run folders
            job = replace(job, head=str(open_head(job.head).path))
        given.write_text(json.dumps(asdict(job)))
        # -P: without this folder, where scripts have the names of the engines' packages.
        command = [python, "-P", str(RUNS / f"{engine}.py"), str(given), str(made)]
        found = subprocess.run(
            command,
            env={**os.environ, VARIABLES[engine]: place},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        if found.returncode or not made.is_file():
            raise ValueError(f"{engine} failed:\n{(found.stdout + found.stderr)[-4000:]}")
        return Outcome(**json.loads(made.read_text()))


def row(engine: str, place: str, job: Job, target: Target) -> dict[str, Any]:
    """Run a job with and without its head, here and there."""
    eos = list(target.eos_ids)
    plain, mine = ours(job.plain, target), ours(job, target, engine)
    their_plain, their = theirs(engine, place, job.plain), theirs(engine, place, job)
    return {
        "engine": their.version,
        "head": job.head,
        "draft": "tree" if job.tree else f"chain {job.draft_tokens}",
        "prompts": len(job.prompts),
        "equal text": their.equal(plain, eos),
        "equal text without head": their_plain.equal(plain, eos),
        "drafts": [mine.drafts, their.drafts],
        "accepted": [mine.accepted, their.accepted],
        "tokens/s": [round(their_plain.rate, 1), round(their.rate, 1)],
        "our tokens/s": [round(plain.rate, 1), round(mine.rate, 1)],
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table; pairs are ours / theirs, rates are without / with the head."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([_cell(each[name]) for name in names] for each in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any) -> str:
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


def method(folder: str) -> str:
    """The engines' name of a head's kind. Raises ValueError for kinds that none has."""
    head, _ = open_head(folder).read()
    if head.kind == "sequential":
        raise ValueError(f"{folder}: no engine runs {head.kind} heads; give one of another kind")
    return card.method(head.kind, head.config())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--head", action="append", required=True)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--tree", help="nodes=16,depth=4,top_k=3, for openvino, after the chain")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    for engine, variable in VARIABLES.items():
        parser.add_argument(f"--{engine}", default=os.environ.get(variable), help=variable)
    options = parser.parse_args()
    with mistakes_in_one_line():
        target = Target.load(options.target, dtype="float32")
        prompts = opening_ids(target, options.prompts, options.limit)
        rows = []
        for engine in VARIABLES:
            if not (place := getattr(options, engine)):
                continue
            for folder in options.head:
                job = Job(options.target, prompts, folder, method(folder))
                job = replace(job, eos=list(target.eos_ids))
                job = replace(job, draft_tokens=options.draft_tokens, new_tokens=options.new_tokens)
                if engine != "llamacpp" and job.method in ("dspark", "dflash"):
                    whole = open_head(folder).read()[0].depth  # its blocks end with its chain
                    job = replace(job, draft_tokens=whole)
                rows.append(row(engine, place, job, target))
                if engine == "openvino" and options.tree:
                    given = dict(part.split("=") for part in options.tree.split(","))
                    tree = {name: int(count) for name, count in given.items()}
                    rows.append(row(engine, place, replace(job, tree=tree), target))
        if not rows:
            raise ValueError(
                "expected an engine, got none; pass --vllm, --llamacpp, --openvino or --mlx"
            )
        print(markdown(rows))
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
