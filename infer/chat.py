"""One streamed answer: text as it comes, draft tokens coloured, and a line of numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from rich.console import Console

from draftheads.heads.target import Target
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.engine import Speculator, Statistics, Step
from draftheads.infer.text import TextStream, encode_prompt

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


# A chat in the terminal, streamed, with the drafts at work.


__all__ = ["ChatOptions", "chat", "sample_chat"]

Message = dict[str, str]

RESERVE = 256
"""New tokens that the history makes room for, where the context is not smaller than four times."""

HELP = """\
/reset  forget the conversation     /stats  numbers since the start
/help   this list                   /quit   leave (or Ctrl-D)
Ctrl-C stops an answer. A line that starts with a space is never taken for a command."""


def chat(
    speculator: Speculator,
    options: ChatOptions | None = None,
    *,
    read: Callable[[str], str] = input,
    console: Console | None = None,
) -> None:
    """Read lines and answer them until /quit or the end of the input.

    With a chat template the conversation is remembered; without one each line is continued on its
    own. read: gets the text to show before the cursor, raises EOFError at the end. Raises
    ValueError, before anything is read, for a target without tokenizer and for a system prompt that
    the target cannot take.
    """
    session = _Session(speculator, options or ChatOptions(), console or Console())
    session.greet()
    cursor = "> " if read is not input or sys.stdin.isatty() else ""
    if cursor:
        with suppress(ImportError):  # arrow keys and recall of lines, where the platform has them
            import readline  # noqa: F401
    while True:
        try:  # Ctrl-D leaves; Ctrl-C, wherever it falls, does not
            if not session.take(read(cursor)):
                return
        except EOFError:
            if cursor:
                session.note("")
            return
        except KeyboardInterrupt:
            session.note("\nTo leave, type /quit or press Ctrl-D.")


def sample_chat(
    speculator: Speculator,
    questions: Sequence[str],
    options: ChatOptions | None = None,
    *,
    console: Console | None = None,
) -> list[Answer]:
    """Print a conversation with these questions, accepted drafts in colour unless `options` say
    otherwise; returns the answers.
    """
    console = console or Console()
    session = _Session(speculator, options or ChatOptions(show_accepted=True), console)
    answers = []
    for question in questions:
        console.out(f"> {printable(question)}", style="bold", highlight=False)
        answers.append(session.answer(question))
    if session.options.show_accepted:
        session.note(LEGEND)
    return answers


class History:
    """The messages of a conversation, cut to the context from its oldest turn on.

    Raises ValueError for a system prompt that the target cannot take.
    """

    def __init__(self, target: Target, system: str | None, max_new_tokens: int | None) -> None:
        self.target = target
        self.chats = has_template(target.tokenizer)
        if system and not self.chats:
            raise ValueError(
                f"{target.name} has no chat template, so it takes no system prompt; leave it out"
            )
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._turns: list[tuple[Message, Message]] = []
        self._reserve = min(max_new_tokens or RESERVE, RESERVE, target.context // 4)
        if system:
            self._check_template()

    def prompt(self, question: str) -> tuple[list[int], int]:
        """Token ids that ask `question`, and how many old turns had to go for them.

        Raises ValueError, and forgets nothing, when the question alone does not fit.
        """
        context = self.target.context
        for dropped in range(len(self._turns) + 1):
            tokens = self._encode(self._turns[dropped:], question)
            if len(tokens) + self._reserve <= context:
                break
        if len(tokens) >= context:
            raise ValueError(
                f"your message has {len(tokens)} tokens with what must stand around it, the "
                f"context of {self.target.name} {context}; send a shorter one"
            )
        del self._turns[:dropped]
        return tokens, dropped

    def add(self, question: str, answer: str) -> None:
        """Remember a turn; without a chat template nothing is."""
        if self.chats:
            turn = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
            self._turns.append(turn)

    def clear(self) -> None:
        """Forget all turns, keep the system prompt."""
        self._turns.clear()

    def _encode(self, turns: list[tuple[Message, Message]], question: str) -> list[int]:
        if not self.chats:
            return encode_prompt(self.target.tokenizer, question)
        messages = [message for turn in turns for message in turn]
        asked = {"role": "user", "content": question}
        return encode_prompt(self.target.tokenizer, [*self._system, *messages, asked])

    def _check_template(self) -> None:
        try:  # some templates refuse the role
            self._encode([], "Hello")
        except ValueError as error:
            raise ValueError(
                f"the chat template of {self.target.name} takes no system prompt ({error}); "
                "put it into your first message"
            ) from error


class _Session:
    """A conversation on a console, and its numbers."""

    def __init__(self, speculator: Speculator, options: ChatOptions, console: Console) -> None:
        target = speculator.target
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer, which a chat needs; add its files")
        self.speculator, self.options, self.console = speculator, options, console
        self.history = History(target, options.system, options.max_new_tokens)
        self.total, self.answers = Answer(finish=""), 0

    def note(self, text: str) -> None:
        """Something that the program says, not the target."""
        self.console.out(text, style=NOTE, highlight=False)

    def greet(self) -> None:
        """Say who answers, and how."""
        nodes = self.speculator.tree.draft_nodes
        drafts = f", a tree of {nodes} draft tokens" if nodes else ""
        self.note(f"{self.speculator.target.name}{drafts}. /help lists the commands.")
        if not self.history.chats:
            self.note("No chat template: each line is continued on its own, nothing is remembered.")
        if not self.options.sampling.lossless:
            self.note(
                f"{type(self.options.sampling).__name__} acceptance is lossy: the answers do not "
                "follow the target's own distribution."
            )
        if self.options.show_accepted:
            self.note(LEGEND)

    def take(self, line: str) -> bool:
        """Obey or answer a line; False ends the chat."""
        if line.startswith("/") and len(line.split()) == 1:
            return self.command(line.strip())
        if line.strip():
            self.answer(line.strip())
        return True

    def command(self, name: str) -> bool:
        """Obey; False ends the chat."""
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            self.history.clear()
            self.note("The conversation starts anew.")
        elif name == "/stats":
            self.note(self._statistics())
        elif name == "/help":
            self.note(HELP)
        else:
            self.note(
                f"{name} is no command; /help lists them. To send it as text, start the line with "
                "a space."
            )
        return True

    def answer(self, question: str) -> Answer:
        """Ask the target, print what it says, remember it."""
        try:  # the user typed too much: say so and go on
            prompt, dropped = self.history.prompt(question)
        except ValueError as error:
            self.note(str(error))
            return Answer(finish="refused")
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.note(f"The context is full: the oldest {turns} forgotten.")
        answer = stream_answer(self.speculator, prompt, self.options, self.console)
        self.note(answer.summary())
        if answer.steps:
            self.history.add(question, answer.text)
            self.answers += 1
            self.total.steps += answer.steps
            self.total.seconds += answer.seconds
        return answer

    def _statistics(self) -> str:
        if not self.answers:
            return "Nothing has been answered yet."
        rates = self.total.statistics.acceptance_by_depth
        word = "answer" if self.answers == 1 else "answers"
        lines = [f"{self.answers} {word}: {self.total.summary()}"]
        if rates:
            shares = ", ".join(f"{rate:.0%}" for rate in rates)
            lines.append(f"steps with 1, 2, ... draft tokens accepted: {shares}")
        return "\n".join([*lines, "tokens/step counts the target's own bonus token."])
