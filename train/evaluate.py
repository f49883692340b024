"""What the heads are worth on documents that they were not trained on, and the tree that follows
from it.

Legend: M learned positions, K draft depth.
"""

from __future__ import annotations

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
from draftheads.infer.engine import Speculator, Statistics, Step
from draftheads.train.batches import Rows, heldout_rows
from draftheads.train.engines import autocast
from draftheads.train.features import FeatureSource
from draftheads.train.recipe import DECODED, Recipe
from draftheads.train.setup import Log, TrainingData


@dataclass(frozen=True)
class Calibration:
    """tree: what the head gets. tokens_per_step: tau of the best fixed tree, the target's own token
    included.

    top1, top5: share of held-out positions at which the right token had such a rank, one entry
    per depth.
    """

    tree: Tree
    tokens_per_step: float
    top1: list[float]
    top5: list[float]
    positions: int

    def __str__(self) -> str:
        top1 = " ".join(f"{share:.3f}" for share in self.top1)
        top5 = " ".join(f"{share:.3f}" for share in self.top5)
        return (
            f"held-out: {self.tokens_per_step:.2f} tokens per step predicted for the best fixed "
            f"tree of {self.tree.draft_nodes} draft nodes; right by depth: top-1 {top1}, "
            f"top-5 {top5} ({self.positions} positions)"
        )


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
        batches = list(_batches(self.rows, self.rows_per_batch))
        world = self.accelerator.num_processes
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


def calibrate(ranks_MK: Tensor, nodes: int, tree: Tree) -> Calibration:
    """`tree`, fitted to these observations, and what the best fixed tree of `nodes` draft nodes
    would bring (a dynamic one brings more).

    The prediction is cross-fitted: each half of the positions judges the tree chosen on the
    other half, so that a tree fitted to few positions does not praise itself.
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


def _batches(rows: Rows, rows_per_batch: int) -> Iterator[list[int]]:
    count = heldout_rows(rows)
    for start in range(0, count, rows_per_batch):
        yield list(range(start, min(start + rows_per_batch, count)))


# How far an adapter has moved the target's own output (Medusa-2), on held-out answers.
#
# Legend: M learned positions, C positions of a chunk, D feature width, V vocabulary.


CHUNK = 256
"""Positions whose logits, twice, are held at a time."""


@dataclass(frozen=True)
class Drift:
    """agreement: share of tokens at which the first choice is still the untouched target's. kl:
    divergence KL(untouched || adapted), nats per token. tokens: how many were looked at.
    """

    agreement: float
    kl: float
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


# What heads are worth while they train: a simulation on held-out ranks, and real decoding of
# held-out prompts, side by side with decoding without heads.


HEADED = "heads"
WARM_UP = 8
"""Tokens that each contestant writes before the clock runs."""
TIMED = 8
"""Prompts that are also decoded without heads: that takes the longest, and brings a ratio alone."""


@dataclass(frozen=True)
class Continued:
    """One prompt, continued. steps: forwards of the target, with heads. tokens: that these brought.
    accepted: how many of them accepted at least 1, 2, ... drafts. written: tokens in all. seconds,
    plain_seconds: for these, with heads and without; the latter None where that was not run.
    """

    prompt: int
    steps: int
    tokens: int
    accepted: list[int]
    written: int
    seconds: float
    plain_seconds: float | None


@dataclass(frozen=True)
class Measured:
    """What decoding showed, prompt by prompt, in their order."""

    prompts: list[Continued]

    @property
    def steps(self) -> int:
        """Forwards of the target, with heads; prefills apart."""
        return sum(part.steps for part in self.prompts)

    @property
    def tokens_per_step(self) -> float:
        """Tau, the target's own token counted, the prefill and its token not."""
        return sum(part.tokens for part in self.prompts) / max(1, self.steps)

    @property
    def error(self) -> float:
        """Standard error of tau over prompts, those being as if drawn; 0 of a single one."""
        tau, count = self.tokens_per_step, len(self.prompts)
        squares = sum((part.tokens - tau * part.steps) ** 2 for part in self.prompts)
        return float((squares * count / max(1, count - 1)) ** 0.5) / max(1, self.steps)

    @property
    def acceptance(self) -> list[float]:
        """Share of steps that accepted at least 1, 2, ... drafts."""
        lists = [part.accepted for part in self.prompts]
        return [sum(depth) / max(1, self.steps) for depth in zip_longest(*lists, fillvalue=0)]

    @property
    def speedup(self) -> float:
        """Tokens per second over those of plain decoding, where that was run."""
        timed = [part for part in self.prompts if part.plain_seconds is not None]
        return sum(part.plain_seconds or 0.0 for part in timed) / sum(p.seconds for p in timed)

    def facts(self) -> dict[str, float | list[float]]:
        """What metrics, trackers and checkpoints say of it."""
        seconds = sum(part.seconds for part in self.prompts)
        speed = sum(part.written for part in self.prompts) / seconds
        return {
            "prompts": len(self.prompts),
            "tokens_per_step": self.tokens_per_step,
            "standard_error": self.error,
            "acceptance": self.acceptance,
            "tokens_per_second": speed,
            "speedup": self.speedup,
        }

    def __str__(self) -> str:
        shares = " ".join(f"{share:.3f}" for share in self.acceptance)
        return (
            f"decoding: {self.tokens_per_step:.2f} +- {self.error:.2f} tokens per step, "
            f"{self.speedup:.2f} times as fast as without heads; accepted by depth: "
            f"{shares or 'none'} ({len(self.prompts)} prompts)"
        )


@dataclass(frozen=True)
class Evaluation:
    """calibration: on held-out ranks. measured: by decoding, with the tree that follows. drift: of
    an adapted target.
    """

    calibration: Calibration
    measured: Measured | None
    drift: Drift | None

    def __str__(self) -> str:
        parts = (self.calibration, self.measured, self.drift)
        return "; ".join(str(part) for part in parts if part)


class Evaluator:
    """Judges the heads of one run; every process calls it equally often.

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
        self.jobs = heldout_prompts(recipe, data, target.context)
        self._warm = False

    def due(self, step: int, steps: int) -> bool:
        """Whether the run judges its heads after this step, the last one being `steps`."""
        every = self.recipe.eval.every or self.recipe.run.save_every
        return step % every == 0 or step == steps

    def __call__(self, head: DraftHead, *, decode: bool) -> Evaluation:
        """Give `head`, whole and in float32, the tree that its ranks ask for, and judge it. decode:
        also by decoding, where the run does.
        """
        with autocast(self.recipe.run.precision, self.accelerator.device):
            ranks_MK = heldout_ranks(head, self.target, self.share, self.features)
        calibration = calibrate(ranks_MK, self.recipe.head.nodes, head.tree)
        head.tree = calibration.tree
        adapter, drift = self.target.adapter, None
        if adapter:
            drift = measure_drift(self.target, self.share, head.training_layers)
            adapter.drift = drift.facts()
        measured = self._decode(head) if decode and self.jobs else None
        return Evaluation(calibration, measured, drift)

    def _decode(self, head: DraftHead) -> Measured:
        """The processes share the prompts."""
        choices, accelerator = self.recipe.eval, self.accelerator
        rule = Sampled(choices.temperature) if choices.temperature else Greedy()
        contestants = [
            _contestant(PLAIN, Speculator(self.target), rule),
            _contestant(HEADED, Speculator(self.target, as_decoded(head, self.target)), rule),
        ]
        mine = self.jobs[accelerator.process_index :: accelerator.num_processes]
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            for contestant in contestants if mine and not self._warm else ():
                contestant.generate(mine[0].prompt, min(WARM_UP, mine[0].limit))
            self._warm = True
            found = [_continue(contestants, job, rule) for job in mine]
        return Measured(sorted(gather_object(found), key=lambda part: part.prompt))


def heldout_prompts(recipe: Recipe, data: TrainingData, context: int) -> list[BenchPrompt]:
    """What is decoded: distinct beginnings of held-out documents, each up to the first token that
    the target wrote. Empty where the run does not decode. Raises ValueError where none leaves room
    in the context.
    """
    if not recipe.decodes:
        return []
    documents, choices = data.documents, recipe.eval
    prompts: dict[tuple[int, ...], None] = {}
    for start, stop in documents.split(recipe.data.heldout)[1]:
        learned = documents.learn_N[start:stop].nonzero()
        first = int(learned[0]) if len(learned) else 0
        if 0 < first < context - 1 and len(prompts) < choices.prompts:
            prompts[tuple(documents.tokens_N[start : start + first].tolist())] = None
    if not prompts:
        raise ValueError(
            f"{recipe.data.path}: expected held-out prompts shorter than the context ({context} "
            "tokens), got none to judge heads on; set eval.every=0"
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
    log("heads are judged by simulation alone: decoding does not divide over a sharded target")


def as_decoded(head: DraftHead, target: Target) -> DraftHead:
    """A copy as `load_head` would make it: in the target's dtype on its device, nothing compiled or
    remembered in it.
    """
    copy = HEADS[head.kind].from_config(head.config(), head.state_dict())
    copy.load_state_dict(head.state_dict())
    copy.tree = head.tree
    return copy.to(target.device, target.dtype).requires_grad_(False).eval()


def _contestant(name: str, engine: Speculator, rule: Acceptance) -> Candidate:
    def generate(prompt: Sequence[int], limit: int) -> list[Step]:
        return list(engine.generate(prompt, sampling=rule, max_new_tokens=limit))

    return Candidate(name, engine.tree.draft_nodes, generate, engine)


def _continue(contestants: Sequence[Candidate], job: BenchPrompt, rule: Acceptance) -> Continued:
    """Who begins alternates, and random numbers belong to the prompt."""
    runs = {}
    racing = contestants if job.number < TIMED else contestants[1:]
    for contestant in racing if job.number % 2 else reversed(racing):
        torch.manual_seed(job.number)
        rule.seed(job.number)
        runs[contestant.name] = timed(contestant, job)
    statistics, run, plain = Statistics(), runs[HEADED], runs.get(PLAIN)
    for step in run.steps:
        statistics.add(step)
    written = len(run.tokens)
    return Continued(
        prompt=job.number,
        steps=statistics.steps,
        tokens=statistics.tokens,
        accepted=statistics.accepted,
        written=written,
        seconds=run.seconds,
        # when sampling, the two texts differ: what counts is the time per token
        plain_seconds=plain.seconds * written / len(plain.tokens) if plain else None,
    )
