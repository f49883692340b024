"""A plan as a short table, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.heads.files import write_text
from draftheads.train.plan import Plan


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Memory as a table, then lines for disk, steps, time and what does not fit."""
    console = console or Console(highlight=False, soft_wrap=True)
    shapes, work, disk = plan.shapes, plan.work, plan.disk
    adapter = f" and {shapes.adapter:,} of an adapter of {shapes.adapted} layers"
    source = f"from shapes alone ({plan.reason}): activations are an upper bound"
    if plan.trial:
        source = f"measured with {plan.trial.layers} of {shapes.layers} layers"
    console.print(
        f"{plan.recipe.head.kind} head on {plan.recipe.target}: {shapes.head:,} parameters"
        f"{adapter if shapes.adapted else ''} trained, {shapes.frozen:,} frozen; "
        f"{plan.processes} processes, {plan.engine}\n{source}"
    )
    table = Table("memory per process", "", box=box.SIMPLE_HEAD)
    for part, size in plan.memory.items():
        table.add_row(part, _size(size))
    table.add_row(f"peak, of {_size(plan.limit)}", _size(plan.peak))
    console.print(table)
    console.print(
        f"disk   at most {disk['checkpoints']} checkpoints of {_size(disk['checkpoint'])}; "
        f"features: {_size(disk['features'])}; free: {_size(disk['free'])}"
    )
    rows = f"{work.rows:,} rows" if work.rows else "no data there: full rows are assumed"
    epochs = f"{work.epochs:.1f} epochs of " if work.epochs else ""
    console.print(
        f"steps  {work.steps or 'unknown'} of {plan.tokens_per_step:,.0f} tokens "
        f"({work.micro_batches} micro batches); {epochs}{rows}"
    )
    if work.note:
        console.print(f"       {work.note}")
    console.print(_time(plan))
    if text := remedy(plan):
        console.print(text, style="bold red")


def _time(plan: Plan) -> str:
    time, kinds = plan.time, ""
    if not time:
        return f"time   unknown: {plan.reason}"
    if plan.work.alone < 1:
        kinds = f" ({time['alone']:.3g} s for heads alone, {time['joint']:.3g} s with the adapter)"
    elif time["later"] < time["step"]:
        kinds = f" ({time['later']:.3g} s once features are known)"
    total = f"{time['total'] / 3600:.2f} hours" if "total" in time else "unknown"
    return (
        f"time   {time['step']:.3g} s per step{kinds}, {plan.tokens_per_step / time['step']:,.0f} "
        f"tokens/s; {time['save']:.3g} s per save; {total} in all"
    )


def remedy(plan: Plan) -> str:
    """What to do where something does not fit, or ""."""
    features, allowed = plan.disk["features"], int(plan.recipe.features.disk_gb * 1e9)
    if plan.peak > plan.limit:
        needed, limit = plan.peak, plan.limit
        what = (
            "memory; lower data.rows_per_batch, data.sequence_length or data.cache_gb, set "
            "head.vocabulary or run.gradient_checkpointing, or divide the head's state over "
            "processes with --engine zero2"
        )
    elif features > allowed:
        needed, limit = features, allowed
        what = "features; take features.dtype=fp8 or raise features.disk_gb"
    elif plan.written > plan.disk["free"]:
        needed, limit = plan.written, plan.disk["free"]
        what = "disk; lower run.keep, take features.dtype=fp8, or another run.output"
    else:
        return ""
    return f"does not fit: expected at most {_size(limit)}, needs {_size(needed)} of {what}"


def write_plan(plan: Plan, path: Path) -> None:
    """The plan as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(plan.to_json(), indent=2) + "\n")


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
