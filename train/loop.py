"""Which batch and what in it was not finite, once a step was.

Legend: B batch, T tokens, D feature width.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor

from draftheads.heads.adapter import FOLDER as ADAPTER
from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.files import staged
from draftheads.heads.target import Target
from draftheads.train.batches import Order, Reading, check_divides, share
from draftheads.train.checkpoint import (
    Checkpoints,
    RunState,
    check_same_parts,
    check_same_run,
    continuing,
    load_optimizer_state,
    load_weights,
    newest,
    read_state,
    same_length,
    shared_choices,
)
from draftheads.train.engines import Engine, autocast, make_engine, make_learner
from draftheads.train.evaluate import Evaluator, check_eval
from draftheads.train.features import FeatureSource, make_features
from draftheads.train.launch import StopRequest, agreeing, main_process_log, make_accelerator
from draftheads.train.progress import Progress, check_trackers
from draftheads.train.recipe import Recipe
from draftheads.train.report import write_report
from draftheads.train.setup import (
    TrainingData,
    check_trained,
    create_head,
    facts,
    load_data,
    load_target,
    versions,
)

if TYPE_CHECKING:
    from draftheads.train.batches import Rows

SHOWN = 8
"""Row, answer and parameter names given in a line."""


@dataclass(frozen=True)
class Fault:
    """A micro batch with something in it that is not finite.

    process, batch: which one, micro batches counted over all processes of the step. rows, answers:
    what is in it. source: the first thing on the way from tokens to gradient that is not finite.
    """

    process: int
    batch: int
    rows: list[int]
    answers: list[int]
    source: str

    def __str__(self) -> str:
        return (
            f"batch {self.batch} on process {self.process} (rows {_some(self.rows)}; answers "
            f"{_some(self.answers)}): {self.source}"
        )


class Examiner:
    """Runs micro batches of a bad step again, one by one; its randomness is a function of the
    step, so they are the same.
    """

    def __init__(self, head: DraftHead, target: Target, accelerator: Accelerator) -> None:
        self.head, self.target, self.accelerator = head, target, accelerator
        self.kept: list[tuple[Fault, dict[str, Tensor]]] = []

    def examine(self, number: int, rows: Sequence[int], batch: Batch, features_BTD: Tensor) -> None:
        """Note what is wrong with this process's micro batch `number`, if anything is."""
        source = next(self._sources(batch, features_BTD), None)
        if source is not None:
            fault = Fault(self.accelerator.process_index, number, list(rows), [], source)
            tensors = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
            self.kept.append((fault, {**tensors, "features_BTD": features_BTD}))

    def found(self, data: Rows) -> list[Fault]:
        """The faults of all processes, in order of their batches."""
        mine = [replace(fault, answers=data.answers(fault.rows)) for fault, _ in self.kept]
        self.kept = [(fault, kept[1]) for fault, kept in zip(mine, self.kept, strict=True)]
        return sorted(gather_object(mine), key=lambda fault: fault.batch)

    def save(self, folder: Path) -> None:
        """Write this process's first bad batch, if it has one: tensors, and what is known."""
        for fault, tensors in self.kept[:1]:
            with staged(folder / f"process-{fault.process}") as staging:
                on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
                save_file(on_cpu, staging / "batch.safetensors")
                (staging / "fault.json").write_text(json.dumps(asdict(fault), indent=2) + "\n")

    def _sources(self, batch: Batch, features_BTD: Tensor) -> Iterator[str]:
        bad = [name for name, p in self.head.named_parameters() if not p.isfinite().all()]
        if bad:
            yield f"weights of the heads are not finite: {_some(bad)}"
        wrong_BT = ~features_BTD.isfinite().all(-1) & (batch.documents_BT >= 0)
        if wrong_BT.any():
            line, place = wrong_BT.nonzero()[0].tolist()
            yield (
                f"the target's features are not finite at {int(wrong_BT.sum())} tokens, first in "
                f"line {line} of the batch at token {place}"
            )
        trained = {n: p for n, p in self.head.named_parameters() if p.requires_grad}
        loss = self.head(batch, features_BTD, self.target).loss
        if not loss.isfinite():
            yield f"the loss of the heads is {float(loss.detach())}"
        # not backward(): DDP's hooks would take these gradients for the step's
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        bad = [
            name
            for name, grad in zip(trained, grads, strict=True)
            if grad is not None and not grad.isfinite().all()
        ]
        if bad:
            yield f"gradients are not finite: {_some(bad)}"


def explain(faults: Sequence[Fault]) -> str:
    """One line for all of them."""
    if not faults:
        return "no batch shows it when run alone: a sum over batches overflowed, or memory is bad"
    more = f"; and {len(faults) - 1} more batches" if len(faults) > 1 else ""
    return f"{faults[0]}{more}"


def _some(names: Sequence[object]) -> str:
    shown = ", ".join(str(name) for name in names[:SHOWN])
    return f"{shown}, ... ({len(names)})" if len(names) > SHOWN else shown


# The gradients of one optimizer step: its micro batches, this process's share of them, their
# randomness. All of it is a function of (seed, step); nothing is remembered between steps.
#
# Legend: B batch, T tokens, D feature width, K draft depth, R ranks.


@dataclass(frozen=True)
class Step:
    """Number `number` of `steps`, counted from 0. order: which rows it has."""

    number: int
    recipe: Recipe
    accelerator: Accelerator
    target: Target
    data: TrainingData
    order: Order
    steps: int
    features: FeatureSource

    @property
    def tokens(self) -> int:
        """Of all processes, padding not counted."""
        return sum(self.data.train.sizes[row] for row in self.order.step(self.number))

    def accumulate(self, engine: Engine) -> tuple[Tensor, Tensor]:
        """Gradients of this process's share, in `engine`; (its part of the loss, its ranks_KR).

        The loss is one mean over all learned tokens of the step.
        """
        learned = sum(self.data.train.learned[row] for row in self.order.step(self.number))
        last_number = self._share()[-1][0]
        engine.learner.done = self.number / self.steps
        losses: list[Tensor] = []
        ranks: list[Tensor] = []
        for number, _, batch, features_BTD in self._batches():
            last = number == last_number
            with engine.accumulating(last=last):
                out = engine.model(batch, features_BTD, self.target)
                loss = out.loss / learned
                # a loss that is not finite shall make gradients that are not, on every engine
                poison = torch.where(loss.detach().isfinite(), 1.0, math.nan)
                engine.backward(loss * poison, last=last)
            losses.append(loss.detach())
            ranks.append(out.ranks_KR)
        return torch.stack(losses).sum(), torch.stack(ranks).sum(0)

    def examine(self, engine: Engine) -> Examiner:
        """Run this process's share again, alone, and note what is not finite in it."""
        examiner = Examiner(engine.whole(), self.target, self.accelerator)
        for number, rows, batch, features_BTD in self._batches():
            with torch.no_grad():
                seen_BTD = engine.learner.seen(batch, features_BTD, self.target)
            with autocast(self.recipe.run.precision, self.accelerator.device):
                examiner.examine(number, rows, batch, seen_BTD)
        return examiner

    def _share(self) -> list[tuple[int, list[int]]]:
        rows = self.order.step(self.number)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return share(rows, self.recipe.data.rows_per_batch, rank, world)

    def _batches(self) -> Iterator[tuple[int, list[int], Batch, Tensor]]:
        """Number in the step, rows, tokens and features of this process's micro batches. Random
        numbers that follow belong to the micro batch, whoever computes it, in whatever run.
        """
        for number, rows in self._share():
            batch = self.data.train.batch(rows).to(self.accelerator.device)
            features_BTD = self.features(rows, batch)
            torch.manual_seed(hash((self.recipe.run.seed, self.number, number)) % (1 << 63))
            yield number, rows, batch, features_BTD


# The training loop: features from the frozen target, loss from the head, one optimizer step over
# all processes.
#
# Legend: M learned positions, K draft depth, R ranks.


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
    check_trackers(recipe.run.trackers)
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
        self.log, self.world = main_process_log(accelerator), accelerator.num_processes
        check_eval(recipe, self.log)
        self.target = load_target(recipe, accelerator)
        with agreeing(accelerator) as said:
            self.data = load_data(recipe, self.target, self.log)
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
            self.log(warning)
        self.state = self._start(count, steps)
        if checkpoint and old:
            check_same_parts(checkpoint, old, self.state)
            kept = ("recipe", "steps", "versions")
            self.state = replace(old, **{name: getattr(self.state, name) for name in kept})
        self.head = create_head(recipe, self.target, self.data.documents)
        check_trained(self.head, self.target, self.log)
        self.learner = make_learner(recipe, self.head, self.target)
        # weights and two moments, all float32
        size = 12 * sum(parameter.numel() for parameter in self.learner.trained().values())
        self.engine = self._engine()
        if checkpoint and old:
            self.log(continuing(checkpoint, old, self.state))
        self.features, heldout_features = self._features()
        self.judge = Evaluator(recipe, accelerator, self.target, self.data, heldout_features)
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
            self.log(self.state.early())
            steps = step
        if step == steps and self.recipe.eval.report and self.accelerator.is_main_process:
            self.log(f"report: {write_report(self.recipe.run.output)}")
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
            engine.restore(load_optimizer_state(self.checkpoint))
        return engine

    def _features(self) -> tuple[FeatureSource, FeatureSource]:
        """Of the rows to train on and of those held out; frees what of the target is not needed."""
        rows, layers = (self.data.train, self.data.heldout), self.head.training_layers
        sources = make_features(self.recipe, self.target, rows, layers, self.accelerator)
        if self.target.adapter:
            return sources
        if self.recipe.decodes:
            if self.recipe.features.mode == "cached":
                self.log("the target stays whole, to judge heads with; eval.every=0 frees it")
            return sources
        freed = self.target.release(
            lm_head=not self.head.needs_unembed, layers=self.recipe.features.mode == "cached"
        )
        if freed:
            self.log(f"freed {freed / 1e6:.4g} MB of the target, not needed to train")
        return sources

    def _rows_per_step(self, reading: Reading) -> int:
        asked, per_batch = self.recipe.run.tokens_per_step, self.recipe.data.rows_per_batch
        rows, note = reading.rows_per_step(asked, per_batch)
        if note:
            self.log(note)
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
            recipe=self.recipe,
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
        optimizer_state = self.engine.optimizer_state(keep=self.accelerator.is_main_process)
        return self.checkpoints.save(head, optimizer_state, self.state, self.target, published)


def _go_on(recipe: Recipe, accelerator: Accelerator) -> Outcome:
    with agreeing(accelerator) as said:
        found, damaged = newest(recipe.run.output)
        old = read_state(found) if found else None
        if found and old:
            check_same_run(found, old, recipe)
        said["checkpoint"], said["step"] = found.name if found else "none", old.step if old else 0
        said.update(shared_choices(recipe))
    for fault in damaged:
        main_process_log(accelerator)(
            f"warning: passed over and put aside {recipe.run.output}/{fault}"
        )
    if found and old:
        if old.step >= (old.steps if same_length(old, recipe) else recipe.run.steps or math.inf):
            return Outcome(found, old.step, old.step, trained=False)
        state = replace(old, recipe=recipe)
        if state.exhausted:
            main_process_log(accelerator)(f"{state.early()}; raise eval.patience to go on")
            return Outcome(found, old.step, old.step, trained=False)
    trainer = Trainer(recipe, accelerator, found)
    with StopRequest(recipe.run.output) as stop:  # before, there is nothing to save
        return trainer.run(stop)
