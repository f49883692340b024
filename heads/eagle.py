"""EAGLE-1 and EAGLE-3: heads of decoder layers that draft from their own output, token by token.

Legend: B batch, T tokens, P places of a flattened batch, Q queries, R rows that are trained on,
F nodes expanded together, D feature width of the target, H hidden width of the head (= D),
v draft vocabulary.

A position of such a head is a pair (token i, feature i), by the alignment law: what the target
wrote, and the state that it wrote it from. The pair predicts token i + 1, and the head's own output
takes the place of feature i + 1 where the target has not been yet. The first token of a document
has no feature and makes no pair.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.base import RANKS, Committed, Drafter, DraftHead, HeadLoss
from draftheads.heads.batch import Batch
from draftheads.heads.formats.config import needed
from draftheads.heads.formats.stored import count_of, integers, matrix
from draftheads.heads.layers import (
    DecoderLayer,
    FusingLayer,
    LayerShape,
    Memory,
    RMSNorm,
    Rope,
    check_embeddings,
    check_map,
    d2t,
    default_rope,
    draft_index,
    read_rope,
    refresh,
    t2d,
    token_map,
)
from draftheads.heads.losses import Objective, Teacher, chunked_ranks, linear_cross_entropy
from draftheads.heads.target import Target
from draftheads.heads.training_time_test import Unrolled, unroll
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Tree
from draftheads.heads.tree_drafting import Angles, DraftCache, gather_nodes, tree_builder

SWITCHES = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
TRAINING = ("steps", "decay", "noise", "labels", "loss", "regression", "classification")
"""Choices of a recipe that say how a head is trained."""


@dataclass(frozen=True)
class EagleDesign:
    """What an EAGLE head is, without its weights. The fields from feature_layers on are EAGLE-3's;
    the norms are EAGLE-3.1's.
    """

    shape: LayerShape
    rope: Rope
    vocab_size: int  # of the target
    layers: int
    window: int | None  # positions that a layer sees, itself included; None: all
    feature_layers: tuple[int, ...] = (-1,)
    """Indices into the target's hidden states, 0 = embeddings. The last state is taken after the
    final norm here and before it by serving engines, so only our engine can use it in EAGLE-3.
    """
    draft_vocab_size: int = 0
    fc_norm: bool = False  # norm each feature before `fc`
    norm_before_fc: bool = False  # norm them together
    norm_before_residual: bool = False  # the residual stream starts from the normed feature
    norm_output: bool = False  # the head feeds on its normed output

    @classmethod
    def of(cls, target: Target, choices: dict[str, Any], **more: Any) -> EagleDesign:
        """What a recipe chooses."""
        check_embeddings(target)
        shape = LayerShape.of(target, choices)
        rope = Rope(shape.head_dim, *default_rope(target, choices))
        layers, window = choices.get("layers", 1), choices.get("sliding_window")
        more |= {name: bool(choices.get(name)) for name in SWITCHES}
        return cls(shape, rope, target.vocab_size, layers, window, **more)

    @classmethod
    def read(
        cls, config: dict[str, Any], tensors: dict[str, Tensor], vocab_size: int, **more: Any
    ) -> EagleDesign:
        """The number of layers that the tensors have; heads, window and RoPE as the config says."""
        layers = max(1, count_of(tensors, r"layers\.(\d+)\."))
        shape, rope = LayerShape.read(config), read_rope(config)
        more |= {name: bool(config.get(name)) for name in SWITCHES}
        return cls(shape, rope, vocab_size, layers, config.get("sliding_window"), **more)

    def config(self, **vocabulary: int) -> dict[str, Any]:
        """The keys of config.json that EAGLE-1 and EAGLE-3 share."""
        layer_types = {"layer_types": ["sliding_attention"] * self.layers}
        return {
            "model_type": "llama",
            **self.shape.config(),
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab_size,
            **vocabulary,
            "tie_word_embeddings": False,
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.scaling,
            "sliding_window": self.window,
            **(layer_types if self.window else {}),
        }


class AutoregressiveHead(DraftHead):
    """What EAGLE-1 and EAGLE-3 share; what EAGLE-1 does not have is overridden by EAGLE-3."""

    feature_layers: tuple[int, ...] = ()
    steps: int  # of training-time test
    decay = 0.8  # step k weighs decay^k, divided by the sum of these weights
    noise: float  # width of the uniform noise on features in training
    labels = "soft"  # the target's distribution; "hard": the token that came
    loss: Objective = "ce"  # for soft labels
    regression: float | None = None  # weight of EAGLE-1's SmoothL1 loss on features
    classification = 1.0  # beside it, weight of the loss on tokens

    def __init__(self, design: EagleDesign) -> None:
        super().__init__()
        self.design = design
        self.hidden_size, self.vocab_size = design.shape.hidden_size, design.vocab_size
        self.layer_count, self.rope, self.window = design.layers, design.rope, design.window
        self.feature_layers, self.tree = design.feature_layers, DynamicTree()

    def prepare(self, choices: dict[str, Any]) -> None:
        """Take a recipe's choices for training, and its tree."""
        for name in TRAINING:
            if name in choices and getattr(self, name) is not None:
                setattr(self, name, choices[name])
        names = {"nodes": "draft_nodes", "depth": "depth", "top_k": "top_k"}
        self.tree = DynamicTree(**{names[key]: choices[key] for key in names.keys() & choices})

    @property
    def depth(self) -> int:
        return self.tree.depth

    @property
    @abstractmethod
    def token_map(self) -> Tensor | None:
        """int64 (v,): target ids of the draft vocabulary, rising; None: all."""

    def fuse(self, features_BQD: Tensor) -> Tensor:
        """The hidden states (B, Q, H) that represent the target's features."""
        return features_BQD

    @abstractmethod
    def advance(
        self, embedded_BQD: Tensor, hidden_BQH: Tensor, angles: Angles, memories: Sequence[Memory]
    ) -> Tensor:
        """One step: from embedded tokens and hidden states to the next hidden states."""

    def states(self, hidden_BQH: Tensor) -> Tensor:
        """What the last matrix multiplies (B, Q, D), of hidden states that `advance` returned."""
        return hidden_BQH

    def unembed_weight(self, target: Target) -> Tensor:
        """The last matrix, (v, D)."""
        return target.unembed_weight()

    def check_tree(self, tree: Tree) -> None:
        if isinstance(tree, StaticTree):
            tree.check_width(self.vocab_size if self.token_map is None else len(self.token_map))

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        return EagleDrafter(self, target, tree or self.tree)

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """Sum over steps and learned tokens of the weighted loss."""
        inputs_BTD = self._inputs(features_BTD)
        unrolled = self._unroll(batch, self.noisy(inputs_BTD), target, self.steps)
        weights_K = self.decay ** torch.arange(self.steps, dtype=torch.float32)
        weights_K = (weights_K / weights_K.sum()).to(inputs_BTD.device)
        weights_R = weights_K[unrolled.steps_R]
        loss, ranks_R = linear_cross_entropy(
            *self._predictions(batch, unrolled, target),
            weights_R=weights_R,
            teacher=self._teacher(features_BTD, unrolled, target),
        )
        if self.regression is not None:
            true_PD = inputs_BTD.flatten(0, 1)

            def distances(hidden_RH: Tensor) -> Tensor:
                true_RH = true_PD[unrolled.places_R].float()
                return F.smooth_l1_loss(hidden_RH.float(), true_RH, reduction="none").mean(1)

            regression = (self.checkpointed(distances, unrolled.hidden_RH) * weights_R).sum()
            loss = self.regression * regression + self.classification * loss
        cells_R = unrolled.steps_R * (RANKS + 1) + ranks_R
        counts = torch.bincount(cells_R, minlength=self.steps * (RANKS + 1))
        return HeadLoss(loss, counts.view(self.steps, RANKS + 1))

    @torch.no_grad()
    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        unrolled = self._unroll(batch, self._inputs(features_BTD), target, self.depth)
        ranks_R = chunked_ranks(*self._predictions(batch, unrolled, target))
        ranks_PK = ranks_R.new_full((batch.tokens_BT.numel(), self.depth), -1)
        roots_R = unrolled.places_R - unrolled.steps_R - 1
        ranks_PK[roots_R, unrolled.steps_R] = torch.where(ranks_R < RANKS, ranks_R, -1)
        return ranks_PK[batch.loss_mask_BT.flatten()]

    def noisy(self, features_BTD: Tensor) -> Tensor:
        """In training, features with EAGLE's uniform noise: (u - 0.5) noise 512 / T."""
        if not self.training or not self.noise:
            return features_BTD
        width = self.noise * 512 / features_BTD.shape[1]
        return features_BTD + (torch.rand_like(features_BTD) - 0.5) * width

    def _inputs(self, features_BTD: Tensor) -> Tensor:
        """The features that the head reads, without the states that labels are made of."""
        width = len(self.feature_layers) * self.hidden_size
        return features_BTD[..., :width].to(next(self.parameters()).dtype)

    def _unroll(self, batch: Batch, inputs_BTD: Tensor, target: Target, steps: int) -> Unrolled:
        hidden_BTH = self.checkpointed(self.fuse, inputs_BTD)
        # autocast must not narrow the residual stream
        return unroll(self, batch, hidden_BTH.to(inputs_BTD.dtype), target, steps)

    def _predictions(
        self, batch: Batch, unrolled: Unrolled, target: Target
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States (R, D), last matrix (v, D) and labels (R,)."""
        labels_R = draft_index(batch.tokens_BT.flatten()[unrolled.places_R], self.token_map)
        return self.states(unrolled.hidden_RH), self.unembed_weight(target), labels_R

    def _teacher(self, features_BTD: Tensor, unrolled: Unrolled, target: Target) -> Teacher | None:
        if self.labels == "hard":
            return None
        last_PD = features_BTD[..., -self.hidden_size :].flatten(0, 1).to(target.dtype)

        def logits(places: Tensor) -> Tensor:
            return target.unembed(last_PD[places])

        return Teacher(unrolled.places_R, logits, self.token_map, self.loss, self.vocab_size)


class EagleHead(AutoregressiveHead):
    """EAGLE-1 (arXiv 2401.15077): predicts the target's next last-layer feature, which the target's
    own last matrix turns into tokens. With steps > 1 it is unrolled over its own features (HASS,
    arXiv 2408.15766).
    """

    kind = "eagle"
    architecture = "LlamaForCausalLMEagle"
    needs_unembed = True
    token_map = None
    steps, noise = 1, 0.2
    regression: float | None = 1.0
    classification = 0.1

    def __init__(self, design: EagleDesign) -> None:
        super().__init__(design)
        width = self.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        del self.fc.bias  # it is None, and its name is taken
        # no parameter: ours stays zero, published heads may have one. SGLang wants it stored.
        self.fc.register_buffer("bias", torch.zeros(width))
        self.layers = nn.ModuleList(
            DecoderLayer(design.shape, input_norm=number > 0) for number in range(design.layers)
        )

    @classmethod
    def create(cls, target: Target, **choices: Any) -> EagleHead:
        """A new head for `target`. choices: the keys of a recipe's head section, all with defaults.

        Raises ValueError for a target whose logits are not lm_head(last state).
        """
        head = cls(EagleDesign.of(target, choices))
        target.unembed_weight()  # raise here, with the reason, rather than in the first step
        head.prepare(choices)
        return head

    def advance(
        self, embedded_BQD: Tensor, hidden_BQH: Tensor, angles: Angles, memories: Sequence[Memory]
    ) -> Tensor:
        dtype = hidden_BQH.dtype  # of the residual stream, which autocast must not narrow
        hidden_BQH = self.fc(torch.cat([embedded_BQD, hidden_BQH], dim=-1)).to(dtype)
        for layer, memory in zip(self.layers, memories, strict=True):
            hidden_BQH = layer(hidden_BQH, angles, memory)
        return hidden_BQH

    def config(self) -> dict[str, Any]:
        """config.json as SGLang reads it; other engines differ in `architectures` alone. There is
        no key `bias`: vLLM and SGLang take it for one of the attention, EAGLE's code for one of fc.
        """
        return self.design.config()

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> EagleHead:
        (vocab_size,) = needed(config, "vocab_size")
        return cls(EagleDesign.read(config, tensors, vocab_size))


class Eagle3Head(AutoregressiveHead):
    """EAGLE-3 (arXiv 2503.01840): fuses low, middle and high features, predicts tokens directly and
    is trained as it is used. EAGLE-3.1's norms are switches of the design.
    """

    kind = "eagle3"
    architecture = "LlamaForCausalLMEagle3"
    steps, noise = 7, 0.0
    d2t: Tensor
    t2d: Tensor

    def __init__(self, design: EagleDesign) -> None:
        super().__init__(design)
        shape = design.shape
        count, width = len(design.feature_layers), shape.hidden_size
        self.fc = nn.Linear(count * width, width, bias=False)
        if design.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, shape.eps) for _ in range(count))
        if design.norm_before_fc:
            self.input_norm = RMSNorm(count * width, shape.eps)
        first = FusingLayer(shape, norm_before_residual=design.norm_before_residual)
        if design.layers == 1:  # the name that single-layer checkpoints have in the field
            self.midlayer = first
        else:
            others = [DecoderLayer(shape) for _ in range(design.layers - 1)]
            self.layers = nn.ModuleList([first, *others])
        self.norm = RMSNorm(width, shape.eps)
        self.lm_head = nn.Linear(width, design.draft_vocab_size, bias=False)
        if design.draft_vocab_size < design.vocab_size:
            ids = torch.arange(design.draft_vocab_size)
            self.register_buffer("d2t", d2t(ids))
            self.register_buffer("t2d", t2d(ids, design.vocab_size))

    @classmethod
    def create(cls, target: Target, **choices: Any) -> Eagle3Head:
        """A new head for `target`; its last matrix starts as the target's.

        choices: the keys of a recipe's head section, all with defaults; vocabulary: target ids of
        the draft vocabulary, default all.
        """
        ids = token_map(choices.get("vocabulary"), target.vocab_size)
        layers = tuple(choices.get("feature_layers") or default_features(target.layers))
        if not all(0 <= layer <= target.layers for layer in layers):
            raise ValueError(
                f"head.feature_layers: expected indices from 0 (embeddings) to {target.layers} "
                f"(the last state of {target.name}), got {list(layers)}"
            )
        words = target.vocab_size if ids is None else len(ids)
        head = cls(EagleDesign.of(target, choices, feature_layers=layers, draft_vocab_size=words))
        head.prepare(choices)
        if head.labels == "soft":  # raise here, with the reason, rather than in the first step
            target.unembed(torch.zeros(1, target.hidden_size).to(target.device, target.dtype))
        weight_VD = target.model.get_output_embeddings().weight.detach().float().cpu()
        head.lm_head.weight.data.copy_(weight_VD if ids is None else weight_VD[ids])
        if ids is not None:
            head.d2t.copy_(d2t(ids))
            head.t2d.copy_(t2d(ids, target.vocab_size))
        return head

    @property
    def training_layers(self) -> tuple[int, ...]:
        """The features, and for soft labels the last state."""
        return (*self.feature_layers, -1) if self.labels == "soft" else self.feature_layers

    @property
    def needs_unembed(self) -> bool:
        return self.labels == "soft"

    @property
    def token_map(self) -> Tensor | None:
        if self.design.draft_vocab_size == self.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, features_BQD: Tensor) -> Tensor:
        if self.design.norm_before_fc:
            features_BQD = self.input_norm(features_BQD)
        if self.design.fc_norm:
            parts = features_BQD.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features_BQD = torch.cat(normed, dim=-1)
        fused_BQH: Tensor = self.fc(features_BQD)
        return fused_BQH

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
        """config.json as vLLM and SGLang read it; layers are HF's indices, `eagle_config` has
        SGLang's, which count outputs.
        """
        design, layers = self.design, list(self.feature_layers)
        return {
            **design.config(
                draft_vocab_size=design.draft_vocab_size, target_hidden_size=self.hidden_size
            ),
            **{name: getattr(design, name) for name in SWITCHES},
            "eagle_aux_hidden_state_layer_ids": layers,
            "num_aux_hidden_states": len(layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            },
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
        """Layers and vocabularies as the tensors have them; the rest as the config says."""
        layers = (config.get("draftheads") or {}).get("feature_layers")
        if not layers:
            (layers,) = needed(config, "eagle_aux_hidden_state_layer_ids")
        offsets_v, known_V = integers(tensors, "d2t"), integers(tensors, "t2d")
        if offsets_v is not None and known_V is not None:  # one alone is refused as missing
            check_map(offsets_v, known_V)
        words = len(matrix(tensors, "lm_head.weight"))
        vocab_size = words if known_V is None else len(known_V)
        more = {"feature_layers": tuple(layers), "draft_vocab_size": words}
        return cls(EagleDesign.read(config, tensors, vocab_size, **more))


def default_features(layers: int) -> tuple[int, ...]:
    """Low, middle and high: [2, n // 2, n - 3] of the n layers, as all engines assume; where these
    do not differ (n < 8), states that do.
    """
    low, middle, high = 2, layers // 2, layers - 3
    if low < middle < high:
        return low, middle, high
    return tuple(sorted({1, layers // 2, layers - 1} - {0}))


class EagleDrafter:
    """A drafter for one generation: the head's own output takes the place of the features that the
    target has not computed yet.
    """

    def __init__(self, head: AutoregressiveHead, target: Target, tree: Tree) -> None:
        refresh(head)
        self.head, self.target, self.depth = head, target, tree.depth
        self.feature_layers = head.feature_layers
        self.weight_vD = head.unembed_weight(target)
        self.dtype = next(head.parameters()).dtype
        self.cache = DraftCache(head.layer_count, head.rope, head.window, self._read, target.device)
        self.builder = tree_builder(tree, head.token_map, target.device)

    def propose(self, committed: Committed) -> TokenTree:
        builder, cache = self.builder, self.cache
        hidden_BFH = cache.commit(committed)
        builder.start()
        cos, sin = cache.angles(self.depth)
        level, device = 0, hidden_BFH.device
        # of all nodes expanded so far: how far each is after the newest pair, and which of them the
        # newest level sees
        depths_1P = torch.zeros(1, 0, dtype=torch.long, device=device)
        seen_BFP = torch.zeros(len(hidden_BFH), 1, 0, dtype=torch.bool, device=device)
        while builder.add(self._logits(hidden_BFH)):
            tokens_BF, parents_BF = builder.tokens_BF, builder.parents_BF
            rows, nodes = parents_BF.shape
            own_FF = torch.eye(nodes, dtype=torch.bool, device=device)
            seen_BFP = gather_nodes(seen_BFP, parents_BF)  # what the parent sees, and itself
            seen_BFP = torch.cat([seen_BFP, own_FF.expand(rows, -1, -1)], dim=2)
            depths_1P = F.pad(depths_1P, (0, nodes), value=level)
            angles = cos[:, :, level : level + 1], sin[:, :, level : level + 1]
            hidden_BFH = gather_nodes(hidden_BFH, parents_BF)
            cache.extend(seen_BFP, depths_1P)
            hidden_BFH = self._advance(tokens_BF, hidden_BFH, angles)
            level += 1
        return builder.tree(committed.last_tokens_B())

    def _read(self, tokens_BQ: Tensor, features_BQD: Tensor, angles: Angles) -> Tensor:
        return self._advance(tokens_BQ, self.head.fuse(features_BQD.to(self.dtype)), angles)

    def _advance(self, tokens_BQ: Tensor, hidden_BQH: Tensor, angles: Angles) -> Tensor:
        embedded_BQD = self.target.embed(tokens_BQ).to(self.dtype)
        return self.head.advance(embedded_BQD, hidden_BQH, angles, self.cache.memories)

    def _logits(self, hidden_BFH: Tensor) -> Tensor:
        states_BFD = self.head.states(hidden_BFH).to(self.weight_vD.dtype)
        return F.linear(states_BFD, self.weight_vD).float()
