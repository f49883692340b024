"""From the runs of a race to results: speed, its interval, losslessness.

Legend: P prompts, R bootstrap resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftheads.heads.target import Target
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.engine import Statistics
from draftheads.infer.race import GENERATE, PLAIN, BenchOptions, Contestant, Job, Results
from draftheads.infer.report import Divergence, Result


class Summary:
    """Turns the runs of a race into results."""

    def __init__(
        self, target: Target, jobs: Sequence[Job], results: Results, options: BenchOptions
    ) -> None:
        self.target, self.jobs, self.results, self.options = target, jobs, results, options
        self.unasked = _why_not_lossless(target, options.sampling)
        self.best_plain = max(GENERATE, PLAIN, key=self._speed)

    def result(self, contestant: Contestant, halves: Statistics | None) -> Result:
        """halves: whose draft and verify times to report, default the timed runs' own."""
        statistics = Statistics()
        for step in (
            step for runs in self.results[contestant.name] for run in runs for step in run.steps
        ):
            statistics.add(step)
        halves = halves or statistics
        speed, speed_of_generate = self._speed(contestant.name), self._speed(GENERATE)
        sums = self._sums(contestant.name)
        divergence = self._divergence(contestant.name)
        return Result(
            name=contestant.name,
            nodes=contestant.nodes,
            lossless=None if self.unasked else divergence is None,
            lossless_reason=self.unasked,
            first_divergence=divergence,
            tokens_per_step=statistics.tokens_per_step,
            acceptance_by_depth=statistics.acceptance_by_depth,
            tokens_per_second=speed,
            baseline_tokens_per_second=speed_of_generate,
            plain_tokens_per_second=self._speed(PLAIN),
            speedup=speed / speed_of_generate,
            speedup_ci95=speedup_interval(sums, self._sums(GENERATE), self.options),
            speedup_over_best=speed / self._speed(self.best_plain),
            speedup_over_best_ci95=speedup_interval(
                sums, self._sums(self.best_plain), self.options
            ),
            draft_seconds=halves.draft_seconds / max(halves.steps, 1),
            verify_seconds=halves.verify_seconds / max(halves.steps, 1),
            steps=statistics.steps,
            tokens=sum(len(run.tokens) for runs in self.results[contestant.name] for run in runs),
        )

    def _sums(self, name: str) -> Tensor:
        """float64 (P, 2): tokens and seconds of each prompt, summed over repetitions."""
        sums = [
            [sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)]
            for runs in self.results[name]
        ]
        return torch.tensor(sums, dtype=torch.float64)

    def _speed(self, name: str) -> float:
        tokens, seconds = self._sums(name).sum(0).tolist()
        return float(tokens / seconds)

    def _divergence(self, name: str) -> Divergence | None:
        """Against generate's first run of each prompt; every repetition counts."""
        if not isinstance(self.options.sampling, Greedy):
            return None
        differing = []
        for job, runs, references in zip(
            self.jobs, self.results[name], self.results[GENERATE], strict=True
        ):
            expected = references[0].tokens
            got = next((run.tokens for run in runs if run.tokens != expected), None)
            if got is not None:
                differing.append((job, expected, got))
        if not differing:
            return None
        job, expected, got = differing[0]
        place = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
            min(len(expected), len(got)),
        )
        return Divergence(
            prompts=len(differing),
            prompt=job.number,
            token=place,
            expected=expected[place] if place < len(expected) else None,
            got=got[place] if place < len(got) else None,
            top2_margin=top2_margin(self.target, [*job.prompt, *expected[:place]]),
        )


def _why_not_lossless(target: Target, rule: Acceptance) -> str | None:
    if not rule.lossless:
        return "lossless: n/a, this acceptance rule is lossy: its output is not the target's own."
    if not isinstance(rule, Greedy):
        return "lossless: n/a when sampling: two random streams never write the same tokens."
    if target.dtype != torch.float32:
        kind = str(target.dtype).removeprefix("torch.")
        return (
            f"lossless: n/a in {kind}, where one token and a tree of tokens round differently and "
            "near-ties fall either way; compare in float32."
        )
    return None


def top2_margin(target: Target, tokens: Sequence[int]) -> float:
    """The target's best logit minus its second best after `tokens`."""
    cache = target.new_cache(1, len(tokens))
    best = target.prefill([tokens], cache, ()).logits_BNV[0, 0].float().topk(2).values
    return float(best[0] - best[1])


def speedup_interval(
    ours_P2: Tensor, baseline_P2: Tensor, options: BenchOptions
) -> tuple[float, float]:
    """The 95 % interval of the ratio of tokens per second, by a paired bootstrap over prompts.

    ours_P2, baseline_P2: float64 tokens and seconds of the same prompts. A resample draws P prompts
    with replacement, the same ones for both sides, and takes the ratio of the sums.
    """
    prompts = len(ours_P2)
    generator = torch.Generator().manual_seed(options.seed)
    drawn_RP = torch.randint(prompts, (options.resamples, prompts), generator=generator)
    ours_R2, baseline_R2 = ours_P2[drawn_RP].sum(1), baseline_P2[drawn_RP].sum(1)
    ratio_R = (ours_R2[:, 0] / ours_R2[:, 1]) / (baseline_R2[:, 0] / baseline_R2[:, 1])
    low, high = torch.quantile(ratio_R, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
