"""Print data and plans: documents as text with a summary, a plan as a table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftheads.heads.terminal import SafeConsole, printable
from draftheads.heads.tree import DynamicTree
from draftheads.infer.costs import Trial
from draftheads.infer.measure.grid import Grid
from draftheads.infer.measure.report import MARK, partial, print_findings
from draftheads.infer.measure.tune import Tuned
from draftheads.infer.race import machine_line
from draftheads.infer.text import TextStream
from draftheads.scripts.options import target_options
from draftheads.train.advice.plan import Plan
from draftheads.train.batches import FEW_STEPS
from draftheads.train.data.answers import count, read_answers, read_manifest
from draftheads.train.data.text_side import TextSide

LEARNED, ENDING, REST = "green", "bold reverse green", "dim"


@dataclass
class Pen:
    """Writes token ids as text. is_plain: brackets around learned tokens, instead of colours."""

    side: TextSide
    is_plain: bool

    def document(self, tokens: Sequence[int], learn: Sequence[tuple[int, int]]) -> Text:
        """A document's text with its learned spans and end tokens marked."""
        text = Text()
        stream = TextStream(self.side.tokenizer, skip_special_tokens=False)

        def write(part: Sequence[int], style: str) -> None:
            text.append(printable(stream.feed(part)), style="" if self.is_plain else style)

        at = 0
        for start, stop in learn:
            end = stop - (tokens[stop - 1] in self.side.eos_ids)
            write(tokens[at:start], REST)
            if self.is_plain:
                text.append("[[")
            write(tokens[start:end], LEARNED)
            write(tokens[end:stop], ENDING)
            if self.is_plain:
                text.append("]]")
            at = stop
        write(tokens[at:], REST)
        return text


def show_answers(folder: Path, pen: Pen, limit: int, out: Console) -> None:
    """Print the first `limit` documents of a folder and a summary of all."""
    for number, answer in enumerate(islice(read_answers(folder), limit)):
        learned = sum(stop - start for start, stop in answer.learn)
        out.print(
            f"document {number}: {len(answer.tokens)} tokens, {learned} learned in "
            f"{len(answer.learn)} answers",
            style="bold",
        )
        out.print(pen.document(answer.tokens, answer.learn), end="\n\n")
    manifest = read_manifest(folder)
    note = " (imported, not checked)" if manifest.imported else ""
    out.print(Text(f"{folder}, answered by {manifest.target.name}{note}", style="bold"))
    out.print(Text("\n".join(count(folder, manifest).lines())))


TOO_MUCH_MEMORY = """memory; lower data.rows_per_batch, data.sequence_length or data.cache_gb, \
set head.vocabulary or run.gradient_checkpointing, or divide the head's state over processes with \
--engine zero2"""


def print_counts(plan: Plan) -> None:
    """Print what is known before a trial: parameters, memory as a table, steps."""
    console = SafeConsole()
    shapes, work = plan.shapes, plan.work
    adapter = f" and {shapes.adapter:,} of an adapter" if shapes.adapter else ""
    launch = "one process" if plan.processes == 1 else f"{plan.processes} processes, {plan.engine}"
    console.print(
        f"{plan.recipe.head.kind} head on {plan.recipe.target}: {shapes.head:,} parameters"
        f"{adapter} trained, {shapes.frozen:,} frozen; {launch}"
    )
    sizes = [[part, _size(size)] for part, size in plan.memory.items()]
    Grid(["memory per process", ""], sizes).print(console)
    rows = f"{work.rows:,} rows" if work.rows else "no data found: full rows are assumed"
    epochs = f"{work.epochs:.1f} epochs of " if work.epochs else ""
    minutes = plan.recipe.run.minutes
    steps = f"as many as {minutes:g} minutes hold" if minutes else "unknown"
    facts = {
        "steps": f"{work.steps or steps}, of {work.tokens_per_step:,.0f} tokens "
        f"({work.micro_batches} micro batches); {epochs}{rows}",
        "note": work.note,
        "refused by": shapes.refusals,
    }
    for label, text in facts.items():
        if text:
            console.print(f"{label}: {text}", soft_wrap=True)


def print_trial(plan: Plan) -> None:
    """Print what a trial has measured: activations, time, and whether the run fits."""
    console = SafeConsole(soft_wrap=True)
    time = f"unknown: {plan.reason}"
    if plan.trial:
        console.print(f"activations: {_size(plan.trial.activations)}")
        speed = plan.work.tokens_per_step / plan.time["step"]
        time = f"{plan.time['step']:.3g} s per step, {speed:,.0f} tokens/s"
        time += f", {plan.time['steps']:,} steps"
        if plan.recipe.run.minutes and plan.time["steps"] < FEW_STEPS:
            time += ", few to learn from; raise run.minutes or lower run.tokens_per_step"
    console.print(f"time: {time}")
    for line in plan.servers:
        console.print(line)
    verdict = f"fits: {_size(plan.peak)} of {_size(plan.limit)} of memory"
    if not plan.fits:
        sizes = f"expected at most {_size(plan.limit)}, needs {_size(plan.peak)}"
        verdict = f"does not fit: {sizes} of {TOO_MUCH_MEMORY}"
    elif plan.trial:
        verdict += f", about {duration(plan.time['total'])}"
    else:
        verdict += " without activations, which were not measured"
    console.print(verdict, style="bold green" if plan.fits else "bold red")


def print_tuned(tuned: Tuned) -> None:
    """Print the trees that raced, and which one is the fastest."""
    columns = ["tree", "nodes", "depth", "τ", "predicted", "measured", "gain", "95 %"]
    present = tuned.trials[0]
    rows = [_trial_cells(trial, tuned) for trial in tuned.trials]
    tree = tuned.best.tree
    gain = f"{tuned.best.measured / tuned.plain.measured:.2f} times plain decoding"
    if tree.nodes == 1:
        gain = why_no_drafts(tuned)
    choice = "the present tree stays" if tuned.best is present else "a new tree"
    print_findings(
        machine_line(tuned.machine),
        [Grid(columns, rows)],
        f"{choice}: {tree.draft_nodes} draft nodes, {tree.depth} deep; {gain}",
        partial(tuned.settings),
        "*: chosen. predicted, measured: tokens per second, prompt included, on prompts that "
        "the trees were not fitted to. gain: over the present tree, 95 % of resampled prompts.",
    )


def _trial_cells(trial: Trial, tuned: Tuned) -> list[str]:
    present = tuned.trials[0]
    tree = trial.tree
    kind = "fixed"
    if isinstance(tree, DynamicTree):
        kind = f"top_k {tree.top_k}"
    if tree.nodes == 1:
        kind = "no drafts"
    name = f"present, {kind}" if trial is present else kind
    if trial is tuned.best:
        name += MARK
    return [
        name,
        str(tree.draft_nodes),
        str(tree.depth),
        f"{trial.tau:.2f}",
        f"{trial.predicted:.0f}" if trial.predicted else "-",
        f"{trial.measured:.0f}",
        f"{trial.measured / present.measured:.2f}",
        "{:.2f}-{:.2f}".format(*trial.gain_ci95),
    ]


def why_no_drafts(tuned: Tuned) -> str:
    """Why the tree is one without drafts, and what to do about it."""
    best = tuned.drafted
    if best is None:
        return "the head decodes without drafts"
    break_even = tuned.costs.break_even(best.tree)
    other = "--dtype bfloat16, " if tuned.machine["dtype"] == "float32" else ""
    return (
        "the head will decode without drafts. Why: the fastest tree with drafts, of "
        f"{best.tree.draft_nodes} nodes, brings τ {best.tau:.2f}, and a step with it costs "
        f"{break_even:.2f} plain ones (break-even τ); {best.measured / tuned.plain.measured:.2f} "
        f"times plain decoding. Next: train longer or on texts like these prompts (see draftheads "
        f"doctor), {other}or tune on the machine that will decode"
    )


def next_command(plan: Plan, arguments: Sequence[str]) -> str:
    """The command to run after a plan that fits. arguments: recipe and overrides."""
    recipe = plan.recipe
    if plan.work.rows is None:
        target = shlex.join(target_options(recipe.target, recipe.target_adapter))
        return f"draftheads distill {target} --prompts PROMPTS --out {recipe.data.path}"
    if plan.processes == 1:
        return f"draftheads train {shlex.join(arguments)}"
    return (
        f"accelerate launch --config_file recipes/accelerate-{plan.engine}.yaml --num_processes "
        f"{plan.processes} train/medusa.py {shlex.join(arguments)}"
    )


def duration(seconds: float) -> str:
    """In words: seconds, minutes or hours."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} seconds"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
