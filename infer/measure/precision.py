"""Measures the speed of dtypes on this CPU, with a few matrix products at a target's shape before
it is loaded.

Some CPUs multiply bfloat16 several times as fast as float32 and others more slowly, so no fixed
rule is right. Commands that learn or write data keep a fixed rule, because their results must not
depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig

from draftheads.heads.cpu.linear import PackedWeight, can_pack
from draftheads.heads.layers import project
from draftheads.heads.tensors import dtype_name
from draftheads.heads.tree import NODES
from draftheads.infer.threads import fair_clock

LARGEST = 1 << 25
"""Number of weights that are multiplied: more than caches hold."""
ROUNDS = 3
"""Number of rounds, of which the fastest counts."""
FASTER = 1.1
"""Speedup that half precision must reach, because float32 keeps output token for token."""
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DtypeTimes:
    """The speed of products in the two dtypes in which a target may be loaded.

    half: the one other than float32. rounds: True if the checkpoint's weights have more digits, so
    that half precision changes the model, which only the user may choose.
    """

    half: str
    gain: float  # how many times as fast as float32 it is
    rounds: bool

    @property
    def dtype(self) -> str:
        """The dtype to load the target in."""
        return self.half if self.gain > FASTER and not self.rounds else "float32"

    def __str__(self) -> str:
        if self.dtype == "float32":
            return (
                f"float32: {self.half} measured {self.gain:.1f}x as fast here; --dtype {self.half} "
                "chooses it all the same"
            )
        return (
            f"{self.half}: measured {self.gain:.1f}x faster than float32 here; --dtype float32 "
            "for output that equals generate's token for token"
        )


def own_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype of a checkpoint."""
    dtype = config.get_text_config(decoder=True).dtype or config.dtype or torch.float32
    assert isinstance(dtype, torch.dtype)
    return dtype


def measured_pace(config: PretrainedConfig, *, is_exact: bool = True) -> DtypeTimes:
    """Time products of 1 token and of 1 + NODES tokens, in turns, in float32 and in the half
    precision of the checkpoint, or bfloat16. is_exact: its weights are as they were trained.
    """
    text = config.get_text_config(decoder=True)
    own = own_dtype(config)
    half = own if own in HALVES else torch.bfloat16
    whole = matrices(text, torch.float32)
    halves = matrices(text, half)
    rounds = [(pass_seconds(whole), pass_seconds(halves)) for _ in range(ROUNDS)]
    slow = min(seconds for seconds, _ in rounds)
    fast = min(seconds for _, seconds in rounds)
    return DtypeTimes(dtype_name(half), slow / fast, rounds=is_exact and own != half)


def matrices(config: PretrainedConfig, dtype: torch.dtype) -> list[Tensor | PackedWeight]:
    """Matrices (rows, width) as in a target's layers, of at most LARGEST numbers in all, packed as
    `Target.pack` packs them.

    Each has memory of its own, written once, so that it is read as weights are.
    """
    width: int = config.hidden_size
    inner: int = getattr(config, "intermediate_size", None) or 4 * width
    inner = min(inner, LARGEST // (2 * width))
    layers = min(config.num_hidden_layers, LARGEST // (2 * width * inner))
    shapes = [(inner, width), (width, inner)] * layers
    if can_pack(torch.device("cpu"), dtype):
        return [PackedWeight(torch.ones(shape, dtype=dtype)) for shape in shapes]
    return [torch.ones(shape, dtype=dtype) for shape in shapes]


@torch.inference_mode()
def pass_seconds(weights: Sequence[Tensor | PackedWeight]) -> float:
    """Seconds of all products with these weights, of 1 token and of a step with drafts."""
    states = [
        torch.ones(tokens, weight.shape[1], dtype=weight.dtype)
        for tokens in (1, 1 + NODES)
        for weight in weights
    ]
    clock = fair_clock(torch.device("cpu"))
    began = clock()
    for states_TD, weight in zip(states, [*weights, *weights], strict=True):
        project(states_TD, weight)
    return clock() - began
