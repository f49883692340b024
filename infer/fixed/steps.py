"""A decoding step as one function of tensors, which torch compiles and a GPU replays: draft,
verify, accept, keep. Only heads draft in it; other drafters do before it, on the host.

Its shapes depend on the batch and on the tree alone, and nothing in it waits for the device. The
host reads new tokens and their number once per step. The slots of the caches that a step can see
are a dimension that may change without another compilation. On CUDA they change in buckets, and
the steps of a bucket are replays of one recording.

Legend: B batch, C most tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from draftheads.infer.fixed.recorded import BUCKET, Outputs, Recording, Recordings

BACKEND: Any = "inductor"
Advance = Callable[..., Outputs]


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
    function = FunctionType(advance.__code__.replace(), globals())
    step: Advance = torch.compile(
        function, backend=BACKEND, fullgraph=True, dynamic=False, options=options
    )
    return step


def why_not(target: Target) -> str | None:
    """Why steps of this target can be neither compiled nor recorded, as far as is known before."""
    if target.engine == "onnx":
        return "its layers run in ONNX Runtime; --engine torch compiles them"
    if target.has_long_rope:
        return "its RoPE factors change with the length of the text"
    if target.mixes_by_level:
        return "its recurrent layers run over a tree level by level"
    if len({parameter.device for parameter in target.model.parameters()}) > 1:
        return "its layers are on several devices"
    return None


class FixedSteps:
    """Steps of the same rows after the first, which are run as they are, compiled or recorded.

    function: `advance`, or what `compiled` made of it. tree: of the drafter; pending: nodes in its
    cache after a tree. on_host: whether the drafter works outside of the function. recordings:
    those of these caches.
    """

    def __init__(
        self,
        function: Advance,
        target: Target,
        drafter: Drafter,
        tree: Tree,
        cache: SlotCache,
        accept: Acceptance,
        *,
        pending: int = 0,
        on_host: bool = False,
        recordings: Recordings | None = None,
    ) -> None:
        self.function = function
        self.is_compiled = function is not advance
        self.target = target
        self.drafter = drafter
        self.cache = cache
        self.accept = accept
        self.nodes = tree.nodes
        self.width = tree.depth + 1
        self.on_host = on_host
        self.slots = [(cache, tree.nodes)]  # caches, and what a step writes to them
        if drafter.cache is not None:
            self.slots.append((drafter.cache.cache, self.width + pending))
        self.recordings = recordings or Recordings(None)
        self.key: tuple[Any, ...] = ()
        if self.recordings.record:
            self.key = (None if on_host else id(drafter), function, *accept.constants())
        self.recording: Recording | None = None  # of the newest step
        self.is_new = False  # whether it was run for the first time, or recorded
        self.flight: tuple[Outputs, Sequence[int]] | None = None  # a step, and counts before it

    def __call__(
        self, committed: Committed, tree: TokenTree | None, running: list[bool]
    ) -> tuple[Committed, list[list[int]]]:
        """One step of the rows that are running, unless it was launched; returns what it committed,
        and its tokens. tree: that of a drafter on the host. Raises CannotRecord.
        """
        if self.flight is None:
            self._launch(committed, tree, running)
        assert self.flight is not None
        (tokens_BC, features_BCD, count_B, told_BC), earlier = self.flight
        # one copy to the host, so one wait for the device
        tokens: list[list[int]] = told_BC.tolist()
        counts = [row.pop() for row in tokens]
        # the drafter has what was committed before this step
        for (cache, _), new in zip(self.slots, (counts, earlier), strict=False):
            cache.note(new)
        self.flight = None
        return Committed(tokens_BC, features_BCD, count_B, counts), tokens

    def launch_ahead(self, committed: Committed, running: list[bool]) -> None:
        """Start the step after this one, while the host tells the tokens. Only where it can be
        undone: replays that draft, of targets without recurrent states.
        """
        if self.recording and self.recording.leads and self.cache.states is None:
            self._launch(committed, None, running)

    def _launch(self, committed: Committed, tree: TokenTree | None, running: list[bool]) -> None:
        for cache, room in self.slots:
            _fix(cache, room, BUCKET if self.recordings.record else 1)
        before = self._padded(committed)
        drafts = self._padded_tree(tree) if tree else before
        step = partial(self.function, self)
        key = (*self.key, len(running), *(_places(cache) for cache, _ in self.slots))
        recording = self.recordings.known(key)
        self.is_new = recording is None
        if recording:
            recording.lend(self.accept)
        with ExitStack() as numbers:
            for draws in self.accept.all_draws():
                numbers.enter_context(draws.filled(self.width))
            recording = recording or self.recordings.next(
                key, step, before, drafts, self.width + 1, running, self.accept, self.drafter
            )
            if recording:
                outputs = recording(drafts, running)
            else:
                outputs = step(*drafts, torch.tensor(running, device=drafts[0].device))
        self.recording = recording
        self.flight = outputs, committed.counts

    def _padded(self, committed: Committed) -> tuple[Tensor, ...]:
        tokens_BC, features_BCD = committed.tokens_BC, committed.features_BCD
        if padding := self.width - tokens_BC.shape[1]:  # the first time
            tokens_BC = F.pad(tokens_BC, (0, padding))
            features_BCD = F.pad(features_BCD, (0, 0, 0, padding))
        return tokens_BC, features_BCD, committed.count_B

    def _padded_tree(self, tree: TokenTree) -> tuple[Tensor, ...]:
        """Its tokens and parents, padded to a power of two, as each size is compiled, or to that of
        a recording.
        """
        tokens_BN = tree.tokens_BN
        nodes = tokens_BN.shape[1]
        size = self.nodes
        if not self.recordings.record:
            size = min(1 << (nodes - 1).bit_length(), size)
        padding = size - nodes
        parents_BN = tree.topology.parents_BN.expand_as(tokens_BN)
        return F.pad(tokens_BN, (0, padding)), F.pad(parents_BN, (0, padding), value=-1)

    def end(self, committed: Committed) -> Committed:
        """Let the generation continue with other steps. Returns what was committed: a step that was
        launched ahead is undone.
        """
        if self.flight and self.recording and self.recording.leads:
            tokens_BC, features_BCD, count_B = self.recording.drafts
            committed = Committed(tokens_BC, features_BCD, count_B, committed.counts)
        self.flight = None
        for cache, _ in self.slots:
            cache.free()
        return committed


def advance(steps: FixedSteps, *inputs: Tensor) -> Outputs:
    """A step as it is."""
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
    tokens_BC, features_BCD = commit(tree, out, accepted, path_BC)
    told_BC = torch.cat([tokens_BC, new_B[:, None]], dim=1)
    return tokens_BC, features_BCD, new_B, told_BC


def _fix(cache: SlotCache, room: int, bucket: int) -> None:
    table = cache.table
    before = table.capacity if table.fixed_S is not None else 0
    cache.fix(room, bucket)
    torch._dynamo.maybe_mark_dynamic(table.slots_S, 0)
    if table.capacity != before:
        for layer in cache.layers:
            if layer.is_initialized:
                torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
                torch._dynamo.maybe_mark_dynamic(layer.values, 2)


def _places(cache: SlotCache) -> tuple[int, ...]:
    """Sizes and addresses of what a step uses, equal as long as all is where it is, whatever the
    text.
    """
    table = cache.table
    tensors = [table.lengths_B, table.rows_B1, table.slots_S]
    for layer in cache.layers:
        tensors += [layer.keys, layer.values] if layer.is_initialized else []
    if cache.states is not None:
        tensors += cache.states.tensors()
    return table.span, table.capacity, *(tensor.data_ptr() for tensor in tensors)


def _checked(guards: Sequence[Any]) -> list[bool]:
    """Which assumptions of the compiler to check before each step: shapes. Its objects are those of
    one engine, or of the same kind and sizes.
    """
    kinds = ("SHAPE_ENV", "TENSOR_MATCH")
    own = ("_parameters", "_buffers")
    return [g.guard_type in kinds and not any(part in g.name for part in own) for g in guards]
