"""The decoder layers of a target in ONNX Runtime: a model whose forward runs them in one call.

The rest of the model (embeddings, RoPE, lm_head) stays as it is, and so do its callers: our caches,
and `generate` with its own.

Legend: B batch, T new tokens, S cache slots before them, L all tokens that a mask is for, D hidden
size, R half the rotated width, P query heads per key head.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from draftheads.heads.cache import SlotCache
from draftheads.heads.hybrid.states import cache_argument
from draftheads.heads.target.masks import Masks
from draftheads.heads.target.pretrained import decoder, decoder_layers, final_norm

if TYPE_CHECKING:
    from draftheads.heads.cpu.onnx_layers import Sizes

FAMILIES = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
"""Types of models whose layers we can write as a graph."""
MOST_ERROR = 0.25
"""The largest error of states in int8, relative to how much they vary."""
GROWTH = 1.125
"""Factor by which caches grow: all their slots are read."""
CHUNK = 128
"""Prompt tokens of a call: attention takes memory for each pair of query and slot."""


def why_not(model: PreTrainedModel) -> str | None:
    """The reason for which the layers of a model cannot run in ONNX Runtime; None if they can."""
    if model.config.model_type not in FAMILIES:
        return f"expected one of {', '.join(FAMILIES)}, got {model.config.model_type}"
    from draftheads.heads.cpu.onnx_layers import ACTIVATIONS, activation

    name = activation(model.config)
    if name not in ACTIVATIONS:
        return f"expected the activation {' or '.join(ACTIVATIONS)}, got {name}"
    return None


@torch.no_grad()
def run_layers(model: PreTrainedModel, tokens_1T: Tensor, sizes: Sizes) -> str | None:
    """Run the layers of a model in ONNX Runtime from now on, in int8, and free them, if its states
    of these tokens stay the same but for rounding; returns the fault if not. sizes: of the inputs
    of linear layers.
    """
    own: Any = decoder(model)
    before_TD = own(tokens_1T).last_hidden_state[0].float()
    layers = OnnxDecoder(model, sizes)
    nn.Module.float(model.get_input_embeddings())
    after_TD = layers(tokens_1T).last_hidden_state[0]
    spread = (before_TD - before_TD.mean(0)).norm(dim=-1).mean()
    error = (after_TD - before_TD).norm(dim=-1).median() / spread
    if not error <= MOST_ERROR:
        return f"expected the same states but for rounding, got others by {error:.0%} of their size"
    own.layers = nn.ModuleList(nn.Module() for _ in own.layers)  # whose number is read
    own.forward = layers
    return None


def decoder_of(model: PreTrainedModel) -> OnnxDecoder | None:
    """The forward of a model whose layers run in ONNX Runtime; None for another model."""
    forward: Any = getattr(decoder(model), "forward", None)
    return forward if isinstance(forward, OnnxDecoder) else None


class OnnxDecoder:
    """The forward of a model's decoder, whose layers and final norm are a program."""

    def __init__(self, model: PreTrainedModel, sizes: Sizes) -> None:
        from draftheads.heads.cpu.onnx_graph import Program
        from draftheads.heads.cpu.onnx_layers import LayersGraph

        self._embed = model.get_input_embeddings()
        own: Any = decoder(model)
        self._rotary = own.rotary_emb
        self._is_typed = "layer_type" in inspect.signature(self._rotary.forward).parameters
        self._masks = Masks(model)
        self._cache_name = cache_argument(type(model))
        layers = decoder_layers(model)
        types = getattr(model.config, "layer_types", None)
        self._types: list[str] = types or [*self._masks.types] * len(layers)
        graph = LayersGraph(layers, final_norm(model), model.config, self._types, sizes)
        self._shapes = graph.shapes
        self._program = Program(graph)

    def __deepcopy__(self, memo: Any) -> OnnxDecoder:
        """The same, as it is frozen."""
        return self

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | list[int] | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        """Runs the decoder's forward. Raises ValueError for padding."""
        cache = options.get(self._cache_name)
        states_BTD = self._embed(input_ids) if inputs_embeds is None else inputs_embeds
        batch, tokens, _ = states_BTD.shape
        length = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = length + torch.arange(tokens)[None]
        positions_BT = position_ids.expand(batch, -1)
        past = self._past(cache, batch)
        inputs = {"states": states_BTD, "tokens": torch.arange(batch * tokens).view(batch, tokens)}
        for number, (keys, values) in enumerate(past, 1):
            inputs |= {f"keys.{number}": keys, f"values.{number}": values}
        for kind in dict.fromkeys(self._types):
            slots = past[self._types.index(kind)][0].shape[2]
            mask = attention_mask[kind] if isinstance(attention_mask, dict) else attention_mask
            if mask is None or mask.ndim == 2:
                _refuse_padding(mask)
                mask = self._chain(positions_BT, length, min(slots, length), kind)
            inputs[f"mask.{kind}"] = self._spread(mask, cache, slots)
            inputs[f"slots.{kind}"] = torch.tensor([slots, tokens])
            inputs |= self._angles(states_BTD, positions_BT, kind)
        last = len(self._types)
        kept = _kept(output_hidden_states, last)
        states = self._run(inputs, {*kept, last} - {0}, cache) | {0: states_BTD}
        return BaseModelOutputWithPast(
            last_hidden_state=states[last],
            hidden_states=tuple(states.get(n) for n in range(last + 1)) if kept else None,
            **{self._cache_name: cache},
        )

    def _run(
        self, inputs: dict[str, Tensor], numbers: Collection[int], cache: Any
    ) -> dict[int, Tensor]:
        """States (B, T, D) after these layers; new keys and values go into the cache."""
        batch, tokens, _ = inputs["states"].shape
        states = {number: torch.empty_like(inputs["states"]) for number in numbers}
        outputs = {f"states.{number}": each for number, each in states.items()}
        new = [] if cache is None else [self._shapes.empty(batch, tokens) for _ in self._types]
        for number, (keys, values) in enumerate(new, 1):
            outputs |= {f"new_keys.{number}": keys, f"new_values.{number}": values}
        self._program({name: each.contiguous() for name, each in inputs.items()}, outputs)
        for layer, (keys, values) in enumerate(new):
            cache.update(keys, values, layer)
        return states

    def settle(self) -> None:
        """Keep the number of threads that torch has now, and free what another one would need."""
        self._program.settle()

    def _past(self, cache: Any, batch: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, with a slot that is hidden where there are none."""
        keys, values = self._shapes.empty(batch, 1)
        nothing = keys.zero_(), values.zero_()
        if cache is None or not cache.layers:
            return [nothing] * len(self._types)
        if isinstance(cache, SlotCache):
            for layer in cache.layers:
                layer.fit()
        return [
            (layer.keys, layer.values) if layer.is_initialized and layer.keys.numel() else nothing
            for layer in cache.layers
        ]

    def _chain(self, positions_BT: Tensor, length: int, slots: int, kind: str) -> Tensor:
        """The mask (B, 1, T, S + T) of tokens that see those before them, as far as their window
        and the cache go.
        """
        tokens = positions_BT.shape[1]
        earlier_1S = torch.arange(length - slots, length)[None]
        key_positions_BL = torch.cat([earlier_1S.expand(len(positions_BT), -1), positions_BT], 1)
        visible_TL = torch.ones(tokens, slots + tokens).tril_(slots) > 0
        masks = self._masks(visible_TL[None], positions_BT, key_positions_BL)
        return masks[kind] if isinstance(masks, dict) else masks  # type: ignore[return-value]

    def _spread(self, mask_B1TL: Tensor, cache: Any, slots: int) -> Tensor:
        """A mask for all slots of the cache before new tokens, (B, 1, P T, S + T). In rows of
        different lengths, `mask_B1TL` has new tokens after those of each row.
        """
        tokens = mask_B1TL.shape[2]
        earlier = mask_B1TL.shape[3] - tokens
        least = torch.finfo(mask_B1TL.dtype).min
        past_B1TS, new_B1TT = mask_B1TL[..., :earlier], mask_B1TL[..., earlier:]
        if isinstance(cache, SlotCache) and not cache.table.uniform:
            lengths_B1 = cache.table.lengths_B[:, None]
            free_BS = torch.arange(earlier)[None] >= lengths_B1
            past_B1TS = past_B1TS.masked_fill(free_BS[:, None, None], least)
            new_BT = lengths_B1 + torch.arange(tokens)[None]
            new_B1TT = mask_B1TL.gather(3, new_BT[:, None, None].expand(-1, 1, tokens, -1))
        past_B1TS = nn.functional.pad(past_B1TS, (0, slots - earlier), value=least)
        spread = torch.cat([past_B1TS, new_B1TT], 3)
        return spread.repeat(1, 1, self._shapes.heads // self._shapes.groups, 1)

    def _angles(self, states_BTD: Tensor, positions_BT: Tensor, kind: str) -> dict[str, Tensor]:
        """Cosines and sines (B T, R), as the model's own RoPE computes them."""
        typed = {"layer_type": kind} if self._is_typed else {}
        tables = self._rotary(states_BTD, position_ids=positions_BT, **typed)
        halves = [each[..., : each.shape[-1] // 2].flatten(0, 1) for each in tables]  # both equal
        return {f"{name}.{kind}": half for name, half in zip(("cos", "sin"), halves, strict=True)}


def _kept(chosen: bool | list[int] | None, last: int) -> Collection[int]:
    """The numbers of hidden states to be returned."""
    if isinstance(chosen, bool) or chosen is None:
        return range(last + 1) if chosen else ()
    return {index % (last + 1) for index in chosen}


def _refuse_padding(mask: Tensor | None) -> None:
    if mask is not None and not mask.all():
        raise ValueError(
            "expected texts without padding, got a mask with some; decode them with draftheads"
        )
