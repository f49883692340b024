"""The training loop: features from the frozen target, loss from the head, one optimizer step over
all processes.

Legend: B batch, T tokens, D feature width, K draft depth, R ranks.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from draftheads.train.assemble import (
    check_trained,
    create_head,
    create_optimizer,
    facts,
    load_data,
    load_target,
)
from draftheads.train.batches import Order, accumulation, share
from draftheads.train.checkpoint import (
    Checkpoints,
    RunState,
    Trained,
    check_same_data,
    check_same_run,
    newest,
    read_state,
)
from draftheads.train.features import Features
from draftheads.train.heldout import calibrate, observe
from draftheads.train.launch import StopRequest, make_accelerator, prepare_deepspeed
from draftheads.train.progress import Progress
from draftheads.train.recipe import OptimChoices, Recipe

MAX_SKIPPED = 3
"""Steps in a row without a finite loss and gradient after which a run is lost."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. checkpoint: its newest. step, steps: done and planned. trained: False when
    it had ended before.
    """

    checkpoint: Path
    step: int
    steps: int
    trained: bool

    @property
    def finished(self) -> bool:
        """False when the run was interrupted."""
        return self.step >= self.steps


def fit(recipe: Recipe) -> Outcome:
    """Train as the recipe says, going on from the newest checkpoint in `run.output`; save; return
    how it ended.

    Raises ValueError for a recipe, data or launch that cannot work, and when the loss stays
    non-finite.
    """
    accelerator = make_accelerator(recipe)
    found = newest(recipe.run.output)
    old = read_state(found) if found else None
    if found and old:
        check_same_run(found, old, recipe.model_dump(mode="json"))
        lengths = {name: old.recipe["run"][name] for name in ("steps", "epochs")}
        same_length = all(getattr(recipe.run, name) == length for name, length in lengths.items())
        if old.step >= (old.steps if same_length else recipe.run.steps or math.inf):
            accelerator.end_training()
            return Outcome(found, old.step, old.step, trained=False)
    with StopRequest() as stop:
        try:
            return Trainer(recipe, accelerator).run(stop, found)
        finally:
            accelerator.end_training()


class Trainer:
    """One process's part of one run."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        self.target = load_target(recipe, accelerator)
        self.data = load_data(recipe, self.target, accelerator.print)
        self.checkpoints = Checkpoints(recipe.run.output, recipe.run.keep, accelerator)
        self.micro_batches, note = accumulation(
            recipe.run.tokens_per_step,
            recipe.data.rows_per_batch,
            self.data.train.length,
            accelerator.num_processes,
        )
        if note:
            accelerator.print(note)
        self.order = Order(
            len(self.data.train),
            self.micro_batches * recipe.data.rows_per_batch * accelerator.num_processes,
            recipe.run.seed,
        )
        self.steps = recipe.run.steps or self.order.steps(recipe.run.epochs or 1)
        self.trained = self._prepare()
        self.head = self.trained.head
        self.features = Features(
            self.target, self.data.train, self.head.training_layers, recipe.data.cache_gb
        )
        self.state = RunState(
            step=0,
            steps=self.steps,
            tokens=0,
            seconds=0.0,
            loss=math.nan,
            tokens_per_step=1.0,
            recipe=recipe.model_dump(mode="json"),
            data=self.data.counts(),
        )
        self.skipped = 0

    def run(self, stop: StopRequest, checkpoint: Path | None) -> Outcome:
        """Train to the last step or until `stop` is asked for; the last step done is saved."""
        if checkpoint:
            self._continue(checkpoint)
        progress = Progress(self.accelerator, self.recipe, self.state.step, self.steps)
        started = time.monotonic() - self.state.seconds
        saved = checkpoint
        try:
            while self.state.step < self.steps:
                asked = self._step(stop, progress)
                self.state = replace(self.state, seconds=time.monotonic() - started)
                due = self.state.step % self.recipe.run.save_every == 0
                if asked or due or self.state.step == self.steps:
                    saved = self._save(progress)
                if asked:
                    break
        finally:
            progress.close()
        assert saved is not None, "a run has at least one step, and its last step is saved"
        return Outcome(saved, self.state.step, self.steps, trained=True)

    def _prepare(self) -> Trained:
        head = create_head(self.recipe, self.target, self.data.documents)
        optimizer = create_optimizer(head, self.recipe.optim)
        check_trained(optimizer, head, self.target, self.accelerator.print)
        self.accelerator.gradient_accumulation_steps = self.micro_batches
        prepare_deepspeed(
            self.accelerator,
            rows_per_batch=self.recipe.data.rows_per_batch,
            accumulation=self.micro_batches,
            clip=self.recipe.optim.clip,
        )
        model, prepared = self.accelerator.prepare(head, optimizer)
        return Trained(head, model, prepared, self.target)

    def _continue(self, checkpoint: Path) -> None:
        old = read_state(checkpoint)
        check_same_data(checkpoint, old, self.state.data)
        self.checkpoints.load(checkpoint, self.trained)
        self.state = replace(old, steps=self.steps, recipe=self.state.recipe)
        self.accelerator.print(f"continuing {checkpoint} at step {old.step} of {self.steps}")

    def _step(self, stop: StopRequest, progress: Progress) -> bool:
        """One optimizer step; True when any process was asked to stop."""
        step = self.state.step
        rows = self.order.step(step)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        torch.manual_seed(hash((self.recipe.run.seed, step, rank)) % (1 << 63))
        learned = sum(self.data.train.learned[row] for row in rows)  # over all processes
        mine = share(rows, self.recipe.data.rows_per_batch, rank, world)
        lr = learning_rate(self.recipe.optim, step, self.steps)
        for group in self.trained.optimizer.param_groups:  # first: DeepSpeed steps in backward
            group["lr"] = lr
        loss, ranks_KR = self._accumulate(mine, learned)
        flags = torch.tensor([float(stop.asked)], device=loss.device)
        total, asked = self.accelerator.reduce(torch.cat([loss[None], flags]), "sum").tolist()
        norm = self._update(step + 1, total, progress)
        tokens = sum(self.data.train.sizes[row] for row in rows)
        self.state = replace(
            self.state, step=step + 1, tokens=self.state.tokens + tokens, loss=total
        )
        progress.step(step + 1, total, norm, ranks_KR, tokens, lr)
        return bool(asked > 0)

    def _accumulate(self, micro_batches: list[list[int]], learned: int) -> tuple[Tensor, Tensor]:
        """Gradients of this process's share; (its part of the loss, its ranks_KR)."""
        loss = torch.zeros((), device=self.accelerator.device)
        ranks_KR: Tensor | None = None
        # DDP averages over processes, accelerate and DeepSpeed over micro batches; this loss is
        # one mean over all learned tokens of the step
        undo = len(micro_batches) * self.accelerator.num_processes
        for rows in micro_batches:
            batch = self.data.train.batch(rows).to(self.accelerator.device)
            features_BTD = self.features(rows, batch)
            with self.accelerator.accumulate(self.trained.model):
                out = self.trained.model(batch, features_BTD, self.target)
                self.accelerator.backward(out.loss * (undo / learned))
            loss += out.loss.detach() / learned
            ranks_KR = out.ranks_KR if ranks_KR is None else ranks_KR + out.ranks_KR
        assert ranks_KR is not None, "a step has at least one micro batch"
        return loss, ranks_KR

    def _update(self, step: int, loss: float, progress: Progress) -> float:
        """Step the optimizer, unless loss or gradient is not finite; all processes see the same
        numbers. (DeepSpeed has stepped already: there a bad step is only counted.) Returns the
        gradient's norm before clipping.
        """
        optimizer, recipe = self.trained.optimizer, self.recipe
        parameters = self.trained.model.parameters()
        norm = float(self.accelerator.clip_grad_norm_(parameters, recipe.optim.clip) or 0.0)
        if math.isfinite(loss) and math.isfinite(norm):
            optimizer.step()
            self.skipped = 0
        else:
            self.skipped += 1
            progress.say(f"step {step} skipped: loss {loss}, gradient norm {norm}")
        optimizer.zero_grad()
        if self.skipped == MAX_SKIPPED:
            raise ValueError(
                f"loss or gradient was not finite in {MAX_SKIPPED} steps up to {step}; lower "
                f"optim.lr or check the target in dtype {recipe.target_dtype}, then run again"
            )
        return norm

    def _save(self, progress: Progress) -> Path:
        """Judge the heads on held-out documents, give them the tree that follows, write a
        checkpoint.
        """
        recipe = self.recipe
        ranks_MK = observe(
            self.head,
            self.target,
            self.data.heldout,
            recipe.data.rows_per_batch,
            self.accelerator,
        )
        calibration = calibrate(ranks_MK, recipe.head.nodes, self.head.tree)
        self.head.tree = calibration.tree
        progress.evaluated(self.state.step, calibration)
        self.state = replace(self.state, tokens_per_step=calibration.tokens_per_step)
        results = {
            "steps": self.state.step,
            "tokens": self.state.tokens,
            "seconds": self.state.seconds,
            "loss": self.state.loss,
            "predicted_tokens_per_step": calibration.tokens_per_step,
            "heldout_top1": calibration.top1,
            "heldout_top5": calibration.top5,
        }
        published = {**results, **facts(recipe, self.data, self.accelerator)}
        return self.checkpoints.save(self.trained, self.state, published)


def learning_rate(choices: OptimChoices, step: int, steps: int) -> float:
    """Of the update that follows `step` steps: linear warm-up, then cosine to zero at `steps`, or
    constant.
    """
    warmup = round(choices.warmup * steps)
    if step < warmup:
        return choices.lr * (step + 1) / warmup
    if choices.schedule == "constant":
        return choices.lr
    return choices.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
