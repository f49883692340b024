"""One streamed answer: text as it comes, draft tokens coloured, and a line of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from rich.console import Console

from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.engine import Speculator, Statistics, Step
from draftheads.infer.text import TextStream

ACCEPTED, NOTE = "green", "dim"
LEGEND = "green: draft tokens that the target accepted; plain: the target's own tokens"

_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)])
for _kept in "\t\n":
    del _CONTROLS[ord(_kept)]


@dataclass(frozen=True)
class ChatOptions:
    """system: first message of a chat. sampling: default greedy. max_new_tokens: per answer,
    default what the context leaves. show_accepted: colour the accepted draft tokens.
    """

    system: str | None = None
    sampling: Acceptance = field(default_factory=Greedy)
    max_new_tokens: int | None = None
    show_accepted: bool = False


@dataclass
class Answer:
    """What was written. finish: as in `Step`, "interrupted" by Ctrl-C, or "refused" for a question
    that does not fit the context. seconds: wall time from the question to the last token.
    """

    text: str = ""
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    finish: str = "interrupted"

    @property
    def tokens(self) -> int:
        """How many were written, the EOS included."""
        return sum(len(step.tokens) for step in self.steps)

    @property
    def statistics(self) -> Statistics:
        """Sums over the steps."""
        total = Statistics()
        for step in self.steps:
            total.add(step)
        return total

    def summary(self) -> str:
        """The line of numbers below an answer."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        line = f"{self.tokens} tokens, {rate:.1f} tokens/s"
        if self.statistics.steps:
            line += f", {self.statistics.tokens_per_step:.2f} tokens/step"
        ends = {"interrupted": ", stopped by you", "length": ", cut at the length limit"}
        return line + ends.get(self.finish, "")


def has_template(tokenizer: object) -> bool:
    """True for the tokenizer of a chat model."""
    return bool(getattr(tokenizer, "chat_template", None))


def printable(text: str) -> str:
    """The text without control characters: a model's output must not command the terminal."""
    return text.translate(_CONTROLS)


def stream_answer(
    speculator: Speculator, prompt: Sequence[int], options: ChatOptions, console: Console
) -> Answer:
    """Generate and print one answer, as far as Ctrl-C lets it come; cut to the context's room."""
    target = speculator.target
    answer, start = Answer(), perf_counter()
    before = () if has_template(target.tokenizer) else prompt
    stream = TextStream(target.tokenizer, after=before)
    limit = options.max_new_tokens
    if limit is not None:
        limit = min(limit, target.context - len(prompt))

    def write(text: str, style: str | None = None) -> None:
        answer.text += text
        console.out(printable(text), style=style, end="", highlight=False)

    try:  # Ctrl-C ends the answer, not the program
        for step in speculator.generate(prompt, sampling=options.sampling, max_new_tokens=limit):
            answer.steps.append(step)
            _print_step(step, stream, write, options.show_accepted)
            answer.finish = step.finish or answer.finish
    except KeyboardInterrupt:
        answer.finish = "interrupted"
    answer.seconds = perf_counter() - start
    write(stream.flush())
    console.out("")
    return answer


def _print_step(
    step: Step, stream: TextStream, write: Callable[..., None], show_accepted: bool
) -> None:
    visible = step.tokens[:-1] if step.finish == "eos" else step.tokens
    if not show_accepted:
        write(stream.feed(visible))
        return
    for place, token in enumerate(visible):
        write(stream.feed([token]), ACCEPTED if place < step.accepted else None)
