"""The child process of a probe: it trains as a recipe says and notes when what began, and the
highest memory of each phase.

    python -m draftheads.train.plan.listen FOLDER CLOCK

It reads recipe.json in the folder and writes marks.json there.
It listens through torch's own global hooks, so that what is measured is the trainer itself.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from transformers import PreTrainedModel

from draftheads.heads.base import DraftHead
from draftheads.train.loop import fit
from draftheads.train.plan.machine import peak, reset_peak, resident
from draftheads.train.recipe import Recipe

RECIPE, MARKS = "recipe.json", "marks.json"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""cpu: of this process; it knows nothing of others that take turns with it."""
PHASES = ("load", "train", "save")


class Listener:
    """Marks (name, seconds): "target" and "target end" around each forward of the untouched target,
    "adapted" and "adapted end" around one with an adapter that learns, "head" at each of the head,
    "optimizer" and "optimizer end", "forward end" of the last module.
    peaks: bytes by phase; a phase ends at the first head, at the last optimizer step, at the end.
    """

    def __init__(self, steps: int, now: Callable[[], float]) -> None:
        self.left, self.now = steps, now
        self.marks: list[tuple[str, float]] = []
        self.peaks: dict[str, int] = {}
        self.observed = 0.0
        reset_peak()
        register_module_forward_pre_hook(self._before)
        register_module_forward_hook(self._after)
        register_optimizer_step_pre_hook(lambda *_: self.mark("optimizer"))
        register_optimizer_step_post_hook(self._stepped)

    def mark(self, name: str) -> None:
        """Note what begins now."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append((name, self.now()))

    def end_phase(self) -> None:
        """Note the highest memory since the phase before."""
        self.peaks[PHASES[len(self.peaks)]] = peak()
        reset_peak()

    def _before(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, PreTrainedModel):
            self.mark(_called())
        elif isinstance(module, DraftHead):
            if not self.peaks:
                self.end_phase()
            self.mark("head")

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(module, PreTrainedModel):
            self.mark(f"{_called()} end")
        if not self.left:  # the held-out documents: what comes after the last module is saving
            self.observed = self.now()

    def _stepped(self, *_: Any) -> None:
        self.mark("optimizer end")
        self.left -= 1
        if not self.left:
            self.end_phase()


def _called() -> str:
    """What a forward of the target is for: gradients go through it for an adapter alone."""
    return "adapted" if torch.is_grad_enabled() else "target"


def main(argv: Sequence[str]) -> int:
    """Train as `recipe.json` in the folder says."""
    folder = Path(argv[0])
    recipe = Recipe.model_validate_json((folder / RECIPE).read_text())
    assert recipe.run.steps, "a probe has a number of steps"
    base = resident()
    listener = Listener(recipe.run.steps, CLOCKS[argv[1]])
    listener.mark("begin")
    try:
        outcome = fit(recipe)
    except (ValueError, OSError) as error:  # as the trainer's own entry: one line
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    listener.marks.append(("forward end", listener.observed))
    listener.mark("end")
    listener.end_phase()
    found = {"base": base, "peaks": listener.peaks, "marks": listener.marks}
    (folder / MARKS).write_text(json.dumps({**found, "checkpoint": str(outcome.checkpoint)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
