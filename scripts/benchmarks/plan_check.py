"""Is a plan right? Plans recipes, trains them, and prints predicted against measured.

    python scripts/benchmarks/plan_check.py RECIPE.yaml [RECIPE.yaml ...] [--tries 3] [--clock cpu]
        [--set run.steps=100 ...]

Each try plans and then trains every recipe, so that other work on this machine hits both. Peak
memory: the highest resident set of the training process. Disk: its output folder. Time: the mean of
its steps, the first window of metrics.jsonl and those with a save in them apart; where an adapter
learns, also of the steps before it does and of those after. With --clock cpu it is the processor's
time instead of the wall clock's, for machines that others use. Outputs go to a temporary folder.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.train.entry import mistakes_in_one_line
from draftheads.train.plan import CLOCKS, make_plan
from draftheads.train.recipe import Recipe, load_recipe

TRAIN = [sys.executable, "-m", "draftheads.scripts.cli", "train"]
UNITS = {
    "memory MB": 1e6,
    "disk MB": 1e6,
    "ms per step": 1e-3,
    "ms, heads alone": 1e-3,
    "ms, joint": 1e-3,
}
Figures = dict[str, float]


@dataclass(frozen=True)
class Watched:
    """A training process. peak: bytes. windows: (first step, end step, seconds) of lines in
    metrics.jsonl, without the first and those in which a checkpoint was written.
    """

    peak: int
    windows: list[tuple[int, int, float]]

    def mean(self, start: int, stop: int) -> float:
        """Seconds per step of the windows between these steps. ValueError where there are none."""
        found = [(b - a, spent) for a, b, spent in self.windows if start <= a and b <= stop]
        if not found:
            raise ValueError(
                f"expected whole windows in metrics between steps {start} and {stop}, got none; "
                "raise run.steps or lower run.log_every"
            )
        return sum(spent for _, spent in found) / sum(steps for steps, _ in found)


def main(argv: Sequence[str] | None = None) -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--set", nargs="*", default=[], help="overrides for all recipes")
    options = parser.parse_args(argv)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with mistakes_in_one_line(), tempfile.TemporaryDirectory() as name:
        for number in range(options.tries):
            for recipe in options.recipes:
                title = Path(recipe).stem
                output = f"run.output={Path(name) / f'{number}-{title}'}"
                loaded = load_recipe(recipe, [*options.set, output])
                predicted, measured = compare(loaded, options.clock)
                for what, value in predicted.items():
                    pairs.setdefault((title, what), []).append((value, measured[what]))
                    print(f"{title}: {what}: {value:.1f}, measured {measured[what]:.1f}")
    show(pairs)
    return 0


def compare(recipe: Recipe, clock: str) -> tuple[Figures, Figures]:
    """(predicted, measured), in UNITS, of one recipe."""
    plan = make_plan(recipe, clock=clock)
    if not plan.time:
        raise ValueError(f"expected a plan with a probe, got none: {plan.reason}")
    output = recipe.run.output
    watched = train(recipe, clock)
    saved = list(output.glob("step-*"))
    predicted: list[float] = [
        plan.peak,
        plan.disk["checkpoint"] * len(saved),
        plan.time["step"],
    ]
    measured: list[float] = [watched.peak, sum(map(size, saved))]
    share, steps = plan.work.alone, plan.work.steps
    assert steps, "the data is there"
    turn = round(share * steps)  # where an adapter begins to learn
    if 0 < turn < steps:
        alone, joint = watched.mean(0, turn), watched.mean(turn, steps)
        predicted += [plan.time["alone"], plan.time["joint"]]
        measured += [share * alone + (1 - share) * joint, alone, joint]
    else:
        measured.append(watched.mean(0, steps))
    return _figures(predicted), _figures(measured)


def train(recipe: Recipe, clock: str) -> Watched:
    """Train to the end, in a process of its own, looking on."""
    output = recipe.run.output
    output.mkdir(parents=True)
    path, metrics = output / "recipe.json", output / "metrics.jsonl"  # JSON is YAML
    path.write_text(recipe.model_dump_json())
    peak, windows, times = 0, 0, []
    with (output / "said").open("w") as said:
        child = subprocess.Popen([*TRAIN, str(path)], stdout=said, stderr=said)
        while child.poll() is None:
            peak = max(peak, _high_water(child.pid))
            seen = metrics.read_text().count("tokens_per_second") if metrics.exists() else 0
            if seen > windows:
                windows = seen
                times.append(time.perf_counter() if clock == "wall" else _processor(child.pid))
            time.sleep(0.01)
    if child.returncode:
        last = (output / "said").read_text().strip().splitlines()[-1]
        raise ValueError(f"training ended with exit code {child.returncode}: {last}")
    if len(times) < windows:
        raise ValueError(
            f"expected {windows} windows of metrics, saw {len(times)}; raise run.log_every"
        )
    return Watched(peak, _windows(times, recipe))


def size(folder: Path) -> int:
    """Bytes of the files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def show(pairs: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    """Medians, the error of the medians, and the error of each try."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("recipe", "", "predicted", "measured", "error", "each try"):
        table.add_column(column, justify="left" if column in ("recipe", "") else "right")
    for (recipe, what), tries in pairs.items():
        predicted, measured = (median(values) for values in zip(*tries, strict=True))
        each = " ".join(f"{100 * (p / m - 1):+.0f}" for p, m in tries)
        error = f"{100 * (predicted / measured - 1):+.1f} %"
        table.add_row(recipe, what, f"{predicted:.1f}", f"{measured:.1f}", error, each)
    Console(width=100).print(table)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"load of this machine at the end: {load} (1, 5, 15 minutes), {os.cpu_count()} cores")


def _figures(values: Sequence[float]) -> Figures:
    """Those there are, in UNITS."""
    return {what: value / UNITS[what] for what, value in zip(UNITS, values, strict=False)}


def _windows(times: Sequence[float], recipe: Recipe) -> list[tuple[int, int, float]]:
    """Between lines of metrics.jsonl that were written at these times."""
    every, save = recipe.run.log_every, min(recipe.run.save_every, recipe.eval.every or math.inf)
    spans = ((n * every, (n + 1) * every) for n in range(1, len(times)))
    return [
        (start, stop, after - before)
        for (start, stop), (before, after) in zip(spans, pairwise(times), strict=True)
        if -(-start // save) * save >= stop  # the next save is after it
    ]


def _processor(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    found = [line for line in lines if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 if found else 0


if __name__ == "__main__":
    sys.exit(main())
