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

Of a conversation only the system and user turns are kept: the target answers by itself. Plain
text files hold one prompt per paragraph; without any blank line, one per line. With
`prompt_words` each line is a prompt, cut to its first words: one long text becomes many openings
for the target to continue.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftheads.train.prompt_files import describe, records

USER_ROLES = frozenset({"user", "human", "prompter"})
SYSTEM_ROLES = frozenset({"system", "developer"})
ANSWER_ROLES = frozenset(
    {"assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model", "thinking", "function_call"}
    | {"tool_call", "function", "observation", "tool", "tool_response", "ipython"}
)
LAYOUTS = ("messages", "conversations", "turns", "instruction", "prompt", "text")

Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Prompt:
    """One thing to ask the target. Exactly one of `messages` and `text` is given.

    index: its place among the prompts that were read, from 0. messages: system and user turns only,
    the last one a user's. text: plain text to be continued, never put into a chat template.
    """

    index: int
    messages: Messages | None = None
    text: str | None = None


class EmptyPromptError(ValueError):
    """A record without anything to ask; `skip_empty` leaves such records out."""


def read_prompts(
    source: str | Path,
    *,
    split: str = "train",
    limit: int | None = None,
    prompt_words: int | None = None,
    skip_empty: bool = False,
) -> list[Prompt]:
    """Read the prompts of a file, a folder or a Hub data set.

    split: of a Hub data set. limit: stop after this many prompts. prompt_words: cut plain text to
    its first words. skip_empty: leave out records without a question. Raises ValueError, naming
    the record.
    """
    for name, value in (("limit", limit), ("prompt_words", prompt_words)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    found = _parsed(records(source, split, limit, prompt_words is not None), skip_empty)
    prompts = []
    for index, (where, messages, text) in enumerate(itertools.islice(found, limit)):
        if prompt_words is not None:
            text = _first_words(where, text, prompt_words)
        prompts.append(Prompt(index, messages, text))
    if not prompts:
        raise ValueError(
            f"{source}: expected at least one prompt, found none; give another --prompts"
        )
    return prompts


def _parsed(
    records: Iterator[tuple[str, Any]], skip_empty: bool
) -> Iterator[tuple[str, Messages | None, str | None]]:
    for where, record in records:
        try:
            messages, text = _parse(where, record)
        except (
            EmptyPromptError
        ):  # asked for by the caller: real ShareGPT dumps hold empty conversations
            if not skip_empty:
                raise
            continue
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


def _parse(where: str, record: Any) -> tuple[Messages | None, str | None]:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {_expected_layout()}, got {describe(record)}")
    layout = next((key for key in LAYOUTS if record.get(key) is not None), None)
    if layout is None:
        raise ValueError(f"{where}: {_expected_layout()}, got {describe(record)}; rename the key")
    value = record[layout]
    if layout == "text":
        return None, _content(f"{where}, text", value)
    if layout == "turns":
        turns = _as_list(f"{where}, turns", value)
        value = [{"role": "user", "content": turn} for turn in turns]
    elif layout == "instruction":
        value = [{"role": "user", "content": _instruction(where, record)}]
    elif isinstance(value, str) and layout == "prompt":
        value = [{"role": "user", "content": value}]
    messages = _messages(f"{where}, {layout}", _as_list(f"{where}, {layout}", value))
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return messages, None


def _messages(where: str, turns: list[Any]) -> Messages:
    kept: list[dict[str, str]] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not (turn.get("role") or turn.get("from")):
            raise ValueError(
                f'{where}, turn {number}: expected {{"role", "content"}} or {{"from", "value"}}, '
                f"got {describe(turn)}; rename the keys"
            )
        role = str(turn.get("role") or turn["from"]).lower()
        content = turn["content"] if "content" in turn else turn.get("value")
        if role in USER_ROLES:
            kept.append({"role": "user", "content": _content(f"{where}, turn {number}", content)})
        elif role in SYSTEM_ROLES:
            if content:
                kept.append({"role": "system", "content": _content(where, content)})
        elif role not in ANSWER_ROLES:
            raise ValueError(
                f"{where}, turn {number}: expected a user, system or assistant role, "
                f"got {role!r}; rename it"
            )
    while kept and kept[-1]["role"] == "system":
        kept.pop()  # nothing is asked after it
    if not kept:
        raise EmptyPromptError(f"{where}: expected a user turn, found none; {_SKIP}")
    return tuple(kept)


_SKIP = "remove the record, or pass --skip-empty"


def _content(where: str, value: Any) -> str:
    if isinstance(value, list):  # OpenAI's content parts
        value = "".join(part.get("text", "") for part in value if isinstance(part, dict))
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected a string, got {describe(value)}; give the text itself")
    if not value.strip():
        raise EmptyPromptError(f"{where}: expected a question, got an empty string; {_SKIP}")
    return value


def _instruction(where: str, record: dict[str, Any]) -> str:
    instruction = _content(f"{where}, instruction", record["instruction"])
    extra = record.get("input")
    return f"{instruction}\n\n{extra}" if isinstance(extra, str) and extra.strip() else instruction


def _as_list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a list of turns, got {describe(value)}")
    return value


def _expected_layout() -> str:
    return f"expected an object with one of the keys {', '.join(LAYOUTS)}"
