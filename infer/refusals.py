"""What of `generate`'s many arguments draft heads can honour. The rest is refused, never ignored.

Legend: B batch, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process as processing
from transformers.generation.configuration_utils import GenerationMode

from draftheads.infer.accept import check_temperature

WARPERS: tuple[type, ...] = (
    processing.TemperatureLogitsWarper,
    processing.TopHLogitsWarper,
    processing.TopKLogitsWarper,
    processing.TopPLogitsWarper,
    processing.MinPLogitsWarper,
    processing.TypicalLogitsWarper,
    processing.EpsilonLogitsWarper,
    processing.EtaLogitsWarper,
)
"""What `do_sample` brings; none of them looks at the tokens before."""
MEMORYLESS: tuple[type, ...] = (
    *WARPERS,
    processing.SuppressTokensLogitsProcessor,
    processing.InfNanRemoveLogitsProcessor,
)
USED = {"input_ids", "attention_mask", "position_ids"}
USED |= {"past_key_values", "logits_to_keep", "use_cache"}
"""What `generate` prepares for any model."""
KEPT_BY_GENERATE = ("scores", "logits", "attentions", "hidden_states")


def check_config(config: GenerationConfig, assistant: Any) -> None:
    """Raise ValueError for beams, other drafts, a cache that changes the output, and for results
    that are not kept.
    """
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"draft heads: expected greedy search or sampling, got {mode.value}; leave out "
            "num_beams and other drafts (assistant_model, prompt_lookup_num_tokens)"
        )
    if config.cache_implementation == "quantized":
        raise ValueError(
            "draft heads keep a cache of their own, in full precision: expected no "
            "cache_implementation, got quantized; leave it out"
        )
    wanted = [f"output_{kind}" for kind in KEPT_BY_GENERATE if getattr(config, f"output_{kind}")]
    if config.return_dict_in_generate and wanted:
        raise ValueError(
            f"draft heads keep sequences alone, got {', '.join(wanted)}; leave it out, and run the "
            "model once over the sequences to have them"
        )


def check_processors(processors: LogitsProcessorList, *, sampling_alone: bool) -> None:
    """Raise ValueError for processors that are not known to judge each position by itself, or with
    `sampling_alone` for all but those that `do_sample` brings; and for a temperature that leaves
    nothing to draw.
    """
    allowed = WARPERS if sampling_alone else MEMORYLESS
    foreign = [type(each).__name__ for each in processors if type(each) not in allowed]
    if foreign:
        raise ValueError(
            "draft heads: expected logits processors that do not look at the tokens before, got "
            f"{', '.join(foreign)}; switch off what asks for it, in the call or in "
            "model.generation_config (for example repetition_penalty=1.0)"
        )
    for each in processors:
        if isinstance(each, processing.TemperatureLogitsWarper):
            check_temperature(each.temperature)


def check_prepared(model: PreTrainedModel, input_ids: Tensor, prepared: dict[str, Any]) -> None:
    """Raise ValueError where the model would not read a prompt of whole rows of token ids.
    prepared: what `generate` hands to `model.prepare_inputs_for_generation`.
    """
    mask = prepared.get("attention_mask")
    mask_BT = torch.ones_like(input_ids) if mask is None else mask
    if mask_BT.shape != input_ids.shape or not ((mask_BT == 0) | (mask_BT == 1)).all():
        raise ValueError(
            f"draft heads: expected an attention_mask of zeros and ones, {tuple(input_ids.shape)}, "
            f"got {tuple(mask_BT.shape)} of {mask_BT.dtype} or other numbers; leave it to the "
            "tokenizer"
        )
    made = _prepared_by(model)(input_ids, is_first_iteration=True, **prepared)
    unknown = sorted(key for key in made.keys() - USED if not _is_void(model, key, made[key]))
    if unknown:
        raise ValueError(
            f"draft heads: expected input_ids and attention_mask, got {', '.join(unknown)}; give "
            "the prompt as token ids, to a model that reads nothing else (no PEFT prompt learning)"
        )
    past = made.get("past_key_values")
    if getattr(past, "_is_user_defined", False) or (past is not None and past.get_seq_length()):
        raise ValueError(
            "draft heads keep a cache of their own: expected the whole prompt in input_ids, got "
            "past_key_values; leave them out (PEFT prefix tuning brings some)"
        )
    counted_BT = mask_BT.long().cumsum(-1) - 1
    positions = counted_BT if made.get("position_ids") is None else made["position_ids"]
    is_short = positions.shape[-1] != counted_BT.shape[-1]  # of a mask that was too short
    if is_short or ((counted_BT != positions) & (mask_BT == 1)).any():
        raise ValueError(
            "draft heads: expected position_ids that count the tokens of a row from 0, got others "
            f"from the call or from {type(model).__name__}; leave them out"
        )


def _prepared_by(model: PreTrainedModel) -> Callable[..., dict[str, Any]]:
    """The model's own preparation. Raises ValueError for one that only its author knows."""
    prepare: Callable[..., dict[str, Any]] = model.prepare_inputs_for_generation
    author = inspect.unwrap(prepare).__module__
    if not author.startswith(("transformers.", "peft.")):
        raise ValueError(
            "draft heads: expected a model that transformers itself prepares inputs for, got one "
            f"with a prepare_inputs_for_generation of its own ({author}), which may change them; "
            "generate without draft heads"
        )
    return prepare


def _is_void(model: PreTrainedModel, key: str, value: Any) -> bool:
    """Whether an input says no more than that a multimodal model is given text alone."""
    if isinstance(value, Tensor) and key in ("token_type_ids", "mm_token_type_ids"):
        return model.config.get_text_config() is not model.config and not value.any()
    return value is None or value == {}


def without_padding(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The prompts' token ids. Raises ValueError for padding elsewhere than on the left, where
    `generate` would go wrong as well.
    """
    rows: list[list[int]] = input_ids.tolist()
    if mask is None:
        return rows
    mask_BT = mask.long()
    if (mask_BT.diff(dim=1) < 0).any() or not mask_BT[:, -1].all():
        raise ValueError(
            "draft heads: expected padding on the left alone, got an attention_mask with zeros "
            "behind a token; set tokenizer.padding_side='left'"
        )
    starts = (input_ids.shape[1] - mask_BT.sum(1)).tolist()
    return [row[start:] for row, start in zip(rows, starts, strict=True)]
