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

from draftheads.infer.prompt import CLOSE, OPEN, PromptRenderer
from draftheads.train.data.answers import (
    Counts,
    Record,
    has_answers,
    new_manifest,
    store_batch,
)
from draftheads.train.data.conversation import (
    LOSSY,
    PLACEHOLDER,
    Conversation,
    Turn,
    assistant,
    check_tools,
    render,
)
from draftheads.train.data.prompts import Message, Messages, Prompt
from draftheads.train.data.shards import documents_of, rows_of, to_batch
from draftheads.train.data.text_side import TextSide

EMPTY_REASONING = re.compile(rf"\s*{OPEN}\s*{CLOSE}\s*")


def import_answers(
    side: TextSide,
    conversations: Sequence[Messages],
    out: Path,
    *,
    template_args: dict[str, Any],
    source: str,
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
    records = [replay(renderer, index, messages) for index, messages in enumerate(conversations)]
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


def replay(renderer: PromptRenderer, index: int, messages: Messages) -> Record:
    """The line to store for a conversation: all assistant messages are learned, in one document
    or, if the chat template rewrites them in later turns, in several.
    """
    turns, answers = _parts(messages)
    conversation = Conversation(Prompt(index, messages), renderer, 1 << 30, turns)
    if not answers:
        conversation.end("skipped", "expected an assistant turn with text, found none")
    for place, answer in enumerate(answers):
        if not conversation.ask():
            break
        try:
            written = rendering(renderer, turns[: place + 1], answers[:place], answer)
            lead_ids = conversation.retokenize(written.lead)
            ids = conversation.retokenize(written.text, lead_ids or ())
            if lead_ids is None or ids is None:
                raise ValueError(LOSSY)
        except (TemplateError, ValueError) as error:  # other conversations may be fine
            conversation.end("skipped", f"turn {place + 1}: {error}")
            break
        end_ids = [] if written.end is None else [written.end]
        conversation.answer(ids + end_ids, answer, written.lead, lead_ids)
    return conversation.record()


def _parts(messages: Messages) -> tuple[list[Turn], list[Message]]:
    """The turns of a conversation and the answers to them; an empty answer is none."""
    turns: list[Turn] = [[]]
    answers: list[Message] = []
    for message in messages:
        content = (message.get("content") or "").strip()
        if message["role"] == "assistant" and (content or message.get("tool_calls")):
            answers.append(message | {"content": content})
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
    """How an answer to the last turn is rendered. answers: the earlier ones.

    Raises ValueError for an answer that the target cannot have written after this prompt.
    """
    ends = {renderer.tokenizer.decode([token]): token for token in renderer.eos_ids}
    prompt = render(renderer, turns, answers)
    if answer.get("tool_calls") or renderer.template_message(answer) != answer:
        whole = render(renderer, [*turns, []], [*answers, answer], ask=False)
        return _rendering_as_shown(prompt, whole, answer, ends)
    whole = render(renderer, [*turns, []], [*answers, assistant(PLACEHOLDER)], ask=False)
    return _rendering_of_text(prompt, whole, answer["content"], ends)


def _rendering_as_shown(
    prompt: str, whole: str, answer: Message, ends: Mapping[str, int]
) -> Rendering:
    """Tool calls, and reasoning between special tokens, stand in the conversation in the template's
    own layout. ends: end tokens by their text.
    """
    whole = whole.rstrip()
    text = whole[len(prompt) :] if whole.startswith(prompt) else ""
    names = [call["function"]["name"] for call in answer.get("tool_calls", ())]
    if not text or not all(name in text for name in names):
        raise ValueError(
            "expected tool calls or reasoning after the generation prompt, found other text"
        )
    block = EMPTY_REASONING.match(text)
    lead = block.group() if block else ""
    end = next((end for end in ends if text.endswith(end)), "")
    return Rendering(lead, text.removeprefix(lead).removesuffix(end), ends.get(end))


def _rendering_of_text(prompt: str, whole: str, text: str, ends: Mapping[str, int]) -> Rendering:
    """A text takes the place of the placeholder in the conversation. ends: end tokens by their
    text.
    """
    before, placeholder, after = whole.partition(PLACEHOLDER)
    if not placeholder:
        raise ValueError("expected the answer in the rendered conversation, found other text")
    end = next((end for end in ends if after.lstrip().startswith(end)), "")
    lead = before[len(prompt) :] if before.startswith(prompt) else ""
    if CLOSE in text and CLOSE in lead:  # the answer has reasoning of its own
        lead = lead.partition(OPEN)[0] if OPEN in lead else ""
    if not lead.strip():  # blanks are the answer's
        text = lead + text
        lead = ""
    _check_reasoning((prompt + lead).rstrip(), text)
    if (prompt + lead).rstrip().endswith(OPEN):  # the answer may repeat it
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
