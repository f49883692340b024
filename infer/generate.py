"""Draft heads inside transformers' own `generate`.

    model.generate(**inputs, custom_generate=speculative(head))
    model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)

`generate` prepares everything and calls us in place of its loop: the caller's model decodes, its
weights are not copied. What it was asked for is done exactly or refused. Its cache is not used: it
is made for one token at a time, and cannot be rolled back.

Legend: B batch, T tokens.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
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
from draftheads.heads.hub import WEIGHTS, check_target, load_head, open_head
from draftheads.heads.target import Target
from draftheads.heads.tree import Tree
from draftheads.infer.accept import Acceptance, Greedy, Processed, check_temperature
from draftheads.infer.engine import Speculator, Step

SAMPLING = ("Temperature", "TopH", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta")
WARPERS: tuple[type, ...] = tuple(getattr(processing, f"{name}LogitsWarper") for name in SAMPLING)
"""What `do_sample` brings; none of them looks at the tokens before."""
MEMORYLESS: tuple[type, ...] = (
    *WARPERS,
    processing.SuppressTokensLogitsProcessor,
    processing.InfNanRemoveLogitsProcessor,
)
USED = {"input_ids", "attention_mask", "position_ids", "past_key_values", "logits_to_keep"}
USED |= {"use_cache"}
"""What `generate` prepares for any model."""
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
NOT_KEPT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """With `return_dict_in_generate`. sequences: as ever. tokens_per_step: of each row, tokens per
    forward of the target, its own included.
    """

    tokens_per_step: tuple[float, ...] | None = None


@dataclass(eq=False)
class SpeculativeDecoding:
    """A `custom_generate` for `model.generate` that decodes with draft heads.

    head: loaded, or where to load it from for the model at hand (a folder or a Hub id). tree:
    overrides the head's own. acceptance: overrides what generate's sampling arguments say; None
    keeps the model's own output or distribution. tokenizer: for `stop_strings`, because
    transformers does not pass on the one that `generate` is given.

    Calls raise ValueError for whatever of `generate` cannot be done exactly.
    """

    head: DraftHead | str | Path
    _: KW_ONLY
    tree: Tree | None = None
    acceptance: Acceptance | None = None
    tokenizer: Any = None
    target: Target | None = field(default=None, init=False)

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
        _check_asked(
            generation_config, logits_processor, WARPERS if self.acceptance else MEMORYLESS
        )
        prompts = _prompts(model, input_ids, prepared)
        accept, sample = self.acceptance, bool(generation_config.do_sample)
        if accept is None:
            is_plain = not (logits_processor or sample)
            accept = Greedy() if is_plain else Processed(logits_processor, sample)
        criteria = StoppingCriteriaList(stopping_criteria)
        if stop_strings is not None:
            if self.tokenizer is None:
                raise ValueError(
                    "stop_strings need a tokenizer, and transformers does not pass on the one that "
                    "generate was given: use speculative(head, tokenizer=tokenizer)"
                )
            criteria.append(StopStringCriteria(self.tokenizer, stop_strings))
        ends = [int(i) for each in criteria for i in getattr(each, "eos_token_id", ())]
        pad = int(generation_config._pad_token_tensor) if ends else None
        streamer = _argument_of_generate("streamer")
        replay = _Replay(input_ids, criteria, streamer, pad)
        with _as_found(model):
            target, head = self._loaded(model)
            target.eos_ids = tuple(ends)
            limit = target.context - max(map(len, prompts))
            if criteria.max_length is not None:
                limit = max(1, criteria.max_length - input_ids.shape[1])
            speculator = Speculator(target, head, tree=self.tree)
            for steps in speculator.generate_batch(prompts, sampling=accept, max_new_tokens=limit):
                if not replay.take(steps):
                    break
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return SpeculativeOutput(replay.sequences_BT, tokens_per_step=replay.tokens_per_step())
        return replay.sequences_BT

    def _loaded(self, model: PreTrainedModel) -> tuple[Target, DraftHead]:
        """Kept for the next call with the same model."""
        if self.target is None or self.target.model is not model:
            target, head = Target(model), self.head
            if not isinstance(head, DraftHead):
                head = load_head(head, target=target)
            check_target(head, target, {})
            self.head, self.target = head.to(target.device), target
        assert isinstance(self.head, DraftHead)
        return self.target, self.head


speculative = SpeculativeDecoding


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
        folder = open_head(source, revision=revision).path
        known.clear()
        known[key] = speculative(folder)
    known[key].tokenizer = tokenizer
    # not model.generate: an instance may have one of its own, which would call us again
    generated: Tensor | SpeculativeOutput = type(model).generate(
        model, inputs, custom_generate=known[key], **arguments
    )
    return generated


def _argument_of_generate(name: str) -> Any:
    """What the innermost `generate` that is running was given under this name, or None.

    transformers 5.23 tells a callable neither the streamer nor the assistant, and a repository's
    function not where it comes from: without a look at its frame they would be ignored in silence.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_locals[name] if frame is not None else None


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


def _refuse(*table: tuple[Any, str]) -> None:
    """Raise ValueError for the first row whose condition holds."""
    for holds, expected in table:
        if holds:
            raise ValueError(f"draft heads: expected {expected}")


def _check_asked(
    config: GenerationConfig, processors: LogitsProcessorList, allowed: tuple[type, ...]
) -> None:
    """Raise ValueError for options that cannot be honoured, and for processors that are not known
    to judge each position by itself.
    """
    mode = config.get_generation_mode(_argument_of_generate("assistant_model"))
    wanted = [name for name in NOT_KEPT if config.return_dict_in_generate and getattr(config, name)]
    foreign = [type(each).__name__ for each in processors if type(each) not in allowed]
    _refuse(
        (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
            f"greedy search or sampling, got {mode.value}; leave out num_beams and other drafts "
            "(assistant_model, prompt_lookup_num_tokens)",
        ),
        (
            config.cache_implementation == "quantized",
            "no cache_implementation, got quantized; draft heads keep a cache of their own",
        ),
        (
            wanted,
            f"a wish for sequences alone, got {', '.join(wanted)}; leave it out, and run the model "
            "once over the sequences",
        ),
        (
            foreign,
            f"logits processors that do not look at the tokens before, got {', '.join(foreign)}; "
            "switch off what asks for it, in the call or in model.generation_config (for example "
            "repetition_penalty=1.0)",
        ),
    )
    for each in processors:
        if isinstance(each, processing.TemperatureLogitsWarper):
            check_temperature(each.temperature)


def _prompts(
    model: PreTrainedModel, input_ids: Tensor, prepared: dict[str, Any]
) -> list[list[int]]:
    """The prompts' token ids, without padding. Raises ValueError where the model would not read a
    prompt of whole rows of token ids. prepared: what `generate` hands to
    `model.prepare_inputs_for_generation`.
    """
    mask = prepared.get("attention_mask")
    mask_BT = torch.ones_like(input_ids) if mask is None else mask
    author = inspect.unwrap(model.prepare_inputs_for_generation).__module__
    _refuse(
        (
            mask_BT.shape != input_ids.shape or not ((mask_BT == 0) | (mask_BT == 1)).all(),
            f"an attention_mask of zeros and ones, {tuple(input_ids.shape)}, got "
            f"{tuple(mask_BT.shape)} of {mask_BT.dtype}; leave it to the tokenizer",
        ),
        (
            not author.startswith(("transformers.", "peft.")),
            "a model that transformers itself prepares inputs for, got one with a "
            f"prepare_inputs_for_generation of its own ({author}), which may change them; generate "
            "without draft heads",
        ),
    )
    made = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **prepared)
    unknown = sorted(key for key in made.keys() - USED if not _is_void(model, key, made[key]))
    past = made.get("past_key_values")
    counted_BT = mask_BT.long().cumsum(-1) - 1
    positions = counted_BT if made.get("position_ids") is None else made["position_ids"]
    is_short = positions.shape[-1] != counted_BT.shape[-1]  # of a mask that was too short
    _refuse(
        (
            unknown,
            f"input_ids and attention_mask, got {', '.join(unknown)}; give the prompt as token "
            "ids, to a model that reads nothing else (no PEFT prompt learning)",
        ),
        (
            getattr(past, "_is_user_defined", False) or (past and past.get_seq_length()),
            "the whole prompt in input_ids, got past_key_values; leave them out (PEFT prefix "
            "tuning brings some)",
        ),
        (
            is_short or ((counted_BT != positions) & (mask_BT == 1)).any(),
            "position_ids that count the tokens of a row from 0, got others from the call or from "
            f"{type(model).__name__}; leave them out",
        ),
        (
            (mask_BT.long().diff(dim=1) < 0).any() or not mask_BT[:, -1:].all(),
            "padding on the left alone, got an attention_mask with zeros after a token; set "
            "tokenizer.padding_side='left'",
        ),
    )
    starts = (mask_BT == 0).sum(1).tolist()
    return [row[start:] for row, start in zip(input_ids.tolist(), starts, strict=True)]


def _is_void(model: PreTrainedModel, key: str, value: Any) -> bool:
    """Whether an input says no more than that a multimodal model is given text alone."""
    if isinstance(value, Tensor):
        is_multimodal = model.config.get_text_config() is not model.config
        return key in TOKEN_TYPES and is_multimodal and not value.any()
    return value is None or value == {}


class _Replay:
    """The sequences of one `generate`, prompts included, as stopping criteria and a streamer are
    shown them.

    `generate` adds one token to every row at a time, asks the criteria and pads the rows that have
    ended. Here rows accept different numbers of tokens, which wait until every running row has its
    next one. pad: None where `generate` does not fill rows, which is where no EOS can end one.
    """

    def __init__(
        self,
        prompts_BT: Tensor,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        pad: int | None,
    ) -> None:
        self.sequences_BT = prompts_BT
        self._criteria, self._streamer, self._pad = criteria, streamer, pad
        self._waiting: list[deque[int]] = [deque() for _ in prompts_BT]
        self._running = [True] * len(prompts_BT)
        self._tokens, self._steps = [0] * len(prompts_BT), [0] * len(prompts_BT)

    def take(self, steps: Sequence[Step | None]) -> bool:
        """Add one step of the engine; returns whether any row goes on."""
        for row, step in enumerate(steps):
            if step is not None:
                self._waiting[row].extend(step.tokens)
                self._steps[row] += self._running[row] and step.accepted >= 0
        while any(self._running) and all(map(self._is_ready, range(len(self._waiting)))):
            self._show_column()
        return any(self._running)

    def tokens_per_step(self) -> tuple[float, ...]:
        """Of each row, the acceptance length tau; neither the prefill nor its token counts."""
        pairs = zip(self._tokens, self._steps, strict=True)
        return tuple((tokens - 1) / steps if steps else 0.0 for tokens, steps in pairs)

    def _is_ready(self, row: int) -> bool:
        return bool(self._waiting[row]) or self._is_padded(row)

    def _is_padded(self, row: int) -> bool:
        return self._pad is not None and not self._running[row]

    def _show_column(self) -> None:
        column = []
        for row, waiting in enumerate(self._waiting):
            self._tokens[row] += self._running[row]
            column.append(self._pad if self._is_padded(row) else waiting.popleft())
        column_B = torch.tensor(column)
        new_B1 = column_B[:, None].to(self.sequences_BT)
        self.sequences_BT = torch.cat([self.sequences_BT, new_B1], dim=1)
        ended = self._criteria(self.sequences_BT, None).tolist()
        self._running = [on and not end for on, end in zip(self._running, ended, strict=True)]
        if self._streamer is not None:
            self._streamer.put(column_B)
