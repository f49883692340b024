"""The training loop: features from the frozen target, loss from the head, one optimizer step over
all processes.

Legend: M learned positions, K draft depth, R ranks.
"""

from __future__ import annotations

import gc
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from draftheads.heads.adapter import FOLDER as ADAPTER
from draftheads.train.assemble import (
    check_trained,
    create_head,
    facts,
    load_data,
    load_target,
    versions,
)
from draftheads.train.batches import Order, Reading, check_divides
from draftheads.train.checkpoint import Checkpoints, load_moments, load_weights, newest
from draftheads.train.engines import Engine, make_engine
from draftheads.train.faults import explain
from draftheads.train.features import FeatureSource, make_features
from draftheads.train.judge import Judge, check_judge
from draftheads.train.judge_choices import decodes
from draftheads.train.launch import StopRequest, agreeing, make_accelerator, speaker
from draftheads.train.learner import make_learner
from draftheads.train.progress import Progress
from draftheads.train.recipe import Recipe
from draftheads.train.report import write_report
from draftheads.train.state import (
    RunState,
    check_same_parts,
    check_same_run,
    continuing,
    read_state,
    same_length,
    shared_choices,
)
from draftheads.train.step import Step


@dataclass(frozen=True)
class Outcome:
    """How a run ended. checkpoint: its newest. step, steps: done and planned. trained: False when
    it had ended before. stopped_by: who interrupted it, or "".
    """

    checkpoint: Path
    step: int
    steps: int
    trained: bool
    stopped_by: str = ""

    @property
    def finished(self) -> bool:
        """False when the run was interrupted."""
        return self.step >= self.steps


def fit(recipe: Recipe) -> Outcome:
    """Train as the recipe says, going on from the newest whole checkpoint in `run.output`; save;
    return how it ended.

    Raises ValueError for a recipe, data or launch that cannot work, and when the loss stays
    non-finite; OSError when a checkpoint cannot be written.
    """
    accelerator = make_accelerator(recipe)
    try:
        return _go_on(recipe, accelerator)
    finally:
        gc.collect()  # what FSDP2 holds of the process group, before that is torn down
        accelerator.end_training()


class Trainer:
    """One process's part of one run. checkpoint: what it goes on from."""

    def __init__(
        self, recipe: Recipe, accelerator: Accelerator, checkpoint: Path | None = None
    ) -> None:
        self.recipe, self.accelerator, self.checkpoint = recipe, accelerator, checkpoint
        self.say, self.world = speaker(accelerator), accelerator.num_processes
        check_judge(recipe, self.say)
        self.target = load_target(recipe, accelerator)
        with agreeing(accelerator) as said:
            self.data = load_data(recipe, self.target, self.say)
            said["target"], said["data"] = self.target.fingerprint(), self.data.documents.digest()
        old = read_state(checkpoint) if checkpoint else None
        reading = Reading(
            len(self.data.train), self.data.train.length, recipe.run.epochs, self.world
        )
        count = old.rows_per_step if old else self._rows_per_step(reading)
        check_divides(count, recipe.data.rows_per_batch, self.world)
        self.order = Order(len(self.data.train), count, recipe.run.seed)
        steps = recipe.run.steps or self.order.steps(recipe.run.epochs or 1)
        steps = old.steps if old and same_length(old, recipe) else steps
        if warning := reading.warning(steps, count):
            self.say(warning)
        self.state = self._start(count, steps)
        if checkpoint and old:
            check_same_parts(checkpoint, old, self.state)
            kept = ("recipe", "steps", "versions")
            self.state = replace(old, **{name: getattr(self.state, name) for name in kept})
        self.head = create_head(recipe, self.target, self.data.documents)
        check_trained(self.head, self.target, self.say)
        self.learner = make_learner(recipe, self.head, self.target)
        # weights and two moments, all float32
        size = 12 * sum(parameter.numel() for parameter in self.learner.trained().values())
        self.engine = self._engine()
        if checkpoint and old:
            self.say(continuing(checkpoint, old, self.state))
        self.features, heldout_features = self._features()
        self.judge = Judge(recipe, accelerator, self.target, self.data, heldout_features)
        places = recipe.run.output, recipe.run.keep
        self.checkpoints = Checkpoints(*places, accelerator, checkpoint, size)

    def run(self, stop: StopRequest) -> Outcome:
        """Train to the last step or until `stop` is asked for; the last step done is saved."""
        saved, by = self.checkpoint, ""
        with ExitStack() as ends:
            ends.callback(self.checkpoints.close)
            progress = Progress(self.accelerator, self.recipe, self.state.step, self.state.steps)
            ends.callback(progress.close)
            started = time.monotonic() - self.state.seconds
            while self.state.step < self.state.steps and not (by or self.state.exhausted):
                asked = self._step(stop, progress)
                by = (stop.by or "another process") if asked else ""
                self.state = replace(self.state, seconds=time.monotonic() - started)
                due = self.state.step % self.recipe.run.save_every == 0
                if asked or due or self.judge.due(self.state.step, self.state.steps):
                    with progress.paused():
                        saved = self._save(progress)
            stop.granted()
        assert saved is not None, "a run has at least one step, and its last step is saved"
        return self._end(saved, by)

    def _end(self, saved: Path, by: str) -> Outcome:
        """How it ended, with a report unless it was interrupted."""
        step, steps = self.state.step, self.state.steps
        if self.state.exhausted and step < steps:
            self.say(self.state.early())
            steps = step
        if step == steps and self.recipe.judge.report and self.accelerator.is_main_process:
            self.say(f"report: {write_report(self.recipe.run.output)}")
        return Outcome(saved, step, steps, trained=True, stopped_by=by)

    def _engine(self) -> Engine:
        """The engine, with what the checkpoint holds of weights and optimizer."""
        choices = self.recipe.run
        if self.checkpoint:
            self.head.load_state_dict(load_weights(self.checkpoint))
            if self.target.adapter:
                self.target.adapter.restore(self.checkpoint / ADAPTER)
        self.head.recompute = choices.gradient_checkpointing
        if choices.compile:
            self.head.compile_layers()
        engine = make_engine(self.learner, self.recipe.optim, self.accelerator)
        if self.checkpoint:
            engine.restore(load_moments(self.checkpoint))
        return engine

    def _features(self) -> tuple[FeatureSource, FeatureSource]:
        """Of the rows to train on and of those held out; frees what of the target is not needed."""
        rows, layers = (self.data.train, self.data.heldout), self.head.training_layers
        sources = make_features(self.recipe, self.target, rows, layers, self.accelerator)
        if self.target.adapter:
            return sources
        if decodes(self.state.recipe):
            if self.recipe.features.mode == "cached":
                self.say("the target stays whole, to judge heads with; judge.every=0 frees it")
            return sources
        freed = self.target.release(
            lm_head=not self.head.needs_unembed, layers=self.recipe.features.mode == "cached"
        )
        if freed:
            self.say(f"freed {freed / 1e6:.4g} MB of the target, not needed to train")
        return sources

    def _rows_per_step(self, reading: Reading) -> int:
        asked, per_batch = self.recipe.run.tokens_per_step, self.recipe.data.rows_per_batch
        rows, note = reading.rows_per_step(asked, per_batch)
        if note:
            self.say(note)
        return rows

    def _start(self, rows: int, steps: int) -> RunState:
        """The state of a run that begins."""
        return RunState(
            step=0,
            steps=steps,
            tokens=0,
            seconds=0.0,
            loss=None,
            tokens_per_step=1.0,
            skipped=0,
            rows_per_step=rows,
            recipe=self.recipe.model_dump(mode="json"),
            target=self.target.fingerprint(),
            data=self.data.counts(),
            versions=versions(),
        )

    def _step(self, stop: StopRequest, progress: Progress) -> bool:
        """One optimizer step; True when any process was asked to stop."""
        parts = self.recipe, self.accelerator, self.target, self.data, self.order
        step = Step(self.state.step, *parts, self.state.steps, self.features)
        rates = self.learner.rates(self.recipe.optim, step.number, self.state.steps)
        loss, ranks_KR = step.accumulate(self.engine)
        flags = torch.tensor([float(stop.heard())], device=loss.device)
        total, asked = self.accelerator.reduce(torch.cat([loss[None], flags]), "sum").tolist()
        norm = self.engine.update(rates)
        is_finite = math.isfinite(norm)
        self.state = replace(
            self.state,
            step=step.number + 1,
            tokens=self.state.tokens + step.tokens,
            loss=total if is_finite else self.state.loss,
            skipped=0 if is_finite else self.state.skipped + 1,
        )
        if is_finite:
            progress.step(self.state.step, total, norm, ranks_KR, step.tokens, rates["heads"])
        else:
            self._skip(step, f"loss {total}, gradient norm {norm}", progress)
        return bool(asked > 0)

    def _skip(self, step: Step, numbers: str, progress: Progress) -> None:
        """Say which batch was to blame; give up after too many steps in a row."""
        recipe, examiner = self.recipe, step.examine(self.engine)
        cause = explain(examiner.found(self.data.train))
        progress.skipped(self.state.step, f"{numbers}; {cause}")
        if self.state.skipped >= recipe.run.max_skipped:
            folder = recipe.run.output / f"bad-{self.state.step:06d}"
            examiner.save(folder)
            raise ValueError(
                f"loss or gradient was not finite in {self.state.skipped} steps up to "
                f"{self.state.step}; {cause}; the last bad batch is in {folder}; lower optim.lr or "
                f"check the target in dtype {recipe.target_dtype}, then run again"
            )

    def _save(self, progress: Progress) -> Path:
        """Judge the heads on held-out documents, give them the tree that follows, write a
        checkpoint.
        """
        recipe, head, step = self.recipe, self.engine.whole(), self.state.step
        scheduled = self.judge.due(step, self.state.steps)
        verdict = self.judge(head, decode=scheduled)
        calibration, measured, drift = verdict.calibration, verdict.measured, verdict.drift
        self.head.tree = head.tree
        progress.judged(step, verdict)
        self.state = replace(
            self.state,
            tokens_per_step=calibration.tokens_per_step,
            measured=measured.facts() if measured else None,
            drift=drift.facts() if drift else None,
        )
        # an interrupted run counts as one that was not
        self.state = self.state.judged() if scheduled else self.state
        results = {
            "steps": step,
            "tokens": self.state.tokens,
            "seconds": self.state.seconds,
            "loss": self.state.loss,
            "predicted_tokens_per_step": calibration.tokens_per_step,
            "heldout_top1": calibration.top1,
            "heldout_top5": calibration.top5,
            **({"decoding": measured.facts()} if measured else {}),
        }
        published = {**results, **facts(recipe, self.data, self.accelerator)}
        moments = self.engine.moments(keep=self.accelerator.is_main_process)
        return self.checkpoints.save(head, moments, self.state, self.target, published)


def _go_on(recipe: Recipe, accelerator: Accelerator) -> Outcome:
    with agreeing(accelerator) as said:
        found, damaged = newest(recipe.run.output)
        old = read_state(found) if found else None
        if found and old:
            check_same_run(found, old, recipe.model_dump(mode="json"))
        said["checkpoint"], said["step"] = found.name if found else "none", old.step if old else 0
        said.update(shared_choices(recipe))
    for fault in damaged:
        speaker(accelerator)(f"warning: passed over and put aside {recipe.run.output}/{fault}")
    if found and old:
        if old.step >= (old.steps if same_length(old, recipe) else recipe.run.steps or math.inf):
            return Outcome(found, old.step, old.step, trained=False)
        state = replace(old, recipe=recipe.model_dump(mode="json"))
        if state.exhausted:
            speaker(accelerator)(f"{state.early()}; raise judge.patience to go on")
            return Outcome(found, old.step, old.step, trained=False)
    trainer = Trainer(recipe, accelerator, found)
    with StopRequest(recipe.run.output) as stop:  # before, there is nothing to save
        return trainer.run(stop)
