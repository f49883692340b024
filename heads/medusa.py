"""Medusa heads: K small feed-forward heads, each guessing one position ahead from the same target
state.

Legend: B batch, T tokens, M learned positions, K heads, D hidden width, V vocabulary. Source:
Medusa, arXiv 2401.10774; head form p_k = softmax(W2_k (SiLU(W1_k h + b_k) + h)), loss sum_k decay^k
CE_k.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.base import RANKS, Committed, Drafter, DraftHead, HeadLoss
from draftheads.heads.batch import Batch
from draftheads.heads.formats.config import needed
from draftheads.heads.formats.stored import count_of, integers, matrix
from draftheads.heads.layers import Cached, ResidualBlock, StackedHeads, refresh
from draftheads.heads.losses import (
    LowRank,
    Teacher,
    chunked_ranks,
    linear_cross_entropy,
    rank_counts,
)
from draftheads.heads.target import Target
from draftheads.heads.tree import StaticTree, TokenTree, Tree
from draftheads.heads.vocabulary import check_distinct, draft_index, token_map

STACK_BYTES = 1 << 26
"""Heads up to this size (64 MiB) are copied into one stack for drafting: with small matrices the
number of kernels is what drafting costs.
"""
DEFAULT_NODES = 16
"""Draft nodes of the tree that untrained heads get; training replaces it by a measured one."""


class MedusaHead(DraftHead):
    """K heads of L residual blocks each; head k reads features[i] and guesses tokens[i + k].

    hidden_size, vocab_size: of the target. depth: K. layers: L. token_map: int64 (v,) target ids of
    a reduced vocabulary, or None. own_lm_head: every head has its own (v, D) matrix, else all use
    the target's, frozen. labels: "hard" (the token that came) or "soft" (the target's
    distribution). decay: weight of depth k is decay^k.
    """

    kind = "medusa"
    architecture = "MedusaModel"
    token_map: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        depth: int,
        layers: int,
        *,
        own_lm_head: bool = True,
        token_map: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size, self.layers = hidden_size, vocab_size, layers
        self.own_lm_head = own_lm_head
        self.labels, self.decay = "hard", 0.8
        self._stack: Cached[StackedHeads] = Cached()
        self._rows: Cached[Tensor] = Cached()
        self.tree = default_tree(depth, DEFAULT_NODES)
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size, layers) for _ in range(depth))
        if token_map is not None and not token_map.is_meta:
            check_distinct(token_map)
        self.register_buffer("token_map", token_map)
        rows = vocab_size if token_map is None else len(token_map)
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, rows, bias=False) for _ in range(depth if own_lm_head else 0)
        )

    @classmethod
    def create(cls, target: Target, **choices: Any) -> MedusaHead:
        """New heads for `target`, computing exactly the target's own logits until they are trained.

        choices: depth (default 4), layers (1), lm_head "own" | "shared", labels "hard" | "soft",
        decay, vocabulary (target ids of a reduced vocabulary, most frequent first; default all).
        """
        head = cls(
            target.hidden_size,
            target.vocab_size,
            choices.get("depth", 4),
            choices.get("layers", 1),
            own_lm_head=choices.get("lm_head", "own") == "own",
            token_map=token_map(choices.get("vocabulary"), target.vocab_size),
            **cls.design(target, choices),
        )
        head.labels, head.decay = choices.get("labels", "hard"), choices.get("decay", 0.8)
        if not head.own_lm_head:  # raise here, with the reason, rather than in the first step
            target.unembed_weight()
        if head.labels == "soft":
            target.unembed(torch.zeros(1, target.hidden_size).to(target.device, target.dtype))
        weight_VD = target.model.get_output_embeddings().weight.detach().float().cpu()
        ids = head.token_map
        for parameter in head.lm_heads.parameters():
            parameter.data.copy_(weight_VD if ids is None else weight_VD[ids])
        return head

    @classmethod
    def design(cls, target: Target, choices: dict[str, Any]) -> dict[str, Any]:
        """What the constructor of a further kind wants to know besides."""
        return {}

    @property
    def depth(self) -> int:
        """As many heads as there are."""
        return len(self.blocks)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The last hidden state, after the final norm."""
        return (-1,)

    @property
    def needs_unembed(self) -> bool:
        """For soft labels, and where the last matrix is shared."""
        return self.labels == "soft" or not self.own_lm_head

    def config(self) -> dict[str, Any]:
        """config.json in vLLM's words (its MedusaConfig)."""
        return {
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.depth,
            "num_hidden_layers": self.layers,
            "medusa_fc_bias": True,
            "original_lm_head": not self.own_lm_head,
            "truncated_vocab_size": None if self.token_map is None else len(self.token_map),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> MedusaHead:
        """The shape that the tensors have; of the config only the vocabulary of shared-lm_head
        heads is used.
        """
        blocks = [
            name for name in tensors if re.fullmatch(r"blocks\.\d+\.layers\.\d+\.weight", name)
        ]
        width = len(matrix(tensors, blocks[0] if blocks else "blocks.0.layers.0.weight"))
        token_map = integers(tensors, "token_map")
        last = [name for name in tensors if name.startswith("lm_heads.")]
        if last and token_map is None:
            vocab_size = len(matrix(tensors, last[0]))
        else:
            (vocab_size,) = needed(config, "vocab_size")
        if token_map is not None and not 0 <= token_map.min() <= token_map.max() < vocab_size:
            raise ValueError(
                f"expected token_map to hold target ids from 0 to {vocab_size - 1}, got ids from "
                f"{int(token_map.min())} to {int(token_map.max())}"
            )
        return cls(
            width,
            vocab_size,
            count_of(tensors, r"blocks\.(\d+)\."),
            count_of(tensors, r"blocks\.\d+\.layers\.(\d+)\."),
            own_lm_head=bool(last),
            token_map=token_map,
        )

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """Sum over depths of decay^k times the summed cross-entropy over learned tokens."""
        loss = features_BTD.new_zeros((), dtype=torch.float32)
        counts: list[Tensor] = []
        for k, (here_BT, factors) in enumerate(self._judged(batch, features_BTD, target), start=1):
            teacher = self._teacher(target, features_BTD[here_BT.roll(k, dims=1)])
            part, ranks_M = linear_cross_entropy(*factors, teacher=teacher)
            loss = loss + self.decay**k * part
            counts.append(rank_counts(ranks_M))
        return HeadLoss(loss, torch.stack(counts))

    @torch.no_grad()
    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        """ranks_MK for `StaticTree.most_frequent`."""
        ranks_BTK = features_BTD.new_full((*batch.tokens_BT.shape, self.depth), -1).long()
        for k, (here_BT, factors) in enumerate(self._judged(batch, features_BTD, target)):
            ranks_M = chunked_ranks(*factors)
            ranks_BTK[here_BT, k] = torch.where(ranks_M < RANKS, ranks_M, -1)
        return ranks_BTK[batch.loss_mask_BT]

    def states(
        self, batch: Batch, features_BTD: Tensor, target: Target
    ) -> Iterator[tuple[Tensor, Tensor, LowRank | None]]:
        """For each depth: its roots, bool (B, T), what the last matrix multiplies there (M, D), and
        what is added to its logits.
        """

        def hidden(block: nn.Module, here_BT: Tensor) -> Tensor:
            hidden_MD: Tensor = block(self.cast(features_BTD[here_BT]))
            return hidden_MD

        for block, here_BT in zip(self.blocks, batch.roots(self.depth), strict=True):
            yield here_BT, self.checkpointed(hidden, block, here_BT), None

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A drafter that fills `tree` (default: the head's own), which must be a `StaticTree`."""
        shape = tree or self.tree
        self.check_tree(shape)
        assert isinstance(shape, StaticTree)
        return MedusaDrafter(self, target, shape)

    def check_tree(self, tree: Tree) -> None:
        """Refuse dynamic trees and trees deeper than there are heads."""
        if not isinstance(tree, StaticTree):
            raise ValueError(
                f"Medusa heads fill a fixed tree, got a dynamic one ({tree}); "
                "give widths like 4,2,1 or a list of paths"
            )
        tree.check_depth(self.depth)
        tree.check_width(self.vocab_size if self.token_map is None else len(self.token_map))

    def hidden(self, x_BD: Tensor, depth: int, stack: StackedHeads | None = None) -> Tensor:
        """What the first blocks make of their input, (depth, B, D). stack: of `stacked`."""
        if stack is not None:
            return stack.hidden(x_BD, depth)
        return torch.stack([block(x_BD) for block in self.blocks[:depth]])

    def unembed(self, x_KBD: Tensor, target: Target, stack: StackedHeads | None = None) -> Tensor:
        """Logits (K, B, v) of the first K heads over the draft vocabulary."""
        if stack is not None:
            return stack.unembed(x_KBD)
        if not self.own_lm_head:  # one pass: reading the shared matrix is what drafting costs
            weight_vD = self.unembed_weights(target)[0]
            return F.linear(x_KBD.to(weight_vD.dtype), weight_vD)
        heads = zip(self.lm_heads, x_KBD, strict=False)
        return torch.stack([lm_head(hidden_BD) for lm_head, hidden_BD in heads])

    def stacked(self) -> StackedHeads | None:
        """The heads as one stack, for drafting; None where they are too large to be copied."""
        parameters = list(self.parameters())
        size = sum(p.numel() * p.element_size() for p in parameters)
        if not self.own_lm_head or size > STACK_BYTES:
            return None
        return self._stack.get(parameters, lambda: StackedHeads(self.blocks, self.lm_heads))

    def cast(self, features: Tensor) -> Tensor:
        """In the dtype of the heads."""
        return features.to(next(self.parameters()).dtype)

    def unembed_weights(self, target: Target) -> list[Tensor]:
        """The last matrix (v, D) of every head; the same one where it is shared."""
        if self.own_lm_head:
            return list(self.lm_heads.parameters())
        weight_vD, token_map = target.unembed_weight(), self.token_map
        if token_map is not None:
            weight_VD = weight_vD
            weight_vD = self._rows.get([token_map], lambda: weight_VD[token_map], [weight_VD])
        return [weight_vD] * self.depth

    def _judged(
        self, batch: Batch, features_BTD: Tensor, target: Target
    ) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor, LowRank | None]]]:
        """For each depth: the roots, bool (B, T), and arguments of `linear_cross_entropy`."""
        heads = zip(
            self.unembed_weights(target), self.states(batch, features_BTD, target), strict=True
        )
        for k, (weight_vD, (here_BT, hidden_MD, plus)) in enumerate(heads, start=1):
            guessed_M = batch.tokens_BT[here_BT.roll(k, dims=1)]
            yield here_BT, (hidden_MD, weight_vD, draft_index(guessed_M, self.token_map), plus)

    def _teacher(self, target: Target, features_MD: Tensor) -> Teacher | None:
        if self.labels == "hard":
            return None
        states_M = torch.arange(len(features_MD), device=features_MD.device)
        return Teacher(
            states_M,
            lambda states: target.unembed(features_MD[states]),
            self.token_map,
            vocab_size=self.vocab_size,
        )


def default_tree(depth: int, nodes: int) -> StaticTree:
    """A tree for heads nobody has measured: each depth and rank is right 0.6 times as often."""
    return StaticTree.best_first(
        [[0.6 ** (k + r + 1) for r in range(RANKS)] for k in range(depth)], nodes
    )


# How Medusa heads draft: one target state yields the whole tree.
#
# Legend: B batch, N tree nodes, K heads, R ranks, D hidden width, V vocabulary.


class MedusaDrafter:
    """Fills a fixed tree from the heads' best guesses."""

    def __init__(self, head: MedusaHead, target: Target, shape: StaticTree) -> None:
        refresh(head)
        shape = StaticTree(tuple(sorted(shape.paths)))  # depth first: best guesses stand in a row
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
