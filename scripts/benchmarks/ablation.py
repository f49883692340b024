"""What is each choice of a recipe worth? Trains every combination, then counts tokens per step.

    python scripts/benchmarks/ablation.py RECIPE.yaml [key=value ...] \\
        --vary head.conditioning=markov,recurrent --vary head.depth=4,7 \\
        --case "head.kind=medusa head.depth=4,7" --prompts P --prompt-words 10 --json OUT

Every combination of the varied keys is a run in its own folder below `run.output`; a case is a
further grid with its own keys. Each head decodes greedily, or at every `--temperature` given. A
finished run is not trained again, and one that is in OUT is not measured again: re-run the same
command to resume. Times in OUT depend on what else the machine did; `draftheads bench` is for
speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import open_head
from draftheads.heads.target import Target
from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.engine import Speculator, Statistics
from draftheads.infer.measure.bench import summarize
from draftheads.infer.race import (
    GENERATE,
    PLAIN,
    BenchOptions,
    BenchPrompt,
    Candidate,
    Run,
    describe_machine,
    machine_line,
    race,
)
from draftheads.infer.threads import set_threads
from draftheads.scripts.commands import load_target
from draftheads.scripts.journey import check_outputs, opening_ids
from draftheads.train.entry import mistakes_in_one_line
from draftheads.train.evaluate import tau_error
from draftheads.train.loop import fit
from draftheads.train.recipe import Recipe, load_recipe


@dataclass(frozen=True)
class Plan:
    """One run. choices: the overrides that tell it from the others; its name and folder."""

    name: str
    choices: tuple[str, ...]
    recipe: Recipe


def combinations(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """["a=1,2", "b=3"] -> [("a=1", "b=3"), ("a=2", "b=3")]; commas in brackets do not split."""
    values = []
    for axis in axes:
        key, equals, text = axis.partition("=")
        if not equals:
            raise ValueError(f"{axis!r}: expected key=value,value without spaces, e.g. head.rank=8")
        values.append([f"{key}={value}" for value in re.split(r",(?![^\[{]*[\]}])", text)])
    return list(product(*values))


def plan(
    path: Path, overrides: Sequence[str], grids: Sequence[Sequence[str]]
) -> tuple[list[Plan], dict[str, str]]:
    """The runs of all grids, and name -> reason for those that the recipe refuses.

    Raises ValueError when none is left, or when they have several targets.
    """
    base = load_recipe(path, overrides)
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    for choices in [choices for axes in grids for choices in combinations(axes)]:
        name = ",".join(choice.removeprefix("head.") for choice in choices)
        name = re.sub(r"[^\w.=,+-]", "_", name)  # a folder's
        try:
            recipe = load_recipe(path, [*overrides, *choices])
        except ValueError as error:  # not all that can be combined fits together
            refused[name] = str(error)
            continue
        run = recipe.run.model_copy(update={"output": base.run.output / name})
        plans[name] = Plan(name, choices, recipe.model_copy(update={"run": run}))
    if not plans:
        raise ValueError(f"no combination can be trained: {next(iter(refused.values()), 'none')}")
    if len({(p.recipe.target, p.recipe.target_dtype) for p in plans.values()}) > 1:
        raise ValueError("expected one target for all runs, got several; vary other keys")
    return list(plans.values()), refused


TRAINED = ("steps", "seconds", "loss", "predicted_tokens_per_step", "heldout_top1", "heldout_top5")
MEASURED = ("nodes", "lossless", "tokens_per_step", "acceptance_by_depth", "steps", "tokens")


@dataclass(frozen=True)
class Settings:
    """What every run is measured with. nodes: draft nodes of the trees cut from a head's own.
    temperatures: of decoding; 0: greedy.
    """

    prompts: str
    prompt_words: int | None
    limit: int
    max_new_tokens: int
    nodes: list[int]
    temperatures: list[float]


class Meter:
    """Decodes the same prompts with one head after another. The plain engine's greedy output is
    what theirs must be.
    """

    def __init__(self, target: Target, settings: Settings) -> None:
        self.target = target
        self.rules = {t: Sampled(t) if t else Greedy() for t in settings.temperatures}
        self.options = BenchOptions(settings.max_new_tokens, nodes=settings.nodes)
        prompts = opening_ids(target, settings.prompts, settings.prompt_words, settings.limit)
        rooms = [min(settings.max_new_tokens, target.context - len(p)) for p in prompts]
        pairs = enumerate(zip(prompts, rooms, strict=True))
        self.jobs = [
            BenchPrompt(number, prompt, room) for number, (prompt, room) in pairs if room > 0
        ]
        if not self.jobs:
            raise ValueError(
                f"{settings.prompts}: expected a prompt shorter than the context of {target.name} "
                f"({target.context} tokens), found none"
            )
        plain = Candidate(PLAIN, None, Speculator(target), Greedy())
        self.plain = race([plain], self.jobs, self.options)[PLAIN]

    def measure(self, head: DraftHead) -> list[dict[str, Any]]:
        """One row for each temperature and tree size."""
        return [
            {"temperature": temperature, **row}
            for temperature, rule in self.rules.items()
            for row in self._rows(head, rule)
        ]

    def _rows(self, head: DraftHead, rule: Acceptance) -> list[dict[str, Any]]:
        sizes = sorted({min(nodes, head.tree.largest) for nodes in self.options.nodes})
        candidates = [
            Candidate(str(n), n, Speculator(self.target, head, tree=head.tree.resized(n)), rule)
            for n in sizes
        ]
        options = replace(self.options, sampling=rule)
        runs = race(candidates, self.jobs, options)
        # a bench compares with `generate`; here the plain engine replaces it
        results = {**runs, GENERATE: self.plain, PLAIN: self.plain}
        rows = [
            asdict(summarize(each, self.target, self.jobs, results, options)) for each in candidates
        ]
        return [
            {
                **{key: row[key] for key in MEASURED},
                "standard_error": tau_error(_counts(runs[row["name"]])),
                "draft_ms": 1e3 * row["draft_seconds"],
            }
            for row in rows
        ]


def _counts(runs: Sequence[Sequence[Run]]) -> list[tuple[int, int]]:
    """Tokens and steps of each prompt. runs: of each prompt, its one repetition."""
    counts = []
    for [run] in runs:
        total = Statistics.of(run.steps)
        counts.append((total.tokens, total.steps))
    return counts


class Ablation:
    """Trains and measures run after run; `report` is complete after each of them.

    Raises ValueError where `out` holds what was measured with other settings.
    """

    def __init__(self, target: Target, settings: Settings, out: Path | None) -> None:
        self.out, self.settings = out, asdict(settings)
        self.known: dict[str, dict[str, Any]] = {}
        if out and out.is_file():
            old = json.loads(out.read_text())
            if old["settings"] != self.settings:
                raise ValueError(
                    f"{out}: expected measurements with {self.settings}, got {old['settings']}; "
                    "give another --json"
                )
            self.known = {row["name"]: row for row in old["runs"]}
        self.target, self.meter = target, Meter(target, settings)
        self.report: dict[str, Any] = {
            "machine": describe_machine(target),
            "settings": self.settings,
            "runs": list(self.known.values()),
            "skipped": {},
        }

    def run(self, plan: Plan) -> bool:
        """Train and measure one run; False when it was interrupted."""
        try:
            outcome = fit(plan.recipe)
        except ValueError as error:  # a run that fails is a finding too, and others are waiting
            self.skip(plan.name, str(error))
            return True
        gc.collect()  # what training kept, before the next run keeps as much
        if not outcome.finished:
            return False
        known = self.known.get(plan.name)
        recipe = plan.recipe.model_dump(mode="json")
        if known is None or outcome.trained or known["recipe"] != recipe:
            self.known[plan.name] = self._row(plan, recipe)
        self.report["runs"] = list(self.known.values())
        self._write()
        return True

    def skip(self, name: str, reason: str) -> None:
        """Note, and say, why there is no such run."""
        print(f"skipped {name}: {reason}", flush=True)
        self.report["skipped"][name] = reason
        self._write()

    def _row(self, plan: Plan, recipe: dict[str, Any]) -> dict[str, Any]:
        folder = open_head(plan.recipe.run.output)
        training = folder.facts.training
        head = folder.load(self.target)
        measured = self.meter.measure(head)
        # None when sampling, and where bfloat16 forbids to ask
        verdicts = [row["lossless"] for row in measured if row["lossless"] is not None]
        return {
            "name": plan.name,
            "choices": list(plan.choices),
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "trained": {key: training[key] for key in TRAINED},
            "measured": measured,
            "lossless": all(verdicts) if verdicts else None,
            "checkpoint": str(folder.path.resolve()),
            "recipe": recipe,
        }

    def _write(self) -> None:
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            part = self.out.with_name(f".{self.out.name}.{os.getpid()}.part")
            part.write_text(json.dumps(self.report, indent=2) + "\n")
            os.replace(part, self.out)


def table(report: dict[str, Any]) -> Table:
    """One row per run and temperature."""
    sizes = sorted({row["nodes"] for run in report["runs"] for row in run["measured"]})
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    made.add_column("run", overflow="fold", min_width=24)
    for name in ("parameters", "top-1 by depth", "T", *(f"@{n}" for n in sizes), "lossless"):
        made.add_column(name, justify="right", no_wrap=name.startswith("@"))
    for run in report["runs"]:
        shares = " ".join(f"{share:.3f}"[1:] for share in run["trained"]["heldout_top1"])
        facts = run["name"], f"{run['parameters']:,}", shares
        verdict = {True: "yes", False: "NO", None: "n/a"}[run["lossless"]]
        for place, temperature in enumerate(report["settings"]["temperatures"]):
            cells = {
                row["nodes"]: f"{row['tokens_per_step']:.2f} ± {row['standard_error']:.2f}"
                for row in run["measured"]
                if row["temperature"] == temperature
            }
            made.add_row(
                *(("", "", "") if place else facts),
                f"{temperature:g}",
                *(cells.get(n, "") for n in sizes),
                "" if place else verdict,
                style="bold red" if run["lossless"] is False else None,
            )
    return made


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("recipe", type=Path)
    add("overrides", nargs="*", metavar="key=value", help="for all runs")
    add("--vary", action="append", default=[], metavar="KEY=A,B", help="an axis; repeatable")
    add("--case", action="append", default=[], metavar="'KEY=A,B ...'", help="a grid; repeatable")
    add("--prompts", required=True, help="a prompt file, a folder of them, or a Hub data set")
    add("--prompt-words", type=int, help="use the first N words of plain texts as prompts")
    add("--limit", type=int, default=24, help="use only the first N prompts")
    add("--max-new-tokens", type=int, default=200)
    add("--nodes", type=int, nargs="+", default=[4, 8, 16, 32, 60], help="draft nodes of the trees")
    add("--temperature", type=float, nargs="+", default=[0.0], help="of decoding; 0: greedy")
    add("--threads", type=int, help="torch CPU threads")
    add("--json", type=Path, metavar="OUT", help="write the numbers here, after every run")
    chosen = parser.parse_intermixed_args(argv)
    if not chosen.vary and not chosen.case:
        parser.error("expected --vary or --case, got neither; name the keys to try")
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, train, measure, print."""
    chosen = _arguments(argv)
    set_threads(chosen.threads)
    check_outputs([chosen.json], [])
    grids = [chosen.vary] * bool(chosen.vary) + [case.split() for case in chosen.case]
    plans, refused = plan(chosen.recipe, chosen.overrides, grids)
    first = plans[0].recipe
    target = load_target(first.target, first.target_dtype, None, first.target_revision)
    settings = Settings(
        chosen.prompts,
        chosen.prompt_words,
        chosen.limit,
        chosen.max_new_tokens,
        chosen.nodes,
        list(dict.fromkeys(chosen.temperature)),
    )
    ablation = Ablation(target, settings, chosen.json)
    for name, reason in refused.items():
        ablation.skip(name, reason)
    console = Console()
    for number, each in enumerate(plans, start=1):
        console.rule(f"{number} of {len(plans)}: {each.name}")
        if not ablation.run(each):
            raise SystemExit("interrupted and saved; run the same command again to resume")
    console.print(table(ablation.report))
    console.print(
        "@N: tokens per step with N draft nodes, ± their standard error over "
        f"{len(ablation.meter.jobs)} prompts; T: temperature of decoding, 0 is greedy; lossless: "
        f"the plain engine's greedy tokens. {machine_line(ablation.report['machine'])}.",
        style="dim",
    )


if __name__ == "__main__":
    with mistakes_in_one_line():
        main()
