"""A few steps of the real trainer on a shallow target of the same widths, and what they say of the
whole one: time and memory are lines in the number of layers, and in how many of them learn.

Everything it writes is in a temporary folder; training runs in child processes (`listen`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import torch
from transformers import AutoModelForCausalLM

from draftheads.heads.eagle3 import default_features
from draftheads.heads.placement import read_config
from draftheads.train.choices import DecoderChoices, Eagle3Choices
from draftheads.train.data.answers import Answer
from draftheads.train.judge_choices import JudgeChoices
from draftheads.train.plan import listen as listen
from draftheads.train.plan.parts import Sizes
from draftheads.train.plan.trial import Depth, Pace, Trial, read_trial
from draftheads.train.plan.workload import (
    Steps,
    Workload,
    heldout_tokens,
    made_up,
    write_answers,
)
from draftheads.train.recipe import Recipe

FEWEST, MOST = 4, 16
"""Steps of a probe, of each kind; the first of them is not timed."""
SECONDS = 5.0
"""Of steps, that a probe aims at between FEWEST and MOST."""
PATIENCE = 600.0
"""Seconds; a probe that would take longer is not begun."""
SHALLOW = 4
"""Layers of the deeper probe, where the features do not need more."""
LAUNCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED")


class ProbeError(Exception):
    """A probe that this machine cannot make, and why."""


@dataclass(frozen=True)
class Probe:
    """Trials at one depth or several, and the data that they were made with: from each to the next,
    the target has more layers or, with as many, an adapter changes more of them. (Without the
    latter, it changes all or none.) heldout: observed tokens. rows: trained on in each.
    """

    trials: list[Trial]
    heldout: int
    rows: int

    @property
    def layers(self) -> list[int]:
        """Depths that were tried."""
        return sorted({trial.depth[0] for trial in self.trials})

    def at(self, depth: Depth) -> Trial:
        """The trial that a target of this depth would give: lines through what was measured. What
        does not depend on the target's depth, where no adapter learns, is the trials' mean.
        """

        trials, last = self.trials, self.trials[-1]
        depths = [trial.depth for trial in trials]

        def line(values: Iterable[float]) -> float:
            found = list(values)
            value = found[-1]
            for (near, far), (low, high) in zip(pairwise(depths), pairwise(found), strict=True):
                part = 0 if far[0] > near[0] else 1  # what grows from one to the other
                slope = (high - low) / (far[part] - near[part])
                value += max(0.0, slope) * (depth[part] - last.depth[part])
            return value

        def heads(values: Iterable[float]) -> float:
            return line(values) if depth[1] else fmean(values)

        def pace(paces: list[Pace]) -> Pace:
            return Pace(heads(pace.body for pace in paces), heads(pace.rest for pace in paces))

        return Trial(
            depth,
            last.micro_batches,
            int(fmean(trial.base for trial in trials)),
            {name: int(line(trial.peaks[name] for trial in trials)) for name in last.peaks},
            line(trial.features for trial in trials),
            {kind: pace([trial.paces[kind] for trial in trials]) for kind in last.paces},
            line(trial.load for trial in trials),
            line(trial.observe for trial in trials),
            heads(trial.save for trial in trials),
            int(heads(trial.checkpoint for trial in trials)),
        )


@dataclass(frozen=True)
class Prober:
    """Makes trials of a recipe; sizes: of the real run. clock: a key of `listen.CLOCKS`."""

    recipe: Recipe
    sizes: Sizes
    work: Workload
    plan: Steps
    clock: str = "wall"

    def run(self) -> Probe:
        """Train at some depths. Raises ProbeError where that is not possible here."""
        depths = self.depths()
        micro = min(self.plan.micro_batches, 3)  # the first makes gradients, others add to them
        seconds = self.step_seconds(depths[-1], micro)
        kinds = 2 if 0 < self.plan.alone < 1 else 1
        steps = kinds * max(FEWEST, min(MOST, round(SECONDS / seconds)))
        expected = steps * seconds * len(depths)
        if expected > PATIENCE:
            raise ProbeError(f"it would take about {expected / 60:.0f} minutes here")
        rows = steps * micro * self.recipe.data.rows_per_batch
        answers = self.work.answers or self._made_up(rows)
        with tempfile.TemporaryDirectory(prefix="draftheads-plan-") as name:
            folder = Path(name)
            write_answers(folder / "data", answers)
            trials = [self._try(folder, depth, micro, steps) for depth in depths]
        return Probe(trials, heldout_tokens(answers, self.recipe), rows)

    def depths(self) -> list[Depth]:
        """Two numbers of layers that have as many states as the head reads; the target's own number
        where that is not more. An adapter changes all of them; where it leaves some layers of the
        target alone, a third trial tells what one of those takes.
        """
        layers, adapted = self.sizes.target.layers, self.sizes.adapter.layers
        low = max(1, self.sizes.head.features - 1)
        high = max(SHALLOW, 2 * low)
        if high >= layers:
            return [(layers, adapted)]
        if not adapted:
            return [(low, 0), (high, 0)]
        return [(low, low), *([(high, low)] if adapted < layers else []), (high, high)]

    def bytes(self, activations: int) -> int:
        """Memory that the deepest trial may need. activations: as counted from shapes."""
        target = replace(self.sizes.target, layers=self.depths()[-1][0]).bytes()
        return 2 * target + 5 * self.sizes.trained + activations

    def step_seconds(self, depth: Depth, micro_batches: int) -> float:
        """A guess, from the rate at which this machine multiplies matrices."""
        tokens = micro_batches * self.recipe.data.rows_per_batch * self.work.length
        choices, (layers, adapted) = self.recipe.head, depth
        passes = choices.steps if isinstance(choices, DecoderChoices) else 1
        forwards = layers * (2 if adapted else 1) + adapted  # untouched; adapted, and backward
        per_token = 2 * forwards * self.sizes.target.per_layer
        per_token += 6 * self.sizes.head.parameters * passes
        return tokens * per_token / _multiply_rate()

    def _made_up(self, rows: int) -> list[Answer]:
        apart = math.ceil(rows * self.recipe.data.heldout) + 1
        return made_up(rows + apart, self.work.length, self.sizes.target.vocabulary)

    def _try(self, folder: Path, depth: Depth, micro_batches: int, steps: int) -> Trial:
        with tempfile.TemporaryDirectory(prefix=f"{depth[0]}-", dir=folder) as name:
            place = Path(name)
            write_shallow(self.recipe, depth[0], place / "target")
            recipe = self._shallow(depth, place, micro_batches, steps)
            (place / listen.RECIPE).write_text(recipe.model_dump_json())
            _train(place, self.clock)
            found = json.loads((place / listen.MARKS).read_text())
            saved = Path(found["checkpoint"])
            size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        by_row = self.recipe.data.cache_gb > 0 or self.recipe.features.mode == "cached"
        calls = self.recipe.data.rows_per_batch if by_row else 1
        return read_trial(found, depth, calls, size)

    def _shallow(self, depth: Depth, place: Path, micro_batches: int, steps: int) -> Recipe:
        recipe, (layers, adapted) = self.recipe, depth
        data = {"path": place.parent / "data"}
        head = {}
        real = self.sizes.target.layers
        if isinstance(recipe.head, Eagle3Choices) and layers < real:
            head = {"feature_layers": _spread(recipe.head, real, layers)}
        alone = self.plan.alone
        learning = {"layers": adapted, "start": 0.5 if 0 < alone < 1 else min(alone, 0.99)}
        run = {
            "output": place / "run",
            "steps": steps,
            "epochs": None,
            "tokens_per_step": micro_batches * recipe.data.rows_per_batch * self.work.length,
            "save_every": steps,
            "trackers": [],
        }
        values = {
            "target": str(place / "target"),
            "target_revision": None,
            "target_placement": "whole",
            "data": recipe.data.model_copy(update=data),
            "features": recipe.features.model_copy(update={"path": place / "features"}),
            "head": recipe.head.model_copy(update=head),
            "adapter": recipe.adapter and recipe.adapter.model_copy(update=learning),
            "judge": JudgeChoices(every=0, report=False),
            "run": recipe.run.model_copy(update=run),
        }
        return recipe.model_copy(update=values)


def _spread(choices: Eagle3Choices, real: int, layers: int) -> list[int]:
    """As many states of a shallow target as the head reads of the real one."""
    last = len(choices.feature_layers or default_features(real)) - 1
    return [round(place * layers / last) for place in range(last + 1)] if last else [layers]


def write_shallow(recipe: Recipe, layers: int, folder: Path) -> None:
    """A random target of so many layers, saved as the real one is."""
    config = read_config(recipe.target, recipe.target_revision)
    text = config.get_text_config(decoder=True)
    whole = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:  # layer_types and the like
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    torch.manual_seed(0)
    dtype = getattr(config, "dtype", None) or torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    logging.disable(logging.WARNING)  # saving imports libraries that tell what they look for
    try:
        model.save_pretrained(folder)
    finally:
        logging.disable(logging.NOTSET)


def _train(folder: Path, clock: str) -> None:
    """Run the child. Raises ProbeError with its last line when it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    command = [sys.executable, "-m", listen.__name__, str(folder), clock]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=2 * PATIENCE
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"it was not done after {2 * PATIENCE / 60:.0f} minutes") from error
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["it said nothing"]
        raise ProbeError(f"exit code {child.returncode}: {lines[-1].removeprefix('error: ')}")


def _multiply_rate() -> float:
    """FLOP per second of a float32 matrix product."""
    size = 1024 if not torch.cuda.is_available() else 8192
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = torch.ones(size, size, device=device)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        float((left @ left)[0, 0])
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / median(seconds[1:])
