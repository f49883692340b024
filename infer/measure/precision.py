"""What dtypes and draft nodes cost on this CPU, by a few matrix products at a target's shape before
it is loaded.

Some CPUs multiply bfloat16 several times as fast as float32 and others more slowly, so no fixed
rule is right. What learns or writes data keeps a fixed one: its results must not depend on timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from transformers import PretrainedConfig

from draftheads.heads.cpu.linear import PackedWeight, can_pack
from draftheads.heads.layers import project
from draftheads.heads.tensors import dtype_name
from draftheads.heads.tree import NODES
from draftheads.infer.threads import fair_clock

LARGEST = 1 << 25
"""Numbers that are multiplied: more than caches hold."""
ROUNDS = 5
"""At most so many."""
SECONDS = 1.5
"""No round begins that would end later than this."""
FASTER = 1.1
"""How much faster the checkpoint's own dtype must be: float32 keeps output token for token."""
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class DtypeTimes:
    """Seconds of the products of one token and of a step with drafts, for each dtype that the
    target may be loaded in: float32, and the checkpoint's own.
    """

    seconds: Mapping[str, tuple[float, float]]

    @property
    def own(self) -> str:
        """The checkpoint's own dtype."""
        return list(self.seconds)[-1]

    @property
    def gain(self) -> float:
        """How many times as fast the checkpoint's own dtype is."""
        return sum(self.seconds["float32"]) / sum(self.seconds[self.own])

    @property
    def dtype(self) -> str:
        """The dtype to load the target in."""
        return self.own if self.gain > FASTER else "float32"

    def __str__(self) -> str:
        if self.dtype == "float32":
            return (
                f"float32: {self.own} measured {self.gain:.1f}x as fast here; --dtype {self.own} "
                "chooses it all the same"
            )
        return (
            f"{self.own}: measured {self.gain:.1f}x faster than float32 here; --dtype float32 "
            "for output that equals generate's token for token"
        )


def own_dtype(config: PretrainedConfig) -> torch.dtype:
    """The half precision that a checkpoint is in; float32 for others, and for quantised ones, whose
    dtype is no choice.
    """
    dtype = config.get_text_config(decoder=True).dtype or config.dtype
    is_quantised = getattr(config, "quantization_config", None)
    return dtype if dtype in HALVES and not is_quantised else torch.float32


def measured_pace(config: PretrainedConfig, nodes: int = NODES) -> DtypeTimes:
    """Multiply 1 token and 1 + nodes, in turns and for at most two seconds."""
    text = config.get_text_config(decoder=True)
    weights = {dtype: matrices(text, dtype) for dtype in (torch.float32, own_dtype(config))}
    best = dict.fromkeys(weights, (float("inf"), float("inf")))
    began = perf_counter()
    for number in range(ROUNDS):
        if number and (perf_counter() - began) * (number + 1) / number > SECONDS:
            break
        for dtype, (plain, drafted) in pass_seconds(weights, nodes).items():
            best[dtype] = min(best[dtype][0], plain), min(best[dtype][1], drafted)
    return DtypeTimes({dtype_name(dtype): each for dtype, each in best.items()})


def matrices(config: PretrainedConfig, dtype: torch.dtype) -> list[Tensor | PackedWeight]:
    """Matrices (rows, width) as in a target's layers, of at most LARGEST numbers in all, packed as
    `Target.pack` would.

    Each is memory of its own, written once, so that it is read as weights are.
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
def pass_seconds(
    weights: Mapping[torch.dtype, Sequence[Tensor | PackedWeight]], nodes: int
) -> dict[torch.dtype, tuple[float, float]]:
    """Seconds of all products in each dtype, of 1 token and of 1 + nodes."""
    clock = fair_clock(torch.device("cpu"))

    def seconds(chosen: Sequence[Tensor | PackedWeight], tokens: int) -> float:
        states = [torch.ones(tokens, weight.shape[1], dtype=weight.dtype) for weight in chosen]
        began = clock()
        for states_TD, weight in zip(states, chosen, strict=True):
            project(states_TD, weight)
        return clock() - began

    return {
        dtype: (seconds(chosen, 1), seconds(chosen, 1 + nodes)) for dtype, chosen in weights.items()
    }
