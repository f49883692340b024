"""Which models can be targets, by what their config says."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from transformers import PreTrainedModel

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types that keep keys and values, and nothing else."""
MASKED = ("eager", "sdpa")
"""Implementations of attention that take a mask per query and key."""
TREE_ROOM = 64
"""Slots left for a tree where a model counts cache slots and its context is limited for it."""
ADVICE = "use a causal LM with attention layers alone and rotary or learned positions"


def plain_model(model: Any) -> PreTrainedModel:
    """The model itself, out of torch.compile's wrapper. Raises ValueError for other wrappers."""
    plain = getattr(model, "_orig_mod", model)
    if not isinstance(plain, PreTrainedModel):
        raise ValueError(
            f"expected a causal LM of transformers, got {type(plain).__name__}; of a PeftModel, "
            "pass what its merge_and_unload() returns, and an adapter that heads were trained with "
            "by Target.attach(folder)"
        )
    return plain


def describe(model: PreTrainedModel) -> str:
    """Class and name, for messages."""
    return f"{type(model).__name__} ({model.config.name_or_path or model.config.model_type})"


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise ValueError, with the reason, for a model that cannot follow a token tree."""
    text = model.config.get_text_config(decoder=True)
    foreign = sorted(set(getattr(text, "layer_types", None) or []) - ATTENTION_LAYERS)
    attention = {model.config._attn_implementation, text._attn_implementation} - set(MASKED)
    reason = None
    if foreign or getattr(model, "_is_stateful", False):
        reason = (
            f"has layers of type {', '.join(foreign) or 'recurrent'}, which remember more than "
            f"keys and values and cannot be rolled back to the accepted tokens; {ADVICE}"
        )
    elif getattr(text, "altup_num_inputs", None):
        reason = f"keeps several hidden states per token, of which no head can read one; {ADVICE}"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        reason = f"takes no position_ids, which a tree's nodes need; {ADVICE}"
    elif model.get_output_embeddings() is None or not hasattr(text, "hidden_size"):
        reason = (
            "has no lm_head over hidden states of one width; load a causal LM with "
            "AutoModelForCausalLM"
        )
    elif attention:
        switch = "sdpa" if model._supports_sdpa else "eager"
        reason = (
            f"runs {attention.pop()}, which takes no mask of a tree; call "
            f'model.set_attn_implementation("{switch}") first'
        )
    if reason:
        raise ValueError(f"{describe(model)} {reason}")


def slot_limit(config: Any) -> int | None:
    """From how many cache slots on a model's attention depends on their number, which in a tree or
    in a batch is not that of the text's tokens. None: never.
    """
    limit: int | None = None
    if config.model_type == "gpt_neo":
        limit = config.max_position_embeddings
        if "local" in config.attention_layers:
            limit = min(config.max_position_embeddings, config.window_size)
    elif config.model_type == "doge":
        limit = config.keep_window_size
    elif config.model_type == "moshi":
        limit = config.sliding_window
    elif config.model_type == "llama4_text" and config.attn_temperature_tuning:
        limit = config.floor_scale - 1
    return limit


def usable_context(model: PreTrainedModel) -> int:
    """How many tokens a text may have. Warns where cache slots limit it."""
    config = model.config.get_text_config(decoder=True)
    context: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    slots = slot_limit(config)
    if slots is None or context <= slots - TREE_ROOM:
        return context
    if slots <= 2 * TREE_ROOM:
        raise ValueError(
            f"{describe(model)} attends by cache slot beyond {slots} slots, where a tree has "
            f"positions; expected that only beyond {2 * TREE_ROOM}; {ADVICE}"
        )
    warnings.warn(
        f"{describe(model)}: texts are limited to {slots - TREE_ROOM} of {context} tokens, since "
        f"beyond {slots} cache slots, a tree's included, it attends by slot",
        stacklevel=3,
    )
    return slots - TREE_ROOM
