"""What the heads are worth on held-out documents: simulated from token ranks, measured by decoding,
and, where an adapter changes the target, how far that has moved.

Legend: M learned positions, K draft depth, C positions of a chunk, D feature width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from draftheads.heads.base import DraftHead
from draftheads.heads.batch import Batch
from draftheads.heads.hub import HEADS
from draftheads.heads.target import Target
from draftheads.heads.tree import StaticTree, Tree
from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.bench import PLAIN, BenchPrompt, Candidate, timed
from draftheads.infer.engine import Speculator, Statistics
from draftheads.train.batches import Rows, heldout_rows
from draftheads.train.engines import autocast
from draftheads.train.features import FeatureSource
from draftheads.train.recipe import DECODED, Recipe
from draftheads.train.setup import Log, TrainingData

HEADED = "heads"
CHUNK = 256
"""Positions whose logits, of the target and of the untouched one, are in memory at a time."""
WARM_UP = 8
"""Tokens that are written before the clock runs."""
TIMED = 8
"""Prompts that are also decoded without heads: that takes longest, and brings a ratio alone."""


@dataclass(frozen=True)
class Share:
    """This process's part of the held-out rows."""

    rows: Rows
    rows_per_batch: int
    accelerator: Accelerator

    def batches(self) -> Iterator[tuple[int | None, list[int], Batch]]:
        """Number among all batches, row numbers, tokens. All processes run equally many, as a
        forward may be a collective: one that has none left runs the last again, as number None.
        """
        rows = range(heldout_rows(self.rows))
        size, world = self.rows_per_batch, self.accelerator.num_processes
        batches = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
        for first in range(0, len(batches), world):
            number = first + self.accelerator.process_index
            numbers = batches[min(number, len(batches) - 1)]
            batch = self.rows.batch(numbers).to(self.accelerator.device)
            yield (number if number < len(batches) else None), numbers, batch


@torch.no_grad()
def heldout_ranks(head: DraftHead, target: Target, share: Share, features: FeatureSource) -> Tensor:
    """ranks_MK of the held-out rows, in row order, on every process; they share the work.

    features: of these rows.
    """
    mine: list[tuple[int, Tensor]] = []
    for number, numbers, batch in share.batches():
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):  # as heads are trained on
            features_BTD = features(numbers, batch)
        ranks_MK = head.token_ranks(batch, features_BTD, target).cpu()
        if number is not None:
            mine.append((number, ranks_MK))
    everyone = sorted(gather_object(mine), key=lambda part: part[0])
    return torch.cat([ranks_MK for _, ranks_MK in everyone])


@dataclass(frozen=True)
class Calibration:
    """What held-out ranks say. top1, top5: by depth, share of positions at which the right token
    had such a rank.
    """

    tree: Tree  # what the head gets
    tokens_per_step: float  # tau of the best fixed tree, the target's own token included
    top1: list[float]
    top5: list[float]
    positions: int

    def __str__(self) -> str:
        top1, top5 = (" ".join(f"{x:.3f}" for x in shares) for shares in (self.top1, self.top5))
        return (
            f"held-out: {self.tokens_per_step:.2f} tokens per step predicted for the best fixed "
            f"tree of {self.tree.draft_nodes} draft nodes; right by depth: top-1 {top1}, "
            f"top-5 {top5} ({self.positions} positions)"
        )


def calibrate(ranks_MK: Tensor, nodes: int, tree: Tree) -> Calibration:
    """`tree`, fitted to these observations, and what the best fixed tree of `nodes` draft nodes
    would bring (a dynamic one brings more).

    The prediction is cross-fitted: the tree chosen on one half of the positions is evaluated on
    the other, so that a tree fitted to few positions is not overrated.
    """
    half = len(ranks_MK) // 2
    first_MK, second_MK = ranks_MK[:half], ranks_MK[half:]
    none = StaticTree(())
    total = none.fitted(first_MK, nodes).expected_tokens(second_MK) * len(second_MK)
    total += none.fitted(second_MK, nodes).expected_tokens(first_MK) * len(first_MK)
    found_MK = ranks_MK >= 0
    return Calibration(
        tree=tree.fitted(ranks_MK, nodes),
        tokens_per_step=total / len(ranks_MK),
        top1=(ranks_MK == 0).float().mean(0).tolist(),
        top5=(found_MK & (ranks_MK < 5)).float().mean(0).tolist(),
        positions=len(ranks_MK),
    )


@dataclass(frozen=True)
class Drift:
    """How far an adapter has moved the target's output."""

    agreement: float  # share of tokens at which the first choice is still the untouched target's
    kl: float  # KL(untouched || adapted), nats per token
    tokens: int

    def facts(self) -> dict[str, Any]:
        """What metrics, checkpoints and cards say of it."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"the adapted target's first choice is the untouched one's at {self.agreement:.2%} of "
            f"{self.tokens} tokens, {self.kl:.4f} nats from it"
        )


@torch.no_grad()
def measure_drift(target: Target, share: Share, layers: Sequence[int]) -> Drift:
    """At the learned tokens of the held-out rows; all processes share the work and get the same.

    layers: the last hidden state, alone.
    """
    same, divergence, count = 0, 0.0, 0
    for number, _, batch in share.batches():
        after_MD = target.features(batch, layers)[batch.loss_mask_BT]
        with target.disable_adapter():
            before_MD = target.features(batch, layers)[batch.loss_mask_BT]
        for start in range(0, len(before_MD), CHUNK):
            part = slice(start, start + CHUNK)
            before_CV = target.unembed(before_MD[part]).float().log_softmax(-1)
            after_CV = target.unembed(after_MD[part]).float().log_softmax(-1)
            if number is not None:
                same += int((before_CV.argmax(-1) == after_CV.argmax(-1)).sum())
                divergence += float((before_CV.exp() * (before_CV - after_CV)).sum())
                count += len(before_CV)
    parts = gather_object([(same, divergence, count)])
    same, divergence, count = (sum(numbers) for numbers in zip(*parts, strict=True))
    return Drift(same / count, divergence / count, count)


@dataclass(frozen=True)
class Continued:
    """One prompt, continued with heads."""

    prompt: int  # its number
    steps: int  # forwards of the target, without the prefill
    tokens: int  # that these brought
    accepted: list[int]  # how many of the steps accepted at least 1, 2, ... drafts
    written: int  # tokens in all
    seconds: float
    plain_seconds: float | None  # for as many tokens without heads, where that was run


@dataclass(frozen=True)
class Measured:
    """What decoding showed."""

    prompts: int
    tokens_per_step: float  # tau, the target's own token counted, the prefill and its token not
    standard_error: float  # of tau
    acceptance: list[float]  # share of steps that accepted at least 1, 2, ... drafts
    tokens_per_second: float
    speedup: float  # over plain decoding, on the prompts where that was run

    @classmethod
    def of(cls, parts: Sequence[Continued]) -> Measured:
        """The sums over prompts."""
        steps = max(1, sum(part.steps for part in parts))
        depths = zip_longest(*(part.accepted for part in parts), fillvalue=0)
        timed = [part for part in parts if part.plain_seconds is not None]
        plain_seconds = sum(part.plain_seconds or 0.0 for part in timed)
        return cls(
            prompts=len(parts),
            tokens_per_step=sum(part.tokens for part in parts) / steps,
            standard_error=tau_error([(part.tokens, part.steps) for part in parts]),
            acceptance=[sum(depth) / steps for depth in depths],
            tokens_per_second=sum(p.written for p in parts) / sum(p.seconds for p in parts),
            speedup=plain_seconds / sum(part.seconds for part in timed),
        )

    def facts(self) -> dict[str, Any]:
        """What metrics, trackers and checkpoints say of it."""
        return asdict(self)

    def __str__(self) -> str:
        shares = " ".join(f"{share:.3f}" for share in self.acceptance)
        return (
            f"decoding: {self.tokens_per_step:.2f} +- {self.standard_error:.2f} tokens per step, "
            f"{self.speedup:.2f} times as fast as without heads; accepted by depth: "
            f"{shares or 'none'} ({self.prompts} prompts)"
        )


def tau_error(counts: Sequence[tuple[int, int]]) -> float:
    """Standard error of tau, a ratio of sums, over prompts; 0 of a single one. counts: tokens and
    steps of each prompt.
    """
    tokens = sum(count for count, _ in counts)
    steps = sum(count for _, count in counts)
    tau = tokens / max(1, steps)
    squares = sum((count - tau * of) ** 2 for count, of in counts)
    return math.sqrt(squares * len(counts) / max(1, len(counts) - 1)) / max(1, steps)


@dataclass(frozen=True)
class Evaluation:
    """What held-out documents show: from ranks, by decoding, of an adapted target."""

    calibration: Calibration
    measured: Measured | None
    drift: Drift | None

    def __str__(self) -> str:
        parts = (self.calibration, self.measured, self.drift)
        return "; ".join(str(part) for part in parts if part)


class Evaluator:
    """Evaluates the heads of one run; every process calls it equally often.

    features: of the held-out rows, as the heads read them.
    """

    def __init__(
        self,
        recipe: Recipe,
        accelerator: Accelerator,
        target: Target,
        data: TrainingData,
        features: FeatureSource,
    ) -> None:
        self.recipe, self.accelerator, self.target = recipe, accelerator, target
        self.share = Share(data.heldout, recipe.data.rows_per_batch, accelerator)
        self.features = features
        self.prompts = heldout_prompts(recipe, data, target.context) if recipe.decodes else []

    def due(self, step: int, steps: int) -> bool:
        """Whether the run evaluates its heads after this step, the last one being `steps`."""
        every = self.recipe.eval.every or self.recipe.run.save_every
        return step % every == 0 or step == steps

    def __call__(self, head: DraftHead, *, decode: bool) -> Evaluation:
        """Give `head`, whole and in float32, the tree that its ranks ask for, and evaluate it.
        decode: also by decoding, where the run does.
        """
        with autocast(self.recipe.run.precision, self.accelerator.device):
            ranks_MK = heldout_ranks(head, self.target, self.share, self.features)
        calibration = calibrate(ranks_MK, self.recipe.head.nodes, head.tree)
        head.tree = calibration.tree
        adapter, drift = self.target.adapter, None
        if adapter:
            drift = measure_drift(self.target, self.share, head.training_layers)
            adapter.drift = drift.facts()
        measured = self.decode(head) if decode and self.prompts else None
        return Evaluation(calibration, measured, drift)

    def decode(self, head: DraftHead) -> Measured:
        """Continue the held-out prompts; the processes share them."""
        temperature, accelerator = self.recipe.eval.temperature, self.accelerator
        rule = Sampled(temperature) if temperature else Greedy()
        decoded = Speculator(self.target, as_decoded(head, self.target))
        candidates = [
            Candidate(PLAIN, 0, Speculator(self.target), rule),
            Candidate(HEADED, head.tree.draft_nodes, decoded, rule),
        ]
        mine = self.prompts[accelerator.process_index :: accelerator.num_processes]
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if mine:
                for candidate in candidates:
                    list(candidate.generate(mine[0].prompt, min(WARM_UP, mine[0].limit)))
            found = [_continue(candidates, prompt, rule) for prompt in mine]
        return Measured.of(sorted(gather_object(found), key=lambda part: part.prompt))


def heldout_prompts(recipe: Recipe, data: TrainingData, context: int) -> list[BenchPrompt]:
    """What is decoded: distinct beginnings of held-out documents, each up to the first token that
    the target wrote. Raises ValueError where none leaves room in the context.
    """
    documents, choices = data.documents, recipe.eval
    prompts: dict[tuple[int, ...], None] = {}
    for start, stop in data.heldout.spans:
        learned = documents.learn_N[start:stop].nonzero()
        first = int(learned[0]) if len(learned) else 0
        if 0 < first < context - 1 and len(prompts) < choices.prompts:
            prompts[tuple(documents.tokens_N[start : start + first].tolist())] = None
    if not prompts:
        raise ValueError(
            f"{recipe.data.path}: expected held-out prompts shorter than the context ({context} "
            "tokens), got none to decode; set eval.every=0"
        )
    return [
        BenchPrompt(number, prompt, min(choices.new_tokens, context - len(prompt)))
        for number, prompt in enumerate(prompts)
    ]


def check_eval(recipe: Recipe, log: Log) -> None:
    """Refuse a measure that this run cannot have; say what it does without."""
    if recipe.target_placement != "sharded" or recipe.eval.every == 0:
        return
    if recipe.eval.best in DECODED:
        raise ValueError(
            f"eval.best: expected simulated or loss, got {recipe.eval.best}, as a sharded target "
            "is not decoded; change it, or target_placement"
        )
    log("heads are evaluated by simulation alone: a sharded target is not decoded")


def as_decoded(head: DraftHead, target: Target) -> DraftHead:
    """A copy as `load_head` would make it: in the target's dtype on its device, not compiled."""
    copy = HEADS[head.kind].from_config(head.config(), head.state_dict())
    copy.load_state_dict(head.state_dict())
    copy.tree = head.tree
    return copy.to(target.device, target.dtype).requires_grad_(False).eval()


def _continue(candidates: Sequence[Candidate], prompt: BenchPrompt, rule: Acceptance) -> Continued:
    """Who begins alternates, and random numbers belong to the prompt."""
    runs = {}
    racing = candidates if prompt.number < TIMED else candidates[1:]
    for candidate in racing if prompt.number % 2 else reversed(racing):
        torch.manual_seed(prompt.number)
        rule.seed(prompt.number)
        runs[candidate.name] = timed(candidate, prompt)
    statistics, run, plain = Statistics(), runs[HEADED], runs.get(PLAIN)
    for step in run.steps:
        statistics.add(step)
    written = len(run.tokens)
    return Continued(
        prompt=prompt.number,
        steps=statistics.steps,
        tokens=statistics.tokens,
        accepted=statistics.accepted,
        written=written,
        seconds=run.seconds,
        # when sampling, the two texts differ: what counts is the time per token
        plain_seconds=plain.seconds * written / len(plain.tokens) if plain else None,
    )
