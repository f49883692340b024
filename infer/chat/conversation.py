"""The text of a chat: answers as they grow, and the messages before them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from draftheads.heads.target.model import Target
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.rows import Statistics, Step
from draftheads.infer.text import AnswerText

RESERVE = 256
"""Number of new tokens that must fit after the history, at most a quarter of the context."""
ENDINGS = {"interrupted": ", stopped by you", "length": ", cut at the length limit"}

Message = dict[str, str]


@dataclass
class ChatAnswer:
    """An answer and its statistics."""

    text: str = ""  # printable
    steps: list[Step] = field(default_factory=list)
    finish: str = ""  # as in `Step`, or "interrupted", or "refused": it cannot be answered

    def add(self, step: Step, content: AnswerText) -> None:
        """Add a step. content: the text of all steps so far."""
        content.add(step.visible, step.accepted)
        self.steps.append(step)
        self.finish = step.finish or ""

    def end(self, content: AnswerText) -> None:
        """Take the whole text. If the answer was stopped inside a character, its incomplete bytes
        count, too.
        """
        content.end()
        self.text = content.text
        self.finish = self.finish or "interrupted"

    @property
    def tokens(self) -> int:
        """New tokens, the end token included."""
        return sum(len(step.tokens) for step in self.steps)

    def summary(self, plain: float = 0.0) -> str:
        """The line of statistics below an answer. plain: tokens per second of the plain model."""
        line = f"{self.tokens} tokens"
        statistics = Statistics.of(self.steps)
        speed = rate(self.steps)
        if speed:
            line += f", {speed:.1f} tokens/s"
        if statistics.steps:
            line += f", {statistics.tokens_per_step:.2f} tokens/step"
        if any(step.drafted for step in self.steps):
            drafts = sum(step.from_drafts for step in self.steps)
            line += f", {100 * drafts / self.tokens:.0f} % from drafts"
        if plain and speed:
            line += f", {speed / plain:.1f}x plain"
        return line + ENDINGS.get(self.finish, "")


def rate(steps: Iterable[Step]) -> float:
    """Tokens per second of these steps without the prefill; 0.0 if there are none. This is the only
    definition of speed in a chat, for the plain model at the start and for answers. Timed by
    `fair_clock`.
    """
    total = Statistics.of(steps)
    seconds = total.draft_seconds + total.verify_seconds
    return total.tokens / seconds if seconds else 0.0


class History:
    """The messages of a conversation. Drops the oldest turns to fit the context.

    Raises ValueError for a target without tokenizer, and for a system prompt that it cannot take.
    """

    def __init__(self, target: Target, system: str | None, max_new_tokens: int | None) -> None:
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer; a chat needs one, add its files")
        self.target = target
        self.max_new_tokens = max_new_tokens
        self.has_template = bool(getattr(target.tokenizer, "chat_template", None))
        self.messages: list[Message] = []
        self._head = [{"role": "system", "content": system}] if system else []
        if system and not self.has_template:
            raise ValueError(
                f"{target.name} has no chat template, so it takes no system prompt; leave it out"
            )
        if system:  # some templates reject the role
            self.prompt("Hello")

    def prompt(self, question: str) -> tuple[list[int], int]:
        """Token ids of the conversation with `question`, and the number of turns dropped.

        Raises ValueError, and drops nothing, if the question alone does not fit.
        """
        context = self.target.context
        reserve = min(self.max_new_tokens or RESERVE, RESERVE, context // 4)
        turns = len(self.messages) // 2 if self.has_template else 0
        for dropped in range(turns + 1):
            prompt: str | list[Message] = question
            if self.has_template:
                kept = self.messages[2 * dropped :]
                prompt = [*self._head, *kept, {"role": "user", "content": question}]
            tokens = encode_prompt(self.target, prompt)
            if len(tokens) + reserve <= context:
                break
        if len(tokens) >= context:
            raise ValueError(
                f"expected a message shorter than the context of {self.target.name} ({context} "
                f"tokens), got {len(tokens)} with the template; send a shorter one"
            )
        del self.messages[: 2 * dropped]
        return tokens, dropped

    def add(self, question: str, answer: str) -> None:
        """Remember a turn. Without a chat template only the last turn is kept, and no prompt
        contains it.
        """
        if not self.has_template:
            self.messages.clear()
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
