"""Conversations whose answers the target wrote earlier, as a folder that training reads.

Each conversation is replayed as if it were distilled (`draftheads.train.data.conversation`): the
given answer takes the place of what the target would generate, followed by the end token that the
chat template appends. So training sees the same documents as after a distillation. Whether the
target really wrote the answers cannot be checked; the manifest records that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from draftheads.infer.prompt import ANSWER, CLOSE, OPEN, PromptRenderer, Reasoning
from draftheads.infer.text import THOUGHT_KEY, assistant
from draftheads.train.data.answers import (
    Counts,
    Record,
    has_answers,
    new_manifest,
    store_batch,
)
from draftheads.train.data.conversation import (
    LOSSY,
    Conversation,
    Part,
    Turn,
    check_tools,
    render,
)
from draftheads.train.data.prompts import CUT, FINISHES, Message, Messages, Prompt, is_silent
from draftheads.train.data.shards import documents_of, rows_of, to_batch
from draftheads.train.data.text_side import TextSide

REASONING = re.compile(rf"^\s*{OPEN}.*?{CLOSE}\s*", re.DOTALL)


def import_answers(
    side: TextSide,
    conversations: Sequence[Prompt],
    out: Path,
    *,
    template_args: dict[str, Any],
    source: str,
    reasoning: Part = "keep",
) -> Counts:
    """Write the conversations of `read_conversations` to `out`, a new folder for training.

    A conversation that the chat template cannot render is skipped, with the reason. Raises
    ValueError if none can be rendered, without a chat template or one for tool calls in the
    conversations, and if the folder exists.
    """
    if has_answers(out):
        raise ValueError(f"{out}: expected a new folder, found one with answers; choose another")
    renderer = PromptRenderer(side, template_args)
    check_tools(renderer, conversations)
    if not side.tokenizer.chat_template:
        raise ValueError(
            f"{side.name}: expected a chat template to render conversations with, found none; "
            "use the target's chat model"
        )
    records = [
        replay(renderer.with_variables(talk.template_args), index, talk.messages or (), reasoning)
        for index, talk in enumerate(conversations)
    ]
    if not any(documents_of(record) for record in records):
        reasons = Counter(f"skipped: {record['skipped']}" for record in records).most_common(1)
        reason = reasons[0][0] if reasons else "the source is empty"
        raise ValueError(f"{source}: expected conversations to learn from, got none; {reason}")
    manifest = new_manifest(
        {"name": side.name, "revision": side.revision, "fingerprint": None, "dtype": None},
        {"template_args": renderer.template_args},
        {
            "source": source,
            "count": len(records),
            "sha256": hashlib.sha256(json.dumps(records).encode()).hexdigest(),
        },
        seed=None,
        imported={"verified": False},
    )
    out.mkdir(parents=True, exist_ok=True)
    return store_batch(
        out, manifest, to_batch([row for record in records for row in rows_of(record)])
    )


def replay(
    renderer: PromptRenderer, index: int, messages: Messages, reasoning: Part = "keep"
) -> Record:
    """The line to store for a conversation: all assistant messages are learned but those with
    `learn: False`, in one document or, if the chat template rewrites them in later turns, in
    several. reasoning: as of `Conversation`.
    """
    turns, answers = _parts(messages)
    conversation = Conversation(Prompt(index, messages), renderer, 1 << 30, turns, reasoning)
    if not answers:
        conversation.end("skipped", "expected an assistant turn with text, found none")
    for place, answer in enumerate(answers):
        if not conversation.ask():
            break
        try:
            before = renderer.answer_text(conversation.tokens[-16:])
            if reasoning == "drop" and before.rstrip().endswith(CLOSE):
                text = REASONING.sub("", answer["content"])
                answer = {**answer, "content": text, THOUGHT_KEY: ""}  # there is no place for it
            written = rendering(renderer, turns[: place + 1], conversation.answers, answer)
            lead_ids = conversation.retokenize(written.lead)
            ids = conversation.retokenize(written.text, lead_ids or ())
            if lead_ids is None or ids is None:
                raise ValueError(LOSSY)
        except (TemplateError, ValueError) as error:  # other conversations may be fine
            conversation.end("skipped", f"turn {place + 1}: {error}")
            break
        is_cut = answer.get(FINISHES[0]) == CUT[0]
        end_ids = [] if is_cut or written.end is None else [written.end]
        text = written.text if answer.get("tool_calls") else ANSWER
        conversation.answer(ids + end_ids, answer, written.lead, lead_ids, text)
    return conversation.record()


def _parts(messages: Messages) -> tuple[list[Turn], list[Message]]:
    """The turns of a conversation and the answers to them; an empty answer is none, and what the
    assistant says before the first question is context.
    """
    turns: list[Turn] = [[]]
    answers: list[Message] = []
    is_asked = False
    for message in messages:
        is_asked = is_asked or message["role"] == "user"
        if is_asked and message["role"] == "assistant" and not is_silent(message):
            answers.append(message)
            turns.append([])
        else:
            turns[-1].append(message)
    return turns[:-1], answers


@dataclass(frozen=True)
class Rendering:
    """An answer as the template renders it after the generation prompt.

    lead: what the template itself inserts before the answer, such as an empty reasoning block.
    end: the token that ends the answer, if any.
    """

    lead: str
    text: str
    end: int | None


def rendering(
    renderer: PromptRenderer, turns: Sequence[Turn], answers: Sequence[Message], answer: Message
) -> Rendering:
    """Render an answer to the last turn. answers: the earlier ones.

    Raises ValueError for an answer that the target cannot have written after this prompt.
    """
    ends = {renderer.tokenizer.decode([token]): token for token in renderer.eos_ids}
    prompt = render(renderer, turns, answers)
    shown = renderer.template_message(answer)
    how = renderer.reasoning or Reasoning({})
    # a text whose marks are no special tokens is just what the target wrote
    is_parsed = how.message and shown != answer and (how.marks or THOUGHT_KEY in answer)
    if answer.get("tool_calls") or is_parsed:
        whole = render(renderer, turns, [*answers, answer], ask=False).rstrip()
        return _rendering_as_shown(prompt, whole, answer, ends, how)
    whole = render(renderer, turns, [*answers, assistant(ANSWER)], ask=False)
    text = shown if THOUGHT_KEY in answer else answer
    return _rendering_of_text(prompt, whole, text["content"], ends)


def _rendering_as_shown(
    prompt: str, whole: str, answer: Message, ends: Mapping[str, int], how: Reasoning
) -> Rendering:
    """Tool calls, and reasoning between special tokens, stand in the conversation in the template's
    own layout. ends: end tokens by their text.
    """
    empty = rf"\s*{re.escape(how.opening)}\s*{re.escape(how.closing)}\s*"
    text = whole[len(prompt) :] if whole.startswith(prompt) else ""
    if not text:  # the prompt has an empty block, which the template leaves out of answers
        prompt = re.sub(rf"{empty}$", "", prompt)
        text = whole[len(prompt) :] if whole.startswith(prompt) else ""
        text = text.lstrip().removeprefix(how.closing).lstrip()
        has_two = any(text.endswith(end) and text.count(end) > 1 for end in ends)
        if has_two or text.startswith(how.opening.strip()):  # what no target writes behind it
            text = ""
    names = [call["function"]["name"] for call in answer.get("tool_calls", ())]
    if not text or not all(name in text for name in names):
        raise ValueError(
            "expected tool calls or reasoning after the generation prompt, found other text; "
            "--template-args may switch reasoning on"
        )
    block = re.match(empty, text)
    lead = block.group() if block else ""
    end = next((end for end in ends if text.endswith(end)), "")
    return Rendering(lead, text.removeprefix(lead).removesuffix(end), ends.get(end))


def _rendering_of_text(prompt: str, whole: str, text: str, ends: Mapping[str, int]) -> Rendering:
    """A text takes the place of the placeholder in the conversation. ends: end tokens by their
    text.
    """
    before, placeholder, after = whole.partition(ANSWER)
    if not placeholder:
        raise ValueError("expected the answer in the rendered conversation, found other text")
    end = next((end for end in ends if after.lstrip().startswith(end)), "")
    lead = before[len(prompt) :] if before.startswith(prompt) else ""
    if CLOSE in text and CLOSE in lead:  # the answer has reasoning of its own
        lead = lead.partition(OPEN)[0] if OPEN in lead else ""
    if not lead.strip():  # blanks are the answer's, which may have them
        text = text if text.startswith(lead) else lead + text
        lead = ""
    asked = (prompt + lead).rstrip()
    _check_reasoning(asked, text.lstrip())
    if asked.endswith(OPEN) and text.lstrip().startswith(OPEN):  # the answer repeats it
        blanks = prompt[len(prompt.rstrip()) :]
        text = text.lstrip().removeprefix(OPEN).removeprefix(blanks)
    return Rendering(lead, text, ends.get(end))


def _check_reasoning(prompt: str, text: str) -> None:
    """Raises ValueError if an answer reasons where the prompt has ended that, or the reverse."""
    if prompt.endswith(CLOSE) and text.startswith(OPEN):
        raise ValueError(
            f"expected no reasoning, as the generation prompt ends with {CLOSE}, got some; "
            "switch it on with --template-args, or use --reasoning drop"
        )
    if prompt.endswith(OPEN) and CLOSE not in text:
        raise ValueError(
            f"expected reasoning, as the generation prompt opens {OPEN}, got none; switch "
            "it off with --template-args, or give answers with their reasoning"
        )
