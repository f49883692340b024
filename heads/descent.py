"""Drafting with heads that know the token before: the state is read once, then a tree grows level
by level, all nodes of a level in one small product.

Legend: B batch, F nodes that are expanded together, K heads, D hidden width, E width of a whole
path, r rank, X D or v, V vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftheads.heads.base import Committed
from draftheads.heads.growth import planner
from draftheads.heads.history import History
from draftheads.heads.layers import linear, refresh
from draftheads.heads.shape import Tree
from draftheads.heads.target import Target
from draftheads.heads.tree import TokenTree

if TYPE_CHECKING:
    from draftheads.heads.sequential import SequentialHead

KEPT_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""What all tokens become in the heads, and what ranks become in the logits, is kept for drafting
where each takes no more than this, by device (others: as for the CPU).
"""
TABLE_ROWS = 1 << 13
"""Tokens whose embeddings are made at a time."""


class Descent:
    """A drafter for one generation."""

    def __init__(self, head: SequentialHead, target: Target, tree: Tree) -> None:
        refresh(head)
        self.head, self.depth = head, tree.depth
        self.feature_layers = head.feature_layers
        self._history = History(head.prefix, target.device) if head.prefix else None
        self._levels = levels_of(head, target)
        self._new_growth = planner(tree, head.token_map, target.device)

    def propose(self, committed: Committed) -> TokenTree:
        """The tree on each row's newest committed token."""
        if self._history is None:
            inputs_BD = self.head.cast(committed.last_features_BD())
        else:
            inputs_BD = self._history.commit(committed)[:, 0]
        roots_B, growth, levels = committed.last_tokens_B(), self._new_growth(), self._levels
        levels.start(inputs_BD, roots_B, self.depth)
        while growth.add(levels.logits()):
            levels.descend(growth.tokens_BF, growth.parents_BF)
        return growth.tree(roots_B)


class Levels(Protocol):
    """What heads say, level by level."""

    def start(self, inputs_BD: Tensor, roots_B: Tensor, depth: int) -> None:
        """A new tree, `depth` deep, on these roots."""
        ...

    def logits(self) -> Tensor:
        """(B, F, v), float32: of the next token after each node of the newest level."""
        ...

    def descend(self, tokens_BF: Tensor, parents_BF: Tensor) -> None:
        """To the next level: its nodes, and the places of their parents in the one before."""
        ...


def levels_of(head: SequentialHead, target: Target) -> Levels:
    """The cheapest way to compute what this head says."""
    if head.conditioning == "hydra":
        return PathLevels(head, target)
    low_rank = head.products(target).thin_rv is not None
    return LowRankLevels(head, target) if low_rank else StateLevels(head, target)


class Products:
    """Products of a head's weights that drafting would otherwise make again in every step.

    tables_Vr: what every token becomes in each head. mixers_KDr: what the state becomes there; None
    for markov. thin_rv: what the ranks of each head become in its logits. Tables and thin matrices
    are None where they would be large or gain nothing; hydra has none of this.
    """

    def __init__(self, head: SequentialHead, target: Target) -> None:
        self.tables_Vr: list[Tensor] | None = None
        self.mixers_KDr: Tensor | None = None
        self.thin_rv: list[Tensor] | None = None
        depths, weights = range(head.depth), head.unembed_weights(target)
        downs = [linear(head.down, k).weight for k in depths]
        ups = [linear(head.up, k).weight for k in depths]
        rank = len(downs[0])
        size = head.depth * rank * downs[0].element_size()
        limit = KEPT_BYTES.get(target.device.type, KEPT_BYTES["cpu"])
        if size * head.vocab_size <= limit:
            parts = torch.split(torch.arange(head.vocab_size, device=target.device), TABLE_ROWS)
            self.tables_Vr = [torch.cat([head.codes(k, p, target) for p in parts]) for k in depths]
        if head.conditioning == "markov":
            self.thin_rv = [up.T.contiguous() for up in ups]
            return
        self.mixers_KDr = torch.stack([down[:, : head.hidden_size].T for down in downs])
        width, words = head.hidden_size, len(weights[0])
        pays = rank * words <= width * (rank + words)  # multiply-adds of a node
        if head.own_lm_head:  # then no less is read, but there are fewer kernels
            pays = pays and head.stacked() is not None
        if pays and size * words <= limit:
            pairs = zip(weights, ups, strict=True)
            self.thin_rv = [(weight.to(up.dtype) @ up).T.contiguous() for weight, up in pairs]


class StateLevels:
    """As training computes it: a level multiplies the states of its nodes by the last matrix."""

    def __init__(self, head: SequentialHead, target: Target) -> None:
        self.head, self.target, self.stack = head, target, head.stacked()
        self.products, self.weights_vD = head.products(target), head.unembed_weights(target)
        self.carries_rr = [carry.T for carry in head.carry.parameters()]
        self.carried_BFr: Tensor | None = None

    def start(self, inputs_BD: Tensor, roots_B: Tensor, depth: int) -> None:
        hidden_KBD = self.head.hidden(inputs_BD, depth, self.stack)
        self.given_B1X = self._given(hidden_KBD)[:, :, None].unbind()
        self.mixed_B1r: Sequence[Tensor] | None = None
        if self.products.mixers_KDr is not None:
            mixed_KBr = torch.bmm(hidden_KBD, self.products.mixers_KDr[:depth])
            self.mixed_B1r = mixed_KBr[:, :, None].unbind()
        self.tokens_BF, self.place, self.carried_BFr = roots_B[:, None], 0, None

    def logits(self) -> Tensor:
        states_BFD = self.given_B1X[self.place] + self.head.up[self.place](self._activated())
        weight_vD = self.weights_vD[self.place]
        return F.linear(states_BFD.to(weight_vD.dtype), weight_vD).float()

    def descend(self, tokens_BF: Tensor, parents_BF: Tensor) -> None:
        if self.carries_rr:
            carried_BFr = self.codes_BFr @ self.carries_rr[self.place]
            if carried_BFr.shape[1] > 1:  # else all nodes have the same parent
                index_BFr = parents_BF[:, :, None].expand(-1, -1, carried_BFr.shape[2])
                carried_BFr = carried_BFr.gather(1, index_BFr)
            self.carried_BFr = carried_BFr
        self.tokens_BF, self.place = tokens_BF, self.place + 1

    def _given(self, hidden_KBD: Tensor) -> Tensor:
        return hidden_KBD

    def _activated(self) -> Tensor:
        """(B, F, r): what `up` multiplies."""
        tables = self.products.tables_Vr
        if tables is None:
            codes_BFr = self.head.codes(self.place, self.tokens_BF, self.target)
        else:
            codes_BFr = F.embedding(self.tokens_BF, tables[self.place])
        if self.mixed_B1r is not None:
            codes_BFr = codes_BFr + self.mixed_B1r[self.place]
        if self.carried_BFr is not None:
            codes_BFr = codes_BFr + self.carried_BFr
        self.codes_BFr = F.silu(codes_BFr)
        return self.codes_BFr


class LowRankLevels(StateLevels):
    """The vocabulary-wide product is made once for all heads, of the state alone; a level adds what
    its tokens change, a product as thin as the rank.
    """

    def logits(self) -> Tensor:
        assert self.products.thin_rv is not None
        codes_BFr = self._activated()
        thin_Brv = self.products.thin_rv[self.place].expand(len(codes_BFr), -1, -1)
        return torch.baddbmm(self.given_B1X[self.place], codes_BFr, thin_Brv).float()

    def _given(self, hidden_KBD: Tensor) -> Tensor:
        logits_KBv = self.head.unembed(hidden_KBD, self.target, self.stack)
        return logits_KBv.to(hidden_KBD.dtype)


class PathLevels:
    """Hydra: the whole path to a node enters its head."""

    def __init__(self, head: SequentialHead, target: Target) -> None:
        self.head, self.target = head, target
        self.weights_vD = head.unembed_weights(target)

    def start(self, inputs_BD: Tensor, roots_B: Tensor, depth: int) -> None:
        root_B1D = self.head.embed(roots_B[:, None], self.target)
        self.paths_BFE = torch.cat([inputs_BD[:, None], root_B1D], dim=2)
        self.k = 1

    def logits(self) -> Tensor:
        head, place = self.head, self.k - 1
        states_BFD, weight_vD = head.blocks[place](self.paths_BFE), self.weights_vD[place]
        bias_v = head.biases[place] if head.own_lm_head else None
        return F.linear(states_BFD.to(weight_vD.dtype), weight_vD, bias_v).float()

    def descend(self, tokens_BF: Tensor, parents_BF: Tensor) -> None:
        index_BFE = parents_BF[:, :, None].expand(-1, -1, self.paths_BFE.shape[2])
        embedded_BFD = self.head.embed(tokens_BF, self.target)
        self.paths_BFE = torch.cat([self.paths_BFE.gather(1, index_BFE), embedded_BFD], dim=2)
        self.k += 1
