"""A plan as a short table, and as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.train.plan import Duration, Memory, Plan

BUSY = 0.5
"""Processes per core that want to run, from which on they slow each other down."""


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Say it all in some thirty lines."""
    console = console or Console(highlight=False, soft_wrap=True)
    console.print(_heading(plan))
    table = Table(box=box.SIMPLE_HEAD, show_header=True)
    table.add_column("memory per process")
    table.add_column("", justify="right")
    table.add_column("", style="dim")
    for name, size, note in _memory_rows(plan):
        table.add_row(name, size, note)
    table.add_section()
    table.add_row("[bold]peak[/]", f"[bold]{_size(plan.memory.total)}[/]", _verdict(plan.memory))
    console.print(table)
    for line in (*_disk(plan), *_time(plan)):
        console.print(line)
    if plan.remedy():
        console.print(f"[bold red]{plan.remedy()}[/]")


def write_plan(plan: Plan, path: Path) -> None:
    """The plan as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(plan.to_json(), indent=2) + "\n")
    os.replace(part, path)


def _heading(plan: Plan) -> str:
    target, head, launch = plan.sizes.target, plan.sizes.head, plan.launch
    adapter = plan.sizes.adapter
    how = f"{launch.processes} x {launch.device}, {launch.engine}"
    source = (
        f"probed with {' and '.join(map(str, plan.probed))} of {target.layers} layers"
        + (", extrapolated" if plan.probed[-1] != target.layers else "")
        if plan.probed
        else f"from shapes alone ({plan.reason}): activations are an upper bound"
    )
    also = (
        f" and {adapter.parameters:,} of an adapter of {adapter.layers} layers"
        if adapter.layers
        else ""
    )
    return (
        f"{head.kind} head on {target.name}: {head.parameters:,} parameters{also} trained, "
        f"{target.parameters:,} frozen; {how}\n{source}"
    )


def _memory_rows(plan: Plan) -> list[tuple[str, str, str]]:
    memory, launch, target = plan.memory, plan.launch, plan.sizes.target
    held = f"{target.bits} bits" if target.bits else str(target.dtype).split(".")[-1]
    who = "head, adapter" if plan.sizes.adapter.layers else "head"
    rows = [
        ("Python and libraries", memory.base, "measured"),
        ("target", memory.target, f"{held}, {plan.recipe.target_placement}"),
        (f"{who}: weights", memory.weights, "float32"),
        (f"{who}: gradients", memory.gradients, "float32"),
        (f"{who}: AdamW", memory.optimizer, f"float32, {launch.engine}"),
        ("data", memory.data, ""),
        ("features kept", memory.cache, "mapped files" if memory.mapped else "data.cache_gb"),
        (
            "activations and the rest",
            memory.activations,
            "probed" if plan.probed else "upper bound",
        ),
    ]
    return [(name, _size(size), note) for name, size, note in rows if size]


def _verdict(memory: Memory) -> str:
    shared = f"{memory.sharing} processes in " if memory.sharing > 1 else "of "
    return f"{'fits' if memory.fits else 'does not fit'}: {shared}{_size(memory.limit)}"


def _disk(plan: Plan) -> list[str]:
    disk = plan.disk
    parts = [
        f"checkpoints: at most {disk.checkpoints} x {_size(disk.checkpoint)}",
        *([f"features: {_size(disk.features)}"] if disk.features else []),
        *([f"data: {_size(disk.data)}, there"] if disk.data else []),
        f"free: {_size(disk.free)}",
    ]
    return [f"disk   {'; '.join(parts)}"]


def _time(plan: Plan) -> list[str]:
    steps, time = plan.steps, plan.time
    count = f"{steps.count:,}" if steps.count else "unknown"
    passes = f", {steps.passes:.1f} passes over {plan.work.rows:,} rows" if steps.passes else ""
    lines = [
        f"steps  {count} of {plan.tokens_per_step:,.0f} tokens ({steps.micro_batches} micro "
        f"batches){passes}"
    ]
    if not plan.work.known:
        lines.append(
            f"       no data in {plan.recipe.data.path}: full rows are assumed"
            + ("" if steps.count else ", and the number of steps is unknown")
        )
    if steps.note:
        lines.append(f"       {steps.note}")
    if time is None:
        return [*lines, f"time   unknown: {plan.reason}"]
    kept = f" ({time.first_pass:.3g} s while features are computed, then {time.later:.3g} s)"
    told = time.later < time.first_pass and not plan.sizes.adapter.layers
    lines.append(
        f"time   {time.step:.3g} s per step{kept if told else ''}, "
        f"{plan.tokens_per_step / time.step:,.0f} tokens/s; {time.save:.3g} s per save; "
        f"{_duration(time.total)} in all (probed)"
    )
    lines += _kinds(plan, time)
    if plan.busy > BUSY:
        lines.append(
            f"       others were at work ({plan.busy:.1f} processes per core): a quiet machine is "
            "faster"
        )
    if plan.launch.processes > 1:
        lines.append("       on as many devices like this one; what they send is not counted")
    return lines


def _kinds(plan: Plan, time: Duration) -> list[str]:
    """What a step takes before and after an adapter begins to learn."""
    if not plan.sizes.adapter.layers:
        return []
    alone = f"{plan.steps.alone:.0%} of the steps"
    parts = [
        *([f"{time.alone:.3g} s while heads learn alone ({alone})"] if time.alone else []),
        *([f"{time.joint:.3g} s together with the adapter"] if time.joint else []),
    ]
    return [f"       per step {', '.join(parts)}"]


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 3600:.1f} hours"


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
