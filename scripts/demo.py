"""Distill, train, bench, tune and a sample chat on the embedded target. CPU only, no network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.text import Text

from draftheads.heads.base import DraftHead
from draftheads.heads.formats.hub import load_head, open_head, record_tuned
from draftheads.heads.target.model import Target
from draftheads.heads.terminal import SafeConsole
from draftheads.infer.chat.repl import sample_chat
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.bench import BenchOptions, BenchReport, bench
from draftheads.infer.measure.report import print_report, verdict, write_json
from draftheads.infer.measure.tune import TuneOptions, tune
from draftheads.infer.threads import choose_threads
from draftheads.scripts.openings import opening_ids
from draftheads.scripts.printing import print_tuned
from draftheads.train.data.distill import DistillOptions, distill
from draftheads.train.data.prompts import read_prompts
from draftheads.train.entry import INTERRUPTED
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe

RECIPES = Path(str(files("draftheads.recipes")))
KINDS = {
    "medusa": "five Medusa heads learn to predict the next tokens",
    "sequential": "six heads learn it that also see the preceding draft tokens",
    "eagle3": "an EAGLE-3 head learns to continue its own drafts",
}
NODES = (4, 8, 16)
BENCH_PROMPTS, TUNE_PROMPTS = 16, 24
HELDOUT = str(RECIPES / "demo-heldout.jsonl")
QUESTIONS = ("What does os.path.join do?", "And its signature?", "What does json.dumps do?")


def demo(out: Path) -> BenchReport:
    """Run all stages in `out`; an earlier run is resumed. Returns the bench report."""
    console = SafeConsole()
    began = time.monotonic()
    transformers.logging.disable_progress_bar()
    target = Target.load("demo-target")
    threads = torch.get_num_threads()
    choose_threads(None, target)
    millions = sum(p.numel() for p in target.model.parameters()) / 1e6
    console.print(
        f"The target: a frozen Llama of {millions:.1f} M parameters that answers questions about "
        "Python's standard library."
    )
    with _stage(console, "1 of 7: distill - the target answers prompts, its tokens are the data"):
        prompts = read_prompts(RECIPES / "demo-prompts.jsonl")
        options = DistillOptions(out=out / "data", max_new_tokens=128, batch_size=64)
        distill(target, prompts, options)
    heads = {}
    for number, (kind, what) in enumerate(KINDS.items(), start=2):
        with _stage(console, f"{number} of 7: train - {what}"):
            heads[kind] = trained(kind, target, out, threads)
    target.pack()
    with _stage(console, "5 of 7: bench - held-out prompts, against transformers' generate"):
        ids = opening_ids(target, HELDOUT, None, BENCH_PROMPTS)
        report = bench(target, heads, ids, BenchOptions(nodes=NODES))
        write_json(report, out / "bench.json")
        print_report(report, console)
    best = max(report.heads, key=lambda result: result.speedup)
    kind = best.name.partition("@")[0]
    with _stage(console, f"6 of 7: tune - which tree of the {kind} head is fastest here?"):
        folder = open_head(out / kind)
        ids = opening_ids(target, HELDOUT, None, TUNE_PROMPTS)
        tuned = tune(target, heads[kind], ids, TuneOptions(), others=[folder.facts.trained_tree])
        print_tuned(tuned)
        record_tuned(folder.path, tuned.best.tree, tuned.facts())
    with _stage(console, "7 of 7: chat - with this tree; accepted draft tokens are coloured"):
        engine = Speculator(target, heads[kind], tree=tuned.best.tree)
        sample_chat(engine, QUESTIONS, console=console)
    console.print(
        f"\n{verdict(report)}\nTuned, it is {tuned.best.measured / tuned.plain.measured:.1f} times "
        f"as fast as this engine without drafts. Total time: {time.monotonic() - began:.0f} s.\n"
        f"Next:  draftheads chat --head {out / kind}\n"
        f"       draftheads serve --head {out / kind}"
    )
    return report


def trained(kind: str, target: Target, out: Path, threads: int) -> DraftHead:
    """Train the recipe for this kind; returns its best head. threads: for training."""
    places = {"target": target.name, "data.path": out / "data", "run.output": out / kind}
    overrides = [f"{key}={value}" for key, value in places.items()]
    decoding = torch.get_num_threads()
    torch.set_num_threads(threads)
    outcome = fit(load_recipe(RECIPES / f"demo-{kind}.yaml", overrides))
    torch.set_num_threads(decoding)
    if not outcome.finished:  # Ctrl-C or SIGTERM; the run is saved
        raise SystemExit(INTERRUPTED)
    return load_head(out / kind, target=target).pack(target)


@contextmanager
def _stage(console: Console, title: str) -> Iterator[None]:
    console.rule(Text(title, "bold"))
    began = time.monotonic()
    yield
    console.print(f"{time.monotonic() - began:.0f} s", style="dim")
