"""Speculative sampling (Leviathan et al., arXiv 2211.17192): the drafter draws from its own
distribution q; a draft token x is kept with probability min(1, p(x) / q(x)), p the target's. Of
several draws after the same text, the next is tried where one was rejected: with what p has more
than q, and with q without that token, as it is drawn without replacement (arXiv 2402.14160; with
replacement: SpecInfer, arXiv 2305.09781).

Legend: B batch, N nodes, M nodes that have children, F nodes of a level, k children of each, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.tree import StaticTree, TokenTree, Tree
from draftheads.infer.accept import Accepted, Sampled, take

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class DrawnTree(TokenTree):
    """A full tree whose draft tokens were drawn from known distributions, those after the same node
    without replacement.
    """

    q_BMV: Tensor
    """float32 probabilities; the vocabulary may be shorter than the target's."""
    widths: Sequence[int]
    """Children of each node of a level."""


@dataclass(frozen=True)
class SpeculativeSampling(Sampled):
    """Sampling with temperature, top-k and top-p of both distributions; lossless. Trees that no one
    drew are followed as by `Sampled`.
    """

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """Keep drafts up to a node whose children are all rejected; the token after it is drawn
        from what p has more than q then, after a whole path from p.
        """
        if not isinstance(tree, DrawnTree):
            return super().__call__(logits_BNV, tree)
        p_BNV = self.probabilities(logits_BNV)
        rows_B = torch.arange(len(p_BNV), device=p_BNV.device)
        last_B = torch.zeros_like(rows_B)
        left_BV = p_BNV[:, 0]  # of the target, after the rejections so far
        starts = [0, *accumulate([1, *accumulate(tree.widths[:-1], mul)])]  # of levels
        levels = zip(starts, starts[1:], tree.widths, strict=False)
        for level, (start, end, width) in enumerate(levels):
            first_B = end + (last_B - start) * width
            q_BV = tree.q_BMV[rows_B, last_B]
            q_BV = F.pad(q_BV, (0, p_BNV.shape[2] - q_BV.shape[1]))
            is_tried_B = last_B >= start  # else an earlier level has rejected all
            for child in range(width):
                node_B = (first_B + child).clamp(min=0)  # of rows that are not tried
                drafts_B1 = tree.tokens_BN[rows_B, node_B][:, None]
                p_B1, q_B1 = left_BV.gather(1, drafts_B1), q_BV.gather(1, drafts_B1)
                is_tried_B = is_tried_B & (q_B1[:, 0] > 0)  # else q had no more tokens
                uniform_B = self.draws.next(level + 1, f"child {child}")[:, level].to(p_BNV.device)
                is_kept_B = is_tried_B & (uniform_B * q_B1[:, 0] < p_B1[:, 0])
                is_tried_B = is_tried_B & ~is_kept_B
                more_BV = (left_BV - q_BV).clamp(min=0)
                sum_B1 = more_BV.sum(1, keepdim=True)
                is_rejected_B1 = is_tried_B[:, None] & (sum_B1 > 0)  # else p is q
                left_BV = torch.where(is_rejected_B1, more_BV / sum_B1, left_BV)
                left_BV = torch.where(is_kept_B[:, None], p_BNV[rows_B, node_B], left_BV)
                last_B = torch.where(is_kept_B, node_B, last_B)
                q_BV = q_BV.scatter(1, drafts_B1, 0.0)
                q_BV = q_BV / q_BV.sum(1, keepdim=True).clamp(min=TINY)
        return take(tree, last_B, self.draws.draw(left_BV.log()))

    def constants(self) -> NoReturn:
        """None: compiled steps see the drafts alone, not the probabilities they were drawn with."""
        raise TypeError("it compares probabilities of drafts")

    def probabilities(self, logits: Tensor) -> Tensor:
        """float32 (..., V): the distribution that is sampled."""
        return torch.softmax(self.scores(logits), dim=-1)


def full_widths(tree: Tree) -> tuple[int, ...]:
    """Of a full expansion <k_1, k_2, ...>. Raises ValueError for other trees."""
    if isinstance(tree, StaticTree):
        sizes = [sum(len(path) == depth for path in tree.paths) for depth in range(tree.depth + 1)]
        sizes[0] = 1
        widths = tuple(now // before for before, now in pairwise(sizes))
        if all(widths) and {*StaticTree.from_widths(widths).paths} == {*tree.paths}:
            return widths
    raise ValueError(
        f"drawn drafts: expected as many children for each node of a level, got {tree}; use a tree "
        "like 1,1,1 or 3,1"
    )


class TreeSampler:
    """Draws a full tree level by level; the interface is that of `DynamicTreeBuilder`."""

    tokens_BF: Tensor
    parents_BF: Tensor

    def __init__(self, widths: Sequence[int], rule: SpeculativeSampling) -> None:
        self.widths = widths
        self.rule = rule
        self.generator: torch.Generator | None = None  # begun on its first device
        self.shape = StaticTree.from_widths(widths)
        self.start()

    def start(self) -> None:
        self.tokens: list[Tensor] = []  # (B, F) for each level
        self.q: list[Tensor] = []  # (B, F, V), of the levels before

    def add(self, logits_BFV: Tensor) -> bool:
        q_BFV = self.rule.probabilities(logits_BFV)
        width = self.widths[len(self.tokens)]
        if self.generator is None:
            self.generator = torch.Generator(q_BFV.device)
            self.generator.manual_seed(self.rule.draws.new_seed())
        # q / e with e ~ Exp(1) falls in the order in which tokens are drawn without replacement
        race_BFV = q_BFV / torch.empty_like(q_BFV).exponential_(generator=self.generator)
        children_BFk = race_BFV.topk(min(width, race_BFV.shape[2])).indices
        self.tokens_BF = F.pad(children_BFk, (0, width - children_BFk.shape[2])).flatten(1)
        nodes = torch.arange(q_BFV.shape[1], device=q_BFV.device).repeat_interleave(width)
        self.parents_BF = nodes.expand_as(self.tokens_BF)
        self.q.append(q_BFV)
        self.tokens.append(self.tokens_BF)
        return len(self.tokens) < len(self.widths)

    def tree(self, roots_B: Tensor) -> DrawnTree:
        tokens_BN = torch.cat([roots_B[:, None], *self.tokens], dim=1)
        topology = self.shape.topology(roots_B.device)
        return DrawnTree(tokens_BN, topology, torch.cat(self.q, dim=1), self.widths)
