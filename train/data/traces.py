"""Sessions of agents, which write an event a line, as records of conversations.

    Codex CLI    {"type", "payload"}: an item of the Responses API, the instructions, a turn's model
    Claude Code  {"type", "message", "parentUuid"}: a turn, or a part of an answer

Turns have the layouts that `draftheads.train.data.prompts` reads, and the `model` that answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Record = dict[str, Any]
Records = Iterator[tuple[str, Any]]
"""Each with its place, for messages."""


EVENT_KEYS = {"payload", "sessionId", "uuid", "leafUuid", "messageId"}
"""An event has one of them beside its type."""


class CutLineError(ValueError):
    """The last line of a file, whose writer was stopped in it."""


def with_sessions(records: Records, questions: set[str]) -> Records:
    """Yield the records of a file; one that is a session has conversations instead of events.
    questions: keys of which a record that is no event has one.
    """
    for where, record in records:
        match record:
            case {"type": _} if record.keys() & EVENT_KEYS and questions.isdisjoint(record):
                events = [record]
                with suppress(CutLineError):
                    events += (event for _, event in records)
                for turns in _conversations(events):
                    yield where, {"messages": turns}
            case _:
                yield where, record


def _conversations(events: list[Record]) -> Iterator[list[Record]]:
    """The turns of a session; another list where its history was compacted or a subagent asked."""
    turns: list[Record] = []
    model = ""
    for event in sorted(events, key=lambda event: event.get("isSidechain", False)):
        item = event.get("payload") or event.get("message")
        if not isinstance(item, dict):  # of a line about the session
            item = {}
        history = item.get("replacement_history")
        if turns and (history or event.get("parentUuid", "") is None):
            yield turns
            turns = [_turn("response_item", each) for each in history or ()]
        model = item.get("model", model)
        turn = _turn(event["type"], item)
        same = turns[-1:]
        if "uuid" in event:  # Claude Code's, where results may stand between parts of an answer
            same = [each for each in turns if each.get("id") == turn.get("id", 0)]
        if same and same[0]["role"] == turn.get("role") == "assistant":
            same[0]["content"] += turn["content"]
        elif "role" in turn:
            turns.append(turn | {"model": model})
    yield turns


def _turn(kind: str, item: Record) -> Record:
    """The turn that the item of an event is, or is a part of; it has no role if it is none."""
    if item.get("base_instructions"):
        return {"role": "system", "content": item["base_instructions"]["text"]}
    if "output" in item:
        return {"role": "tool", "content": item["output"]}
    if kind == "response_item" and "role" not in item:
        return {"role": "assistant", "content": [item]}
    return item
