"""What a run's report says in words, of its metrics alone. Advice is for `draftheads doctor`.

Legend: a point is (step, tokens per step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from draftheads.heads.hub import read_config, step_folders
from draftheads.heads.tree import DynamicTree, tree_from_json
from draftheads.infer.plot import COLOURS, MUTED, PLAIN, new_figure, tidy
from draftheads.train.checkpoint import BEST, STATE, TRAINER, RunState, read_state
from draftheads.train.evaluate import Drift
from draftheads.train.progress import METRICS, read_metrics
from draftheads.train.recipe import EvalChoices

LogLine = dict[str, Any]
Point = tuple[int, float]


def remarks(metrics: Sequence[LogLine], best: RunState) -> str:
    """Whether it was still learning, what the loss would have chosen, how far training and held-out
    documents are apart, how deep drafts are accepted.

    Tokens per step are those of decoding, or where nothing was decoded simulated ones.
    """
    judged = [line for line in metrics if "heldout_tokens_per_step" in line]
    decoded = [line for line in judged if "measured" in line]
    points = [(x["step"], x["measured"]["tokens_per_step"]) for x in decoded]
    points = points or [(x["step"], x["heldout_tokens_per_step"]) for x in judged]
    said = [_trend(points, best), _by_loss(metrics, points, best), _apart(metrics, best)]
    if best.measured and (accepted := best.measured["acceptance"]):
        said.append(
            f"{accepted[0]:.0%} of the steps of decoding had a draft accepted, {accepted[-1]:.0%} "
            f"had {len(accepted)}."
        )
    return "\n".join(f"* {each}" for each in said if each) or "Nothing: heads were not judged."


def losses_until(metrics: Sequence[LogLine], step: int) -> list[float]:
    """The training losses that were logged up to `step`."""
    return [line["loss"] for line in metrics if "loss" in line and line["step"] <= step]


def _trend(points: Sequence[Point], best: RunState) -> str:
    taus = dict(points)
    if best.step not in taus:
        return ""
    if len(points) == 1:
        return "Judged once, so whether it was still learning is not known (`eval.every`)."
    (first, lowest), (last, newest) = points[0], points[-1]
    error = f" (± {best.measured['standard_error']:.2f})" if best.measured else ""
    rise = f"from {lowest:.2f} tokens per step at step {first:,} to {taus[best.step]:.2f}{error}"
    if best.step != last:
        after = sum(step > best.step for step, _ in points)
        return (
            f"It came {rise} at step {best.step:,}, the best; of the {after} judgements after it "
            f"the last found {newest:.2f}."
        )
    step, tau = max((p for p in points[:-1] if p[0] <= 0.75 * last), default=points[0])
    return f"It came {rise} at its end, {newest - tau:.2f} of that since step {step:,}."


def _by_loss(metrics: Sequence[LogLine], points: Sequence[Point], best: RunState) -> str:
    """Of the judged steps."""
    known = [(losses_until(metrics, step), step, tau) for step, tau in points]
    losses = [(losses[-1], -step, tau) for losses, step, tau in known if losses]
    if len(losses) < 2 or best.recipe.measure == "loss":
        return ""
    _, step, tau = min(losses)
    if -step == best.step:
        return "The training loss was the lowest there too."
    return f"By training loss step {-step:,} would have been the best, with {tau:.2f}."


def _apart(metrics: Sequence[LogLine], best: RunState) -> str:
    """What the head knows by heart does not help elsewhere."""
    until = [line for line in metrics if line["step"] <= best.step]
    learned = next((line["top1"][0] for line in reversed(until) if "top1" in line), None)
    found = next((x["heldout_top1"][0] for x in reversed(until) if "heldout_top1" in x), None)
    if learned is None or found is None:
        return ""
    return (
        f"At depth 1 the best guess was right for {learned:.0%} of the tokens of the last training "
        f"batches and for {found:.0%} of held-out ones."
    )


# A picture of a run: what its metrics.jsonl tells, in six panels.
#
# Legend: K draft depth.


BLUE, ORANGE, _, ROSE = COLOURS[:4]


def draw_curves(metrics: Sequence[LogLine], best: int, title: str, path: Path) -> None:
    """Write a PNG to `path`, whole or not at all. metrics: as `read_metrics` gives them. best: the
    step of the best checkpoint. Raises ImportError without matplotlib.
    """
    figure = new_figure(13, 6.6)
    (loss, taus, depths), (rate, speed, last) = figure.subplots(2, 3)
    steps = [line for line in metrics if "loss" in line]
    judged = [line for line in metrics if "heldout_tokens_per_step" in line]
    found: LogLine = next((x["measured"] for x in judged if _decoded(x) and x["step"] == best), {})
    _curve(loss, steps, "loss", "training loss, per learned token")
    _skips(loss, [line["step"] for line in metrics if "skipped" in line])
    _taus(taus, judged, best)
    _last_depths(depths, steps, judged)
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


def _curve(axes: Any, lines: Sequence[LogLine], key: str, title: str) -> None:
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


def _taus(axes: Any, judged: Sequence[LogLine], best: int) -> None:
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


def _last_depths(axes: Any, steps: Sequence[LogLine], judged: Sequence[LogLine]) -> None:
    """One colour per depth, paler the deeper, named by what the last judgement found."""
    axes.set_title("best guess right, by depth", loc="left")
    if not judged:
        _nothing(axes, "heads were not judged")
        return
    shares = [x["heldout_top1"] for x in judged]
    depth, heights = len(shares[0]), _spread(shares[-1])
    for k in range(depth):
        strength = 1 - 0.7 * k / max(1, depth - 1)
        look: LogLine = {"color": BLUE, "alpha": strength}
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


def _decoded(line: LogLine) -> bool:
    return "measured" in line


def _nothing(axes: Any, text: str) -> None:
    axes.set_yticks([])
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", color=MUTED, fontsize=9)


# The report of a run: report.md and its curves, made of metrics.jsonl and the checkpoints alone;
# `draftheads report RUN` makes it again.


REPORT, CURVES = "report.md", "report.png"
MEASURES = {
    "tokens_per_step": "tokens per step of decoding",
    "tokens_per_second": "tokens per second of decoding, over plain decoding's",
    "simulated": "simulated tokens per step",
    "loss": "training loss",
}
MOST_ROWS = 24
"""Of the table of judgements, besides the best; a longer run shows the newest."""


def write_report(output: Path) -> Path:
    """Write a run's report.md and, with matplotlib, its curves; returns the former's path.

    Raises ValueError for a folder without checkpoints.
    """
    state, best = _states(output)
    metrics = read_metrics(output) if (output / METRICS).is_file() else []
    config = read_config(output / f"step-{best.step:06d}")
    target = Path(config["draftheads"]["target"]["name"])
    shown = target.name if target.is_absolute() else target
    name = f"{config['draftheads']['kind']} heads for {shown}"
    try:
        draw_curves(metrics, best.step, name, output / CURVES)
        picture = f"![curves of this run]({CURVES})"
    except ImportError as error:  # matplotlib is an extra
        (output / CURVES).unlink(missing_ok=True)
        picture = f"No curves: {error}."
    sections = [
        f"# {name[0].upper()}{name[1:]}",
        _summary(state, best, config, metrics),
        picture,
        "## What it shows\n\n" + remarks(metrics, best),
        "## Judged on held-out documents\n\n" + _judged(metrics, best, config),
        "## By depth\n\n" + _depths(best, config),
        "## Tree\n\n" + _tree(config),
        "## Skipped steps\n\n" + _skipped(metrics),
        "## Use\n\n" + _use(output, state),
        "## Recipe\n\n```yaml\n"
        + yaml.safe_dump(state.recipe.model_dump(mode="json"), sort_keys=False).strip()
        + "\n```",
        "## Made with\n\n" + _table(("", ""), [*state.versions.items(), *_made(config)]),
    ]
    path, part = output / REPORT, output / f".{REPORT}"
    part.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def _states(output: Path) -> tuple[RunState, RunState]:
    """Of the newest checkpoint and of the best one."""
    steps = [step for step in step_folders(output) if (step / TRAINER / STATE).is_file()]
    if not steps:
        raise ValueError(f"{output}: expected a training run with step-* folders, found none")
    best = output / BEST
    return read_state(steps[-1]), read_state(best.resolve() if best.is_dir() else steps[-1])


def _summary(state: RunState, best: RunState, config: LogLine, metrics: Sequence[LogLine]) -> str:
    training = config["draftheads"]["training"]
    data, measured = training["data"], best.measured
    ended = "ended early by `eval.patience`" if state.exhausted else "trained to the end"
    if state.step < state.steps and not state.exhausted:
        ended = "not finished"
    taus = f"{best.tokens_per_step:.2f} simulated"
    if measured:
        taus = (
            f"**{measured['tokens_per_step']:.2f}** ± {measured['standard_error']:.2f} measured by "
            f"decoding ({taus}), "
            f"{measured['speedup']:.2f} times as fast as decoding without heads"
        )
    rows = [
        ("trained", f"{state.step:,} of {state.steps:,} steps, {ended}"),
        ("on", f"{state.tokens:,} tokens, in {_duration(state.seconds)} on {training['hardware']}"),
        ("data", f"{data['documents']:,} documents, {data['learned_tokens']:,} learned tokens"),
        ("best", f"step {best.step:,}, by {MEASURES[state.recipe.measure]}"),
        ("tokens per step", taus),
        ("training loss", _losses(metrics, best, state)),
    ]
    if best.drift:
        rows.append(("adapter", f"{Drift(**best.drift)} (KL)"))
    return _table(("", ""), rows)


def _losses(metrics: Sequence[LogLine], best: RunState, state: RunState) -> str:
    """Means over the steps of a log line, as those of single steps are noisy."""
    losses = losses_until(metrics, state.step)
    if not (until := losses_until(metrics, best.step)):
        return f"{_number(best.loss, 4)} in the best step, {_number(state.loss, 4)} in the last"
    return f"{losses[0]:.4f} at first, {until[-1]:.4f} at the best step, {losses[-1]:.4f} at last"


def _judged(metrics: Sequence[LogLine], best: RunState, config: LogLine) -> str:
    rows: list[tuple[str, ...]] = []
    loss, adapted = None, best.drift is not None
    for line in metrics:
        loss = line.get("loss", loss)
        if "heldout_tokens_per_step" in line:
            found = line.get("measured", {})
            rows.append(
                (
                    f"{line['step']:,}" + (" (best)" if line["step"] == best.step else ""),
                    _number(loss, 4),
                    _number(line["heldout_tokens_per_step"]),
                    _tau(found),
                    _number(found.get("speedup")),
                    *([f"{line['drift']['agreement']:.2%}"] if adapted else []),
                )
            )
    older, newest = rows[:-MOST_ROWS], rows[-MOST_ROWS:]
    shown = [*(row for row in older if "best" in row[0]), *newest]
    cut = f"\n\nThe newest of {len(rows)} and the best; all are in {METRICS}." if older else ""
    titles = (
        "step",
        "training loss",
        "simulated tokens per step",
        "by decoding",
        "times plain decoding",
        *(["first choice untouched"] if adapted else []),
    )
    return (
        (_how(best.measured, best.recipe.eval) if best.measured else "")
        + _table(titles, shown)
        + cut
    )


def _how(measured: LogLine, judge: EvalChoices) -> str:
    sampling = f"temperature {judge.temperature}" if judge.temperature else "greedy"
    return (
        f"Decoded: {measured['prompts']} held-out prompts, {judge.new_tokens} new tokens each, "
        f"{sampling}. Tokens per step count the target's own token; ± is the standard error over "
        "prompts, less of which is left between two steps, as their prompts are the same. Speed is "
        "that of this machine at that moment.\n\n"
    )


def _depths(best: RunState, config: LogLine) -> str:
    training = config["draftheads"]["training"]
    accepted = best.measured["acceptance"] if best.measured else []
    before = [1.0, *accepted]
    titles = ("depth", "best guess right", "among the best five", "accepted", "of those so far")
    rows = [
        (
            str(k),
            _number(top1, 3),
            _number(top5, 3),
            _number(_at(accepted, k), 3),
            _number(accepted[k - 1] / before[k - 1] if k <= len(accepted) else None, 3),
        )
        for k, (top1, top5) in enumerate(
            zip(training["heldout_top1"], training["heldout_top5"], strict=True), start=1
        )
    ]
    return (
        "Of the best checkpoint. A guess on held-out documents counts as right or wrong whatever "
        "stood before it. When decoding, a draft needs all before it: accepted is the share of "
        "steps that had a draft of this depth accepted, and then of those steps that had one of "
        "the depth before.\n\n" + _table(titles, rows)
    )


def _tree(config: LogLine) -> str:
    tree = tree_from_json(config["draftheads"]["tree"])
    if isinstance(tree, DynamicTree):
        return f"Chosen anew in each step: {tree}."
    widths = Counter(map(len, tree.paths))
    rows = [(str(depth), str(count), "█" * count) for depth, count in sorted(widths.items())]
    most = ", ".join("-".join(str(rank + 1) for rank in path) for path in tree.paths[:8])
    return (
        f"Fixed: {tree.draft_nodes} draft nodes, {tree.depth} deep. The most useful paths, by rank "
        f"of each guess: {most}.\n\n" + _table(("depth", "nodes", ""), rows)
    )


def _skipped(metrics: Sequence[LogLine]) -> str:
    rows = [(str(x["step"]), x["skipped"].replace("|", "\\|")) for x in metrics if "skipped" in x]
    return _table(("step", "why"), rows) if rows else "None."


def _use(output: Path, state: RunState) -> str:
    target = state.recipe.target
    return (
        "```bash\n"
        f"draftheads bench --target {target} --head {output} --prompts PROMPTS.txt\n"
        f"draftheads chat --head {output} --target {target}\n"
        f"draftheads doctor --target {target} --head {output}    # why not more?\n"
        f"draftheads publish {output}/{BEST} USER/NAME\n"
        "```"
    )


def _made(config: LogLine) -> list[tuple[str, str]]:
    facts = config["draftheads"]
    target = facts["target"]
    return [
        ("target", f"{target['name']}, {target['revision'] or 'no revision'}"),
        ("its fingerprint", target["fingerprint"]),
        ("digest of the data", facts["training"]["data"]["digest"]),
    ]


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _tau(found: LogLine) -> str:
    return f"{found['tokens_per_step']:.2f} ± {found['standard_error']:.2f}" if found else "-"


def _at(values: Sequence[float], depth: int) -> float | None:
    return values[depth - 1] if depth <= len(values) else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
