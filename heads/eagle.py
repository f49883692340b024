"""EAGLE-1 and EAGLE-3: heads of decoder layers that draft token by token from their own output.

By the alignment law, each position of such a head is a pair (token i, feature i): what the target
generated, and the state from which it did. The pair predicts token i + 1. Where the target has not
been yet, the head's own output replaces the feature. The first token of a document has no feature
and forms no pair.

Legend: B batch, T tokens, P positions of a flattened batch or expanded nodes, Q queries, R unrolled
rows (one root at one step), F nodes expanded together, D feature width of the target, H hidden
width of the head (= D), K steps or depths, V target vocabulary, v draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Ge
from pydantic import Field, model_validator
from torch import Tensor, nn

from draftheads.heads.base import DraftHead, HeadLoss, TreeDrafter
from draftheads.heads.batch import Batch
from draftheads.heads.choices import HeadChoices, LayerSizes
from draftheads.heads.cpu.linear import operand
from draftheads.heads.drafting import Committed, DraftCache
from draftheads.heads.labels import check_labels, soft_labels
from draftheads.heads.layers import (
    Angles,
    DecoderLayer,
    FusingLayer,
    LayerShape,
    Memory,
    Positional,
    RMSNorm,
    Rope,
    check_embeddings,
    check_features,
    project,
)
from draftheads.heads.losses import RANKS, chunked_ranks, linear_cross_entropy, rank_counts
from draftheads.heads.target.model import Target
from draftheads.heads.tensors import count_of, matrix, needed
from draftheads.heads.training_time_test import Unrolled, unroll
from draftheads.heads.tree import MOST_NODES, NODES, DynamicTree, TokenTree, Tree, check_fits
from draftheads.heads.tree_drafting import gather_nodes, grow
from draftheads.heads.vocabulary import Vocabulary, draft_index, lm_head_rows, token_map

SWITCHES = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
"""Keys of config.json, which engines know by these names."""


class UnrolledChoices(HeadChoices):
    """Choices of all heads that are trained on their own output and draft a dynamic tree."""

    decoding_keys = frozenset({"nodes", "depth", "top_k"})

    steps: int = Field(7, ge=1, le=16, description="steps of training-time test")
    labels: Literal["soft", "hard"] = Field("soft", description="soft: the target's distribution")
    decay: float = Field(0.8, gt=0, le=1, description="loss weight decay^k of step k, normalised")
    nodes: int = Field(NODES, ge=1, le=MOST_NODES, description="draft tokens in the dynamic tree")
    depth: int = Field(8, ge=1, le=32, description="depth of the tree = tokens drafted ahead")
    top_k: int = Field(4, ge=1, description="nodes expanded per level, children per node")

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        DynamicTree(self.nodes, self.depth, self.top_k)  # refuses too many nodes
        return self


class DecoderChoices(UnrolledChoices, LayerSizes):
    """Choices of both kinds of EAGLE: decoder layers and a dynamic tree."""

    layers: int = Field(1, ge=1, le=8, description="decoder layers")
    sliding_window: int | None = Field(None, ge=1, description="attention window; null: all tokens")


@dataclass(frozen=True)
class EagleDesign:
    """The architecture of an EAGLE head. Fields from `feature_layers` on only vary in EAGLE-3; the
    norms are those of EAGLE-3.1.
    """

    shape: LayerShape
    rope: Rope
    vocab_size: int  # of the target
    layers: int
    window: int | None  # positions that a layer sees, itself included; None: all
    draft_vocab_size: int
    feature_layers: tuple[int, ...] = (-1,)
    """Indices into the target's hidden states, 0 = embeddings. We read the last state after the
    final norm, serving engines before it, so an EAGLE-3 head that reads it is for our engine only.
    """
    fc_norm: bool = False  # norm each feature before fc
    norm_before_fc: bool = False  # norm the concatenated features
    norm_before_residual: bool = False  # the residual stream starts from the normed feature
    norm_output: bool = False  # the next step reads the normed output
    qk_norm: bool = False  # queries and keys are normed per head, as in Qwen3

    @classmethod
    def of(cls, target: Target, choices: DecoderChoices, **more: Any) -> EagleDesign:
        """The choices of a recipe; more: fields that vary in EAGLE-3."""
        check_embeddings(target)
        shape = LayerShape.of(target, choices)
        rope = Rope.of(target, choices, shape.head_dim)
        window = choices.sliding_window
        return cls(shape, rope, target.vocab_size, choices.layers, window, **more)

    @classmethod
    def read(
        cls, config: dict[str, Any], tensors: dict[str, Tensor], vocab_size: int, **more: Any
    ) -> EagleDesign:
        """The number of layers in the tensors; heads, window, RoPE and norms of the config."""
        layers = max(1, count_of(tensors, r"layers\.(\d+)\."))
        shape = LayerShape.read(config)
        rope = Rope.read(config, shape.head_dim)
        more |= {name: bool(config.get(name)) for name in SWITCHES}
        return cls(shape, rope, vocab_size, layers, config.get("sliding_window"), **more)

    def config(self, **more: int) -> dict[str, Any]:
        """The keys of config.json that EAGLE-1 and EAGLE-3 share."""
        config = {
            "model_type": "qwen3" if self.qk_norm else "llama",
            **self.shape.config(),
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab_size,
            **more,
            "tie_word_embeddings": False,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.scaling,
            "sliding_window": self.window,
            "use_sliding_window": self.window is not None,  # else Qwen3's config drops the window
        }
        if self.window:
            config["layer_types"] = ["sliding_attention"] * self.layers
        return config


class EagleDrafter(TreeDrafter):
    """Grows a tree level by level: the head's own output replaces the features that the target has
    not computed yet.
    """

    head: AutoregressiveHead
    cache: DraftCache

    def __init__(self, head: AutoregressiveHead, target: Target, tree: Tree) -> None:
        super().__init__(head, target, tree)
        self.weight_vD = operand(head.unembed_weight(target))
        self.dtype = next(head.parameters()).dtype
        self.cache = DraftCache(head.layer_count, head.rope, head.window, self._read, target.device)

    def propose(self, committed: Committed) -> TokenTree:
        builder = self.builder
        cache = self.cache
        hidden_BFH = cache.commit(committed)
        angles = zip(*(torch.split(x, 1, dim=2) for x in cache.angles(self.depth)), strict=True)

        def advance(tokens_BF: Tensor, seen_BFP: Tensor, depths_1P: Tensor) -> Tensor:
            nonlocal hidden_BFH
            cache.extend(seen_BFP, depths_1P)
            hidden_BFH = gather_nodes(hidden_BFH, builder.parents_BF)
            hidden_BFH = self._advance(tokens_BF, hidden_BFH, next(angles))
            return self._logits(hidden_BFH)

        return grow(builder, committed.last_tokens_B(), self._logits(hidden_BFH), advance)

    def _read(self, tokens_BQ: Tensor, features_BQD: Tensor, angles: Angles) -> Tensor:
        return self._advance(tokens_BQ, self.head.fuse(features_BQD.to(self.dtype)), angles)

    def _advance(self, tokens_BQ: Tensor, hidden_BQH: Tensor, angles: Angles) -> Tensor:
        embedded_BQD = self.target.embed(tokens_BQ).to(self.dtype)
        return self.head.advance(embedded_BQD, hidden_BQH, angles, self.cache.memories)

    def _logits(self, hidden_BFH: Tensor) -> Tensor:
        states_BFD = self.head.states(hidden_BFH).to(self.weight_vD.dtype)
        return project(states_BFD, self.weight_vD).float()


class AutoregressiveHead(DraftHead):
    """The common part of EAGLE-1, EAGLE-3 and a target's own multi-token prediction."""

    feature_layers: tuple[int, ...] = ()
    choices: UnrolledChoices

    layer_count: int
    rope: Positional
    window: int | None
    draft_vocab_size: int

    def __init__(self) -> None:
        super().__init__()
        self.tree = DynamicTree()

    def train_with(self, choices: UnrolledChoices) -> None:
        """Set the choices of a recipe, which give the tree any depth."""
        self.choices = choices
        self.tree = DynamicTree(choices.nodes, choices.depth, choices.top_k)

    @property
    def depth(self) -> int:
        return self.tree.depth

    def fuse(self, features_BQD: Tensor) -> Tensor:
        """Hidden states (B, Q, H) from the target's features (B, Q, D * number of layers)."""
        return features_BQD

    @abstractmethod
    def advance(
        self, embedded_BQD: Tensor, hidden_BQH: Tensor, angles: Angles, memories: Sequence[Memory]
    ) -> Tensor:
        """One step: the next hidden states, from embedded tokens and hidden states."""

    def states(self, hidden_BQH: Tensor) -> Tensor:
        """The input of the lm_head, from the output of `advance`."""
        return hidden_BQH

    def unembed_weight(self, target: Target) -> Tensor:
        """The lm_head weight (v, D)."""
        return target.unembed_weight()

    def check_tree(self, tree: Tree) -> None:
        check_fits(tree, self.draft_vocab_size)

    def drafter(self, target: Target, tree: Tree | None = None) -> EagleDrafter:
        return EagleDrafter(self, target, tree or self.tree)

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """The weighted loss, summed over steps and learned tokens."""
        steps = self.choices.steps
        unrolled = self._unroll(batch, features_BTD, target, steps)
        weights = self.choices.decay ** torch.arange(steps, device=features_BTD.device).float()
        weights_R = (weights / weights.sum())[unrolled.steps_R]
        loss, ranks_R, _ = linear_cross_entropy(
            *self._predictions(batch, unrolled, target),
            weights_R=weights_R,
            teacher=soft_labels(self, features_BTD, unrolled.on_host_R, target),
        )
        return HeadLoss(loss, rank_counts(unrolled.steps_R, ranks_R, steps))

    @torch.no_grad()
    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        unrolled = self._unroll(batch, features_BTD, target, self.depth)
        ranks_R = chunked_ranks(*self._predictions(batch, unrolled, target))
        ranks_PK = ranks_R.new_full((batch.tokens_BT.numel(), self.depth), -1)
        roots_R = unrolled.places_R - unrolled.steps_R - 1
        ranks_PK[roots_R, unrolled.steps_R] = torch.where(ranks_R < RANKS, ranks_R, -1)
        return ranks_PK[batch.loss_mask_BT.flatten()]

    def _unroll(self, batch: Batch, features_BTD: Tensor, target: Target, steps: int) -> Unrolled:
        width = len(self.feature_layers) * self.hidden_size  # states for labels follow
        inputs_BTD = self.cast(features_BTD[..., :width])
        hidden_BTH = self.checkpointed(self.fuse, inputs_BTD)
        # autocast must not narrow the residual stream
        return unroll(self, batch, hidden_BTH.to(inputs_BTD.dtype), target, steps)

    def _predictions(
        self, batch: Batch, unrolled: Unrolled, target: Target
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of `linear_cross_entropy`: states (R, D), lm_head (v, D), labels (R,)."""
        labels_R = draft_index(batch.tokens_BT.flatten()[unrolled.places_R], self.token_map)
        return self.states(unrolled.hidden_RH), self.unembed_weight(target), labels_R


class DesignedHead(AutoregressiveHead):
    """The common part of EAGLE-1 and EAGLE-3, whose layers are our own."""

    def __init__(self, design: EagleDesign) -> None:
        super().__init__()
        self.design = design
        self.hidden_size = design.shape.hidden_size
        self.vocab_size = design.vocab_size
        self.draft_vocab_size = design.draft_vocab_size
        self.feature_layers = design.feature_layers
        self.layer_count = design.layers
        self.rope = design.rope
        self.window = design.window


class EagleChoices(DecoderChoices):
    """EAGLE-1 (arXiv 2401.15077)."""

    kind: Literal["eagle"] = Field("eagle", description="EAGLE-1: reads the last hidden state")


class EagleHead(DesignedHead):
    """EAGLE-1 (arXiv 2401.15077): predicts the next last-layer feature, which the target's own
    lm_head turns into tokens. It is trained by these tokens alone, on its own output (HASS, arXiv
    2408.15766), without the paper's loss on features.
    """

    kind = "eagle"
    title = "EAGLE"
    paper = "https://arxiv.org/abs/2401.15077"
    Choices = EagleChoices
    choices: EagleChoices
    architecture = "LlamaForCausalLMEagle"
    needs_unembed = True
    token_map = None

    def __init__(self, design: EagleDesign) -> None:
        super().__init__(design)
        width = self.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        # a buffer: ours stays zero, published heads may have one, and SGLang needs it stored
        del self.fc.bias  # it is None
        self.fc.register_buffer("bias", torch.zeros(width))
        self.layers = nn.ModuleList(
            DecoderLayer(design.shape, input_norm=number > 0) for number in range(design.layers)
        )

    @classmethod
    def create(
        cls,
        target: Target,
        choices: EagleChoices | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> EagleHead:
        """A new head for `target`. Its vocabulary is always the target's.

        Raises ValueError for a target whose logits are not lm_head(last state).
        """
        choices = choices or EagleChoices()
        head = cls(EagleDesign.of(target, choices, draft_vocab_size=target.vocab_size))
        target.unembed_weight()  # raises here rather than in the first step
        head.train_with(choices)
        return head

    def advance(
        self, embedded_BQD: Tensor, hidden_BQH: Tensor, angles: Angles, memories: Sequence[Memory]
    ) -> Tensor:
        dtype = hidden_BQH.dtype  # autocast must not narrow the residual stream
        hidden_BQH = self.fc(torch.cat([embedded_BQD, hidden_BQH], dim=-1)).to(dtype)
        for layer, memory in zip(self.layers, memories, strict=True):
            hidden_BQH = layer(hidden_BQH, angles, memory)
        return hidden_BQH

    def config(self) -> dict[str, Any]:
        """config.json for SGLang; other engines differ in `architectures` only. There is no key
        `bias`: vLLM and SGLang apply it to the attention, EAGLE's code to fc.
        """
        return self.design.config()

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> EagleHead:
        (vocab_size,) = needed(config, "vocab_size")
        return cls(EagleDesign.read(config, tensors, vocab_size, draft_vocab_size=vocab_size))


class Eagle3Choices(DecoderChoices):
    """EAGLE-3 (arXiv 2503.01840), with the switches of EAGLE-3.1 (arXiv 2605.09992)."""

    kind: Literal["eagle3"] = Field("eagle3", description="reads three hidden states of the target")
    feature_layers: list[Annotated[int, Ge(0)]] | None = Field(
        None, min_length=1, description="0: embeddings; null: [2, n//2, n-3]"
    )
    vocabulary: int | None = Field(None, ge=2, description="N most frequent tokens; null: all")
    fc_norm: bool = Field(False, description="normalise each of the target's features")
    norm_output: bool = Field(False, description="feed back the normalised output")
    norm_before_fc: bool = Field(False, description="normalise the concatenated features")
    norm_before_residual: bool = Field(False, description="use the normalised feature as residual")
    qk_norm: bool = Field(False, description="normalise queries and keys per head, as Qwen3 does")

    @model_validator(mode="after")
    def _check_together(self) -> Eagle3Choices:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; set one to false")
        return self


class Eagle3Head(Vocabulary, DesignedHead):
    """EAGLE-3 (arXiv 2503.01840): fuses low, middle and high features, predicts tokens directly and
    is trained on its own output. The norms of EAGLE-3.1 are switches of the design.
    """

    kind = "eagle3"
    title = "EAGLE-3"
    paper = "https://arxiv.org/abs/2503.01840"
    Choices = Eagle3Choices
    choices: Eagle3Choices

    def __init__(self, design: EagleDesign) -> None:
        super().__init__(design)
        shape = design.shape
        count = len(design.feature_layers)
        width = shape.hidden_size
        self.fc = nn.Linear(count * width, width, bias=False)
        if design.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, shape.eps) for _ in range(count))
        if design.norm_before_fc:
            self.input_norm = RMSNorm(count * width, shape.eps)
        first = FusingLayer(
            shape, norm_before_residual=design.norm_before_residual, qk_norm=design.qk_norm
        )
        if design.layers == 1:  # the name in published single-layer checkpoints
            self.midlayer = first
        else:
            others = [DecoderLayer(shape, qk_norm=design.qk_norm) for _ in range(design.layers - 1)]
            self.layers = nn.ModuleList([first, *others])
        self.norm = RMSNorm(width, shape.eps)
        self.lm_head = nn.Linear(width, design.draft_vocab_size, bias=False)
        self.add_vocabulary(design.draft_vocab_size, design.vocab_size)

    @classmethod
    def create(
        cls,
        target: Target,
        choices: Eagle3Choices | None = None,
        vocabulary: Sequence[int] | None = None,
    ) -> Eagle3Head:
        """A new head for `target`, whose lm_head it starts from."""
        choices = choices or Eagle3Choices()
        ids_v = token_map(vocabulary, target.vocab_size)
        layers = tuple(choices.feature_layers or low_middle_high(target.layers))
        check_features(layers, target)
        more = {name: getattr(choices, name) for name in (*SWITCHES, "qk_norm")}
        more |= {
            "feature_layers": layers,
            "draft_vocab_size": target.vocab_size if ids_v is None else len(ids_v),
        }
        head = cls(EagleDesign.of(target, choices, **more))
        head.train_with(choices)
        check_labels(head, target)
        head.lm_head.weight.data.copy_(lm_head_rows(target, ids_v))
        head.token_map = ids_v
        return head

    @property
    def architecture(self) -> str:  # type: ignore[override]
        return "Eagle3Qwen3ForCausalLM" if self.design.qk_norm else "LlamaForCausalLMEagle3"

    @property
    def needs_unembed(self) -> bool:
        return self.has_soft_labels

    def fuse(self, features_BQD: Tensor) -> Tensor:
        if self.design.norm_before_fc:
            features_BQD = self.input_norm(features_BQD)
        if self.design.fc_norm:
            parts = features_BQD.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features_BQD = torch.cat(normed, dim=-1)
        fused_PH: Tensor = self.fc(features_BQD.flatten(0, 1))  # as `project`, for slices
        return fused_PH.view(*features_BQD.shape[:2], -1)

    def advance(
        self, embedded_BQD: Tensor, hidden_BQH: Tensor, angles: Angles, memories: Sequence[Memory]
    ) -> Tensor:
        first, *others = [self.midlayer] if self.layer_count == 1 else list(self.layers)
        hidden_BQH = first(embedded_BQD, hidden_BQH, angles, memories[0])
        for layer, memory in zip(others, memories[1:], strict=True):
            hidden_BQH = layer(hidden_BQH, angles, memory)
        return self.norm(hidden_BQH) if self.design.norm_output else hidden_BQH

    def states(self, hidden_BQH: Tensor) -> Tensor:
        normed_BQH: Tensor = hidden_BQH if self.design.norm_output else self.norm(hidden_BQH)
        return normed_BQH

    def unembed_weight(self, target: Target) -> Tensor:
        return self.lm_head.weight

    def config(self) -> dict[str, Any]:
        """config.json for vLLM and SGLang. Layers are indices into hidden states, except in
        `eagle_config`, where SGLang counts outputs of layers.
        """
        design = self.design
        layers = list(self.feature_layers)
        return {
            **design.config(
                draft_vocab_size=design.draft_vocab_size, target_hidden_size=self.hidden_size
            ),
            **{name: getattr(design, name) for name in SWITCHES},
            "eagle_aux_hidden_state_layer_ids": layers,
            "num_aux_hidden_states": len(layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers if layer >= 0],
            },
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
        """Layers and vocabularies of the tensors; the rest of the config."""
        layers = (config.get("draftheads") or {}).get("feature_layers")
        if not layers:
            (layers,) = needed(config, "eagle_aux_hidden_state_layer_ids")
        words = len(matrix(tensors, "lm_head.weight"))
        _, vocab_size = cls.sizes_in(tensors) or (words, words)
        qk_norm = any(name.endswith(".self_attn.q_norm.weight") for name in tensors)
        more = {"feature_layers": tuple(layers), "draft_vocab_size": words, "qk_norm": qk_norm}
        return cls(EagleDesign.read(config, tensors, vocab_size, **more))


def low_middle_high(layers: int) -> tuple[int, ...]:
    """Low, middle and high: [2, n // 2, n - 3] of n layers, as all engines assume; distinct states
    where these coincide (n < 7).
    """
    if layers > 6:
        return 2, layers // 2, layers - 3
    return tuple(sorted({1, layers // 2, layers - 1} - {0}))
