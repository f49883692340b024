"""The faster dtype on this CPU, by a few matrix products at a target's shape before it is loaded.

Some CPUs multiply bfloat16 several times as fast as float32 and others more slowly, so no fixed
rule is right. What learns or writes data keeps a fixed one: its results must not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter, thread_time

import torch
from torch import Tensor
from transformers import PretrainedConfig

NODES = 8
"""Draft nodes of the step that is measured beside a plain one."""
LARGEST = 1 << 25
"""Numbers that are multiplied: more than caches hold."""
ROUNDS, SECONDS = 5, 1.5
"""At most so many rounds, and none that would end later than this."""
FASTER = 1.1
"""How much faster the checkpoint's own dtype must be: float32 keeps output token for token."""
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Pace:
    """How fast the checkpoint's own dtype is."""

    own: str
    gain: float  # seconds in float32 over those in it

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
            f"{self.own}: measured {self.gain:.1f}x faster than float32 here; --dtype float32 for "
            "output that equals generate's token for token"
        )


def fair_clock(device: torch.device) -> Callable[[], float]:
    """CPU seconds of a single thread, in which other processes hardly count; else wall seconds."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return thread_time if alone else perf_counter


def measured_pace(config: PretrainedConfig) -> Pace | None:
    """Multiply in float32 and in the checkpoint's own dtype, 1 token and 1 + NODES, in turns and
    for at most two seconds. None for a checkpoint in float32 or quantised, which has no choice.
    """
    text = config.get_text_config(decoder=True)
    own = text.dtype or config.dtype
    if own not in HALVES or getattr(config, "quantization_config", None):
        return None
    weights = {dtype: matrices(text, dtype) for dtype in (torch.float32, own)}
    best = dict.fromkeys(weights, float("inf"))
    began = perf_counter()
    for number in range(ROUNDS):
        if number and (perf_counter() - began) * (number + 1) / number > SECONDS:
            break
        for dtype, seconds in pass_seconds(weights).items():
            best[dtype] = min(best[dtype], seconds)
    name = str(own).removeprefix("torch.")
    return Pace(name, best[torch.float32] / best[own])


def matrices(config: PretrainedConfig, dtype: torch.dtype) -> list[Tensor]:
    """Matrices (rows, width) of the shapes in a target's layers, of up to LARGEST numbers in all.

    Each is memory of its own, written once, so that it is read as weights are.
    """
    width: int = config.hidden_size
    inner: int = getattr(config, "intermediate_size", None) or 4 * width
    shapes = [(inner, width), (width, inner), (width, width)]
    most = min(LARGEST, config.num_hidden_layers * sum(rows * size for rows, size in shapes))
    chosen: list[Tensor] = []
    for shape in cycle(shapes):
        chosen.append(torch.ones(shape, dtype=dtype))
        if sum(weight.numel() for weight in chosen) >= most:
            return chosen
    raise AssertionError("a cycle does not end")


@torch.inference_mode()
def pass_seconds(weights: Mapping[torch.dtype, Sequence[Tensor]]) -> dict[torch.dtype, float]:
    """Seconds of all products in each dtype, of 1 token and of 1 + NODES."""
    clock, seconds = fair_clock(torch.device("cpu")), dict[torch.dtype, float]()
    for dtype, chosen in weights.items():
        began = clock()
        for tokens in (1, 1 + NODES):
            for weight in chosen:
                torch.nn.functional.linear(weight.new_ones(tokens, weight.shape[1]), weight)
        seconds[dtype] = clock() - began
    return seconds
