"""A chat in the terminal: streamed answers, accepted draft tokens in colour, and statistics."""

from __future__ import annotations

import difflib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from draftheads.heads.terminal import SafeConsole, printable
from draftheads.infer.accept import Acceptance, Greedy, Sampled
from draftheads.infer.background import COMPLETE, Background
from draftheads.infer.chat.conversation import ChatAnswer, History, rate
from draftheads.infer.chat.idle import IdleTime
from draftheads.infer.chat.screen import NOTE, Screen
from draftheads.infer.costs import too_slow
from draftheads.infer.engine import Speculator
from draftheads.infer.prompt import PromptRenderer, encode_prompt
from draftheads.infer.rows import Session, Statistics, Step
from draftheads.infer.text import AnswerText, TextStream

LEGEND = "green: draft tokens that the target accepted; plain: the target's own tokens"
TRIAL_SECONDS, TRIAL_STEPS = 1.5, 48
"""How long the plain model is measured at most."""
JUDGED_STEPS = 32
"""Steps after which the chat says that drafts do not pay."""
HINTS = """Ctrl-C stops an answer. A line that starts with a space is never a command.
Alt-Enter, or Enter after a backslash, starts another line."""
NUMBERS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_new_tokens": int,
    "seed": int,
}
LIMITS = {"max_new_tokens": (1, 2**31), "seed": (-(2**62), 2**62)}


@dataclass(frozen=True)
class ChatOptions:
    """Settings of a chat."""

    system: str | None = None  # first message
    sampling: Acceptance = field(default_factory=Greedy)
    max_new_tokens: int | None = None  # per answer; None: the rest of the context
    show_accepted: bool = False  # colour the accepted draft tokens
    seed: int = 0  # after a change of the rule


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
    speculator: Speculator, questions: Sequence[str], *, console: Console | None = None
) -> list[ChatAnswer]:
    """Print and return the answers to these questions, accepted drafts in colour."""
    console = console or SafeConsole()
    talk = _Conversation(speculator, ChatOptions(show_accepted=True), console)
    answers = []
    for question in questions:
        console.out(f"> {printable(question)}", style="bold", highlight=False)
        answers.append(talk.answer(question))
    talk.note(LEGEND)
    return answers


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets; a second one raises KeyboardInterrupt. In other threads than the
    main one it is never set.
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
    """Tokens per second of an engine without drafts, over a few dozen steps after some untimed."""
    target = engine.target
    prompt = encode_prompt(target, [{"role": "user", "content": "Hello"}])
    limit = min(TRIAL_STEPS, target.context - len(prompt))
    untimed = 8 if engine.compile else 2  # more would take seconds with a large target
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
        self.total = ChatAnswer()  # the steps of all
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
        self._warn()
        if nodes and self.options.show_accepted and self.console.is_terminal:
            self.note(LEGEND)

    def renew(self) -> None:
        """Take over what was done while the user typed."""
        if self.idle.fault is not None:
            self._end_learning(self.idle.fault)
        if self.idle.engine is not self.speculator:
            self.speculator = self.idle.engine
            self.session = Session()  # the old one has keys and values of other drafts

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
        except Exception as error:  # whatever it is, the chat goes on
            self._end_learning(error)

    def _warn(self) -> None:
        rule = self.options.sampling
        if not rule.lossless:
            self.note(f"{type(rule).__name__} acceptance is lossy: it changes the answers.")

    def _warn_if_slow(self) -> None:
        """Say once that drafts cost more than they bring, when enough steps show it."""
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
        """Run a command or answer a question; returns the answer, an empty one without."""
        text = line.strip()
        if not text:
            return ChatAnswer()
        name = text.split()[0]
        argument = text.removeprefix(name).strip()
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.8)
        # a question may begin with a path, such as /usr/bin
        if not line.startswith("/") or (argument and not near):
            return self.answer(text)
        try:  # mistakes in a command do not end the chat
            if name not in COMMANDS:
                hint = f"; did you mean {near[0]}?" if near else ";"
                raise ValueError(
                    f"{name} is not a command{hint} /help lists them. To send it, put a space "
                    "before it."
                )
            run, parameter, _ = COMMANDS[name]
            is_needed = parameter[:1].isalpha()  # optional ones are in brackets
            if (argument and not parameter) or (is_needed and not argument):
                raise ValueError(f"expected {name} {parameter or 'alone'}, got {text!r}")
            return run(self, argument) or ChatAnswer()
        except (ValueError, OSError) as error:
            self.note(str(error))
            return ChatAnswer()

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
        )
        marks = PromptRenderer(target, target.template_args).marks
        after = () if self.history.has_template else prompt
        stream = TextStream(target.tokenizer, after=after, marks=marks)
        steps = answer.grow(generated, AnswerText(stream, clean=printable))
        with interruptible() as stopped, closing(Screen(self.console)) as screen, closing(steps):
            for _ in steps:
                screen.show(answer.text, self._green(answer))
                if stopped.is_set():
                    break
            steps.close()
            screen.show(answer.text, self._green(answer))
        self.note(answer.summary(self.plain))
        self.history.add(question, answer.text)
        self.answers += 1
        self.total.steps += answer.steps
        self._warn_if_slow()
        self.prompt_tokens += len(prompt)
        self.reused += self.session.reused
        self._learn(prompt, answer)
        return answer

    def _green(self, answer: ChatAnswer) -> Sequence[bool]:
        """The characters of an answer that are shown in green."""
        return answer.accepted if self.options.show_accepted else [False] * len(answer.text)

    def _use(self, rule: Acceptance) -> None:
        rule.seed(self.options.seed)
        self.options = replace(self.options, sampling=rule)

    def _system(self, text: str) -> None:
        if text:
            self.history.instruct(text)
        self.note(f"System prompt: {self.history.system or 'none'}")

    def _reset(self, _: str) -> None:
        self.history.messages.clear()
        self.note("Conversation reset.")

    def _regen(self, _: str) -> ChatAnswer:
        messages = self.history.messages
        if not messages:
            raise ValueError("expected a question before this; none was answered, ask one")
        self.history.messages = messages[:-2]
        answer = self.answer(messages[-2]["content"])
        if answer.finish == "refused":
            self.history.messages = messages
        return answer

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if text:
            self._change(name, _number(name, value))
        rule = self.options.sampling
        shown: dict[str, Any] = {"rule": type(rule).__name__.lower()}
        shown |= {each.name: getattr(rule, each.name) for each in fields(rule) if each.repr}
        shown |= {name: getattr(self.options, name) for name in LIMITS}
        self.note(", ".join(f"{name} {value}" for name, value in shown.items()))

    def _change(self, name: str, number: Any) -> None:
        rule = self.options.sampling
        if name in LIMITS:
            self.options = replace(self.options, **{name: number})
            self.history.max_new_tokens = self.options.max_new_tokens
            self._use(rule)
        elif name == "temperature" and number == 0:
            self._use(Greedy())
        elif name == "temperature" and isinstance(rule, Greedy):
            self._use(Sampled(number))
        elif name in {each.name for each in fields(rule) if each.repr}:
            self._use(replace(rule, **{name: number}))
        else:
            current = type(rule).__name__.lower()
            raise ValueError(
                f"{name}: expected the rule sampled, got {current}; /set a temperature"
            )

    def _stats(self, _: str) -> None:
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

    def _tint(self, _: str) -> None:
        tint = not self.options.show_accepted
        self.options = replace(self.options, show_accepted=tint)
        self.note(LEGEND if tint else "Accepted draft tokens are not coloured.")

    def _help(self, _: str) -> None:
        for name, (_run, parameter, text) in COMMANDS.items():
            usage = f"{name} {parameter}"
            self.note(f"{usage:<20} {text}")
        self.note(HINTS)

    def _quit(self, _: str) -> None:
        self.is_over = True


COMMANDS: dict[str, tuple[Callable[[_Conversation, str], ChatAnswer | None], str, str]] = {
    "/system": (
        _Conversation._system,
        "[TEXT]",
        "show or set the system prompt; the conversation stays",
    ),
    "/reset": (_Conversation._reset, "", "forget the conversation"),
    "/regen": (_Conversation._regen, "", "answer the last question again"),
    "/set": (
        _Conversation._set,
        "[NAME VALUE]",
        "temperature, top_p, top_k, max_new_tokens, seed; alone: show",
    ),
    "/stats": (_Conversation._stats, "", "statistics since the start"),
    "/tint": (_Conversation._tint, "", "accepted draft tokens in green: on or off"),
    "/help": (_Conversation._help, "", "this list"),
    "/quit": (_Conversation._quit, "", "leave (or Ctrl-D)"),
}
"""What each does, its parameter, in brackets if it may be left out, and a line of help."""


def _number(name: str, text: str) -> float:
    """The value of a setting. Raises ValueError for no number; rules check theirs themselves."""
    if name not in NUMBERS:
        raise ValueError(f"/set: expected one of {', '.join(NUMBERS)}, got {name!r}")
    try:
        number = NUMBERS[name](text)
    except (ValueError, OverflowError) as error:  # python's names no setting
        kind = "a whole number" if NUMBERS[name] is int else "a number"
        raise ValueError(f"{name}: expected {kind}, got {text.strip()!r}") from error
    if name in LIMITS:
        low, high = LIMITS[name]
        if not low <= number <= high:
            raise ValueError(f"{name}: expected {low} to {high}, got {number}")
    return number
