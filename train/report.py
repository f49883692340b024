"""A run's report: report.md and its curves, made of metrics.jsonl and the checkpoints alone;
`draftheads report RUN` makes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from draftheads.heads.files import write_text
from draftheads.heads.hub import read_config, step_folders
from draftheads.infer.bench import MUTED, new_figure, tidy
from draftheads.train.checkpoint import BEST, STATE, TRAINER, RunState, read_state
from draftheads.train.evaluate import Drift
from draftheads.train.progress import METRICS, read_metrics

REPORT, CURVES = "report.md", "report.png"
MEASURES = {
    "tokens_per_step": "tokens per step of decoding",
    "tokens_per_second": "tokens per second of decoding, over plain decoding's",
    "simulated": "simulated tokens per step",
    "loss": "training loss",
}
Line = dict[str, Any]
"""Of metrics.jsonl."""


def write_report(output: Path) -> Path:
    """Write a run's report.md and, with matplotlib, its curves; returns the former's path.

    Raises ValueError for a folder without checkpoints.
    """
    steps = [step for step in step_folders(output) if (step / TRAINER / STATE).is_file()]
    if not steps:
        raise ValueError(f"{output}: expected a training run with step-* folders, found none")
    link = output / BEST
    state, best = read_state(steps[-1]), read_state(link.resolve() if link.is_dir() else steps[-1])
    metrics = read_metrics(output) if (output / METRICS).is_file() else []
    config = read_config(output / f"step-{best.step:06d}")["draftheads"]
    target = Path(config["target"]["name"])
    kind = config["kind"].capitalize()
    title = f"{kind} heads for {target.name if target.is_absolute() else target}"
    try:
        _draw(metrics, best.step, title, output / CURVES)
        picture = f"![curves of this run]({CURVES})"
    except ImportError as error:  # matplotlib is an extra
        (output / CURVES).unlink(missing_ok=True)
        picture = f"No curves: {error}."
    recipe = yaml.safe_dump(state.recipe.model_dump(mode="json"), sort_keys=False)
    skipped = [f"* step {x['step']}: {x['skipped']}" for x in metrics if "skipped" in x]
    name = state.recipe.target
    sections = [
        f"# {title}",
        _table(("", ""), _facts(state, best, config)),
        picture,
        "## Evaluations on held-out documents",
        _evaluations(metrics, best),
        "## Skipped steps",
        "\n".join(skipped) or "None.",
        "## Use",
        "```bash\n"
        f"draftheads bench --target {name} --head {output} --prompts PROMPTS.txt\n"
        f"draftheads chat --head {output} --target {name}\n"
        f"draftheads doctor --target {name} --head {output}    # why not more?\n"
        f"draftheads publish {output}/{BEST} USER/NAME\n```",
        "## Recipe",
        f"```yaml\n{recipe.strip()}\n```",
    ]
    write_text(output / REPORT, "\n\n".join(sections) + "\n")
    return output / REPORT


def _facts(state: RunState, best: RunState, config: Line) -> list[tuple[str, str]]:
    training, target = config["training"], config["target"]
    data, measured = training["data"], best.measured
    ended = "" if state.step >= state.steps else ", not finished"
    if state.exhausted and ended:
        ended = ", ended early by `eval.patience`"
    taus = f"{best.tokens_per_step:.2f} simulated"
    if measured:
        taus = (
            f"**{measured['tokens_per_step']:.2f}** ± {measured['standard_error']:.2f} measured by "
            f"decoding ({taus}), {measured['speedup']:.2f} times as fast as without heads"
        )
    rows = [
        ("trained", f"{state.step:,} of {state.steps:,} steps{ended}"),
        ("on", f"{state.tokens:,} tokens in {timedelta(seconds=round(state.seconds))} hours"),
        ("hardware", training["hardware"]),
        ("data", f"{data['documents']:,} documents, {data['learned_tokens']:,} learned tokens"),
        ("best", f"step {best.step:,}, by {MEASURES[state.recipe.measure]}"),
        ("tokens per step", taus),
        ("training loss", f"{_number(best.loss, 4)} at best, {_number(state.loss, 4)} at last"),
        ("target", f"{target['name']}, fingerprint {target['fingerprint']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in state.versions.items())),
    ]
    return [*rows, ("adapter", f"{Drift(**best.drift)} (KL)")] if best.drift else rows


def _evaluations(metrics: Sequence[Line], best: RunState) -> str:
    rows, loss = [], None
    titles = ["step", "training loss", "simulated tokens per step", "by decoding", "speedup"]
    titles += ["first choice untouched"] if best.drift else []
    for line in metrics:
        loss = line.get("loss", loss)
        if "heldout_tokens_per_step" not in line:
            continue
        row = [f"{line['step']:,}{' (best)' if line['step'] == best.step else ''}"]
        row += [_number(loss, 4), _number(line["heldout_tokens_per_step"])]
        if found := line.get("measured"):
            row.append(f"{found['tokens_per_step']:.2f} ± {found['standard_error']:.2f}")
            row.append(f"{found['speedup']:.2f}")
        else:
            row += ["-", "-"]
        row += [f"{line['drift']['agreement']:.2%}"] if best.drift else []
        rows.append(row)
    return _table(titles, rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _draw(metrics: Sequence[Line], best: int, title: str, path: Path) -> None:
    """Loss and tokens per step as a PNG. best: a step. Raises ImportError without matplotlib."""
    figure = new_figure(10, 3.6)
    losses, taus = figure.subplots(1, 2)
    logged = [line for line in metrics if "loss" in line]
    evaluated = [line for line in metrics if "heldout_tokens_per_step" in line]
    decoded = [line for line in evaluated if "measured" in line]
    losses.plot([x["step"] for x in logged], [x["loss"] for x in logged])
    simulated = [x["heldout_tokens_per_step"] for x in evaluated]
    taus.plot([x["step"] for x in evaluated], simulated, marker="o", label="simulated")
    taus.errorbar(
        [x["step"] for x in decoded],
        [x["measured"]["tokens_per_step"] for x in decoded],
        yerr=[x["measured"]["standard_error"] for x in decoded],
        label="by decoding, ± standard error",
        marker="o",
        capsize=3,
    )
    taus.legend(frameon=False)
    for axes, name in ((losses, "training loss"), (taus, "tokens per step")):
        axes.axvline(best, color=MUTED, linewidth=1, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step, dotted: the best")
        axes.set_title(name)
        tidy(axes)
    figure.suptitle(title)
    figure.savefig(path, format="png")
