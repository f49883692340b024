"""EAGLE-3 (arXiv 2503.01840): an autoregressive head over fused low, middle and high features,
which guesses tokens directly and is trained as it is used. EAGLE-3.1's norms are switches.

Legend: B batch, T tokens, Q positions, D target width, H hidden width (= D), R rows that are
judged, v draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftheads.heads.autoregressive import AutoregressiveHead, chosen_tree
from draftheads.heads.base import Batch, HeadLoss
from draftheads.heads.decoder import (
    DecoderLayer,
    FusingLayer,
    LayerShape,
    Memory,
    RMSNorm,
    Rope,
    check_embeddings,
    default_rope,
    read_rope,
)
from draftheads.heads.formats.head_config import needed
from draftheads.heads.formats.stored import count_of, integers, matrix
from draftheads.heads.losses import Objective, Teacher, linear_cross_entropy
from draftheads.heads.shape import DynamicTree
from draftheads.heads.target import Target
from draftheads.heads.unroll import step_weights, unroll
from draftheads.heads.vocabulary import check_map, d2t, draft_index, t2d, token_map

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
        fused_BTH = self.lean(self.fuse, self.noisy(inputs_BTD))
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
