"""Random targets and heads at any shape, and what their steps read. Times do not depend on what
weights hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.initialization import no_init_weights

from draftheads.heads.base import DraftHead
from draftheads.heads.kinds import HEADS
from draftheads.heads.target.model import Target

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "sequential": ("sequential", {"conditioning": "recurrent"}),
    "block": ("block", {"conditioning": "markov", "layers": 2}),
    "eagle3": ("eagle3", {}),
    "eagle": ("eagle", {}),
    "mtp": ("mtp", {}),
}
"""Name -> (kind, choices)."""
BLOCK = 7
GATHERS = frozenset({"embedding", "index", "index_select", "gather"})
"""Operators that read as much of their first tensor as they return."""


@dataclass(frozen=True)
class Shape:
    """Of a target and its heads. hidden, intermediate: widths; head_dim: of `heads` query and
    `kv_heads` key heads. draft_vocab: tokens that heads can draft; depth, rank: of all.
    """

    hidden: int
    vocab: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    depth: int = 5
    draft_vocab: int = 32_768
    rank: int = 256
    device: str = "cpu"
    dtype: str = "float32"


SHAPES = {
    name: Shape(*sizes)
    for name, sizes in {
        "qwen3-0.6b": (1024, 151_936, 28, 3072, 16, 8, 128),
        "llama-3.2-1b": (2048, 128_256, 16, 8192, 32, 8, 64),
        "qwen3-4b": (2560, 151_936, 36, 9728, 32, 8, 128),
        "llama-3.1-8b": (4096, 128_256, 32, 14_336, 32, 8, 128),
        "tiny": (64, 96, 2, 96, 4, 2, 16),
    }.items()
}


def create_target(shape: Shape) -> Target:
    """A random target that never ends a text, not packed."""
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(shape.device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))
    fill(model)
    model.generation_config = GenerationConfig()
    return Target(model.to(shape.device), name="random Llama")


def create_head(name: str, shape: Shape, target: Target) -> DraftHead:
    """A head of one of the `KINDS`, filled with random weights."""
    kind, choices = KINDS[name]
    choices, vocabulary = {**choices, "labels": "hard"}, None
    if kind == "block":
        choices |= {"block_size": max(BLOCK, shape.depth), "mask": 0}
    else:
        choices["depth"] = shape.depth
    if "conditioning" in choices:
        choices["rank"] = shape.rank
    if shape.draft_vocab < shape.vocab:
        spread = torch.linspace(0, shape.vocab - 1, shape.draft_vocab, dtype=torch.float64)
        vocabulary = spread.long().tolist()
    with _default_dtype(target.dtype), no_init_weights():  # float32 would take twice the memory
        head = HEADS[kind].create(target, HEADS[kind].Choices(**choices), vocabulary)
        head.to(target.device, target.dtype)
    fill(head)
    return head.eval()


def fill(module: torch.nn.Module) -> None:
    """Draw a million weights and repeat them: drafts take as long, and to draw all takes minutes at
    the shape of an 8B model.
    """
    drawn = torch.empty(1 << 20).normal_(std=0.02)
    for parameter in module.parameters():
        for part in parameter.data.view(-1).split(len(drawn)):
            part.copy_(drawn[: len(part)])


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators read of tensors that stood in memory before: weights, what is kept of
    their products, the text's keys and values. A matrix that is read twice counts twice; what was
    made on the way, such as logits, counts not at all.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._made: list[Tensor] = []  # kept, so that no other tensor gets their memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        after = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if {_place(tensor) for tensor in before} & {_place(tensor) for tensor in after}:
            return out  # a view, or written in place
        if func.overloadpacket.__name__ in GATHERS:
            read = sum(map(_bytes, after)) if self._stood(before[0]) else 0
        else:
            read = sum(_bytes(tensor) for tensor in before if self._stood(tensor))
        self.bytes += read
        self._made += after
        return out

    def _stood(self, tensor: Tensor) -> bool:
        """Indices and masks are not worth counting."""
        return tensor.is_floating_point() and _place(tensor) not in map(_place, self._made)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:  # others in this process rely on float32
        yield
    finally:
        torch.set_default_dtype(before)
