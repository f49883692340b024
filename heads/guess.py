"""How Medusa heads draft: one target state yields the whole tree.

Legend: B batch, N tree nodes, K heads, R ranks, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftheads.heads.base import Committed
from draftheads.heads.layers import refresh
from draftheads.heads.shape import TreeShape
from draftheads.heads.target import Target
from draftheads.heads.tree import TokenTree

if TYPE_CHECKING:
    from draftheads.heads.medusa import MedusaHead


class MedusaDrafter:
    """Fills a fixed tree from the heads' best guesses."""

    def __init__(self, head: MedusaHead, target: Target, shape: TreeShape) -> None:
        refresh(head)
        shape = TreeShape(tuple(sorted(shape.paths)))  # depth first: best guesses stand in a row
        self.head, self.target, self.shape = head, target, shape
        self.feature_layers = head.feature_layers
        self.topology = shape.topology(target.device)
        self.stack = head.stacked()
        places = [(len(path) - 1) * shape.width + path[-1] for path in shape.paths]
        self.places_N = torch.tensor(places, dtype=torch.long, device=target.device)

    def propose(self, committed: Committed) -> TokenTree:
        """The tree on each row's newest committed token."""
        guesses_BKR = self.guesses(committed.last_features_BD())
        drafts_BN = guesses_BKR.flatten(1)[:, self.places_N]
        tokens_BN = torch.cat([committed.last_tokens_B()[:, None], drafts_BN], dim=1)
        return TokenTree(tokens_BN, self.topology)

    def guesses(self, features_BD: Tensor) -> Tensor:
        """Target ids (B, depth, width): the best guesses at each depth of the tree, best first."""
        depth, width = self.shape.depth, self.shape.width
        hidden_KBD = self.head.hidden(self.head.cast(features_BD), depth, self.stack)
        logits_KBV = self.head.unembed(hidden_KBD, self.target, self.stack)
        best_BKR = logits_KBV.topk(width).indices.transpose(0, 1)
        token_map = self.head.token_map
        return best_BKR if token_map is None else token_map[best_BKR]
