"""Metrics of a run: progress bar, metrics.jsonl and trackers. Only the main process writes.

A resumed run also resumes in TensorBoard, Weights & Biases and trackio; other trackers get a new
run per launch.

Legend: K draft depth, R ranks.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from draftheads.heads.files import naming, write_text
from draftheads.heads.terminal import printable, progress_bar
from draftheads.train.checkpoint import BEST, RunState, read_state
from draftheads.train.evaluate import Evaluation
from draftheads.train.recipe import Recipe

METRICS, PROJECT = "metrics.jsonl", "draftheads"
RECORD = "tracker-run.txt"
"""The id of the run in its trackers."""
WIDEST = 80
"""Columns of the bar."""
BAR = "{desc} {n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}"

ANOTHER = 0.6, 2.4
"""The next doubling of the tokens brings at least and at most so many times as much as the one that
`rise_per_doubling` has seen: measured 0.67 to 2.37 times, on 16 doublings of four kinds and two
targets.
"""

Line = dict[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run. checkpoint: the newest. step, steps: done and planned. trained: False if
    the run had already ended. stopped_by: the signal or file that interrupted it, or "".
    """

    checkpoint: Path
    step: int
    steps: int
    trained: bool
    stopped_by: str = ""

    @property
    def finished(self) -> bool:
        """False if the run was interrupted."""
        return self.step >= self.steps


class StepResult(NamedTuple):
    """Result of a step. loss: mean over the learned tokens of all processes. norm: of the gradient
    before clipping; if it is not finite, no weights were updated. lr: of the heads. ranks_KR: of
    this process. stop: whether any process was asked to. documents: those with non-finite losses.
    seconds: of training since the step before, by the clock of the first process.
    """

    loss: float
    norm: float
    lr: float
    ranks_KR: Tensor
    stop: bool
    documents: list[int]
    seconds: float


class Progress:
    """Counts steps, and writes metrics of the training batches every `log_every` steps.

    chain: tokens per step if only the top-1 predictions were drafted and depths were independent;
    from training batches, while `heldout_tokens_per_step` is for the best tree.
    """

    def __init__(self, accelerator: Accelerator, state: RunState) -> None:
        recipe, start = state.recipe, state.step
        self.accelerator = accelerator
        self.log_every = recipe.run.log_every
        self.path = recipe.run.output / METRICS
        if accelerator.is_main_process:
            _start_trackers(accelerator, recipe, start)
            # a resumed run repeats the steps after its checkpoint
            lines = [line for line in read_metrics(recipe.run.output) if line["step"] <= start]
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        silent = not accelerator.is_main_process
        self.bar = progress_bar(
            total=state.steps,
            initial=start,
            desc="train",
            disable=silent,
            bar_format=BAR,
            ncols=min(WIDEST, shutil.get_terminal_size().columns),
        )
        self.results: list[StepResult] = []  # since the newest line
        self.tokens = 0  # of them

    def log(self, text: str) -> None:
        """Print a line above the bar."""
        if self.accelerator.is_main_process:
            tqdm.write(printable(text))

    def step(self, step: int, result: StepResult, tokens: int) -> None:
        """Count step number `step`. tokens: over all processes."""
        self.bar.update()
        self.results.append(result)
        self.tokens += tokens
        if step % self.log_every:
            return
        mine_KR = torch.stack([each.ranks_KR for each in self.results]).sum(0)
        ranks_KR = self.accelerator.reduce(mine_KR, "sum").cpu()
        shares_KR = ranks_KR.double() / ranks_KR.sum(1, keepdim=True).clamp(min=1)
        top1 = shares_KR[:, 0]
        rate = self.tokens / sum(each.seconds for each in self.results)
        values = {
            "loss": sum(each.loss for each in self.results) / len(self.results),
            "gradient_norm": result.norm,
            "lr": result.lr,
            "tokens_per_second": rate,
            "top1": top1.tolist(),
            "chain": 1.0 + float(top1.cumprod(0).sum()),
        }
        self.bar.set_postfix_str(
            f"loss {values['loss']:.3f}, chain {values['chain']:.2f}, "
            f"{tqdm.format_sizeof(rate)} tokens/s",
            refresh=False,
        )
        self._write(step, values)
        self.results = []
        self.tokens = 0

    def skipped(self, step: int, reason: str) -> None:
        """Count step number `step`, which did not change the weights."""
        self.bar.update()
        self.log(f"step {step} skipped: {reason}")
        self._write(step, {"skipped": reason})

    def evaluated(self, step: int, evaluation: Evaluation) -> Line:
        """Log an evaluation on held-out documents; returns its figures."""
        calibration = evaluation.calibration
        self.log(evaluation_line(step, evaluation))
        values: Line = {
            "heldout_tokens_per_step": calibration.tokens_per_step,
            "heldout_top1": calibration.top1,
        }
        if evaluation.measured:
            values["measured"] = asdict(evaluation.measured)
        if evaluation.drift:
            values["drift"] = asdict(evaluation.drift)
        self._write(step, values)
        return values

    def close(self) -> None:
        """Finish the bar."""
        self.bar.close()

    def _write(self, step: int, values: Line) -> None:
        if self.accelerator.is_main_process:
            with naming(self.path), self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        numbers = {key: x for key, x in _slashed(values).items() if isinstance(x, int | float)}
        if numbers:
            self.accelerator.log(numbers, step=step)


def evaluation_line(step: int, evaluation: Evaluation) -> str:
    """The result of an evaluation, in one line."""
    top1 = evaluation.calibration.top1
    parts = [f"step {step}: τ {evaluation.calibration.tokens_per_step:.2f} simulated"]
    if measured := evaluation.measured:
        parts.append(f"{measured.tokens_per_step:.2f} ± {measured.standard_error:.2f} decoded")
    if evaluation.drift:
        parts.append(f"agreement {evaluation.drift.agreement:.2%}")
    parts.append(f"top-1 {top1[0]:.2f} to {top1[-1]:.2f}")
    return ", ".join(parts)


def report(outcome: Outcome) -> str:
    """Says how a run ended, what its best checkpoint is worth, and what to do next."""
    checkpoint, output = outcome.checkpoint, outcome.checkpoint.parent
    if not outcome.finished:
        return (
            f"interrupted by {outcome.stopped_by} at step {outcome.step} of {outcome.steps}, saved "
            f"in {checkpoint}; run the same command again to resume"
        )
    end = f"done: {outcome.steps} steps, saved in {checkpoint}"
    if not outcome.trained:
        end = (
            f"{checkpoint}: this run is finished; raise run.steps or run.minutes to continue it, "
            "or set another run.output"
        )
    if not (output / BEST).exists():
        return end
    best = read_state(output / BEST)
    worth = f"{best.tokens_per_step:.2f} simulated, not decoded"
    if best.measured:
        worth = f"{best.measured['tokens_per_step']:.2f} decoded"
    return (
        f"{end}\nbest: step {best.step}, τ {worth}\n{more_tokens(output)}"
        f"next: draftheads tune --head {output} --prompts PROMPTS\n"
        "      finds the fastest tree, and says how fast it is; then "
        f"draftheads chat --head {output}\n"
        f"      draftheads report {output}\n"
        "      writes a page with curves, tree and facts of this run"
    )


def more_tokens(output: str | Path) -> str:
    """A line about what twice the training tokens would bring, "" if that is not known."""
    doubling = another_doubling(read_metrics(output))
    if doubling is None:
        return ""
    return "twice the tokens would bring {:.2f} to {:.2f} more τ\n".format(*doubling)


def another_doubling(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Tokens per step that twice the training tokens would bring, at least and at most; None if
    there are too few evaluations to say.
    """
    rise = rise_per_doubling(lines)
    if rise is None:
        return None
    least, most = (share * max(rise, 0.0) for share in ANOTHER)
    return least, most


def rise_per_doubling(lines: Sequence[Line]) -> float | None:
    """Tokens per step that a doubling of the training tokens has brought, by evaluations between
    3/8 and 3/4 of a run: those before say little about later ones, and behind, the learning rate
    has fallen. None if there are fewer than two.
    """
    taus = {}
    for line in lines:
        tau = line.get("heldout_tokens_per_step")
        if isinstance(tau, float) and math.isfinite(tau):
            taus[line["step"]] = tau
    last = max(taus, default=0)
    steps = [step for step in taus if 3 * last <= 8 * step <= 6 * last]
    if len(steps) < 2:
        return None
    return linear_regression(list(map(math.log2, steps)), [taus[step] for step in steps]).slope


def read_metrics(output: str | Path) -> list[Line]:
    """The intact lines of a run's metrics.jsonl, none if it is missing."""
    path = Path(output) / METRICS
    if not path.exists():
        return []
    *complete, _ = path.read_bytes().split(b"\n")  # a killed process leaves an incomplete last line
    lines = []
    for line in complete:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int):
            lines.append(values)
    if len(lines) < len(complete):
        note = f"note: {path}: skipped {len(complete) - len(lines)} damaged lines"
        tqdm.write(printable(note), file=sys.stderr)
    return lines


def _start_trackers(accelerator: Accelerator, recipe: Recipe, step: int) -> None:
    """Start the trackers with the recipe as configuration, or resume their runs at `step`."""
    names, output = recipe.run.trackers, recipe.run.output
    if not names:
        return
    record = output / RECORD
    if not (step and record.is_file()):
        write_text(record, uuid.uuid4().hex[:8])
    number = record.read_text()
    title = output.resolve().name
    arguments = {
        "wandb": {"name": title, "id": number, "resume": "allow"},
        "mlflow": {"run_name": title},
        "trackio": {"name": f"{title}-{number}", "resume": "allow"},  # names are its ids
        # it appends: hide the steps that this launch repeats
        "tensorboard": {"purge_step": step + 1} if step else {},
    }
    choices = _slashed(recipe.model_dump(mode="json", exclude_none=True))
    try:
        accelerator.init_trackers(PROJECT, choices, arguments)
    except Exception as error:  # each has its own, without an account or a server
        accelerator.trackers.clear()  # those that did not start cannot be ended
        raise ValueError(
            f"run.trackers: cannot start {', '.join(names)} ({error}); to train without, set "
            "run.trackers=[]"
        ) from error


def _slashed(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Scalars under slash-joined names; lists are numbered from 1 (the depth)."""
    scalars: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list | tuple):
            value = dict(enumerate(value, start=1))
        if isinstance(value, dict):
            scalars |= _slashed(value, f"{prefix}{key}/")
        else:
            scalars[f"{prefix}{key}"] = value
    return scalars
