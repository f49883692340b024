"""Distilling and training, each killed at random moments: is anything lost, twice, or left over?

    python scripts/benchmarks/kill_phases.py --target stories260K --prompts train.txt \
        --recipe recipes/stories260k-medusa.yaml --work out/kills

Each command is run once to its end and once with kills in between (see `kill_test`). Answers are
read as training reads them, and compared one by one; weights and optimizer state bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from itertools import zip_longest
from pathlib import Path

from draftheads.scripts.benchmarks.kill_test import Options, Report, kill_test
from draftheads.train.data.answers import read_answers, read_manifest
from draftheads.train.entry import mistakes_in_one_line

COMMAND = [sys.executable, "-m", "draftheads.scripts.cli"]
DISTILL = "distill --temperature 0.7 --max-new-tokens 64 --prompt-words 8"
TRAIN = "run.epochs=null run.tokens_per_step=1024 run.log_every=1 eval.every=1000000"
WEIGHTS = ["step-*/*.safetensors", "step-*/trainer/*.safetensors"]


def leftovers(work: Path) -> list[str]:
    """Files and folders of the killed run that the one left alone does not have."""
    alone, killed = (
        {str(path.relative_to(work / side)) for path in (work / side).rglob("*")}
        for side in ("alone", "killed")
    )
    return sorted(killed - alone)


def different_answers(work: Path) -> tuple[int, int]:
    """How many answers there are, and how many differ or are on one side only."""
    sides = work / "alone", work / "killed"
    manifests = [read_manifest(side) for side in sides]
    assert all(manifest["complete"] for manifest in manifests), "both runs came to their end"
    same = [left == right for left, right in zip_longest(*map(read_answers, sides))]
    counted = manifests[0]["counts"] != manifests[1]["counts"]
    return len(same), same.count(False) or int(counted)


def summary(phase: str, report: Report, kills: int, found: str, left: list[str]) -> str:
    """The line about a phase."""
    return (
        f"{phase}: {kills} kills in {report.launches} launches ({report.early} before work began, "
        f"{report.ended} too late); {found}; leftovers: {', '.join(left) or 'none'}"
    )


def distilling(asked: argparse.Namespace) -> bool:
    """Distil and kill; whether all is the same. Prints a line."""
    choices = [*DISTILL.split(), "--limit", str(asked.prompt_limit), "--out", "{out}"]
    choices += ["--target", asked.target, "--prompts", asked.prompts, "--batch-size", "16"]
    work = asked.work / "distill"
    options = Options(
        [*COMMAND, *choices], [], asked.kills, "prompt/s", asked.span, asked.seed, work
    )
    report = kill_test(options)
    (answers, different), left = different_answers(work), leftovers(work)
    found = f"{different} of {answers} answers differ"
    print(summary("distill", report, asked.kills, found, left), flush=True)
    return not (different or left)


def training(asked: argparse.Namespace) -> bool:
    """Train on what was distilled, and kill; whether all is the same. Prints a line."""
    choices = ["train", asked.recipe, *TRAIN.split(), f"target={asked.target}", "run.output={out}"]
    choices += [f"data.path={asked.work / 'distill' / 'alone'}", f"run.steps={asked.steps}"]
    choices += [f"run.save_every={asked.save_every}"]
    work = asked.work / "train"
    options = Options(
        [*COMMAND, *choices], WEIGHTS, asked.kills, "step/s", asked.span, asked.seed, work
    )
    report, left = kill_test(options), leftovers(work)
    found = f"files that differ: {', '.join(report.differing) or 'none'}"
    print(summary("train", report, asked.kills, found, left), flush=True)
    return not (report.differing or left)


PHASES = {"distill": distilling, "train": training}


def main() -> int:
    """0 if nothing was lost, doubled or left over, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--target", default="recipes/demo-target")
    parser.add_argument("--prompts", default="recipes/demo-prompts.jsonl")
    parser.add_argument("--prompt-limit", type=int, default=400)
    parser.add_argument("--recipe", default="recipes/demo-medusa.yaml")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--span", type=float, default=3.0, help="seconds of work per launch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("out/kill-phases"))
    asked = parser.parse_args()
    with mistakes_in_one_line():
        return 0 if all([PHASES[phase](asked) for phase in asked.phases]) else 1


if __name__ == "__main__":
    sys.exit(main())
