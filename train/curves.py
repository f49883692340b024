"""A picture of a run: what its metrics.jsonl tells, in six panels.

Legend: K draft depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftheads.infer.plot import COLOURS, MUTED, PLAIN, new_figure, tidy

BLUE, ORANGE, _, ROSE = COLOURS[:4]
Line = dict[str, Any]


def draw_curves(metrics: Sequence[Line], best: int, title: str, path: Path) -> None:
    """Write a PNG to `path`, whole or not at all. metrics: as `read_metrics` gives them. best: the
    step of the best checkpoint. Raises ImportError without matplotlib.
    """
    figure = new_figure(13, 6.6)
    (loss, taus, depths), (rate, speed, last) = figure.subplots(2, 3)
    steps = [line for line in metrics if "loss" in line]
    judged = [line for line in metrics if "heldout_tokens_per_step" in line]
    found: Line = next((x["measured"] for x in judged if _decoded(x) and x["step"] == best), {})
    _curve(loss, steps, "loss", "training loss, per learned token")
    _skips(loss, [line["step"] for line in metrics if "skipped" in line])
    _taus(taus, judged, best)
    _depths(depths, steps, judged)
    _curve(rate, steps, "lr", "learning rate")
    _curve(speed, steps, "tokens_per_second", "trained tokens per second")
    if found.get("acceptance"):
        _acceptance(last, found["acceptance"], best)
    else:
        _curve(last, steps, "gradient_norm", "gradient norm, before clipping")
    for axes in (loss, taus, depths, rate, speed, last):
        tidy(axes)
        axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=10, fontweight="bold")
    end = max((line["step"] for line in metrics), default=1)
    for axes in (loss, taus, depths, rate, speed, *(() if found.get("acceptance") else (last,))):
        axes.axvline(best, color=ROSE, linewidth=1, linestyle=":", alpha=0.6, zorder=0)
        axes.set_xlim(0, end * 1.02)
        axes.set_xlabel("step")
    figure.suptitle(f"{title[0].upper()}{title[1:]}", fontsize=12)
    part = path.with_name(f".{path.name}")
    figure.savefig(part, format="png")
    part.replace(path)


def _curve(axes: Any, lines: Sequence[Line], key: str, title: str) -> None:
    axes.set_title(title, loc="left")
    if not lines:
        _nothing(axes, "nothing was logged")
        return
    axes.plot([line["step"] for line in lines], [line[key] for line in lines], color=BLUE, lw=1.6)
    lowest, highest = min(x[key] for x in lines), max(x[key] for x in lines)
    room = (highest - lowest) or abs(highest) or 1.0
    if lowest > 0.6 * highest:  # a curve far from zero shall not be pressed flat
        axes.set_ylim(lowest - 0.15 * room, highest + 0.1 * room)
    else:
        axes.set_ylim(0, 1.08 * highest if highest else 1.0)
    if highest >= 1000:
        axes.yaxis.set_major_formatter("{x:,.0f}")


def _skips(axes: Any, skipped: Sequence[int]) -> None:
    """A mark on the lower edge for every step that changed nothing."""
    if skipped:
        label = f"{len(skipped)} skipped"
        axes.plot(
            skipped,
            [0.02] * len(skipped),
            **{"marker": "x", "linestyle": "", "color": ROSE, "label": label},
            transform=axes.get_xaxis_transform(),
        )
        axes.legend(frameon=False, fontsize=9)


def _taus(axes: Any, judged: Sequence[Line], best: int) -> None:
    axes.set_title("tokens per step, bonus token counted", loc="left")
    if not judged:
        _nothing(axes, "heads were not judged")
        return
    simulated = {line["step"]: line["heldout_tokens_per_step"] for line in judged}
    measured = {x["step"]: x["measured"]["tokens_per_step"] for x in judged if _decoded(x)}
    axes.axhline(1.0, color=MUTED, linewidth=1, linestyle="--", zorder=0)
    axes.plot(*_points(simulated), marker="o", ms=4, color=PLAIN, lw=1.4, label="simulated")
    if measured:
        errors = [x["measured"]["standard_error"] for x in judged if _decoded(x)]
        look = {"marker": "o", "ms": 5, "color": ORANGE, "lw": 1.8, "elinewidth": 1, "capsize": 3}
        label = "by decoding, ± standard error"
        axes.errorbar(*_points(measured), yerr=errors, label=label, **look)
    if best in simulated:
        height = measured.get(best, simulated[best])
        axes.plot(
            [best],
            [height],
            **{"marker": "*", "ms": 15, "color": ROSE, "ls": "", "zorder": 5},
            label=f"best: step {best}",
        )
    axes.set_ylim(bottom=0)
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9, loc="lower right")


def _depths(axes: Any, steps: Sequence[Line], judged: Sequence[Line]) -> None:
    """One colour per depth, paler the deeper, named by what the last judgement found."""
    axes.set_title("best guess right, by depth", loc="left")
    if not judged:
        _nothing(axes, "heads were not judged")
        return
    shares = [x["heldout_top1"] for x in judged]
    depth, heights = len(shares[0]), _spread(shares[-1])
    for k in range(depth):
        strength = 1 - 0.7 * k / max(1, depth - 1)
        look: Line = {"color": BLUE, "alpha": strength}
        learned = {x["step"]: x["top1"][k] for x in steps if k < len(x["top1"])}
        axes.plot(*_points(learned), lw=0.9, label=None if k else "training batches", **look)
        heldout = [x["step"] for x in judged], [share[k] for share in shares]
        axes.plot(*heldout, "o", ms=5, label=None if k else "held out", **look)
        axes.annotate(
            f"{k + 1}: {shares[-1][k]:.2f}",
            (1.0, heights[k]),
            xycoords=("axes fraction", "data"),
            **{**look, "fontsize": 8, "alpha": max(0.55, strength), "va": "center"},
        )
    highest = max(max(map(max, shares)), *(max(x["top1"]) for x in steps), 0.1)
    axes.set_ylim(0, 1.15 * highest)
    axes.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)


def _acceptance(axes: Any, shares: Sequence[float], best: int) -> None:
    axes.set_title(f"drafts accepted, by depth (decoding, step {best})", loc="left")
    places = range(1, len(shares) + 1)
    axes.bar(places, shares, color=ORANGE, width=0.62)
    for place, share in zip(places, shares, strict=True):
        axes.annotate(
            f"{share:.0%}",
            (place, share),
            **{"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 8},
        )
    axes.set_xticks(list(places))
    axes.set_xlabel("draft tokens, at least")
    axes.set_ylim(0, 1.12 * max(shares))


def _spread(heights: Sequence[float]) -> list[float]:
    """Where names of lines may stand, so that none covers another; the order is kept."""
    gap = 0.06 * max(0.1, *heights)
    order = sorted(range(len(heights)), key=lambda k: heights[k])
    placed = list(heights)
    for lower, upper in zip(order, order[1:], strict=False):
        placed[upper] = max(placed[upper], placed[lower] + gap)
    lifted = (sum(placed) - sum(heights)) / len(heights)
    return [height - lifted for height in placed]


def _points(values: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())


def _decoded(line: Line) -> bool:
    return "measured" in line


def _nothing(axes: Any, text: str) -> None:
    axes.set_yticks([])
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", color=MUTED, fontsize=9)
