"""The arithmetic that a training step cannot do without, by formula.

FLOP are counted, two per multiply-add, of matrix products alone: linear layers, and attention to
the entries that are seen. Backward takes one product for the gradient of the weight and one for
that of the input, where that is wanted: not of the frozen features. Nothing is computed twice.
Legend: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from draftheads.heads.base import Batch, DraftHead
from draftheads.heads.eagle3 import Eagle3Head
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target import Target

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""The operators that linear layers end in; FlopCounterMode counts attention under other names."""


@dataclass(frozen=True)
class Part:
    """FLOP of one part of a step. is_linear: of linear layers, not of attention."""

    name: str
    forward: int
    backward: int = 0
    is_linear: bool = True


def frozen_parts(target: Target, batch: Batch) -> list[Part]:
    """The target's forward; its attention is causal within each document."""
    config = target.config
    seen = int((batch.positions_BT + 1).sum())
    attention = _attention(seen, config.num_attention_heads * config.head_dim) * target.layers
    return [
        Part("target: linear layers", _linear(batch.tokens_BT.numel(), target.model.get_decoder())),
        Part("target: attention", attention, is_linear=False),
    ]


def head_parts(head: DraftHead, batch: Batch, target: Target) -> list[Part]:
    """A head's forward and backward."""
    if isinstance(head, MedusaHead):
        return _medusa_parts(head, batch)
    assert isinstance(head, Eagle3Head), f"no formula for {head.kind}"
    return _eagle3_parts(head, batch, target)


def total(parts: Iterable[Part], *, only_linear: bool = False) -> int:
    """FLOP, forward and backward."""
    chosen = [part for part in parts if part.is_linear or not only_linear]
    return sum(part.forward + part.backward for part in chosen)


def counted(function: Callable[[], Any]) -> int:
    """FLOP that torch sees in the linear layers of a call, and of the backward pass in it."""
    with FlopCounterMode(display=False) as counter:
        function()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if str(name).split(".")[-1] in PRODUCTS)


def _medusa_parts(head: MedusaHead, batch: Batch) -> list[Part]:
    blocks = first = words = 0
    for k, mask_BT in enumerate(batch.roots(head.depth)):
        judged = int(mask_BT.sum())
        blocks += _linear(judged, head.blocks[k])
        first += _linear(judged, head.blocks[k].get_submodule("layers.0"))
        words += _linear(judged, head.lm_heads[k])
    return [
        Part("head: blocks", blocks, 2 * blocks - first),
        Part("head: lm_heads", words, 2 * words),
    ]


def _eagle3_parts(head: Eagle3Head, batch: Batch, target: Target) -> list[Part]:
    layers = head.midlayer if head.layer_count == 1 else head.layers
    masks = list(batch.roots(head.steps))
    judged = [int(mask_BT.sum()) for mask_BT in masks]
    seen = [int(batch.positions_BT.sum())]  # the first token of a document makes no pair
    for step in range(1, head.steps):
        seen.append(int(batch.positions_BT[masks[step]].sum()) + step * judged[step])
    width = head.design.shape.heads * head.design.shape.head_dim
    attention = _attention(sum(seen), width) * head.layer_count
    fused = _linear(batch.tokens_BT.numel(), head.fc)
    first = _linear(batch.tokens_BT.numel(), layers)
    later = _linear(sum(judged[1:]), layers)
    words = _linear(sum(judged), head.lm_head)
    labels = _linear(judged[0], target.model.get_output_embeddings())
    return [
        Part("head: fc", fused, fused),
        Part("head: layer, step 0", first, 2 * first),
        Part("head: layer, later steps", later, 2 * later),
        Part("head: attention", attention, 2 * attention, is_linear=False),
        Part("head: lm_head", words, 2 * words),
        *([Part("target: lm_head, for labels", labels)] if head.labels == "soft" else []),
    ]


def _linear(rows: int, module: nn.Module) -> int:
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    return 2 * rows * sum(layer.weight.numel() for layer in layers)


def _attention(seen: int, width: int) -> int:
    return 2 * 2 * seen * width  # scores, and the sum of values
