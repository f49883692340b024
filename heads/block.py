"""Block-parallel heads: one pass of a small transformer drafts a whole block (DFlash, DSpark).

The block of an anchor, the newest committed token at position a, is embed(anchor), MASK, .., MASK
at the positions a, a + 1, ... In every layer it attends to itself, in both directions, and to the
target's fused features of all positions before a, which enter as keys and values alone. There are
two conventions for its slots, the positions of the block:

    sample_from_anchor        slot j = 0, 1, ... predicts token a + j + 1 (DSpark)
    not sample_from_anchor    slot j = 1, 2, ... predicts token a + j, at its own position (DFlash)

The slots do not see each other's tokens; `conditioning` adds what the preceding ones bring.

The layers are Qwen3's.

Sources: DFlash, DSpark (arXiv and github.com/deepseek-ai/DeepSpec, MIT); names of tensors are those
of DeepSpec's checkpoints, and of Domino's.

Legend: B batch, T tokens, N anchors of a row, M anchors of a batch, K drafts of a block, Q queries,
C newly committed tokens, F nodes expanded together, D width of the target, r rank of the
conditioning, v draft vocabulary, V vocabulary of the target, H query heads, G key/value heads,
W head width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from draftheads.heads.base import DraftHead, HeadLoss, TreeDrafter
from draftheads.heads.batch import Batch, at_places
from draftheads.heads.choices import MOST_RANKS, HeadChoices, LayerSizes
from draftheads.heads.conditioning import (
    CONDITIONING,
    MARKOV_TYPES,
    Conditioning,
    Domino,
    Markov,
    Selector,
    codes_along,
)
from draftheads.heads.cpu.linear import operand, pack_like
from draftheads.heads.drafting import Committed, DraftCache
from draftheads.heads.labels import soft_labels
from draftheads.heads.layers import (
    GROUP,
    TAPS,
    Angles,
    Cached,
    DecoderLayer,
    LayerShape,
    RMSNorm,
    Rope,
    check_embeddings,
    check_features,
    project,
)
from draftheads.heads.losses import (
    RANKS,
    LowRank,
    chunked_ranks,
    linear_cross_entropy,
    rank_counts,
)
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import count_of, matrix, needed
from draftheads.heads.training_time_test import extended, joined, padded_places, per_query_head
from draftheads.heads.tree import (
    MOST_NODES,
    NODES,
    DynamicTree,
    StaticTree,
    TokenTree,
    Tree,
    check_fits,
)
from draftheads.heads.tree_drafting import gather_nodes
from draftheads.heads.vocabulary import Vocabulary, draft_index, lm_head_rows, token_map

EVALUATED = 64
"""Anchors per row whose blocks are evaluated together."""
SHARP = 128
"""Width of the heads whose normed queries and keys have scores large enough (Qwen3's)."""
RESERVED = ("reserved", "unused", "placeholder", "mask")
"""Parts of the names of tokens that no text contains."""


class BlockChoices(HeadChoices, LayerSizes):
    """Block-parallel heads (DFlash, DSpark)."""

    decoding_keys = frozenset({"nodes", "top_k"})

    kind: Literal["block"] = Field("block", description="drafts a whole block in one pass")
    layers: int = Field(2, ge=1, le=16, description="decoder layers")
    block_size: int = Field(7, ge=2, le=16, description="slots of a block, the anchor's included")
    sample_from_anchor: bool = Field(
        True,
        description="true: each slot predicts the next token (DSpark); false: its own (DFlash)",
    )
    feature_layers: list[Annotated[int, Ge(0)]] | None = Field(
        None, min_length=1, description="0: embeddings; null: five from 2 to n-2"
    )
    mask: int | Literal["auto", "learned"] = Field(
        "auto",
        description="input of unknown slots: a token id, a learned vector, or auto: an id that no "
        "text contains, else learned",
    )
    conditioning: Literal["none", "markov", "rnn"] = Field(
        "rnn",
        description="on the preceding draft tokens; markov: the previous one adds to the logits; "
        "rnn: all of them, by a recurrence",
    )
    rank: int = Field(64, ge=1, le=MOST_RANKS, description="inner width of the conditioning")
    confidence: bool = Field(
        False, description="also learn the acceptance of each draft, which engines read"
    )
    sliding_window: int | None = Field(
        None, ge=1, description="attention window, at least the block; null: all tokens"
    )
    vocabulary: int | None = Field(
        None, ge=2, description="N most frequent tokens, with an lm_head of their own; null: all"
    )
    lm_head: Literal["own", "shared"] = Field("shared", description="shared: of the target, frozen")
    embeddings: Literal["own", "shared"] = Field("shared", description="shared: of the target")
    labels: Literal["hard", "soft"] = Field("hard", description="soft: the target's distribution")
    decay_tokens: float = Field(4.0, gt=0, description="token k weighs exp(-k/decay_tokens)")
    anchors: int = Field(64, ge=1, description="random blocks per row and step")
    nodes: int = Field(NODES, ge=1, le=MOST_NODES, description="draft tokens in the tree")
    top_k: int | None = Field(None, ge=1, description="nodes expanded per level; null: fixed tree")

    @field_validator("mask", mode="before")
    @classmethod
    def _check_mask(cls, value: Any) -> Any:
        if not re.fullmatch(r"\d+|auto|learned", str(value)):
            raise ValueError("expected a token id, auto or learned")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> BlockChoices:
        if self.top_k is not None:  # refuses too many nodes
            DynamicTree(self.nodes, self.block_size - (not self.sample_from_anchor), self.top_k)
        return self


@dataclass(frozen=True)
class BlockDesign:
    """The architecture of a block head."""

    shape: LayerShape
    rope: Rope
    vocab_size: int  # V
    target_layers: int
    layers: int
    block_size: int  # slots, the anchor's included
    sample_from_anchor: bool  # whether the anchor's slot predicts, too
    feature_layers: tuple[int, ...]  # indices into the target's hidden states, 0 = embeddings
    mask_token: int | None  # None: a learned vector
    conditioning: str | None  # "markov", "rnn" or "domino"
    rank: int  # of the conditioning, or of the selector
    confidence: str | None  # reads "state", or "state+token" with the code of the previous token
    window: int | None  # positions that a slot sees, its own included; None: all
    draft_vocab_size: int
    own_lm_head: bool
    own_embeddings: bool
    gru_size: int = 0  # width of Domino's recurrent state
    candidates: int = 0  # per slot, among which a selector chooses; 0: none
    convolutions: bool = False

    @classmethod
    def of(cls, target: Target, choices: BlockChoices, ids_v: Tensor | None) -> BlockDesign:
        """The choices of a recipe; ids_v: the draft vocabulary, None: all tokens."""
        shape = LayerShape.of(target, choices)
        features = tuple(choices.feature_layers or evenly_spaced(target.layers))
        check_features(features, target)
        has_conditioning = choices.conditioning != "none"
        confidence = "state+token" if has_conditioning else "state"
        return cls(
            shape,
            rope=Rope.of(target, choices, shape.head_dim),
            vocab_size=target.vocab_size,
            target_layers=target.layers,
            layers=choices.layers,
            block_size=choices.block_size,
            sample_from_anchor=choices.sample_from_anchor,
            feature_layers=features,
            mask_token=mask_token(target, choices.mask),
            conditioning=choices.conditioning if has_conditioning else None,
            rank=choices.rank if has_conditioning else 0,
            confidence=confidence if choices.confidence else None,
            window=choices.sliding_window,
            draft_vocab_size=target.vocab_size if ids_v is None else len(ids_v),
            own_lm_head=choices.lm_head == "own" or ids_v is not None,
            own_embeddings=choices.embeddings == "own",
        )

    def __post_init__(self) -> None:
        if self.mask_token is not None and not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"expected a mask token from 0 to {self.vocab_size - 1}, got {self.mask_token}; "
                "correct head.mask, or mask_token_id in config.json"
            )
        if self.candidates and not self.candidates <= self.draft_vocab_size == self.vocab_size:
            raise ValueError(
                f"expected a selector of at most all {self.vocab_size} tokens of the target, got a "
                f"selector_top_k of {self.candidates} and {self.draft_vocab_size} tokens to draft; "
                "get another head"
            )
        if self.window is not None and self.window < self.block_size:
            raise ValueError(
                f"expected a sliding window of at least the {self.block_size} slots of a block, "
                f"which all see each other, got {self.window}; set head.sliding_window"
            )


class Blocks(NamedTuple):
    """The predictions of blocks, at the places of a batch's text."""

    states_MKD: Tensor
    tokens_MK: Tensor  # int64, the token before the predicted one
    places_MK: Tensor  # int64, the predicted token in the flattened batch (B T)
    real_MK: Tensor  # bool, whether a drafter could reach and the target wrote it
    on_host_MK: np.ndarray  # places_MK


class ContextCache(DraftCache):
    """Keys and values of the target's features. The block is written after them, and forgotten."""

    def _append(
        self, tokens_BC: Tensor, features_BCD: Tensor, counts: Sequence[int] | Tensor
    ) -> Tensor:
        self.table.reserve(tokens_BC.shape[1])
        context_BCD = self.read(tokens_BC, features_BCD, self.angles(tokens_BC.shape[1]))
        self.table.advance(counts)
        return context_BCD

    def extend_block(self, slots: int) -> None:
        """Prepare the memories for a block after the newest feature of each row."""
        if self.table.uniform and self.window is None:  # all slots see all that is written
            self.table.reserve(slots)
            for memory in self.memories:
                memory.visible_B1QS = None
        else:
            own_1SS = torch.ones(1, slots, slots, dtype=torch.bool, device=self.device)
            self.extend(own_1SS, torch.arange(slots, device=self.device)[None])


class BlockDrafter(TreeDrafter):
    """One pass over the block per step; a tree grows from its logits, level by level."""

    head: BlockHead
    cache: ContextCache

    def __init__(self, head: BlockHead, target: Target, tree: Tree) -> None:
        super().__init__(head, target, tree)
        self.weight_vD = operand(head.unembed_weight(target))
        self.entries = head.entries()
        self.cache = ContextCache(
            len(head.layers), head.rope, head.window, self._write, target.device
        )

    def propose(self, committed: Committed) -> TokenTree:
        self.cache.commit(committed)
        roots_B = committed.last_tokens_B()
        return self._grow(roots_B, self._slots(roots_B))

    def _slots(self, roots_B: Tensor) -> Tensor:
        """The states (B, K, D) of the slots that predict, as many as the tree is deep."""
        head = self.head
        size = head.design.block_size
        self.cache.extend_block(size)
        x_BSD = head.block(roots_B[:, None], self.target)
        angles = self.cache.angles(size)
        for layer, memory in zip(head.layers, self.cache.memories, strict=True):
            x_BSD = layer(x_BSD, angles, memory)
        states_BSD: Tensor = head.norm(x_BSD)
        return states_BSD[:, -head.depth :][:, : self.depth]

    def _grow(self, roots_B: Tensor, states_BKD: Tensor) -> TokenTree:
        """The tree whose level k has the logits of slot k, conditioned on the tokens before."""
        head = self.head
        builder = self.builder
        builder.start()
        base_BKv = project(states_BKD.to(self.weight_vD.dtype), self.weight_vD).float()
        conditioning = head.conditioning
        selector = head.candidate_selector
        embed = partial(head.embed, target=self.target)
        parts_BKX = states_BKD
        if conditioning is not None:
            parts_BKX = conditioning.prepare(states_BKD)
        tokens_BF = roots_B[:, None]
        carried_BFg = None
        for level in count():
            logits_BFv = base_BKv[:, level, None].expand(-1, tokens_BF.shape[1], -1)
            if conditioning is not None:
                part_B1X = parts_BKX[:, level, None]
                codes_BFr, carried_BFg = conditioning.step(
                    conditioning.read(tokens_BF, embed), part_B1X, carried_BFg
                )
                logits_BFv = logits_BFv + conditioning.output(codes_BFr)
            ids_Bk = None
            if selector is not None:
                logits_Bk, ids_Bk = base_BKv[:, level].topk(head.design.candidates)
                logits_BFv = selector(tokens_BF, states_BKD[:, level], logits_Bk, ids_Bk)
            if not builder.add(logits_BFv, ids_Bk):
                break
            tokens_BF = builder.tokens_BF
            if carried_BFg is not None:
                carried_BFg = gather_nodes(carried_BFg, builder.parents_BF)
        return builder.tree(roots_B)

    def _write(self, tokens_BC: Tensor, features_BCD: Tensor, angles: Angles) -> Tensor:
        context_BCD = self.head.context(features_BCD)
        entries = self.entries(context_BCD, angles)
        for memory, (keys, values) in zip(self.cache.memories, entries, strict=True):
            memory.layer.update(keys, values)
        return context_BCD


class BlockHead(Vocabulary, DraftHead):
    """One pass over a block of slots, and a thin product per level of the tree."""

    kind = "block"
    title = "DSpark"
    paper = "https://github.com/deepseek-ai/DeepSpec"
    Choices = BlockChoices
    choices: BlockChoices
    feature_layers: tuple[int, ...] = ()

    def __init__(self, design: BlockDesign) -> None:
        super().__init__()
        self.design = design
        shape = design.shape
        self.hidden_size = shape.hidden_size
        self.vocab_size = design.vocab_size
        self.feature_layers = design.feature_layers
        self.rope = design.rope
        self.window = design.window
        self.tree: Tree = StaticTree.unfitted(self.depth)
        width = shape.hidden_size
        self.fc = nn.Linear(len(design.feature_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, shape.eps)
        slots = design.block_size if design.convolutions else 0
        layers = (DecoderLayer(shape, qk_norm=True, slots=slots) for _ in range(design.layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(width, shape.eps)
        if design.mask_token is None:
            self.mask_embedding = nn.Parameter(torch.zeros(width))
        if design.own_embeddings:
            self.embed_tokens = nn.Embedding(design.vocab_size, width)
        if design.own_lm_head:
            self.lm_head = nn.Linear(width, design.draft_vocab_size, bias=False)
        self.add_vocabulary(design.draft_vocab_size, design.vocab_size)
        self._add_conditioning()
        self._entries: Cached[Entries] = Cached()
        self.confidence_head: nn.ModuleDict | None = None
        if design.confidence:
            read = width + (design.rank if design.confidence == "state+token" else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(read, 1)})

    def _add_conditioning(self) -> None:
        design = self.design
        width = self.hidden_size
        self.markov_head: Markov | None = None
        self.candidate_selector: Selector | None = None
        if design.candidates:
            self.candidate_selector = Selector(design.rank, width, design.vocab_size)
        elif design.conditioning == "domino":
            gru = nn.GRU(width, design.gru_size, bias=False)
            # its parameters alone, because torch.compile takes no recurrent module
            self.prefix_gru = nn.ParameterDict(gru.named_parameters())
            output = nn.Linear(design.rank, design.draft_vocab_size, bias=False)
            nn.init.zeros_(output.weight)
            narrow = nn.Linear(width + design.gru_size, design.rank, bias=False)
            self.embed_proj = nn.Sequential(narrow, nn.SiLU(), output)
        elif design.conditioning:
            self.markov_head = CONDITIONING[design.conditioning](
                design.rank, width, design.vocab_size, design.draft_vocab_size
            )

    @classmethod
    def create(
        cls,
        target: Target,
        choices: BlockChoices | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> BlockHead:
        """A new head for `target`.

        Raises ValueError for a target whose embeddings or lm_head it cannot share.
        """
        choices = choices or BlockChoices()
        check_embeddings(target)
        ids_v = token_map(vocabulary, target.vocab_size)
        head = cls(BlockDesign.of(target, choices, ids_v))
        head.train_with(choices)
        embedded_VD = target.model.get_input_embeddings().weight.detach()
        if head.design.own_embeddings:
            head.embed_tokens.weight.data.copy_(embedded_VD[: head.vocab_size])
        width = head.design.shape.head_dim
        for name, parameter in head.layers.named_parameters():
            if name.endswith("q_norm.weight"):  # else narrow heads could not attend to few places
                nn.init.constant_(parameter, max(1.0, math.sqrt(SHARP / width)))
        if head.design.mask_token is None:
            own_D = nn.init.normal_(head.mask_embedding).data
            own_D.mul_(embedded_VD.std().to(own_D))  # all may be shapes alone
        head.token_map = ids_v
        if head.design.own_lm_head:
            head.lm_head.weight.data.copy_(lm_head_rows(target, ids_v))
        if head.needs_unembed:
            target.unembed_weight()  # raises here rather than in the first step
        return head

    @property
    def depth(self) -> int:
        return self.design.block_size - (not self.design.sample_from_anchor)

    @property
    def conditioning(self) -> Conditioning | None:
        """What the preceding tokens of a block add; None: nothing."""
        if self.design.conditioning == "domino":
            return Domino(self.prefix_gru, self.embed_proj)
        return self.markov_head

    @property
    def architecture(self) -> str:  # type: ignore[override]
        design = self.design
        if design.candidates or design.convolutions:
            return "DFlash2DraftModel"
        if design.conditioning == "domino":
            return "DFlashDraftModel"
        is_dspark = design.sample_from_anchor or design.conditioning or design.confidence
        return "Qwen3DSparkModel" if is_dspark else "DFlashDraftModel"

    @property
    def needs_unembed(self) -> bool:
        return self.has_soft_labels or not self.design.own_lm_head

    def check_tree(self, tree: Tree) -> None:
        check_fits(tree, self.design.candidates or self.design.draft_vocab_size, self.depth)

    def train_with(self, choices: Any) -> None:
        if self.candidate_selector is not None:
            raise ValueError(
                "expected a head without a selector, which is not trained here, got one of DFlash "
                "2; decode with it, or train another head"
            )
        super().train_with(choices)

    def drafter(self, target: Target, tree: Tree | None = None) -> BlockDrafter:
        return BlockDrafter(self, target, tree or self.tree)

    def refresh(self) -> None:
        self._entries.refresh()

    def unembed_weight(self, target: Target) -> Tensor:
        """The lm_head weight (v, D)."""
        if self.design.own_lm_head:
            return self.lm_head.weight
        return target.unembed_weight()

    def config(self) -> dict[str, Any]:
        """config.json as DeepSpec's, and with DFlash's own section where the head is DFlash's."""
        design = self.design
        attention = "sliding_attention" if design.window else "full_attention"
        shared = {
            "mask_token_id": design.mask_token,
            "target_layer_ids": layer_ids(self.feature_layers),
            **self._later_config(),
        }
        markov_type = MARKOV_TYPES.get(design.conditioning or "")
        return {
            "model_type": "qwen3",
            **design.shape.config(),
            "num_hidden_layers": design.layers,
            "num_target_layers": design.target_layers,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": design.draft_vocab_size,
            "block_size": design.block_size,
            "sample_from_anchor": design.sample_from_anchor,
            **({"dflash_config": shared} if "DFlash" in self.architecture else shared),
            "markov_rank": design.rank if markov_type else 0,
            "markov_head_type": markov_type,
            "enable_confidence_head": design.confidence is not None,
            "confidence_head_with_markov": design.confidence == "state+token",
            "has_own_lm_head": design.own_lm_head,
            "has_embed_tokens": design.own_embeddings,
            "tie_word_embeddings": False,
            "is_causal": False,  # within a block
            "rope_theta": design.rope.theta,
            "rope_scaling": design.rope.scaling,
            "use_sliding_window": design.window is not None,
            "sliding_window": design.window,
            "layer_types": [attention] * design.layers,
        }

    def _later_config(self) -> dict[str, Any]:
        """What DFlash's section says of the parts of Domino and of DFlash 2 that the head has."""
        design = self.design
        config: dict[str, Any] = {}
        if design.conditioning == "domino":
            config |= {
                "projector_type": "domino",
                "emb_dim": design.rank,
                "gru_hidden_dim": design.gru_size,
                "pure_draft_prefix_len": 1,
                "shift_label": design.sample_from_anchor,
            }
        if design.convolutions:
            config |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP}
        if design.candidates:
            config |= {"selector_rank": design.rank, "selector_top_k": design.candidates}
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> BlockHead:
        """Layers, ranks and vocabularies of the tensors; slots, features and RoPE of the config."""
        config = {**config, **(config.get("dflash_config") or {})}
        size, ids, from_anchor = needed(
            config, "block_size", "target_layer_ids", "sample_from_anchor"
        )
        vocab_size, target_layers = needed(config, "vocab_size", "num_target_layers")
        shape = LayerShape.read(config)
        conditioning, rank, gru_size = conditioning_in(config, tensors)
        candidates, confidence = 0, None
        if config.get("selector_rank"):
            rank, candidates = needed(config, "selector_rank", "selector_top_k")
        if "confidence_head.proj.weight" in tensors:
            wide = matrix(tensors, "confidence_head.proj.weight").shape[1] > shape.hidden_size
            confidence = "state+token" if wide else "state"
        words, vocab_size = cls.sizes_in(tensors) or (vocab_size, vocab_size)
        design = BlockDesign(
            shape,
            rope=Rope.read(config, shape.head_dim),
            vocab_size=vocab_size,
            target_layers=target_layers,
            layers=max(1, count_of(tensors, r"layers\.(\d+)\.")),
            block_size=size,
            sample_from_anchor=from_anchor,
            feature_layers=feature_layers(ids),
            mask_token=None if "mask_embedding" in tensors else config.get("mask_token_id"),
            conditioning=conditioning,
            rank=rank,
            gru_size=gru_size,
            confidence=confidence,
            window=config.get("sliding_window"),
            draft_vocab_size=words,
            own_lm_head="lm_head.weight" in tensors,
            own_embeddings="embed_tokens.weight" in tensors,
            candidates=candidates,
            convolutions=bool(config.get("conv_kernel_size")),
        )
        return cls(design)

    def context(self, features_BTD: Tensor) -> Tensor:
        """The target's features as all layers read them, (B, T, D)."""
        features_PX = features_BTD.flatten(0, 1).to(self.fc.weight.dtype)  # as `project`
        context_PD: Tensor = self.hidden_norm(self.fc(features_PX))
        return context_PD.view(*features_BTD.shape[:2], -1)

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """Embeddings (..., D) of token ids; the target's are scaled by itself."""
        if not self.design.own_embeddings:
            return target.embed(tokens)
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded

    def block(self, anchors_BN: Tensor, target: Target) -> Tensor:
        """The input (B, N x slots, D) of the blocks of anchors with these tokens."""
        size = self.design.block_size
        mask = self.design.mask_token
        if mask is not None:
            masks_BNS = F.pad(anchors_BN[:, :, None], (0, size - 1), value=mask)
            return self.embed(masks_BNS.flatten(1), target).to(self.fc.weight.dtype)
        anchors_BN1D = self.embed(anchors_BN, target)[:, :, None].to(self.mask_embedding.dtype)
        masks_BNSD = self.mask_embedding.expand(*anchors_BN.shape, size - 1, -1)
        return torch.cat([anchors_BN1D, masks_BNSD], dim=2).flatten(1, 2)

    def entries(self) -> Entries:
        """Keys and values of all layers, for drafting."""
        layers = cast(Iterable[DecoderLayer], self.layers)
        return self._entries.get(self.layers.parameters(), lambda: Entries(layers))

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """The weighted loss of the blocks of random anchors, as many as make a sum over all learned
        tokens.
        """
        masks = batch.root_masks(self.depth)
        learned_BT = masks[0]
        # at most `anchors` of the learned places of each row, at random, on the host
        noise_BT = np.where(learned_BT, torch.rand(learned_BT.shape).numpy(), -1.0)
        most = min(self.choices.anchors, noise_BT.shape[1])
        chosen_BT = learned_BT & (noise_BT >= -np.sort(-noise_BT)[:, most - 1, None])
        blocks = self._blocks(batch, features_BTD, target, masks, chosen_BT)
        steps_K = torch.arange(self.depth, device=features_BTD.device)
        weights_K = torch.exp(-steps_K / self.choices.decay_tokens)
        share_B1 = learned_BT.sum(1, keepdims=True) / chosen_BT.sum(1, keepdims=True).clip(1)
        share_M = np.broadcast_to(share_B1, chosen_BT.shape)[chosen_BT].astype(np.float32)
        share_M1 = batch.upload(share_M)[:, None]
        weights_MK = (blocks.real_MK * weights_K / weights_K.sum()) * share_M1
        # by predicted token, so that the target's distribution of a token is computed once
        real_MK = np.stack([mask_BT[chosen_BT] for mask_BT in masks], axis=1)
        places_MK = np.where(real_MK, blocks.on_host_MK, chosen_BT.size)
        order_R = places_MK.argsort(axis=None, kind="stable")[: real_MK.sum()]
        rows_R = batch.upload(order_R)
        states_RD, weight_vD, labels_R, plus = self._factors(batch, blocks, target, rows_R)
        weights_R = weights_MK.flatten()[rows_R]
        teacher = soft_labels(
            self,
            features_BTD,
            places_MK.ravel()[order_R],
            target,
            acceptance=self.confidence_head is not None,
        )
        loss, ranks_R, accepted_R = linear_cross_entropy(
            states_RD, weight_vD, labels_R, plus, weights_R=weights_R, teacher=teacher
        )
        if self.confidence_head is not None:
            logits_R = self.confidence(blocks.tokens_MK.flatten()[rows_R], states_RD).float()
            loss = loss + F.binary_cross_entropy_with_logits(
                logits_R, accepted_R, weights_R, reduction="sum"
            )
        return HeadLoss(loss, rank_counts(rows_R % self.depth, ranks_R, self.depth))

    @torch.no_grad()
    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        masks = batch.root_masks(self.depth)
        size = batch.tokens_BT.numel()
        ranks_PK = features_BTD.new_full((size, self.depth), -1).long()
        number_BT = masks[0].cumsum(1) - 1
        for first in range(0, int(number_BT.max()) + 1, EVALUATED):
            part_BT = masks[0] & (number_BT >= first) & (number_BT < first + EVALUATED)
            blocks = self._blocks(batch, features_BTD, target, masks, part_BT)
            factors = self._factors(batch, blocks, target)
            ranks_MK = chunked_ranks(*factors, self.design.candidates).view_as(blocks.real_MK)
            known_MK = blocks.real_MK & (ranks_MK < RANKS)
            ranks_PK[blocks.places_MK[:, 0] - 1] = torch.where(known_MK, ranks_MK, -1)
        return ranks_PK[batch.loss_mask_BT.flatten()]

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Logits (...) of acceptance at slots with these states (..., D), after these tokens."""
        assert self.confidence_head is not None
        if self.design.confidence == "state+token":
            assert self.markov_head is not None
            codes = self.markov_head.markov_w1(tokens)
            states = torch.cat([states, codes], dim=-1)
        logits: Tensor = self.confidence_head["proj"](states)
        return logits[..., 0]

    def _blocks(
        self,
        batch: Batch,
        features_BTD: Tensor,
        target: Target,
        masks: Sequence[np.ndarray],
        chosen_BT: np.ndarray,
    ) -> Blocks:
        """The blocks of some of the roots. masks: `Batch.root_masks`."""
        places_BN, real_BN = padded_places(chosen_BT)
        anchors_BN = batch.upload(places_BN)
        width = len(self.feature_layers) * self.hidden_size
        context_BTD = self.context(features_BTD[..., :width])
        slots = torch.arange(self.design.block_size, device=anchors_BN.device)
        positions_BQ = (batch.positions_BT.gather(1, anchors_BN)[:, :, None] + slots).flatten(1)
        mask_B1QT = self._mask(batch, anchors_BN, positions_BQ)
        # a feature is the state at the position before its token
        context_angles = self.rope(batch.positions_BT - 1)
        angles = self.rope(positions_BQ)

        def advance(layer: DecoderLayer, x_BQD: Tensor) -> Tensor:
            entries = Entries([layer])(context_BTD, context_angles)[0]
            memory = BlockMemory(*entries, mask_B1QT, len(slots), layer.self_attn.shape.heads)
            moved_BQD: Tensor = layer(x_BQD, angles, memory)
            return moved_BQD

        x_BQD = self.block(batch.tokens_BT.gather(1, anchors_BN), target)
        for layer in self.layers:
            x_BQD = self.checkpointed(advance, layer, x_BQD)
        states_BNSD = self.norm(x_BQD).unflatten(1, (-1, len(slots)))
        first_M1 = np.flatnonzero(chosen_BT)[:, None]
        on_host_MK = (first_M1 + np.arange(self.depth)).clip(max=chosen_BT.size - 2) + 1
        places_MK = batch.upload(on_host_MK)
        return Blocks(
            at_places(states_BNSD, batch.upload(np.flatnonzero(real_BN)))[:, -self.depth :],
            batch.tokens_BT.flatten()[places_MK - 1],
            places_MK,
            batch.upload(np.stack([mask_BT[chosen_BT] for mask_BT in masks], axis=1)),
            on_host_MK,
        )

    def _mask(self, batch: Batch, anchors_BN: Tensor, positions_BQ: Tensor) -> Tensor:
        """Which features each slot sees, (B, 1, Q, 1 + T), 0 or -inf: those of its document up to
        its anchor's, which is the state before it; first, the additional key of `joined`.
        """
        positions_BT = batch.positions_BT
        seen_BNT = batch.visible(anchors_BN) & (positions_BT > 0)[:, None]
        seen_BQT = seen_BNT.repeat_interleave(self.design.block_size, dim=1)
        if self.window is not None:
            distance_BQT = positions_BQ[:, :, None] - (positions_BT - 1)[:, None]
            seen_BQT &= distance_BQT < self.window
        mask_BQT = torch.zeros(seen_BQT.shape, device=seen_BQT.device)
        return F.pad(mask_BQT.masked_fill_(~seen_BQT, -torch.inf), (1, 0))[:, None]

    def _factors(
        self, batch: Batch, blocks: Blocks, target: Target, rows_R: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, LowRank | None]:
        """Arguments of `linear_cross_entropy`. rows_R: of all slots (M K); None: all of them."""
        if rows_R is None:
            rows_R = torch.arange(blocks.real_MK.numel(), device=blocks.real_MK.device)
        labels_MK = draft_index(batch.tokens_BT.flatten()[blocks.places_MK], self.token_map)
        labels_MK = labels_MK.masked_fill(~blocks.real_MK, -1)
        plus: LowRank | None = None
        if conditioning := self.conditioning:
            embed = partial(self.embed, target=target)
            codes_MKr = codes_along(conditioning, blocks.tokens_MK, blocks.states_MKD, embed)
            plus = (
                codes_MKr.flatten(0, 1).index_select(0, rows_R),
                conditioning.output.weight,
            )
        weight_vD = self.unembed_weight(target)
        states_RD = blocks.states_MKD.flatten(0, 1).index_select(0, rows_R)
        selector = self.candidate_selector
        if selector is not None:
            codes_Rr = selector.codes(blocks.tokens_MK.flatten()[rows_R], states_RD)
            plus = codes_Rr, selector.successor_codebook
        return states_RD, weight_vD, labels_MK.flatten()[rows_R], plus


class Entries:
    """Keys and values of the context, which layers attend to but do not change; one product for all
    layers.
    """

    def __init__(self, layers: Iterable[DecoderLayer]) -> None:
        attentions = [layer.self_attn for layer in layers]
        self.first = attentions[0]
        self.layers = len(attentions)
        groups = self.first.shape.kv_heads
        weights = [attention.k_proj.weight for attention in attentions]
        weights += [attention.v_proj.weight for attention in attentions]
        self.weight_ED = operand(pack_like(weights[0], torch.cat(weights)))
        self.scale_G1W = torch.cat([a.k_norm.weight.expand(groups, 1, -1) for a in attentions])

    def __call__(self, x_BTD: Tensor, angles: Angles) -> list[tuple[Tensor, Tensor]]:
        """For each layer, (B, G, T, W) of both."""
        kv = project(x_BTD, self.weight_ED)
        kv = kv.view(*kv.shape[:2], -1, self.first.shape.head_dim).transpose(1, 2)
        heads = len(self.scale_G1W)
        k = self.first.turned(kv[:, :heads], self.scale_G1W, angles)
        v = kv[:, heads:]
        return list(zip(k.chunk(self.layers, dim=1), v.chunk(self.layers, dim=1), strict=True))


class BlockMemory:
    """Attention of one layer in training: slots see the features before their anchor, and all slots
    of their own block, which are joined as one more key.

    keys, values: of the features, (B, G, T, W). mask_B1QT: from `BlockHead._mask`.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, mask_B1QT: Tensor, slots: int, heads: int
    ) -> None:
        self.context = extended(*per_query_head(heads, keys, values))
        self.mask_B1QT = mask_B1QT
        self.slots = slots

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        q_BHQW = q_BHQW * q_BHQW.shape[-1] ** -0.5
        parts = (q_BHQW, *per_query_head(q_BHQW.shape[1], k_BGQW, v_BGQW))
        # (B, H, N, slots, W)
        q, k, v = (x.view(*x.shape[:2], -1, self.slots, x.shape[3]) for x in parts)
        scores = q @ k.transpose(3, 4)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        own = torch.softmax(scores, dim=-1).to(v.dtype) @ v
        total = scores.logsumexp(-1, keepdim=True)
        mask_B1QT = self.mask_B1QT.to(q.dtype)
        return joined(q_BHQW, self.context, mask_B1QT, (own.flatten(2, 3), total.flatten(2, 3)))


def evenly_spaced(layers: int) -> tuple[int, ...]:
    """At most five states, evenly from 2 to n - 2 of the n layers' (DeepSpec); of small targets all
    between embeddings and last.
    """
    low, high = (2, layers - 2) if layers > 8 else (1, max(layers - 1, 1))
    number = min(5, high - low + 1)
    step = (high - low) / max(number - 1, 1)
    return tuple(round(low + step * index) for index in range(number))


def mask_token(target: Target, choice: str | int) -> int | None:
    """The token that fills unknown slots: an id that no text contains, or None for a learned
    vector. choice: an id, "learned", or "auto", an id if the tokenizer has one to spare.
    """
    rows = min(target.model.get_input_embeddings().weight.shape[0], target.vocab_size)
    if isinstance(choice, int):
        return choice
    if choice == "learned" or target.tokenizer is None:
        return None
    return spare_token(target.tokenizer, rows, target.eos_ids)


def spare_token(tokenizer: Any, rows: int, ends: Iterable[int]) -> int | None:
    """An id below `rows` that no text contains; None if there is none. ends: tokens that end
    answers.
    """
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id < rows:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < rows:  # rows that pad the matrix
        return len(tokenizer)
    added = {id: token for id, token in tokenizer.added_tokens_decoder.items() if id < rows}
    for id, token in sorted(added.items()):
        if any(part in token.content.lower() for part in RESERVED):
            return int(id)
    taken = {*ends, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    template = str(tokenizer.chat_template)
    spare = [id for id, token in added.items() if token.special and token.content not in template]
    return max(set(spare) - taken, default=None)


def conditioning_in(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[str | None, int, int]:
    """The conditioning of a stored head, its rank, and the width of Domino's state."""
    if config.get("projector_type") == "domino":
        size = matrix(tensors, "prefix_gru.weight_hh_l0").shape[1]
        return "domino", len(matrix(tensors, "embed_proj.0.weight")), size
    if "markov_head.markov_w1.weight" not in tensors:
        return None, 0, 0
    rank = matrix(tensors, "markov_head.markov_w1.weight").shape[1]
    return "rnn" if "markov_head.joint_proj.weight" in tensors else "markov", rank, 0


def layer_ids(features: Iterable[int]) -> list[int]:
    """`target_layer_ids` count the outputs of layers, and -1 are the embeddings; our features, and
    `eagle_aux_hidden_state_layer_ids`, are indices into the hidden states.
    """
    return [index - 1 for index in features]


def feature_layers(ids: Iterable[int]) -> tuple[int, ...]:
    """The inverse of `layer_ids`."""
    return tuple(id + 1 for id in ids)
