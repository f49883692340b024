"""A decoding step as one function of tensors, which torch compiles: draft, verify, accept, keep.
Only heads draft in it; other drafters do before it, on the host.

Its shapes depend on the batch and on the tree alone, and nothing in it waits for the device. The
host reads new tokens and their number once per step. The slots of the caches that a step can see
are a dimension that may change without another compilation. On CUDA they change in buckets, and
the steps of a bucket are replays of one CUDA graph.

Legend: B batch, C most tokens of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.cache import SlotCache
from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree, Topology, Tree
from draftheads.infer.accept import Acceptance, commit

BACKEND: Any = "inductor"
BUCKET = 256
"""Steps that are recorded see a multiple of so many slots."""

Outputs = tuple[Tensor, Tensor, Tensor]
"""Of a step: its tokens (B, C), their features (B, C, D), and their number (B,)."""
Advance = Callable[..., Outputs]


def cuda_graph(step: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """Record a step without running it. Returns what each replay overwrites, and the replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step()
    return outputs, graph.replay


RECORDERS: dict[str, Callable[..., Any]] = {"cuda": cuda_graph}
"""Type of a device -> how its steps are recorded."""


def compiled() -> Advance:
    """A function for `FixedSteps` of one engine, batch size and rule; torch compiles it at its
    first call. The weights of target and head must not change afterwards.
    """
    options: dict[str, Any] = {"guard_filter_fn": _checked}
    if BACKEND == "inductor":
        options["size_asserts"] = False
        # how many of the operators that read the same tensor it tries to fuse with each: with 64,
        # its default, more than half of its time goes into pairs that it refuses
        options["max_fusion_buffer_group_pairwise_attempts"] = 4
    # a code object of its own, as torch keeps what it compiled by code object
    function = FunctionType(_advance.__code__.replace(), globals())
    step: Advance = torch.compile(
        function, backend=BACKEND, fullgraph=True, dynamic=False, options=options
    )
    return step


def why_not(target: Target) -> str | None:
    """Why steps of this target cannot be compiled, as far as can be told before."""
    if target.has_long_rope:
        return "its RoPE factors change with the length of the text"
    if target.mixes_by_level:
        return "its recurrent layers run over a tree level by level"
    if len({parameter.device for parameter in target.model.parameters()}) > 1:
        return "its layers are on several devices"
    return None


class FixedSteps:
    """The steps of one generation after its first, which reads the prompt.

    advance: from `compiled`. drafter and cache: as the first step left them. accept: with its own
    random stream. on_host: whether the drafter works outside of the compiled function.
    """

    def __init__(
        self,
        advance: Advance,
        target: Target,
        drafter: Drafter,
        tree: Tree,
        cache: SlotCache,
        accept: Acceptance,
        on_host: bool = False,
    ) -> None:
        self.advance = advance
        self.target = target
        self.drafter = drafter
        self.cache = cache
        self.accept = accept
        self.nodes = tree.nodes
        self.width = tree.depth + 1
        self.on_host = on_host
        self.slots = [(cache, tree.nodes)]  # caches, and what a step writes to them
        if drafter.cache is not None:
            slots = drafter.cache.cache
            self.slots.append((slots, self.width + slots.table.pending))
        self.record = RECORDERS.get(target.device.type)
        self.seen: list[tuple[int, int]] = []  # slots and capacities of the recording
        self.recording: Recording | None = None

    def __call__(
        self, committed: Committed, tree: TokenTree | None, running: list[bool]
    ) -> tuple[Committed, list[list[int]]]:
        """One step of the rows that are running; returns what it committed, and its tokens. tree:
        that of a drafter on the host.
        """
        bucket = BUCKET if self.record else 1
        for cache, room in self.slots:
            _fix(cache, room, bucket)
        running_B = torch.tensor(running, device=self.target.device)
        drafts = self._padded_tree(tree) if tree else self._padded(committed)
        inputs = (*drafts, running_B)
        nodes = drafts[0].shape[1] if tree else None
        with self.accept.draws.filled(len(running), nodes):
            tokens_BC, features_BCD, count_B = self._step(inputs)
        # one copy to the host, so one wait for the device
        tokens: list[list[int]] = torch.cat([tokens_BC, count_B[:, None]], dim=1).tolist()
        counts = [row.pop() for row in tokens]
        # the drafter has what was committed before this step
        for (cache, _), new in zip(self.slots, (counts, committed.counts), strict=False):
            cache.note(new)
        return Committed(tokens_BC, features_BCD, count_B, counts), tokens

    def _padded(self, committed: Committed) -> tuple[Tensor, ...]:
        tokens_BC, features_BCD = committed.tokens_BC, committed.features_BCD
        if padding := self.width - tokens_BC.shape[1]:  # the first time
            tokens_BC = F.pad(tokens_BC, (0, padding))
            features_BCD = F.pad(features_BCD, (0, 0, 0, padding))
        return tokens_BC, features_BCD, committed.count_B

    def _padded_tree(self, tree: TokenTree) -> tuple[Tensor, ...]:
        """Its tokens and parents, padded with copies of its first node, leaves after it
        that no rule prefers: to a power of two, as each size is compiled, or that of a recording.
        """
        tokens_BN = tree.tokens_BN
        nodes = tokens_BN.shape[1]
        size = self.nodes if self.record else min(1 << (nodes - 1).bit_length(), self.nodes)
        padding = size - nodes
        parents_BN = tree.topology.parents_BN.expand_as(tokens_BN)
        filler_BP = tokens_BN[:, :2][:, -1:].expand(-1, padding)
        return torch.cat([tokens_BN, filler_BP], dim=1), F.pad(parents_BN, (0, padding))

    def _step(self, inputs: tuple[Tensor, ...]) -> Outputs:
        """A replay, if there is a recording for the slots that can be seen now."""
        seen = [(cache.table.span, cache.table.capacity) for cache, _ in self.slots]
        if seen != self.seen:  # not recorded: it may allocate what later steps find there
            self.seen = seen
            self.recording = None
        elif self.record and not self.recording:
            try:
                self.recording = Recording(self.record, partial(self.advance, self), inputs)
            except RuntimeError as error:
                fault = str(error).strip().partition("\n")[0]
                warnings.warn(f"decoding without CUDA graphs: {fault}", stacklevel=4)
                self.record = None
        return self.recording(inputs) if self.recording else self.advance(self, *inputs)

    def end(self) -> None:
        """Let the generation continue with steps that are not compiled."""
        for cache, _ in self.slots:
            cache.free()


class Recording:
    """One step that reads its inputs from the same memory each time."""

    def __init__(
        self, record: Callable[..., Any], advance: Advance, inputs: Sequence[Tensor]
    ) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        self.outputs, self.replay = record(partial(advance, *self.inputs))

    def __call__(self, inputs: Sequence[Tensor]) -> Outputs:
        """One step; the next one overwrites what it returns."""
        for mine, new in zip(self.inputs, inputs, strict=True):
            mine.copy_(new)
        self.replay()
        outputs: Outputs = self.outputs
        return outputs


def _advance(steps: FixedSteps, *inputs: Tensor) -> Outputs:
    """The next tokens, their features, and how many there are."""
    drafter = steps.drafter
    cache = steps.cache
    *drafts, running_B = inputs
    if steps.on_host:
        tokens_BN, parents_BN = drafts
        tree = TokenTree(tokens_BN, Topology(parents_BN, steps.width - 1))
    else:
        tokens_BC, features_BCD, count_B = drafts
        tree = drafter.propose(Committed(tokens_BC, features_BCD, count_B, []))
    out = steps.target.verify(tree, cache, drafter.feature_layers)
    accepted = steps.accept(out.logits_BNV, tree)
    path_BC = accepted.path_BN[:, : steps.width]
    new_B = accepted.count_B * running_B
    cache.keep(path_BC, new_B)
    return (*commit(tree, out, accepted, path_BC), new_B)


def _fix(cache: SlotCache, room: int, bucket: int) -> None:
    before = cache.table.capacity if cache.table.fixed_S is not None else 0
    cache.fix(room, bucket)
    torch._dynamo.maybe_mark_dynamic(cache.table.slots_S, 0)
    if cache.table.capacity != before:
        for layer in cache.layers:
            if layer.is_initialized:
                torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
                torch._dynamo.maybe_mark_dynamic(layer.values, 2)


def _checked(guards: Sequence[Any]) -> list[bool]:
    """Which assumptions of the compiler to check before each step: shapes. Its objects are those of
    one engine, or of the same kind and sizes.
    """
    kinds = ("SHAPE_ENV", "TENSOR_MATCH")
    own = ("_parameters", "_buffers")
    return [g.guard_type in kinds and not any(part in g.name for part in own) for g in guards]
