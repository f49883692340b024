"""The prompts that commands decode: of a conversation its first turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, islice, zip_longest

from draftheads.infer.prompt import TextSource, encode_prompt
from draftheads.train.data.conversation import turns_of
from draftheads.train.data.prompts import Prompt, read_prompts

CATEGORISED = 10_000
"""Prompts that are read, at most, to take some of every category."""


def openings(source: str, limit: int | None) -> list[Prompt]:
    """The prompts in `source`. If they have categories, the first CATEGORISED are read, and `limit`
    are taken in turns from each.
    """
    prompts = read_prompts(source, limit=limit)
    if limit and any(prompt.category for prompt in prompts):
        by_category: dict[str | None, list[Prompt]] = defaultdict(list)
        for prompt in read_prompts(source, limit=CATEGORISED):
            by_category[prompt.category].append(prompt)
        turns = chain.from_iterable(zip_longest(*by_category.values()))
        return list(islice(filter(None, turns), limit))
    return prompts


def token_ids(target: TextSource, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of prompts; conversations end with their first user turn."""
    return [
        encode_prompt(target, turns_of(prompt)[0] if prompt.text is None else prompt.text)
        for prompt in prompts
    ]


def opening_ids(target: TextSource, source: str, limit: int | None) -> list[list[int]]:
    """Token ids of the prompts in `source`, as of `openings`."""
    return token_ids(target, openings(source, limit))
