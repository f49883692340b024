"""EAGLE-1 (arXiv 2401.15077): an autoregressive head that predicts the target's next last-layer
feature; the target's own last matrix turns it into tokens.

Legend: B batch, T tokens, Q positions, D target width = hidden width of the head, R rows that are
judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftheads.heads.autoregressive import AutoregressiveHead, chosen_tree
from draftheads.heads.base import Batch, HeadLoss
from draftheads.heads.decoder import (
    DecoderLayer,
    LayerShape,
    Memory,
    Rope,
    check_embeddings,
    default_rope,
    read_rope,
)
from draftheads.heads.formats.head_config import needed
from draftheads.heads.formats.stored import count_of, matrix
from draftheads.heads.losses import Teacher, linear_cross_entropy
from draftheads.heads.shape import DynamicTree
from draftheads.heads.target import Target
from draftheads.heads.unroll import step_weights, unroll


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
        regression = (self.lean(distances, unrolled.hidden_RH) * weights_R).sum()
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
