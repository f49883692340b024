"""A step of training: the target's features, the head's loss, an optimizer step over all processes.
The loop itself is in train/medusa.py.

A step's rows, micro batches and random numbers are functions of (seed, step), its learning rate of
the step, or of the seconds of training before it: resuming is continuing at step n.

Legend: D feature width, K draft depth, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from draftheads.heads.base import HeadLoss
from draftheads.train.batches import share
from draftheads.train.metrics import StepResult
from draftheads.train.run import MicroBatch, Run


def train_step(run: Run, step: int) -> StepResult:
    """One optimizer step over all processes; skipped if the gradient is not finite.

    The loss is one mean over all learned tokens of the step. Raises, on all processes, the error of
    the features of any.
    """
    stop = run.must_stop
    recipe, accelerator = run.recipe, run.accelerator
    rank, world = accelerator.process_index, accelerator.num_processes
    numbers = run.order.step(step)
    learned = sum(run.data.train.learned[row] for row in numbers)
    shares = share(numbers, recipe.data.rows_per_batch, rank, world)
    parts: list[HeadLoss] = []
    for micro_batch in islice(run.batches, len(shares)):
        last = len(parts) == len(shares) - 1
        parts.append(forward_backward(run, micro_batch, learned, last=last))
    losses = torch.stack([part.loss for part in parts])
    ranks_KR = torch.stack([part.ranks_KR for part in parts]).sum(0)
    agreed = agree(run, losses.sum(), stop=stop)
    rates = run.engine.learner.rates(recipe.optim, *run.state.place)
    norm = run.engine.update(rates)
    if agreed.has_faults:
        run.features.check(accelerator)
    documents: list[int] = []
    if not math.isfinite(norm):
        bad = [rows for (_, rows), loss in zip(shares, losses, strict=True) if not loss.isfinite()]
        documents = blame(run, bad)
    return StepResult(
        agreed.loss, norm, rates["heads"], ranks_KR, agreed.stop, documents, agreed.seconds
    )


def forward_backward(run: Run, micro_batch: MicroBatch, learned: int, *, last: bool) -> HeadLoss:
    """Add the gradient of one micro batch; its loss, divided by the learned tokens of the step.

    last: of this process in the step, when engines exchange gradients.
    """
    number, rows, on_host = micro_batch
    batch = on_host.to(run.accelerator.device)
    features_BTD = run.features(rows, batch)
    # seeded by micro batch, so the number of processes does not matter
    torch.manual_seed(hash((run.recipe.run.seed, run.state.step, number)) % (1 << 63))
    with run.engine.accumulating(last=last):
        out = run.engine.model(batch, features_BTD, run.target, run.state.done)
        loss = out.loss / learned
        # a non-finite loss must give non-finite gradients on every engine
        is_good = loss.detach().isfinite() & (run.features.fault is None)
        poison = torch.where(is_good, 1.0, math.nan)
        run.engine.backward(loss * poison, last=last)
    return HeadLoss(loss.detach(), out.ranks_KR)


class Agreed(NamedTuple):
    """The facts of a step that all processes know. loss: of all. stop: any was asked to.
    has_faults: features of any failed. seconds: of training since the step before, by the clock of
    the first.
    """

    loss: float
    stop: bool
    has_faults: bool
    seconds: float


def agree(run: Run, loss: Tensor, *, stop: bool) -> Agreed:
    """One collective for all: whoever is asked to stop, all stop after the same step. loss, stop:
    of this process.
    """
    seconds = run.seconds - run.state.seconds
    if not run.accelerator.is_main_process:
        seconds = 0.0  # all go by the clock of the first
    flags = torch.tensor([stop, run.features.fault is not None, seconds], device=loss.device)
    sums = torch.cat([loss[None], flags.to(loss)])
    total, stops, faults, seconds = run.accelerator.reduce(sums, "sum").tolist()
    return Agreed(total, stops > 0, faults > 0, seconds)


def blame(run: Run, bad: Sequence[Sequence[int]]) -> list[int]:
    """The documents of all processes' micro batches whose loss was not finite; a collective. bad:
    the rows of this process's.
    """
    suspects = [run.data.train.document_numbers(rows) for rows in bad]
    return sorted({number for numbers in gather_object(suspects) for number in numbers})
