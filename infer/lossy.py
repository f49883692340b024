"""Acceptance rules that keep more than the target's own choices, and so change its output.

Legend: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftheads.heads.tree import TokenTree
from draftheads.infer.accept import Acceptance, Accepted, Sampled, check_temperature, kept, take


@dataclass(frozen=True)
class Typical(Acceptance):
    """Medusa's typical acceptance (lossy): keep x if p(x) > min(epsilon, delta * exp(-H(p))).

    p is the target's distribution at `temperature`. Keeps the longest accepted path, the likeliest
    of equals. The token after it is drawn from the typical tokens, which always include the argmax.
    Source: Medusa, arXiv 2401.10774, section 2.3.2.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    temperature: float = 0.7
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not (0 <= self.epsilon <= 1 and 0 <= self.delta < math.inf):
            raise ValueError(
                f"epsilon {self.epsilon}, delta {self.delta}: expected 0 to 1, and 0 or more"
            )

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """Keep the longest path of typical tokens."""
        logp_BNV, typical_BNV = self._typical(logits_BNV)
        at = _asked(tree)
        best_B = _longest(tree, typical_BNV[at], logp_BNV[at])
        last = (at[0][:, 0], best_B)
        bonus_B = self.draws.draw(logp_BNV[last].masked_fill(~typical_BNV[last], -torch.inf))
        return take(tree, best_B, bonus_B)

    def as_generate(self) -> dict[str, Any]:
        """Plain sampling at its temperature, which has no lossy rule."""
        return Sampled(self.temperature).as_generate()

    def choose(self, logits: Tensor) -> Tensor:
        """One draw from the typical tokens."""
        logp, typical = self._typical(logits)
        return self.draws.draw(logp.masked_fill(~typical, -torch.inf))

    def _typical(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        p = logp.exp()
        entropy = -(p * logp.nan_to_num(neginf=0.0)).sum(-1, keepdim=True)
        typical = p > (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        return logp, typical.scatter(-1, logits.argmax(-1, keepdim=True), True)


@dataclass(frozen=True)
class Lenient(Acceptance):
    """Keep a draft token that the target nearly chose (lossy), besides its own choice.

    top: it is among so many likeliest tokens, 0: any (blockwise parallel decoding, arXiv
    1811.03115). gap: its log-probability is at most so many nats below the likeliest one's
    (SpecDec, arXiv 2203.16487, with `top`; lenience l of arXiv 2211.17192 is a gap of -log l).
    surprise: it is at least -surprise nats (the rollback of BiLD, arXiv 2302.07863). The token
    after the longest path is the target's own choice. Raises ValueError for values that keep all.
    """

    top: int = 0
    gap: float = math.inf
    surprise: float = math.inf
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        is_limited = self.top >= 1 or min(self.gap, self.surprise) < math.inf
        if not is_limited or self.top < 0 or not min(self.gap, self.surprise) >= 0:
            raise ValueError(
                "lenient: expected top of 1 or more, or gap or surprise of 0 or more nats, got top "
                f"{self.top}, gap {self.gap}, surprise {self.surprise}; as in top=3,gap=1"
            )

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """Keep the longest path of such tokens."""
        logp_BNV = logits_BNV.float().log_softmax(-1)
        best_BN = logp_BNV.amax(-1)
        least_BN = torch.minimum((best_BN - self.gap).clamp(min=-self.surprise), best_BN)
        if self.top:
            least_BN = least_BN.maximum(
                logp_BNV.topk(min(self.top, logp_BNV.shape[-1])).values[..., -1]
            )
        at = _asked(tree)
        scores_BN = logp_BNV[at]
        is_near_BN = (scores_BN >= least_BN[at[:2]]) & (scores_BN > -torch.inf)  # else forbidden
        last_B = _longest(tree, is_near_BN, scores_BN)
        return take(tree, last_B, self.choose(logits_BNV[at[0][:, 0], last_B]))

    def choose(self, logits: Tensor) -> Tensor:
        """The argmax."""
        return logits.max(-1).indices

    def as_generate(self) -> dict[str, Any]:
        """Greedy search, which has no lossy rule."""
        return {"do_sample": False}


def _asked(tree: TokenTree) -> tuple[Tensor, Tensor, Tensor]:
    """Where each node's token stands in what the target says at its parent: (B, N) each."""
    rows = tree.tokens_BN.shape[0]
    rows_B1 = torch.arange(rows, device=tree.tokens_BN.device)[:, None]
    return rows_B1, tree.topology.parent_or_root_BN.expand(rows, -1), tree.tokens_BN


def _longest(tree: TokenTree, passed_BN: Tensor, scores_BN: Tensor) -> Tensor:
    """int64 (B,): the last node of the longest path whose nodes all passed, the likeliest of
    equals.
    """
    kept_BN = kept(tree, passed_BN)
    on_path_BNN = tree.topology.below_root_BNN
    path_scores_BN = scores_BN[:, None, :].masked_fill(~on_path_BNN, 0.0).sum(-1)
    longest_B1 = (kept_BN * tree.topology.depths_BN).amax(1, keepdim=True)
    candidates_BN = kept_BN & (tree.topology.depths_BN == longest_B1)
    return path_scores_BN.masked_fill(~candidates_BN, -torch.inf).argmax(1)
