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
    shapes, memory, trial = plan.shapes, plan.memory, plan.trial
    adapter = f" and {shapes.adapter:,} of an adapter of {shapes.adapted} layers"
    source = f"from shapes alone ({plan.reason}): activations are an upper bound"
    if trial:
        source = f"steps tried with {trial.layers} of {shapes.layers} layers"
    console.print(
        f"{plan.recipe.head.kind} head on {plan.recipe.target}: {shapes.head:,} parameters"
        f"{adapter if shapes.adapted else ''} trained, {shapes.frozen:,} frozen; "
        f"{plan.launch.processes} x {plan.launch.device}, {plan.launch.engine}\n{source}"
    )
    table = Table("memory per process", "", "", box=box.SIMPLE_HEAD)
    notes = {
        "base": "Python and libraries",
        "target": f"{shapes.bits} bits, {plan.recipe.target_placement}",
        "optimizer": f"AdamW, {plan.launch.engine}",
        "cache": "features kept, data.cache_gb",
        "activations": "and the rest; " + ("measured" if trial else "upper bound"),
    }
    parts = ["base", "target", "weights", "gradients", "optimizer", "data", "cache", "activations"]
    for part in parts:
        table.add_row(part, _size(getattr(memory, part)), notes.get(part, ""))
    table.add_section()
    verdict = "fits" if memory.fits else "does not fit"
    shared = f"{memory.processes} processes in " if memory.processes > 1 else "of "
    table.add_row("peak", _size(memory.total), f"{verdict}: {shared}{_size(memory.limit)}")
    console.print(table)
    for line in [_disk(plan), _steps(plan), _time(plan), remedy(plan)]:
        if line:
            console.print(line)


def remedy(plan: Plan) -> str:
    """What to do where something does not fit, or ""."""
    memory, disk = plan.memory, plan.disk
    if not memory.fits:
        needed, limit = memory.total * memory.processes, memory.limit
        what = (
            "memory; lower data.rows_per_batch, data.sequence_length or data.cache_gb, set "
            "head.vocabulary or run.gradient_checkpointing, or divide the head's state over "
            "processes with --engine zero2"
        )
    elif disk.features > disk.allowed:
        needed, limit = disk.features, disk.allowed
        what = "features; take features.dtype=fp8 or raise features.disk_gb"
    elif not disk.fits:
        needed, limit = disk.total, disk.free
        what = "disk; lower run.keep, take features.dtype=fp8, or another run.output"
    else:
        return ""
    return f"does not fit: expected at most {_size(limit)}, needs {_size(needed)} of {what}"


def write_plan(plan: Plan, path: Path) -> None:
    """The plan as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(plan.to_json(), indent=2) + "\n")


def _disk(plan: Plan) -> str:
    disk = plan.disk
    features = f"; features: {_size(disk.features)}" if disk.features else ""
    checkpoints = f"at most {disk.checkpoints} x {_size(disk.checkpoint)}"
    return f"disk   checkpoints: {checkpoints}{features}; free: {_size(disk.free)}"


def _steps(plan: Plan) -> str:
    work = plan.work
    lines = [
        f"steps  {work.steps or 'unknown'} of {plan.tokens_per_step:,.0f} tokens "
        f"({work.micro_batches} micro batches)"
    ]
    if work.passes:
        lines[0] += f", {work.passes:.1f} epochs of {work.rows:,} rows"
    if work.rows is None:
        lines.append(f"       no data in {plan.recipe.data.path}: full rows are assumed")
    if work.note:
        lines.append(f"       {work.note}")
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    time = plan.time
    if time is None:
        return f"time   unknown: {plan.reason}"
    kinds = ""
    if plan.work.alone < 1:
        kinds = f" ({time.alone:.3g} s for heads alone, {time.joint:.3g} s with the adapter)"
    elif time.later < time.step:
        kinds = f" ({time.later:.3g} s once features are known)"
    total = "unknown"
    if time.total is not None:
        hours = f"{time.total / 3600:.1f} hours"
        total = f"{time.total:.0f} s" if time.total < 600 else hours
    return (
        f"time   {time.step:.3g} s per step{kinds}, {plan.tokens_per_step / time.step:,.0f} "
        f"tokens/s; {time.save:.3g} s per save; {total} in all"
    )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
