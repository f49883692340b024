"""Prompts and conversations, read from files, folders and Hub data sets.

Files: .json (a list, {"data": [...]}, or JSON lines), .jsonl, .jsonl.gz, .parquet, .txt and .md; a
folder of them (README, LICENSE and hidden files are ignored); a Hub data set, "owner/name" or
"owner/name:config"; or one of SETS by name. In a .txt or .md file each paragraph is a record or,
without blank lines, each line.

Layouts of a record; the first key that is present and not null decides:

    messages        [{"role": ..., "content": ...}]           conversation
    conversations   [{"from": ..., "value": ...}] (ShareGPT)  conversation
    turns           ["...", ...] (MT-bench, Spec-Bench)       conversation
    instruction     "..." with optional "input" (Alpaca)      conversation of one turn
    prompt          "..." or a list of messages               conversation
    text            "..."                                     plain text that the target continues
    question        "..." (GSM8K)                             conversation of one turn

In any layout, `category` may name the kind of a prompt. Errors name the record: "prompts.jsonl line
17, messages, turn 2: expected ...".
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from draftheads.arguments import HUB_ID, suggestion
from draftheads.extras import extras
from draftheads.recipes import FOLDER, packaged

LAYOUTS = ("messages", "conversations", "turns", "instruction", "prompt", "text", "question")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench"
SETS: dict[str, dict[str, str]] = {  # name -> arguments of datasets.load_dataset
    "spec-bench": {"path": "json", "data_files": f"{SPEC_BENCH}/question.jsonl", "split": "train"},
    "mt-bench": {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
    "humaneval": {"path": "openai/openai_humaneval", "split": "test"},
    "gsm8k": {"path": "openai/gsm8k", "name": "main", "split": "test"},
}
PACKAGED = tuple(path.stem for path in FOLDER.glob("*.jsonl"))
"""Sets that come with the package."""
ROLES = {  # our role -> names of it in data sets
    "user": ("user", "human", "prompter"),
    "system": ("system", "developer"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"),
    "call": ("function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "tool_response", "ipython"),
    "thought": ("thinking",),
}
REASONING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)

logger = logging.getLogger("draftheads")

Message = dict[str, Any]
Messages = tuple[Message, ...]
Records = Iterator[tuple[str, Any]]
"""Each with its place, for messages."""
KeepOrDrop = Literal["keep", "drop"]


class EmptyPromptError(ValueError):
    """A record without a question, which is left out."""


@dataclass(frozen=True)
class Prompt:
    """One prompt for the target; either `messages` or `text` is given.

    index: position among the prompts, from 0. messages: system and user turns, and tool calls with
    their results if these are kept; the last is a user's or a tool's. text: continued verbatim,
    without the chat template.
    """

    index: int
    messages: Messages | None = None
    text: str | None = None
    category: str | None = None


@dataclass(frozen=True)
class _Parts:
    """Parts of a conversation to keep, in addition to system and user turns."""

    tools: bool
    answers: bool = False
    reasoning: bool = True
    left_out: Counter[str] = field(default_factory=Counter)  # what is not text, or empty, by type


def read_prompts(
    source: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    tools: KeepOrDrop = "drop",
) -> list[Prompt]:
    """Read the prompts of a file, a folder or a Hub data set, without the answers in it.

    Records without a question are left out and counted. split: of a Hub data set; default: that of
    one of SETS, else "train". limit: read at most this many; of a Hub data set no more is
    downloaded then. tools: "keep" tool calls and results as context. Raises ValueError, naming the
    record, and if there are none.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected a positive number, got {limit}")
    records = _records(source, split, limit)
    prompts = [prompt for _, prompt in _parsed(records, _Parts(tools == "keep"), limit)]
    if not prompts:
        raise ValueError(
            f"{source}: expected at least one prompt, found none; give another --prompts"
        )
    return prompts


def read_conversations(
    source: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    tools: KeepOrDrop = "keep",
    reasoning: KeepOrDrop = "keep",
) -> list[Messages]:
    """Read conversations up to their last answer; those without an answer are left out.

    split, limit, tools: as in `read_prompts`. reasoning: "drop" removes <think> ... </think> from
    answers. Raises ValueError, naming the record.
    """
    parts = _Parts(tools == "keep", answers=True, reasoning=reasoning == "keep")
    records = _records(source, split, limit)
    conversations = []
    for where, prompt in _parsed(records, parts, limit):
        if prompt.messages is None:
            raise ValueError(f"{where}: expected a conversation, got plain text; leave it out")
        conversations.append(prompt.messages)
    if not conversations:
        raise ValueError(f"{source}: expected at least one answer in a conversation, found none")
    return conversations


def check_source(source: str | Path) -> Path:
    """The path of a source, ~ expanded. Raises ValueError for what is neither a file, a folder nor
    one of SETS, and cannot be the name of a data set or is more likely a misspelt file.
    """
    if demo := packaged(str(source), ".jsonl"):
        return demo
    path = Path(os.path.expanduser(source))
    if str(source) and (path.exists() or str(source) in SETS):
        return path
    files = []
    if path.parent.is_dir():
        files = [other.name for other in path.parent.iterdir() if other.is_file()]
    sets = [] if "/" in str(source) else [*SETS, *PACKAGED]  # openai/gsm8k is a data set itself
    near = suggestion(path.name, [*files, *sets])
    named = HUB_ID.fullmatch(re.sub(r":[\w.-]+$", "", str(source)))
    in_folder = "/" in str(source) and path.parent.is_dir()
    if named and not near and not in_folder and not path.name.endswith((*SUFFIXES, ".gz")):
        return path
    hint = "check the path, or give a Hub data set as owner/name"
    if near:
        hint = f"did you mean {path.parent / near}?"
    raise ValueError(
        f"{source or 'empty name'}: expected a file, a folder or a Hub data set, found none; {hint}"
    )


def _records(source: str | Path, split: str | None, limit: int | None) -> Records:
    """Yield (place, record)."""
    path = check_source(source)
    if path.is_file():
        yield from _file_records(path)
    elif path.is_dir():
        files = []
        for file in sorted(path.rglob("*")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            is_about = file.stem.upper().startswith(("README", "LICENSE"))
            is_ours = file.name.lower().endswith(SUFFIXES) and file.is_file()
            if is_ours and not (is_about or is_hidden):
                files.append(file)
        if not files:
            raise ValueError(
                f"{path}: expected a folder with {', '.join(SUFFIXES)} files, found none; "
                "give the folder that has them"
            )
        for file in files:
            yield from _file_records(file)
    else:
        yield from _hub_records(str(source), split, limit)


def _hub_records(source: str, split: str | None, limit: int | None) -> Records:
    with extras():
        import datasets  # slow, and optional

    name, _, config = source.partition(":")
    choice = SETS.get(source, {"path": name, "name": config or None, "split": "train"})
    split = split or choice["split"]
    failures: tuple[type[Exception], ...] = (FileNotFoundError, ConnectionError)
    failures += (datasets.exceptions.DatasetsError,)
    try:
        with extras():  # a file at a URL needs aiohttp
            rows = datasets.load_dataset(**choice | {"split": split}, streaming=limit is not None)
        for number, record in enumerate(rows, start=1):
            yield f"{source} [{split}] record {number}", record
    except failures as error:
        raise ValueError(
            f"{source} [{split}]: expected a file, a folder or a Hub data set that can be read, "
            f"got: {' '.join(str(error.__cause__ or error).split())}; give another one"
        ) from error


def _file_records(path: Path) -> Records:
    suffix = next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)
    if suffix is None:
        raise ValueError(f"{path}: expected a file ending in {', '.join(SUFFIXES)}; convert it")
    try:
        yield from READERS[suffix](path)
    # gzip, codecs and pyarrow do not name the file
    except (EOFError, MemoryError, OSError, RuntimeError, ValueError, zlib.error) as e:
        if str(path) in str(e):
            raise
        raise ValueError(
            f"{path}: expected a complete {path.suffix} file, got one that cannot be read "
            f"({' '.join(str(e).split())}); copy or convert it again, or leave it out"
        ) from e


def _paragraphs(path: Path) -> Records:
    text = path.read_text(encoding="utf-8-sig").lstrip()
    parts = re.split(r"\n(?:[ \t]*\n)+", text)
    if len(parts) == 1:
        parts = text.split("\n")
    for number, part in enumerate(filter(str.strip, parts), start=1):
        yield f"{path} prompt {number}", {"text": part.strip()}


def _table_rows(path: Path) -> Records:
    with extras():
        import pyarrow.parquet  # slow, and optional

    with pyarrow.parquet.ParquetFile(path) as table:
        batches = (batch.to_pylist() for batch in table.iter_batches(1024))
        for number, record in enumerate(itertools.chain.from_iterable(batches), start=1):
            yield f"{path} record {number}", record


def _json_lines(path: Path) -> Records:
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path} line {number}: expected JSON in UTF-8, got {line[:40]!r}... "
                    f"({error}); fix or remove it"
                ) from error
            yield f"{path} line {number}", record


def _json_records(path: Path) -> Records:
    try:
        loaded = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # many Hub data sets name JSON lines .json
        yield from _json_lines(path)
        return
    data = loaded.get("data") if isinstance(loaded, dict) else loaded
    if not isinstance(data, list):
        raise ValueError(
            f'{path}: expected a list of records or {{"data": [...]}}, got {_describe(loaded)}; '
            "put the records into a list"
        )
    for number, record in enumerate(data, start=1):
        yield f"{path} record {number}", record


READERS: dict[str, Callable[[Path], Records]] = {
    ".json": _json_records,
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".parquet": _table_rows,
    ".txt": _paragraphs,
    ".md": _paragraphs,
}
"""By the end of a file's name: its records."""
SUFFIXES = tuple(READERS)


def _parsed(records: Records, parts: _Parts, limit: int | None) -> Iterator[tuple[str, Prompt]]:
    """Yield (place, prompt), `limit` at most; then log what was left out."""
    number = 0
    for where, record in records:
        try:
            messages, text = _parse(where, record, parts)
            category = record.get("category")
            category = category if isinstance(category, str) else None
            json.dumps([messages, text, category], ensure_ascii=False).encode()
        except EmptyPromptError:
            parts.left_out["empty records"] += 1
            continue
        except (TypeError, UnicodeError) as error:  # such as "\ud83d", half a character
            raise ValueError(
                f"{where}: expected text in Unicode, got {error}; fix or remove the record"
            ) from error
        yield where, Prompt(number, messages, text, category)
        number += 1
        if number == limit:
            break
    if parts.left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in parts.left_out.items())
        logger.warning("only text is kept; left out: %s", counts)


def _parse(where: str, record: Any, parts: _Parts) -> tuple[Messages | None, str | None]:
    """(messages, text) of a record; one of them is None."""
    layout = None
    if isinstance(record, dict):
        layout = next((key for key in LAYOUTS if record.get(key) is not None), None)
    if layout is None:
        raise ValueError(
            f"{where}: expected an object with one of the keys {', '.join(LAYOUTS)}, "
            f"got {_describe(record)}; rename the key"
        )
    parts.left_out.update(key for key in MEDIA if record.get(key))
    turns = record[layout]
    where = f"{where}, {layout}"
    if layout == "text":
        return None, _question(where, turns, parts)
    if layout == "instruction":
        extra = _text(f"{where}, input", record.get("input") or "", parts)
        task = _question(where, turns, parts)
        turns = [f"{task}\n\n{extra}" if extra.strip() else task]
    elif layout in ("prompt", "question") and isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list):
        raise ValueError(f"{where}: expected a list of turns, got {_describe(turns)}")
    messages = _read_turns(where, turns, parts)
    system = _text(f"{where}, system", record.get("system") or "", parts)
    if system.strip() and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return messages, None


def _read_turns(where: str, turns: list[Any], parts: _Parts) -> Messages:
    """The messages of a conversation up to the last question or, with answers, the last answer."""
    messages: list[Message] = []
    calls = 0
    unanswered: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        message = _message(f"{where}, turn {number}", turn, parts)
        if message is None:
            continue
        if message["role"] == "tool" and unanswered:
            call = unanswered.pop(0)
            message = {"name": call["function"]["name"], "tool_call_id": call["id"]} | message
        elif message["role"] != "tool":
            unanswered = list(message.get("tool_calls", ()))
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or f"call{calls:05d}"  # nine letters, as Mistral requires
            calls += 1
        messages.append(message)
    last = {"assistant"} if parts.answers else {"user", "tool"}
    while messages and messages[-1]["role"] not in last:
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise EmptyPromptError
    return tuple(messages)


def _message(where: str, turn: Any, parts: _Parts) -> Message | None:
    """A turn as a message for a chat template; None if it is left out."""
    if isinstance(turn, str):
        turn = {"role": "user", "content": turn}
    role = _role(where, turn)
    content = turn["content"] if "content" in turn else turn.get("value")
    if role == "thought" or (role in ("call", "tool") and not parts.tools):
        return None  # templates have no place for thoughts
    if role == "user":
        return {"role": "user", "content": _question(where, content, parts)}
    if role == "tool":
        return _result(where, turn, content, parts)
    if role == "call":
        return _answer(where, "", content, parts)
    if role == "assistant":
        calls = turn.get("tool_calls") or turn.get("function_call")
        return _answer(where, content, calls, parts)
    text = "" if content is None else _text(where, content, parts)
    return {"role": role, "content": text} if text.strip() else None


def _role(where: str, turn: Any) -> str:
    """Our name for the role of a turn."""
    name = turn.get("role") or turn.get("from") if isinstance(turn, dict) else None
    for role, names in ROLES.items():
        if str(name).lower() in names:
            return role
    raise ValueError(
        f'{where}: expected {{"role", "content"}} or {{"from", "value"}} of a user, system, '
        f"assistant or tool, got {repr(name) if name else _describe(turn)}; rename it"
    )


def _result(where: str, turn: Message, content: Any, parts: _Parts) -> Message:
    """A tool's result as a message."""
    if content is None:
        content = ""
    if not isinstance(content, str | list):
        content = json.dumps(content)
    origin = {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}
    return {"role": "tool", "content": _text(where, content, parts), **origin}


def _answer(where: str, content: Any, calls: Any, parts: _Parts) -> Message | None:
    """An assistant's text with its tool calls as a message."""
    if not parts.tools:
        calls = None
    if not (calls or parts.answers):
        return None
    text = "" if content is None else _text(where, content, parts)
    if not parts.reasoning:
        text = REASONING.sub("", text)
    if calls:
        return {"role": "assistant", "content": text, "tool_calls": _calls(where, calls)}
    return {"role": "assistant", "content": text} if text.strip() else None


def _calls(where: str, value: Any) -> list[Message]:
    """Tool calls, given as JSON text or as objects, in OpenAI's layout."""
    try:
        loaded = json.loads(value) if isinstance(value, str) else value
        return [_call(call) for call in (loaded if isinstance(loaded, list) else [loaded])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'{where}: expected a tool call as JSON, {{"name", "arguments"}}, got '
            f"{_describe(value)}; fix it, or leave tools out"
        ) from error


def _call(call: Message) -> Message:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # templates require an object
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # a tool that takes plain text
            arguments = {"input": arguments}
    called = {"name": function["name"], "arguments": arguments or {}}
    return {"id": call.get("id"), "type": "function", "function": called}


def _question(where: str, value: Any, parts: _Parts) -> str:
    text = _text(where, value, parts)
    if not text.strip():
        raise EmptyPromptError
    return text


def _text(where: str, value: Any, parts: _Parts) -> str:
    """A string, or the text of OpenAI's content parts; parts of other types are counted."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a string, got {_describe(value)}; convert it to text")
    texts = []
    for item in value:
        kind = str(item.get("type", "text")) if isinstance(item, dict) else "text"
        text = item.get("text") if isinstance(item, dict) else item
        if "text" not in kind:
            parts.left_out[kind] += 1
        elif text is not None:
            texts.append(_text(where, text, parts))
    return "".join(texts)


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"keys {', '.join(map(str, value)) or '(none)'}"
    return f"{type(value).__name__} {str(value)[:40]!r}"
