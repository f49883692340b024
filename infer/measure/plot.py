"""A bench as a picture: speedups, acceptance by depth, categories, and the fastest fixed tree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
DRAWN_NODES = 32  # more are not legible


def plot(report: BenchReport, path: Path) -> None:
    """Write a PNG, or the format of the suffix. Raises ImportError without matplotlib."""
    results = [report.plain, *report.heads]
    best = fastest(report)
    colours = {
        result.name: colour
        for family, colour in zip(families(report).values(), cycle(COLOURS), strict=False)
        for result in family
    }
    trees = [result for result in results if result.tree]
    heights = [1.3 + 0.3 * len(results)]  # inches of each row of panels
    if report.plain.categories:
        heights.append(2.6)
    if trees:
        drawn = max(trees, key=lambda result: result.speedup)
        spots = tree_spots(drawn_nodes(drawn))
        heights.append(0.8 + 0.28 * max(row for _, row in spots.values()))
    figure = new_figure(11, sum(heights) + 0.8)
    panels = figure.add_gridspec(len(heights), 2, width_ratios=(3, 2), height_ratios=heights)
    _draw_speedups(figure.add_subplot(panels[0, 0]), results, colours)
    _draw_depths(figure.add_subplot(panels[0, 1]), [each for each in best if each.steps], colours)
    if report.plain.categories:
        _draw_categories(figure.add_subplot(panels[1, :]), best or [report.plain], colours)
    if trees:
        _draw_tree(figure.add_subplot(panels[-1, :]), drawn, colours[drawn.name])
    figure.suptitle(title(report))
    figure.supxlabel(machine_line(report.machine), fontsize=7.5, color=MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_speedups(axes: Any, results: Sequence[Result], colours: Mapping[str, str]) -> None:
    for result in results:
        colour = colours.get(result.name, PALE)
        axes.barh(result.name, result.speedup, color=colour)
        label = f" {result.speedup:.2f}×"
        axes.annotate(label, (0, result.name), va="center", color="white")
        axes.hlines(result.name, *result.speedup_ci95, color=MUTED)
    axes.axvline(1.0, color=MUTED, linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("speedup over transformers' generate, 95 % interval over prompts")
    tidy(axes)


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


def _draw_tree(axes: Any, result: Result, colour: str) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("", ["white", colour])
    nodes = drawn_nodes(result)
    spots = tree_spots(nodes)
    for path, share in nodes.items():
        ends = zip(spots[path[:-1]], spots[path], strict=True)
        axes.plot(*ends, color=colour, linewidth=0.6 + 4 * share, alpha=0.5, zorder=1)
    for path, share in {(): 1.0, **nodes}.items():
        disc = {"color": shades(share), "edgecolors": colour, "linewidths": 0.8}
        axes.scatter(*spots[path], s=260, zorder=2, **disc)
        label = f"{100 * share:.0f}" if path else "root"
        ink = "white" if share > 0.55 else MUTED
        axes.annotate(label, spots[path], ha="center", va="center", fontsize=6.5, color=ink)
    which = f"{len(nodes)} of {len(result.tree or ())} nodes of {result.name}"
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
    previous: tuple[int, ...] = ()
    for path in sorted(paths):
        if path[:-1] != previous:  # no first child: a new branch
            row += 1
        spots[path] = len(path), row
        previous = path
    return spots


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure, in inches. Raises ImportError without matplotlib."""
    with extras():
        from matplotlib.figure import Figure
    # no pyplot: it would choose a global backend
    return Figure(figsize=(width, height), layout="constrained", dpi=150)


def tidy(axes: Any) -> None:
    """Remove the frame at the top and right."""
    axes.spines[["top", "right"]].set_visible(False)
