"""The promise: a chat goes on, whatever is typed and whenever Ctrl-C is pressed."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_chat import END, llama
from tiny_heads import Oracle

from draftheads.heads.medusa import MedusaHead
from draftheads.heads.target import Target
from draftheads.heads.tree import StaticTree
from draftheads.infer.accept import Typical
from draftheads.infer.chat import Answer, ChatOptions, History, chat, printable, sample_chat
from draftheads.infer.engine import Speculator, Step
from draftheads.infer.text import encode_prompt

REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{{ m['content'] }}{% endfor %}"
)
GREEN = "\x1b[32m"


@pytest.fixture
def target() -> Target:
    return llama(eos=(END,))


class Scripted(Speculator):
    """Answers with given steps and remembers what it was asked. An exception is raised in place."""

    def __init__(self, target: Target, *answers: list) -> None:
        super().__init__(target)
        self.answers, self.prompts, self.limits = list(answers), [], []

    def generate(self, prompt, *, sampling=None, max_new_tokens=None, stop=()):
        self.prompts.append(self.target.tokenizer.decode(prompt))
        self.limits.append(max_new_tokens)
        for item in self.answers.pop(0):
            if isinstance(item, BaseException):
                raise item
            yield item


def says(target: Target, text: str, accepted: int = -1, finish: str | None = None) -> Step:
    return Step(target.tokenizer(text)["input_ids"], accepted, finish, 0.0, 0.0)


def talk(speculator: Speculator, *lines, options: ChatOptions | None = None, colour=False) -> str:
    """What a chat prints for these lines; an exception among them is raised instead of a line."""
    script, out = iter(lines), io.StringIO()

    def read(cursor: str) -> str:
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    console = Console(file=out, force_terminal=colour, color_system="standard" if colour else None)
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


def test_a_real_answer_is_the_decoded_output(target):
    prompt = encode_prompt(target.tokenizer, [{"role": "user", "content": "Hi"}])
    steps = Speculator(target).generate(prompt, max_new_tokens=30)
    tokens = [token for step in steps for token in step.tokens]
    text = printable(target.tokenizer.decode(tokens, skip_special_tokens=True))
    for show_accepted in (False, True):
        options = ChatOptions(max_new_tokens=30, show_accepted=show_accepted)
        assert text in talk(
            Speculator(target, MedusaHead.create(target)), "Hi", options=options
        ).replace("\r\n", "\n")


def test_every_answer_is_followed_by_its_numbers(target):
    steps = [says(target, "ab"), says(target, "cdef", 3), says(target, "gh", 1, "length")]
    printed = talk(Scripted(target, steps), "Hi")
    assert "8 tokens" in printed
    assert "3.00 tokens/step" in printed
    assert "cut at the length limit" in printed


def test_accepted_drafts_are_green(target):
    steps = [says(target, "a"), says(target, "bcd", 2), says(target, "e", 0, "stop")]
    printed = talk(Scripted(target, steps), "Hi", options=ChatOptions(show_accepted=True), colour=1)
    assert f"a{GREEN}b\x1b[0m{GREEN}c\x1b[0mde" in printed
    assert GREEN not in talk(Scripted(target, steps), "Hi", colour=True)


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
    speculator = Scripted(target, done(target, "A."), done(target, "B."))
    lines = ("", "   ", "/help", "/unknown", "/usr/bin is what?", " /tmp", "/quit", "unread")
    printed = talk(speculator, *lines)
    assert "/reset  forget the conversation" in printed
    assert "/unknown is not a command; /help lists them" in printed
    assert len(speculator.prompts) == 2
    assert "/usr/bin is what?" in speculator.prompts[0]
    assert "user\n/tmp<" in speculator.prompts[1]


def test_ctrl_c_stops_the_answer_and_not_the_program(target):
    speculator = Scripted(
        target, [says(target, "Well, "), KeyboardInterrupt()], done(target, "Go on.")
    )
    printed = talk(speculator, "Hi", "And?")
    assert "stopped by you" in printed
    assert "Go on." in printed
    assert "assistant\nWell, <|im_end|>" in speculator.prompts[1], "the part stays in the history"


def test_ctrl_c_before_the_first_token_forgets_the_question(target):
    speculator = Scripted(target, [KeyboardInterrupt()], done(target, "Yes."))
    talk(speculator, "Hi", "And?")
    assert "Hi" not in speculator.prompts[1]


def test_ctrl_c_at_an_empty_prompt_tells_how_to_leave(target):
    speculator = Scripted(target, done(target, "Yes."))
    printed = talk(speculator, KeyboardInterrupt(), "Hi")
    assert "/quit or press Ctrl-D" in printed
    assert "Yes." in printed


def test_ctrl_c_inside_a_real_generation_leaves_the_engine_usable():
    class Interrupting(Oracle):
        def propose(self, committed):
            if self.written and self.written[0] > 4:
                raise KeyboardInterrupt
            return super().propose(committed)

    target, shape = llama(eos=()), StaticTree.from_widths((1,))
    speculator = Speculator(target, lambda: Interrupting(shape, [[0] * 99], vocab_size=259))
    printed = talk(speculator, "Hi", "Ho")
    assert printed.count("stopped by you") == 2


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


def test_a_message_that_cannot_fit_is_refused_and_nothing_is_forgotten(target):
    speculator = Scripted(target, done(target, "Yes."), done(target, "Still here."))
    printed = talk(speculator, "Hi", "z" * 300, "And?")
    assert "send a shorter one" in printed
    assert "Yes." in speculator.prompts[1]
    assert "zzz" not in speculator.prompts[1]


def test_a_message_that_barely_fits_gets_the_room_that_is_left(target):
    around = len(encode_prompt(target.tokenizer, [{"role": "user", "content": ""}]))
    speculator = Scripted(target, done(target, "Y"))
    talk(speculator, "z" * (target.context - around - 3), options=ChatOptions(max_new_tokens=50))
    assert speculator.limits == [3]


def test_without_a_template_each_line_is_continued_on_its_own():
    target = llama(eos=(END,), template=None)
    speculator = Scripted(target, done(target, " upon"), done(target, " time"))
    printed = talk(speculator, "Once", "a")
    assert "nothing is remembered" in printed
    assert speculator.prompts == ["Once", "a"]
    with pytest.raises(ValueError, match="no chat template, so it takes no system prompt"):
        talk(speculator, options=ChatOptions(system="Be brief."))


def test_a_continuation_keeps_its_first_space(stories):
    target = Target.load(stories)
    text = talk(Speculator(target), "Once upon a", options=ChatOptions(max_new_tokens=3))
    assert "\n time" in text


def test_a_template_that_refuses_the_system_role_is_named_at_the_start():
    target = llama(eos=(END,), template=REFUSES_SYSTEM)
    with pytest.raises(ValueError, match="tokenizer accept.*System role not supported"):
        talk(Speculator(target), options=ChatOptions(system="Be brief."))


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


def test_a_target_without_tokenizer_is_refused(target):
    with pytest.raises(ValueError, match="has no tokenizer"):
        talk(Speculator(Target(target.model, name="bare")))


def test_a_lossy_rule_is_labelled(target):
    assert "lossy" in talk(Speculator(target), options=ChatOptions(sampling=Typical()))
    assert "lossy" not in talk(Speculator(target))


def test_output_cannot_command_the_terminal(target):
    speculator = Scripted(target, done(target, "a\x1b[2Jb\x07c\x9bd"))
    printed = talk(speculator, "Hi")
    assert "a[2Jbcd" in printed
    assert "\x1b" not in printed


def test_markup_and_emoji_codes_are_printed_as_they_are(target):
    speculator = Scripted(target, done(target, "[red]x[/red] :smile:"))
    assert "[red]x[/red] :smile:" in talk(speculator, "Hi")


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
    assert isinstance(answers[0], Answer)
    for text in ("> 2 + 2?\nFour.\n", "> Sure?\nNo\n", "tokens/s", "green: draft tokens"):
        assert text in out.getvalue()
    assert "Four." in speculator.prompts[1]


@pytest.mark.slow
def test_a_pipe_is_read_to_its_end():
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from tiny_chat import llama\n"
        "from draftheads.infer.chat import ChatOptions, chat\n"
        "from draftheads.infer.engine import Speculator\n"
        "chat(Speculator(llama(eos=())), ChatOptions(max_new_tokens=5))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="Hi\n/stats",
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "answers: 1, 5 tokens" in done.stdout
    assert "> " not in done.stdout, "no cursor where nobody types"
