"""A decoder layer of the target's own class that attends to the memories of a draft head.

transformers builds the layer from the target's config and looks up its attention by name. Our
attention, registered as IMPLEMENTATION, passes queries, keys and values to the `Memory` of a head,
which stores and masks them. So the layer works in training-time test, in trees and in compiled
steps, and none of its code is copied.

Legend: B batch, Q query positions, H query heads, G key/value heads, W head width, D width.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftheads.heads.hybrid.states import is_mixer
from draftheads.heads.layers import Angles, Memory
from draftheads.heads.target.placement import unpartitioned
from draftheads.heads.target.pretrained import decoder, decoder_layers, final_norm
from draftheads.heads.tensors import check_sizes

IMPLEMENTATION = "draftheads_memory"
"""Our name among the attention implementations of transformers."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention options that memories do not support."""
INSTEAD = "use a head of another kind, such as eagle3"


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention of a layer, as transformers calls it; returns (B, Q, H, W)."""
    others = [name for name in UNSUPPORTED if options.get(name) is not None]
    if others:
        raise ValueError(f"its attention has {', '.join(others)}")
    memory: Memory = options["draft_memory"]
    root = query.shape[-1] ** 0.5
    factor = (options.get("scaling") or 1 / root) * root  # memories divide scores by the root
    if not math.isclose(factor, 1.0, rel_tol=1e-6):
        query = query * factor
    dtype = value.dtype  # under autocast, RoPE widens queries and keys
    out_BHQW = memory.attend(query.to(dtype), key.to(dtype), value)
    return out_BHQW.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _forward)


@dataclass(frozen=True)
class LayerOrigin:
    """Identifies a layer of a model: the target's text config, as JSON, and the layer's number."""

    config: dict[str, Any]
    number: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> LayerOrigin:
        """The layer that a model's MTP layer resembles: the one that its config names, or its last
        one with attention.

        Raises ValueError for a model without such a layer.
        """
        text = config.get_text_config(decoder=True)
        if getattr(text, "mtp_layer_types", None):
            return cls(_as_json(text.get_mtp_config()), 0)
        layers = decoder_layers(empty_model(text))
        types = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
        for number in reversed(range(len(layers))):
            is_attention = types[number] in ("full_attention", "sliding_attention")
            if is_attention and not any(map(is_mixer, layers[number].modules())):  # no states
                return cls(_as_json(text), number)
        raise ValueError(
            f"{text.model_type}: expected a layer with full or sliding attention, found none "
            f"among {len(layers)}; {INSTEAD}"
        )

    def parts(self) -> LayerParts:
        """The layer's modules, with new weights. Raises ValueError if the config gives none."""
        try:
            model = empty_model(text_config(self.config))
            kind = type(decoder_layers(model)[self.number])
            norm = final_norm(model)
        except Exception as error:  # transformers may raise anything for damaged values
            reason = " ".join(str(error).split())
            raise ValueError(
                f"expected the config of a model with a decoder layer {self.number}, got one that "
                f"makes none: {reason:.200}"
            ) from error
        config = model.config  # contains the chosen implementation of experts
        config._attn_implementation = IMPLEMENTATION
        rotary: nn.Module | None = getattr(decoder(model), "rotary_emb", None)
        if rotary is not None:  # else positions are learned
            with torch.device("cpu"):
                rotary = type(rotary)(config=config)
        return LayerParts(config, self.number, kind, norm, rotary)


def _as_json(config: PretrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if not key.startswith("_")}


def text_config(values: dict[str, Any]) -> PretrainedConfig:
    """The config of a `LayerOrigin`."""
    others = json.loads(json.dumps(values), object_hook=_as_float)
    config: PretrainedConfig = AutoConfig.for_model(others.pop("model_type"), **others)
    check_sizes(config)
    return config


def _as_float(values: dict[str, Any]) -> Any:
    """Decode a number that JSON cannot express, such as infinity, from transformers' form."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this config on the meta device."""
    mapping = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    with unpartitioned(), torch.device("meta"):
        model: PreTrainedModel = mapping.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
        )
    return model


@dataclass(frozen=True)
class LayerParts:
    """The classes of transformers and the model's own config, from which a layer is built."""

    config: Any
    number: int
    kind: type[nn.Module]
    like: nn.Module
    """The model's final norm, on the meta device."""
    rotary: nn.Module | None

    def layer(self) -> nn.Module:
        """A layer with new weights. Raises ValueError for a class with attention of its own."""
        takes_type = "layer_type" in inspect.signature(self.kind).parameters  # Bamba's
        options = {"layer_type": self._type} if takes_type else {}
        try:
            return self.kind(self.config, self.number, **options)
        except KeyError as error:
            raise ValueError(
                f"{self.kind.__name__}: its layers cannot draft, as their attention is none that "
                f"transformers lets others replace; {INSTEAD}"
            ) from error

    def norm(self) -> nn.Module:
        """A new norm of the model's own class."""
        eps = getattr(self.like, "variance_epsilon", None) or getattr(self.like, "eps", 1e-6)
        return type(self.like)(self.config.hidden_size, eps=eps)

    def rope(self) -> LayerRope:
        """The positional embedding of the layer."""
        return LayerRope(self.rotary, self._type)

    @property
    def window(self) -> int | None:
        """Number of positions that the layer attends to, its own included; None: all."""
        window: int | None = getattr(self.config, "sliding_window", None)
        is_used = getattr(self.config, "use_sliding_window", True)
        sliding = self._type in (None, "sliding_attention")
        return window if is_used and sliding else None

    @property
    def _type(self) -> str | None:
        types = getattr(self.config, "layer_types", None)
        return types[self.number] if types else None


class LayerRope:
    """The rotary embedding of the target. It is not a module, so it stays float32 when the head is
    cast.

    The embedding depends on the dtype of the layer's input. So a head passes positions on as
    `Angles`, and its layer asks for the embedding.
    """

    def __init__(self, rotary: nn.Module | None, kind: str | None) -> None:
        self.rotary, self._options = rotary, {}
        if rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters:
            self._options = {"layer_type": kind}

    def __call__(self, positions_BQ: Tensor) -> Angles:
        return (positions_BQ[:, None, :, None],)

    def embedding(self, hidden_BQD: Tensor, positions_BQ: Tensor) -> Any:
        """The `position_embeddings` argument of a layer; None if the model has none."""
        if self.rotary is None:
            return None
        if any(buffer.device != positions_BQ.device for buffer in self.rotary.buffers()):
            self.rotary.to(positions_BQ.device)
        if hasattr(self.rotary, "mrope_section"):  # of time, height and width
            positions_BQ = positions_BQ.expand(3, -1, -1)
        return self.rotary(hidden_BQD, position_ids=positions_BQ, **self._options)


def run_layer(
    layer: nn.Module,
    hidden_BQD: Tensor,
    rope: LayerRope,
    angles: Angles,
    memories: Sequence[Memory],
) -> Tensor:
    """The output (B, Q, D) of a layer that attends to one memory."""
    positions_BQ = angles[0][:, 0, :, 0]
    (memory,) = memories
    out: Tensor | tuple[Tensor, ...] = layer(
        hidden_BQD,
        attention_mask=None,
        position_ids=positions_BQ,
        position_embeddings=rope.embedding(hidden_BQD, positions_BQ),
        use_cache=False,
        draft_memory=memory,
    )
    return out if isinstance(out, Tensor) else out[0]


class TrialMemory:
    """Counts how often a layer attends, in a trial."""

    def __init__(self) -> None:
        self.calls = 0

    def attend(self, q_BHQW: Tensor, k_BGQW: Tensor, v_BGQW: Tensor) -> Tensor:
        self.calls += 1
        times = q_BHQW.shape[1] // v_BGQW.shape[1]
        return v_BGQW.repeat_interleave(times, dim=1)


def why_not_runnable(layer: nn.Module, width: int, rope: LayerRope) -> str | None:
    """Runs a trial, and says why a layer does not work with a head's memory; None if it does."""
    parameter = next(layer.parameters())
    memory = TrialMemory()
    hidden_1QD = torch.zeros(1, 2, width, device=parameter.device, dtype=parameter.dtype)
    try:
        angles = rope(torch.tensor([[1, 2]], device=parameter.device))
        with torch.no_grad():
            out_1QD = run_layer(layer, hidden_1QD, rope, angles, [memory])
    except Exception as error:  # a model's own code may raise anything; drafting would meet it
        return " ".join(str(error).split())[:200]
    if memory.calls != 1 or out_1QD.shape != hidden_1QD.shape:
        return "its attention is none that transformers lets others replace"
    return None
