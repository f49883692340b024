"""Keys and values of a text, which outlive a generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftheads.heads.cache import SlotCache
from draftheads.heads.drafting import Drafter

CacheKey = tuple[object, torch.device, torch.dtype]
"""What caches and compiled steps are for: an engine, and the device and dtype of its target."""


@dataclass(frozen=True)
class Caches:
    """The caches of one generation. text: the growing list of its only row's tokens."""

    key: CacheKey
    generation: int  # its number in the session
    text: list[int]
    cache: SlotCache
    drafter: Drafter


class Session:
    """Keys and values of a text, the target's and the drafter's, which outlive a generation: the
    next one computes only what differs from it.

    reused: tokens of the newest prompt that were not computed again. length: tokens that both have,
    and may be cut back to. generations: how many have begun with it; the newest one alone may go
    on. Another engine starts anew. An interrupted generation leaves what its complete steps
    computed.
    """

    def __init__(self) -> None:
        self.reused = self.length = self.generations = 0
        self.caches: Caches | None = None

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt need not be computed again. One is left to be computed."""
        text = self.caches.text[: self.length] if self.caches is not None else []
        count = 0
        for old, new in zip(text, prompt[:-1], strict=False):
            if old != new:
                break
            count += 1
        return count

    def begin(self, key: CacheKey, text: list[int]) -> Caches | None:
        """Begin a generation. Returns the caches of the session's text, cut back to what it shares
        with this one; None if that is nothing.
        """
        caches = self.caches
        self.generations += 1
        self.reused = self.shared(text) if caches is not None and caches.key == key else 0
        self.length = self.reused
        if caches is None or not self.reused:
            return None
        # one less: the state at the last shared token predicts the first new one
        self.reused = self.length = caches.cache.rewind(self.reused - 1) + 1
        caches.drafter.rewind(self.reused)
        return replace(caches, generation=self.generations, text=text)
