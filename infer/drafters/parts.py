"""Replaces parts of a drafter source: its head, or the memory of its n-grams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from draftheads.heads.base import DraftHead
from draftheads.infer.drafters.merged import Merged
from draftheads.infer.drafters.ngram import NGram, NGramIndex
from draftheads.infer.sources import DrafterSource


def head_of(source: DrafterSource | None) -> DraftHead:
    """The only head among the parts of a source. Raises ValueError unless there is exactly one."""
    parts = source.parts if isinstance(source, Merged) else [source]
    heads = [part for part in parts if isinstance(part, DraftHead)]
    if len(heads) != 1:
        raise ValueError(
            f"--learn: expected one draft head to train, got {len(heads)}; pass one with --head, "
            "alone or as in HEAD+ngram"
        )
    return heads[0]


def replace_head(source: DrafterSource, head: DraftHead) -> DrafterSource:
    """The same source with this head instead of its own. Raises as `head_of`."""
    old = head_of(source)
    return _changed(source, lambda part: head if part is old else part)


def with_memory(source: DrafterSource, memory: NGramIndex) -> DrafterSource:
    """The same source, in which n-grams without a memory use this one."""

    def change(part: DrafterSource) -> DrafterSource:
        if isinstance(part, NGram) and part.memory is None:
            return replace(part, memory=memory)
        return part

    return _changed(source, change)


def _changed(
    source: DrafterSource, change: Callable[[DrafterSource], DrafterSource]
) -> DrafterSource:
    if isinstance(source, Merged):
        return Merged([change(part) for part in source.parts])
    return change(source)
