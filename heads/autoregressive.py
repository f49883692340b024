"""What EAGLE-1 and EAGLE-3 have in common: a head that feeds on its own output, token by token.

Legend: B batch, Q positions, D feature width of the target, H hidden width of the head, v draft
vocabulary.

A position of such a head is a pair (token i, feature i), by the alignment law: what the target
wrote, and the state that it wrote it from. The pair predicts token i + 1, and the head's own output
takes the place of feature i + 1 where the target has not been yet. The first token of a document
has no feature and makes no pair.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.base import Batch, Drafter, DraftHead
from draftheads.heads.decoder import Memory, Rope
from draftheads.heads.losses import chunked_ranks
from draftheads.heads.rollout import Rollout
from draftheads.heads.shape import DynamicTree, Tree, TreeShape
from draftheads.heads.target import Target
from draftheads.heads.unroll import unroll
from draftheads.heads.vocabulary import draft_index


class AutoregressiveHead(DraftHead):
    """What unrolling (`heads.unroll`) and drafting (`heads.rollout`) need of a head, and what every
    head that has it can do.
    """

    layer_count: int
    """Decoder layers, each with a memory of its own."""
    rope: Rope
    window: int | None
    """How many positions a draft layer sees, itself included; None: all."""
    noise: float
    """Of the features in training, as EAGLE counts it."""

    @property
    def depth(self) -> int:
        """As deep as the tree goes."""
        return self.tree.depth

    @property
    @abstractmethod
    def token_map(self) -> Tensor | None:
        """int64 (v,): target ids of the draft vocabulary, rising; None: all."""

    @abstractmethod
    def fuse(self, features_BQD: Tensor) -> Tensor:
        """The hidden states (B, Q, H) that stand for the target's features."""

    @abstractmethod
    def advance(
        self,
        embedded_BQD: Tensor,
        hidden_BQH: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: Sequence[Memory],
    ) -> Tensor:
        """One step: from embedded tokens and hidden states to the next hidden states."""

    @abstractmethod
    def states(self, hidden_BQH: Tensor) -> Tensor:
        """What the last matrix multiplies (B, Q, D), of hidden states that `advance` returned."""

    @abstractmethod
    def unembed_weight(self, target: Target) -> Tensor:
        """The last matrix, (v, D)."""

    def check_tree(self, tree: Tree) -> None:
        """Refuse fixed trees wider than the draft vocabulary; any depth will do."""
        if isinstance(tree, TreeShape):
            tree.check_width(self.vocab_size if self.token_map is None else len(self.token_map))

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A drafter that fills `tree` (default: the head's own)."""
        return Rollout(self, target, tree or self.tree)

    @torch.no_grad()
    def observe(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        """ranks_MK down to the depth of the tree, along the text that the target wrote."""
        width = len(self.feature_layers) * target.hidden_size
        features_BTD = features_BTD[..., :width].to(next(self.parameters()).dtype)
        unrolled = unroll(self, batch, self.fuse(features_BTD), target, self.depth)
        labels_R = batch.tokens_BT.flatten()[unrolled.places_R]
        ranks_R = chunked_ranks(
            self.states(unrolled.hidden_RH),
            self.unembed_weight(target),
            draft_index(labels_R, self.token_map),
        )
        return unrolled.observed(ranks_R, self.depth, batch)

    def noisy(self, features_BTD: Tensor) -> Tensor:
        """In training, features with EAGLE's uniform noise: (u - 0.5) noise 512 / T."""
        if not self.training or not self.noise:
            return features_BTD
        width = self.noise * 512 / features_BTD.shape[1]
        return features_BTD + (torch.rand_like(features_BTD) - 0.5) * width


def chosen_tree(choices: dict[str, Any]) -> DynamicTree:
    """The dynamic tree that a recipe asks for by nodes, depth and top_k."""
    names = {"nodes": "draft_nodes", "depth": "depth", "top_k": "top_k"}
    return DynamicTree(**{names[key]: value for key, value in choices.items() if key in names})
