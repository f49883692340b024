"""Properties of a transformers model: its fingerprint, its decoder layers, whether it can be a
target; and how to free its weights.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Cache, PreTrainedModel
from transformers.utils import output_capturing

from draftheads.heads.cpu.attention import IMPLEMENTATION, IN_FLOAT64
from draftheads.heads.hybrid.states import cache_argument, is_mixer
from draftheads.heads.tree import MOST_NODES


def fingerprint(model: PreTrainedModel) -> str:
    """Hex digits that identify a model's weights, equal on every device and in float32 and
    bfloat16; compare them with `same_weights`.

    A model without layers (`heads.target.skeleton`) has digits after four dashes alone: of
    embeddings, final norm and lm_head, which whole models have there, too.

    The first 16 digits hash the parameter names and, in bfloat16, the one-dimensional parameters
    and 64 embedding rows, which are never quantised. After a dash, 8 digits hash the first row of
    every matrix, which a merged adapter changes; they are missing where matrices are quantised or
    not in memory. float16 rounds to other numbers, so digits of float16 models follow two dashes
    and are only compared with each other.
    """
    outside = _outside_digits(model)
    if is_skeleton(model):
        return f"----{outside}"
    digest = hashlib.sha256()
    matrices = hashlib.sha256()
    dense = not getattr(model.config, "quantization_config", None)
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        if parameter.ndim == 1:
            module = model.get_submodule(name.rpartition(".")[0])
            with align_module_device(module):  # it may be on disk
                hash_tensor(digest, model.get_parameter(name))
        elif parameter.is_meta:
            dense = False
        elif dense:
            hash_tensor(matrices, parameter[(0,) * (parameter.ndim - 1)])
    embeddings = model.get_input_embeddings().weight
    _hash_rows(digest, embeddings)
    parts = [digest.hexdigest()[:16], matrices.hexdigest()[:8] if dense else ""]
    order = ["", "", *parts] if embeddings.dtype == torch.float16 else [*parts, "", "", outside]
    return "-".join(order).rstrip("-")


def _outside_digits(model: PreTrainedModel) -> str:
    """8 digits of what surrounds the layers; none where it is not found or quantised, and in
    float16, which rounds to other numbers.
    """
    try:
        modules = outside(model)
    except ValueError:
        return ""
    digest = hashlib.sha256()
    for parameter in (each for module in modules for each in module.parameters()):
        if parameter.is_meta or parameter.dtype == torch.float16:
            return ""
        _hash_rows(digest, parameter)
    return digest.hexdigest()[:8]


def _hash_rows(digest: Any, tensor: Tensor) -> None:
    """About 64 rows of a matrix, or all numbers of a vector."""
    step = 1 if tensor.ndim == 1 else max(1, len(tensor) // 64)
    hash_tensor(digest, tensor[::step].flatten())


def same_weights(known: str | None, now: str | None) -> bool:
    """True if two fingerprints can belong to the same weights: all parts that both have agree."""
    parts = zip((known or "").split("-"), (now or "").split("-"), strict=False)
    return all(not a or not b or a == b for a, b in parts)


def hash_tensor(digest: Any, tensor: Tensor) -> None:
    """Add a tensor's numbers, in bfloat16, to a hash."""
    digest.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy())


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its lm_head."""
    found: nn.Module = model.get_decoder()  # the lm_head, where that is named decoder
    return model.base_model if found is model.get_output_embeddings() else found


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers, in order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in decoder(model).modules():  # outer ones first
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"{type(model).__name__}: expected a list of {count} decoder layers, found none; "
        "use target_placement=whole"
    )


def name_in(model: nn.Module, part: nn.Module) -> str:
    """The name of one of a model's modules."""
    name: str = next(name for name, module in model.named_modules() if module is part)
    return name


FINAL_NORMS = (
    "norm",
    "final_layernorm",
    "final_layer_norm",
    "final_norm",
    "norm_f",
    "ln_f",
    "embedding_norm",
)
"""Names of the norm after the last layer, LFM's last: elsewhere, it is a norm of embeddings."""


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm after the model's last layer. Raises ValueError if none is found."""
    children = dict(decoder(model).named_children())
    for name in FINAL_NORMS:
        if name in children:
            return children[name]
    raise ValueError(
        f"{describe(model)}: expected a final norm ({', '.join(FINAL_NORMS)}), found none in "
        f"{', '.join(children)}"
    )


KEEPS_SOME = hasattr(output_capturing, "resolve_hidden_states_indices")
"""True if transformers can return some hidden states alone, by their places among all."""


class ModelCall:
    """The forward pass of a model over tokens whose keys and values go into a cache of ours."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache_name = cache_argument(type(model))
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self,
        tokens_BN: Tensor,
        mask: Any,
        positions_BN: Tensor,
        cache: Cache,
        *,
        layers: Sequence[int] = (),
        columns: list[int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, N, V), with `columns` those of these tokens alone, and the hidden states of
        `layers`, (B, N, D), concatenated; None for no layers.
        """
        arguments: dict[str, Any] = {self._cache_name: cache}
        if layers:
            arguments["output_hidden_states"] = states_argument(layers)
        if columns is not None and self._keeps_logits:
            arguments["logits_to_keep"] = torch.tensor(columns)  # the last layer may be anywhere
            columns = None
        out = self._model(
            tokens_BN, attention_mask=mask, position_ids=positions_BN, use_cache=True, **arguments
        )
        device = self._model.device
        logits_BNV = out.logits if columns is None else out.logits[:, columns]
        return logits_BNV.to(device), chosen_states(out, layers, device) if layers else None


def states_argument(layers: Sequence[int]) -> list[int] | bool:
    """The argument `output_hidden_states` of transformers, to return at least these."""
    return list(layers) if KEEPS_SOME else True


def chosen_states(out: Any, layers: Sequence[int], device: torch.device) -> Tensor:
    """These of the hidden states that a model returned, (B, T, D), concatenated."""
    chosen = [out.hidden_states[layer].to(device) for layer in layers]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)


@torch.no_grad()
def logits_fault(model: PreTrainedModel, name: str) -> str | None:
    """Why lm_head(hidden) differs from the model's logits; None if it does not, or if a config
    says nothing of the kind about a model without layers.
    """
    config = model.config.get_text_config(decoder=True)
    keys = ("final_logit_softcapping", "logit_scale", "logits_scaling", "dim_model_base")
    causes = [f"{key}={value}" for key in keys if (value := getattr(config, key, None))]
    if is_skeleton(model):
        is_same = all(each.endswith(("=1", "=1.0")) for each in causes)
    else:
        lm_head = model.get_output_embeddings()
        tokens = torch.arange(min(4, len(lm_head.weight)), device=model.device)[None]
        out = model(tokens, use_cache=False, output_hidden_states=states_argument([-1]))
        got = lm_head(out.hidden_states[-1]).float()
        logits = out.logits.float().to(got.device)
        is_same = torch.allclose(got, logits, rtol=1e-3, atol=1e-3)
    if is_same:
        return None
    return (
        f"{name}: lm_head(hidden state) is not this model's logits "
        f"({', '.join(causes) or 'another layer comes between them'}); "
        "use heads with their own lm_head and hard labels"
    )


class Released(nn.Module):
    """Replaces freed weights; raises RuntimeError when it is used."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise RuntimeError(
            "expected weights of the target that Target.release has freed, or never loaded; "
            "load the target again, whole, or ask a server that has it"
        )

    weight = property(forward)


def outside(model: PreTrainedModel) -> list[nn.Module]:
    """The modules around the layers: embeddings, final norm and lm_head. Raises ValueError without
    a final norm.
    """
    return [model.get_input_embeddings(), final_norm(model), model.get_output_embeddings()]


def is_skeleton(model: PreTrainedModel) -> bool:
    """True if the layers of a model were freed, or never loaded."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return any(isinstance(layer, Released) for each in lists for layer in each)


def release(model: PreTrainedModel, *, lm_head: bool, layers: bool) -> int:
    """Free the lm_head, unless it is tied to the embeddings, and all decoder layers. Returns the
    bytes freed in this process.
    """
    size, head, embeddings = 0, model.get_output_embeddings(), model.get_input_embeddings()
    if lm_head and not isinstance(head, Released) and head.weight is not embeddings.weight:
        size += sum(parameter.nbytes for parameter in head.parameters())
        model.set_output_embeddings(Released())
    stack = decoder_layers(model) if layers else nn.ModuleList()
    for number, layer in enumerate(stack):
        for parameter in layer.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            size += local.nbytes
            if local is not parameter:  # fully_shard's root still refers to it
                local.untyped_storage().resize_(0)
        stack[number] = Released()
    return size


ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types whose only state is keys and values."""
RECURRENT = "linear_attention"
"""The layer type that is no attention."""
MASKED = ("eager", "sdpa", IMPLEMENTATION, IN_FLOAT64)
"""Attention implementations that take a mask per query and key."""
COUNTS_SLOTS = ("gpt_neo", "doge", "moshi")
"""Types of models whose attention depends on cache slots, which in a tree or a batch differ from
positions.
"""
ADVICE = "use a causal LM of attention layers with rotary or learned positions, or a hybrid"


def plain_model(model: Any) -> PreTrainedModel:
    """The model without torch.compile's wrapper. Raises ValueError for other wrappers."""
    plain = getattr(model, "_orig_mod", model)
    if not isinstance(plain, PreTrainedModel):
        raise ValueError(
            f"expected a causal LM of transformers, got {type(plain).__name__}; merge a PeftModel "
            "with merge_and_unload(), or load an adapter of heads with Target.attach(folder)"
        )
    return plain


def describe(model: PreTrainedModel) -> str:
    """Class and name, for error messages."""
    return f"{type(model).__name__} ({model.config.name_or_path or model.config.model_type})"


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model that cannot decode a token tree."""
    text = model.config.get_text_config(decoder=True)
    foreign = sorted(set(getattr(text, "layer_types", None) or []) - ATTENTION_LAYERS)
    is_hybrid = any(map(is_mixer, model.modules()))
    if is_hybrid:
        foreign = [kind for kind in foreign if kind.endswith("_attention") and kind != RECURRENT]
    attention = {model.config._attn_implementation, text._attn_implementation} - set(MASKED)
    reason = None
    if foreign or (getattr(model, "_is_stateful", False) and not is_hybrid):
        reason = (
            f"has layers of type {', '.join(foreign) or 'recurrent'}, which take no mask for a "
            f"tree, or keep states of their own; {ADVICE}"
        )
    elif text.model_type in COUNTS_SLOTS:
        reason = f"attends by cache slot instead of position; {ADVICE}"
    elif getattr(text, "altup_num_inputs", None):
        reason = f"has several hidden states per token, and heads read one; {ADVICE}"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        reason = f"takes no position_ids, which tree nodes need; {ADVICE}"
    elif model.get_output_embeddings() is None or not hasattr(text, "hidden_size"):
        reason = (
            "has no lm_head over hidden states of one width; load a causal LM with "
            "AutoModelForCausalLM"
        )
    elif attention:
        switch = "sdpa" if model._supports_sdpa else "eager"
        reason = (
            f"uses {attention.pop()} attention, which takes no tree mask; call "
            f'model.set_attn_implementation("{switch}") first'
        )
    if reason:
        raise ValueError(f"{describe(model)} {reason}")


def usable_context(model: PreTrainedModel) -> int:
    """The longest text, in tokens. Warns where cache slots limit it.

    From `floor_scale` cache slots on, Llama 4 scales attention by their number, which in a tree or
    a batch differs from the position. Text and any tree stay below that.
    """
    config = model.config.get_text_config(decoder=True)
    context: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    if config.model_type != "llama4_text" or not config.attn_temperature_tuning:
        return context
    limit: int = config.floor_scale - 1 - MOST_NODES
    if context > limit:
        warnings.warn(
            f"{describe(model)}: texts are limited to {limit} of {context} tokens, as it scales "
            f"attention by cache slot beyond {config.floor_scale} slots, tree included",
            stacklevel=3,
        )
    return min(context, limit)
