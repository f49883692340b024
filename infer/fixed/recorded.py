"""Steps that are replays of CUDA graphs: the host starts one, and copies the new tokens back.

What a step was recorded with stays where it is: the committed tokens and features, which it
replaces, and the random numbers, which are drawn before. Nothing else that a graph made is read
after its replay, so all graphs share one pool of memory.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from draftheads.infer.accept import Acceptance

BUCKET = 256
"""Steps that are recorded see a multiple of so many slots, and of more in a longer text."""
MOST = 8
"""Recordings that are kept for a text or a batch."""

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of a step: its tokens (B, C), their features (B, C, D), their number (B,), and the first and the
last in one tensor (B, C + 1), for the host."""
Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a step and records it without running it; returns the replay."""


def cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """A `Recorder` for CUDA."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        step()
    return graph.replay


@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


RECORDERS: dict[str, Recorder] = {"cuda": cuda_graph}
"""Type of a device -> how its steps are recorded."""


def recorder(device: torch.device) -> Recorder | None:
    """The recorder of steps there; None if they are not, or DRAFTHEADS_GRAPHS=0 forbids it."""
    if os.environ.get("DRAFTHEADS_GRAPHS") == "0":
        return None
    return RECORDERS.get(device.type)


class CannotRecord(RuntimeError):
    """Nothing of the step was run."""


class Recording:
    """One step in the same memory each time.

    committed: tokens, features and numbers before it. drafts: what it reads: a tree of the host, or
    the same `committed`. told: columns of what it tells the host. running: the rows. keeps: an
    object whose tensors it uses, as it uses the rule's.
    """

    def __init__(
        self,
        record: Recorder,
        step: Callable[..., Outputs],
        committed: Sequence[Tensor],
        drafts: Sequence[Tensor],
        told: int,
        running: list[bool],
        accept: Acceptance,
        keeps: Any,
    ) -> None:
        self.leads = drafts is committed
        self.committed = [tensor.clone() for tensor in committed]
        self.drafts = [tensor.clone() for tensor in drafts]
        self.told_BC = self.committed[2].new_zeros(len(running), told)
        self.running = running
        self.running_B = torch.tensor(running, device=self.told_BC.device)
        self.numbers = [draws.numbers for draws in accept.all_draws()]
        self.keeps = accept, keeps
        try:
            self.replay = record(lambda: self._run(step))
        except RuntimeError as error:
            raise CannotRecord(str(error)) from error

    def _run(self, step: Callable[..., Outputs]) -> None:
        if self.leads:
            _copy(self.committed, self.drafts)
        _copy(step(*self.drafts, self.running_B), (*self.committed, self.told_BC))

    def lend(self, accept: Acceptance) -> None:
        """Let the next numbers be made where this step reads them."""
        for draws, mine in zip(accept.all_draws(), self.numbers, strict=True):
            draws.numbers = mine

    def __call__(self, drafts: Sequence[Tensor], running: list[bool]) -> Outputs:
        """One step; the next one overwrites what it returns. What was committed before it is in
        `drafts` if it leads on.
        """
        _copy(drafts, self.committed if self.leads else self.drafts)
        if running != self.running:
            self.running_B.copy_(torch.tensor(running))
            self.running = running
        self.replay()
        tokens_BC, features_BCD, count_B = self.committed
        return tokens_BC, features_BCD, count_B, self.told_BC


class Recordings:
    """Those of steps in the same caches; the least recently used go first. record: None if steps
    are not recorded.
    """

    def __init__(self, record: Recorder | None) -> None:
        self.record = record
        self.made: OrderedDict[Hashable, Recording | None] = OrderedDict()

    def known(self, key: Hashable) -> Recording | None:
        """The recording of such a step, if there is one."""
        if key in self.made:
            self.made.move_to_end(key)
        return self.made.get(key)

    def next(self, key: Hashable, *step: Any) -> Recording | None:
        """Record such a step, if one has run: the first may allocate what others find."""
        if self.record is None:
            return None
        self.made[key] = Recording(self.record, *step) if key in self.made else None
        if len(self.made) > MOST:
            self.made.popitem(last=False)
        return self.made[key]


def _copy(new: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    for mine, other in zip(into, new, strict=True):
        if mine is not other:
            mine.copy_(other)
