"""Distill, train, bench and a sample chat on the embedded target. CPU only, no network."""

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
from draftheads.heads.formats.hub import load_head
from draftheads.heads.target import Target
from draftheads.heads.terminal import SafeConsole
from draftheads.infer.chat.repl import sample_chat
from draftheads.infer.engine import Speculator
from draftheads.infer.measure.bench import BenchOptions, BenchReport, bench
from draftheads.infer.measure.report import print_report, write_json
from draftheads.infer.threads import choose_threads
from draftheads.scripts.openings import opening_ids
from draftheads.train.data.distill import DistillOptions, distill
from draftheads.train.data.prompts import read_prompts
from draftheads.train.entry import INTERRUPTED
from draftheads.train.loop import fit
from draftheads.train.recipe import load_recipe

RECIPES = Path(str(files("draftheads.recipes")))
KINDS = {
    "medusa": "five Medusa heads learn to predict the next tokens",
    "sequential": "six heads learn it that also see the preceding draft tokens",
    "eagle3": "an EAGLE-3 head learns to continue its own drafts",
}
NODES = (4, 8, 16)
BENCH_PROMPTS = 16
QUESTIONS = ("What does os.path.join do?", "And its signature?", "What does json.dumps do?")


def demo(out: Path) -> BenchReport:
    """Run all stages in `out`; an earlier run is resumed. Returns the bench report."""
    console = SafeConsole()
    began = time.monotonic()
    transformers.logging.disable_progress_bar()
    target = Target.load(RECIPES / "demo-target")
    threads = torch.get_num_threads()
    choose_threads(None, target)
    millions = sum(p.numel() for p in target.model.parameters()) / 1e6
    console.print(
        f"The target: a frozen Llama of {millions:.1f} M parameters that answers questions about "
        "Python's standard library."
    )
    with _stage(console, "1 of 6: distill - the target answers prompts, its tokens are the data"):
        prompts = read_prompts(RECIPES / "demo-prompts.jsonl")
        options = DistillOptions(out=out / "data", max_new_tokens=128, batch_size=64)
        distill(target, prompts, options)
    heads = {}
    for number, (kind, what) in enumerate(KINDS.items(), start=2):
        with _stage(console, f"{number} of 6: train - {what}"):
            heads[kind] = trained(kind, target, out, threads)
    with _stage(console, "5 of 6: bench - held-out prompts, against transformers' generate"):
        ids = opening_ids(target, str(RECIPES / "demo-heldout.jsonl"), None, BENCH_PROMPTS)
        report = bench(target, heads, ids, BenchOptions(nodes=NODES))
        write_json(report, out / "bench.json")
        print_report(report, console)
    best = max(report.heads, key=lambda result: result.speedup)
    kind = best.name.partition("@")[0]
    with _stage(console, f"6 of 6: chat - with {best.name}; accepted draft tokens are coloured"):
        tree = heads[kind].tree.resized(best.nodes or heads[kind].tree.draft_nodes)
        sample_chat(Speculator(target, heads[kind], tree=tree), QUESTIONS, console=console)
    nodes = f" --nodes {best.nodes}" if best.nodes else ""
    console.print(
        f"\n{best.name}: {best.speedup:.2f} times as fast as generate, {best.tokens_per_step:.2f} "
        f"tokens per step, lossless: {best.lossless}. Total time: "
        f"{time.monotonic() - began:.0f} s.\n"
        f"Next:  draftheads chat --head {out / kind}{nodes}\n"
        f"       draftheads serve --head {out / kind}{nodes}"
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
    return load_head(out / kind, target=target)


@contextmanager
def _stage(console: Console, title: str) -> Iterator[None]:
    console.rule(Text(title, "bold"))
    began = time.monotonic()
    yield
    console.print(f"{time.monotonic() - began:.0f} s", style="dim")
