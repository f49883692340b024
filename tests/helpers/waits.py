"""What would wait for a GPU: on the CPU nothing does, so operators are counted, those of which the
host must know a size or a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
WAITS = {ATEN.nonzero, ATEN._local_scalar_dense, ATEN.masked_select, ATEN.bincount}
WAITS |= {ATEN.unique_consecutive, ATEN._unique2, ATEN.unique_dim, ATEN.is_nonzero, ATEN.equal}
INDEXING = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}


class Operators(TorchDispatchMode):
    """Notes operators that would wait for a GPU, and the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        masks = args[1] if packet in INDEXING else ()
        by_mask = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if packet in WAITS or by_mask:
            self.waits.append(str(func))
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel())
        return result
