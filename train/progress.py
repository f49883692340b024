"""What a run says: a bar, metrics.jsonl and trackers while it runs, report.md and its curves at the
end. Only the first process speaks.

A resumed run resumes in its trackers too: how they name it is in its folder's trackers.json. Tried
with TensorBoard, Weights & Biases, MLflow and trackio; others get a new run for every launch.

Legend: K draft depth, R ranks.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from pydantic import TypeAdapter
from torch import Tensor
from tqdm import tqdm

from draftheads.heads.files import write_text
from draftheads.heads.hub import read_config, step_folders
from draftheads.infer.bench import MUTED, new_figure, tidy
from draftheads.train.checkpoint import BEST, STATE, TRAINER, RunState, read_state
from draftheads.train.evaluate import Drift, Evaluation
from draftheads.train.recipe import Recipe

METRICS, PROJECT, RECORD = "metrics.jsonl", "draftheads", "trackers.json"
RUN_NAMES = {"wandb": "id", "mlflow": "info.run_id", "trackio": "name"}
"""The attribute of a tracker's run by which a later launch finds it."""
FAULTS = {"wandb": "wandb.errors:Error", "mlflow": "mlflow.exceptions:MlflowException"}
"""What they raise where there is no account, no server or no such run."""


class Progress:
    """Counts steps, and every `log_every` of them writes what the training batches showed since the
    last time.

    chain: tokens per step that the heads' best guesses alone would bring, if depths were
    independent; a running estimate from training batches, while `heldout_tokens_per_step` is the
    prediction for the calibrated tree.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe, start: int, steps: int) -> None:
        self.accelerator = accelerator
        self.log_every = recipe.run.log_every
        self.path = recipe.run.output / METRICS
        if accelerator.is_main_process:
            _start_trackers(accelerator, recipe, start)
            # a resumed run repeats the steps after its checkpoint
            kept = read_metrics(recipe.run.output) if self.path.exists() else []
            lines = [json.dumps(line) + "\n" for line in kept if line["step"] <= start]
            write_text(self.path, "".join(lines))
        silent = not accelerator.is_main_process
        self.bar = tqdm(total=steps, initial=start, desc="train", unit="step", disable=silent)
        self.losses: list[float] = []
        self.tokens = 0
        self.ranks_KR: Tensor | None = None
        self.since = time.monotonic()

    def log(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def step(
        self, step: int, loss: float, norm: float, ranks_KR: Tensor, tokens: int, lr: float
    ) -> None:
        """Count step number `step`. loss: of the whole step. norm: of the gradient before
        clipping. ranks_KR: of this process. tokens: of all processes.
        """
        self.bar.update()
        self.losses.append(loss)
        self.tokens += tokens
        self.ranks_KR = ranks_KR if self.ranks_KR is None else self.ranks_KR + ranks_KR
        if step % self.log_every:
            return
        ranks_KR = self.accelerator.reduce(self.ranks_KR, "sum").cpu()
        shares_KR = ranks_KR.double() / ranks_KR.sum(1, keepdim=True).clamp(min=1)
        top1 = shares_KR[:, 0]
        values = {
            "loss": sum(self.losses) / len(self.losses),
            "gradient_norm": norm,
            "lr": lr,
            "tokens_per_second": self.tokens / (time.monotonic() - self.since),
            "top1": top1.tolist(),
            "top5": shares_KR[:, :5].sum(1).tolist(),
            "chain": 1.0 + float(top1.cumprod(0).sum()),
        }
        self.bar.set_postfix_str(
            f"loss {values['loss']:.3f}, chain {values['chain']:.2f}, "
            f"{values['tokens_per_second']:.0f} tokens/s",
            refresh=False,
        )
        self._write(step, values)
        self.losses, self.tokens, self.ranks_KR = [], 0, None
        self.since = time.monotonic()

    def skipped(self, step: int, reason: str) -> None:
        """Count step number `step`, which changed nothing, and say why."""
        self.bar.update()
        self.log(f"step {step} skipped: {reason}")
        self._write(step, {"skipped": reason})

    def judged(self, step: int, verdict: Evaluation) -> None:
        """Say what the held-out documents showed."""
        self.log(f"step {step}: {verdict}")
        calibration, measured, drift = verdict.calibration, verdict.measured, verdict.drift
        values: dict[str, Any] = {
            "heldout_tokens_per_step": calibration.tokens_per_step,
            "heldout_top1": calibration.top1,
            "heldout_top5": calibration.top5,
        }
        values |= {"measured": measured.facts()} if measured else {}
        values |= {"drift": drift.facts()} if drift else {}
        self._write(step, values)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as training time."""
        start = time.monotonic()
        yield
        self.since += time.monotonic() - start

    def close(self) -> None:
        """Finish the bar."""
        self.bar.close()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        numbers = {key: x for key, x in _slashed(values).items() if isinstance(x, int | float)}
        if numbers:
            self.accelerator.log(numbers, step=step)


def read_metrics(output: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; those that are damaged are counted in a note."""
    path = Path(output) / METRICS
    *complete, _ = path.read_bytes().split(b"\n")  # a killed process leaves half of one
    lines = []
    for line in complete:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append(values)
    if len(lines) < len(complete):
        tqdm.write(f"note: {path}: skipped {len(complete) - len(lines)} damaged lines")
    return lines


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for trackers that accelerate does not know or that are not installed."""
    known = [str(name) for name in LoggerType.list() if name != str(LoggerType.ALL)]
    available = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in known:
            raise ValueError(f"run.trackers: expected some of {', '.join(known)}, got {name!r}")
        if name not in available:
            raise ValueError(
                f"run.trackers: {name} is not installed; `pip install {name}`, or leave it out"
            )


def _start_trackers(accelerator: Accelerator, recipe: Recipe, step: int) -> None:
    """Start a run with every tracker, or resume it after `step` steps; the recipe is its
    configuration. Raises ValueError where one of them cannot.
    """
    names, record = recipe.run.trackers, recipe.run.output / RECORD
    if not names:
        return
    faults = [resolve_name(FAULTS[name]) for name in names if name in FAULTS]
    try:
        written = record.read_bytes() if record.is_file() else b"{}"
        runs = TypeAdapter(dict[str, str]).validate_json(written)
        title = recipe.run.output.resolve().name
        begun = {name: _arguments(name, title, runs.get(name), step) for name in names}
        accelerator.init_trackers(PROJECT, init_kwargs=begun)
    except (ValueError, OSError, *faults) as error:  # nothing has been trained yet
        accelerator.trackers.clear()  # what has not begun cannot be ended
        anew = f"; to start a new run there, delete {record}" if record.is_file() else ""
        raise ValueError(
            f"run.trackers: cannot start {', '.join(names)} ({error}){anew}; "
            "to go without, run.trackers=[]"
        ) from error
    choices = _slashed(recipe.model_dump(mode="json", exclude_none=True))
    for tracker in accelerator.trackers:
        # MLflow refuses another value for what a run began with, such as a greater run.steps
        known = tracker.tracker.data.params if tracker.name == "mlflow" else {}
        tracker.store_init_configuration({key: x for key, x in choices.items() if key not in known})
        if tracker.name in RUN_NAMES:
            runs[tracker.name] = str(attrgetter(RUN_NAMES[tracker.name])(tracker.tracker))
    write_text(record, json.dumps(runs, indent=2) + "\n")


def _arguments(name: str, title: str, run: str | None, step: int) -> dict[str, Any]:
    """What accelerate starts a tracker with. run: what the tracker called it before."""
    match name:
        case "tensorboard":  # hides what an interrupted launch wrote of steps that are repeated
            return {"purge_step": step + 1} if step else {}
        case "wandb":
            return {"name": title, **({"id": run, "resume": "allow"} if run else {})}
        case "mlflow":
            return {"run_id": run} if run else {"run_name": title}
        case "trackio":  # knows runs by their names alone
            new = f"{title}-{uuid.uuid4().hex[:6]}"
            return {"name": run, "resume": "allow"} if run else {"name": new}
    return {}


def _slashed(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Scalars under slash-joined names; lists are numbered from 1 (the depth)."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list | tuple):
            value = dict(enumerate(value, start=1))
        if isinstance(value, dict):
            found |= _slashed(value, f"{prefix}{key}/")
        else:
            found[f"{prefix}{key}"] = value
    return found


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
