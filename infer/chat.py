"""A chat in the terminal: streamed answers, accepted draft tokens in colour, and statistics."""

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
RESERVE = 256
"""New tokens that the history leaves room for, at most a quarter of the context."""
HELP = """\
/reset  forget the conversation     /stats  statistics since the start
/help   this list                   /quit   leave (or Ctrl-D)
Ctrl-C stops an answer. A line that starts with a space is never a command."""
ENDINGS = {"interrupted": ", stopped by you", "length": ", cut at the length limit"}
CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\t\n"}

Message = dict[str, str]


@dataclass(frozen=True)
class ChatOptions:
    """Settings of a chat."""

    system: str | None = None  # first message
    sampling: Acceptance = field(default_factory=Greedy)
    max_new_tokens: int | None = None  # per answer; None: the rest of the context
    show_accepted: bool = False  # colour the accepted draft tokens


@dataclass
class Answer:
    """An answer and its statistics."""

    text: str = ""
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0  # wall time from the question to the last token
    finish: str = "interrupted"  # or as in `Step`, or "refused": the question does not fit

    def summary(self) -> str:
        """The line of statistics below an answer."""
        tokens = sum(len(step.tokens) for step in self.steps)
        rate = tokens / self.seconds if self.seconds else 0.0
        line = f"{tokens} tokens, {rate:.1f} tokens/s"
        statistics = Statistics.of(self.steps)
        if statistics.steps:
            line += f", {statistics.tokens_per_step:.2f} tokens/step"
        return line + ENDINGS.get(self.finish, "")


def printable(text: str) -> str:
    """The text without control characters: model output must not control the terminal."""
    return text.translate(CONTROLS)


def chat(
    speculator: Speculator,
    options: ChatOptions | None = None,
    *,
    read: Callable[[str], str] = input,
    console: Console | None = None,
) -> None:
    """Read lines and answer them until /quit or the end of the input.

    With a chat template the conversation is remembered; without one each line is continued on its
    own. read: takes the prompt to show, raises EOFError at the end. Raises ValueError, before
    reading, for a target without tokenizer and for a system prompt that it cannot take.
    """
    talk = _Conversation(speculator, options or ChatOptions(), console or Console())
    talk.greet()
    cursor = "> " if read is not input or sys.stdin.isatty() else ""
    if cursor:
        with suppress(ImportError):  # line editing and history, where available
            import readline  # noqa: F401
    while True:
        try:  # Ctrl-D quits, Ctrl-C does not
            line = read(cursor)
            words = line.split()
            if line.startswith("/") and len(words) == 1:
                if words[0] in ("/quit", "/exit"):
                    return
                talk.note(talk.command(words[0]))
            elif words:
                talk.answer(line.strip())
        except EOFError:
            if cursor:
                talk.note("")
            return
        except KeyboardInterrupt:
            talk.note("\nTo leave, type /quit or press Ctrl-D.")


def sample_chat(
    speculator: Speculator, questions: Sequence[str], *, console: Console | None = None
) -> list[Answer]:
    """Print and return the answers to these questions, accepted drafts in colour."""
    console = console or Console()
    talk = _Conversation(speculator, ChatOptions(show_accepted=True), console)
    answers = []
    for question in questions:
        console.out(f"> {printable(question)}", style="bold", highlight=False)
        answers.append(talk.answer(question))
    talk.note(LEGEND)
    return answers


class History:
    """The messages of a conversation; drops the oldest turns to fit the context.

    Raises ValueError for a target without tokenizer, and for a system prompt that it cannot take.
    """

    def __init__(self, target: Target, system: str | None, max_new_tokens: int | None) -> None:
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer; a chat needs one, add its files")
        self.target = target
        self.has_template = bool(getattr(target.tokenizer, "chat_template", None))
        self.messages: list[Message] = []
        self._reserve = min(max_new_tokens or RESERVE, RESERVE, target.context // 4)
        self._system = [{"role": "system", "content": system}] if system else []
        if system and not self.has_template:
            raise ValueError(
                f"{target.name} has no chat template, so it takes no system prompt; leave it out"
            )
        if system:
            self._encode([], "Hello")  # some templates reject the role

    def prompt(self, question: str) -> tuple[list[int], int]:
        """Token ids of the conversation with `question`, and the number of turns dropped.

        Raises ValueError, and drops nothing, if the question alone does not fit.
        """
        context = self.target.context
        for start in range(0, len(self.messages) + 1, 2):
            tokens = self._encode(self.messages[start:], question)
            if len(tokens) + self._reserve <= context:
                break
        if len(tokens) >= context:
            raise ValueError(
                f"expected a message shorter than the context of {self.target.name} ({context} "
                f"tokens), got {len(tokens)} with the template; send a shorter one"
            )
        del self.messages[:start]
        return tokens, start // 2

    def add(self, question: str, answer: str) -> None:
        """Remember a turn, if the target has a chat template."""
        if self.has_template:
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": answer})

    def _encode(self, messages: Sequence[Message], question: str) -> list[int]:
        if not self.has_template:
            return encode_prompt(self.target.tokenizer, question)
        asked = {"role": "user", "content": question}
        return encode_prompt(self.target.tokenizer, [*self._system, *messages, asked])


class _Conversation:
    """A conversation on a console."""

    def __init__(self, speculator: Speculator, options: ChatOptions, console: Console) -> None:
        self.speculator, self.options, self.console = speculator, options, console
        self.history = History(speculator.target, options.system, options.max_new_tokens)
        self.total, self.answers = Answer(finish=""), 0

    def note(self, text: str) -> None:
        """Print a message of the program."""
        self.console.out(text, style=NOTE, highlight=False)

    def greet(self) -> None:
        """Print the target and its options."""
        nodes, sampling = self.speculator.tree.draft_nodes, self.options.sampling
        drafts = f", a tree of {nodes} draft tokens" if nodes else ""
        self.note(f"{self.speculator.target.name}{drafts}. /help lists the commands.")
        if not self.history.has_template:
            self.note("No chat template: each line is continued on its own, nothing is remembered.")
        if not sampling.lossless:
            self.note(f"{type(sampling).__name__} acceptance is lossy: it changes the answers.")
        if self.options.show_accepted:
            self.note(LEGEND)

    def command(self, name: str) -> str:
        """The reply to a command other than /quit."""
        if name == "/help":
            return HELP
        if name == "/reset":
            self.history.messages.clear()
            return "Conversation reset."
        if name != "/stats":
            return f"{name} is not a command; /help lists them. To send it, put a space before it."
        if not self.answers:
            return "No answers yet."
        rates = Statistics.of(self.total.steps).acceptance_by_depth
        shares = ", ".join(f"{rate:.0%}" for rate in rates)
        return (
            f"answers: {self.answers}, {self.total.summary()}\n"
            f"steps with 1, 2, ... draft tokens accepted: {shares or 'none'}\n"
            "tokens/step includes the target's own bonus token."
        )

    def answer(self, question: str) -> Answer:
        """Stream the answer until its end or Ctrl-C, and remember it."""
        try:  # a message that is too long does not end the chat
            prompt, dropped = self.history.prompt(question)
        except ValueError as error:
            self.note(str(error))
            return Answer(finish="refused")
        if dropped:
            self.note(f"The context is full; oldest turns dropped: {dropped}.")
        target, sampling, limit = self.history.target, self.options.sampling, None
        if self.options.max_new_tokens is not None:
            limit = min(self.options.max_new_tokens, target.context - len(prompt))
        stream = TextStream(target.tokenizer, after=() if self.history.has_template else prompt)
        answer, start = Answer(), perf_counter()
        try:  # Ctrl-C ends the answer, not the program
            for step in self.speculator.generate(prompt, sampling=sampling, max_new_tokens=limit):
                answer.steps.append(step)
                visible = step.tokens[:-1] if step.finish == "eos" else step.tokens
                for place, token in enumerate(visible):
                    is_green = self.options.show_accepted and place < step.accepted
                    answer.text += self._print(stream.feed([token]), is_green=is_green)
                answer.finish = step.finish or answer.finish
        except KeyboardInterrupt:
            answer.finish = "interrupted"
        answer.seconds = perf_counter() - start
        answer.text += self._print(stream.flush())
        self.console.out("")
        self.note(answer.summary())
        if answer.steps:
            self.history.add(question, answer.text)
            self.answers += 1
            self.total.steps += answer.steps
            self.total.seconds += answer.seconds
        return answer

    def _print(self, text: str, *, is_green: bool = False) -> str:
        style = ACCEPTED if is_green else None
        self.console.out(printable(text), style=style, end="", highlight=False)
        return text
