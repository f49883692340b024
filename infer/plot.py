"""A picture of a benchmark: speedup per contestant, tokens per step by tree size."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from draftheads.infer.bench import BenchReport, Result, machine_line

COLOURS = ("#2f6fb0", "#d9822b", "#3a9a5b", "#a23b72", "#7a5fb5", "#6b6b2f")
PLAIN, MUTED = "#8a8f98", "#444444"


def plot(report: BenchReport, path: str | Path) -> None:
    """Write a PNG (or what the suffix of `path` says). Raises ImportError without matplotlib."""
    rows = [report.plain, *report.heads]
    figure = new_figure(11, 2.6 + 0.38 * len(rows))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    families = dict.fromkeys(_family(head) for head in report.heads)
    colours = dict(zip(families, cycle(COLOURS), strict=False))
    _speedups(left, rows, colours)
    _taus(right, report.heads, colours)
    settings = report.settings
    figure.suptitle(
        f"{settings['target']}: {settings['sampling']}, {settings['prompts']} prompts, "
        f"{settings['max_new_tokens']} new tokens",
        fontsize=11,
    )
    figure.supxlabel(machine_line(report.machine), fontsize=7.5, color=MUTED)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib Figure, in inches. Raises ImportError without matplotlib."""
    try:  # an extra: people who only decode do not need it
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib; pip install matplotlib, or leave out the plot"
        ) from error
    # a Figure of its own, with its own canvas: no pyplot, no global backend is touched
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    return figure


def _speedups(axes: Any, rows: list[Result], colours: dict[str, str]) -> None:
    places = range(len(rows))
    speeds = [row.speedup for row in rows]
    # a bootstrap of few prompts may leave the point estimate outside by a hair
    below = [max(0.0, row.speedup - row.speedup_ci95[0]) for row in rows]
    above = [max(0.0, row.speedup_ci95[1] - row.speedup) for row in rows]
    bars = [PLAIN, *(colours[_family(row)] for row in rows[1:])]
    axes.axvline(1.0, color=MUTED, linewidth=1, linestyle="--", zorder=0)
    axes.barh(places, speeds, xerr=(below, above), color=bars, capsize=3, height=0.62)
    for place, row in zip(places, rows, strict=True):
        end = max(row.speedup, row.speedup_ci95[1])
        axes.annotate(
            f"{row.speedup:.2f}×",
            (end, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    axes.set_yticks(list(places), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(1.0, *(max(row.speedup, row.speedup_ci95[1]) for row in rows)))
    axes.set_xlabel("speedup over transformers' generate (= 1), 95 % interval over prompts")
    tidy(axes)


def _taus(axes: Any, heads: list[Result], colours: dict[str, str]) -> None:
    lines: dict[str, list[Result]] = {}
    for head in heads:
        if head.nodes is not None:
            lines.setdefault(_family(head), []).append(head)
    axes.axhline(1.0, color=MUTED, linewidth=1, linestyle="--", zorder=0)
    for name, results in lines.items():
        nodes = [result.nodes for result in results]
        taus = [result.tokens_per_step for result in results]
        axes.plot(nodes, taus, marker="o", label=name, color=colours[name])
    if lines:
        axes.legend(frameon=False, fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("draft nodes verified per step")
    axes.set_ylabel("tokens per step (bonus token counted)")
    tidy(axes)


def _family(result: Result) -> str:
    """The head's name, whatever the size of its tree."""
    return result.name.removesuffix(f"@{result.nodes}")


def tidy(axes: Any) -> None:
    """Small letters, and no frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
