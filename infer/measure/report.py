"""What a bench measured: as tables on the terminal and in Markdown, as JSON, for model cards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.heads.files import write_text
from draftheads.heads.formats.hub import HeadFolder, record_measured
from draftheads.heads.tables import markdown_table
from draftheads.heads.terminal import SafeConsole
from draftheads.infer.measure.bench import BASELINES, COMPILED, BenchReport, Result
from draftheads.infer.measure.costs import too_slow
from draftheads.infer.race import GENERATE, PLAIN, machine_line

FACTS = (
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
"""Of a result, in config.json and model card."""
SETTINGS = ("sampling", "prompts", "max_new_tokens")
"""Of the bench, there."""


def measured_facts(report: BenchReport, name: str) -> dict[str, Any]:
    """The entries of a head's config.json and model card for the result with this name."""
    result = vars(report.result(name))
    facts = {key: result[key] for key in FACTS}
    settings = {key: report.settings[key] for key in SETTINGS}
    return {**facts, **settings, "machine": machine_line(report.machine)}


def write_cards(report: BenchReport, folders: Mapping[str, HeadFolder]) -> None:
    """Write the results of each head into its config.json and model card."""
    for name, folder in folders.items():
        results = [each.name for each in report.heads if f"{each.name}@".startswith(f"{name}@")]
        record_measured(folder.path, [measured_facts(report, each) for each in results])


def write_json(report: BenchReport, path: Path) -> None:
    """Write the report as JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(report), indent=2, allow_nan=False) + "\n")


def write_markdown(report: BenchReport, path: Path) -> None:
    """Write the tables for a README or a model card, atomically."""
    tables = [markdown_table(grid.columns, grid.rows, grid.texts) for grid in grids(report)]
    notes = [*too_slow_notes(report), *footnotes(report)]
    listed = "\n".join(f"- {note}" for note in notes)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n\n".join([f"**{title(report)}**", *tables, listed]) + "\n")


def title(report: BenchReport) -> str:
    """The target and the settings of a bench."""
    settings = report.settings
    batch = f", batches of {settings['batch']}" if settings["batch"] > 1 else ""
    return (
        f"{settings['target']}: {settings['sampling']}, {settings['prompts']} prompts{batch}, "
        f"{settings['max_new_tokens']} new tokens, seed {settings['seed']}"
    )


@dataclass(frozen=True)
class Grid:
    """A table. texts: number of columns, the first ones, that are no numbers."""

    columns: list[str]
    rows: list[list[str]]
    texts: int = 1


COLUMNS: dict[str, Callable[[Result], str]] = {
    "τ": lambda result: f"{result.tokens_per_step:.2f}" if result.steps else "",
    "tok/s": lambda result: f"{result.tokens_per_second:.0f}",
    "speedup": lambda result: f"{result.speedup:.2f}",
    "95 %": lambda result: _interval(result.speedup_ci95),
    "CPU": lambda result: f"{result.cpu_speedup:.2f}",
    "vs best": lambda result: f"{result.speedup_over_best:.2f}",
    "draft": lambda result: f"{result.draft_seconds * 1e3:.2f}" if result.steps else "",
    "verify": lambda result: f"{result.verify_seconds * 1e3:.2f}" if result.steps else "",
    "lossless": lambda result: {True: "yes", False: "NO", None: "n/a"}[result.lossless],
}
NARROW = {"vs best": "vs\nbest", "lossless": "loss-\nless"}  # for 80 characters


def _interval(bounds: list[float]) -> str:
    return "{:.2f}-{:.2f}".format(*bounds)


def grids(report: BenchReport) -> list[Grid]:
    """The tables that have rows."""
    tables = results_grid(report), category_grid(report)
    return [grid for grid in tables if grid.rows]


def results_grid(report: BenchReport) -> Grid:
    """One row per candidate, `generate` first."""
    generate = report.plain.baseline_tokens_per_second
    results = [report.plain, *report.heads]
    others = [result.tokens_per_second for result in results if result.name in BASELINES]
    over_best = f"{generate / max(generate, *others):.2f}"
    rows = [[GENERATE, "", f"{generate:.0f}", "1.00", "", "1.00", over_best, "", "", ""]]
    for result in results:
        rows.append([result.name, *[show(result) for show in COLUMNS.values()]])
    return Grid(["candidate", *COLUMNS], rows)


def category_grid(report: BenchReport) -> Grid:
    """The fastest tree of each head by category; no rows unless there are several categories."""
    rows = []
    for category, plain in report.plain.categories.items():
        heading = [category, str(plain.prompts)]
        for result in fastest(report):
            part = result.categories[category]
            tau = f"{part.tokens_per_step:.2f}" if result.steps else ""
            figures = [tau, f"{part.speedup:.2f}", _interval(part.speedup_ci95)]
            rows.append([*heading, result.name, *figures])
            heading = ["", ""]  # of the other heads of this category
    return Grid(["category", "prompts", "candidate", "τ", "speedup", "95 %"], rows, texts=3)


def families(report: BenchReport) -> dict[str, list[Result]]:
    """Name of a head, or of another drafter -> its results; without baselines."""
    results: dict[str, list[Result]] = {}
    for result in report.heads:
        if result.name not in BASELINES:
            name = result.name.removesuffix(COMPILED).partition("@")[0]
            results.setdefault(name, []).append(result)
    return results


def fastest(report: BenchReport) -> list[Result]:
    """The fastest result of each head."""
    return [max(results, key=lambda each: each.speedup) for results in families(report).values()]


def print_report(
    report: BenchReport, console: Console | None = None, *, explain: bool = False
) -> None:
    """Print the tables, and what was found. explain: all footnotes, not only a legend."""
    console = console or SafeConsole()
    console.print(title(report), style="italic", justify="center", markup=False, highlight=False)
    winner = best(report)
    for grid in grids(report):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for place, name in enumerate(grid.columns):
            if place < grid.texts:
                table.add_column(name, overflow="fold", min_width=min(len(name), 10))
            else:
                table.add_column(NARROW.get(name, name), justify="right", no_wrap=True)
        for row in grid.rows:
            table.add_row(*row, style=_style(row, winner))
        console.print(table, "")
    console.print(verdict(report), style="bold", markup=False, highlight=False)
    for note in too_slow_notes(report):
        console.print(note, style="yellow", markup=False, highlight=False)
    if report.plain.lossless_reason:
        console.print(report.plain.lossless_reason, markup=False, highlight=False)
    notes = "\n".join(footnotes(report))
    if not explain:
        notes = " ".join(["\n".join(legend(report)), MORE])
    console.print(notes, style="dim", markup=False, highlight=False)


MORE = "--explain: all notes, machine, command."


def _style(row: list[str], winner: Result | None) -> str | None:
    if "NO" in row:
        return "bold red"
    return "bold green" if winner and winner.name in row else None


def best(report: BenchReport) -> Result | None:
    """The fastest result with drafts, if any is faster than the best decoding without."""
    results = [result for results in families(report).values() for result in results]
    faster = [result for result in results if result.speedup_over_best > 1]
    return max(faster, key=lambda result: result.speedup, default=None)


def verdict(report: BenchReport) -> str:
    """What was found, in a sentence."""
    winner = best(report)
    if winner is None:
        return "Nothing here is faster than the best decoding without drafts."
    low, high = winner.speedup_ci95
    is_sure = min(low, winner.speedup_over_best_ci95[0]) > 1
    speed = "is" if is_sure else "may be"
    text = {
        True: "its text is the same, token for token",
        False: "ITS TEXT DIFFERS (--explain says where)",
        None: "its text is not judged",
    }[winner.lossless]
    return (
        f"{winner.name} {speed} {winner.speedup:.1f} times as fast as generate here ({low:.1f} to "
        f"{high:.1f}), {winner.speedup_over_best:.1f} times the best without drafts; {text}."
    )


def too_slow_notes(report: BenchReport) -> list[str]:
    """A line for each head whose fastest tree is slower than this engine without drafts."""
    dtype = getattr(torch, report.machine["dtype"])
    notes = []
    for result in fastest(report):
        is_compiled = result.name.endswith(COMPILED)
        plain = report.result(PLAIN + COMPILED if is_compiled else PLAIN)
        if result.steps and result.tokens_per_second < plain.tokens_per_second:
            break_even = result.step_seconds / plain.step_seconds
            if line := too_slow(result.tokens_per_step, break_even, dtype):
                notes.append(f"{result.name}: {line}")
    return notes


def footnotes(report: BenchReport) -> list[str]:
    """What a reader of these tables needs, the faults, and how to repeat the bench."""
    machine = f"machine: {machine_line(report.machine)}."
    command = f"command: {report.settings['command']}"
    interval = f"95 %: an interval over {report.settings['prompts']} prompts."
    return [*legend(report), interval, *_exceptions(report), machine, command]


def legend(report: BenchReport) -> list[str]:
    """What the columns of these tables are."""
    lines = [
        "τ: tokens per step. name@N: N draft nodes. plain: this engine without drafts.",
        "speedup, CPU (by CPU time): over generate. vs best: over the best undrafted.",
        "draft, verify: ms per step; of compiled steps, all of it is verify.",
    ]
    if not report.settings["compile"]:
        lines[-1] = "draft, verify: ms per step."
    return lines


def _exceptions(report: BenchReport) -> list[str]:
    """Outputs that differ or are not compared, and prompts that were cut or left out."""
    settings = report.settings
    lines = [report.plain.lossless_reason or "lossless: generate's output, token for token."]
    for result in (report.plain, *report.heads):
        if first := result.first_divergence:
            lines.append(
                f"{result.name}: differs from generate in {first.prompts} prompts, first in prompt "
                f"{first.prompt} at token {first.token}, where the target's top two logits are "
                f"{first.top2_margin:.2g} apart."
            )
    if settings["prompts_shortened"] or settings["prompts_skipped"]:
        lines.append(
            f"{settings['prompts_shortened']} prompts got fewer new tokens, for lack of context; "
            f"{settings['prompts_skipped']} prompts fill the context and were skipped."
        )
    if settings["batch"] > 1:
        lines.append("batches: each row is compared with generate of that prompt alone.")
    return lines
