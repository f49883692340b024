"""LongRoPE targets (Phi-3 to Phi-4-mini): texts beyond a limit have RoPE factors of their own.

transformers chooses the factors of a whole forward by its greatest position. A forward of ours may
hold rows, chunks and tree nodes on both sides of the limit, so here each token has a choice.

Legend: B batch, T tokens, D documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftheads.heads.cache import SlotCache


class LongRope:
    """limit: texts of more tokens have long factors; None where the model knows no such limit.
    crossing: the same where `generate` computes a text anew when it grows over the limit; None
    where it keeps what it has computed with short factors.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
        parameters = parameters or {}  # of the model, or of each type of layer
        limits = [
            each["original_max_position_embeddings"]
            for each in (parameters, *parameters.values())
            if isinstance(each, dict) and each.get("rope_type") == "longrope"
        ]
        self.limit: int | None = limits[0] if limits else None
        self.crossing = self.limit if limits and _drops_its_cache(model, limits[0]) else None
        self._ropes = [
            module
            for module in model.modules()
            if limits and "longrope" in str(getattr(module, "rope_type", ""))
        ]

    def factors(self, texts_B1: Tensor, more_BT: Tensor | int = 0) -> AbstractContextManager[None]:
        """Inside, each token gets the factors of a text of so many tokens and so many more."""
        return self._chosen(texts_B1 + more_BT) if self._ropes else nullcontext()

    @contextmanager
    def _chosen(self, texts_BT: Tensor) -> Iterator[None]:
        limit = self.limit or 0

        def choose(rope: nn.Module, args: Any, kwargs: Any, output: Any) -> tuple[Tensor, ...]:
            given = inspect.signature(rope.forward).bind(*args, **kwargs).arguments
            positions_BT = given.pop("position_ids")
            beyond_B1 = torch.full_like(positions_BT[:, :1], limit)
            short = rope.forward(position_ids=positions_BT.clamp(max=limit - 1), **given)
            long = rope.forward(position_ids=torch.cat([positions_BT, beyond_B1], 1), **given)
            is_long_BT1 = (texts_BT > limit).to(positions_BT.device)[:, :, None]
            pairs = zip(long, short, strict=True)
            return tuple(torch.where(is_long_BT1, a[:, :-1], b) for a, b in pairs)

        with ExitStack() as hooks:
            for rope in self._ropes:
                handle = rope.register_forward_hook(choose, with_kwargs=True)
                hooks.callback(handle.remove)
            yield


def document_lengths(positions_BT: Tensor) -> Tensor:
    """int64 (B, T): of each token of packed rows, how many tokens its document has."""
    numbers_BT = (positions_BT == 0).cumsum(1)
    lengths_BD = F.pad(torch.zeros_like(positions_BT), (0, 1))  # no row has more documents
    lengths_BD.scatter_reduce_(1, numbers_BT, positions_BT + 1, "amax")
    return lengths_BD.gather(1, numbers_BT)


def _drops_its_cache(model: PreTrainedModel, limit: int) -> bool:
    """Whether `generate` does, when a text grows beyond the limit."""
    cache = SlotCache(1, 1, 1, "cpu")
    cache.table.set_lengths([limit])
    prepared = model.prepare_inputs_for_generation(
        torch.zeros(1, limit + 1, dtype=torch.long), past_key_values=cache, next_sequence_length=1
    )
    return prepared.get("past_key_values") is None
