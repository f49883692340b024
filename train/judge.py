"""What heads are worth while they train: a simulation on held-out ranks, and real decoding of
held-out prompts, side by side with decoding without heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from draftheads.heads.base import DraftHead
from draftheads.heads.hub import HEADS
from draftheads.heads.target import Target
from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.engine import Speculator, Statistics, Step
from draftheads.infer.race import PLAIN, Contestant, Job, timed
from draftheads.train.assemble import Say, TrainingData
from draftheads.train.engines import autocast
from draftheads.train.features import FeatureSource
from draftheads.train.heldout import Calibration, calibrate, observe
from draftheads.train.judge_choices import DECODED, decodes
from draftheads.train.recipe import Recipe

HEADED = "heads"
WARM_UP = 8
"""Tokens that each contestant writes before the clock runs."""


@dataclass(frozen=True)
class Measured:
    """What decoding showed. steps: forwards of the target, with heads. tokens: that these brought.
    accepted: how many of them accepted at least 1, 2, ... drafts. seconds, plain_seconds: for the
    same text, with heads and without; written: its tokens.
    """

    steps: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    written: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0

    def plus(self, other: Measured) -> Measured:
        """Of both texts together."""
        depth = max(len(self.accepted), len(other.accepted))
        left, right = (part.accepted + [0] * (depth - len(part.accepted)) for part in (self, other))
        return Measured(
            self.steps + other.steps,
            self.tokens + other.tokens,
            [a + b for a, b in zip(left, right, strict=True)],
            self.written + other.written,
            self.seconds + other.seconds,
            self.plain_seconds + other.plain_seconds,
        )

    @property
    def tokens_per_step(self) -> float:
        """Tau, the target's own token counted, the prefill and its token not."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def speedup(self) -> float:
        """Tokens per second over those of plain decoding."""
        return self.plain_seconds / self.seconds

    def facts(self) -> dict[str, float | list[float]]:
        """What metrics, trackers and checkpoints say of it."""
        return {
            "tokens_per_step": self.tokens_per_step,
            "acceptance": [count / self.steps for count in self.accepted],
            "tokens_per_second": self.written / self.seconds,
            "plain_tokens_per_second": self.written / self.plain_seconds,
            "speedup": self.speedup,
        }

    def __str__(self) -> str:
        share = " ".join(f"{count / self.steps:.3f}" for count in self.accepted)
        return (
            f"decoding: {self.tokens_per_step:.2f} tokens per step, {self.speedup:.2f} times as "
            f"fast as without heads; accepted by depth: {share or 'none'}"
        )


@dataclass(frozen=True)
class Verdict:
    """calibration: on held-out ranks. measured: by decoding, with the tree that follows."""

    calibration: Calibration
    measured: Measured | None

    def __str__(self) -> str:
        return f"{self.calibration}" + (f"; {self.measured}" if self.measured else "")


class Judge:
    """Judges the heads of one run; every process calls it equally often.

    features: of the held-out rows.
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
        self.rows, self.features = data.heldout, features
        self.jobs = heldout_jobs(recipe, data, target.context)
        self._warm = False

    def due(self, step: int, steps: int) -> bool:
        """Whether the run judges its heads after this step, the last one being `steps`."""
        every = self.recipe.judge.every or self.recipe.run.save_every
        return step % every == 0 or step == steps

    def __call__(self, head: DraftHead, *, decode: bool) -> Verdict:
        """Give `head`, whole and in float32, the tree that its ranks ask for, and judge it. decode:
        also by decoding, where the run does.
        """
        with autocast(self.recipe.run.precision, self.accelerator.device):
            ranks_MK = observe(
                head,
                self.target,
                self.rows,
                self.recipe.data.rows_per_batch,
                self.accelerator,
                self.features,
            )
        calibration = calibrate(ranks_MK, self.recipe.head.nodes, head.tree)
        head.tree = calibration.tree
        return Verdict(calibration, self._decode(head) if decode and self.jobs else None)

    def _decode(self, head: DraftHead) -> Measured:
        """The processes share the prompts; what they found is summed in the order of these."""
        choices, accelerator = self.recipe.judge, self.accelerator
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
            found = [(job.number, _measure(contestants, job, rule)) for job in mine]
        total = Measured()
        for _, part in sorted(gather_object(found), key=lambda part: part[0]):
            total = total.plus(part)
        return total


def heldout_jobs(recipe: Recipe, data: TrainingData, context: int) -> list[Job]:
    """What is decoded: distinct beginnings of held-out documents, each up to the first token that
    the target wrote. Empty where the run does not decode.
    """
    if not decodes(recipe.model_dump(mode="json")):
        return []
    documents, choices = data.documents, recipe.judge
    prompts: dict[tuple[int, ...], None] = {}
    for start, stop in documents.split(recipe.data.heldout)[1]:
        learned = documents.learn_N[start:stop].nonzero()
        first = int(learned[0]) if len(learned) else 0
        if 0 < first < context - 1 and len(prompts) < choices.prompts:
            prompts[tuple(documents.tokens_N[start : start + first].tolist())] = None
    return [
        Job(number, prompt, min(choices.new_tokens, context - len(prompt)))
        for number, prompt in enumerate(prompts)
    ]


def check_judge(recipe: Recipe, say: Say) -> None:
    """Refuse a measure that this run cannot have; say what it does without."""
    if recipe.target_placement != "sharded" or recipe.judge.every == 0:
        return
    if recipe.judge.best in DECODED:
        raise ValueError(
            f"judge.best: expected simulated or loss, got {recipe.judge.best}, as a sharded target "
            "is not decoded; change it, or target_placement"
        )
    say("heads are judged by simulation alone: decoding does not divide over a sharded target")


def as_decoded(head: DraftHead, target: Target) -> DraftHead:
    """A copy as `load_head` would make it: in the target's dtype on its device, nothing compiled or
    remembered in it.
    """
    copy = HEADS[head.kind].from_config(head.config(), head.state_dict())
    copy.load_state_dict(head.state_dict())
    copy.tree = head.tree
    return copy.to(target.device, target.dtype).requires_grad_(False).eval()


def _contestant(name: str, engine: Speculator, rule: Acceptance) -> Contestant:
    def generate(prompt: Sequence[int], limit: int) -> list[Step]:
        return list(engine.generate(prompt, sampling=rule, max_new_tokens=limit))

    return Contestant(name, engine.tree.draft_nodes, generate, engine)


def _measure(contestants: Sequence[Contestant], job: Job, rule: Acceptance) -> Measured:
    """Of one prompt; who begins alternates, and random numbers belong to the prompt."""
    runs = {}
    for contestant in contestants if job.number % 2 else reversed(contestants):
        torch.manual_seed(job.number)
        rule.seed(job.number)
        runs[contestant.name] = timed(contestant, job)
    statistics, run = Statistics(), runs[HEADED]
    for step in run.steps:
        statistics.add(step)
    written, plain = len(run.tokens), runs[PLAIN]
    # when sampling, the two texts differ: what counts is the time per token
    plain_seconds = plain.seconds * written / len(plain.tokens)
    return Measured(
        statistics.steps,
        statistics.tokens,
        statistics.accepted,
        written,
        run.seconds,
        plain_seconds,
    )
