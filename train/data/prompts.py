"""Prompts for the target, read from whatever people have lying about.

Files: .json (a list, or {"data": [...]}), .jsonl, .jsonl.gz, .parquet, plain .txt and .md; a
folder of such files (README and LICENSE are left out); or a Hub data set, "owner/name" or
"owner/name:config".

Layouts, recognised record by record, the first key that is present and not null wins:

    messages        [{"role": ..., "content": ...}]           conversation
    conversations   [{"from": ..., "value": ...}] (ShareGPT)  conversation
    turns           ["...", ...] (MT-bench, Spec-Bench)       conversation
    instruction     "..." with optional "input" (Alpaca)      conversation of one turn
    prompt          "..." or a list of messages               conversation
    text            "..."                                     plain text that the target continues

Of a conversation only the system and user turns are kept: the target answers by itself. With
tools="keep" the source's tool calls and their results stay too, as context: the target answers
once the results are there. `read_conversations` keeps the answers.

Only text is kept: images and other content parts are left out, which is said once.

Plain text files hold one prompt per paragraph; without any blank line, one per line. With
`prompt_words` each line is a prompt, cut to its first words: one long text becomes many openings
for the target to continue.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftheads.train.data.prompt_files import Hub, describe, records
from draftheads.train.data.turns import EmptyPromptError, Messages, Reading, read_turns

LAYOUTS = ("messages", "conversations", "turns", "instruction", "prompt", "text")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Keys of a record that hold what no turn repeats."""

AS_USUAL = Hub()

logger = logging.getLogger("draftheads")

__all__ = ["EmptyPromptError", "Hub", "Messages", "Prompt", "read_conversations", "read_prompts"]


@dataclass(frozen=True)
class Prompt:
    """One thing to ask the target. Exactly one of `messages` and `text` is given.

    index: its place among the prompts that were read, from 0. messages: system and user turns, the
    last one a user's; with tools, calls and results among them, which may also end it. text: plain
    text to be continued, never put into a chat template.
    """

    index: int
    messages: Messages | None = None
    text: str | None = None


def read_prompts(
    source: str | Path,
    *,
    hub: Hub = AS_USUAL,
    limit: int | None = None,
    prompt_words: int | None = None,
    skip_empty: bool = False,
    tools: Literal["keep", "drop"] = "drop",
) -> list[Prompt]:
    """Read the prompts of a file, a folder or a Hub data set.

    hub: how a data set of the Hub is read. limit: read no further than this many prompts.
    prompt_words: cut plain text to
    its first words. skip_empty: leave out records without a question. tools: what becomes of tool
    calls and their results. Raises ValueError, naming the record.
    """
    for name, value in (("limit", limit), ("prompt_words", prompt_words)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    rows = records(source, hub, limit, prompt_words is not None)
    reading = Reading(tools=tools)
    found = _parsed(rows, reading, skip_empty)
    prompts = []
    for index, (where, messages, text) in enumerate(itertools.islice(found, limit)):
        if prompt_words is not None:
            text = _first_words(where, text, prompt_words)
        prompts.append(Prompt(index, messages, text))
    if not prompts:
        raise ValueError(
            f"{source}: expected at least one prompt, found none; give another --prompts"
        )
    _say_left_out(source, reading)
    return prompts


def read_conversations(
    source: str | Path,
    *,
    hub: Hub = AS_USUAL,
    limit: int | None = None,
    tools: Literal["keep", "drop"] = "keep",
    reasoning: Literal["keep", "drop"] = "keep",
) -> list[Messages]:
    """Read conversations with the answers they hold, those without any left out.

    hub, limit, tools: as in `read_prompts`. reasoning: what becomes of <think> ... </think> in
    answers. Raises ValueError, naming the record, also where it is plain text.
    """
    reading = Reading(tools=tools, reasoning=reasoning, answers=True)
    found = _parsed(records(source, hub, limit, by_line=False), reading, skip_empty=True)
    conversations = []
    for where, messages, _ in itertools.islice(found, limit):
        if messages is None:
            raise ValueError(f"{where}: expected a conversation, got plain text; leave it out")
        conversations.append(messages)
    if not conversations:
        raise ValueError(f"{source}: expected at least one answer in a conversation, found none")
    _say_left_out(source, reading)
    return conversations


def _say_left_out(source: str | Path, reading: Reading) -> None:
    if counts := +reading.left_out:
        what = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        logger.warning("%s: text alone is kept; left out: %s", source, what)


def _parsed(
    records: Iterator[tuple[str, Any]], reading: Reading, skip_empty: bool
) -> Iterator[tuple[str, Messages | None, str | None]]:
    for where, record in records:
        try:
            messages, text = _parse(where, record, reading)
        except (
            EmptyPromptError
        ):  # asked for by the caller: real ShareGPT dumps hold empty conversations
            if not skip_empty:
                raise
            continue
        try:
            json.dumps([messages, text], ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:  # "\ud83d" alone is half a character
            raise ValueError(
                f"{where}: expected text in Unicode, got {error}; repair or remove the record"
            ) from error
        yield where, messages, text


def _first_words(where: str, text: str | None, count: int) -> str:
    if text is None:
        raise ValueError(
            f"{where}: --prompt-words cuts plain text, got a conversation; leave it out, "
            'or give {"text": ...} records'
        )
    match = re.match(rf"\s*\S+(?:\s+\S+){{0,{count - 1}}}", text)
    assert match is not None  # an empty text was refused before
    return match.group()


def _parse(where: str, record: Any, reading: Reading) -> tuple[Messages | None, str | None]:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {_expected_layout()}, got {describe(record)}")
    layout = next((key for key in LAYOUTS if record.get(key) is not None), None)
    if layout is None:
        raise ValueError(f"{where}: {_expected_layout()}, got {describe(record)}; rename the key")
    value = record[layout]
    reading.left_out.update(key for key in MEDIA if record.get(key))
    if layout == "text":
        return None, reading.asked(f"{where}, text", value)
    if layout == "turns":
        turns = _as_list(f"{where}, turns", value)
        value = [{"role": "user", "content": turn} for turn in turns]
    elif layout == "instruction":
        value = [{"role": "user", "content": _instruction(where, record, reading)}]
    elif isinstance(value, str) and layout == "prompt":
        value = [{"role": "user", "content": value}]
    turns = _as_list(f"{where}, {layout}", value)
    messages = read_turns(f"{where}, {layout}", turns, reading)
    system = reading.text(f"{where}, system", record.get("system") or "")
    if system.strip() and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return messages, None


def _instruction(where: str, record: dict[str, Any], reading: Reading) -> str:
    instruction = reading.asked(f"{where}, instruction", record["instruction"])
    extra = reading.text(f"{where}, input", record.get("input") or "")
    return f"{instruction}\n\n{extra}" if extra.strip() else instruction


def _as_list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list of turns, got {describe(value)}")
    return value


def _expected_layout() -> str:
    return f"expected an object with one of the keys {', '.join(LAYOUTS)}"
