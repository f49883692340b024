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

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.base import Batch, Drafter
from draftheads.heads.decoder import LayerShape, Rope, check_embeddings, default_rope, read_rope
from draftheads.heads.descent import Descent, Products
from draftheads.heads.formats.head_config import needed
from draftheads.heads.formats.stored import matrix
from draftheads.heads.layers import Cached, ResidualBlock, linear
from draftheads.heads.losses import LowRank
from draftheads.heads.medusa import MedusaHead
from draftheads.heads.prefix import PrefixLayer
from draftheads.heads.shape import DynamicTree, Tree, TreeShape
from draftheads.heads.target import Target

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
        if isinstance(tree, TreeShape):
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
            inputs_BTD = self.lean(self.prefix, batch, inputs_BTD)
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
            hidden_MD, bias = self.lean(hidden, place, here_BT), None
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

        before_BT, codes_Mr = batch.learn_BT, None
        for place, here_BT in enumerate(batch.roots(self.depth)):
            hidden_MD, codes_Mr = self.lean(step, place, here_BT, before_BT, codes_Mr)
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
        return Descent(self, target, tree)
