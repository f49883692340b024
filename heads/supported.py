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
    foreign = set(getattr(text, "layer_types", None) or []) - ATTENTION_LAYERS
    used = {model.config._attn_implementation, text._attn_implementation} - set(MASKED)
    reason = None
    if foreign or getattr(model, "_is_stateful", False):
        kinds = ", ".join(sorted(foreign)) or "recurrent"
        reason = (
            f"has layers of type {kinds}, which remember more than keys and values, so they cannot "
            f"be rolled back to the accepted tokens; {ADVICE}"
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
    elif used:
        switch = "sdpa" if model._supports_sdpa else "eager"
        reason = (
            f"runs {used.pop()}, which takes no mask of a tree; call "
            f'model.set_attn_implementation("{switch}") first'
        )
    if reason:
        raise ValueError(f"{describe(model)} {reason}")


def usable_context(model: PreTrainedModel) -> int:
    """How many tokens a text may have: the context, or less where longer texts would be decoded
    otherwise than one token at a time. Warns where it is less.
    """
    config = model.config.get_text_config(decoder=True)
    context: int = getattr(config, "max_position_embeddings", None) or 1 << 30
    limit, reason = _longrope_limit(config), "RoPE factors (longrope) depend on its length"
    if slots := slot_limit(config):
        limit, reason = slots - TREE_ROOM, "attention depends on the numbers of cache slots"
        if limit <= TREE_ROOM:
            raise ValueError(
                f"{describe(model)}: {reason} from {slots} on, expected {2 * TREE_ROOM} or more; "
                f"{ADVICE}"
            )
    if limit is None or context <= limit:
        return context
    warnings.warn(
        f"{describe(model)}: texts are limited to {limit} of {context} tokens, since in longer "
        f"ones {reason}",
        stacklevel=3,
    )
    return limit


def _longrope_limit(config: Any) -> int | None:
    """Up to how many tokens a text has the short factors. transformers chooses by the greatest
    position in a forward, which may hold rows and nodes on both sides of the limit.
    """
    parameters = getattr(config, "rope_parameters", None) or {}  # of the model, or per layer type
    for each in (parameters, *parameters.values()):
        if isinstance(each, dict) and each.get("rope_type") == "longrope":
            return int(each["original_max_position_embeddings"])
    return None


def slot_limit(config: Any) -> int | None:
    """From how many cache slots on a model's attention depends on their numbers, which in a tree
    or a batch are not positions. None: never.
    """
    limit: int | None = None
    if config.model_type == "gpt_neo":
        local = "local" in config.attention_layers
        limit = min(config.max_position_embeddings, config.window_size if local else 1 << 30)
    elif config.model_type == "doge":
        limit = config.keep_window_size
    elif config.model_type == "moshi":
        limit = config.sliding_window
    elif config.model_type == "llama4_text" and config.attn_temperature_tuning:
        limit = config.floor_scale - 1
    return limit
