"""Draft heads inside transformers' own `generate`.

    model.generate(**inputs, custom_generate=speculative(head))
    model.generate(**inputs, custom_generate="user/heads", trust_remote_code=True)

`generate` prepares the inputs and calls us instead of its own loop. The caller's model decodes; its
weights are not copied. Every option is honoured exactly or refused. `generate`'s own cache is not
used, because it cannot be rolled back.

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
from draftheads.heads.formats.hub import WEIGHTS, open_head
from draftheads.heads.hybrid.states import CACHE
from draftheads.heads.target.model import Target
from draftheads.heads.tree import TokenTree, Tree
from draftheads.infer.accept import (
    Acceptance,
    Accepted,
    check_temperature,
    follow,
    processed,
)
from draftheads.infer.constraint import Constraint
from draftheads.infer.drafters.named import named_drafts
from draftheads.infer.engine import Speculator
from draftheads.infer.paths import TokenPath
from draftheads.infer.rows import Step
from draftheads.infer.sources import DrafterSource, is_source

SAMPLING = ("Temperature", "TopH", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta")
WARPERS: tuple[type, ...] = tuple(getattr(processing, f"{name}LogitsWarper") for name in SAMPLING)
"""Processors of `do_sample`; none of them reads the previous tokens."""
MEMORYLESS: tuple[type, ...] = (
    *WARPERS,
    processing.SuppressTokensLogitsProcessor,
    processing.InfNanRemoveLogitsProcessor,
)
READING: tuple[type, ...] = (
    processing.PrefixConstrainedLogitsProcessor,
    processing.NoBadWordsLogitsProcessor,
    processing.SequenceBiasLogitsProcessor,
    processing.NoRepeatNGramLogitsProcessor,
    processing.RepetitionPenaltyLogitsProcessor,
    processing.MinLengthLogitsProcessor,
    processing.MinNewTokensLengthLogitsProcessor,
    processing.ForcedBOSTokenLogitsProcessor,
    processing.ForcedEOSTokenLogitsProcessor,
    processing.SuppressTokensAtBeginLogitsProcessor,
    processing.ExponentialDecayLengthPenalty,
)
"""Processors that read the previous tokens of a row, and remember no call."""
USED = {"input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache", *CACHE}
"""Inputs that `generate` prepares for every model."""
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
KEPT = "_draft_heads"
"""The attribute of a model with the heads that it was given last."""
NOT_KEPT = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Processed(Acceptance):
    """Lossless decoding with logits processors: the argmax of their output, or with `sample` one
    draw at every node.

    A tree's nodes are processed in parallel, so no processor may read the previous tokens; `Read`
    is for those.
    """

    processors: LogitsProcessorList
    sample: bool

    def _fields(self) -> Iterator[Any]:
        """By value, as `generate` makes new processors for each call."""
        yield self.sample
        for each in self.processors:
            yield type(each)
            for name, value in vars(each).items():
                numbers = value.flatten().tolist() if isinstance(value, Tensor) else [value]
                yield name, *numbers

    def __call__(self, logits_BNV: Tensor, tree: TokenTree) -> Accepted:
        """Follow the choice at each node."""
        return follow(tree, self.choose(logits_BNV, tree.topology.depths_BN))

    def choose(self, logits: Tensor, depths_BN: Tensor | None = None) -> Tensor:
        """The argmax, or one draw as of `Draws`."""
        scores = processed(logits, self.processors)
        return self.draws.draw(scores, depths_BN) if self.sample else scores.argmax(-1)


@dataclass
class Read(Constraint):
    """Processors that read the previous tokens: those of the prompt, padding included, of the
    answer, and of the path to a node. prompts_BT: a row's own alone, as its constraint.
    """

    processors: Sequence[Any]
    prompts_BT: Tensor

    def row(self, number: int, prompt: Sequence[int]) -> Read:
        """The constraint of a row, whose processors see no other."""
        own = [_of_row(each, number) for each in self.processors]
        return Read(own, self.prompts_BT[number, None])

    def after(self, answer: list[int], path: TokenPath, logits_V: Tensor) -> Tensor:
        """The logits that the processors return."""
        new_1A = self.prompts_BT.new_tensor([[*answer, *path]])
        text_1T = torch.cat([self.prompts_BT, new_1A], dim=1)
        scores_1V = logits_V[None]
        for each in self.processors:
            scores_1V = each(text_1T, scores_1V)
        return scores_1V[0]


def _of_row(processor: Any, number: int) -> Any:
    """A processor that does the same in a batch of this row alone."""
    if isinstance(processor, processing.PrefixConstrainedLogitsProcessor):
        function = processor._prefix_allowed_tokens_fn
        prompt = number // processor._num_beams  # or sequences that were asked for
        return type(processor)(lambda _, text_T: function(prompt, text_T), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):  # padding, which differs by row
        return type(processor)(processor.penalty, ignored[number, None])
    return processor


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """The output with `return_dict_in_generate`. tokens_per_step: tau of each row."""

    tokens_per_step: tuple[float, ...] | None = None


@dataclass(eq=False)
class SpeculativeDecoding:
    """A `custom_generate` for `model.generate` that decodes with draft heads or other drafters.

    head: a head or another source of drafters, or its name as of `open_drafts`: a folder, a Hub id,
    "mtp", "ngram", "retrieve:PATH", "model:PATH", or several joined by
    "+". tree: overrides its own. acceptance: overrides generate's sampling arguments; None keeps
    the model's own output or distribution. tokenizer: for `stop_strings`, as transformers does not
    pass its own on. compile: as of `Speculator`.

    Raises TypeError for a head that is none. Calls raise ValueError for options of `generate` that
    cannot be honoured exactly.
    """

    head: DrafterSource | str | Path
    _: KW_ONLY
    tree: Tree | None = None
    acceptance: Acceptance | None = None
    tokenizer: Any = None
    compile: bool = False
    speculator: Speculator | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not (is_source(self.head) or isinstance(self.head, str | Path)) or self.head == "":
            raise TypeError(
                "expected draft heads, another source of drafters or the name of such, got "
                f"{self.head!r:.80}; give a head folder, a Hub id or a loaded head"
            )

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
        """Called by `generate`, with its argument names and return value."""
        allowed = WARPERS if self.acceptance else (*MEMORYLESS, *READING)
        _check_options(generation_config, logits_processor, allowed)
        prompts = _prompts(model, input_ids, prepared)
        accept = self.acceptance
        sample = bool(generation_config.do_sample)
        reads = any(type(each) in READING for each in logits_processor)
        constraint = Read(logits_processor, input_ids) if reads else None
        if accept is None and (logits_processor or sample):
            others = LogitsProcessorList() if reads else logits_processor
            accept = Processed(others, sample)
        criteria = StoppingCriteriaList(stopping_criteria)
        if stop_strings is not None:
            criteria.append(self._stops_at(stop_strings))
        ends = [int(i) for each in criteria for i in getattr(each, "eos_token_id", ())]
        pad = int(generation_config._pad_token_tensor) if ends else None
        streamer = _argument_of_generate("streamer")
        replay = _Replay(input_ids, criteria, streamer, pad)
        with _as_found(model):
            speculator = self._loaded(model)
            target = speculator.target
            target.eos_ids = tuple(ends)
            limit = target.context - max(map(len, prompts))
            if criteria.max_length is not None:
                limit = max(1, criteria.max_length - input_ids.shape[1])
            for steps in speculator.generate_batch(
                prompts, sampling=accept, max_new_tokens=limit, constraint=constraint
            ):
                if not replay.take(steps):
                    break
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return SpeculativeOutput(replay.sequences_BT, tokens_per_step=replay.tokens_per_step())
        return replay.sequences_BT

    def _stops_at(self, strings: str | list[str]) -> StopStringCriteria:
        if self.tokenizer is None:
            raise ValueError(
                "stop_strings need a tokenizer, and generate does not pass its own on; use "
                "speculative(head, tokenizer=tokenizer)"
            )
        return StopStringCriteria(self.tokenizer, strings)

    def _loaded(self, model: PreTrainedModel) -> Speculator:
        if self.speculator is None or self.speculator.target.model is not model:
            target = Target(model)
            drafts = self.head
            if isinstance(drafts, str | Path):
                drafts = named_drafts(drafts).load(target)
            elif isinstance(drafts, DraftHead):
                drafts.to(target.device)
            self.speculator = Speculator(target, drafts, tree=self.tree, compile=self.compile)
        return self.speculator


speculative = SpeculativeDecoding


def generate_from_repository(
    inputs: Tensor | None = None,
    *,
    model: PreTrainedModel,
    tokenizer: Any = None,
    revision: str | None = None,
    **arguments: Any,
) -> Tensor | SpeculativeOutput:
    """Load the head of a repository for this model, once, and generate with it.

    Called by the repository's `custom_generate/generate.py`. arguments: all others of `generate`.
    """
    source = _argument_of_generate("custom_generate")
    weights = Path(source) / WEIGHTS
    written = weights.stat().st_mtime_ns if weights.is_file() else None  # a folder may be retrained
    key = (source, revision, written)
    loaded = getattr(model, KEPT, {})
    setattr(model, KEPT, loaded)  # lives as long as the model
    if key not in loaded:
        folder = open_head(source, revision=revision).path
        loaded.clear()
        loaded[key] = speculative(folder)
    loaded[key].tokenizer = tokenizer
    # not model.generate: it may be overridden on the instance and call us again
    generated: Tensor | SpeculativeOutput = type(model).generate(
        model, inputs, custom_generate=loaded[key], **arguments
    )
    return generated


def _argument_of_generate(name: str) -> Any:
    """An argument of the running call of `generate`, or None.

    transformers does not pass streamer and assistant to a callable, nor the source to a
    repository's function, so they are read from its frame.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_locals[name] if frame is not None else None


@contextmanager
def _as_found(model: PreTrainedModel) -> Iterator[None]:
    """Decode without dropout, then restore the caller's model, which `Target` freezes."""
    training = [module for module in model.modules() if module.training]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    try:  # restored even after an error or Ctrl-C
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in learning:
            parameter.requires_grad_(True)


def _require(condition: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"draft heads: expected {expected}")


def _check_options(
    config: GenerationConfig, processors: LogitsProcessorList, allowed: tuple[type, ...]
) -> None:
    """Raise ValueError for options that cannot be honoured, and for processors that may remember
    tokens of other calls: they see all nodes of a tree, of which few are kept.
    """
    mode = config.get_generation_mode(_argument_of_generate("assistant_model"))
    outputs = [name for name in NOT_KEPT if getattr(config, name)]
    foreign = [type(each).__name__ for each in processors if type(each) not in allowed]
    _require(
        mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        f"greedy search or sampling, got {mode.value}; leave out num_beams and other drafts "
        "(assistant_model, prompt_lookup_num_tokens)",
    )
    _require(
        config.cache_implementation != "quantized",
        "no cache_implementation, got quantized; draft heads have their own cache",
    )
    _require(
        not (outputs and config.return_dict_in_generate),
        f"only sequences as output, got {', '.join(outputs)}; leave it out",
    )
    _require(
        not foreign,
        f"transformers' own logits processors without a memory, got {', '.join(foreign)}; disable "
        "their option, in the call or in model.generation_config, or use prefix_allowed_tokens_fn",
    )
    for each in processors:
        if isinstance(each, processing.TemperatureLogitsWarper):
            check_temperature(each.temperature)


def _prompts(
    model: PreTrainedModel, input_ids: Tensor, prepared: dict[str, Any]
) -> list[list[int]]:
    """Token ids of the prompts, without padding.

    prepared: arguments for `model.prepare_inputs_for_generation`. Raises ValueError unless that
    makes plain, left-padded rows of token ids from them.
    """
    mask = prepared.get("attention_mask")
    is_token_BT = torch.ones_like(input_ids) == 1 if mask is None else mask != 0
    made = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **prepared)
    unknown = sorted(key for key in made.keys() - USED if not _is_void(model, key, made[key]))
    for name in made.keys() & CACHE:
        past = made[name]
        if getattr(past, "_is_user_defined", False) or (past and past.get_seq_length()):
            unknown.append(name)
    _require(
        not unknown,
        f"input_ids and attention_mask, got {', '.join(unknown)}; pass the whole prompt as token "
        "ids, to a model that reads nothing else (no PEFT prompt learning)",
    )
    counted_BT = is_token_BT.cumsum(-1) - 1
    positions = counted_BT if made.get("position_ids") is None else made["position_ids"]
    _require(
        torch.equal(made["input_ids"], input_ids)
        and positions.shape[-1] == counted_BT.shape[-1] == input_ids.shape[-1]
        and not ((counted_BT != positions) & is_token_BT).any(),
        "whole rows and position_ids that count their tokens from 0, got others from the call or "
        f"from {type(model).__name__}; leave position_ids out",
    )
    _require(
        is_token_BT[:, -1].all() and not (~is_token_BT[:, 1:] & is_token_BT[:, :-1]).any(),
        "padding on the left only, got an attention_mask with zeros after a token; set "
        "tokenizer.padding_side='left'",
    )
    rows = zip(input_ids, is_token_BT, strict=True)
    return [row_T[is_token_T].tolist() for row_T, is_token_T in rows]


def _is_void(model: PreTrainedModel, key: str, value: Any) -> bool:
    """True for inputs that mark a multimodal model's prompt as text only."""
    if isinstance(value, Tensor):
        is_multimodal = model.config.get_text_config() is not model.config
        return key in TOKEN_TYPES and is_multimodal and not value.any()
    return value is None or value == {}


@dataclass
class _Replay:
    """Shows the output to stopping criteria and streamer as `generate` does: one token of every row
    at a time, with `pad` for finished rows.

    Rows accept different numbers of tokens, so tokens wait until every running row has its next
    one. sequences_BT: at first the prompts. pad: None if rows cannot end by EOS; then `generate`
    does not pad.
    """

    sequences_BT: Tensor
    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    pad: int | None

    def __post_init__(self) -> None:
        rows = len(self.sequences_BT)
        self._waiting: list[deque[int]] = [deque() for _ in range(rows)]
        self._running = [True] * rows
        self._tokens = [0] * rows
        self._steps = [0] * rows

    def take(self, steps: Sequence[Step | None]) -> bool:
        """Add one step of the engine; returns whether any row is still running."""
        for row, step in enumerate(steps):
            if step is not None:
                self._waiting[row].extend(step.tokens)
                self._steps[row] += self._running[row] and step.accepted >= 0
        rows = range(len(self._waiting))
        while any(self._running) and all(self._waiting[r] or self._is_padded(r) for r in rows):
            self._add_column()
        return any(self._running)

    def tokens_per_step(self) -> tuple[float, ...]:
        """Acceptance length tau of each row, excluding the prefill and its token."""
        pairs = zip(self._tokens, self._steps, strict=True)
        return tuple((tokens - 1) / steps if steps else 0.0 for tokens, steps in pairs)

    def _is_padded(self, row: int) -> bool:
        return self.pad is not None and not self._running[row]

    def _add_column(self) -> None:
        column = []
        for row, waiting in enumerate(self._waiting):
            self._tokens[row] += self._running[row]
            column.append(self.pad if self._is_padded(row) else waiting.popleft())
        column_B = torch.tensor(column)
        new_B1 = column_B[:, None].to(self.sequences_BT)
        self.sequences_BT = torch.cat([self.sequences_BT, new_B1], dim=1)
        ended = self.criteria(self.sequences_BT, None).tolist()
        self._running = [on and not end for on, end in zip(self._running, ended, strict=True)]
        if self.streamer is not None:
            self.streamer.put(column_B)
