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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftheads.heads.base import DraftHead
from draftheads.heads.hub import WEIGHTS, check_target, find_head, load_head
from draftheads.heads.shape import Tree
from draftheads.heads.target import Target
from draftheads.infer.accept import Acceptance, Greedy, Processed
from draftheads.infer.engine import Speculator
from draftheads.infer.refusals import (
    check_config,
    check_prepared,
    check_processors,
    without_padding,
)
from draftheads.infer.replay import Replay


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
            "without it, use draftheads.infer.speculative.speculative(head)"
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
