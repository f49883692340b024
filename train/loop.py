"""The training loop: the target's features, the head's loss, one optimizer step over all processes.

A step's rows, micro batches and random numbers are functions of (seed, step), and its learning rate
of the step: resuming is continuing at step n.

Legend: B batch, T tokens, D feature width, K draft depth, R ranks.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from safetensors.torch import load_file
from torch import Tensor

from draftheads.arguments import check_path
from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.formats.hub import WEIGHTS, refusals
from draftheads.heads.tables import flat
from draftheads.heads.target.adapter import FOLDER as ADAPTER
from draftheads.heads.target.model import Target
from draftheads.train.batches import FEW_STEPS, Order, Reading, share
from draftheads.train.checkpoint import (
    Checkpoints,
    Content,
    RunState,
    Saved,
    check_data,
    check_inputs,
    check_writable,
    load_optimizer_state,
    newest,
    refuse_changes,
)
from draftheads.train.data.answers import has_answers, read_manifest
from draftheads.train.engines import Engine, make_engine, make_learner
from draftheads.train.evaluate import Evaluator
from draftheads.train.faults import lost_processes, memory_errors
from draftheads.train.features.sources import SharedFaults, make_features
from draftheads.train.launch import (
    StopRequest,
    agreeing,
    main_process_log,
    make_accelerator,
    use_huge_pages,
)
from draftheads.train.metrics import Progress, check_trackers
from draftheads.train.origin import read_origin, sizes_of
from draftheads.train.recipe import Recipe, differences
from draftheads.train.setup import (
    Log,
    TrainingData,
    create_head,
    load_data,
    load_target,
    training_facts,
    versions,
)

AHEAD = 2
"""Micro batches that are made ahead, at least."""
SHOWN = 8
"""Documents listed in the line about a skipped step."""


MicroBatch = tuple[int, list[int], Batch]
"""Its number in the step, its rows, and these in host memory."""
OnEvaluation = Callable[[int, dict[str, Any]], bool | None]
"""(step, figures as in metrics.jsonl) -> False to end the run."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. checkpoint: the newest. step, steps: done and planned. trained: False if the
    run had already ended. stopped_by: the signal or file that interrupted it, or "".
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


@dataclass
class Run:
    """One process's part of a run. state: after the last step done."""

    recipe: Recipe
    accelerator: Accelerator
    target: Target
    data: TrainingData
    order: Order
    head: DraftHead
    engine: Engine
    features: SharedFaults
    evaluator: Evaluator
    checkpoints: Checkpoints
    state: RunState
    on_evaluation: OnEvaluation | None = None
    asked: str = ""
    """What asked for the end of the run, other than a signal."""
    batches: Generator[MicroBatch] = field(init=False)

    def __post_init__(self) -> None:
        self.batches = self._micro_batches()

    def _micro_batches(self) -> Generator[MicroBatch]:
        """All that this process has left to read, made ahead by a thread."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        size = self.recipe.data.rows_per_batch
        pins = self.accelerator.device.type == "cuda"

        def make(rows: Sequence[int]) -> Batch:
            batch = self.data.train.batch(rows)
            return batch.pin_memory() if pins else batch

        ahead = max(AHEAD, self.recipe.rows_ahead // size)
        due: deque[tuple[int, list[int], Future[Batch]]] = deque()
        with ThreadPoolExecutor(1, "batches") as thread:
            for step in range(self.state.step, self.state.steps):
                for number, rows in share(self.order.step(step), size, rank, world):
                    due.append((number, rows, thread.submit(make, rows)))
                    self.features.ahead(rows)
                    if len(due) > ahead:
                        number, rows, future = due.popleft()
                        yield number, rows, future.result()
            for number, rows, future in due:
                yield number, rows, future.result()


class StepResult(NamedTuple):
    """Result of a step. loss: mean over the learned tokens of all processes. norm: of the gradient
    before clipping; if it is not finite, no weights were updated. lr: of the heads. ranks_KR: of
    this process. stop: whether any process was asked to. documents: those with non-finite losses.
    """

    loss: float
    norm: float
    lr: float
    ranks_KR: Tensor
    stop: bool
    documents: list[int]


def fit(
    recipe: Recipe,
    accelerator: Accelerator | None = None,
    *,
    on_evaluation: OnEvaluation | None = None,
) -> Outcome:
    """Train, starting from the newest intact checkpoint in `run.output` if there is one, and save.

    accelerator: of processes that have already joined; left running. on_evaluation: called by the
    first process after each evaluation; where it returns False, the run is saved and ends after the
    next step, as if it was interrupted. Raises ValueError for a
    recipe, data or launch that cannot work, and if the loss stays non-finite; OSError if a
    checkpoint cannot be written.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a Recipe, as of load_recipe, got {recipe!r:.80}")
    use_huge_pages()
    check_trackers(recipe.run.trackers)
    with lost_processes(), memory_errors(_less_memory(recipe)), ExitStack() as ends:
        if accelerator is None:
            accelerator = make_accelerator(recipe)
            ends.callback(accelerator.end_training)
            if accelerator.distributed_type is not DistributedType.NO:
                ends.callback(gc.collect)  # FSDP2 must release the process group first
        devices = [accelerator.device] if accelerator.device.type == "cuda" else []
        ends.enter_context(torch.random.fork_rng(devices))  # the caller's stream goes on
        checkpoint = _resume_point(recipe, accelerator)
        if checkpoint and _is_over(checkpoint.state, recipe, main_process_log(accelerator)):
            # what a process that was killed after it did not come to: `best`, removal of old ones
            Checkpoints(recipe, accelerator, checkpoint.folder, size=0).close()
            step = checkpoint.state.step
            return Outcome(checkpoint.folder, step, step, trained=False)
        run = start(recipe, accelerator, checkpoint, on_evaluation)
        ends.callback(delattr, run, "engine")  # a DDP that outlives its process group hangs
        ends.callback(run.checkpoints.close)
        ends.callback(run.features.close)
        ends.enter_context(closing(run.batches))
        stop = ends.enter_context(StopRequest(recipe.run.output))  # nothing to save before
        if recipe.run.minutes and checkpoint is None:
            _set_length(run, recipe.run.minutes)
        progress = Progress(accelerator, recipe, run.state.step, run.state.steps)
        ends.enter_context(closing(progress))
        with lost_processes():  # named before the launcher ends this process, too
            return _train(run, progress, stop)


def _set_length(run: Run, minutes: float) -> None:
    """Give the run as many steps as fit into these minutes. They are fixed before the first one, as
    learning rates follow from their number.
    """
    epoch = run.state.steps
    first, later = trial_seconds(run)
    rest = 60 * minutes - epoch * first
    steps = 60 * minutes / first if rest < 0 else epoch + rest / later
    run.state = replace(run.state, steps=max(1, int(steps)))
    log = main_process_log(run.accelerator)
    log(f"run.minutes={minutes:g}: {run.state.steps:,} steps of about {first:.3g} s, by a trial")
    if run.state.steps < FEW_STEPS:
        log("warning: few steps to learn from; raise run.minutes or lower run.tokens_per_step")


def trial_seconds(run: Run) -> tuple[float, float]:
    """Mean seconds of a step on the slowest process: in the first epoch, and later, when cached
    features of its rows are in memory. The steps of this trial change nothing.
    """
    seconds = []
    for step in (0, 1, 1):  # the first warms up, the last reads the same rows again
        trial = replace(run, state=replace(run.state, step=step, steps=step + 1))
        began = time.perf_counter()
        with closing(trial.batches):
            train_step(trial, stop=False, is_trial=True)
        seconds.append(time.perf_counter() - began)
    _, first, again = map(max, zip(*gather_object([seconds]), strict=True))
    width = len(run.head.training_layers) * run.target.hidden_size
    token_bytes = width * run.target.dtype.itemsize
    size = token_bytes * sum(run.data.train.sizes) / run.accelerator.num_processes
    cached = min(1.0, run.recipe.data.cache_gb * 1e9 / size)
    return first, first - cached * (first - again)


def _train(run: Run, progress: Progress, stop: StopRequest) -> Outcome:
    """Take steps until the run ends or is asked to stop; the last step is always saved."""
    try:
        return _steps(run, progress, stop)
    except (ValueError, OSError):
        if run.features.is_broken or run.evaluator.features.is_broken:
            _save_without_evaluation(run)
        raise


def _steps(run: Run, progress: Progress, stop: StopRequest) -> Outcome:
    recipe = run.recipe
    began = time.monotonic() - run.state.seconds
    by = ""
    if run.state.lacks_evaluation:
        with progress.paused():
            save(run, progress, scheduled=run.evaluator.due(run.state.step, run.state.steps))
    while run.state.step < run.state.steps and not by and not run.state.exhausted:
        failed = run.checkpoints.failed or run.data.verification.failed
        result = train_step(run, stop.pending() or failed or bool(run.asked))
        _record(run, result, progress)
        run.state = replace(run.state, seconds=time.monotonic() - began)
        if result.stop:
            by = stop.by or run.asked or "another process"
            run.checkpoints.wait()  # raises if a failed write is the reason
        due = run.evaluator.due(run.state.step, run.state.steps)
        if by or due or run.state.step % recipe.run.save_every == 0:
            with progress.paused():
                save(run, progress, scheduled=due)
    run.checkpoints.wait()
    step, steps = run.state.step, run.state.steps
    if run.state.exhausted and step < steps:
        progress.log(_early_end(run.state))
        steps = step
    return Outcome(run.checkpoints.folder(step), step, steps, trained=True, stopped_by=by)


def _is_over(state: RunState, recipe: Recipe, log: Log) -> bool:
    """Whether a run has no step left under this recipe."""
    planned = state.planned_steps(recipe)
    if state.lacks_evaluation:
        return False
    if planned is not None and state.step >= planned:
        return True
    state = replace(state, recipe=recipe)
    if state.exhausted:
        log(f"{_early_end(state)}; raise eval.patience to resume")
    return state.exhausted


def _less_memory(recipe: Recipe) -> str:
    rows, length = recipe.data.rows_per_batch, recipe.data.sequence_length
    line = f"lower data.rows_per_batch ({rows}), data.sequence_length ({length}) or sizes in head"
    if recipe.run.gradient_checkpointing:
        return line
    return f"{line}, or set run.gradient_checkpointing=true"


def train_step(run: Run, stop: bool, *, is_trial: bool = False) -> StepResult:
    """One optimizer step over all processes; skipped if the gradient is not finite. stop: whether
    this process was asked to stop. is_trial: takes the time of a step, and is skipped.

    The loss is one mean over all learned tokens of the step. Raises, on all processes, the error of
    the features of any.
    """
    recipe, step, device = run.recipe, run.state.step, run.accelerator.device
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    numbers = run.order.step(step)
    learned = sum(run.data.train.learned[row] for row in numbers)
    shares = share(numbers, recipe.data.rows_per_batch, rank, world)
    done = 1.0 if is_trial else step / run.state.steps  # a trial is of what costs most
    losses: list[Tensor] = []
    ranks: list[Tensor] = []
    for number, rows, on_host in islice(run.batches, len(shares)):
        last = number == shares[-1][0]
        batch = on_host.to(device)
        features_BTD = run.features(rows, batch)
        # seeded by micro batch, so the number of processes does not matter
        torch.manual_seed(hash((recipe.run.seed, step, number)) % (1 << 63))
        with run.engine.accumulating(last=last):
            out = run.engine.model(batch, features_BTD, run.target, done)
            loss = out.loss / learned
            # a non-finite loss must give non-finite gradients on every engine
            is_good = loss.detach().isfinite() & (not is_trial) & (run.features.fault is None)
            poison = torch.where(is_good, 1.0, math.nan)
            run.engine.backward(loss * poison, last=last)
        losses.append(loss.detach())
        ranks.append(out.ranks_KR)
    mine = torch.stack(losses)
    # one collective for all: whoever is asked to stop, all stop after the same step
    flags = torch.tensor([stop, run.features.fault is not None], device=mine.device)
    sums = torch.cat([mine.sum()[None], flags.to(mine)])
    loss_sum, stops, faults = run.accelerator.reduce(sums, "sum").tolist()
    rates = run.engine.learner.rates(recipe.optim, step, run.state.steps)
    norm = run.engine.update(rates)
    if faults:
        run.features.check(run.accelerator)
    documents: list[int] = []
    if not math.isfinite(norm):
        bad = [rows for (_, rows), loss in zip(shares, mine, strict=True) if not loss.isfinite()]
        suspects = [run.data.train.document_numbers(rows) for rows in bad]
        documents = sorted({number for numbers in gather_object(suspects) for number in numbers})
    ranks_KR = torch.stack(ranks).sum(0)
    return StepResult(loss_sum, norm, rates["heads"], ranks_KR, stops > 0, documents)


def _record(run: Run, result: StepResult, progress: Progress) -> None:
    """Count a step. Raises ValueError after too many consecutive non-finite ones."""
    state, recipe = run.state, run.recipe
    rows = run.order.step(state.step)
    tokens = sum(run.data.train.sizes[row] for row in rows)
    run.state = replace(state, step=state.step + 1, tokens=state.tokens + tokens)
    if math.isfinite(result.norm):
        run.state = replace(run.state, loss=result.loss, skipped=0)
        progress.step(run.state.step, result.loss, result.norm, result.ranks_KR, tokens, result.lr)
        return
    run.state = replace(run.state, skipped=state.skipped + 1)
    documents = result.documents or sorted(set(run.data.train.document_numbers(rows)))
    listed = ", ".join(map(str, documents[:SHOWN]))
    if documents[SHOWN:]:
        listed += " ..."
    cause = f"loss {result.loss}, gradient norm {result.norm} in documents {listed}"
    progress.skipped(run.state.step, cause)
    if run.state.skipped >= recipe.run.max_skipped:
        raise ValueError(
            f"loss or gradient was not finite in {run.state.skipped} steps up to {run.state.step}; "
            f"{cause}; lower optim.lr or check the target in dtype {recipe.target_dtype}, then run "
            "again"
        )


def save(run: Run, progress: Progress, *, scheduled: bool) -> None:
    """Evaluate the heads on held-out documents, fit their tree to the result, and begin to write a
    checkpoint. scheduled: False if the run was interrupted.
    """
    head = _finite_head(run)
    evaluation = run.evaluator(head, decode=scheduled)
    run.head.tree = head.tree
    figures = progress.evaluated(run.state.step, evaluation)
    calibration = evaluation.calibration
    measured = figures.get("measured")
    run.state = replace(
        run.state,
        tokens_per_step=calibration.tokens_per_step,
        measured=measured,
        drift=figures.get("drift"),
        heldout_loss=evaluation.loss,
        lacks_evaluation=False,
    )
    if scheduled:
        run.state = run.state.evaluated()
    if run.state.origin and run.state.origin.tokens_per_step is None:
        tau = evaluation.measured or calibration
        origin = replace(run.state.origin, tokens_per_step=tau.tokens_per_step)
        run.state = replace(run.state, origin=origin)
    results = {
        "predicted_tokens_per_step": calibration.tokens_per_step,
        "heldout_top1": calibration.top1,
        **({"decoding": measured} if measured else {}),
    }
    _write(run, head, results)
    is_main = run.accelerator.is_main_process
    if run.on_evaluation and is_main and run.on_evaluation(run.state.step, figures) is False:
        run.asked = "on_evaluation"


def _save_without_evaluation(run: Run) -> None:
    """Keep what was learned before features failed; held-out ones would fail, too."""
    run.checkpoints.wait()
    step = run.state.step
    with agreeing(run.accelerator) as values:
        values["saved"] = is_saved = not step or run.checkpoints.folder(step).exists()
    if not is_saved:
        run.state = replace(
            run.state,
            tokens_per_step=1.0,
            measured=None,
            drift=None,
            heldout_loss=None,
            lacks_evaluation=run.evaluator.features.is_broken,
        )
        _write(run, _finite_head(run), {})
        run.checkpoints.wait()


def _finite_head(run: Run) -> DraftHead:
    """The whole head; a collective. Raises ValueError if weights are not finite."""
    head = run.engine.full_head()
    if not all(weight.isfinite().all() for weight in head.state_dict().values()):
        raise ValueError(
            f"weights are not finite after step {run.state.step}, which was not saved; lower "
            "optim.lr, then run again from the last checkpoint"
        )
    return head


def _write(run: Run, head: DraftHead, results: dict[str, Any]) -> None:
    """Begin to write a checkpoint. results: of its evaluation."""
    facts = {
        "steps": run.state.step,
        "tokens": run.state.tokens,
        "seconds": run.state.seconds,
        "loss": run.state.loss,
        **results,
        **training_facts(run.recipe, run.data, run.accelerator),
    }
    if run.state.origin:
        facts["continued"] = asdict(run.state.origin)
        facts["recipe"]["head"] |= sizes_of(head, run.recipe.head)
    run.checkpoints.wait()  # before the copies: only one is in memory
    run.data.verification.wait()  # nothing learned from damaged files is kept
    is_main = run.accelerator.is_main_process
    optimizer_state = run.engine.optimizer_state(keep=is_main)
    if is_main:
        target = copy.copy(run.target)
        if target.adapter:
            target.adapter = target.adapter.on_host()
        on_host = run.engine.on_host(head)
        run.checkpoints.save(Content(on_host, optimizer_state, run.state, target, facts))


def start(
    recipe: Recipe,
    accelerator: Accelerator,
    checkpoint: Saved | None,
    on_evaluation: OnEvaluation | None = None,
) -> Run:
    """Load and build all parts of a run, restored from `checkpoint` if there is one."""
    log = main_process_log(accelerator)
    with agreeing(accelerator) as values:
        check_path(recipe.target)
        read_manifest(recipe.data.path)  # a mistake is said before the target is loaded
        target = load_target(recipe, accelerator)
        data = load_data(recipe, target, log)
        values["target"], values["data"] = target.fingerprint(), data.counts["digest"]
    order, state = _plan(recipe, accelerator, target, data, checkpoint)
    head = create_head(recipe, target, data.documents, checkpoint and checkpoint.folder)
    if checkpoint:
        head.load_state_dict(load_file(checkpoint.folder / WEIGHTS))
        if target.adapter:
            target.adapter.restore(checkpoint.folder / ADAPTER)
    head.recompute = recipe.run.gradient_checkpointing
    if recipe.run.compile:
        head.compile_layers()
    learner = make_learner(recipe, head, target)
    trained = sum(parameter.numel() for parameter in learner.trained().values())
    log(f"training {trained:,} parameters of the {head.kind} head; the target is frozen")
    if refused := refusals(head, target):
        log(f"convert will refuse this head for {refused}")
    engine = make_engine(learner, recipe.optim, accelerator)
    if checkpoint:
        engine.restore(load_optimizer_state(checkpoint.folder))
    rows = data.train, data.heldout
    features, heldout = make_features(recipe, target, rows, head.training_layers, accelerator)
    if not (recipe.decodes or target.adapter):
        is_cached = recipe.features.mode == "cached"
        proves = recipe.features.server or not data.manifest["target"]  # states of others
        spares_lm_head = not (head.needs_unembed or proves)
        freed = target.release(lm_head=spares_lm_head, layers=is_cached)
        log(f"freed {freed / 1e6:.4g} MB of the target, not needed to train")
    layers = len(head.training_layers)
    safe, safe_heldout = (SharedFaults(each, target, layers) for each in (features, heldout))
    evaluator = Evaluator(recipe, accelerator, target, data, safe_heldout)
    size = 12 * trained  # weights and two moments, float32
    checkpoints = Checkpoints(recipe, accelerator, checkpoint.folder if checkpoint else None, size)
    return Run(
        recipe,
        accelerator,
        target,
        data,
        order,
        head,
        engine,
        safe,
        evaluator,
        checkpoints,
        state,
        on_evaluation,
    )


def _plan(
    recipe: Recipe,
    accelerator: Accelerator,
    target: Target,
    data: TrainingData,
    checkpoint: Saved | None,
) -> tuple[Order, RunState]:
    """The rows of each step, and the state to start from. A resumed run keeps its rows per step,
    and its length unless the recipe's has changed.
    """
    world = accelerator.num_processes
    log = main_process_log(accelerator)
    reading = Reading(len(data.train), data.train.length, recipe.run.epochs_of_size, world)
    per_batch = recipe.data.rows_per_batch
    note = ""
    if checkpoint:
        rows_per_step = checkpoint.state.rows_per_step
        planned = checkpoint.state.planned_steps(recipe)
    else:
        rows_per_step, note = reading.rows_per_step(recipe.run.tokens_per_step, per_batch)
        planned = recipe.run.steps
    order = Order(len(data.train), rows_per_step, recipe.run.seed)
    share(order.step(0), per_batch, 0, world)  # raises if processes cannot share a step
    steps = planned or order.steps(recipe.run.epochs or 1)
    warning = "" if recipe.run.minutes else reading.warning(steps, rows_per_step)
    for line in (note, warning):
        if line:
            log(line)
    state = RunState(
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
    if checkpoint is None:
        if recipe.head.source is not None:
            origin = read_origin(recipe, target)
            state = replace(state, origin=origin, lacks_evaluation=True)
            log(f"continuing {origin}")
        return order, state
    check_inputs(checkpoint, state)
    log(f"resuming {checkpoint.folder} at step {checkpoint.state.step} of {steps}")
    if checkpoint.state.versions != state.versions:
        log(f"not bit for bit: saved with {checkpoint.state.versions}, now {state.versions}")
    return order, replace(checkpoint.state, recipe=recipe, steps=steps, versions=state.versions)


def _resume_point(recipe: Recipe, accelerator: Accelerator) -> Saved | None:
    """The newest intact checkpoint, if any; the same on all processes, as is the recipe."""
    with agreeing(accelerator) as values:
        if accelerator.is_main_process:
            check_writable(recipe.run.output)  # before minutes of loading
        checkpoint, damaged = newest(recipe.run.output)
        if checkpoint:
            refuse_changes(checkpoint, "choices", differences(checkpoint.state.recipe, recipe))
            path = recipe.data.path  # what a finished run has learned from may be gone
            if has_answers(path) and (digest := read_manifest(path).get("digest")):
                check_data(checkpoint, path, digest)
        values["checkpoint"] = checkpoint.folder.name if checkpoint else "none"
        values.update(flat(recipe.model_dump(mode="json")))
        for key in ("target", "data.path", "data.cache_gb", "features.path", "run.output"):
            values.pop(key, None)  # paths and memory may differ between machines
    for fault in damaged:
        line = f"warning: skipped and set aside {recipe.run.output}/{fault}"
        main_process_log(accelerator)(line)
    return checkpoint


def _early_end(state: RunState) -> str:
    return (
        f"ended at step {state.step} of {state.steps}, after {state.tokens:,} tokens: "
        f"{state.waited} evaluations without better {state.recipe.measure}; the best was at step "
        f"{state.best_step}"
    )
