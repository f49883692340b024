"""The promise: a chat goes on, whatever is typed and whenever Ctrl-C is pressed."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_chat import END, TEMPLATE, llama
from tiny_heads import random_head

from draftheads.heads.target.model import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer import threads
from draftheads.infer.chat import conversation, repl
from draftheads.infer.chat.conversation import ChatAnswer, History
from draftheads.infer.chat.repl import COMMANDS, ChatOptions, chat, sample_chat
from draftheads.infer.drafters.ngram import NGram
from draftheads.infer.engine import Speculator
from draftheads.infer.lossy import Typical
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.rows import Step

REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
GREEN = "\x1b[32m"
CTRL_C = object()
ROOT = Path(__file__).parents[2]


@pytest.mark.mend("/stats compared times of an idle machine with those of a busy one")
def test_other_processes_do_not_change_what_drafts_gain(target, monkeypatch):
    """Ten seconds of the wall go by at each look at it: a rate counts those of the CPU."""
    wall = count(0, 10)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr("draftheads.infer.engine.perf_counter", lambda: next(wall), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert repl.plain_rate(Speculator(target)) > 1.0
    assert conversation.rate(Speculator(target).generate([5, 6], max_new_tokens=9)) > 1.0


@pytest.fixture
def target() -> Target:
    return llama(eos=(END,))


class Scripted(Speculator):
    """Answers with given steps and remembers what it was asked."""

    def __init__(self, target: Target, *answers: list) -> None:
        super().__init__(target)
        self.answers, self.prompts, self.limits, self.rules = list(answers), [], [], []

    def generate(
        self, prompt, *, sampling=None, max_new_tokens=None, stop=(), session=None, constraint=None
    ):
        self.prompts.append(self.target.tokenizer.decode(prompt))
        self.limits.append(max_new_tokens)
        self.rules.append(sampling)
        for item in self.answers.pop(0):
            if item is CTRL_C:
                signal.raise_signal(signal.SIGINT)
            else:
                yield item


def says(target: Target, text: str, accepted: int = -1, finish: str | None = None) -> Step:
    return Step(target.tokenizer(text)["input_ids"], accepted, finish, 0.0, 0.0)


def talk(
    speculator: Speculator, *lines, options: ChatOptions | None = None, colour=False, width=80
) -> str:
    """What a chat prints for these lines; an exception among them is raised instead of a line."""
    script, out = iter(lines), io.StringIO()

    def read(cursor: str) -> str:
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    colours = "standard" if colour else None
    console = Console(file=out, force_terminal=colour, color_system=colours, width=width)
    chat(speculator, options, read=read, console=console)
    return out.getvalue()


def done(target: Target, text: str) -> list[Step]:
    return [says(target, text), replace(says(target, "<|im_end|>", 0), finish="eos")]


def test_answers_are_printed_and_remembered(target):
    speculator = Scripted(target, done(target, "Hello."), done(target, "Six."))
    printed = talk(speculator, "Hi", "  2 + 4?  ", options=ChatOptions(system="Be brief."))
    assert "Hello.\n" in printed
    assert "Six.\n" in printed
    assert "<|im_end|>" not in printed
    assert speculator.prompts[1] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n2 + 4?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (
            [("ab",), ("cdef", 3), ("gh", 1, "length")],
            ["8 tokens", "3.00 tokens/step", "cut at the length limit"],
        ),
        ([("a\x1b[2Jb\x07c\x9bd", 0, "stop")], ["a[2Jbcd"]),
        ([("[red]x[/red] :smile:", 0, "stop")], ["[red]x[/red] :smile:"]),
    ],
)
def test_an_answer_is_shown_as_it_is_with_its_numbers_and_commands_no_terminal(
    target, texts, shown
):
    printed = talk(Scripted(target, [says(target, *each) for each in texts]), "Hi")
    assert all(text in printed for text in shown)
    assert "\x1b" not in printed


def test_accepted_drafts_are_green(target):
    steps = [says(target, "a"), says(target, "bcd", 2), says(target, "e", 0, "stop")]
    printed = talk(Scripted(target, steps), "Hi", colour=1)
    assert f"a{GREEN}bc\x1b[0mde" in printed
    assert GREEN not in talk(Scripted(target, steps), "Hi")


def test_a_terminal_is_told_how_much_faster_drafts_are(target):
    steps = [says(target, "a **"), says(target, "bold** ", 4), says(target, "end", 0, "stop")]
    steps = [replace(step, verify_seconds=1e-3) for step in steps]
    printed = talk(Scripted(target, steps), "Hi", colour=1)
    assert "x plain" in printed
    piped = talk(Scripted(target, steps), "Hi")
    assert "**bold**" in piped and "x plain" not in piped, "a pipe waits for no measurement"


def timed_step(tokens: int, accepted: int, seconds: float, drafted: int = 0) -> Step:
    return Step([1] * tokens, accepted, None, seconds / 4, 3 * seconds / 4, drafted)


def test_a_rate_is_that_of_the_steps_after_the_prompt():
    """One definition, so that what stands beside each other divides to the factor that is shown."""
    prefill = timed_step(1, -1, 9.0)
    plain = ChatAnswer(steps=[prefill, *[timed_step(1, 0, 0.1)] * 6])
    drafted = ChatAnswer(steps=[prefill, timed_step(4, 3, 0.2, 8), timed_step(1, 0, 0.2, 8)])
    assert repl.rate(plain.steps) == pytest.approx(10.0)
    assert repl.rate(drafted.steps) == pytest.approx(12.5)
    assert drafted.summary(8.0) == (
        "6 tokens, 12.5 tokens/s, 2.50 tokens/step, 50 % from drafts, 1.6x plain"
    )
    assert plain.summary() == "7 tokens, 10.0 tokens/s, 1.00 tokens/step"
    assert ChatAnswer(steps=[prefill]).summary(10.0) == "1 tokens"


def test_answers_are_compared_with_the_plain_rate_of_the_start(monkeypatch):
    target = llama(eos=())

    class Paced(Speculator):
        def generate(self, *given, **options):
            for step in super().generate(*given, **options):
                yield replace(step, draft_seconds=0.0, verify_seconds=paces[self is engine])

    paces = {True: 0.05, False: 0.1}
    engine = Paced(target)
    monkeypatch.setattr(repl, "Speculator", Paced)
    options = ChatOptions(max_new_tokens=12)
    printed = talk(engine, "Hi", "/regen", options=options, colour=True, width=200)
    assert "The plain model makes 10.0 tokens/s." in printed
    answers = re.findall(r"12 tokens, .*?([\d.]+)x plain", printed)
    assert len(answers) >= 2 and {*answers} == {"2.0"}


def test_drafts_that_cost_more_than_they_bring_are_named_once(target, monkeypatch):
    """After enough steps on a terminal, where the plain model is measured."""
    monkeypatch.setattr(repl, "plain_rate", lambda engine: 100.0)

    def answer(seconds: float) -> list[Step]:
        steps = [says(target, "ab", 1) for _ in range(repl.JUDGED_STEPS)]
        steps = [replace(step, verify_seconds=seconds) for step in steps]
        return [says(target, "a"), *steps, says(target, "end", 0, "stop")]

    def chatted(seconds: float, **choices: Any) -> str:
        engine = Scripted(target, answer(seconds), answer(seconds))
        engine.tree = StaticTree.from_widths([1, 1])
        return " ".join(talk(engine, "Hi", "Yo", width=200, **choices).split())

    slow = chatted(0.03, colour=1)
    assert slow.count("Drafts are slower than without drafts") == 1
    assert "a step costs 2.91 plain ones (break-even τ) and brings τ 2.03; try fewer" in slow
    assert "break-even" not in chatted(0.015, colour=1)


def test_reset_forgets_the_turns_and_keeps_the_system_prompt(target):
    speculator = Scripted(target, done(target, "One."), done(target, "Two."))
    printed = talk(speculator, "Hi", "/reset", "Yo", options=ChatOptions(system="Short!"))
    assert "Conversation reset." in printed
    assert "Short!" in speculator.prompts[1]
    assert "Hi" not in speculator.prompts[1]


def test_stats_add_up_the_answers(target):
    steps = [says(target, "a"), says(target, "bc", 1, "stop")]
    printed = talk(Scripted(target, steps, steps), "/stats", "Hi", "Ho", "/stats")
    assert "No answers yet." in printed
    assert "answers: 2, 6 tokens" in printed
    assert "2.00 tokens/step" in printed
    assert "accepted: 100%" in printed


def test_commands_and_lines_that_are_none(target):
    speculator = Scripted(target, *[done(target, "A.")] * 4)
    lines = (
        "",
        "   ",
        "/help",
        "/etc",
        "/sttas",
        "/regen",
        "/usr/bin is what?",
        " /tmp",
        " /help me",
        " /quit",
        "/quit",
        "unread",
    )
    printed = talk(speculator, *lines)
    assert all(name in printed for name in COMMANDS)
    for said in ("/etc is not a command; /help lists them", "/sttas is not a command; /help"):
        assert said in printed
    assert "expected a question before this" in printed
    asked = [prompt.split("user\n")[-1].partition("<")[0] for prompt in speculator.prompts]
    assert asked == ["/usr/bin is what?", "/tmp", "/help me", "/quit"]


def test_regen_answers_the_last_question_anew(target):
    speculator = Scripted(target, *(done(target, text) for text in ("One.", "Two.", "Three.")))
    talk(speculator, "Hi", "/regen", "Yo")
    assert speculator.prompts[1] == speculator.prompts[0]
    assert "Two." in speculator.prompts[2] and "One." not in speculator.prompts[2]


def test_ctrl_c_stops_the_answer_between_two_steps_and_not_the_program(target):
    steps = [says(target, "Well, "), CTRL_C, says(target, "so"), says(target, "unseen")]
    speculator = Scripted(target, steps, done(target, "Go on."))
    before = signal.getsignal(signal.SIGINT)
    printed = talk(speculator, "Hi", "And?")
    assert "stopped by you" in printed and "Go on." in printed
    assert "assistant\nWell, so<|im_end|>" in speculator.prompts[1], "the part stays in the history"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_while_an_answer_stops_leaves_the_program(target):
    with pytest.raises(KeyboardInterrupt):
        talk(Scripted(target, [says(target, "Well"), CTRL_C, CTRL_C, says(target, "?")]), "Hi")


@pytest.mark.parametrize(
    ("lines", "answers"),
    [
        ([KeyboardInterrupt(), "Hi"], 1),
        ([KeyboardInterrupt(), KeyboardInterrupt(), "Hi"], 0),
        ([KeyboardInterrupt(), "Hi", KeyboardInterrupt(), "Ho"], 2),
        (["stop", KeyboardInterrupt(), "Hi"], 1),
    ],
)
def test_ctrl_c_twice_at_an_empty_prompt_leaves(target, lines, answers):
    stopped = [says(target, "A"), CTRL_C, says(target, "B")]
    replies = [stopped] if lines[0] == "stop" else []
    speculator = Scripted(target, *replies, done(target, "Yes."), done(target, "Yes."))
    printed = talk(speculator, *lines)
    assert len(speculator.prompts) == answers
    assert ("press Ctrl-C again" in printed) is (lines[0] != "stop")


class Recording(Speculator):
    """Remembers prompts, and what was written after them."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.asked, self.stop_at = [], 0

    def generate(self, prompt, **options):
        written = []
        self.asked.append((prompt, written))
        for step in super().generate(prompt, **options):
            written += step.tokens
            if len(self.asked) == self.stop_at:
                signal.raise_signal(signal.SIGINT)
            yield step


@pytest.mark.parametrize("kind", ["sequential", "eagle3", "block"])
def test_what_is_reused_changes_no_answer(kind):
    """After dropped turns, /regen, /reset and Ctrl-C."""
    target = llama(eos=())
    speculator = Recording(target, random_head(kind, target))
    speculator.stop_at = 3
    lines = ["Hi", "/regen", "stopped", "Yo", "x" * 60, "y" * 60]
    printed = talk(
        speculator, *lines, "/regen", "/reset", "Hi", options=ChatOptions(None, max_new_tokens=20)
    )
    assert "turns dropped" in printed and "stopped by you" in printed
    assert len(speculator.asked) == 8
    for prompt, written in speculator.asked:
        fresh = Speculator(target).generate(prompt, max_new_tokens=20)
        expected = [token for step in fresh for token in step.tokens]
        assert written == expected[: len(written)] and written


def test_a_second_turn_computes_only_what_is_new():
    """Counted in the target's own forward passes."""
    target, widths = Target.load(str(ROOT / "recipes" / "demo-target")), {1: [], 2: []}
    speculator = Recording(target, NGram())
    target.model.register_forward_pre_hook(
        lambda model, args: widths[len(speculator.asked)].append(args[0].shape[1])
    )
    printed = talk(speculator, "What does str.upper do?", "And str.lower?", "/stats")
    (first, answer), (second, _) = speculator.asked
    step, new = speculator.tree.nodes, len(second) - len(first) - len(answer)
    assert widths[1][0] == len(first)
    assert new < widths[2][0] <= new + step + 1
    assert max(widths[2][1:]) <= step
    reused = len(second) - widths[2][0] + 1
    assert f"{reused} of {len(first) + len(second)} prompt tokens reused" in printed


def test_the_oldest_turns_go_when_the_context_is_full(target):
    """The context of 256 tokens holds two turns of 90, not three."""
    long = "x" * 40
    speculator = Scripted(target, *(done(target, f"{n}" + "y" * 39) for n in range(4)))
    lines = [f"{n}{long}" for n in range(4)]
    options = ChatOptions(system="S!", max_new_tokens=20)
    printed = talk(speculator, *lines, options=options)
    assert "oldest turns dropped: 1." in printed
    last = speculator.prompts[-1]
    assert "S!" in last
    assert f"0{long}" not in last
    assert f"3{long}" in last
    assert last.count("<|im_start|>user") == last.count("<|im_start|>assistant")
    assert all(limit == 20 for limit in speculator.limits)


def test_short_answers_leave_more_room_for_old_turns(target):
    for most, is_dropped in ((None, True), (5, False)):
        speculator = Scripted(target, done(target, "y" * 160), done(target, "Yes."))
        printed = talk(speculator, "Hi", "And?", options=ChatOptions(max_new_tokens=most))
        assert ("turns dropped" in printed) is is_dropped


def test_a_message_that_cannot_fit_is_refused_and_nothing_is_forgotten(target):
    speculator = Scripted(target, done(target, "Yes."), done(target, "Still here."))
    printed = talk(speculator, "Hi", "z" * 300, "And?")
    assert "send a shorter one" in printed
    assert "Yes." in speculator.prompts[1]
    assert "zzz" not in speculator.prompts[1]


def test_a_message_that_barely_fits_gets_the_room_that_is_left(target):
    around = len(encode_prompt(target, [{"role": "user", "content": ""}]))
    speculator = Scripted(target, done(target, "Y"))
    talk(speculator, "z" * (target.context - around - 3), options=ChatOptions(max_new_tokens=50))
    assert speculator.limits == [3]


def test_without_a_template_each_line_is_continued_on_its_own():
    target = llama(eos=(END,), template=None)
    speculator = Scripted(target, done(target, " upon"), done(target, " time"))
    printed = talk(speculator, "Once", "a")
    assert "nothing is remembered" in printed
    assert speculator.prompts == ["Once", "a"]


def test_a_continuation_keeps_its_first_space(stories):
    target = Target.load(stories)
    text = talk(Speculator(target), "Once upon a", options=ChatOptions(max_new_tokens=3))
    assert "\n time" in text


@pytest.mark.mend("a long system prompt was taken, and each message then called too long")
@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (REFUSES_SYSTEM, "Be brief.", "tokenizer accept.*System role not supported"),
        (TEMPLATE, "x" * 1000, "expected a message shorter than the context"),
        (None, "Be brief.", "no chat template, so it takes no system prompt"),
        ("no tokenizer", "", "has no tokenizer"),
    ],
)
def test_a_chat_that_cannot_begin_is_refused_at_once(template, system, message):
    target = llama(eos=(END,), template=template)
    if template == "no tokenizer":
        target = Target(target.model, name="bare")
    with pytest.raises(ValueError, match=message):
        talk(Speculator(target), options=ChatOptions(system=system or None))


REFUSES_SHOUTING = (
    "{% for m in messages %}{% if m['content'] == 'HEY' %}"
    "{{ raise_exception('Please lower your voice') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def test_what_template_and_tokenizer_do_not_take_ends_no_chat():
    target = llama(eos=(END,), template=REFUSES_SHOUTING)
    speculator = Scripted(target, done(target, "Hello."), done(target, "Six."))
    printed = talk(speculator, "Hi", "HEY", "half a pair: \ud83d", "2 + 4?")
    assert "Please lower your voice" in printed
    assert printed.count("template and tokenizer accept") == 2
    assert "Six.\n" in printed
    assert speculator.prompts[1] == "HiHello.2 + 4?", "only what was answered is remembered"


def test_a_lossy_rule_is_labelled(target):
    assert "lossy" in talk(Speculator(target), options=ChatOptions(sampling=Typical()))
    assert "lossy" not in talk(Speculator(target))


def test_history_counts_what_it_drops(target):
    history = History(target, None, 20)
    for turn in range(3):
        history.add(f"{turn}" * 40, "y" * 40)
    tokens, dropped = history.prompt("Now?")
    assert dropped >= 1
    assert len(tokens) + 20 <= target.context
    assert history.prompt("Now?") == (tokens, 0), "what was dropped stays dropped"


def test_sample_chat_prints_questions_answers_and_numbers(target):
    speculator = Scripted(target, done(target, "Four."), [says(target, "No", 1, "length")])
    out = io.StringIO()
    answers = sample_chat(speculator, ["2 + 2?", "Sure?"], console=Console(file=out))
    assert [answer.text for answer in answers] == ["Four.", "No"]
    assert isinstance(answers[0], ChatAnswer)
    for text in ("> 2 + 2?\nFour.\n", "> Sure?\nNo\n", "tokens/s", "green: draft tokens"):
        assert text in out.getvalue()
    assert "Four." in speculator.prompts[1]


PROGRAM = """
import sys; sys.path.insert(0, 'tests/helpers')
from tiny_chat import llama
from draftheads.infer.chat.repl import ChatOptions, chat
from draftheads.infer.engine import Speculator
chat(Speculator(llama(eos=())), ChatOptions(max_new_tokens=5))
"""


@pytest.mark.slow
def test_a_pipe_is_read_to_its_end():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="Hi\n/stats",
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "answers: 1, 5 tokens" in done.stdout
    assert "> " not in done.stdout, "no cursor where nobody types"


@pytest.mark.slow
def test_a_terminal_has_an_editor_and_ctrl_c_twice_leaves(tmp_path):
    ours, theirs = pty.openpty()
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env=environment | {"TERM": "xterm"},
        cwd=ROOT,
        start_new_session=True,
    )

    os.close(theirs)
    seen = bytearray()

    def until(text: bytes) -> None:
        while text not in seen:
            seen.extend(os.read(ours, 4096))
        del seen[: seen.index(text) + len(text)]

    for typed, answer in (
        (b"Hi\r", b"5 tokens"),
        (b"oops\x03/sats\r", b"/help lists them"),
        (b"\x03", b"again"),
    ):
        until(b">")
        os.write(ours, typed)
        until(answer)
    until(b">")
    os.write(ours, b"\x03")
    assert process.wait(timeout=60) == 0
    assert "Hi" in (tmp_path / "draftheads" / "chat-history").read_text()
