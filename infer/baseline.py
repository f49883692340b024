"""transformers' own `generate`, the baseline of every speed claim and the judge of losslessness."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from draftheads.heads.target import Target
from draftheads.infer.accept import Acceptance, Greedy, Sampled, Typical


class Baseline:
    """Continues one prompt with `model.generate` and its default cache, sampling as `rule` does.

    Raises ValueError for a rule that `generate` has no equivalent of. `Typical` is compared with
    plain sampling at its temperature.
    """

    def __init__(self, target: Target, rule: Acceptance, limits: Collection[int]) -> None:
        self.target = target
        eos, sampling = list(target.eos_ids), generate_arguments(rule)
        self._configs = {  # made here, so that no timer sees them made
            limit: GenerationConfig(
                max_new_tokens=limit,
                eos_token_id=eos or None,
                pad_token_id=eos[0] if eos else 0,  # never used for one row; it spares a warning
                **sampling,
            )
            for limit in limits
        }

    def __call__(self, prompt: Sequence[int], limit: int) -> list[int]:
        """The new tokens, the EOS included; limit: max_new_tokens, one of `limits`."""
        tokens_1T = torch.tensor([prompt], device=self.target.device)
        out_1T = self.target.model.generate(
            tokens_1T,
            attention_mask=torch.ones_like(tokens_1T),
            generation_config=self._configs[limit],
        )
        new: list[int] = out_1T[0, len(prompt) :].tolist()
        return new


def generate_arguments(rule: Acceptance) -> dict[str, Any]:
    """The arguments of `GenerationConfig` that sample as `rule` does."""
    if isinstance(rule, Greedy):
        return {"do_sample": False}
    if isinstance(rule, Sampled):
        return {
            "do_sample": True,
            "temperature": float(rule.temperature),
            "top_p": float(rule.top_p),
            "top_k": rule.top_k,  # 0 switches off the 50 that generate takes when it is not told
        }
    if isinstance(rule, Typical):
        chosen = {"temperature": float(rule.temperature), "top_p": 1.0, "top_k": 0}
        return {"do_sample": True, **chosen}
    raise ValueError(
        f"expected Greedy, Sampled or Typical, got {type(rule).__name__}: `generate` has no "
        "equivalent to compare it with"
    )


@contextmanager
def without_defaults(target: Target) -> Iterator[None]:
    """Hide the model's generation_config, which `generate` merges into any config it is given.

    A repetition penalty or suppressed tokens from there would make `generate` write something else
    than the target's plain distribution, which is what draft heads reproduce.
    """
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig()
    try:  # the target is the caller's: give it back as it was, also after Ctrl-C
        yield
    finally:
        target.model.generation_config = own
