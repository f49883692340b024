"""Medusa heads conditioned on the preceding draft tokens (as in Hydra): EAGLE's acceptance at the
price of Medusa.

All heads read one state of the target, but each also sees tokens that were drafted before its own.
There is a class for each `conditioning`:

    recurrent    logits = lm_head(h + up(s)), s = SiLU(down([h; e]) + carry(s of the parent))
    hydra        h = block_k([feature; e_1; ..; e_k]), as published; e_1: the root

where h = block_k(feature) as in Medusa and e is the target's embedding of the preceding token. So
both see all tokens since the root. With `prefix`, the feature first passes through a decoder layer
over the whole text (Hydra++).

Sources: Hydra, arXiv 2402.05109; the recurrence is that of ReDrafter, arXiv 2403.09919, on separate
heads.

Legend: B batch, T tokens, M learned positions, Q queries, F nodes expanded together, K heads,
D hidden width, E width of a whole path, r rank, X D or v, V vocabulary of the target, v draft
vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from draftheads.heads.base import TreeDrafter
from draftheads.heads.batch import Batch, at_places
from draftheads.heads.choices import MOST_RANKS, LayerSizes
from draftheads.heads.cpu.linear import operand
from draftheads.heads.drafting import Committed, DraftCache, Drafter
from draftheads.heads.layers import (
    Angles,
    Cached,
    DecoderLayer,
    LayerShape,
    Memory,
    ResidualBlock,
    RMSNorm,
    Rope,
    check_embeddings,
    linear,
    project,
)
from draftheads.heads.medusa import MedusaChoices, MedusaDesign, MedusaHead, Prediction
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import matrix, needed
from draftheads.heads.training_time_test import RowMemory
from draftheads.heads.tree import DynamicTree, TokenTree, Tree, check_fits
from draftheads.heads.tree_drafting import gather_nodes

KEPT_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Size limits, by device, for each of the two large `Products`; default: the CPU's."""


class SequentialChoices(MedusaChoices, LayerSizes):
    """Medusa heads conditioned on the preceding draft tokens (as in Hydra, arXiv 2402.05109). The
    layer sizes apply to the prefix layer.
    """

    decoding_keys = frozenset({"nodes", "top_k"})

    kind: Literal["sequential"] = Field(  # type: ignore[assignment]
        "sequential", description="Medusa heads conditioned on the preceding draft tokens"
    )
    conditioning: Literal["recurrent", "hydra"] = Field(
        "recurrent",
        description="recurrent: all draft tokens update the hidden state; hydra: they are inputs "
        "of the head",
    )
    rank: int | None = Field(
        None, ge=1, le=MOST_RANKS, description="inner width; null: the target's width"
    )
    prefix: bool = Field(False, description="add a decoder layer over the whole text (Hydra++)")
    top_k: int | None = Field(None, ge=1, description="nodes expanded per level; null: fixed tree")

    @model_validator(mode="after")
    def _check_together(self) -> SequentialChoices:
        if self.conditioning == "hydra" and self.rank is not None:
            raise ValueError("rank should be null with conditioning: hydra; remove rank")
        sizes = [name for name in LayerSizes.model_fields if getattr(self, name) is not None]
        if sizes and not self.prefix:
            raise ValueError(f"{sizes[0]} is a size of the prefix layer; set prefix: true")
        if self.top_k is not None:
            DynamicTree(self.nodes, self.depth, self.top_k)  # refuses too many nodes
        return self


class SequentialHead(MedusaHead):
    """K Medusa heads, each of which sees the draft tokens before its own.

    prefix: a decoder layer in front of all heads, or None. normed: embeddings are scaled to unit
    mean square (unlike in Hydra), because their scale differs a hundredfold between targets.
    """

    kind = "sequential"
    title = "Sequential Medusa"
    paper = "https://arxiv.org/abs/2402.05109"
    Choices = SequentialChoices
    architecture = "SequentialMedusaModel"
    conditioning: ClassVar[str]
    normed = True

    def __init__(self, design: MedusaDesign, rank: int | None, prefix: PrefixLayer | None) -> None:
        super().__init__(design)
        self.prefix = prefix
        self.add_conditioning(rank)

    @classmethod
    def create(  # type: ignore[override]
        cls,
        target: Target,
        choices: SequentialChoices | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> SequentialHead:
        """Create heads as for Medusa. The tree is dynamic if there is a top_k, else fixed and
        fitted to held-out text.
        """
        choices = choices or SequentialChoices()
        check_embeddings(target)
        prefix = None
        if choices.prefix:
            shape = LayerShape.of(target, choices)
            prefix = PrefixLayer(shape, Rope.of(target, choices, shape.head_dim))
        kind = CONDITIONINGS[choices.conditioning]
        head = kind(MedusaDesign.of(target, choices, vocabulary), choices.rank, prefix)
        head.prepare(target, choices)
        return head

    def config(self) -> dict[str, Any]:
        return {
            **super().config(),
            "model_type": "sequential_medusa",
            "conditioning": self.conditioning,
            "norm_embeddings": self.normed,
            "prefix_layer": self.prefix.config() if self.prefix else None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> SequentialHead:
        """The shape of the tensors; the prefix layer and `norm_embeddings` of the config."""
        design = MedusaDesign.read(config, tensors)
        rank = None
        kind: type[SequentialHead] = HydraHead
        if "down.0.weight" in tensors:
            rank = len(matrix(tensors, "down.0.weight"))
            kind = RecurrentHead
        prefix = None
        if "prefix.norm.weight" in tensors:
            (sizes,) = needed(config, "prefix_layer")
            shape = LayerShape.read(sizes)
            prefix = PrefixLayer(shape, Rope.read(sizes, shape.head_dim))
        head = kind(design, rank, prefix)
        head.normed = config.get("norm_embeddings", True)
        return head

    @abstractmethod
    def add_conditioning(self, rank: int | None) -> None:
        """Create the parameters of the conditioning, which change nothing until trained."""

    @abstractmethod
    def conditioned(self, batch: Batch, inputs_BTD: Tensor, target: Target) -> Iterator[Prediction]:
        """`predictions` for the inputs of the heads; the preceding tokens are those of the text."""

    def predictions(
        self, batch: Batch, features_BTD: Tensor, target: Target
    ) -> Iterator[Prediction]:
        inputs_BTD = self.cast(features_BTD)
        if self.prefix is not None:
            angles = self.prefix.rope(batch.positions_BT)
            memory = RowMemory(batch)
            inputs_BTD = self.checkpointed(self.prefix, inputs_BTD, angles, memory)
        return self.conditioned(batch, inputs_BTD, target)

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """The target's embeddings of tokens (..., D), as the heads read them."""
        embedded = self.cast(target.embed(tokens))
        return F.rms_norm(embedded, embedded.shape[-1:]) if self.normed else embedded

    def check_tree(self, tree: Tree) -> None:
        check_fits(tree, self.draft_vocab_size, self.depth)


class Products(NamedTuple):
    """Products of weights, for drafting; None if they are too large to keep."""

    mixers_KDr: Tensor  # from states to codes
    codes_Vr: list[Tensor] | None  # for each head: the codes of all tokens
    logits_rv: list[Tensor] | None  # for each head: from codes to logits


class SequentialDrafter(TreeDrafter):
    """Reads the target's state once, then grows a tree level by level."""

    head: SequentialHead

    def __init__(self, head: SequentialHead, target: Target, tree: Tree) -> None:
        super().__init__(head, target, tree)
        self.weights_vD = list(map(operand, head.unembed_weights(target)))
        if (prefix := head.prefix) is not None:

            def read(tokens_BQ: Tensor, features_BQD: Tensor, angles: Angles) -> Tensor:
                states_BQD: Tensor = prefix(head.cast(features_BQD), angles, cache.memories[0])
                return states_BQD

            self.cache = cache = DraftCache(1, prefix.rope, None, read, target.device)

    def start(self, committed: Committed) -> tuple[Tensor, Tensor]:
        """Begin a tree. Returns the input of the heads (B, D) and the roots (B,)."""
        self.builder.start()
        if self.cache is None:
            inputs_BD = self.head.cast(committed.last_features_BD())
        else:
            inputs_BD = self.cache.commit(committed)[:, 0]
        return inputs_BD, committed.last_tokens_B()


class RecurrentDrafter(SequentialDrafter):
    """With `Products.logits_rv`, the vocabulary-wide product is computed once for all heads, from
    the state alone, and each level adds a product as thin as the rank. Without it, each level
    multiplies the states of its nodes by the lm_head, as training does.
    """

    head: RecurrentHead

    def __init__(self, head: RecurrentHead, target: Target, tree: Tree) -> None:
        super().__init__(head, target, tree)
        self.products = head.products(target)
        self.carries_rr = list(head.carry.parameters())

    def propose(self, committed: Committed) -> TokenTree:
        inputs_BD, roots_B = self.start(committed)
        builder = self.builder
        mixers_KDr, codes_Vr, logits_rv = self.products
        hidden_KBD = self.head.hidden(inputs_BD, self.depth)
        state_KBX = hidden_KBD
        if logits_rv is not None:
            logits_KBv = self.head.unembed(hidden_KBD, self.target)
            state_KBX = logits_KBv.to(hidden_KBD.dtype)
        state_B1X = state_KBX[:, :, None].unbind()
        mixed_B1r = torch.bmm(hidden_KBD, mixers_KDr[: self.depth])[:, :, None].unbind()
        tokens_BF = roots_B[:, None]
        carried_BFr = None
        for index in count():
            if codes_Vr is None:
                codes_BFr = self.head.codes(index, tokens_BF, self.target)
            else:
                codes_BFr = F.embedding(tokens_BF, codes_Vr[index])
            codes_BFr = codes_BFr + mixed_B1r[index]
            if carried_BFr is not None:
                codes_BFr = codes_BFr + carried_BFr
            codes_BFr = F.silu(codes_BFr)
            if not builder.add(self._logits(index, state_B1X[index], codes_BFr)):
                break
            carried_BFr = project(codes_BFr, self.carries_rr[index])
            if index:  # nodes of the first level share their parent
                carried_BFr = gather_nodes(carried_BFr, builder.parents_BF)
            tokens_BF = builder.tokens_BF
        return builder.tree(roots_B)

    def _logits(self, index: int, state_B1X: Tensor, codes_BFr: Tensor) -> Tensor:
        if self.products.logits_rv is not None:
            up_rv = self.products.logits_rv[index]
            if len(codes_BFr) == 1:  # the usual case, without a pass of its own for the sum
                return torch.addmm(state_B1X[0], codes_BFr[0], up_rv)[None].float()
            return (state_B1X + project(codes_BFr, up_rv.T)).float()
        states_BFD = state_B1X + self.head.up[index](codes_BFr)
        weight_vD = self.weights_vD[index]
        return project(states_BFD.to(weight_vD.dtype), weight_vD).float()


class RecurrentHead(SequentialHead):
    """All tokens since the root change the state, by a recurrence of r numbers over the heads."""

    conditioning = "recurrent"

    def add_conditioning(self, rank: int | None) -> None:
        width = self.hidden_size
        rank = rank or width
        self._products: Cached[Products] = Cached()
        self.down = nn.ModuleList(nn.Linear(2 * width, rank) for _ in range(self.depth))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(self.depth))
        carries = range(self.depth - 1)
        self.carry = nn.ModuleList(nn.Linear(rank, rank, bias=False) for _ in carries)
        for parameter in (*self.up.parameters(), *self.carry.parameters()):
            nn.init.zeros_(parameter)

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        return RecurrentDrafter(self, target, tree or self.tree)

    def refresh(self) -> None:
        self._products.refresh()

    def codes(self, index: int, tokens: Tensor, target: Target) -> Tensor:
        """The part of a head's code (before SiLU) due to preceding tokens (...): (..., r)."""
        down = linear(self.down, index)
        return F.linear(self.embed(tokens, target), down.weight[:, -self.hidden_size :], down.bias)

    def conditioned(self, batch: Batch, inputs_BTD: Tensor, target: Target) -> Iterator[Prediction]:
        def step(
            index: int, roots_M: Tensor, earlier_M: Tensor, codes_Mr: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            hidden_MD = self.blocks[index](at_places(inputs_BTD, roots_M))
            own_Mr = self.codes(index, batch.tokens_BT.flatten()[roots_M + index], target)
            mixer_rD = linear(self.down, index).weight[:, : self.hidden_size]
            own_Mr = own_Mr + F.linear(hidden_MD, mixer_rD)
            if codes_Mr is not None:
                kept_M = torch.searchsorted(earlier_M, roots_M)  # roots of the depth before
                own_Mr = own_Mr + self.carry[index - 1](codes_Mr.index_select(0, kept_M))
            codes_Mr = F.silu(own_Mr)
            return hidden_MD + self.up[index](codes_Mr), codes_Mr

        roots = batch.roots(self.depth)
        earlier_M = roots[0]
        codes_Mr = None
        for index, roots_M in enumerate(roots):
            hidden_MD, codes_Mr = self.checkpointed(step, index, roots_M, earlier_M, codes_Mr)
            earlier_M = roots_M
            yield Prediction(roots_M, hidden_MD)

    def products(self, target: Target) -> Products:
        """The products of the current weights. lm_head and `up` are multiplied if this makes a node
        cheaper.
        """
        width = self.hidden_size

        def make() -> Products:
            downs_rE = list(self.down.parameters())[::2]
            mixers_KDr = torch.stack([down_rE[:, :width].T for down_rE in downs_rE])
            codes_Vr = None
            if self.fits(self.vocab_size, target):
                # in parts, because the embeddings of all tokens are large
                parts = torch.split(torch.arange(self.vocab_size, device=target.device), 1 << 13)
                codes_Vr = []
                for index in range(self.depth):
                    codes_Vr.append(torch.cat([self.codes(index, part, target) for part in parts]))
            logits_rv = None
            is_thin = len(downs_rE[0]) <= width
            if is_thin and self.fits(self.draft_vocab_size, target):
                pairs = zip(self.unembed_weights(target), self.up.parameters(), strict=True)
                logits_rv = [(lm_vD.to(up.dtype) @ up).T.contiguous() for lm_vD, up in pairs]
            return Products(mixers_KDr, codes_Vr, logits_rv)

        embeddings = target.model.get_input_embeddings().parameters()
        return self._products.get(self.parameters(), make, embeddings)

    def fits(self, tokens: int, target: Target) -> bool:
        """True if r numbers per token and head are few enough to keep."""
        weight_rE = linear(self.down, 0).weight
        size = self.depth * len(weight_rE) * weight_rE.element_size()
        return size * tokens <= KEPT_BYTES.get(target.device.type, KEPT_BYTES["cpu"])


class HydraDrafter(SequentialDrafter):
    """Each head reads the embedded path to its node."""

    head: HydraHead

    def propose(self, committed: Committed) -> TokenTree:
        inputs_BD, roots_B = self.start(committed)
        head = self.head
        builder = self.builder
        embedded_BFD = head.embed(roots_B[:, None], self.target)
        paths_BFE = inputs_BD[:, None]
        for index in count():
            paths_BFE = torch.cat([paths_BFE, embedded_BFD], dim=2)
            states_BFD = head.blocks[index](paths_BFE)
            weight_vD = self.weights_vD[index]
            bias_v = head.biases[index] if head.own_lm_head else None
            logits_BFv = project(states_BFD.to(weight_vD.dtype), weight_vD, bias_v).float()
            if not builder.add(logits_BFv):
                break
            paths_BFE = gather_nodes(paths_BFE, builder.parents_BF)
            embedded_BFD = head.embed(builder.tokens_BF, self.target)
        return builder.tree(roots_B)


class HydraHead(SequentialHead):
    """All tokens since the root are inputs of the head."""

    conditioning = "hydra"

    def add_conditioning(self, rank: int | None) -> None:
        widths = [(k + 1) * self.hidden_size for k in range(1, self.depth + 1)]
        self.blocks = nn.ModuleList(
            ResidualBlock(self.hidden_size, self.layers, width) for width in widths
        )
        biases = range(len(self.lm_heads))
        self.biases = nn.ParameterList(torch.zeros(self.draft_vocab_size) for _ in biases)

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        return HydraDrafter(self, target, tree or self.tree)

    def conditioned(self, batch: Batch, inputs_BTD: Tensor, target: Target) -> Iterator[Prediction]:
        embedded_BTD = self.embed(batch.tokens_BT, target)

        def hidden(index: int, roots_M: Tensor) -> Tensor:
            path = [at_places(embedded_BTD, roots_M + step) for step in range(index + 1)]
            inputs_MD = at_places(inputs_BTD, roots_M)
            hidden_MD: Tensor = self.blocks[index](torch.cat([inputs_MD, *path], dim=1))
            return hidden_MD

        for index, roots_M in enumerate(batch.roots(self.depth)):
            hidden_MD = self.checkpointed(hidden, index, roots_M)
            bias = None
            if self.own_lm_head:
                bias_v1 = self.biases[index][:, None]
                bias = (bias_v1.new_ones(len(hidden_MD), 1), bias_v1)
            yield Prediction(roots_M, hidden_MD, bias)


CONDITIONINGS: dict[str, type[SequentialHead]] = {
    kind.conditioning: kind for kind in (RecurrentHead, HydraHead)
}


class PrefixLayer(nn.Module):
    """A decoder layer and a norm over the target's last states, run once per step (Hydra++).

    Its branches are zero at first, so that new heads read the target's states, normed.
    """

    def __init__(self, shape: LayerShape, rope: Rope) -> None:
        super().__init__()
        self.shape = shape
        self.rope = rope
        self.layer = DecoderLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        nn.init.zeros_(self.layer.self_attn.o_proj.weight)
        nn.init.zeros_(self.layer.mlp.down_proj.weight)

    def forward(self, features_BQD: Tensor, angles: Angles, memory: Memory) -> Tensor:
        states_BQD: Tensor = self.norm(self.layer(features_BQD, angles, memory))
        return states_BQD

    def config(self) -> dict[str, Any]:
        """The keys of a Llama config."""
        rope = {"rope_theta": self.rope.theta, "rope_scaling": self.rope.scaling}
        return {**self.shape.config(), **rope}
