"""A prompt while the target answers it: the token ids so far, and the next question.

Answers keep the ids that the target generated. A later turn adds only the text that the chat
template puts between an answer and the next generation prompt, which is found by rendering the
conversation with a placeholder for the answer; one with tool calls stands for itself, as templates
refuse results without calls. If the template rewrites earlier turns (drops their
reasoning, inserts an empty reasoning block), no such text exists: the document is closed, and the
next answer opens another one, after the history as the template renders it now. So the target sees
in training what it sees in a chat, and every answer is learned once.

Tool calls and results of a prompt are context; the target answers after the last result.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from jinja2.exceptions import TemplateError

from draftheads.infer.prompt import ANSWER, CLOSE, OPEN, QUESTION, PromptRenderer
from draftheads.infer.text import REPLACEMENT, THOUGHT_KEY, assistant, tool_call
from draftheads.train.data.prompts import Message, Prompt

if TYPE_CHECKING:
    from draftheads.train.data.answers import Record

logger = logging.getLogger("draftheads")

TOO_LONG = "prompt does not fit into the target's context"
NOTHING = "answers have nothing to learn, by --reasoning, --learn or their own weights"
LOSSY = "answer's text cannot be tokenized without loss"

Part = Literal["keep", "drop", "only"]
Turn = list[Message]
"""The messages before one answer of the target, since its previous answer."""


class Conversation:
    """A prompt, its answers so far, and why it ended.

    turns: default all of the prompt's. reasoning: "keep" learns the reasoning that opens answers,
    "drop" uses it as context only, "only" learns nothing else. name: id of its record; default: the
    prompt's index.
    """

    def __init__(
        self,
        prompt: Prompt,
        renderer: PromptRenderer,
        context: int,
        turns: Sequence[Turn] | None = None,
        reasoning: Part = "keep",
        name: str | None = None,
    ) -> None:
        self.prompt = prompt
        self.name = prompt.index if name is None else name
        self.tokens: list[int] = []  # of the open document: what the target sees
        self.outcome: dict[str, str] = {}
        self.retokenized = 0  # answers that came as text without ids
        self.turns = turns_of(prompt) if turns is None else turns
        self.answers: list[Message] = []
        self._renderer = renderer.with_variables(prompt.template_args)
        self._context = context
        self._reasoning = reasoning
        self._first = 0  # first answer of the open document; earlier ones are its history
        self._lead = ""  # text of the template between the last generation prompt and its answer
        self._text = ANSWER  # what stands for the last answer in later turns
        self._learn: list[tuple[int, int]] = []
        self._finish = ""  # of the last answer that is learned
        self._closed: list[Record] = []

    @property
    def has_text(self) -> bool:
        """True if an answer is more than an end token."""
        return any(answer["content"].strip() for answer in self.answers)

    def ask(self) -> bool:
        """Append the next question, or open a document that ends with it; False if none is left
        or it cannot be asked.
        """
        if self.outcome or len(self.answers) == len(self.turns):
            return False
        try:
            tokens, first = self._question()
        except TemplateError as error:  # templates refuse roles they do not know
            self.end("skipped", f"chat template refuses the messages: {error}")
            return False
        if not tokens:
            self.end("skipped", "prompt has no tokens")
            return False
        if len(tokens) + 1 > self._context:
            self.end("skipped", TOO_LONG)
            return False
        if first != self._first:
            self._closed += self._open()
            self._learn = []
            self._first = first
        self.tokens = tokens
        return True

    def answer(
        self,
        ids: list[int],
        message: Message | None = None,
        lead: str = "",
        lead_ids: Sequence[int] = (),
        text: str = ANSWER,
    ) -> None:
        """Append an answer of at least one token.

        message: the answer as later turns show it; default: its text. One with `learn: False` is
        context. lead: text that the template inserts before the answer; context, not learned. text:
        of a message with tool calls, as the template shows it.
        """
        assert ids and self.tokens, "an answer has a token and position 0 is never learned"
        message = {**(message or assistant(self._renderer.answer_text(ids)))}
        is_learned = message.pop("learn", True)
        self._lead = lead
        self._text = text.strip()
        self.tokens += lead_ids
        thought = 0 if self._reasoning == "keep" else self._reasoning_length(ids)
        start, stop = (0, thought) if self._reasoning == "only" else (thought, len(ids))
        if is_learned and start < stop:
            self._learn.append((len(self.tokens) + start, len(self.tokens) + stop))
            self._finish = "eos" if ids[-1] in self._renderer.eos_ids else "length"
        self.tokens += ids
        self.answers.append(message)

    def retokenize(self, text: str, lead_ids: Sequence[int] = ()) -> list[int] | None:
        """Token ids of the next answer's text; None if no ids decode to it there.

        lead_ids: as in `answer`.
        """
        if REPLACEMENT in text:  # bytes were lost
            return None
        renderer = self._renderer
        # enough for decoders that join a token with its neighbours
        tail = [*self.tokens[-4:], *lead_ids][-4:]
        decode = partial(renderer.tokenizer.decode, clean_up_tokenization_spaces=False)
        start = decode(tail)
        newline = renderer.encode("\n")
        after_end = renderer.encode(text)
        if renderer.eos_ids:
            after_end = _encode_after(renderer, renderer.eos_ids[0], text)
        # tokenizers that put a space before every text, even after end tokens, omit it inside one
        inside = renderer.encode("\n" + text)[len(newline) :]
        for ids in (after_end, inside):
            if decode(tail + ids) == start + text:
                return ids
        return None

    def end(self, kind: str, reason: str) -> None:
        """Ask no more questions. kind: "skipped" or "failed"; "stopped" if there is an answer."""
        self.outcome = {"stopped" if self.answers else kind: reason}

    def record(self) -> Record:
        """The line to store."""
        documents = [*self._closed, *self._open()]
        record: Record = {"id": self.name}
        if not documents:
            return record | ({"skipped": NOTHING} if self.answers else self.outcome)
        record |= documents[0] if len(documents) == 1 else {"documents": documents}
        if self.retokenized:
            record["retokenized"] = self.retokenized
        return record | self.outcome

    def _open(self) -> list[Record]:
        """The open document, if it has something to learn."""
        if not self._learn:
            return []
        tokens = self.tokens[: self._learn[-1][1]]  # a question without its answer teaches nothing
        document = {
            "tokens": tokens,
            "learn": [list(span) for span in self._learn],
            "turns": len(self._learn),
            "finish": self._finish,
        }
        return [document]

    def _question(self) -> tuple[list[int], int]:
        """Token ids up to the next answer, and the first answer of the document that they are in.

        Raises TemplateError for messages that the template refuses.
        """
        renderer = self._renderer
        answered = len(self.answers)
        if not answered:
            text = self.prompt.text
            return renderer.prompt_ids(self.turns[0] if text is None else text), 0
        turns = self.turns[: answered + 1]
        between = self._between(turns)
        if between is not None:
            return self.tokens + between, self._first
        return renderer.encode(render(renderer, turns, self.answers)), answered

    def _between(self, turns: Sequence[Turn]) -> list[int] | None:
        """Token ids between the last answer and the next; None if the template rewrites turns."""
        renderer = self._renderer
        last = self.tokens[-1]
        history = self.answers[: self._first]
        answers = self.answers[self._first :]
        replaced = history + [
            answer if answer.get("tool_calls") else assistant(ANSWER) for answer in answers
        ]
        before = render(renderer, turns[:-1], replaced[:-1]) + self._lead
        whole = render(renderer, turns, replaced)
        rest = whole[len(before) :].lstrip()
        rendered = render(renderer, turns, self.answers)
        texts = [answer for answer in answers if not answer.get("tool_calls")]
        parts = [answer.get(key, "") for answer in texts for key in ("content", THOUGHT_KEY)]
        are_shown = all(part.strip() in rendered for part in parts)
        if not (are_shown and whole.startswith(before) and rest.startswith(self._text)):
            return None
        rest = rest.removeprefix(self._text)
        if last not in renderer.eos_ids:
            return renderer.encode(rest)
        end = renderer.tokenizer.decode([last])
        if rest.lstrip().startswith(end):  # the answer has it already
            rest = rest.lstrip().removeprefix(end)
        return _encode_after(renderer, last, rest)

    def _reasoning_length(self, ids: list[int]) -> int:
        """Number of tokens of an answer's opening reasoning, </think> included; all if unfinished.
        The prompt may have opened it.
        """
        text_of = self._renderer.answer_text
        opened = text_of(self.tokens[-16:]).rstrip().endswith(OPEN)
        if not (opened or text_of(ids).lstrip().startswith(OPEN)):
            return 0
        return bisect_left(range(len(ids)), True, key=lambda length: CLOSE in text_of(ids[:length]))


def render(
    renderer: PromptRenderer,
    turns: Sequence[Turn],
    answers: Sequence[Message],
    *,
    ask: bool = True,
) -> str:
    """The text of a conversation. ask: append the generation prompt.

    Raises TemplateError for messages that the template refuses.
    """
    messages: Turn = []
    for turn, answer in zip_longest(turns, answers):
        messages += turn
        if answer is not None:
            messages.append(answer)
    return renderer.text(messages, ask=ask)


def _encode_after(renderer: PromptRenderer, end_id: int, text: str) -> list[int]:
    """Token ids of a text after an end token, where the rules for a text's first word do not
    apply.
    """
    ids = renderer.encode(renderer.tokenizer.decode([end_id]) + text)
    return ids[1:] if ids[:1] == [end_id] else renderer.encode(text)


def check_tools(renderer: PromptRenderer, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError if there are tool calls or results in prompts, and the chat template does
    not render them. Definitions and documents that it does not render are said, and calls of tools
    that nothing defines.
    """
    pairs = (pair for each in prompts for pair in each.template_args.items())
    renderer = renderer.with_variables(dict(pairs))
    for name in ("tools", "documents"):
        with suppress(TemplateError):  # what it refuses is said where it is rendered
            without = renderer.with_variables({name: None}).text([QUESTION])
            if renderer.template_args.get(name) and renderer.text([QUESTION]) == without:
                logger.warning("the chat template shows no %s; they are left out", name)
    messages = (message for prompt in prompts for message in prompt.messages or ())
    if not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return
    if not renderer.template_args.get("tools"):
        logger.warning(
            "calls without definitions of tools: the prompts differ from those that were answered; "
            "`serve --learn` learns from the real ones"
        )
    call = tool_call("look_up", {"word": "heron"})
    turn = {**assistant(""), "tool_calls": [call]}
    result = {"role": "tool", "name": "look_up", "tool_call_id": call["id"], "content": "A bird."}
    tokenizer = renderer.tokenizer
    shown = ""
    problem = "drops them" if tokenizer.chat_template else "is missing"
    try:
        shown = renderer.text([QUESTION, turn, result])
    except TemplateError as error:
        problem = f"refuses them ({error})"
    if "look_up" not in shown or "A bird." not in shown:
        raise ValueError(
            "--tools: expected a chat template that renders tool calls and results, the one of "
            f"{renderer.name} {problem}; leave them out with --tools drop"
        )


def turns_of(prompt: Prompt) -> list[Turn]:
    """The messages of a prompt, split where the target answers: after a user turn, or after the
    tool results that follow it.
    """
    turns: list[Turn] = [[]]
    messages = prompt.messages or ()
    for message, after in zip_longest(messages, messages[1:]):
        turns[-1].append(message)
        goes_on = after is not None and after["role"] in ("assistant", "tool")  # the source's call
        if message["role"] in ("user", "tool") and not goes_on:
            turns.append([])
    return turns[:-1] if prompt.messages else turns
