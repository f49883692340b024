"""Evaluation of heads on held-out documents: simulated from token ranks and measured by decoding;
with an adapter, also the drift of the target.

Legend: M learned positions, K draft depth, C positions of a chunk, D feature width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from operator import itemgetter
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree, Tree
from draftheads.infer.engine import Speculator
from draftheads.infer.race import BenchPrompt, fitting_prompts
from draftheads.infer.rows import Statistics, Step
from draftheads.train.batches import Rows, heldout_rows
from draftheads.train.engines import autocast
from draftheads.train.features.sources import FeatureSource, OnlineFeatures, SharedFaults
from draftheads.train.recipe import Recipe
from draftheads.train.setup import TrainingData

CHUNK = 256
"""Positions whose logits, before and after adaptation, are in memory at a time."""

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """One process's share of the held-out rows."""

    rows: Rows
    rows_per_batch: int
    accelerator: Accelerator

    def each(self, features: FeatureSource, measure: Callable[[int, Batch, Tensor], T]) -> list[T]:
        """`measure(number, batch, features_BTD)` of all batches, in order, on every process: no sum
        of the results depends on who had which batch.

        A forward may be a collective, so all processes get equally many batches: one without a
        batch left repeats the last, and this result does not count.
        """
        rows = range(heldout_rows(self.rows))
        size, world = self.rows_per_batch, self.accelerator.num_processes
        batches = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
        mine: list[tuple[int, T]] = []
        for first in range(0, len(batches), world):
            own = first + self.accelerator.process_index
            number = min(own, len(batches) - 1)
            batch = self.rows.batch(batches[number]).to(self.accelerator.device)
            with torch.autocast(batch.tokens_BT.device.type, enabled=False):  # as in training
                features_BTD = features(batches[number], batch)
            result = measure(number, batch, features_BTD)
            if number == own:
                mine.append((number, result))
        return _in_order(mine)


def _in_order(parts: Sequence[tuple[int, T]]) -> list[T]:
    """The numbered parts of all processes, by their numbers."""
    everyone: list[tuple[int, T]] = sorted(gather_object(parts), key=itemgetter(0))
    return [part for _, part in everyone]


@torch.no_grad()
def heldout_ranks(head: DraftHead, target: Target, share: Share, features: FeatureSource) -> Tensor:
    """ranks_MK of all held-out rows, in row order, on every process."""

    def ranks(number: int, batch: Batch, features_BTD: Tensor) -> Tensor:
        return head.token_ranks(batch, features_BTD, target).cpu()

    return torch.cat(share.each(features, ranks))


@dataclass(frozen=True)
class Calibration:
    """Results from token ranks."""

    tree: Tree  # for the head
    tokens_per_step: float  # tau of the best fixed tree, the target's own token included
    top1: list[float]  # accuracy by depth


def calibrate(ranks_MK: Tensor, nodes: int, tree: Tree) -> Calibration:
    """Fit `tree` to these ranks, and predict the tau of the best fixed tree of `nodes` draft nodes
    (a dynamic tree reaches more).

    The prediction is cross-fitted: a tree fitted to one half of the positions is evaluated on the
    other, so that few positions do not make it optimistic.
    """
    half = len(ranks_MK) // 2
    first_MK, second_MK = ranks_MK[:half], ranks_MK[half:]
    none = StaticTree(())
    total = none.fitted(first_MK, nodes).expected_tokens(second_MK) * len(second_MK)
    total += none.fitted(second_MK, nodes).expected_tokens(first_MK) * len(first_MK)
    return Calibration(
        tree=tree.fitted(ranks_MK, nodes),
        tokens_per_step=total / len(ranks_MK),
        top1=(ranks_MK == 0).float().mean(0).tolist(),
    )


@dataclass(frozen=True)
class Drift:
    """The effect of an adapter on the target's output distribution."""

    agreement: float  # share of tokens with the same top-1 prediction
    kl: float  # KL(frozen || adapted), nats per token
    tokens: int


@torch.no_grad()
def measure_drift(target: Target, share: Share, layers: Sequence[int]) -> Drift:
    """Drift at the learned tokens of all held-out rows, on every process.

    layers: of the last hidden state.
    """

    def compare(number: int, batch: Batch, after_BTD: Tensor) -> list[tuple[int, float, int]]:
        after_MD = after_BTD[batch.loss_mask_BT]
        with target.disable_adapter():
            before_MD = target.features(batch, layers)[batch.loss_mask_BT]
        parts = []
        for start in range(0, len(before_MD), CHUNK):
            part = slice(start, start + CHUNK)
            before_CV = target.unembed(before_MD[part]).float().log_softmax(-1)
            after_CV = target.unembed(after_MD[part]).float().log_softmax(-1)
            same = int((before_CV.argmax(-1) == after_CV.argmax(-1)).sum())
            divergence = float((before_CV.exp() * (before_CV - after_CV)).sum())
            parts.append((same, divergence, len(before_CV)))
        return parts

    parts = chain.from_iterable(share.each(OnlineFeatures(target, layers, adapted=True), compare))
    same, divergence, count = (sum(numbers) for numbers in zip(*parts, strict=True))
    return Drift(same / count, divergence / count, count)


@dataclass(frozen=True)
class Measured:
    """Results of decoding. How fast it is depends on threads and packed weights: `bench` says."""

    prompts: int
    tokens_per_step: float  # tau, the target's own token included, the prefill excluded
    standard_error: float  # of tau; 0 for a single prompt
    acceptance: list[float]  # share of steps that accepted at least 1, 2, ... draft tokens

    @classmethod
    def of(cls, texts: Sequence[Sequence[Step]]) -> Measured:
        """From the steps of each prompt."""
        total = Statistics.of(chain.from_iterable(texts))
        tau = total.tokens_per_step
        each = [Statistics.of(steps) for steps in texts]
        squares = sum((part.tokens - tau * part.steps) ** 2 for part in each)
        variance = squares * len(each) / max(1, len(each) - 1)  # of a ratio of sums, over prompts
        return cls(
            prompts=len(texts),
            tokens_per_step=tau,
            standard_error=math.sqrt(variance) / max(1, total.steps),
            acceptance=total.acceptance_by_depth,
        )


@dataclass(frozen=True)
class Evaluation:
    """Results of a head, which is whole, on held-out documents. measured: None if not decoded.
    drift: None without adapter.
    """

    head: DraftHead
    calibration: Calibration
    measured: Measured | None
    drift: Drift | None


@dataclass
class Evaluator:
    """Evaluates the heads of one run; a collective over all processes.

    features: of the held-out rows, from the target that the heads are trained for.
    """

    recipe: Recipe
    accelerator: Accelerator
    target: Target
    data: TrainingData
    features: SharedFaults

    def __post_init__(self) -> None:
        rows_per_batch = self.recipe.data.rows_per_batch
        self.share = Share(self.data.heldout, rows_per_batch, self.accelerator)
        self.prompts: list[BenchPrompt] = []
        if self.recipe.decodes:
            self.prompts = heldout_prompts(self.recipe, self.data, self.target)

    def __call__(self, head: DraftHead, *, decode: bool) -> Evaluation:
        """Fit the tree of `head`, which is whole and in float32, to its ranks, and evaluate it.

        decode: also measure by decoding, if the recipe does.
        """
        with autocast(self.recipe.run.precision, self.accelerator.device):
            ranks_MK = heldout_ranks(head, self.target, self.share, self.features)
        self.features.check(self.accelerator)
        calibration = calibrate(ranks_MK, self.recipe.head.nodes, head.tree)
        head.tree = calibration.tree
        drift = None
        adapter = self.target.adapter
        if adapter:
            drift = measure_drift(self.target, self.share, head.training_layers)
            adapter.drift = asdict(drift)
        measured = None
        if decode and self.prompts:
            measured = self.decode(head)
        return Evaluation(head, calibration, measured, drift)

    def seconds(self) -> float:
        """The most that an evaluation takes, by its first prompt without drafts."""
        began = time.monotonic()
        for each in self.prompts[:1]:
            list(Speculator(self.target).generate(each.prompt, max_new_tokens=each.limit))
        rounds = math.ceil(len(self.prompts) / self.accelerator.num_processes)
        seconds: list[float] = gather_object([rounds * (time.monotonic() - began)])
        return max(seconds)

    def decode(self, head: DraftHead) -> Measured:
        """Continue the held-out prompts, divided over the processes."""
        accelerator = self.accelerator
        engine = Speculator(self.target, as_decoded(head, self.target))
        mine = self.prompts[accelerator.process_index :: accelerator.num_processes]
        texts = [
            (each.number, list(engine.generate(each.prompt, max_new_tokens=each.limit)))
            for each in mine
        ]
        return Measured.of(_in_order(texts))


def heldout_prompts(recipe: Recipe, data: TrainingData, target: Target) -> list[BenchPrompt]:
    """Distinct held-out documents, each up to the first token that the target wrote.

    Raises ValueError if none leaves room in the context.
    """
    documents, choices = data.documents, recipe.eval
    context = target.context
    prompts: dict[tuple[int, ...], None] = {}
    for start, stop in data.heldout.spans:
        [learned] = documents.mask(start, stop).nonzero()
        first = int(learned[0]) if len(learned) else 0
        if 0 < first < context - 1 and len(prompts) < choices.prompts:
            prompts[tuple(documents.tokens(start, start + first).tolist())] = None
    if not prompts:
        raise ValueError(
            f"{recipe.data.path}: expected held-out prompts shorter than the context ({context} "
            "tokens), got none to decode; set eval.every=0"
        )
    return fitting_prompts(target, [*prompts], choices.new_tokens)


def as_decoded(head: DraftHead, target: Target) -> DraftHead:
    """A copy as `load_head` makes it: in the target's dtype, on its device."""
    copy = type(head).from_config(head.config(), head.state_dict())
    copy.load_state_dict(head.state_dict())
    copy.tree = head.tree
    return copy.to(target.device, target.dtype).requires_grad_(False).eval()
