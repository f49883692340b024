"""Medusa heads that know the token before: EAGLE's acceptance at Medusa's price.

Legend: B batch, T tokens, M learned positions, K heads, D hidden width, r rank, v draft vocabulary.

One state of the target still feeds all heads, but head k also sees what was drafted before its
guess. `conditioning` says how:

    markov       logits = lm_head(h) + up(SiLU(down(e)))
    state        logits = lm_head(h + up(s)), s = SiLU(down([h; e]))
    recurrent    as state, with s = SiLU(down([h; e]) + carry(s of the token before))
    hydra        h = block_k([feature; e_1; ..; e_k]), as published; e_1: the root

where h = block_k(feature) as in Medusa and e is the target's own embedding of the token before the
guess. So markov and state see one token, recurrent and hydra all since the root. Sources: Hydra,
arXiv 2402.05109; low-rank Markov heads as in DSpark; the recurrence is ReDrafter's, arXiv
2403.09919, on separate heads. With `prefix`, the feature goes through a decoder layer over the
whole text first (Hydra++).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.base import Committed, Drafter
from draftheads.heads.batch import Batch
from draftheads.heads.formats.config import needed
from draftheads.heads.formats.stored import matrix
from draftheads.heads.layers import (
    Cached,
    DecoderLayer,
    LayerShape,
    Memory,
    ResidualBlock,
    RMSNorm,
    Rope,
    check_embeddings,
    default_rope,
    linear,
    read_rope,
    refresh,
)
from draftheads.heads.losses import LowRank
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target import Target
from draftheads.heads.training_time_test import visible
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Tree
from draftheads.heads.tree_drafting import DraftCache, tree_builder

CONDITIONINGS = ("markov", "state", "recurrent", "hydra")
MARKOV_RANK = 64


class SequentialHead(MedusaHead):
    """K Medusa heads, each of which sees the draft tokens before its guess.

    conditioning: one of CONDITIONINGS. rank: r, not used by hydra. normed: embeddings are brought
    to unit mean square first (targets differ in their scale a hundredfold; Hydra does not do it).
    prefix: a decoder layer in front of all heads, or None. Others as of `MedusaHead`.
    """

    kind = "sequential"
    architecture = "SequentialMedusaModel"

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        depth: int,
        layers: int,
        *,
        conditioning: str = "recurrent",
        rank: int | None = None,
        normed: bool = True,
        prefix: PrefixLayer | None = None,
        **choices: Any,
    ) -> None:
        super().__init__(hidden_size, vocab_size, depth, layers, **choices)
        self.conditioning, self.normed, self.prefix = conditioning, normed, prefix
        self._products: Cached[Products] = Cached()
        rows = vocab_size if self.token_map is None else len(self.token_map)
        if conditioning == "hydra":
            widths = [(k + 1) * hidden_size for k in range(1, depth + 1)]
            self.blocks = nn.ModuleList(ResidualBlock(hidden_size, layers, w) for w in widths)
            biases = depth if self.own_lm_head else 0
            self.biases = nn.ParameterList(torch.zeros(rows) for _ in range(biases))
            return
        rank = rank or (MARKOV_RANK if conditioning == "markov" else hidden_size)
        wide, out = (1, rows) if conditioning == "markov" else (2, hidden_size)
        self.down = nn.ModuleList(nn.Linear(wide * hidden_size, rank) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(rank, out, bias=False) for _ in range(depth))
        for parameter in self.up.parameters():
            nn.init.zeros_(parameter)  # Medusa's heads, at first
        carries = depth - 1 if conditioning == "recurrent" else 0
        self.carry = nn.ModuleList(nn.Linear(rank, rank, bias=False) for _ in range(carries))
        for parameter in self.carry.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def design(cls, target: Target, choices: dict[str, Any]) -> dict[str, Any]:
        """Further keys of a recipe: conditioning, rank, prefix and the sizes of its layer."""
        check_embeddings(target)
        prefix = None
        if choices.get("prefix"):
            shape = LayerShape.of(target, choices)
            prefix = PrefixLayer(shape, Rope(shape.head_dim, *default_rope(target, choices)))
        return {
            "conditioning": choices.get("conditioning", "recurrent"),
            "rank": choices.get("rank"),
            "prefix": prefix,
        }

    @classmethod
    def create(cls, target: Target, **choices: Any) -> SequentialHead:
        """As for Medusa, with `design`'s choices; top_k: of the dynamic tree, or None for a fixed
        one, chosen from what was right on held-out text.
        """
        head = super().create(target, **choices)
        assert isinstance(head, cls)
        if choices.get("top_k"):
            head.tree = DynamicTree(choices.get("nodes", 59), head.depth, choices["top_k"])
        return head

    def config(self) -> dict[str, Any]:
        """Medusa's words and what is conditioned on what."""
        return {
            **super().config(),
            "model_type": "sequential_medusa",
            "conditioning": self.conditioning,
            "norm_embeddings": self.normed,
            "prefix_layer": self.prefix.config() if self.prefix else None,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> SequentialHead:
        """Shapes are those of the tensors; the prefix layer's sizes and what the embeddings are
        are the config's.
        """
        plain = MedusaHead.from_config(config, tensors)
        conditioning, rank = "hydra", None
        if "down.0.weight" in tensors:
            rank, width = matrix(tensors, "down.0.weight").shape
            conditioning = "markov" if width == plain.hidden_size else "state"
            conditioning = "recurrent" if "carry.0.weight" in tensors else conditioning
        prefix = None
        if "prefix.norm.weight" in tensors:
            (sizes,) = needed(config, "prefix_layer")
            prefix = PrefixLayer(LayerShape.read(sizes), read_rope(sizes))
        return cls(
            plain.hidden_size,
            plain.vocab_size,
            plain.depth,
            plain.layers,
            conditioning=conditioning,
            rank=rank,
            normed=config.get("norm_embeddings", True),
            prefix=prefix,
            own_lm_head=plain.own_lm_head,
            token_map=plain.token_map,
        )

    def check_tree(self, tree: Tree) -> None:
        """Refuse trees deeper than there are heads, and fixed ones wider than their vocabulary."""
        if isinstance(tree, StaticTree):
            super().check_tree(tree)
        elif tree.depth > self.depth:
            raise ValueError(
                f"the tree is {tree.depth} deep, the head guesses only {self.depth} tokens ahead; "
                f"ask for nodes=..,depth={self.depth}, or train a head with more depth"
            )

    def states(
        self, batch: Batch, features_BTD: Tensor, target: Target
    ) -> Iterator[tuple[Tensor, Tensor, LowRank | None]]:
        """As for Medusa; in the place of earlier drafts stands what the target wrote."""
        inputs_BTD = self.cast(features_BTD)
        if self.prefix is not None:
            inputs_BTD = self.checkpointed(self.prefix, batch, inputs_BTD)
        ways = self._grounded if self.conditioning == "hydra" else self._coded
        yield from ways(batch, inputs_BTD, target)

    def _grounded(
        self, batch: Batch, inputs_BTD: Tensor, target: Target
    ) -> Iterator[tuple[Tensor, Tensor, LowRank | None]]:
        embedded_BTD = self.embed(batch.tokens_BT, target)

        def hidden(place: int, here_BT: Tensor) -> Tensor:
            path = [embedded_BTD[here_BT.roll(step, dims=1)] for step in range(place + 1)]
            hidden_MD: Tensor = self.blocks[place](torch.cat([inputs_BTD[here_BT], *path], dim=1))
            return hidden_MD

        for place, here_BT in enumerate(batch.roots(self.depth)):
            hidden_MD, bias = self.checkpointed(hidden, place, here_BT), None
            if self.own_lm_head:
                bias_v1 = self.biases[place][:, None]
                bias = (bias_v1.new_ones(len(hidden_MD), 1), bias_v1)
            yield here_BT, hidden_MD, bias

    def _coded(
        self, batch: Batch, inputs_BTD: Tensor, target: Target
    ) -> Iterator[tuple[Tensor, Tensor, LowRank | None]]:
        def step(
            place: int, here_BT: Tensor, before_BT: Tensor, codes_Mr: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            hidden_MD = self.blocks[place](inputs_BTD[here_BT])
            own_Mr = self.codes(place, batch.tokens_BT[here_BT.roll(place, dims=1)], target)
            if self.conditioning != "markov":
                mixer_rD = linear(self.down, place).weight[:, : self.hidden_size]
                own_Mr = own_Mr + F.linear(hidden_MD, mixer_rD)
            if self.conditioning == "recurrent" and codes_Mr is not None:
                own_Mr = own_Mr + self.carry[place - 1](codes_Mr[here_BT[before_BT]])
            codes_Mr = F.silu(own_Mr)
            if self.conditioning != "markov":
                hidden_MD = hidden_MD + self.up[place](codes_Mr)
            return hidden_MD, codes_Mr

        before_BT, codes_Mr = batch.loss_mask_BT, None
        for place, here_BT in enumerate(batch.roots(self.depth)):
            hidden_MD, codes_Mr = self.checkpointed(step, place, here_BT, before_BT, codes_Mr)
            before_BT, up = here_BT, linear(self.up, place)
            plus = (codes_Mr, up.weight) if self.conditioning == "markov" else None
            yield here_BT, hidden_MD, plus

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """The target's embedding of tokens (..., D), as the heads read it."""
        embedded = self.cast(target.embed(tokens))
        return F.rms_norm(embedded, embedded.shape[-1:]) if self.normed else embedded

    def codes(self, place: int, tokens: Tensor, target: Target) -> Tensor:
        """What the tokens (...) before the guess bring to `down` of one head, (..., r); not for
        hydra.
        """
        down = linear(self.down, place)
        return F.linear(self.embed(tokens, target), down.weight[:, -self.hidden_size :], down.bias)

    def products(self, target: Target) -> Products:
        """Of the weights, for drafting."""
        embeddings = target.model.get_input_embeddings().parameters()
        return self._products.get(self.parameters(), lambda: Products(self, target), embeddings)

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A drafter that fills `tree` (default: the head's own), fixed or dynamic."""
        tree = tree or self.tree
        self.check_tree(tree)
        return SequentialDrafter(self, target, tree)


# A decoder layer that reads the whole text once per step, so that heads which guess from one state
# know what stands before it (the prefix layer of Hydra++, arXiv 2402.05109).
#
# Legend: B batch, T tokens, Q positions that ask, D width.


class PrefixLayer(nn.Module):
    """One Llama layer and a final norm on the target's last states; it is a `Reader` for
    `heads.history`. Its branches are zero at first: new heads read the target's states, normed.
    """

    layer_count = 1
    window: int | None = None

    def __init__(self, shape: LayerShape, rope: Rope) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        self.layer = DecoderLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.eps)
        nn.init.zeros_(self.layer.self_attn.o_proj.weight)
        nn.init.zeros_(self.layer.mlp.down_proj.weight)

    def forward(self, batch: Batch, features_BTD: Tensor) -> Tensor:
        """Training: the states (B, T, D) of packed rows whose documents do not see each other."""
        memories: list[Memory] = [RowMemory(visible(batch, self.window))]
        angles = self.rope(batch.positions_BT)
        return self.read(batch.tokens_BT, features_BTD, angles, memories)

    def read(
        self,
        tokens_BQ: Tensor,
        features_BQD: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: list[Memory],
    ) -> Tensor:
        """The states (B, Q, D); the tokens are not looked at."""
        features_BQD = features_BQD.to(self.norm.weight.dtype)
        states_BQD: Tensor = self.norm(self.layer(features_BQD, angles, memories[0]))
        return states_BQD

    def config(self) -> dict[str, Any]:
        """Its shape, in the words of a Llama config."""
        rope = {"rope_theta": self.rope.theta, "rope_scaling": self.rope.scaling}
        return {**self.shape.config(), **rope}


class RowMemory:
    """Whole rows that attend to themselves, as the mask (B, T, T) allows."""

    def __init__(self, visible_BTT: Tensor) -> None:
        self.visible_B1TT = visible_BTT[:, None]

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        """(B, H, T, W)."""
        times = q_BHQW.shape[1] // k_BGQW.shape[1]  # groups and a mask have no fast kernel
        k_BHQW, v_BHQW = (each.repeat_interleave(times, dim=1) for each in (k_BGQW, v_BGQW))
        return F.scaled_dot_product_attention(q_BHQW, k_BHQW, v_BHQW, attn_mask=self.visible_B1TT)


# Drafting with heads that know the token before: the state is read once, then a tree grows level
# by level, all nodes of a level in one small product.
#
# Legend: B batch, F nodes that are expanded together, K heads, D hidden width, E width of a whole
# path, r rank, X D or v, V vocabulary, v draft vocabulary.


KEPT_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""What all tokens become in the heads, and what ranks become in the logits, is kept for drafting
where each takes no more than this, by device (others: as for the CPU).
"""
TABLE_ROWS = 1 << 13
"""Tokens whose embeddings are made at a time."""


class SequentialDrafter:
    """A drafter for one generation."""

    def __init__(self, head: SequentialHead, target: Target, tree: Tree) -> None:
        refresh(head)
        self.head, self.depth = head, tree.depth
        self.feature_layers = head.feature_layers
        self._history = DraftCache(head.prefix, target.device) if head.prefix else None
        self._levels = levels_of(head, target)
        self._new_growth = tree_builder(tree, head.token_map, target.device)

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
