"""Conversations whose turns begin alike, and rows that hold what they share once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tiny_targets import VOCABULARY

from draftheads.train.batches import Documents, Rows
from draftheads.train.data.answers import Answer


def conversation(
    turns: int, seed: int, question: int = 4, answer: int = 5, opening: Sequence[int] = ()
) -> list[Answer]:
    """What a template that drops reasoning from earlier turns makes of a chat: each document has
    the history without it, and ends with an answer that has it. opening: a system prompt.
    """
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    history: list[int] = [*opening]
    documents = []
    for turn in range(turns):
        history += some(question)
        thought, text = some(2), some(answer)
        tokens = [*history, *thought, *text]
        documents.append(Answer(tokens, [(len(history), len(tokens))], turn > 0))
        history += text
    return documents


def rows_of(documents: Documents, length: int, branches: bool = True) -> Rows:
    return Rows(documents, documents.spans, length, pack=True, seed=0, share_prefixes=branches)
