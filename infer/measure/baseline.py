"""transformers' own `generate`, as a candidate of a bench."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import CompileConfig, GenerationConfig

from draftheads.heads.target.model import Target
from draftheads.infer.accept import Acceptance
from draftheads.infer.rows import Step


@dataclass
class Baseline:
    """transformers' own `generate`: with its default cache the baseline of every speedup, and the
    reference output. compile: with its static cache, and compiled.
    """

    target: Target
    compile: bool = False

    def generate(
        self, prompt: Sequence[int], *, sampling: Acceptance, max_new_tokens: int
    ) -> Iterator[Step]:
        """Continue a prompt, all in one Step.

        Raises ValueError for a rule that `generate` has no equivalent of.
        """
        arguments = sampling.as_generate()
        if arguments is None:
            raise ValueError(
                f"expected a rule that `generate` has an equivalent of, got {sampling!r:.60}; give "
                "it the method as_generate"
            )
        eos = list(self.target.eos_ids)
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            **arguments,
        )
        if self.compile:
            config.cache_implementation = "static"
            config.compile_config = CompileConfig(mode=None, fullgraph=False)
            config.compile_config._compile_all_devices = True  # the CPU, too
        tokens_1T = torch.tensor([prompt], device=self.target.device)
        out_1T = self.target.model.generate(
            tokens_1T, attention_mask=torch.ones_like(tokens_1T), generation_config=config
        )
        yield Step(out_1T[0, len(prompt) :].tolist(), -1, None, 0.0, 0.0)


@contextmanager
def without_defaults(target: Target) -> Iterator[None]:
    """Hide the model's generation_config, which `generate` merges into any config it is given.

    With a repetition penalty or suppressed tokens from there, `generate` would not follow the
    target's plain distribution, which draft heads reproduce.
    """
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig()
    try:  # the caller's target is restored even after Ctrl-C
        yield
    finally:
        target.model.generation_config = own
