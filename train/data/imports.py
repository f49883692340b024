"""Conversations whose answers the target wrote earlier, as a folder that training reads.

Each conversation is told again as if it were distilled (`draftheads.train.data.conversation`): the
target is asked, and the answer at hand takes the place of what it would write, with the end token
that the chat template puts after it. So training sees the same documents as after a distillation.
That the target wrote the answers is the user's word and is not checked; the manifest says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from draftheads.train.data.answers import (
    FORMAT,
    MANIFEST,
    Counts,
    Journal,
    Record,
    new_manifest,
    write_manifest,
)
from draftheads.train.data.conversation import (
    CLOSE,
    LOSSY,
    OPEN,
    SENTINEL,
    Conversation,
    Renderer,
    TextSide,
    Turn,
    said,
)
from draftheads.train.data.prompts import Message, Messages, Prompt

EMPTY_THOUGHT = re.compile(rf"\s*{OPEN}\s*{CLOSE}\s*")
UNBOUNDED = 1 << 30


def import_answers(
    side: TextSide,
    conversations: Sequence[Messages],
    out: Path,
    *,
    template_args: dict[str, Any] | None = None,
    source: str = "",
) -> Counts:
    """Write the conversations of `read_conversations` to `out`, a folder for training.

    A conversation that the chat template cannot show is skipped, with its reason. Raises ValueError
    if none can be shown, for a tokenizer without chat template, and for a folder that is there.
    """
    if (out / MANIFEST).is_file():
        raise ValueError(
            f"{out}: expected a new folder, found one with a {MANIFEST}; choose another"
        )
    renderer = Renderer(side, template_args or {})
    if not side.tokenizer.chat_template:
        raise ValueError(
            f"{side.name}: expected a chat template, found none; "
            "conversations with answers cannot be rendered without one"
        )
    counts = Counts()
    lines = [retell(renderer, index, messages) for index, messages in enumerate(conversations)]
    for line in lines:
        counts.add(line)
    if not counts.done:
        reason = counts.reasons.most_common(1)[0][0] if counts.reasons else "there are none"
        raise ValueError(f"{source}: expected conversations to learn from, got none; {reason}")
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    manifest = new_manifest(
        {"name": side.name, "revision": side.revision, "fingerprint": None, "dtype": None},
        {"template_args": renderer.template_args},
        {"source": source, "count": len(lines), "sha256": digest},
        format=FORMAT,
        seed=None,
        complete=True,
        counts=vars(counts) | {"reasons": dict(counts.reasons)},
        imported={"verified": False},
    )
    out.mkdir(parents=True, exist_ok=True)
    with Journal(out, 0, 1) as journal:
        journal.cut(0)  # of a run that was killed before its manifest
        journal.append(lines)
    write_manifest(out, manifest)  # last: it says that all is there
    return counts


def retell(renderer: Renderer, index: int, messages: Messages) -> Record:
    """The line to store of a conversation: the assistant's messages are learned, in one document
    or, if the chat template rewrites them in later turns, in several.
    """
    turns: list[Turn] = [[]]
    answers: list[Message] = []
    for message in messages:
        content = (message.get("content") or "").strip()
        if message["role"] == "assistant" and (content or message.get("tool_calls")):
            answers.append(message | {"content": content})
            turns.append([])
        else:
            turns[-1].append(message)
    conversation = Conversation(Prompt(index, messages), renderer, UNBOUNDED, turns[:-1])
    if not answers:
        conversation.end("skipped", "expected an assistant turn that says something, found none")
    for place, answer in enumerate(answers):
        if not conversation.ask():
            break
        try:  # a reason not to learn this answer; other conversations may be fine
            lead, text, end = _shown(renderer, turns[: place + 1], answers[:place], answer)
            ids = _encode(renderer, lead, conversation.tokens)
            conversation.lead(lead, ids)
            ids = _encode(renderer, text, conversation.tokens)
        except (TemplateError, ValueError) as error:
            conversation.end("skipped", f"turn {place + 1}: {error}")
            break
        conversation.answer(ids if end is None else [*ids, end], answer)
    return conversation.record()


def _encode(renderer: Renderer, text: str, before: list[int]) -> list[int]:
    ids = renderer.written(text, before)
    if ids is None:
        raise ValueError(LOSSY)
    return ids


def _shown(
    renderer: Renderer, turns: Sequence[Turn], answers: Sequence[Message], answer: Message
) -> tuple[str, str, int | None]:
    """(lead, text, end) of an answer, as the template shows it after the generation prompt.

    lead: what the template itself writes before the answer: a header, an empty thinking block.
    end: the token that ends it, if any. Raises ValueError if it cannot follow this prompt.
    """
    ends = {renderer.tokenizer.decode([token]): token for token in renderer.eos_ids}
    prompt = renderer.render(turns, answers)
    if answer.get("tool_calls"):
        whole = renderer.render([*turns, []], [*answers, answer], ask=False).rstrip()
        text = whole[len(prompt) :] if whole.startswith(prompt) else ""
        if not all(call["function"]["name"] in text for call in answer["tool_calls"]):
            raise ValueError("expected tool calls after the generation prompt, found other text")
        block = EMPTY_THOUGHT.match(text)
        lead = block.group() if block else ""
        end = next((end for end in ends if text.endswith(end)), "")
        return lead, text.removeprefix(lead).removesuffix(end), ends.get(end)
    whole = renderer.render([*turns, []], [*answers, said(SENTINEL)], ask=False)
    before, found, after = whole.partition(SENTINEL)
    if not found:
        raise ValueError("expected the answer in what the chat template renders, found other text")
    end = next((end for end in ends if after.lstrip().startswith(end)), "")
    lead, text = before[len(prompt) :] if before.startswith(prompt) else "", answer["content"]
    if CLOSE in text and CLOSE in lead:  # it brings its own thinking
        lead = lead.partition(OPEN)[0] if OPEN in lead else ""
    if not lead.strip():
        lead, text = "", lead + text
    asked = (prompt + lead).rstrip()
    if asked.endswith(CLOSE) and text.startswith(OPEN):
        raise ValueError(
            f"expected no reasoning, as the generation prompt ends with {CLOSE}, got some; "
            "switch it on with template arguments, or drop the reasoning"
        )
    if asked.endswith(OPEN):
        if CLOSE not in text:
            raise ValueError(
                f"expected reasoning, as the generation prompt opens {OPEN}, got none; switch "
                "it off with template arguments, or give answers with their reasoning"
            )
        text = text.lstrip().removeprefix(OPEN).removeprefix(prompt[len(prompt.rstrip()) :])
    return lead, text, ends.get(end)
