"""What a run says while it runs: a bar, metrics.jsonl, trackers. Only the first process speaks.

Legend: K draft depth, R ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from draftheads.train.judge import Verdict
from draftheads.train.recipe import Recipe
from draftheads.train.trackers import log_numbers, start_trackers

METRICS = "metrics.jsonl"


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
        silent = not accelerator.is_main_process
        start_trackers(accelerator, recipe, start)
        self.bar = tqdm(total=steps, initial=start, desc="train", unit="step", disable=silent)
        if accelerator.is_main_process:
            _forget_after(self.path, start)
        self.losses: list[float] = []
        self.tokens = 0
        self.ranks_KR: Tensor | None = None
        self.since = time.monotonic()

    def say(self, text: str) -> None:
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
        shares_KR = _shares(self.accelerator.reduce(self.ranks_KR, "sum"))
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
        self._start_window()

    def skipped(self, step: int, reason: str) -> None:
        """Count step number `step`, which changed nothing, and say why."""
        self.bar.update()
        self.say(f"step {step} skipped: {reason}")
        self._write(step, {"skipped": reason})

    def judged(self, step: int, verdict: Verdict) -> None:
        """Say what the held-out documents showed."""
        self.say(f"step {step}: {verdict}")
        calibration, measured = verdict.calibration, verdict.measured
        values = {
            "heldout_tokens_per_step": calibration.tokens_per_step,
            "heldout_top1": calibration.top1,
            "heldout_top5": calibration.top5,
        }
        found = {"measured": measured, "drift": verdict.drift}
        self._write(step, values | {name: each.facts() for name, each in found.items() if each})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count as training time."""
        start = time.monotonic()
        yield
        self.since += time.monotonic() - start

    def close(self) -> None:
        """Finish bar and trackers."""
        self.bar.close()

    def _start_window(self) -> None:
        self.losses, self.tokens, self.ranks_KR = [], 0, None
        self.since = time.monotonic()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        log_numbers(self.accelerator, values, step)


def read_metrics(output: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; those that are damaged are counted in a note."""
    path = Path(output) / METRICS
    *whole, _ = path.read_bytes().split(b"\n")  # a killed process leaves half of one
    read = [line for line in map(_load, whole) if line]
    if len(read) < len(whole):
        tqdm.write(f"note: {path}: passed over {len(whole) - len(read)} damaged lines")
    return read


def _load(line: bytes) -> dict[str, Any] | None:
    """None where it is damaged."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(values, dict) and isinstance(values.get("step"), int)
    return values if known else None


def _shares(ranks_KR: Tensor) -> Tensor:
    return ranks_KR.double().cpu() / ranks_KR.sum(1, keepdim=True).clamp(min=1).cpu()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a continued run repeats."""
    kept = read_metrics(path.parent) if path.exists() else []
    lines = [json.dumps(line) + "\n" for line in kept if line["step"] <= step]
    part = path.with_name(f".{path.name}")
    part.write_text("".join(lines))
    part.replace(path)
