"""A picture of a benchmark: speedup per candidate, tokens per step by tree size."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from draftheads.infer.bench import BenchReport, Result, machine_line

COLOURS = ("#2f6fb0", "#d9822b", "#3a9a5b", "#a23b72", "#7a5fb5", "#6b6b2f")
PLAIN, MUTED = "#8a8f98", "#444444"


def plot(report: BenchReport, path: str | Path) -> None:
    """Write a PNG (or what the suffix of `path` says). Raises ImportError without matplotlib."""
    families: dict[str, list[Result]] = {}  # a head's name -> its trees
    for head in report.heads:
        families.setdefault(head.name.removesuffix(f"@{head.nodes}"), []).append(head)
    figure = new_figure(11, 2.6 + 0.38 * (1 + len(report.heads)))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _bar(left, report.plain, PLAIN)
    for colour, (name, results) in zip(cycle(COLOURS), families.items(), strict=False):
        for result in results:
            _bar(left, result, colour)
        sized = [result for result in results if result.nodes is not None]
        taus = [result.tokens_per_step for result in sized]
        right.plot([r.nodes for r in sized], taus, marker="o", label=name, color=colour)
    left.axvline(1.0, color=MUTED, linewidth=1, linestyle="--", zorder=0)
    left.invert_yaxis()
    left.margins(x=0.18)
    left.set_xlim(left=0.0)
    left.set_xlabel("speedup over transformers' generate (= 1), 95 % interval over prompts")
    right.axhline(1.0, color=MUTED, linewidth=1, linestyle="--", zorder=0)
    right.set(xlabel="draft nodes verified per step", xlim=(0.0, None), ylim=(0.0, None))
    right.set_ylabel("tokens per step (bonus token counted)")
    if families:
        right.legend(frameon=False, fontsize=9)
    tidy(left)
    tidy(right)
    settings = report.settings
    figure.suptitle(
        f"{settings['target']}: {settings['sampling']}, {settings['prompts']} prompts, "
        f"{settings['max_new_tokens']} new tokens",
        fontsize=11,
    )
    figure.supxlabel(machine_line(report.machine), fontsize=7.5, color=MUTED)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _bar(axes: Any, result: Result, colour: str) -> None:
    low, high = result.speedup_ci95
    # a bootstrap of few prompts may leave the point estimate outside by a hair
    error = [[max(0.0, result.speedup - low)], [max(0.0, high - result.speedup)]]
    bar = axes.barh(result.name, result.speedup, xerr=error, color=colour, capsize=3, height=0.62)
    axes.bar_label(bar, fmt="%.2f×", padding=6, fontsize=9)


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


def tidy(axes: Any) -> None:
    """Small letters, and no frame above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
