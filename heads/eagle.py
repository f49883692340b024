"""What EAGLE-1 and EAGLE-3 have in common: a head that feeds on its own output, token by token.

Legend: B batch, Q positions, D feature width of the target, H hidden width of the head, v draft
vocabulary.

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

from draftheads.heads.base import Committed, Drafter, DraftHead, HeadLoss
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
    default_rope,
    read_rope,
    refresh,
)
from draftheads.heads.losses import Objective, Teacher, chunked_ranks, linear_cross_entropy
from draftheads.heads.target import Target
from draftheads.heads.training_time_test import step_weights, unroll
from draftheads.heads.tree import DynamicTree, StaticTree, TokenTree, Tree
from draftheads.heads.tree_drafting import DraftCache, tree_builder
from draftheads.heads.vocabulary import check_map, d2t, draft_index, t2d, token_map


class AutoregressiveHead(DraftHead):
    """What unrolling (`heads.unroll`) and drafting (`heads.rollout`) need of a head, and what every
    head that has it can do.
    """

    layer_count: int
    """Decoder layers, each with a memory of its own."""
    rope: Rope
    window: int | None
    """How many positions a draft layer sees, itself included; None: all."""
    noise: float
    """Of the features in training, as EAGLE counts it."""

    @property
    def depth(self) -> int:
        """As deep as the tree goes."""
        return self.tree.depth

    @property
    @abstractmethod
    def token_map(self) -> Tensor | None:
        """int64 (v,): target ids of the draft vocabulary, rising; None: all."""

    @abstractmethod
    def fuse(self, features_BQD: Tensor) -> Tensor:
        """The hidden states (B, Q, H) that stand for the target's features."""

    @abstractmethod
    def advance(
        self,
        embedded_BQD: Tensor,
        hidden_BQH: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: Sequence[Memory],
    ) -> Tensor:
        """One step: from embedded tokens and hidden states to the next hidden states."""

    @abstractmethod
    def states(self, hidden_BQH: Tensor) -> Tensor:
        """What the last matrix multiplies (B, Q, D), of hidden states that `advance` returned."""

    @abstractmethod
    def unembed_weight(self, target: Target) -> Tensor:
        """The last matrix, (v, D)."""

    def check_tree(self, tree: Tree) -> None:
        """Refuse fixed trees wider than the draft vocabulary; any depth will do."""
        if isinstance(tree, StaticTree):
            tree.check_width(self.vocab_size if self.token_map is None else len(self.token_map))

    def drafter(self, target: Target, tree: Tree | None = None) -> Drafter:
        """A drafter that fills `tree` (default: the head's own)."""
        return EagleDrafter(self, target, tree or self.tree)

    @torch.no_grad()
    def token_ranks(self, batch: Batch, features_BTD: Tensor, target: Target) -> Tensor:
        """ranks_MK down to the depth of the tree, along the text that the target wrote."""
        width = len(self.feature_layers) * target.hidden_size
        features_BTD = features_BTD[..., :width].to(next(self.parameters()).dtype)
        unrolled = unroll(self, batch, self.fuse(features_BTD), target, self.depth)
        labels_R = batch.tokens_BT.flatten()[unrolled.places_R]
        ranks_R = chunked_ranks(
            self.states(unrolled.hidden_RH),
            self.unembed_weight(target),
            draft_index(labels_R, self.token_map),
        )
        return unrolled.token_ranks_of(ranks_R, self.depth, batch)

    def noisy(self, features_BTD: Tensor) -> Tensor:
        """In training, features with EAGLE's uniform noise: (u - 0.5) noise 512 / T."""
        if not self.training or not self.noise:
            return features_BTD
        width = self.noise * 512 / features_BTD.shape[1]
        return features_BTD + (torch.rand_like(features_BTD) - 0.5) * width


def chosen_tree(choices: dict[str, Any]) -> DynamicTree:
    """The dynamic tree that a recipe asks for by nodes, depth and top_k."""
    names = {"nodes": "draft_nodes", "depth": "depth", "top_k": "top_k"}
    return DynamicTree(**{names[key]: value for key, value in choices.items() if key in names})


# Drafting with an autoregressive head: commit what the target wrote, then grow a tree level by
# level.
#
# Legend: B batch, Q positions that ask, F nodes that are expanded together, P nodes expanded so
# far, D feature width, H hidden width.


class EagleDrafter:
    """A drafter for one generation: the head's own output takes the place of the features that the
    target has not made yet.
    """

    def __init__(self, head: AutoregressiveHead, target: Target, tree: Tree) -> None:
        refresh(head)
        self.head, self.target, self.tree = head, target, tree
        self.feature_layers = head.feature_layers
        self.layer_count, self.rope, self.window = head.layer_count, head.rope, head.window
        self.weight_vD = head.unembed_weight(target)
        self.dtype = next(head.parameters()).dtype
        self._history = DraftCache(self, target.device)
        self._new_growth = tree_builder(tree, head.token_map, target.device)

    def propose(self, committed: Committed) -> TokenTree:
        """The tree on each row's newest committed token."""
        hidden_BFH = self._history.commit(committed)
        growth, level = self._new_growth(), Level(self._history.angles(self.tree.depth))
        while growth.add(self._logits(hidden_BFH)):
            index_BFH = growth.parents_BF[:, :, None].expand(-1, -1, hidden_BFH.shape[2])
            before = level.seen_BFP.shape[2]
            level.descend(growth.parents_BF)
            self._history.table.reserve(growth.parents_BF.shape[1], after=before)
            memories = self._history.look(level.seen_BFP, level.depths_1P)
            hidden_BFH = self._advance(
                growth.tokens_BF, hidden_BFH.gather(1, index_BFH), level.angles, memories
            )
        return growth.tree(committed.last_tokens_B())

    def read(
        self,
        tokens_BQ: Tensor,
        features_BQD: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: list[Memory],
    ) -> Tensor:
        """As a `Reader`: with the target's features."""
        hidden_BQH = self.head.fuse(features_BQD.to(self.dtype))
        return self._advance(tokens_BQ, hidden_BQH, angles, memories)

    def _advance(
        self,
        tokens_BQ: Tensor,
        hidden_BQH: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: list[Memory],
    ) -> Tensor:
        embedded_BQD = self.target.embed(tokens_BQ).to(self.dtype)
        return self.head.advance(embedded_BQD, hidden_BQH, angles, memories)

    def _logits(self, hidden_BFH: Tensor) -> Tensor:
        states_BFD = self.head.states(hidden_BFH).to(self.weight_vD.dtype)
        return F.linear(states_BFD, self.weight_vD).float()


class Level:
    """The newest level of a growing tree: which of the P nodes expanded so far its F nodes see, how
    far each of the P stands behind the newest committed pair, and the angles of the F.
    """

    def __init__(self, angles_of_levels: tuple[Tensor, Tensor]) -> None:
        self.angles_of_levels, self.number = angles_of_levels, -1
        device = angles_of_levels[0].device
        self.depths_1P = torch.zeros(1, 0, dtype=torch.long, device=device)
        self.seen_BFP = torch.zeros(1, 1, 0, dtype=torch.bool, device=device)

    def descend(self, parents_BF: Tensor) -> None:
        """To the next level: a node sees what its parent saw, and itself."""
        self.number += 1
        rows, nodes = parents_BF.shape
        seen_BFP = self.seen_BFP.expand(rows, -1, -1)
        index_BFP = parents_BF[:, :, None].expand(-1, -1, seen_BFP.shape[2])
        own_FF = torch.eye(nodes, dtype=torch.bool, device=parents_BF.device)
        own_BFF = own_FF.expand(rows, -1, -1)
        self.seen_BFP = torch.cat([seen_BFP.gather(1, index_BFP), own_BFF], dim=2)
        self.depths_1P = F.pad(self.depths_1P, (0, nodes), value=self.number)
        cos, sin = (each[:, :, self.number : self.number + 1] for each in self.angles_of_levels)
        self.angles = cos, sin


# EAGLE-1 (arXiv 2401.15077): an autoregressive head that predicts the target's next last-layer
# feature; the target's own last matrix turns it into tokens.
#
# Legend: B batch, T tokens, Q positions, D target width = hidden width of the head, R rows that are
# judged.


@dataclass(frozen=True)
class EagleDesign:
    """What an EAGLE-1 head is, without its weights. vocab_size: of the target. window: positions
    that a layer sees, None: all.
    """

    shape: LayerShape
    rope: Rope
    vocab_size: int
    layers: int = 1
    window: int | None = None


class FixedBias(nn.Linear):
    """A matrix whose bias is no parameter: published heads may have one, ours stays zero. It is
    stored nonetheless, as SGLang draws a bias that it does not find, and vLLM has none.
    """

    def __init__(self, wide: int, width: int) -> None:
        super().__init__(wide, width, bias=False)
        del self.bias  # it is None, and its name is taken
        self.register_buffer("bias", torch.zeros(width))


class EagleHead(AutoregressiveHead):
    """The head: fc over token and feature, then decoder layers, the first without an input norm.

    regression, classification: weights of the SmoothL1 loss on features and of the cross-entropy
    on the target's distribution. steps: 1, or more to unroll it over its own features (HASS, arXiv
    2408.15766), step k weighing decay^k. noise: width of the uniform noise on features in training.
    labels: of the cross-entropy, "soft" or "hard".
    """

    kind = "eagle"
    architecture = "LlamaForCausalLMEagle"

    def __init__(self, design: EagleDesign) -> None:
        super().__init__()
        self.design = design
        self.hidden_size, self.vocab_size = design.shape.hidden_size, design.vocab_size
        self.layer_count, self.rope, self.window = design.layers, design.rope, design.window
        self.steps, self.decay, self.noise, self.labels = 1, 0.8, 0.2, "soft"
        self.regression, self.classification = 1.0, 0.1
        self.tree = DynamicTree()
        width = self.hidden_size
        self.fc = FixedBias(2 * width, width)
        self.layers = nn.ModuleList(
            DecoderLayer(design.shape, input_norm=number > 0) for number in range(design.layers)
        )

    @classmethod
    def create(cls, target: Target, **choices: Any) -> EagleHead:
        """A new head for `target`. choices: the keys of a recipe's head section, all with
        defaults.

        Raises ValueError for a target whose logits are not lm_head(last state).
        """
        check_embeddings(target)
        target.unembed_weight()  # raise here, with the reason, rather than in the first step
        shape = LayerShape.of(target, choices)
        head = cls(
            EagleDesign(
                shape,
                Rope(shape.head_dim, *default_rope(target, choices)),
                target.vocab_size,
                choices.get("layers", 1),
                choices.get("sliding_window"),
            )
        )
        for name in ("steps", "decay", "noise", "labels", "regression", "classification"):
            setattr(head, name, choices.get(name, getattr(head, name)))
        head.tree = chosen_tree(choices)
        return head

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The last hidden state, after the final norm."""
        return (-1,)

    @property
    def needs_unembed(self) -> bool:
        """Always: it has no last matrix of its own."""
        return True

    @property
    def token_map(self) -> Tensor | None:
        """The target's whole vocabulary."""
        return None

    def fuse(self, features_BQD: Tensor) -> Tensor:
        """The features themselves."""
        return features_BQD

    def advance(
        self,
        embedded_BQD: Tensor,
        hidden_BQH: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: Sequence[Memory],
    ) -> Tensor:
        """The next feature."""
        dtype = hidden_BQH.dtype  # autocast must not narrow the residual stream
        hidden_BQH = self.fc(torch.cat([embedded_BQD, hidden_BQH], dim=-1)).to(dtype)
        for layer, memory in zip(self.layers, memories, strict=True):
            hidden_BQH = layer(hidden_BQH, angles, memory)
        return hidden_BQH

    def states(self, hidden_BQH: Tensor) -> Tensor:
        """The predicted features, which the target's last matrix takes as they are."""
        return hidden_BQH

    def unembed_weight(self, target: Target) -> Tensor:
        """The target's, frozen."""
        return target.unembed_weight()

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """Sum over steps and learned tokens of the weighted regression and classification loss."""
        features_BTD = features_BTD.to(self.fc.weight.dtype)
        unrolled = unroll(self, batch, self.noisy(features_BTD), target, self.steps)
        weights_R = step_weights(self.steps, self.decay).to(features_BTD.device)[unrolled.steps_R]
        true_PD = features_BTD.flatten(0, 1)

        def distances(hidden_RH: Tensor) -> Tensor:
            true_RH = true_PD[unrolled.places_R].float()
            return F.smooth_l1_loss(hidden_RH.float(), true_RH, reduction="none").mean(1)

        teacher = Teacher(
            unrolled.places_R, lambda places: target.unembed(true_PD[places].to(target.dtype))
        )
        loss, ranks_R = linear_cross_entropy(
            unrolled.hidden_RH,
            self.unembed_weight(target),
            batch.tokens_BT.flatten()[unrolled.places_R],
            weights_R=weights_R,
            teacher=teacher if self.labels == "soft" else None,
        )
        regression = (self.checkpointed(distances, unrolled.hidden_RH) * weights_R).sum()
        return HeadLoss(
            self.regression * regression + self.classification * loss,
            unrolled.counts(ranks_R, self.steps),
        )

    def config(self) -> dict[str, Any]:
        """config.json as SGLang reads it; other engines differ in `architectures` alone. There is
        no key `bias`: vLLM and SGLang take it for one of the attention, EAGLE's code for one of fc.
        """
        design = self.design
        return {
            "model_type": "llama",
            **design.shape.config(),
            "num_hidden_layers": design.layers,
            "vocab_size": design.vocab_size,
            "tie_word_embeddings": False,
            "rope_theta": design.rope.theta,
            "rope_scaling": design.rope.scaling,
            "sliding_window": design.window,
            **({"layer_types": ["sliding_attention"] * design.layers} if design.window else {}),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> EagleHead:
        """Widths and layers as the tensors have them; the rest as the config says."""
        matrix(tensors, "fc.weight")
        (vocab_size,) = needed(config, "vocab_size")
        return cls(
            EagleDesign(
                LayerShape.read(config),
                read_rope(config),
                vocab_size,
                max(1, count_of(tensors, r"layers\.(\d+)\.")),
                config.get("sliding_window"),
            )
        )


# EAGLE-3 (arXiv 2503.01840): an autoregressive head over fused low, middle and high features,
# which guesses tokens directly and is trained as it is used. EAGLE-3.1's norms are switches.
#
# Legend: B batch, T tokens, Q positions, D target width, H hidden width (= D), R rows that are
# judged, v draft vocabulary.


SWITCHES = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")


@dataclass(frozen=True)
class Eagle3Design:
    """What an EAGLE-3 head is, without its weights.

    feature_layers: indices into the target's hidden states, 0 = embeddings; the last one is taken
    after the final norm here and before it by serving engines, so only our engine can use it.
    vocab_size: of the
    target; draft_vocab_size: of the head. window: positions that a layer sees, None: all. fc_norm:
    norm each feature before `fc`; norm_before_fc: norm them together; norm_before_residual: the
    residual stream starts from the normed feature; norm_output: the head feeds on its normed
    output.
    """

    shape: LayerShape
    rope: Rope
    feature_layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    layers: int = 1
    window: int | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3Head(AutoregressiveHead):
    """The head. steps: of training-time test. decay: step k weighs decay^k. labels: "soft" (the
    target's distribution) or "hard" (the token that came). loss: an `Objective` of `heads.losses`.
    noise: width of the uniform noise on features in training.
    """

    kind = "eagle3"
    architecture = "LlamaForCausalLMEagle3"
    d2t: Tensor
    t2d: Tensor

    def __init__(self, design: Eagle3Design) -> None:
        super().__init__()
        shape = design.shape
        self.design = design
        self.hidden_size, self.vocab_size = shape.hidden_size, design.vocab_size
        self.layer_count, self.rope, self.window = design.layers, design.rope, design.window
        self.steps, self.decay, self.noise, self.labels = 7, 0.8, 0.0, "soft"
        self.loss: Objective = "ce"
        self.tree = DynamicTree()
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
        check_embeddings(target)
        ids = token_map(choices.get("vocabulary"), target.vocab_size)
        layers = tuple(choices.get("feature_layers") or default_features(target.layers))
        if not all(0 <= layer <= target.layers for layer in layers):
            raise ValueError(
                f"head.feature_layers: expected indices from 0 (embeddings) to {target.layers} "
                f"(the last state of {target.name}), got {list(layers)}"
            )
        shape = LayerShape.of(target, choices)
        head = cls(
            Eagle3Design(
                shape,
                Rope(shape.head_dim, *default_rope(target, choices)),
                layers,
                target.vocab_size,
                target.vocab_size if ids is None else len(ids),
                choices.get("layers", 1),
                choices.get("sliding_window"),
                **{name: bool(choices.get(name)) for name in SWITCHES},
            )
        )
        for name in ("steps", "decay", "labels", "loss", "noise"):
            setattr(head, name, choices.get(name, getattr(head, name)))
        head.tree = chosen_tree(choices)
        if head.labels == "soft":  # raise here, with the reason, rather than in the first step
            target.unembed(torch.zeros(1, target.hidden_size).to(target.device, target.dtype))
        weight_VD = target.model.get_output_embeddings().weight.detach().float().cpu()
        head.lm_head.weight.data.copy_(weight_VD if ids is None else weight_VD[ids])
        if ids is not None:
            head.d2t.copy_(d2t(ids))
            head.t2d.copy_(t2d(ids, target.vocab_size))
        return head

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Low, middle and high states."""
        return self.design.feature_layers

    @property
    def training_layers(self) -> tuple[int, ...]:
        """The features, and for soft labels the last state, which the target's words come from."""
        return (*self.feature_layers, -1) if self.labels == "soft" else self.feature_layers

    @property
    def needs_unembed(self) -> bool:
        """For soft labels."""
        return self.labels == "soft"

    @property
    def token_map(self) -> Tensor | None:
        """int64 (v,), from `d2t`."""
        if self.design.draft_vocab_size == self.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, features_BQD: Tensor) -> Tensor:
        """fc of all features, normed before where the design says so: together, then each."""
        if self.design.norm_before_fc:
            features_BQD = self.input_norm(features_BQD)
        if self.design.fc_norm:
            parts = features_BQD.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features_BQD = torch.cat(normed, dim=-1)
        fused_BQH: Tensor = self.fc(features_BQD)
        return fused_BQH

    def advance(
        self,
        embedded_BQD: Tensor,
        hidden_BQH: Tensor,
        angles: tuple[Tensor, Tensor],
        memories: Sequence[Memory],
    ) -> Tensor:
        """The decoder layers; normed where the design says that the head feeds on that."""
        first, *others = [self.midlayer] if self.layer_count == 1 else list(self.layers)
        hidden_BQH = first(embedded_BQD, hidden_BQH, angles, memories[0])
        for layer, memory in zip(others, memories[1:], strict=True):
            hidden_BQH = layer(hidden_BQH, angles, memory)
        return self.norm(hidden_BQH) if self.design.norm_output else hidden_BQH

    def states(self, hidden_BQH: Tensor) -> Tensor:
        """The final norm, where `advance` has not done it."""
        normed_BQH: Tensor = hidden_BQH if self.design.norm_output else self.norm(hidden_BQH)
        return normed_BQH

    def unembed_weight(self, target: Target) -> Tensor:
        """The head's own."""
        return self.lm_head.weight

    def forward(self, batch: Batch, features_BTD: Tensor, target: Target) -> HeadLoss:
        """Sum over steps and learned tokens of the weighted loss."""
        width = self.fc.in_features
        inputs_BTD = features_BTD[..., :width].to(self.fc.weight.dtype)
        fused_BTH = self.checkpointed(self.fuse, self.noisy(inputs_BTD))
        unrolled = unroll(self, batch, fused_BTH, target, self.steps)
        weights_K = step_weights(self.steps, self.decay).to(fused_BTH.device)
        teacher = None
        if self.labels == "soft":
            last_PD = features_BTD[..., width:].flatten(0, 1).to(target.dtype)
            teacher = Teacher(
                unrolled.places_R,
                lambda places: target.unembed(last_PD[places]),
                self.token_map,
                self.loss,
                self.vocab_size,
            )
        loss, ranks_R = linear_cross_entropy(
            self.states(unrolled.hidden_RH),
            self.lm_head.weight,
            draft_index(batch.tokens_BT.flatten()[unrolled.places_R], self.token_map),
            weights_R=weights_K[unrolled.steps_R],
            teacher=teacher,
        )
        return HeadLoss(loss, unrolled.counts(ranks_R, self.steps))

    def config(self) -> dict[str, Any]:
        """config.json as vLLM and SGLang read it; layers are HF's indices, `eagle_config` has
        SGLang's, which count outputs.
        """
        design = self.design
        layers = list(design.feature_layers)
        ids = {
            "eagle_aux_hidden_state_layer_ids": layers,
            "num_aux_hidden_states": len(layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            },
        }
        return {
            "model_type": "llama",
            **design.shape.config(),
            "num_hidden_layers": design.layers,
            "vocab_size": design.vocab_size,
            "draft_vocab_size": design.draft_vocab_size,
            "target_hidden_size": design.shape.hidden_size,
            "tie_word_embeddings": False,
            "rope_theta": design.rope.theta,
            "rope_scaling": design.rope.scaling,
            "sliding_window": design.window,
            **({"layer_types": ["sliding_attention"] * design.layers} if design.window else {}),
            **{name: getattr(design, name) for name in SWITCHES},
            **ids,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Eagle3Head:
        """Widths, layers and vocabularies as the tensors have them; heads, norms and RoPE as the
        config says, with the field's defaults.
        """
        shape = LayerShape.read(config)
        width, wide = matrix(tensors, "fc.weight").shape
        facts = config.get("draftheads") or {}
        layers = facts.get("feature_layers")
        if not layers:
            (layers,) = needed(config, "eagle_aux_hidden_state_layer_ids")
        if width != shape.hidden_size or wide != len(layers) * width:
            raise ValueError(
                f"expected fc.weight of ({shape.hidden_size}, {len(layers)} x {shape.hidden_size}) "
                f"for feature layers {layers}, got ({width}, {wide})"
            )
        offsets_v, known_V = integers(tensors, "d2t"), integers(tensors, "t2d")
        if offsets_v is not None and known_V is not None:  # one alone is refused as missing
            check_map(offsets_v, known_V)
        draft_size = len(matrix(tensors, "lm_head.weight"))
        return cls(
            Eagle3Design(
                shape,
                read_rope(config),
                tuple(layers),
                draft_size if known_V is None else len(known_V),
                draft_size,
                max(1, count_of(tensors, r"layers\.(\d+)\.")),
                config.get("sliding_window"),
                **{name: bool(config.get(name)) for name in SWITCHES},
            )
        )


def default_features(layers: int) -> tuple[int, ...]:
    """Low, middle and high: [2, n // 2, n - 3] of the n layers, as all engines assume; where these
    do not differ (n < 8), states that do.
    """
    low, middle, high = 2, layers // 2, layers - 3
    if low < middle < high:
        return low, middle, high
    return tuple(sorted({1, layers // 2, layers - 1} - {0}))
