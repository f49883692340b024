"""LongRoPE: RoPE factors that change with the length of a text.

Legend: B batch, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from draftheads.heads.cache import SlotCache
from draftheads.heads.hybrid.states import KNOWN, cache_argument, is_mixer
from draftheads.heads.target.pretrained import ADVICE, describe


class LongRope:
    """RoPE factors of targets (Phi-3 to Phi-4-mini) that change when a text exceeds a limit.

    transformers chooses the factors of a whole forward pass by its greatest position. Our passes
    may mix rows, chunks and tree nodes on both sides of the limit, so the choice is per token.

    limit: longer texts have long factors; 0 for models without LongRoPE. crossing: the limit, if
    `generate` then computes the text again; 0 if it keeps what it computed with short factors.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None)
        parameters = parameters or {}  # of the model, or for each layer type
        self.limit = 0
        for each in (parameters, *parameters.values()):
            if isinstance(each, dict) and each.get("rope_type") == "longrope":
                self.limit = each["original_max_position_embeddings"]
        self._ropes = [
            module
            for module in model.modules()
            if "longrope" in str(getattr(module, "rope_type", ""))
        ]
        if bool(self._ropes) != bool(self.limit):  # names of transformers that may change
            raise ValueError(
                f"{type(model).__name__}: expected LongRoPE in its config and in its modules, got "
                f"the limit {self.limit} and {len(self._ropes)} modules; use {KNOWN}"
            )
        if self.limit and any(map(is_mixer, model.modules())):
            raise ValueError(
                f"{describe(model)} has recurrent layers and RoPE that depends on the length of a "
                f"text, so that their states would be computed again; {ADVICE}"
            )
        self.crossing = self.limit if self.limit and _drops_its_cache(model, self.limit) else 0

    def step_end(self, length: int, tokens: int) -> int:
        """Returns how many of these new tokens a text of `length` tokens takes in one step, which
        ends where the text is computed again.
        """
        if length > self.crossing:
            return tokens
        return min(tokens, self.crossing + 1 - length)

    def recompute(self, target: Any, texts: Mapping[int, Sequence[int]], cache: SlotCache) -> None:
        """Compute rows of `cache` again where `generate` does: when a text has just crossed the
        limit. target: a `Target`, whose module imports this one. texts: row -> its tokens, the
        newest (not yet in `cache`) included.
        """
        for row, text in texts.items():
            if len(text) - 1 == self.crossing:
                alone = target.new_cache(1, len(text))
                target.prefill([text], alone, ())
                alone.rewind(len(text) - 1)
                cache.join(alone, [row])

    @contextmanager
    def factors(self, lengths_BT: Tensor) -> Iterator[None]:
        """A context in which each token has the factors of a text of the given length."""
        limit = self.limit

        def choose(rope: nn.Module, args: Any, kwargs: Any, output: Any) -> tuple[Tensor, ...]:
            arguments = inspect.signature(rope.forward).bind(*args, **kwargs).arguments
            positions_BT = arguments.pop("position_ids")
            beyond_B1 = torch.full_like(positions_BT[:, :1], limit)
            short = rope.forward(position_ids=positions_BT.clamp(max=limit - 1), **arguments)
            long = rope.forward(position_ids=torch.cat([positions_BT, beyond_B1], 1), **arguments)
            is_long_BT1 = (lengths_BT > limit).to(positions_BT.device)[:, :, None]
            pairs = zip(long, short, strict=True)
            return tuple(torch.where(is_long_BT1, a[:, :-1], b) for a, b in pairs)

        with ExitStack() as hooks:
            for rope in self._ropes:
                handle = rope.register_forward_hook(choose, with_kwargs=True)
                hooks.callback(handle.remove)
            yield


def document_lengths(positions_BT: Tensor) -> Tensor:
    """int64 (B, T): the length of the document of each token in packed rows."""
    numbers_BT = (positions_BT == 0).cumsum(1)
    by_document = F.pad(torch.zeros_like(positions_BT), (0, 1))  # at most T documents
    by_document.scatter_reduce_(1, numbers_BT, positions_BT + 1, "amax")
    return by_document.gather(1, numbers_BT)


def _drops_its_cache(model: PreTrainedModel, limit: int) -> bool:
    """True if `generate` computes a text again when it grows beyond the limit."""
    name = cache_argument(GenerationMixin, "prepare_inputs_for_generation")
    cache = SlotCache(1, 1, 1, "cpu")
    is_kept = []
    for length in (limit, limit + 1):
        cache.table.set_lengths([length - 1])
        prepared = model.prepare_inputs_for_generation(
            torch.zeros(1, length, dtype=torch.long), next_sequence_length=1, **{name: cache}
        )
        is_kept.append(any(value is cache for value in prepared.values()))
    if not is_kept[0]:
        raise ValueError(
            f"{type(model).__name__}: expected prepare_inputs_for_generation to hand on the cache "
            f"of a text of {limit} tokens as {name}, got {', '.join(prepared)}; use {KNOWN}"
        )
    return not is_kept[1]
