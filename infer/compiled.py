"""A decoding step as one function of tensors, which torch compiles: draft, verify, accept, keep.

Its shapes depend on the batch and on the tree alone, and nothing in it waits for the device. The
host reads new tokens and their number once per step. The slots of the caches that a step can see
are a dimension that may change without another compilation.

Legend: B batch, N tree nodes, A most tokens of a step, D feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.base import Committed, Drafter
from draftheads.heads.cache import SlotCache
from draftheads.heads.target import Target
from draftheads.heads.tree import Tree
from draftheads.heads.tree_drafting import DraftCache
from draftheads.infer.accept import Acceptance, commit

BACKEND: Any = "inductor"
FROZEN_BYTES = 2 << 30
"""Targets up to this size are copied in the layout that the CPU multiplies fastest."""


class CompiledStep:
    """The steps of one engine and batch size after each generation's first, which reads the prompt.

    Compiled when it is first called. The weights of target and head must not change afterwards.
    """

    accept: Acceptance

    def __init__(self, target: Target, tree: Tree) -> None:
        self.target, self.width = target, tree.depth + 1
        self.nodes, self.room = tree.nodes, 0
        options: dict[str, Any] = {"guard_filter_fn": _kept}
        size = sum(p.nbytes for p in target.model.parameters())
        if BACKEND == "inductor" and target.device.type == "cpu" and size <= FROZEN_BYTES:
            options["freezing"] = True
        # a code object of its own, as torch keeps what it compiled by code object
        function = FunctionType(_advance.__code__.replace(), globals())
        self.compiled = torch.compile(
            function, backend=BACKEND, fullgraph=True, dynamic=False, options=options
        )

    def begin(
        self, drafter: Drafter, cache: SlotCache, accept: Acceptance, committed: Committed
    ) -> Committed:
        """Prepare for a generation after its first step; returns what it committed, padded."""
        self.drafter, self.cache, self.accept = drafter, cache, accept
        self.drafts: DraftCache | None = getattr(drafter, "cache", None)
        if self.drafts is not None:
            self.room = self.width + self.drafts.table.pending
        more = self.width - committed.tokens_BA.shape[1]
        tokens_BA = F.pad(committed.tokens_BA, (0, more))
        features_BAD = F.pad(committed.features_BAD, (0, 0, 0, more))
        return Committed(tokens_BA, features_BAD, committed.count_B, committed.counts)

    def __call__(self, committed: Committed, running: list[bool]) -> tuple[Committed, list[Any]]:
        """One step of the rows that are running; returns what it committed, and its tokens."""
        self._fix(self.cache, self.nodes)
        if self.drafts is not None:
            self._fix(self.drafts.cache, self.room)
        running_B = torch.tensor(running, device=self.target.device)
        given = committed.tokens_BA, committed.features_BAD, committed.count_B
        with self.accept.random.filled():
            tokens_BA, features_BAD, count_B = self.compiled(self, *given, running_B)
        read = torch.cat([tokens_BA, count_B[:, None]], dim=1).tolist()
        counts = [row.pop() for row in read]
        self.cache.table.note(counts)
        if self.drafts is not None:
            self.drafts.table.note(committed.counts)
        return Committed(tokens_BA, features_BAD, count_B, counts), read

    def end(self) -> None:
        """Let the generation continue with steps that are not compiled."""
        self.cache.table.free()
        if self.drafts is not None:
            self.drafts.table.free()

    def _fix(self, cache: SlotCache, room: int) -> None:
        capacity = cache.table.capacity if cache.table.fixed_S is not None else 0
        cache.fix(room)
        assert cache.table.fixed_S is not None
        torch._dynamo.maybe_mark_dynamic(cache.table.fixed_S, 0)
        if cache.table.capacity != capacity:
            for layer in filter(attrgetter("is_initialized"), cache.layers):
                torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
                torch._dynamo.maybe_mark_dynamic(layer.values, 2)


def why_not(target: Target) -> str | None:
    """Why steps of this target cannot be compiled, as far as can be told before."""
    if target.has_long_rope:
        return "its RoPE factors change with the length of the text"
    if len({parameter.device for parameter in target.model.parameters()}) > 1:
        return "its layers are on several devices"
    return None


def _advance(
    step: CompiledStep,
    tokens_BA: Tensor,
    features_BAD: Tensor,
    count_B: Tensor,
    running_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next tokens, their features, and how many there are."""
    drafter, cache = step.drafter, step.cache
    tree = drafter.propose(Committed(tokens_BA, features_BAD, count_B, []))
    out = step.target.verify(tree, cache, drafter.feature_layers)
    accepted = step.accept(out.logits_BNV, tree)
    path_BA = accepted.path_BN[:, : step.width]
    new_B = accepted.count_B * running_B
    cache.keep(path_BA, new_B)
    return (*commit(tree, out, accepted, path_BA), new_B)


def _kept(guards: Sequence[Any]) -> list[bool]:
    """Which assumptions of the compiler to check before each step: shapes. Its objects are those of
    one engine, or of the same kind and sizes.
    """
    kinds = ("SHAPE_ENV", "TENSOR_MATCH")
    own = ("_parameters", "_buffers")
    return [g.guard_type in kinds and not any(part in g.name for part in own) for g in guards]
