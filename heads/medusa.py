"""Medusa heads: K small feed-forward heads, each guessing one position ahead from the same target
state.

Legend: B batch, T tokens, M learned positions, N tree nodes, K heads, R ranks, D hidden width, V
vocabulary. Source: Medusa, arXiv 2401.10774; head form p_k = softmax(W2_k (SiLU(W1_k h + b_k) +
h)), loss sum_k decay^k CE_k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.base import RANKS, Batch, Committed, DraftHead, HeadLoss
from draftheads.heads.layers import ResidualBlock, StackedHeads
from draftheads.heads.losses import chunked_cross_entropy, chunked_ranks, rank_counts
from draftheads.heads.target import Target
from draftheads.heads.tree import TokenTree, TreeShape

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
        self.hidden_size, self.vocab_size, self.depth, self.layers = (
            hidden_size,
            vocab_size,
            depth,
            layers,
        )
        self.own_lm_head = own_lm_head
        self.labels, self.decay = "hard", 0.8
        self._stack: tuple[tuple[tuple[int, int], ...], StackedHeads] | None = None
        self.tree = default_tree(depth, DEFAULT_NODES)
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size, layers) for _ in range(depth))
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
        vocabulary = choices.get("vocabulary")
        token_map = None if vocabulary is None else torch.tensor(sorted(vocabulary))
        own = choices.get("lm_head", "own") == "own"
        head = cls(
            target.hidden_size,
            target.vocab_size,
            choices.get("depth", 4),
            choices.get("layers", 1),
            own_lm_head=own,
            token_map=token_map,
        )
        head.labels, head.decay = choices.get("labels", "hard"), choices.get("decay", 0.8)
        if not own:  # raise here, with the reason, rather than in the first step
            target.unembed_weight()
        if head.labels == "soft":
            target.unembed(torch.zeros(1, target.hidden_size).to(target.device, target.dtype))
        weight_VD = target.model.get_output_embeddings().weight.detach().float().cpu()
        for parameter in head.lm_heads.parameters():
            parameter.data.copy_(weight_VD if token_map is None else weight_VD[token_map])
        return head

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The last hidden state, after the final norm."""
        return (-1,)

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
        parts = [name.split(".") for name in tensors]
        blocks = [part for part in parts if part[0] == "blocks"]
        if not blocks:
            raise ValueError(
                f"expected Medusa tensors blocks.0.layers.0.weight, ..., got {sorted(tensors)[:3]}"
            )
        own = "lm_heads.0.weight" in tensors
        token_map = tensors.get("token_map")
        full = own and token_map is None
        return cls(
            tensors["blocks.0.layers.0.weight"].shape[0],
            tensors["lm_heads.0.weight"].shape[0] if full else int(config["vocab_size"]),
            1 + max(int(part[1]) for part in blocks),
            1 + max(int(part[3]) for part in blocks),
            own_lm_head=own,
            token_map=token_map,
        )

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """Sum over depths of decay^k times the summed cross-entropy over learned tokens."""
        loss = features_BTD.new_zeros((), dtype=torch.float32)
        counts: list[Tensor] = []
        for k, here_BT, labels_M in self._depths(batch):
            hidden_MD = self.blocks[k - 1](self._input(features_BTD[here_BT]))
            # tokens outside a reduced vocabulary count as missed and teach nothing
            index_M = self._draft_index(labels_M)
            known_M = index_M >= 0
            teacher = None
            if self.labels == "soft":
                there_BTD = features_BTD[:, k:][here_BT[:, :-k]]
                teacher = self._teacher(target, there_BTD[known_M])
            part, ranks_M = chunked_cross_entropy(
                hidden_MD[known_M],
                index_M[known_M],
                self._unembed(k, target),
                vocab_size=self._rows,
                teacher=teacher,
            )
            loss = loss + self.decay**k * part
            counts.append(rank_counts(ranks_M))
            counts[-1][RANKS] += (~known_M).sum()
        return HeadLoss(loss, torch.stack(counts))

    @torch.no_grad()
    def observe(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        """ranks_MK for `TreeShape.most_frequent`: at each learned position, the rank of the token
        that came at each depth, -1 where it was worse than RANKS or the document ended.
        """
        place_BT = batch.learn_BT.long().flatten().cumsum(0).view_as(batch.tokens_BT) - 1
        ranks_MK = torch.full((int(batch.learn_BT.sum()), self.depth), -1, device=place_BT.device)
        for k, here_BT, labels_M in self._depths(batch):
            hidden_MD = self.blocks[k - 1](self._input(features_BTD[here_BT]))
            ranks_M = chunked_ranks(
                hidden_MD,
                self._draft_index(labels_M),
                self._unembed(k, target),
                vocab_size=self._rows,
            )
            ranks_MK[place_BT[here_BT], k - 1] = torch.where(ranks_M < RANKS, ranks_M, -1)
        return ranks_MK

    def drafter(self, target: Target, tree: TreeShape | None = None) -> MedusaDrafter:
        """A drafter that fills `tree` (default: the head's own)."""
        return MedusaDrafter(self, target, tree or self.tree)

    def logits(self, features_BD: Tensor, target: Target, depth: int) -> Tensor:
        """Logits (depth, B, v) of the first `depth` heads over the draft vocabulary."""
        x_BD = self._input(features_BD)
        hidden_KBD = torch.stack([block(x_BD) for block in self.blocks[:depth]])
        if not self.own_lm_head:  # one pass: reading the shared matrix is what drafting costs
            return self._unembed(1, target)(hidden_KBD)
        heads = zip(self.lm_heads, hidden_KBD, strict=False)
        return torch.stack([lm_head(hidden_BD) for lm_head, hidden_BD in heads])

    def stacked(self) -> StackedHeads | None:
        """The heads as one stack, for drafting; None where they are too large to be copied."""
        parameters = list(self.parameters())
        size = sum(p.numel() * p.element_size() for p in parameters)
        if not self.own_lm_head or size > STACK_BYTES:
            return None
        version = tuple((p.data_ptr(), p._version) for p in parameters)
        if self._stack is None or self._stack[0] != version:
            self._stack = (version, StackedHeads(self.blocks, self.lm_heads))
        return self._stack[1]

    def _depths(self, batch: Batch) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each depth k: the mask of positions i that learn tokens[i + k], and those tokens.

        Everything from i to i + k must be the target's own words of one document, as it is when
        the heads are used.
        """
        here_BT = batch.learn_BT
        for k in range(1, self.depth + 1):
            same_BT = batch.documents_BT[:, :-k] == batch.documents_BT[:, k:]
            reached_BT = here_BT[:, :-k] & batch.learn_BT[:, k:] & same_BT
            here_BT = torch.zeros_like(batch.learn_BT)
            here_BT[:, :-k] = reached_BT
            yield k, here_BT, batch.tokens_BT[:, k:][reached_BT]

    @property
    def _rows(self) -> int:
        return self.vocab_size if self.token_map is None else len(self.token_map)

    def _input(self, features: Tensor) -> Tensor:
        return features.to(next(self.parameters()).dtype)

    def _unembed(self, k: int, target: Target) -> Callable[[Tensor], Tensor]:
        if self.own_lm_head:
            return self.lm_heads[k - 1]
        weight_VD = target.unembed_weight()
        if self.token_map is not None:
            weight_VD = weight_VD[self.token_map]
        return lambda hidden: F.linear(hidden.to(weight_VD.dtype), weight_VD)

    def _teacher(self, target: Target, features_MD: Tensor) -> Callable[[slice], Tensor]:
        def logits(part: slice) -> Tensor:
            full_CV = target.unembed(features_MD[part])
            return full_CV if self.token_map is None else full_CV[:, self.token_map]

        return logits

    def _draft_index(self, tokens_M: Tensor) -> Tensor:
        if self.token_map is None:
            return tokens_M
        place_M = torch.searchsorted(self.token_map, tokens_M).clamp(max=len(self.token_map) - 1)
        return torch.where(self.token_map[place_M] == tokens_M, place_M, -1)


class MedusaDrafter:
    """Fills a fixed tree from the heads' best guesses; one target state yields the whole tree."""

    def __init__(self, head: MedusaHead, target: Target, shape: TreeShape) -> None:
        shape.check_depth(head.depth)
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
        if self.stack is not None:
            logits_KBV = self.stack(features_BD, depth)
        else:
            logits_KBV = self.head.logits(features_BD, self.target, depth)
        best_BKR = logits_KBV.topk(width).indices.transpose(0, 1)
        token_map = self.head.token_map
        return best_BKR if token_map is None else token_map[best_BKR]


def default_tree(depth: int, nodes: int) -> TreeShape:
    """A tree for heads nobody has measured: each depth and rank is right 0.6 times as often."""
    return TreeShape.best_first(
        [[0.6 ** (k + r + 1) for r in range(RANKS)] for k in range(depth)], nodes
    )
