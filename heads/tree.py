"""Token trees: what a drafter proposes and the target verifies in one forward pass.

Legend: B batch, N tree nodes. Node 0 is the root (the last committed token, depth 0); parents
precede their children, so a path in node order is also in depth order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Topology:
    """Who is whose parent. parents_BN: int64 of shape (B, N), or (1, N) when all rows share it;
    parents[:, 0] = -1. height: no node is deeper, where that is known.
    """

    parents_BN: Tensor
    height: int | None = None

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """bool (B|1, N, N): [b, i, j] is True where j is i itself or an ancestor of i. The tree's
        attention mask.

        Computed by repeated squaring of the parent relation, log2(depth) small products, no loop
        over nodes.
        """
        nodes = self.parents_BN.shape[1]
        reach = torch.zeros(*self.parents_BN.shape, nodes, device=self.parents_BN.device)
        reach.scatter_(2, self.parents_BN.clamp(min=0)[..., None], 1.0)
        reach[:, 0] = 0.0
        reach += torch.eye(nodes, device=reach.device)
        steps = (self.height or max(nodes - 1, 1)).bit_length()
        for _ in range(steps):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0

    @cached_property
    def depths_BN(self) -> Tensor:
        """int64 (B|1, N): 0 for the root. A node's position is its row's length plus its depth."""
        return self.levels_BN - 1

    @cached_property
    def levels_BN(self) -> Tensor:
        """int64 (B|1, N): nodes on the path from the root to here, both included."""
        return self.ancestors_BNN.sum(-1)

    @cached_property
    def drafted_BNN(self) -> Tensor:
        """The ancestors without the root: the draft tokens on the way to each node."""
        return self.ancestors_BNN & (self.parents_BN >= 0)[:, None, :]

    @cached_property
    def asked_BN(self) -> Tensor:
        """int64 (B|1, N): the node whose prediction judges each node; 0 for the root."""
        return self.parents_BN.clamp(min=0)


@dataclass(frozen=True)
class TokenTree:
    """Draft tokens on a topology. tokens_BN: int64; tokens_BN[:, 0] are the last committed
    tokens.
    """

    tokens_BN: Tensor
    topology: Topology

    def parents(self) -> Tensor:
        """int64 (B|1, N)."""
        return self.topology.parents_BN

    def ancestors(self) -> Tensor:
        """bool (B|1, N, N), the attention mask among the nodes."""
        return self.topology.ancestors_BNN

    def depths(self) -> Tensor:
        """int64 (B|1, N)."""
        return self.topology.depths_BN
