"""A chat in the terminal: streamed answers, accepted draft tokens in colour, and statistics."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType

from rich.console import Console
from rich.text import Text

from draftheads.heads.terminal import SafeConsole, printable
from draftheads.infer.accept import Acceptance, Greedy
from draftheads.infer.background import COMPLETE, Background
from draftheads.infer.chat.conversation import ChatAnswer, History, rate
from draftheads.infer.chat.idle import IdleTime
from draftheads.infer.chat.screen import NOTE, Screen
from draftheads.infer.constraint import Constraint, ConstraintError
from draftheads.infer.costs import too_slow
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import PromptRenderer, encode_prompt
from draftheads.infer.reading import Session
from draftheads.infer.rows import Statistics, Step
from draftheads.infer.text import AnswerText, TextStream

LEGEND = "green: draft tokens that the target accepted; plain: the target's own tokens"
TRIAL_SECONDS, TRIAL_STEPS = 1.5, 48
"""The plain model is measured for at most this many seconds and steps."""
JUDGED_STEPS = 32
"""Number of steps after which the chat may say that drafts do not pay."""
HINTS = """Ctrl-C stops an answer. A line that starts with a space is never a command.
Alt-Enter, or Enter after a backslash, starts another line."""


@dataclass(frozen=True)
class ChatOptions:
    """Settings of a chat."""

    system: str | None = None  # first message
    sampling: Acceptance = field(default_factory=Greedy)
    max_new_tokens: int | None = None  # per answer; None: the rest of the context
    constraint: Constraint | None = None  # of each answer


def chat(
    speculator: Speculator,
    options: ChatOptions | None = None,
    *,
    read: Callable[[str], str] | None = None,
    console: Console | None = None,
    background: Background | None = None,
) -> None:
    """Read lines and answer them until /quit, Ctrl-C twice, or the end of the input.

    With a chat template the conversation is remembered; without one each line is continued on its
    own. read: takes the prompt to show, raises EOFError at the end; default: a line editor on a
    terminal, else `input`. background: works while a line is awaited. Raises ValueError, before
    reading, for a target without tokenizer and for a system prompt that it cannot take;
    KeyboardInterrupt for a second Ctrl-C in an answer.
    """
    options = options or ChatOptions()
    talk = _Conversation(speculator, options, console or SafeConsole(), background)
    if talk.console.is_interactive:
        talk.plain = plain_rate(Speculator(speculator.target, compile=speculator.compile))
    talk.greet()
    is_typed = read is not None or sys.stdin.isatty()
    if read is None and is_typed and talk.console.is_terminal:
        from draftheads.infer.chat.line_editor import typed_lines

        read = typed_lines([*COMMANDS])
    was_stopped = False
    while not talk.is_over:
        try:
            with talk.idle:
                line = (read or input)("> " if is_typed else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if was_stopped:
                return
            talk.note("To leave, press Ctrl-C again or Ctrl-D, or type /quit.")
            was_stopped = True
            continue
        talk.renew()
        was_stopped = talk.take(line).finish == "interrupted"


def sample_chat(
    speculator: Speculator, questions: Sequence[str], *, console: Console
) -> list[ChatAnswer]:
    """Print and return the answers to these questions, with accepted drafts in colour."""
    talk = _Conversation(speculator, ChatOptions(), console)
    answers = []
    for question in questions:
        console.out(f"> {printable(question)}", style="bold", highlight=False)
        answers.append(talk.answer(question))
    talk.note(LEGEND)
    return answers


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets; a second Ctrl-C raises KeyboardInterrupt. Outside the main
    thread the event is never set.
    """
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    old = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, old)


def plain_rate(engine: Speculator) -> float:
    """Tokens per second of an engine without drafts, measured over a few dozen steps after an
    untimed warm-up.
    """
    target = engine.target
    prompt = encode_prompt(target, [{"role": "user", "content": "Hello"}])
    limit = min(TRIAL_STEPS, target.context - len(prompt))
    # more would take seconds with a large target
    untimed = 8 if engine.compile or engine.maker.recorder else 2
    list(engine.generate(prompt, max_new_tokens=min(limit, untimed)))
    steps: list[Step] = []
    until = perf_counter() + TRIAL_SECONDS
    while len(steps) < TRIAL_STEPS and perf_counter() < until:
        for step in engine.generate(prompt, max_new_tokens=limit):
            steps.append(step)
            if perf_counter() > until:
                break
    return rate(steps)


class _Conversation:
    """A conversation on a console."""

    def __init__(
        self,
        speculator: Speculator,
        options: ChatOptions,
        console: Console,
        background: Background | None = None,
    ) -> None:
        self.speculator = speculator
        self.idle = IdleTime(background, speculator)
        self.options = options
        self.console = console
        self.history = History(speculator.target, options.system, options.max_new_tokens)
        self.session = Session()
        self.total = ChatAnswer()  # sums over all answers
        self.answers = 0
        self.is_over = False
        self.prompt_tokens = 0
        self.reused = 0
        self.is_warned = not speculator.tree.draft_nodes
        self.plain = 0.0  # tokens per second without drafts; 0: not measured

    def note(self, text: str) -> None:
        """Print a message of the program."""
        self.console.print(Text(printable(text), NOTE), soft_wrap=not self.console.is_interactive)

    def greet(self) -> None:
        """Print the target and its options."""
        nodes = self.speculator.tree.draft_nodes
        drafts = f", a tree of {nodes} draft tokens" if nodes else ""
        self.note(f"{self.speculator.target.title}{drafts}. /help lists the commands.")
        if self.plain:
            self.note(f"The plain model makes {self.plain:.1f} tokens/s.")
        if not self.history.has_template:
            self.note("No chat template: each line is continued on its own, nothing is remembered.")
        rule = self.options.sampling
        if not rule.lossless:
            self.note(f"{type(rule).__name__} acceptance is lossy: it changes the answers.")
        if nodes and self.console.is_terminal:
            self.note(LEGEND)

    def renew(self) -> None:
        """Use the engine that the background returned while the user typed."""
        if self.idle.fault is not None:
            self._end_learning(self.idle.fault)
        if self.idle.engine is not self.speculator:
            self.speculator = self.idle.engine
            self.session = Session()  # the old session holds keys and values of other drafts

    def _end_learning(self, fault: Exception) -> None:
        self.idle.background = self.idle.fault = None
        self.note(f"Learning has failed and ends: {type(fault).__name__}: {fault}")

    def _learn(self, prompt: Sequence[int], answer: ChatAnswer) -> None:
        """Give a complete answer to the background, if there is one."""
        if self.idle.background is None or answer.finish not in COMPLETE:
            return
        tokens = [token for step in answer.steps for token in step.tokens]
        try:
            self.idle.background.answered(prompt, tokens)
        except Exception as error:  # the chat continues after any error
            self._end_learning(error)

    def _warn_if_slow(self) -> None:
        """Warn once, after enough steps, if drafts cost more time than they save."""
        total = Statistics.of(self.total.steps)
        if self.is_warned or not self.plain or total.steps < JUDGED_STEPS:
            return
        seconds = (total.draft_seconds + total.verify_seconds) / total.steps
        dtype = self.speculator.target.precision
        fault = too_slow(total.tokens_per_step, seconds * self.plain, dtype)
        if fault:
            self.note(f"Drafts are {fault}.")
            self.is_warned = True

    def take(self, line: str) -> ChatAnswer:
        """Run a command or answer a question. Returns the answer, which is empty for a command
        without one.
        """
        text = line.strip()
        if not text:
            return ChatAnswer()
        # a question may begin with a path, such as /usr/bin
        if not line.startswith("/") or len(text.split()) > 1:
            return self.answer(text)
        if text not in COMMANDS:
            self.note(
                f"{text} is not a command; /help lists them. To send it, put a space before it."
            )
            return ChatAnswer()
        run, _ = COMMANDS[text]
        return run(self) or ChatAnswer()

    def answer(self, question: str) -> ChatAnswer:
        """Stream the answer until its end or Ctrl-C, and remember it."""
        try:  # a message that is too long does not end the chat
            prompt, dropped = self.history.prompt(question)
        except ValueError as error:
            self.note(str(error))
            return ChatAnswer(finish="refused")
        if dropped:
            self.note(f"The context is full; oldest turns dropped: {dropped}.")
        answer = ChatAnswer()
        target = self.speculator.target
        limit = self.options.max_new_tokens
        if limit is not None:
            limit = min(limit, target.context - len(prompt))
        generated = self.speculator.generate(
            prompt,
            sampling=self.options.sampling,
            max_new_tokens=limit,
            session=self.session,
            constraint=self.options.constraint,
        )
        marks = PromptRenderer(target, target.template_args).marks
        after = () if self.history.has_template else prompt
        stream = TextStream(target.tokenizer, after=after, marks=marks)
        content = AnswerText(stream, clean=printable)
        try:
            with interruptible() as stopped, closing(Screen(self.console)) as screen:
                for step in generated:
                    answer.add(step, content)
                    screen.show(content)
                    if stopped.is_set():
                        break
                generated.close()
                answer.end(content)
                screen.show(content)
        except ConstraintError as error:  # a schema that is too complex does not end the chat
            self.note(str(error))
            return ChatAnswer(finish="refused")
        self.note(answer.summary(self.plain))
        self.history.add(question, answer.text)
        self.answers += 1
        self.total.steps += answer.steps
        self._warn_if_slow()
        self.prompt_tokens += len(prompt)
        self.reused += self.session.reused
        self._learn(prompt, answer)
        return answer

    def reset(self) -> None:
        """Forget the conversation, but not the system prompt."""
        self.history.messages.clear()
        self.note("Conversation reset.")

    def answer_again(self) -> ChatAnswer:
        """Answer the last question again."""
        messages = self.history.messages
        if not messages:
            self.note("expected a question before this; none was answered, ask one")
            return ChatAnswer()
        self.history.messages = messages[:-2]
        answer = self.answer(messages[-2]["content"])
        if answer.finish == "refused":
            self.history.messages = messages
        return answer

    def show_statistics(self) -> None:
        """Print the statistics of all answers."""
        if not self.answers:
            self.note("No answers yet.")
            return
        rates = Statistics.of(self.total.steps).acceptance_by_depth
        shares = ", ".join(f"{rate:.0%}" for rate in rates)
        self.note(
            f"answers: {self.answers}, {self.total.summary(self.plain)}\n"
            f"steps with 1, 2, ... draft tokens accepted: {shares or 'none'}\n"
            "tokens/step includes the target's own bonus token.\n"
            f"{self.reused} of {self.prompt_tokens} prompt tokens reused"
        )

    def help(self) -> None:
        """Print the commands."""
        for name, (_, text) in COMMANDS.items():
            self.note(f"{name:<8} {text}")
        self.note(HINTS)

    def quit(self) -> None:
        """End the chat."""
        self.is_over = True


COMMANDS: dict[str, tuple[Callable[[_Conversation], ChatAnswer | None], str]] = {
    "/reset": (_Conversation.reset, "forget the conversation"),
    "/regen": (_Conversation.answer_again, "answer the last question again"),
    "/stats": (_Conversation.show_statistics, "statistics since the start"),
    "/help": (_Conversation.help, "this list"),
    "/quit": (_Conversation.quit, "leave (or Ctrl-D)"),
}
"""Command -> the method that runs it, and its line of help."""
