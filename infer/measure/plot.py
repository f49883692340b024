"""A bench as a picture: speedups, acceptance by depth, and categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from draftheads.extras import extras
from draftheads.infer.measure.bench import BenchReport, Result
from draftheads.infer.measure.report import families, fastest, title
from draftheads.infer.race import machine_line

COLOURS = ("#2f6fb0", "#d9822b", "#3a9a5b", "#a23b72", "#7a5fb5", "#6b6b2f")
PALE = "#8a8f98"  # of baselines
MUTED = "#444444"  # of lines and text


def plot(report: BenchReport, path: Path) -> None:
    """Write a PNG, or the format of the suffix. Raises ImportError without matplotlib."""
    results = [report.plain, *report.heads]
    best = fastest(report)
    colours = {
        result.name: colour
        for family, colour in zip(families(report).values(), cycle(COLOURS), strict=False)
        for result in family
    }
    heights = [1.3 + 0.3 * len(results)]  # inches of each row of panels
    if report.plain.categories:
        heights.append(2.6)
    figure = new_figure(11, sum(heights) + 0.8)
    panels = figure.add_gridspec(len(heights), 2, width_ratios=(3, 2), height_ratios=heights)
    axes: Any = figure.add_subplot(panels[0, 0])
    for result in results:
        axes.barh(result.name, result.speedup, color=colours.get(result.name, PALE))
        label = f" {result.speedup:.2f}×"
        axes.annotate(label, (0, result.name), va="center", color="white")
        axes.hlines(result.name, *result.speedup_ci95, color=MUTED)
    axes.axvline(1.0, color=MUTED, linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("speedup over transformers' generate, 95 % interval over prompts")
    tidy(axes)
    _draw_depths(figure.add_subplot(panels[0, 1]), [each for each in best if each.steps], colours)
    if report.plain.categories:
        _draw_categories(figure.add_subplot(panels[1, :]), best or [report.plain], colours)
    figure.suptitle(title(report))
    figure.supxlabel(machine_line(report.machine), fontsize=7.5, color=MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_depths(axes: Any, results: Sequence[Result], colours: Mapping[str, str]) -> None:
    for result in results:
        shares = result.acceptance_by_depth
        depths = range(1, len(shares) + 1)
        label = f"{result.name}, τ {result.tokens_per_step:.2f}"
        colour = colours[result.name]
        axes.plot(depths, shares, marker="o", markersize=4, label=label, color=colour)
    axes.set(xlabel="depth of the draft token", ylabel="share of steps accepting it", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if results:
        axes.legend(frameon=False, fontsize=8)
    tidy(axes)


def _draw_categories(axes: Any, results: Sequence[Result], colours: Mapping[str, str]) -> None:
    width = 0.8 / len(results)
    labels = [f"{name} ({each.prompts})" for name, each in results[0].categories.items()]
    for place, result in enumerate(results):
        shift = (place - (len(results) - 1) / 2) * width
        colour = colours.get(result.name, PALE)
        for group, part in enumerate(result.categories.values()):
            axes.bar(group + shift, part.speedup, 0.92 * width, color=colour)
            axes.vlines(group + shift, *part.speedup_ci95, color=MUTED)
    axes.axhline(1.0, color=MUTED, linestyle="--", linewidth=1)
    slant = 20 if len(labels) > 6 else 0  # degrees
    axes.set_xticks(range(len(labels)), labels, rotation=slant, ha="center")
    axes.set_ylabel("speedup")
    axes.set_title("by category (prompts), 95 % interval", fontsize=10)
    tidy(axes)


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure, in inches. Raises ImportError without matplotlib."""
    with extras():
        from matplotlib.figure import Figure
    # no pyplot: it would choose a global backend
    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def tidy(axes: Any) -> None:
    """Remove the frame at the top and right."""
    axes.spines[["top", "right"]].set_visible(False)
