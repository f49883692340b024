"""A step of training: the target's features, the head's loss, an optimizer step over all processes;
and what follows it: counts, an evaluation, a checkpoint. The loop itself is in train/medusa.py.

A step's rows, micro batches and random numbers are functions of (seed, step), its learning rate of
the step, or of the seconds of training before it: resuming is continuing at step n.

Legend: B batch, T tokens, D feature width, K draft depth, R ranks.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.target.model import Target
from draftheads.train.batches import Order, share
from draftheads.train.checkpoint import Checkpoints, Content, RunState
from draftheads.train.engines import Engine
from draftheads.train.evaluate import Evaluator
from draftheads.train.faults import lost_processes
from draftheads.train.features.sources import SharedFaults
from draftheads.train.launch import agreeing
from draftheads.train.metrics import Progress, StepResult
from draftheads.train.origin import sizes_of
from draftheads.train.recipe import Recipe
from draftheads.train.setup import TrainingData, training_facts

AHEAD = 2
"""Micro batches that are made ahead, at least."""
SHOWN = 8
"""Documents listed in the line about a skipped step."""

MicroBatch = tuple[int, list[int], Batch]
"""Its number in the step, its rows, and these in host memory."""
OnEvaluation = Callable[[int, dict[str, Any]], bool | None]
"""(step, figures as in metrics.jsonl) -> False to end the run."""


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
    began: float = field(init=False)
    """When this process would have begun, had it done all in one launch, by time.monotonic."""

    def __post_init__(self) -> None:
        self.batches = self._micro_batches()
        self.began = time.monotonic() - self.state.seconds

    @property
    def must_stop(self) -> bool:
        """Whether this process knows a reason to end the run, other than a signal."""
        failed = self.checkpoints.failed or self.data.verification.failed
        return failed or bool(self.asked)

    def close(self) -> None:
        """End all that goes on beside the training."""
        self.batches.close()
        self.features.close()
        self.checkpoints.close()
        del self.engine  # a DDP that outlives its process group hangs

    def _micro_batches(self) -> Generator[MicroBatch]:
        """All that this process has left to read, made ahead by a thread."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        size = self.recipe.data.rows_per_batch
        pins = self.accelerator.device.type == "cuda"

        def make(number: int, rows: list[int]) -> MicroBatch:
            batch = self.data.train.batch(rows)
            if pins:
                batch = batch.pin_memory()
            return number, rows, batch

        choices = self.recipe.features
        asked = choices.in_flight * len(choices.server)  # rows, of servers
        ahead = max(AHEAD, asked // size)
        # by the clock, nobody knows which step is the last
        end = sys.maxsize if self.recipe.run.minutes else self.state.steps
        due: deque[Future[MicroBatch]] = deque()
        with ThreadPoolExecutor(1, "batches") as thread:
            for step in range(self.state.step, end):
                for number, rows in share(self.order.step(step), size, rank, world):
                    due.append(thread.submit(make, number, rows))
                    self.features.ahead(rows)
                    if len(due) > ahead:
                        yield due.popleft().result()
            for future in due:
                yield future.result()


def train_step(run: Run, stop: bool) -> StepResult:
    """One optimizer step over all processes; skipped if the gradient is not finite. stop: whether
    this process was asked to stop.

    The loss is one mean over all learned tokens of the step. Raises, on all processes, the error of
    the features of any.
    """
    recipe, step, device = run.recipe, run.state.step, run.accelerator.device
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    numbers = run.order.step(step)
    learned = sum(run.data.train.learned[row] for row in numbers)
    shares = share(numbers, recipe.data.rows_per_batch, rank, world)
    losses: list[Tensor] = []
    ranks: list[Tensor] = []
    for number, rows, on_host in islice(run.batches, len(shares)):
        last = number == shares[-1][0]
        batch = on_host.to(device)
        features_BTD = run.features(rows, batch)
        # seeded by micro batch, so the number of processes does not matter
        torch.manual_seed(hash((recipe.run.seed, step, number)) % (1 << 63))
        with run.engine.accumulating(last=last):
            out = run.engine.model(batch, features_BTD, run.target, run.state.done)
            loss = out.loss / learned
            # a non-finite loss must give non-finite gradients on every engine
            is_good = loss.detach().isfinite() & (run.features.fault is None)
            poison = torch.where(is_good, 1.0, math.nan)
            run.engine.backward(loss * poison, last=last)
        losses.append(loss.detach())
        ranks.append(out.ranks_KR)
    mine = torch.stack(losses)
    # one collective for all: whoever is asked to stop, all stop after the same step, and all go by
    # the clock of the first
    seconds = 0.0 if rank else time.monotonic() - run.began - run.state.seconds
    flags = torch.tensor([stop, run.features.fault is not None, seconds], device=mine.device)
    sums = torch.cat([mine.sum()[None], flags.to(mine)])
    loss_sum, stops, faults, seconds = run.accelerator.reduce(sums, "sum").tolist()
    rates = run.engine.learner.rates(recipe.optim, *run.state.place)
    norm = run.engine.update(rates)
    if faults:
        run.features.check(run.accelerator)
    documents: list[int] = []
    if not math.isfinite(norm):
        bad = [rows for (_, rows), loss in zip(shares, mine, strict=True) if not loss.isfinite()]
        suspects = [run.data.train.document_numbers(rows) for rows in bad]
        documents = sorted({number for numbers in gather_object(suspects) for number in numbers})
    ranks_KR = torch.stack(ranks).sum(0)
    return StepResult(loss_sum, norm, rates["heads"], ranks_KR, stops > 0, documents, seconds)


def record(run: Run, result: StepResult, progress: Progress) -> None:
    """Count a step. Raises ValueError after too many consecutive non-finite ones."""
    state, recipe = run.state, run.recipe
    rows = run.order.step(state.step)
    tokens = sum(run.data.train.sizes[row] for row in rows)
    run.state = state.after_step(tokens, result.seconds)
    progress.bar.total = run.state.steps
    if math.isfinite(result.norm):
        run.state = replace(run.state, loss=result.loss, skipped=0)
        progress.step(run.state.step, result, tokens)
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


def save(run: Run, progress: Progress) -> None:
    """Evaluate the heads on held-out documents, fit their tree to the result, and begin to write a
    checkpoint. A run that was interrupted does not decode.
    """
    head = _finite_head(run)
    evaluation = run.evaluator(head, decode=run.state.is_due)
    run.head.tree = head.tree
    figures = progress.evaluated(run.state.step, evaluation)
    [seconds, *_] = gather_object([time.monotonic() - run.began])  # by the clock of the first
    run.state = run.state.evaluated(figures).at(seconds)
    results = {
        "predicted_tokens_per_step": run.state.tokens_per_step,
        "heldout_top1": figures["heldout_top1"],
    }
    if run.state.measured:
        results["decoding"] = run.state.measured
    _write(run, head, results)
    is_main = run.accelerator.is_main_process
    if run.on_evaluation and is_main and run.on_evaluation(run.state.step, figures) is False:
        run.asked = "on_evaluation"


@contextmanager
def rescued(run: Run) -> Iterator[None]:
    """Save what was learned before features failed, without an evaluation, for which held-out ones
    would fail, too. A process that is gone is named before the launcher ends this one.
    """
    with lost_processes():
        try:
            yield
        except (ValueError, OSError):
            if run.features.is_broken or run.evaluator.features.is_broken:
                _save_without_evaluation(run)
            raise


def _save_without_evaluation(run: Run) -> None:
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
    facts = training_facts(run.state, results, run.data, run.accelerator)
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
