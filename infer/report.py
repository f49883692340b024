"""What a benchmark found: as JSON, as a table with footnotes, as facts for a model card."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.heads.target import Target


@dataclass(frozen=True)
class Divergence:
    """Where an output first differs from `generate`'s, in the first prompt in which it does.

    prompts: how many prompts differ. prompt: number of the first, token: place in its output.
    expected, got: token ids, None where one output ended. top2_margin: the target's best logit
    minus its second best at that place; near zero means that rounding decided.
    """

    prompts: int
    prompt: int
    token: int
    expected: int | None
    got: int | None
    top2_margin: float


@dataclass(frozen=True)
class Result:
    """One contestant's measurements.

    nodes: draft nodes of its tree, None where its drafter has no fixed tree. lossless: True when
    the output equals `generate`'s token for token for every prompt, None with `lossless_reason`
    where that cannot be asked. tokens_per_step counts the target's bonus token;
    acceptance_by_depth[d] is the share of steps with d + 1 or more draft tokens accepted.
    speedup: tokens per second over `generate`'s; speedup_over_best: over the faster of `generate`
    and this engine without drafts. draft_seconds, verify_seconds: means per step. steps and tokens:
    sums over prompts and repetitions, the prefill's token included in tokens.
    """

    name: str
    nodes: int | None
    lossless: bool | None
    lossless_reason: str | None
    first_divergence: Divergence | None
    tokens_per_step: float
    acceptance_by_depth: list[float]
    tokens_per_second: float
    baseline_tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    speedup_ci95: tuple[float, float]
    speedup_over_best: float
    speedup_over_best_ci95: tuple[float, float]
    draft_seconds: float
    verify_seconds: float
    steps: int
    tokens: int


@dataclass(frozen=True)
class BenchReport:
    """plain: the engine without a drafter. heads: one Result per head and tree size."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    plain: Result
    heads: list[Result]

    def result(self, name: str) -> Result:
        """The result called `name`. Raises ValueError when there is none."""
        for result in (self.plain, *self.heads):
            if result.name == name:
                return result
        names = ", ".join(result.name for result in (self.plain, *self.heads))
        raise ValueError(f"no result is called {name!r}; expected one of {names}")


def describe_machine(target: Target) -> dict[str, Any]:
    """What a reader needs to judge the times."""
    device = target.device
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "draftheads": version("draftheads"),
        "dtype": str(target.dtype).removeprefix("torch."),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def as_dict(report: BenchReport) -> dict[str, Any]:
    """The report as plain values, ready for JSON."""
    return asdict(report)


def write_json(report: BenchReport, path: str | Path) -> None:
    """Write the report as JSON; a reader sees the old file or the whole new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(as_dict(report), indent=2, allow_nan=False) + "\n")
    os.replace(part, path)


def measured_facts(report: BenchReport, name: str) -> dict[str, Any]:
    """What a head's config.json and model card say about the result called `name`."""
    result, settings = asdict(report.result(name)), report.settings
    keys = (
        "nodes",
        "lossless",
        "tokens_per_step",
        "acceptance_by_depth",
        "speedup",
        "speedup_ci95",
        "speedup_over_best",
        "tokens_per_second",
        "baseline_tokens_per_second",
        "plain_tokens_per_second",
    )
    return {
        **{key: result[key] for key in keys},
        "speedup_ci95": list(result["speedup_ci95"]),
        "sampling": settings["sampling"],
        "prompts": settings["prompts"],
        "max_new_tokens": settings["max_new_tokens"],
        "machine": machine_line(report.machine),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} torch threads"
    return (
        f"{machine['gpu'] or cpu}, {machine['dtype']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, {machine['date'][:10]}"
    )


def print_report(report: BenchReport, console: Console | None = None) -> None:
    """The table and its footnotes."""
    console = console or Console()
    console.print(table(report))
    for note in footnotes(report):
        console.print(note, style="dim", markup=False, highlight=False)


def table(report: BenchReport) -> Table:
    """One row per contestant, `generate` first."""
    title = f"{report.settings['target']}: {report.settings['sampling']}"
    made = Table(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True
    )
    made.add_column("contestant", overflow="fold", min_width=10)
    columns = ("τ", "tok/s", "speedup", "95 %", "vs best", "draft", "verify", "lossless")
    for name in columns:
        made.add_column(name, justify="right", no_wrap=True)
    plain = report.plain
    generate = plain.baseline_tokens_per_second
    over_best = generate / max(generate, plain.tokens_per_second)
    made.add_row("generate", "", f"{generate:.0f}", "1.00", "", f"{over_best:.2f}")
    for result in (plain, *report.heads):
        low, high = result.speedup_ci95
        made.add_row(
            result.name,
            f"{result.tokens_per_step:.2f}",
            f"{result.tokens_per_second:.0f}",
            f"{result.speedup:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{result.speedup_over_best:.2f}",
            f"{result.draft_seconds * 1e3:.2f}",
            f"{result.verify_seconds * 1e3:.2f}",
            _yes_no(result),
            style="bold red" if result.lossless is False else None,
        )
    return made


def _yes_no(result: Result) -> str:
    if result.lossless is None:
        return "n/a"
    return "yes" if result.lossless else "NO"


def footnotes(report: BenchReport) -> list[str]:
    """What the table's numbers mean, in plain words."""
    settings, plain = report.settings, report.plain
    notes = [
        "generate: transformers' own. plain: this engine without a drafter, so that its own gain "
        "and the heads' can be told apart.",
        "name@N: a tree of N draft nodes. τ: tokens per forward of the target, its own "
        "bonus token counted; 1.00 is no gain. draft, verify: milliseconds per step.",
        f"speedup: tokens per second over generate's, prompt included; 95 % bootstrap interval "
        f"over {settings['prompts']} prompts, runs interleaved in one process. vs best: over the "
        "faster of generate and plain.",
        plain.lossless_reason
        or "lossless: the output equals generate's, token for token, for every prompt.",
        *(_divergence_note(result) for result in (plain, *report.heads) if result.first_divergence),
        f"machine: {machine_line(report.machine)}.",
    ]
    if settings["prompts"] == 1:
        notes.append("One prompt has no spread: measure more of them before trusting the interval.")
    if settings["prompts_shortened"]:
        notes.append(
            f"{settings['prompts_shortened']} prompts had no room for "
            f"{settings['max_new_tokens']} new tokens and got what the context leaves."
        )
    if settings["prompts_skipped"]:
        notes.append(f"{settings['prompts_skipped']} prompts fill the context and were skipped.")
    return notes


def _divergence_note(result: Result) -> str:
    found = result.first_divergence
    assert found is not None
    return (
        f"{result.name}: differs from generate in {found.prompts} prompts, first in prompt "
        f"{found.prompt} at token {found.token}, where the target's two best logits are "
        f"{found.top2_margin:.2g} apart."
    )
