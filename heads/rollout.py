"""Drafting with an autoregressive head: commit what the target wrote, then grow a tree level by
level.

Legend: B batch, Q positions that ask, F nodes that are expanded together, P nodes expanded so far,
D feature width, H hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.base import Committed
from draftheads.heads.decoder import Memory
from draftheads.heads.growth import planner
from draftheads.heads.history import History
from draftheads.heads.layers import refresh
from draftheads.heads.shape import Tree
from draftheads.heads.target import Target
from draftheads.heads.tree import TokenTree

if TYPE_CHECKING:
    from draftheads.heads.autoregressive import AutoregressiveHead


class Rollout:
    """A drafter for one generation: the head's own output takes the place of the features that the
    target has not made yet.
    """

    def __init__(self, head: AutoregressiveHead, target: Target, tree: Tree) -> None:
        refresh(head)
        self.head, self.target, self.tree = head, target, tree
        self.feature_layers = head.feature_layers
        self.layer_count, self.rope, self.window = head.layer_count, head.rope, head.window
        self.weight_vD = head.unembed_weight(target)
        self.dtype = next(head.parameters()).dtype
        self._history = History(self, target.device)
        self._new_growth = planner(tree, head.token_map, target.device)

    def propose(self, committed: Committed) -> TokenTree:
        """The tree on each row's newest committed token."""
        hidden_BFH = self._history.commit(committed)
        growth, level = self._new_growth(), Level(self._history.angles(self.tree.depth))
        while growth.add(self._logits(hidden_BFH)):
            index_BFH = growth.parents_BF[:, :, None].expand(-1, -1, hidden_BFH.shape[2])
            before = level.seen_BFP.shape[2]
            level.descend(growth.parents_BF)
            self._history.table.reserve(growth.parents_BF.shape[1], after=before)
            memories = self._history.look(level.seen_BFP, level.depths_1P)
            hidden_BFH = self._advance(
                growth.tokens_BF, hidden_BFH.gather(1, index_BFH), level.angles, memories
            )
        return growth.tree(committed.last_tokens_B())

    def read(
        self,
        tokens_BQ: Tensor,
        features_BQD: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: list[Memory],
    ) -> Tensor:
        """As a `Reader`: with the target's features."""
        hidden_BQH = self.head.fuse(features_BQD.to(self.dtype))
        return self._advance(tokens_BQ, hidden_BQH, angles, memories)

    def _advance(
        self,
        tokens_BQ: Tensor,
        hidden_BQH: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: list[Memory],
    ) -> Tensor:
        embedded_BQD = self.target.embed(tokens_BQ).to(self.dtype)
        return self.head.advance(embedded_BQD, hidden_BQH, angles, memories)

    def _logits(self, hidden_BFH: Tensor) -> Tensor:
        states_BFD = self.head.states(hidden_BFH).to(self.weight_vD.dtype)
        return F.linear(states_BFD, self.weight_vD).float()


class Level:
    """The newest level of a growing tree: which of the P nodes expanded so far its F nodes see, how
    far each of the P stands behind the newest committed pair, and the angles of the F.
    """

    def __init__(self, angles_of_levels: tuple[Tensor, Tensor]) -> None:
        self.angles_of_levels, self.number = angles_of_levels, -1
        device = angles_of_levels[0].device
        self.depths_1P = torch.zeros(1, 0, dtype=torch.long, device=device)
        self.seen_BFP = torch.zeros(1, 1, 0, dtype=torch.bool, device=device)

    def descend(self, parents_BF: Tensor) -> None:
        """To the next level: a node sees what its parent saw, and itself."""
        self.number += 1
        rows, nodes = parents_BF.shape
        seen_BFP = self.seen_BFP.expand(rows, -1, -1)
        index_BFP = parents_BF[:, :, None].expand(-1, -1, seen_BFP.shape[2])
        own_FF = torch.eye(nodes, dtype=torch.bool, device=parents_BF.device)
        own_BFF = own_FF.expand(rows, -1, -1)
        self.seen_BFP = torch.cat([seen_BFP.gather(1, index_BFP), own_BFF], dim=2)
        self.depths_1P = F.pad(self.depths_1P, (0, nodes), value=self.number)
        cos, sin = (each[:, :, self.number : self.number + 1] for each in self.angles_of_levels)
        self.angles = cos, sin
