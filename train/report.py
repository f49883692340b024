"""The report of a run: report.md and its curves, made of metrics.jsonl and the checkpoints alone;
`draftheads report RUN` makes it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from draftheads.heads.hub import read_config, step_folders
from draftheads.heads.shape import DynamicTree, tree_from_json
from draftheads.train.checkpoint import BEST
from draftheads.train.curves import draw_curves
from draftheads.train.drift import Drift
from draftheads.train.judge_choices import measure_of
from draftheads.train.progress import METRICS, read_metrics
from draftheads.train.remarks import losses_until, remarks
from draftheads.train.state import STATE, TRAINER, RunState, read_state

REPORT, CURVES = "report.md", "report.png"
MEASURES = {
    "tokens_per_step": "tokens per step of decoding",
    "tokens_per_second": "tokens per second of decoding, over plain decoding's",
    "simulated": "simulated tokens per step",
    "loss": "training loss",
}
MOST_ROWS = 24
"""Of the table of judgements, besides the best; a longer run shows the newest."""
Line = dict[str, Any]


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
        "## Recipe\n\n```yaml\n" + yaml.safe_dump(state.recipe, sort_keys=False).strip() + "\n```",
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


def _summary(state: RunState, best: RunState, config: Line, metrics: Sequence[Line]) -> str:
    training = config["draftheads"]["training"]
    data, measured = training["data"], best.measured
    ended = "ended early by `judge.patience`" if state.exhausted else "trained to the end"
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
        ("best", f"step {best.step:,}, by {MEASURES[measure_of(state.recipe)]}"),
        ("tokens per step", taus),
        ("training loss", _losses(metrics, best, state)),
    ]
    if best.drift:
        rows.append(("adapter", f"{Drift(**best.drift)} (KL)"))
    return _table(("", ""), rows)


def _losses(metrics: Sequence[Line], best: RunState, state: RunState) -> str:
    """Means over the steps of a log line, as those of single steps are noisy."""
    losses = losses_until(metrics, state.step)
    if not (until := losses_until(metrics, best.step)):
        return f"{_number(best.loss, 4)} in the best step, {_number(state.loss, 4)} in the last"
    return f"{losses[0]:.4f} at first, {until[-1]:.4f} at the best step, {losses[-1]:.4f} at last"


def _judged(metrics: Sequence[Line], best: RunState, config: Line) -> str:
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
    return (_how(best.measured, config) if best.measured else "") + _table(titles, shown) + cut


def _how(measured: Line, config: Line) -> str:
    judge = config["draftheads"]["training"]["recipe"]["judge"]
    sampling = f"temperature {judge['temperature']}" if judge["temperature"] else "greedy"
    return (
        f"Decoded: {measured['prompts']} held-out prompts, {judge['new_tokens']} new tokens each, "
        f"{sampling}. Tokens per step count the target's own token; ± is the standard error over "
        "prompts, less of which is left between two steps, as their prompts are the same. Speed is "
        "that of this machine at that moment.\n\n"
    )


def _depths(best: RunState, config: Line) -> str:
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


def _tree(config: Line) -> str:
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


def _skipped(metrics: Sequence[Line]) -> str:
    rows = [(str(x["step"]), x["skipped"].replace("|", "\\|")) for x in metrics if "skipped" in x]
    return _table(("step", "why"), rows) if rows else "None."


def _use(output: Path, state: RunState) -> str:
    target = state.recipe["target"]
    return (
        "```bash\n"
        f"draftheads bench --target {target} --head {output} --prompts PROMPTS.txt\n"
        f"draftheads chat --head {output} --target {target}\n"
        f"draftheads doctor --target {target} --head {output}    # why not more?\n"
        f"draftheads publish {output}/{BEST} USER/NAME\n"
        "```"
    )


def _made(config: Line) -> list[tuple[str, str]]:
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


def _tau(found: Line) -> str:
    return f"{found['tokens_per_step']:.2f} ± {found['standard_error']:.2f}" if found else "-"


def _at(values: Sequence[float], depth: int) -> float | None:
    return values[depth - 1] if depth <= len(values) else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
