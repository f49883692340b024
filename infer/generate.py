"""Draft heads inside transformers' own `generate`.

    model.generate(**inputs, custom_generate=speculative(head))
    model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)

Legend: B batch, T tokens.

`generate` prepares everything and calls us in place of its loop: the caller's model decodes, its
weights are not copied. What it was asked for is done exactly or refused. Its cache is not used: it
is made for one token at a time, and cannot be rolled back.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process as processing
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftheads.heads.base import DraftHead
from draftheads.heads.hub import WEIGHTS, check_target, find_head, load_head
from draftheads.heads.target import Target
from draftheads.heads.tree import Tree
from draftheads.infer.accept import Acceptance, Greedy, Processed, check_temperature
from draftheads.infer.engine import Speculator, Step


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """With `return_dict_in_generate`. sequences: as ever. tokens_per_step: of each row, tokens per
    forward of the target, its own included.
    """

    tokens_per_step: tuple[float, ...] | None = None


def speculative(
    head: DraftHead | str | Path,
    *,
    tree: Tree | None = None,
    acceptance: Acceptance | None = None,
    tokenizer: Any = None,
) -> SpeculativeDecoding:
    """A `custom_generate` for `model.generate` that decodes with draft heads.

    head: loaded, or where to load it from for the model at hand (a folder or a Hub id). tree:
    overrides the head's own. acceptance: overrides what generate's sampling arguments say; None
    keeps the model's own output or distribution. tokenizer: for `stop_strings`, because
    transformers does not pass on the one that `generate` is given.
    """
    return SpeculativeDecoding(head, tree, acceptance, tokenizer)


class SpeculativeDecoding:
    """What `speculative` makes. Calls raise ValueError for whatever of `generate` cannot be done
    exactly.
    """

    def __init__(
        self,
        head: DraftHead | str | Path,
        tree: Tree | None,
        acceptance: Acceptance | None,
        tokenizer: Any,
    ) -> None:
        self.head, self.tree, self.acceptance, self.tokenizer = head, tree, acceptance, tokenizer
        self._target: Target | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        **prepared: Any,
    ) -> Tensor | SpeculativeOutput:
        """Called by `generate`, with the names that it uses; returns what it returns."""
        check_config(generation_config, _argument_of_generate("assistant_model"))
        check_prepared(model, input_ids, prepared)
        accept = self._acceptance(logits_processor, bool(generation_config.do_sample))
        prompts = without_padding(input_ids, prepared.get("attention_mask"))
        criteria = StoppingCriteriaList([*stopping_criteria, *self._stops(stop_strings)])
        ends = _eos_ids(criteria)
        pad = int(generation_config._pad_token_tensor) if ends else None
        streamer = _argument_of_generate("streamer")
        with _as_found(model):
            speculator = self._speculator(model)
            speculator.target.eos_ids = ends
            room = speculator.target.context - max(map(len, prompts))
            longest = criteria.max_length
            limit = room if longest is None else max(1, longest - input_ids.shape[1])
            replay = Replay(input_ids, criteria, streamer, pad, limit)
            for steps in speculator.generate_batch(prompts, sampling=accept, max_new_tokens=limit):
                if not replay.take(steps):
                    break
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return SpeculativeOutput(replay.sequences_BT, tokens_per_step=replay.tokens_per_step)
        return replay.sequences_BT

    def _acceptance(self, processors: LogitsProcessorList, sample: bool) -> Acceptance:
        check_processors(processors, sampling_alone=self.acceptance is not None)
        if self.acceptance is not None:
            return self.acceptance
        return Processed(processors, sample) if processors or sample else Greedy()

    def _stops(self, strings: str | list[str] | None) -> list[StopStringCriteria]:
        if strings is None:
            return []
        if self.tokenizer is None:
            raise ValueError(
                "stop_strings need a tokenizer, and transformers does not pass on the one that "
                "generate was given: use speculative(head, tokenizer=tokenizer)"
            )
        return [StopStringCriteria(self.tokenizer, strings)]

    def _speculator(self, model: PreTrainedModel) -> Speculator:
        """Of this model, whose target and head are kept for the next call."""
        if self._target is None or self._target.model is not model:
            target, head = Target(model), self.head
            if not isinstance(head, DraftHead):
                head = load_head(head, target=target)
            check_target(head, target, {})
            self.head, self._target = head.to(target.device), target
        assert isinstance(self.head, DraftHead)
        return Speculator(self._target, self.head, tree=self.tree)


def generate_from_repository(
    inputs: Tensor | None = None,
    *,
    model: PreTrainedModel,
    tokenizer: Any = None,
    revision: str | None = None,
    **arguments: Any,
) -> Tensor | SpeculativeOutput:
    """What `custom_generate/generate.py` of a head repository does: load the head for this model,
    once in the model's life, and generate with it. arguments: of `generate`, all others.
    """
    source = _argument_of_generate("custom_generate")
    if source is None:
        raise ValueError(
            "expected to be called by model.generate(custom_generate=...); to decode with heads "
            "without it, use draftheads.infer.generate.speculative(head)"
        )
    stored = Path(source) / WEIGHTS
    key = (source, revision, stored.stat().st_mtime_ns if stored.is_file() else None)
    known = vars(model).setdefault("_draft_heads", {})  # lives as long as the model does
    if key not in known:
        folder = find_head(source, revision=revision)
        known.clear()
        known[key] = SpeculativeDecoding(folder, None, None, None)
    known[key].tokenizer = tokenizer
    # not model.generate: an instance may have one of its own, which would call us again
    generated: Tensor | SpeculativeOutput = type(model).generate(
        model, inputs, custom_generate=known[key], **arguments
    )
    return generated


def _argument_of_generate(name: str) -> Any:
    """What the innermost `generate` that is running was given under this name, or None.

    transformers 5.23 tells a callable neither the streamer nor the assistant, and a repository's
    function not where it comes from. They would be lost without a word.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_locals[name] if frame is not None else None


def _eos_ids(criteria: StoppingCriteriaList) -> tuple[int, ...]:
    ends = [each.eos_token_id for each in criteria if hasattr(each, "eos_token_id")]
    return tuple(int(token) for end in ends for token in end.flatten())


@contextmanager
def _as_found(model: PreTrainedModel) -> Iterator[None]:
    """Decode without dropout, and give the caller's model back as it was: `Target` freezes it."""
    training = [module for module in model.modules() if module.training]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    try:  # the model is the caller's, also after a mistake or Ctrl-C
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in learning:
            parameter.requires_grad_(True)


# What of `generate`'s many arguments draft heads can honour. The rest is refused, never ignored.
#
# Legend: B batch, T tokens.


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


# What `generate` would have shown to stopping criteria and a streamer, shown to them afterwards.
#
# Legend: B batch, T tokens.
#
# The rows of a batch accept different numbers of tokens per step; `generate` adds one token to
# every row at a time, asks the criteria and pads the rows that have ended. So tokens wait here
# until every running row has its next one, and then go out column by column.


class Replay:
    """The sequences of one `generate`, prompts included, as far as they are known.

    pad: what rows that have ended are filled with; None where `generate` does not fill them, which
    is where no EOS can end one. limit: the most new tokens.
    """

    def __init__(
        self,
        prompts_BT: Tensor,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        pad: int | None,
        limit: int,
    ) -> None:
        self._criteria, self._streamer, self._pad = criteria, streamer, pad
        self._all_BT = torch.cat([prompts_BT, prompts_BT.new_zeros(len(prompts_BT), limit)], dim=1)
        self._length = prompts_BT.shape[1]
        self._waiting: list[deque[int]] = [deque() for _ in prompts_BT]
        self._running = [True] * len(prompts_BT)
        self._tokens, self._steps = [0] * len(prompts_BT), [0] * len(prompts_BT)

    @property
    def sequences_BT(self) -> Tensor:
        """Prompts and new tokens, as `generate` returns them."""
        return self._all_BT[:, : self._length]

    @property
    def tokens_per_step(self) -> tuple[float, ...]:
        """Of each row, the acceptance length tau; neither the prefill nor its token counts."""
        pairs = zip(self._tokens, self._steps, strict=True)
        return tuple((tokens - 1) / steps if steps else 0.0 for tokens, steps in pairs)

    def take(self, steps: Sequence[Step | None]) -> bool:
        """Add one step of the engine; returns whether any row goes on."""
        for row, step in enumerate(steps):
            if step is not None:
                self._waiting[row].extend(step.tokens)
                self._steps[row] += self._running[row] and step.accepted >= 0
        while any(self._running) and all(map(self._is_ready, range(len(self._waiting)))):
            self._show_column()
        return any(self._running)

    def _is_ready(self, row: int) -> bool:
        return bool(self._waiting[row]) or self._is_padded(row)

    def _is_padded(self, row: int) -> bool:
        return self._pad is not None and not self._running[row]

    def _show_column(self) -> None:
        rows = range(len(self._waiting))
        column = [self._pad if self._is_padded(b) else self._waiting[b].popleft() for b in rows]
        column_B = torch.tensor(column)
        self._all_BT[:, self._length] = column_B.to(self._all_BT)
        self._length += 1
        self._tokens = [n + on for n, on in zip(self._tokens, self._running, strict=True)]
        ended = self._criteria(self.sequences_BT, None).tolist()
        self._running = [on and not end for on, end in zip(self._running, ended, strict=True)]
        if self._streamer is not None:
            self._streamer.put(column_B)
