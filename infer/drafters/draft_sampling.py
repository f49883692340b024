"""Speculative sampling (Leviathan et al., arXiv 2211.17192): the drafter draws a chain from its own
distribution q; a draft token x is kept with probability min(1, p(x) / q(x)), p the target's.

Legend: B batch, K draft tokens of a chain, N = K + 1 nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.tree import TokenTree, Topology
from draftheads.infer.accept import Accepted, Sampled, take


@dataclass(frozen=True)
class SampledChain(TokenTree):
    """A chain whose draft tokens were drawn from known distributions."""

    q_BKV: Tensor
    """float32 probabilities; the vocabulary may be shorter than the target's."""


@dataclass(frozen=True)
class SpeculativeSampling(Sampled):
    """Sampling with temperature, top-k and top-p of both distributions; lossless. Trees that no one
    drew are followed as by `Sampled`.
    """

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """Keep drafts up to the first rejection; the token after it is drawn from what p has more
        than q, after the whole chain from p.
        """
        if not isinstance(tree, SampledChain):
            return super().__call__(logits_BNV, tree)
        p_BNV = self.probabilities(logits_BNV)
        rest = p_BNV.shape[2] - tree.q_BKV.shape[2]
        q_BNV = F.pad(tree.q_BKV, (0, rest, 0, 1))
        drafts_BK1 = tree.tokens_BN[:, 1:, None]
        p_BK, q_BK = (x[:, :-1].gather(2, drafts_BK1)[..., 0] for x in (p_BNV, q_BNV))
        # a draw between two outcomes, as the rule's stream draws tokens
        odds_BK2 = torch.stack([p_BK, (q_BK - p_BK).clamp(min=0)], dim=2)
        kept_BK = self.draws.draw(odds_BK2.log()) == 0
        last_B = kept_BK.long().cumprod(1).sum(1)
        rows_B = torch.arange(len(last_B), device=last_B.device)
        p_BV = p_BNV[rows_B, last_B]
        more_BV = (p_BV - q_BNV[rows_B, last_B]).clamp(min=0)
        is_empty_B1 = more_BV.sum(1, keepdim=True) == 0  # p = q up to rounding
        bonus_B = self.draws.draw(torch.where(is_empty_B1, p_BV, more_BV).log())
        return take(tree, last_B, bonus_B)

    def constants(self) -> NoReturn:
        """None: compiled steps see the drafts alone, not the probabilities they were drawn with."""
        raise TypeError("it compares probabilities of drafts")

    def probabilities(self, logits: Tensor) -> Tensor:
        """float32 (..., V): the distribution that is sampled."""
        return torch.softmax(self.scores(logits), dim=-1)


class ChainSampler:
    """Draws a chain token by token; the interface is that of `DynamicTreeBuilder`."""

    tokens_BF: Tensor
    parents_BF: Tensor

    def __init__(self, depth: int, rule: SpeculativeSampling) -> None:
        self.depth = depth
        self.rule = rule
        self.start()

    def start(self) -> None:
        self.tokens: list[Tensor] = []  # (B, 1) for each level
        self.q: list[Tensor] = []  # (B, 1, V)

    def add(self, logits_B1V: Tensor) -> bool:
        q_B1V = self.rule.probabilities(logits_B1V)
        self.tokens_BF = self.rule.draws.draw(q_B1V.log())
        self.parents_BF = torch.zeros_like(self.tokens_BF)
        self.q.append(q_B1V)
        self.tokens.append(self.tokens_BF)
        return len(self.tokens) < self.depth

    def tree(self, roots_B: Tensor) -> SampledChain:
        tokens_BN = torch.cat([roots_B[:, None], *self.tokens], dim=1)
        parents_1N = torch.arange(-1, len(self.tokens), device=roots_B.device)[None]
        return SampledChain(tokens_BN, Topology(parents_1N, self.depth), torch.cat(self.q, dim=1))
