"""The training loop: the target's features, the head's loss, one optimizer step over all processes.

A step's rows, micro batches and random numbers are functions of (seed, step), and its learning rate
one of the step: to resume is to continue at step n.

Legend: B batch, T tokens, D feature width, K draft depth, R ranks.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftheads.heads.adapter import FOLDER as ADAPTER
from draftheads.heads.base import DraftHead
from draftheads.heads.target import Target
from draftheads.train.batches import Order, Reading, share
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
from draftheads.train.engines import Engine, make_engine, make_learner
from draftheads.train.evaluate import Evaluator, check_eval
from draftheads.train.features import FeatureSource, make_features
from draftheads.train.launch import StopRequest, agreeing, launched, main_process_log
from draftheads.train.progress import Progress, check_trackers, write_report
from draftheads.train.recipe import Recipe
from draftheads.train.setup import (
    TrainingData,
    create_head,
    describe_trained,
    facts,
    load_data,
    load_target,
    versions,
)

SHOWN = 8
"""Documents that a line about a skipped step names."""


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


@dataclass
class Run:
    """One process's part of one run. state: as of the last step done."""

    recipe: Recipe
    accelerator: Accelerator
    target: Target
    data: TrainingData
    order: Order
    head: DraftHead
    engine: Engine
    features: FeatureSource
    evaluator: Evaluator
    checkpoints: Checkpoints
    state: RunState


class StepResult(NamedTuple):
    """What a step came to. loss: mean over the learned tokens of all processes. norm: of the
    gradient before clipping; not finite where nothing was changed. lr: of the heads. ranks_KR: of
    this process. stop: whether any process was asked to. documents: of losses that are not finite.
    """

    loss: float
    norm: float
    lr: float
    ranks_KR: Tensor
    stop: bool
    documents: list[int]


def fit(recipe: Recipe, accelerator: Accelerator | None = None) -> Outcome:
    """Train as the recipe says, from the newest intact checkpoint in `run.output`, and save.

    accelerator: of processes that are together already, and stay so. Raises ValueError for a
    recipe, data or launch that cannot work, and when the loss stays non-finite; OSError when a
    checkpoint cannot be written.
    """
    check_trackers(recipe.run.trackers)
    with ExitStack() as ends:
        accelerator = ends.enter_context(
            nullcontext(accelerator) if accelerator else launched(recipe)
        )
        log = main_process_log(accelerator)
        saved, old = _resumed(recipe, accelerator)
        if saved and old:
            planned = old.steps if same_length(old, recipe) else recipe.run.steps or math.inf
            now = replace(old, recipe=recipe)
            if old.step < planned and now.exhausted:
                log(f"{now.early()}; raise eval.patience to resume")
            if old.step >= planned or now.exhausted:
                return Outcome(saved, old.step, old.step, trained=False)
        run = start(recipe, accelerator, saved, old)
        ends.callback(delattr, run, "engine")  # a DDP that outlives its process group hangs
        ends.callback(run.checkpoints.close)
        stop = ends.enter_context(StopRequest(recipe.run.output))  # before, nothing is to be saved
        progress = Progress(accelerator, recipe, run.state.step, run.state.steps)
        ends.enter_context(closing(progress))
        started, by = time.monotonic() - run.state.seconds, ""
        while run.state.step < run.state.steps and not by and not run.state.exhausted:
            result = train_step(run, stop.heard())
            _record(run, result, progress)
            run.state = replace(run.state, seconds=time.monotonic() - started)
            by = (stop.by or "another process") if result.stop else ""
            due = run.evaluator.due(run.state.step, run.state.steps)
            if by or due or run.state.step % recipe.run.save_every == 0:
                with progress.paused():
                    saved = save(run, progress, scheduled=due)
        assert saved, "a run has at least one step, and its last step is saved"
        step, steps = run.state.step, run.state.steps
        if run.state.exhausted and step < steps:
            log(run.state.early())
            steps = step
        if step == steps and recipe.eval.report and accelerator.is_main_process:
            log(f"report: {write_report(recipe.run.output)}")
        return Outcome(saved, step, steps, trained=True, stopped_by=by)


def train_step(run: Run, stop: bool) -> StepResult:
    """One optimizer step over all processes, unless its gradient is not finite. stop: whether this
    process was asked to stop.

    The loss is one mean over all learned tokens of the step.
    """
    recipe, step, device = run.recipe, run.state.step, run.accelerator.device
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    numbers = run.order.step(step)
    learned = sum(run.data.train.learned[row] for row in numbers)
    batches = share(numbers, recipe.data.rows_per_batch, rank, world)
    losses: list[Tensor] = []
    ranks: list[Tensor] = []
    for number, rows in batches:
        last = number == batches[-1][0]
        batch = run.data.train.batch(rows).to(device)
        features_BTD = run.features(rows, batch)
        # random numbers belong to the micro batch, whoever computes it
        torch.manual_seed(hash((recipe.run.seed, step, number)) % (1 << 63))
        with run.engine.accumulating(last=last):
            out = run.engine.model(batch, features_BTD, run.target, step / run.state.steps)
            loss = out.loss / learned
            # a loss that is not finite shall make gradients that are not, on every engine
            poison = torch.where(loss.detach().isfinite(), 1.0, math.nan)
            run.engine.backward(loss * poison, last=last)
        losses.append(loss.detach())
        ranks.append(out.ranks_KR)
    mine = torch.stack(losses)
    flags = torch.tensor([float(stop)], device=mine.device)
    total, asked = run.accelerator.reduce(torch.cat([mine.sum()[None], flags]), "sum").tolist()
    rates = run.engine.learner.rates(recipe.optim, step, run.state.steps)
    norm = run.engine.update(rates)
    documents: list[int] = []
    if not math.isfinite(norm):
        bad = [rows for (_, rows), loss in zip(batches, mine, strict=True) if not loss.isfinite()]
        found = [run.data.train.document_numbers(rows) for rows in bad]
        documents = sorted({number for numbers in gather_object(found) for number in numbers})
    ranks_KR = torch.stack(ranks).sum(0)
    return StepResult(total, norm, rates["heads"], ranks_KR, asked > 0, documents)


def _record(run: Run, result: StepResult, progress: Progress) -> None:
    """Count a step. Raises ValueError after too many in a row that were not finite."""
    state, recipe = run.state, run.recipe
    rows = run.order.step(state.step)
    tokens = sum(run.data.train.sizes[row] for row in rows)
    is_finite = math.isfinite(result.norm)
    run.state = replace(
        state,
        step=state.step + 1,
        tokens=state.tokens + tokens,
        loss=result.loss if is_finite else state.loss,
        skipped=0 if is_finite else state.skipped + 1,
    )
    if is_finite:
        numbers = result.loss, result.norm, result.ranks_KR, tokens, result.lr
        progress.step(run.state.step, *numbers)
        return
    documents = result.documents or sorted(set(run.data.train.document_numbers(rows)))
    named = ", ".join(map(str, documents[:SHOWN]))
    if len(documents) > SHOWN:
        named = f"{named} and {len(documents) - SHOWN} more"
    cause = f"loss {result.loss}, gradient norm {result.norm} in documents {named}"
    progress.skipped(run.state.step, cause)
    if run.state.skipped >= recipe.run.max_skipped:
        raise ValueError(
            f"loss or gradient was not finite in {run.state.skipped} steps up to {run.state.step}; "
            f"{cause}; lower optim.lr or check the target in dtype {recipe.target_dtype}, then run "
            "again"
        )


def save(run: Run, progress: Progress, *, scheduled: bool) -> Path:
    """Evaluate the heads on held-out documents, give them the tree that follows, and write a
    checkpoint. scheduled: as the recipe says, not because the run was interrupted.
    """
    head, step = run.engine.full_head(), run.state.step
    found = run.evaluator(head, decode=scheduled)
    run.head.tree = head.tree
    progress.evaluated(step, found)
    measured = asdict(found.measured) if found.measured else None
    run.state = replace(
        run.state,
        tokens_per_step=found.calibration.tokens_per_step,
        measured=measured,
        drift=asdict(found.drift) if found.drift else None,
    )
    if scheduled:
        run.state = run.state.judged()
    published = {
        "steps": step,
        "tokens": run.state.tokens,
        "seconds": run.state.seconds,
        "loss": run.state.loss,
        "predicted_tokens_per_step": found.calibration.tokens_per_step,
        "heldout_top1": found.calibration.top1,
        "heldout_top5": found.calibration.top5,
        **({"decoding": measured} if measured else {}),
        **facts(run.recipe, run.data, run.accelerator),
    }
    optimizer_state = run.engine.optimizer_state(keep=run.accelerator.is_main_process)
    return run.checkpoints.save(head, optimizer_state, run.state, run.target, published)


def start(
    recipe: Recipe, accelerator: Accelerator, checkpoint: Path | None, old: RunState | None
) -> Run:
    """Everything that a run needs, as it was in `checkpoint`, whose state is `old`."""
    log = main_process_log(accelerator)
    check_eval(recipe, log)
    with agreeing(accelerator) as said:
        target = load_target(recipe, accelerator)
        data = load_data(recipe, target, log)
        said["target"], said["data"] = target.fingerprint(), data.counts["digest"]
    order, state = _planned(recipe, accelerator, target, data, old)
    head = create_head(recipe, target, data.documents)
    describe_trained(head, target, log)
    if checkpoint and old:
        check_same_parts(checkpoint, old, state)
        state = replace(old, recipe=recipe, steps=state.steps, versions=state.versions)
        head.load_state_dict(load_weights(checkpoint))
        if target.adapter:
            target.adapter.restore(checkpoint / ADAPTER)
    head.recompute = recipe.run.gradient_checkpointing
    if recipe.run.compile:
        head.compile_layers()
    learner = make_learner(recipe, head, target)
    parameters = sum(parameter.numel() for parameter in learner.trained().values())
    engine = make_engine(learner, recipe.optim, accelerator)
    if checkpoint and old:
        engine.restore(load_optimizer_state(checkpoint))
        log(continuing(checkpoint, old, state))
    rows = data.train, data.heldout
    features, heldout = make_features(recipe, target, rows, head.training_layers, accelerator)
    is_cached = recipe.features.mode == "cached"
    if not (recipe.decodes or target.adapter):
        freed = target.release(lm_head=not head.needs_unembed, layers=is_cached)
        log(f"freed {freed / 1e6:.4g} MB of the target, not needed to train")
    elif is_cached and not target.adapter:
        log("the target stays in memory, to decode with; eval.every=0 frees it")
    evaluator = Evaluator(recipe, accelerator, target, data, heldout)
    size = 12 * parameters  # weights and two moments, float32
    places = recipe.run.output, recipe.run.keep
    checkpoints = Checkpoints(*places, accelerator, checkpoint, size)
    parts = recipe, accelerator, target, data, order, head, engine, features
    return Run(*parts, evaluator, checkpoints, state)


def _planned(
    recipe: Recipe,
    accelerator: Accelerator,
    target: Target,
    data: TrainingData,
    old: RunState | None,
) -> tuple[Order, RunState]:
    """Which rows each step has, and the state of a run that begins. A resumed run keeps its rows
    per step, and its length where the recipe's has not changed.
    """
    world, log = accelerator.num_processes, main_process_log(accelerator)
    reading = Reading(len(data.train), data.train.length, recipe.run.epochs, world)
    per_batch, note = recipe.data.rows_per_batch, ""
    if old:
        rows_per_step = old.rows_per_step
    else:
        rows_per_step, note = reading.rows_per_step(recipe.run.tokens_per_step, per_batch)
    order = Order(len(data.train), rows_per_step, recipe.run.seed)
    share(order.step(0), per_batch, 0, world)  # refuses processes that cannot share a step
    steps = recipe.run.steps or order.steps(recipe.run.epochs or 1)
    if old and same_length(old, recipe):
        steps = old.steps
    for line in (note, reading.warning(steps, rows_per_step)):
        if line:
            log(line)
    return order, RunState(
        step=0,
        steps=steps,
        tokens=0,
        seconds=0.0,
        loss=None,
        tokens_per_step=1.0,
        skipped=0,
        rows_per_step=rows_per_step,
        recipe=recipe,
        target=target.fingerprint(),
        data=data.counts,
        versions=versions(),
    )


def _resumed(recipe: Recipe, accelerator: Accelerator) -> tuple[Path | None, RunState | None]:
    """The newest intact checkpoint and its state, with this recipe, where there is one."""
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
    return found, old
