"""Medusa (arXiv 2401.10774): K small feed-forward heads read one target state; head k predicts the
token k positions after the root.

Head k is softmax(W2_k (h + SiLU(W1_k h + b_k))), the loss is sum_k decay^k CE_k.

Legend: B batch, T tokens, M learned positions, N tree nodes, K heads, D hidden width, V vocabulary
of the target, v draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from draftheads.heads.base import DraftHead, HeadLoss
from draftheads.heads.batch import Batch, at_places
from draftheads.heads.choices import HeadChoices
from draftheads.heads.cpu.linear import operand
from draftheads.heads.drafting import Committed, Drafter
from draftheads.heads.labels import check_labels, soft_labels
from draftheads.heads.layers import ResidualBlock, project
from draftheads.heads.losses import RANKS, LowRank, chunked_ranks, histogram, linear_cross_entropy
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import count_of, integers, matrix, needed
from draftheads.heads.tree import MOST_NODES, NODES, StaticTree, TokenTree, Tree, check_fits
from draftheads.heads.vocabulary import (
    SharedRows,
    check_ids,
    draft_index,
    lm_head_rows,
    token_map,
)


class MedusaChoices(HeadChoices):
    """Medusa heads (arXiv 2401.10774)."""

    takes_adapter = True

    kind: Literal["medusa"] = Field("medusa", description="heads over the last hidden state")
    depth: int = Field(4, ge=1, le=16, description="number of heads = tokens drafted ahead")
    layers: int = Field(1, ge=1, le=8, description="residual blocks per head")
    lm_head: Literal["own", "shared"] = Field("own", description="shared: of the target")
    labels: Literal["hard", "soft"] = Field("hard", description="soft: the target's distribution")
    decay: float = Field(0.8, gt=0, le=1, description="loss weight decay^k of depth k")
    vocabulary: int | None = Field(None, ge=2, description="N most frequent tokens; null: all")
    nodes: int = Field(
        NODES, ge=1, le=MOST_NODES, description="draft tokens in the calibrated tree"
    )


@dataclass(frozen=True)
class MedusaDesign:
    """The shape of Medusa heads, without their weights."""

    hidden_size: int  # of the target, like vocab_size
    vocab_size: int
    depth: int  # K
    layers: int  # residual blocks of each head
    own_lm_head: bool  # each head has its own lm_head (v, D); otherwise all use the target's
    token_map: Tensor | None  # int64 (v,), target ids of the draft vocabulary; None: all

    @classmethod
    def of(
        cls, target: Target, choices: MedusaChoices, vocabulary: Sequence[int] | None
    ) -> MedusaDesign:
        """The choices of a recipe; vocabulary: as in `DraftHead.create`."""
        return cls(
            target.hidden_size,
            target.vocab_size,
            choices.depth,
            choices.layers,
            choices.lm_head == "own",
            token_map(vocabulary, target.vocab_size),
        )

    @classmethod
    def read(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> MedusaDesign:
        """The shape of the tensors, and the vocabulary size of the config if they lack it."""
        names = [*tensors, "blocks.0.layers.0.weight"]  # the first one that exists
        block = next(name for name in names if re.fullmatch(r"blocks\.\d+\.layers.*\.weight", name))
        lm_heads = [name for name in tensors if name.startswith("lm_heads.")]
        width = len(matrix(tensors, block))
        ids_v = integers(tensors, "token_map")
        if lm_heads and ids_v is None:
            vocab_size = len(matrix(tensors, lm_heads[0]))
        else:
            (vocab_size,) = needed(config, "vocab_size")
        if ids_v is not None:
            check_ids(ids_v.tolist(), vocab_size)
        depth = count_of(tensors, r"blocks\.(\d+)\.")
        layers = count_of(tensors, r"blocks\.\d+\.layers\.(\d+)\.")
        return cls(width, vocab_size, depth, layers, bool(lm_heads), ids_v)


class Prediction(NamedTuple):
    """The prediction of one depth's head along the target's text."""

    roots_M: Tensor
    """int64, the places in the flattened batch from which a token is learned."""
    hidden_MD: Tensor
    """The input of lm_head."""
    plus: LowRank | None = None
    """A term added to the logits."""


class MedusaDrafter:
    """Fills a fixed tree with the heads' top tokens: one target state yields the whole tree."""

    cache = None

    def __init__(self, head: MedusaHead, target: Target, tree: Tree) -> None:
        head.begin_drafting(target, tree)
        assert isinstance(tree, StaticTree)
        tree = StaticTree(tuple(sorted(tree.paths)))  # depth first: the top path is contiguous
        self.head = head
        self.target = target
        self.depth = tree.depth
        self.width = tree.width
        self.feature_layers = head.feature_layers
        self.topology = tree.topology(target.device)
        picks = [(len(path) - 1) * tree.width + path[-1] for path in tree.paths]
        self.picks_N = torch.tensor(picks, dtype=torch.long, device=target.device)

    def propose(self, committed: Committed) -> TokenTree:
        head = self.head
        features_BD = head.cast(committed.last_features_BD())
        hidden_KBD = head.hidden(features_BD, self.depth)
        logits_KBv = head.unembed(hidden_KBD, self.target)
        top_BN = logits_KBv.topk(self.width).indices.transpose(0, 1).flatten(1)[:, self.picks_N]
        drafts_BN = top_BN if head.token_map is None else head.token_map[top_BN]
        tokens_BN = torch.cat([committed.last_tokens_B()[:, None], drafts_BN], dim=1)
        return TokenTree(tokens_BN, self.topology)

    def rewind(self, length: int) -> None:
        """Nothing to forget: a tree follows from the newest token and its feature alone."""


class MedusaHead(DraftHead):
    """K heads of residual blocks; head k reads features[i] and predicts tokens[i + k]."""

    kind = "medusa"
    title = "Medusa"
    paper = "https://arxiv.org/abs/2401.10774"
    Choices = MedusaChoices
    choices: MedusaChoices
    architecture = "MedusaModel"
    feature_layers: tuple[int, ...] = (-1,)
    token_map: Tensor | None

    def __init__(self, design: MedusaDesign) -> None:
        super().__init__()
        width = design.hidden_size
        depth = design.depth
        ids_v = design.token_map
        self.hidden_size = width
        self.vocab_size = design.vocab_size
        self.layers = design.layers
        self.own_lm_head = design.own_lm_head
        self.draft_vocab_size = design.vocab_size if ids_v is None else len(ids_v)
        self._shared_rows = SharedRows()
        self.tree = StaticTree.unfitted(depth)
        self.blocks = nn.ModuleList(ResidualBlock(width, design.layers) for _ in range(depth))
        self.register_buffer("token_map", ids_v)
        matrices = depth if design.own_lm_head else 0
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, self.draft_vocab_size, bias=False) for _ in range(matrices)
        )

    @classmethod
    def create(
        cls,
        target: Target,
        choices: MedusaChoices | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> MedusaHead:
        """New heads for `target`, which compute its own logits until they are trained."""
        choices = choices or MedusaChoices()
        head = cls(MedusaDesign.of(target, choices, vocabulary))
        head.prepare(target, choices)
        return head

    def prepare(self, target: Target, choices: MedusaChoices) -> None:
        """Set the choices for training, and initialise own lm_heads with the target's."""
        self.train_with(choices)
        if self.own_lm_head:
            weight_vD = lm_head_rows(target, self.token_map)
            for parameter in self.lm_heads.parameters():
                parameter.data.copy_(weight_vD)
        else:
            target.unembed_weight()  # raises here rather than in the first step
        check_labels(self, target)

    @property
    def depth(self) -> int:
        return len(self.blocks)

    @property
    def needs_unembed(self) -> bool:
        return self.has_soft_labels or not self.own_lm_head

    def config(self) -> dict[str, Any]:
        """config.json with the keys of vLLM's MedusaConfig."""
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
        return cls(MedusaDesign.read(config, tensors))

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """The sum over depths k of decay^k times the cross-entropy of all learned tokens."""
        loss = features_BTD.new_zeros((), dtype=torch.float32)
        counts = []
        weights = self.unembed_weights(target)
        predictions = self.predictions(batch, features_BTD, target)
        for k, (roots_M, hidden_MD, plus) in enumerate(predictions, start=1):
            teacher = None
            if self.has_soft_labels:
                features_MD = at_places(features_BTD, roots_M + k)
                teacher = soft_labels(self, features_MD, np.arange(len(roots_M)), target)
            labels_M = draft_index(batch.tokens_BT.flatten()[roots_M + k], self.token_map)
            part, ranks_M, _ = linear_cross_entropy(
                hidden_MD, weights[k - 1], labels_M, plus, teacher=teacher
            )
            loss = loss + self.choices.decay**k * part
            counts.append(histogram(ranks_M, RANKS + 1))
        return HeadLoss(loss, torch.stack(counts))

    @torch.no_grad()
    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        ranks_PK = features_BTD.new_full((batch.tokens_BT.numel(), self.depth), -1).long()
        weights = self.unembed_weights(target)
        predictions = self.predictions(batch, features_BTD, target)
        for k, (roots_M, hidden_MD, plus) in enumerate(predictions, start=1):
            labels_M = draft_index(batch.tokens_BT.flatten()[roots_M + k], self.token_map)
            ranks_M = chunked_ranks(hidden_MD, weights[k - 1], labels_M, plus)
            ranks_PK[roots_M, k - 1] = torch.where(ranks_M < RANKS, ranks_M, -1)
        return ranks_PK[batch.loss_mask_BT.flatten()]

    def predictions(
        self, batch: Batch, features_BTD: Tensor, target: Target
    ) -> Iterator[Prediction]:
        """Yields the predictions of depth 1, 2, ... in turn."""

        def hidden(block: nn.Module, roots_M: Tensor) -> Tensor:
            hidden_MD: Tensor = block(self.cast(at_places(features_BTD, roots_M)))
            return hidden_MD

        for block, roots_M in zip(self.blocks, batch.roots(self.depth), strict=True):
            yield Prediction(roots_M, self.checkpointed(hidden, block, roots_M))

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        return MedusaDrafter(self, target, tree or self.tree)

    def check_tree(self, tree: Tree) -> None:
        if not isinstance(tree, StaticTree):
            raise ValueError(
                f"Medusa heads fill a fixed tree, got a dynamic one ({tree}); "
                "give widths like 4,2,1 or a list of paths"
            )
        check_fits(tree, self.draft_vocab_size, self.depth)

    def hidden(self, x_BD: Tensor, depth: int) -> Tensor:
        """The states (depth, B, D) of the first heads."""
        return torch.stack([block(x_BD) for block in self.blocks[:depth]])

    def unembed(self, x_KBD: Tensor, target: Target) -> Tensor:
        """Logits (K, B, v) of the first K heads."""
        if not self.own_lm_head:  # one product, so that the large matrix is read once
            weight_vD = operand(self.unembed_weights(target)[0])
            return project(x_KBD.to(weight_vD.dtype), weight_vD)
        heads = zip(self.lm_heads, x_KBD, strict=False)
        return torch.stack([lm_head(hidden_BD) for lm_head, hidden_BD in heads])

    def unembed_weights(self, target: Target) -> list[Tensor]:
        """The lm_head weight (v, D) of each head."""
        if self.own_lm_head:
            return list(self.lm_heads.parameters())
        return [self._shared_rows.of(target, self.token_map)] * self.depth
