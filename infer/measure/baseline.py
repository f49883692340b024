"""transformers' own `generate`, as a candidate of a bench."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
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

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], *, sampling: Acceptance, max_new_tokens: int
    ) -> Iterator[list[Step | None]]:
        """Continue prompts of any lengths, padded on the left, all in one Step per row.

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
        rows = [torch.tensor(prompt, device=self.target.device) for prompt in prompts]
        padded = partial(pad_sequence, batch_first=True, padding_side="left")
        tokens_BT = padded(rows, padding_value=config.pad_token_id)
        mask_BT = padded([torch.ones_like(row) for row in rows])
        out_BT = self.target.model.generate(
            tokens_BT, attention_mask=mask_BT, generation_config=config
        )
        yield [self._step(row) for row in out_BT[:, tokens_BT.shape[1] :].tolist()]

    def _step(self, tokens: list[int]) -> Step:
        """A row's new tokens, up to its end."""
        for place, token in enumerate(tokens, start=1):
            if token in self.target.eos_ids:
                tokens = tokens[:place]
                break
        return Step(tokens, -1, None, 0.0, 0.0)


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
