"""The texts that are decoded, and the steps by which they grow.

Legend: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftheads.heads.target.model import Target
from draftheads.infer.accept import Acceptance
from draftheads.infer.constraint import Constraint, ConstraintError
from draftheads.infer.paths import TokenPath
from draftheads.infer.text import StopStrings

NOT_FINITE = "the target's logits are not finite; load it with dtype float32"
"""Why a row has failed."""


@dataclass(frozen=True)
class Step:
    """The output of one target forward for one row."""

    tokens: list[int]  # new token ids, cut at EOS, stop string and max_new_tokens
    accepted: int  # draft tokens accepted before that cut; -1 for the prefill, which verifies none
    finish: str | None  # "eos", "stop", "length" or "failed" on the last step
    draft_seconds: float  # by `fair_clock`, shared by all rows of a batch
    verify_seconds: float
    drafted: int = 0  # draft tokens that were verified

    @property
    def from_drafts(self) -> int:
        """Draft tokens among its tokens."""
        return max(min(self.accepted, len(self.tokens)), 0)

    @property
    def visible(self) -> list[int]:
        """Its tokens without the end of an answer, which is no text."""
        return self.tokens[:-1] if self.finish == "eos" else self.tokens


@dataclass
class Statistics:
    """Sums over steps, excluding the prefill and its token."""

    steps: int = 0
    tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)  # [d]: steps with more than d drafts accepted

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Statistics:
        """Sum these steps."""
        total = cls()
        for step in steps:
            total.add(step)
        return total

    def add(self, step: Step) -> None:
        """Add one step of one row."""
        if step.accepted < 0:
            return
        self.steps += 1
        self.tokens += len(step.tokens)
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.accepted += [0] * (step.accepted - len(self.accepted))
        for depth in range(step.accepted):
            self.accepted[depth] += 1

    @property
    def tokens_per_step(self) -> float:
        """Acceptance length tau, including the target's bonus token."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of steps in which at least 1, 2, ... draft tokens were accepted."""
        return [count / self.steps for count in self.accepted]


def is_whole(value: Any) -> bool:
    """True if it is an integer of any kind, which a truth value is not."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


class Row:
    """The text of one row, prompt included, and the reason it finished.

    limit: new tokens at most; None: the rest of the context. seed: of its own random numbers; "":
    one of the rule's. Raises ValueError for ids outside the vocabulary, and for texts that exceed
    the context.
    """

    rule: Acceptance
    """By which it is decoded; set by its `Slots`."""
    constraint: Constraint | None = None
    """Of this answer alone, as long as it goes on."""
    fault: RuntimeError | ConstraintError | None = None
    """Why it has failed."""

    def __init__(
        self,
        target: Target,
        prompt: Sequence[int],
        limit: int | None,
        stop: Collection[str] = (),
        seed: str = "",
    ) -> None:
        known = target.model.get_input_embeddings().weight.shape[0]
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy's, torch's
        invalid: list[Any] = [prompt]
        if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray):
            invalid = [t for t in prompt if not is_whole(t) or not 0 <= t < known]
        if invalid:
            raise ValueError(
                f"prompt: expected token ids from 0 to {known - 1}, got {invalid[0]!r:.80}; use a "
                "list of those of the target's own tokenizer"
            )
        context = target.context
        room = context - len(prompt)
        if not 0 < room < context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens, expected 1 to {context - 1} (context of "
                f"{target.name}: {context}, answer included); pass a prompt that fits"
            )
        limit = room if limit is None else limit
        if not is_whole(limit) or not 1 <= limit <= room:
            raise ValueError(
                f"max_new_tokens: expected 1 to {room}, got {limit!r}; prompt and new tokens must "
                f"not exceed the context of {target.name} ({context})"
            )
        self.text = list(map(int, prompt))
        self.seed = seed
        self.finish: str | None = None
        self.prompt = len(prompt)
        self.end = self.prompt + limit
        self.ends = frozenset(target.eos_ids)  # tokens that end it
        self.faults: dict[TokenPath, ConstraintError] = {}  # of the constraint, in this step's tree
        self._stop = StopStrings(target.tokenizer, stop, prompt) if stop else None

    @property
    def new_tokens(self) -> int:
        """Their number."""
        return len(self.text) - self.prompt

    @property
    def answer(self) -> list[int]:
        """The new tokens."""
        return self.text[self.prompt :]

    def step(
        self, tokens: list[int], accepted: int, drafted: int, seconds: tuple[float, float]
    ) -> Step:
        """Append tokens up to the end of the output. seconds: of drafting, of verifying."""
        for place, token in enumerate(tokens, start=1):
            self.text.append(token)
            self.fault = self.faults.get(tuple(tokens[: place - 1]))
            if token < 0 and self.fault is None:
                self.fault = RuntimeError(NOT_FINITE)
            if self.fault is not None:
                self.finish = "failed"
            elif token in self.ends:
                self.finish = "eos"
            elif self._stop is not None and self._stop.completed_by(token):
                self.finish = "stop"
            elif len(self.text) == self.end:
                self.finish = "length"
            if self.finish:
                self.constraint = None
                tokens = tokens[:place]
                break
        self.faults.clear()
        return Step(tokens, accepted, self.finish, *seconds, drafted)


def apply_constraints(
    rows: Sequence[Row], logits_BNV: Tensor, paths: Sequence[Sequence[TokenPath]]
) -> Tensor:
    """The logits that each row's constraint makes of the target's, at every node that can be
    reached along its own path. paths: to the nodes of each row.
    """
    logits_BNV = logits_BNV.float()
    for row, logits_NV, nodes in zip(rows, logits_BNV, paths, strict=True):
        if row.constraint is None:
            continue
        numbers: dict[TokenPath, int] = {}  # of the nodes that are reached
        for node, path in enumerate(nodes):
            parent = numbers.get(path[:-1])
            is_reached = parent is not None and logits_NV[parent, path[-1]] > -torch.inf
            if is_reached or not path:
                try:
                    logits_NV[node] = row.constraint.after(row.answer, path, logits_NV[node])
                    numbers[path] = node
                except ConstraintError as fault:  # of this path; the target may take another
                    row.faults[path] = fault
    return logits_BNV
