"""The text of a chat: answers as they grow, and the messages before them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from draftheads.heads.files import write_text
from draftheads.heads.target import Target
from draftheads.heads.terminal import printable
from draftheads.infer.engine import Statistics, Step
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.text import TextStream

RESERVE = 256
"""New tokens that the history leaves room for, at most a quarter of the context."""
ENDINGS = {"interrupted": ", stopped by you", "length": ", cut at the length limit"}

Message = dict[str, str]


@dataclass
class Answer:
    """An answer and its statistics."""

    text: str = ""  # printable
    accepted: list[bool] = field(default_factory=list)  # characters from accepted draft tokens
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0  # of generating, without drawing
    finish: str = ""  # as in `Step`, or "interrupted", or "refused": the question does not fit

    def grow(self, steps: Iterator[Step], decoder: TextStream) -> Generator[None]:
        """Add these steps one by one, until the end or until this iterator is closed."""
        start = perf_counter()
        try:  # a closed one ends with half a character, too
            for step in steps:
                self.seconds += perf_counter() - start
                self.steps.append(step)
                visible = step.tokens[:-1] if step.finish == "eos" else step.tokens
                for place, token in enumerate(visible):
                    self._add(decoder.feed([token]), place < step.accepted)
                self.finish = step.finish or ""
                yield
                start = perf_counter()
        finally:
            self._add(decoder.flush(), False)
            self.finish = self.finish or "interrupted"

    def _add(self, text: str, is_accepted: bool) -> None:
        text = printable(text)
        self.text += text
        self.accepted += [is_accepted] * len(text)

    def rate(self) -> float:
        """Tokens per second, the prefill included."""
        return sum(len(step.tokens) for step in self.steps) / self.seconds if self.seconds else 0.0

    def seconds_per_token(self) -> float:
        """Without the prefill and its token; 0.0 if there is nothing else."""
        total = Statistics.of(self.steps)
        return (total.draft_seconds + total.verify_seconds) / max(total.tokens, 1)

    def summary(self, plain: float = 0.0) -> str:
        """The line of statistics below an answer. plain: seconds per token of the plain model."""
        tokens = sum(len(step.tokens) for step in self.steps)
        line = f"{tokens} tokens, {self.rate():.1f} tokens/s"
        statistics = Statistics.of(self.steps)
        if statistics.steps:
            line += f", {statistics.tokens_per_step:.2f} tokens/step"
        if plain and (own := self.seconds_per_token()):
            line += f", {plain / own:.1f}x plain"
        return line + ENDINGS.get(self.finish, "")


class History:
    """The messages of a conversation; drops the oldest turns to fit the context.

    Raises ValueError for a target without tokenizer, and for a system prompt that it cannot take.
    """

    def __init__(self, target: Target, system: str | None, max_new_tokens: int | None) -> None:
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer; a chat needs one, add its files")
        self.target, self.max_new_tokens = target, max_new_tokens
        self.has_template = bool(getattr(target.tokenizer, "chat_template", None))
        self.messages: list[Message] = []
        self.system = ""
        if system:
            self.instruct(system)

    def instruct(self, system: str) -> None:
        """Set the system prompt. Raises ValueError, and keeps the old one, if the target has no
        chat template or its template rejects it.
        """
        self._replace(system, self.messages)

    def prompt(self, question: str) -> tuple[list[int], int]:
        """Token ids of the conversation with `question`, and the number of turns dropped.

        Raises ValueError, and drops nothing, if the question alone does not fit.
        """
        tokens, start = self.fit(self.messages, question)
        del self.messages[:start]
        return tokens, start // 2

    def fit(self, messages: Sequence[Message], question: str) -> tuple[list[int], int]:
        """Token ids of these messages with `question`, and how many had to be left out."""
        context = self.target.context
        reserve = min(self.max_new_tokens or RESERVE, RESERVE, context // 4)
        for start in range(0, len(messages) + 1 if self.has_template else 1, 2):
            tokens = self._encode(messages[start:], question)
            if len(tokens) + reserve <= context:
                break
        if len(tokens) >= context:
            raise ValueError(
                f"expected a message shorter than the context of {self.target.name} ({context} "
                f"tokens), got {len(tokens)} with the template; send a shorter one"
            )
        return tokens, start

    def add(self, question: str, answer: str) -> None:
        """Remember a turn; without a chat template, that one alone, and no prompt has it."""
        if not self.has_template:
            self.messages.clear()
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": answer})

    def before_last(self) -> tuple[list[Message], str]:
        """The messages before the last question, and that question. Raises ValueError if there is
        none.
        """
        if not self.messages:
            raise ValueError("expected a question before this; none was answered, ask one")
        return self.messages[:-2], self.messages[-2]["content"]

    def save(self, path: Path) -> None:
        """Write system prompt and messages as JSON."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        record = {"messages": [*head, *self.messages]}
        write_text(path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")

    def load(self, path: Path) -> None:
        """Replace the conversation by a saved one. Raises ValueError, and keeps the old one, for
        anything else.
        """
        try:  # the errors of json do not mention the file
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            turns = [(each["role"], each["content"]) for each in messages]
            system = turns.pop(0)[1] if turns and turns[0][0] == "system" else ""
            if [role for role, _ in turns] != ["user", "assistant"] * (len(turns) // 2):
                raise ValueError("the messages are not questions and answers in turn")
            if not all(isinstance(text, str) for _, text in [("", system), *turns]):
                raise ValueError("a message is no text")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f'{path}: expected {{"messages": [...]}} as /save writes it, got something else '
                f"({error}); choose another file"
            ) from error
        self._replace(system, [{"role": role, "content": text} for role, text in turns])

    def _replace(self, system: str, messages: list[Message]) -> None:
        if system and not self.has_template:
            raise ValueError(
                f"{self.target.name} has no chat template, so it takes no system prompt; "
                "leave it out"
            )
        old = self.system, self.messages
        self.system, self.messages = system, messages
        try:  # some templates reject the role, or what another one took
            self._encode(messages, "Hello")
        except ValueError:
            self.system, self.messages = old
            raise

    def _encode(self, messages: Sequence[Message], question: str) -> list[int]:
        if not self.has_template:
            return encode_prompt(self.target, question)
        head = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"role": "user", "content": question}
        return encode_prompt(self.target, [*head, *messages, asked])
