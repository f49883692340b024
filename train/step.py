"""The gradients of one optimizer step: its micro batches, this process's share of them, their
randomness. All of it is a function of (seed, step); nothing is remembered between steps.

Legend: B batch, T tokens, D feature width, K draft depth, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from draftheads.heads.base import Batch
from draftheads.heads.target import Target
from draftheads.train.assemble import TrainingData
from draftheads.train.batches import Order, share
from draftheads.train.engines import Engine
from draftheads.train.faults import Examiner
from draftheads.train.features import FeatureSource
from draftheads.train.learner import autocast
from draftheads.train.recipe import Recipe


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
