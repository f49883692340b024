"""How far a head is from what is possible with it: tokens per step if one thing were better.

Legend: T tokens of a text that the target wrote, M those with K tokens after them, K draft depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftheads.heads.tree import StaticTree, Tree

SPANS = 256, 1024, 4096, 16384, 65536
"""Tokens of context up to which steps are counted together."""
FEWEST = 32
"""Fewest steps whose mean is shown."""


@dataclass(frozen=True)
class Bounds:
    """Tokens per step on texts of the target, always with the fixed tree that is best for these
    very texts.

    tree: as the head is. vocabulary: if every token outside the draft vocabulary were drafted
    first. depths: if every draft token were right as often as one that knows the token before it.
    oracle: if every draft token were right, with the head's own tree.
    """

    nodes: int
    tokens: int
    tree: float
    vocabulary: float
    depths: float
    oracle: float


def bounds(tree: Tree, texts: Sequence[Tensor], unknown: Sequence[Tensor]) -> Bounds:
    """The bounds of a head with this tree.

    texts: ranks_TK of each text; row i belongs to the draft whose root is token i. unknown:
    bool (T, K), which of these tokens are outside the draft vocabulary. At least one text has more
    than K tokens; the others are left out.
    """
    depth = texts[0].shape[1]
    counts = [max(0, len(ranks_TK) - depth) for ranks_TK in texts]  # the rest ends within a draft
    nodes = tree.draft_nodes

    def best(parts: Sequence[Tensor]) -> float:
        ranks_MK = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return StaticTree(()).fitted(ranks_MK, nodes).expected_tokens(ranks_MK)

    known = [
        ranks_TK.masked_fill(unknown_TK, 0)
        for ranks_TK, unknown_TK in zip(texts, unknown, strict=True)
    ]
    # what depth k drafts after root i, depth 1 drafts after root i + k - 1
    first = [
        torch.stack([ranks_TK[:, 0].roll(-k) for k in range(depth)], dim=1) for ranks_TK in texts
    ]
    return Bounds(nodes, sum(counts), best(texts), best(known), best(first), tree.depth + 1.0)


def by_context(contexts: Sequence[int], accepted: Sequence[int]) -> dict[int, float]:
    """Tokens per step of the steps whose texts had at most so many tokens, and more than the number
    before in SPANS; not of few steps.
    """
    found = {}
    least = 0
    for most in SPANS:
        tokens = [
            count + 1
            for context, count in zip(contexts, accepted, strict=True)
            if least < context <= most
        ]
        if len(tokens) >= FEWEST:
            found[most] = sum(tokens) / len(tokens)
        least = most
    return found
