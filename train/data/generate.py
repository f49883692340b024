"""Batches of conversations answered by the target's own `generate`, repeatable from seeds.

Each row draws from a seed of its own, so what is drawn for a prompt does not depend on the prompts
that it is answered with.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from draftheads.infer.accept import filtered_logits
from draftheads.infer.baseline import without_defaults
from draftheads.train.data.conversation import Conversation

if TYPE_CHECKING:
    from draftheads.heads.target import Target


class Sampling(BaseModel):
    """How the target's tokens are drawn."""

    model_config = ConfigDict(extra="forbid")

    temperature: float = Field(0.3, ge=0, description="softmax temperature; 0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="probability mass kept; 1 keeps all")
    top_k: int = Field(0, ge=0, description="tokens kept; 0 keeps all")
    max_new_tokens: int = Field(512, ge=1, description="tokens per answer, end token included")


Answered = tuple[list[Conversation], Exception | None]


class Answerer(ABC):
    """Who answers. eos_ids: what ends an answer; context: tokens that fit; together: answers of one
    batch are computed together, so rounding may make one depend on another.
    """

    together = True

    def __init__(self, name: str, tokenizer: Any, eos_ids: tuple[int, ...], context: int) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.context = context

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What a manifest says of it."""

    @abstractmethod
    def answer(
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """Ask and answer all turns of the batches' conversations, in place.

        seeds: by the prompts' indices. Yields conversations when they are done, with the last error
        of a prompt that could not be answered, or None. Those that nobody could be asked are left
        out.
        """


class LocalAnswerer(Answerer):
    """The target, in this process."""

    def __init__(self, target: Target) -> None:
        super().__init__(str(target.name), target.tokenizer, target.eos_ids, target.context)
        self._target = target

    def origin(self) -> dict[str, Any]:
        """Name, and what tells these weights from others."""
        return {
            "name": self.name,
            "revision": self._target.revision,
            "fingerprint": self._target.fingerprint(),
            "dtype": str(self._target.model.dtype).removeprefix("torch."),
        }

    def answer(
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """One batch after the other."""
        for rows in batches:
            yield rows, answer_batch(self._target, rows, sampling, seeds)


def answer_batch(
    target: Target, conversations: Sequence[Conversation], sampling: Sampling, seeds: Sequence[str]
) -> RuntimeError | None:
    """Ask and answer all turns of the conversations, in place.

    seeds: as of `Answerer.answer`; the same seeds, conversations and machine give the same tokens.
    Returns the last error of a prompt that could not be answered even alone, or None.
    """
    error: RuntimeError | None = None
    turn = 0
    while rows := [row for row in conversations if row.ask()]:
        drawn = [f"{seeds[row.prompt.index]}/{turn}" for row in rows]
        try:
            answers = generate(target, [row.tokens for row in rows], sampling, drawn)
        except RuntimeError:  # out of memory, most often from one long prompt: spare the others
            _free_memory()
            error = _answer_alone(target, rows, sampling, drawn) or error
        else:
            for row, ids in zip(rows, answers, strict=True):
                row.answer(ids)
        turn += 1
    return error


def _answer_alone(
    target: Target, rows: Sequence[Conversation], sampling: Sampling, seeds: Sequence[str]
) -> RuntimeError | None:
    last: RuntimeError | None = None
    for row, seed in zip(rows, seeds, strict=True):
        try:
            [ids] = generate(target, [row.tokens], sampling, [seed])
        except RuntimeError as error:  # the second time: this prompt is lost, the run is not
            _free_memory()
            row.end("failed", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            last = error
        else:
            row.answer(ids)
    return last


def _free_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def generate(
    target: Target, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[str]
) -> list[list[int]]:
    """The target's continuations, each ending with its end token or at the length limit.

    seeds: one per prompt. A row never leaves the context: rows with a similar room left are
    generated together, and the smallest room limits them all, so a row loses at most half of its
    room to its neighbours.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    rooms = [min(sampling.max_new_tokens, target.context - len(prompt)) for prompt in prompts]
    for row, room in enumerate(rooms):
        assert room > 0, "prompts that do not fit are skipped before"
        groups[0 if room == sampling.max_new_tokens else room.bit_length()].append(row)
    answers: list[list[int]] = [[] for _ in prompts]
    for _, group in sorted(groups.items()):
        limit = min(rooms[row] for row in group)
        draws = _Draws(sampling, [seeds[row] for row in group], limit)
        new_BT = _generate(target, [prompts[row] for row in group], draws, limit)
        for row, ids in zip(group, new_BT.tolist(), strict=True):
            answers[row] = until_end(ids, target.eos_ids)
    return answers


class _Draws(LogitsProcessor):  # type: ignore[misc]
    """Draws each row's next tokens by numbers of its own: only the drawn token keeps its logit, so
    that `generate`'s argmax takes it. Raises RuntimeError for logits that are not numbers.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[str], limit: int) -> None:
        self._sampling = sampling
        self._step = 0
        generators = [
            torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
            )
            for seed in seeds
        ]
        self._uniform_BT = torch.stack(
            [torch.rand(limit, generator=one, dtype=torch.float64) for one in generators]
        )

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._sampling.temperature == 0:
            return scores
        chosen = self._sampling.temperature, self._sampling.top_p, self._sampling.top_k
        below_BV = filtered_logits(scores, *chosen).double().softmax(-1).cumsum(-1)
        total_B1 = below_BV[:, -1:]
        if not total_B1.isfinite().all():
            raise RuntimeError("the target's logits are not finite")
        self._uniform_BT = self._uniform_BT.to(scores.device)
        uniform_B1 = self._uniform_BT[:, self._step, None]
        self._step += 1
        drawn_B1 = torch.searchsorted(below_BV, uniform_B1 * total_B1, right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn_B1, 0.0)


def _generate(
    target: Target, prompts: Sequence[Sequence[int]], draws: _Draws, limit: int
) -> Tensor:
    width = max(map(len, prompts))
    pad = target.eos_ids[0] if target.eos_ids else 0
    tokens_BT = torch.full((len(prompts), width), pad)
    mask_BT = torch.zeros_like(tokens_BT)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=pad,
    )
    with without_defaults(target):
        out_BT = target.model.generate(
            tokens_BT.to(target.device),
            attention_mask=mask_BT.to(target.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([draws]),
        )
    new_BT: Tensor = out_BT[:, width:]
    return new_BT


def until_end(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """Up to and including the first end token; what follows is padding."""
    end = next((place for place, token in enumerate(ids) if token in eos_ids), len(ids))
    return ids[: end + 1]
