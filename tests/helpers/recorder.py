"""Stands in for CUDA graphs where there is no GPU: operators are noted in a first run, whose
effects are undone, and run again, in the same memory, at each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """The operators of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what was written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for tensor in tensors((args, kwargs)):
                self._save(tensor)
        out = func(*args, **kwargs)
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        self._made |= {t.untyped_storage().data_ptr() for t in tensors(out)} - known
        self.calls.append((func, args, kwargs, out))
        return out

    def _save(self, tensor: Tensor) -> None:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._made and place not in self._before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self._before[place] = whole, whole.clone()

    def undo(self) -> None:
        """Restore the tensors that were there before."""
        for tensor, value in self._before.values():
            tensor.copy_(value)

    def replay(self) -> None:
        """Run the operators again; what they return goes where it went before."""
        for func, args, kwargs, out in self.calls:
            given = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
            for mine, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if mine.untyped_storage().data_ptr() not in given:  # neither a view nor in place
                    mine.copy_(new)


def recorded(step: Callable[[], None]) -> Callable[[], None]:
    """What `draftheads.infer.fixed.recorded.cuda_graph` does, on a CPU."""
    with Tape() as tape:
        step()
    tape.undo()
    return tape.replay
