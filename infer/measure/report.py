"""What a bench measured: as tables on the terminal and in markdown, as JSON, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from draftheads.heads.files import write_text
from draftheads.heads.terminal import SafeConsole
from draftheads.infer.measure.bench import BASELINES, COMPILED, BenchReport, Result
from draftheads.infer.measure.costs import too_slow
from draftheads.infer.race import GENERATE, PLAIN, machine_line

FACTS = ["nodes", "lossless", "tokens_per_step", "acceptance_by_depth", "speedup", "speedup_ci95"]
FACTS += ["speedup_over_best", "tokens_per_second", "baseline_tokens_per_second"]
FACTS += ["plain_tokens_per_second"]


def measured_facts(report: BenchReport, name: str) -> dict[str, Any]:
    """The entries of a head's config.json and model card for the result with this name."""
    result = vars(report.result(name))
    return {
        **{key: result[key] for key in FACTS},
        **{key: report.settings[key] for key in ("sampling", "prompts", "max_new_tokens")},
        "machine": machine_line(report.machine),
    }


def write_json(report: BenchReport, path: str | Path) -> None:
    """Write the report as JSON, atomically."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), json.dumps(asdict(report), indent=2, allow_nan=False) + "\n")


def write_markdown(report: BenchReport, path: str | Path) -> None:
    """Write the tables for a README or a model card, atomically."""
    parts = [f"**{title(report)}**"]
    for grid in grids(report):
        ruled = [grid.columns, ["---"] * grid.texts + ["---:"] * (len(grid.columns) - grid.texts)]
        lines = [f"| {' | '.join(row)} |" for row in [*ruled, *grid.rows]]
        parts.append("\n".join(lines))
    parts.append("\n".join(f"- {note}" for note in [*too_slow_notes(report), *footnotes(report)]))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(path), "\n\n".join(parts) + "\n")


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
    "95 %": lambda result: "{:.2f}-{:.2f}".format(*result.speedup_ci95),
    "CPU": lambda result: f"{result.cpu_speedup:.2f}",
    "vs best": lambda result: f"{result.speedup_over_best:.2f}",
    "draft": lambda result: f"{result.draft_seconds * 1e3:.2f}" if result.steps else "",
    "verify": lambda result: f"{result.verify_seconds * 1e3:.2f}" if result.steps else "",
    "lossless": lambda result: {True: "yes", False: "NO", None: "n/a"}[result.lossless],
}
NARROW = {"vs best": "vs\nbest", "lossless": "loss-\nless"}  # for 80 characters


def grids(report: BenchReport) -> list[Grid]:
    """The tables that have rows."""
    made = results_grid(report), category_grid(report), chain_grid(report)
    return [grid for grid in made if grid.rows]


def results_grid(report: BenchReport) -> Grid:
    """One row per candidate, `generate` first."""
    generate = report.plain.baseline_tokens_per_second
    results = [report.plain, *report.heads]
    others = [result.tokens_per_second for result in results if result.name in BASELINES]
    over_best = f"{generate / max(generate, *others):.2f}"
    rows = [[GENERATE, "", f"{generate:.0f}", "1.00", "", "1.00", over_best, "", "", ""]]
    rows += [[result.name, *[show(result) for show in COLUMNS.values()]] for result in results]
    return Grid(["candidate", *COLUMNS], rows)


def category_grid(report: BenchReport) -> Grid:
    """The fastest tree of each head by category; no rows unless there are several categories."""
    rows = []
    for category, plain in report.plain.categories.items():
        named = [category, str(plain.prompts)]
        for result in fastest(report):
            found = result.categories[category]
            interval = "{:.2f}-{:.2f}".format(*found.speedup_ci95)
            tau = f"{found.tokens_per_step:.2f}" if result.steps else ""
            rows.append([*named, result.name, tau, f"{found.speedup:.2f}", interval])
            named = ["", ""]
    return Grid(["category", "prompts", "candidate", "τ", "speedup", "95 %"], rows, texts=3)


def chain_grid(report: BenchReport) -> Grid:
    """What the chain model says of each head."""
    rows = []
    for result in report.heads:
        if m := result.analysis:
            figures = f"{m.alpha:.2f} {m.gamma} {m.c:.2f} {m.predicted:.2f} {m.measured:.2f}"
            rows.append([result.name, *figures.split(), str(m.best_gamma)])
    return Grid(["chain model", "α", "γ", "c", "predicted", "measured", "best γ"], rows)


def families(report: BenchReport) -> dict[str, list[Result]]:
    """Name of a head, or of another drafter -> its results; without baselines."""
    found: dict[str, list[Result]] = {}
    for result in report.heads:
        if result.name not in BASELINES:
            name = result.name.removesuffix(COMPILED.format("")).partition("@")[0]
            found.setdefault(name, []).append(result)
    return found


def fastest(report: BenchReport) -> list[Result]:
    """The fastest result of each head."""
    return [max(results, key=lambda r: r.speedup) for results in families(report).values()]


def print_report(report: BenchReport, console: Console | None = None) -> None:
    """Print the tables and their footnotes."""
    console = console or SafeConsole()
    console.print(title(report), style="italic", justify="center", markup=False, highlight=False)
    for grid in grids(report):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for place, name in enumerate(grid.columns):
            if place < grid.texts:
                table.add_column(name, overflow="fold", min_width=min(len(name), 10))
            else:
                table.add_column(NARROW.get(name, name), justify="right", no_wrap=True)
        for row in grid.rows:
            table.add_row(*row, style="bold red" if "NO" in row else None)
        console.print(table, "")
    for note in too_slow_notes(report):
        console.print(note, style="yellow", markup=False, highlight=False)
    console.print("\n".join(footnotes(report)), style="dim", markup=False, highlight=False)


def too_slow_notes(report: BenchReport) -> list[str]:
    """A line for each head whose fastest tree is slower than this engine without drafts."""
    dtype = getattr(torch, report.machine["dtype"])
    notes = []
    for result in fastest(report):
        name = COMPILED.format(PLAIN) if result.name.endswith(COMPILED.format("")) else PLAIN
        plain = report.result(name)
        if result.steps and result.tokens_per_second < plain.tokens_per_second:
            break_even = step_seconds(result) / step_seconds(plain)
            if line := too_slow(result.tokens_per_step, break_even, dtype):
                notes.append(f"{result.name}: {line}")
    return notes


def step_seconds(result: Result) -> float:
    """A mean step."""
    return result.draft_seconds + result.verify_seconds


def footnotes(report: BenchReport) -> list[str]:
    """Explanations of the tables' numbers."""
    settings, plain = report.settings, report.plain
    notes = [
        "generate: transformers' own. plain: this engine without a drafter. name@N: N draft nodes.",
        "τ: tokens per target forward, bonus token counted. draft, verify: milliseconds per step.",
        "speedup: tokens per second over generate's, prompt included; 95 % bootstrap interval over "
        f"{settings['prompts']} prompts, runs interleaved in one process. CPU: speedup by the CPU "
        "time of all threads. vs best: over the fastest of generate and plain, compiled or not.",
        "α: acceptance per draft level. γ: levels. c: time per level over a plain step. predicted, "
        "measured: times plain's speed, see docs/tuning.md.",
        plain.lossless_reason or "lossless: all output equals generate's, token for token.",
    ]
    for result in (plain, *report.heads):
        if found := result.first_divergence:
            notes.append(
                f"{result.name}: differs from generate in {found.prompts} prompts, first in prompt "
                f"{found.prompt} at token {found.token}, where the target's top two logits are "
                f"{found.top2_margin:.2g} apart."
            )
    if settings["prompts_shortened"] or settings["prompts_skipped"]:
        notes.append(
            f"{settings['prompts_shortened']} prompts got fewer new tokens, for lack of context; "
            f"{settings['prompts_skipped']} prompts fill the context and were skipped."
        )
    if settings["batch"] > 1:
        notes.append("batches: each row is compared with generate of that prompt alone.")
    if settings["compile"]:
        notes.append(
            "compiled: by torch.compile, before the measurement (generate: with a static cache); a "
            "step is one function, whose time is under verify."
        )
    return [*notes, f"machine: {machine_line(report.machine)}.", f"command: {settings['command']}"]


COLOURS = ("#2f6fb0", "#d9822b", "#3a9a5b", "#a23b72", "#7a5fb5", "#6b6b2f")
PALE, MUTED = "#8a8f98", "#444444"
DRAWN_NODES = 32  # more are not legible


def plot(report: BenchReport, path: str | Path) -> None:
    """Write a PNG, or the format of the suffix. Raises ImportError without matplotlib."""
    best = fastest(report)
    colours: dict[str, str] = {}
    for results, colour in zip(families(report).values(), cycle(COLOURS), strict=False):
        colours |= dict.fromkeys((result.name for result in results), colour)
    trees = [result for result in report.heads if result.tree]
    heights = [1.3 + 0.3 * (1 + len(report.heads))]
    heights += [2.6] * bool(report.plain.categories)
    drawn = max(trees, key=lambda result: result.speedup, default=None)
    if drawn:
        rows = [row for _, row in tree_spots(drawn_nodes(drawn)).values()]
        heights.append(0.8 + 0.28 * max(rows))
    figure = new_figure(11, sum(heights) + 0.8)
    panels = figure.add_gridspec(len(heights), 2, width_ratios=(3, 2), height_ratios=heights)
    _draw_speedups(figure.add_subplot(panels[0, 0]), [report.plain, *report.heads], colours)
    _draw_depths(figure.add_subplot(panels[0, 1]), [r for r in best if r.steps], colours)
    if report.plain.categories:
        _draw_categories(figure.add_subplot(panels[1, :]), best or [report.plain], colours)
    if drawn:
        _draw_tree(figure.add_subplot(panels[-1, :]), drawn, colours[drawn.name])
    figure.suptitle(title(report))
    figure.supxlabel(machine_line(report.machine), fontsize=7.5, color=MUTED)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_speedups(axes: Any, results: Sequence[Result], colours: Mapping[str, str]) -> None:
    names = [result.name for result in results]
    shown = [colours.get(name, PALE) for name in names]
    axes.barh(names, [result.speedup for result in results], color=shown)
    for name, result in zip(names, results, strict=True):
        axes.annotate(f" {result.speedup:.2f}×", (0, name), va="center", color="white")
    axes.hlines(names, *zip(*[r.speedup_ci95 for r in results], strict=True), color=MUTED)
    axes.axvline(1.0, color=MUTED, linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("speedup over transformers' generate, 95 % interval over prompts")
    tidy(axes)


def _draw_depths(axes: Any, results: Sequence[Result], colours: Mapping[str, str]) -> None:
    for result in results:
        depths = range(1, len(result.acceptance_by_depth) + 1)
        label = f"{result.name}, τ {result.tokens_per_step:.2f}"
        shares, colour = result.acceptance_by_depth, colours[result.name]
        axes.plot(depths, shares, marker="o", markersize=4, label=label, color=colour)
    axes.set(xlabel="depth of the draft token", ylabel="share of steps accepting it", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if results:
        axes.legend(frameon=False, fontsize=8)
    tidy(axes)


def _draw_categories(axes: Any, results: Sequence[Result], colours: Mapping[str, str]) -> None:
    width = 0.8 / len(results)
    names = [f"{name} ({each.prompts})" for name, each in results[0].categories.items()]
    for place, result in enumerate(results):
        found = result.categories.values()
        x = [group + (place - (len(results) - 1) / 2) * width for group in range(len(names))]
        colour = colours.get(result.name, PALE)
        axes.bar(x, [each.speedup for each in found], 0.92 * width, color=colour)
        axes.vlines(x, *zip(*[each.speedup_ci95 for each in found], strict=True), color=MUTED)
    axes.axhline(1.0, color=MUTED, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(names)), names, rotation=20 * (len(names) > 6), ha="center")
    axes.set_ylabel("speedup")
    axes.set_title("by category (prompts), 95 % interval", fontsize=10)
    tidy(axes)


def _draw_tree(axes: Any, result: Result, colour: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shares, spots = {(): 1.0, **drawn_nodes(result)}, tree_spots(drawn_nodes(result))
    for path in shares:
        if path:
            ends = zip(spots[path[:-1]], spots[path], strict=True)
            axes.plot(*ends, color=colour, linewidth=0.6 + 4 * shares[path], alpha=0.5, zorder=1)
    filling = LinearSegmentedColormap.from_list("", ["white", colour])(list(shares.values()))
    places = zip(*[spots[path] for path in shares], strict=True)
    axes.scatter(*places, s=260, color=filling, edgecolors=colour, linewidths=0.8, zorder=2)
    style = {"ha": "center", "va": "center", "fontsize": 6.5}
    for path, share in shares.items():
        ink = "white" if share > 0.55 else MUTED
        axes.annotate(f"{100 * share:.0f}" if path else "root", spots[path], color=ink, **style)
    which = f"{len(shares) - 1} of {len(result.tree or ())} nodes of {result.name}"
    axes.set_title(f"{which}: % of steps that accepted each; best ranks on top", fontsize=10)
    axes.margins(0.03, 0.5 / (1 + max(row for _, row in spots.values())))
    axes.invert_yaxis()
    axes.axis("off")


def drawn_nodes(result: Result) -> dict[tuple[int, ...], float]:
    """The DRAWN_NODES most accepted paths of a tree, and how often they were."""
    nodes = dict(zip(map(tuple, result.tree or ()), result.acceptance_by_node or (), strict=True))
    best = sorted(nodes, key=lambda path: (-nodes[path], len(path), path))
    return {path: nodes[path] for path in best[:DRAWN_NODES]}


def tree_spots(paths: Collection[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[int, int]]:
    """Where to draw the root () and these paths: (depth, row). Each leaf has a row, in the order of
    ranks, and a node has the row of its best child.
    """
    spots: dict[tuple[int, ...], tuple[int, int]] = {(): (0, 0)}
    row = 0
    before: tuple[int, ...] = ()
    for path in sorted(paths):
        row += path[:-1] != before
        spots[path] = len(path), row
        before = path
    return spots


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure, in inches. Raises ImportError without matplotlib."""
    try:  # an optional dependency
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib; pip install matplotlib, or leave out the plot"
        ) from error
    # no pyplot: it would choose a global backend
    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def tidy(axes: Any) -> None:
    """Remove the frame at the top and right."""
    axes.spines[["top", "right"]].set_visible(False)
