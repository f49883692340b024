"""The parts of a run and their sizes, as numbers: target, head, adapter.

Legend: D width, I inner width of an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT = 4
"""Bytes of a trained number: weights, gradients and both moments are float32."""
FOLDER_BYTES, TENSOR_BYTES = 10_800, 400
"""Of a checkpoint, besides its numbers: texts per folder; names and shapes per tensor."""
ADAPTER_FOLDER_BYTES, ADAPTER_TENSOR_BYTES = 2_900, 570
"""The same of an adapter, whose names are longer."""


@dataclass(frozen=True)
class TargetSizes:
    """Parameters of the frozen target by part. lm_head: 0 where it is the embeddings. per_layer: of
    one of `layers` equal ones (their mean). inner: I. dtype: as loaded for training.
    """

    name: str
    width: int
    inner: int
    vocabulary: int
    context: int
    layers: int
    embeddings: int
    per_layer: int
    lm_head: int
    rest: int
    dtype: torch.dtype
    bits: int | None

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.embeddings + self.layers * self.per_layer + self.lm_head + self.rest

    def bytes(self, placement: str = "whole", processes: int = 1) -> int:
        """On one device. placement: as `target_placement` in a recipe; `sharded` divides layers."""
        of_layers = self.layers * self.per_layer * (self.bits or 8 * self.dtype.itemsize) // 8
        outside = self.parameters - self.layers * self.per_layer
        shared = processes if placement == "sharded" else 1
        return of_layers // shared + outside * self.dtype.itemsize


@dataclass(frozen=True)
class HeadSizes:
    """Parameters of the recipe's head, all trained in float32. buffers: bytes saved besides.
    tensors: how many are saved. largest: parameters of the largest. features: states of the
    target that training reads, each D wide.
    """

    kind: str
    parameters: int
    buffers: int
    tensors: int
    largest: int
    features: int

    @property
    def bytes(self) -> int:
        """Of the weights; gradients take as much, both moments twice as much."""
        return FLOAT * self.parameters

    @property
    def checkpoint(self) -> int:
        """Bytes of a step-* folder: weights, both moments, texts."""
        texts = FOLDER_BYTES + self.tensors * TENSOR_BYTES
        return 3 * self.bytes + self.buffers + texts


@dataclass(frozen=True)
class AdapterSizes:
    """Parameters of the recipe's adapter of the target, all trained in float32; zeros where there
    is none. layers: that it changes, the last ones. tensors, largest: as of `HeadSizes`. reads:
    numbers per token that its matrices in one layer read.
    """

    layers: int = 0
    parameters: int = 0
    tensors: int = 0
    largest: int = 0
    reads: int = 0

    @property
    def bytes(self) -> int:
        """Of the weights; gradients take as much, both moments twice as much."""
        return FLOAT * self.parameters

    @property
    def checkpoint(self) -> int:
        """Bytes of its part of a step-* folder: weights, both moments, texts."""
        texts = ADAPTER_FOLDER_BYTES + self.tensors * ADAPTER_TENSOR_BYTES
        return 3 * self.bytes + texts if self.layers else 0


@dataclass(frozen=True)
class Sizes:
    """Of all models of a run."""

    target: TargetSizes
    head: HeadSizes
    adapter: AdapterSizes

    @property
    def trained(self) -> int:
        """Bytes of the weights that learn."""
        return self.head.bytes + self.adapter.bytes

    @property
    def checkpoint(self) -> int:
        """Bytes of a step-* folder."""
        return self.head.checkpoint + self.adapter.checkpoint
