"""Where records come from: files, folders of files and Hub data sets, one record after another.

Files: .json (a list, or {"data": [...]}), .jsonl, .jsonl.gz, .parquet, plain .txt and .md. Each
record comes with the words that name its place in an error message: "prompts.jsonl line 17".

Nothing is read ahead of the records that are taken, so that the first of many gigabytes cost
little; but a .json list, and plain text up to its first blank line, are read as a whole.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import importlib.util
import itertools
import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jinja2.exceptions import TemplateError

PARQUET_ROWS = 1024
"""Read together."""
SUFFIXES = (".json", ".jsonl", ".jsonl.gz", ".parquet", ".txt", ".md")


@dataclass(frozen=True)
class Hub:
    """How a Hub data set is read.

    streaming: record by record as they are taken, nothing is stored; None: where a limit says that
    not all of it is needed.
    """

    split: str = "train"
    streaming: bool | None = None


def records(
    source: str | Path, hub: Hub, limit: int | None, by_line: bool
) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) for each record of a file, a folder or a Hub data set.

    by_line: plain text gives one record per line, else one per paragraph. limit: only a hint that
    not all of a Hub data set is needed.
    """
    path = check_source(source)
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if _is_prompt_file(file, path)]
        if not files:
            raise ValueError(
                f"{path}: expected a folder with {', '.join(SUFFIXES)} files, found none; "
                "give the folder that holds them"
            )
        for file in files:
            yield from _file_records(file, by_line)
    elif path.is_file():
        yield from _file_records(path, by_line)
    else:
        limited = limit is not None
        streaming = limited if hub.streaming is None else hub.streaming
        yield from _hub_records(str(source), hub.split, streaming=streaming)


def check_source(source: str | Path) -> Path:
    """The path of a source, ~ expanded.

    Raises ValueError for what is no file, no folder, and cannot be the name of a data set.
    """
    if not str(source):
        raise ValueError("expected a file, a folder or a Hub data set, got an empty name; give one")
    path = Path(os.path.expanduser(source))
    named = isinstance(source, str) and _looks_like_hub_id(source)
    if not (path.is_dir() or path.is_file() or named):
        raise ValueError(_missing(path))
    return path


def _is_prompt_file(path: Path, folder: Path) -> bool:
    about = path.stem.upper().startswith(
        ("README", "LICENSE")
    )  # they describe the data, they are not it
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.is_file() and path.name.lower().endswith(SUFFIXES) and not (about or hidden)


def _file_records(path: Path, by_line: bool) -> Iterator[tuple[str, Any]]:
    name = path.name.lower()
    suffix = next((one for one in SUFFIXES if name.endswith(one)), None)
    if suffix is None:
        raise ValueError(
            f"{path}: expected a file ending in {', '.join(SUFFIXES)}, "
            f"got {path.suffix or 'no suffix'!r}; rename or convert it"
        )
    try:
        if suffix == ".json":
            yield from _json_records(path)
        elif suffix == ".parquet":
            yield from _parquet_records(path)
        elif suffix in (".txt", ".md"):
            yield from _text_records(path, by_line)
        else:
            yield from _json_lines(path)
    # json, gzip, zlib and pyarrow do not know which file they are in
    except (EOFError, MemoryError, OSError, RuntimeError, ValueError, zlib.error) as error:
        if str(path) in str(error):
            raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path}: expected a whole {suffix} file, got one that cannot be read ({reason}); "
            "copy or convert it again, or leave it out"
        ) from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    with opener(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path} line {number}", _load_json(f"{path} line {number}", line)


def _load_json(where: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # they do not know where they are
        raise ValueError(
            f"{where}: expected JSON in UTF-8, got {text[:40]!r}... ({error}); repair or remove it"
        ) from error


def _json_records(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        filled = filter(None, map(bytes.strip, lines))
        first, more = next(filled, b"").removeprefix(codecs.BOM_UTF8), any(filled)
    if first.startswith(b"{") and first.endswith(b"}") and more:
        yield from _json_lines(
            path
        )  # JSON lines under the name .json, as many Hub data sets have them
        return
    loaded = _load_json(str(path), path.read_bytes())
    data = loaded.get("data") if isinstance(loaded, dict) else loaded
    if not isinstance(data, list):
        raise ValueError(
            f'{path}: expected a list of records or {{"data": [...]}}, got {describe(loaded)}; '
            "put the records into a list"
        )
    for number, record in enumerate(data, start=1):
        yield f"{path} record {number}", record


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    _check_installed(path)
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(PARQUET_ROWS):
            for record in batch.to_pylist():
                number += 1
                yield f"{path} record {number}", record


def _text_records(path: Path, by_line: bool) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        texts = filter(str.strip, lines) if by_line else _paragraphs(lines)
        for number, text in enumerate(texts, start=1):
            yield f"{path} prompt {number}", {"text": text.strip()}


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    """What stands between blank lines; without any, each line."""
    paragraph: list[str] = []
    parted = False
    for line in lines:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            parted = True
            yield "".join(paragraph)
            paragraph = []
    yield from ["".join(paragraph)] if parted and paragraph else paragraph


def _looks_like_hub_id(source: str) -> bool:
    if source.endswith((*SUFFIXES, ".gz", "/")) or source.startswith((".", "/", "~")):
        return False
    owner = source.split("/")[0]
    in_existing_folder = "/" in source and Path(owner).is_dir()
    return not in_existing_folder and bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source))


def _hub_records(source: str, split: str, *, streaming: bool) -> Iterator[tuple[str, Any]]:
    _check_installed(source)
    import datasets  # slow

    name, _, config = source.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split, streaming=streaming)
        for number, record in enumerate(rows, start=1):
            yield f"{source} [{split}] record {number}", record
    except FileNotFoundError as error:  # it speaks of the Hub only; the user may have meant a file
        raise ValueError(f"{_missing(Path(source))} ({error})") from error
    # a damaged file of the data set, or images whose decoder is not installed
    except (datasets.exceptions.DatasetsError, ImportError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(
            f"{source} [{split}]: expected a data set that can be read, got: {reason}; "
            "give another one, or a file made of it"
        ) from error


def _check_installed(source: str | Path) -> None:
    """`datasets`, which brings pyarrow, is optional."""
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(
            f"{source}: expected the package datasets, which reads Hub data sets and parquet, "
            "found none; pip install datasets, or give .jsonl, .json or .txt files"
        )


def _missing(path: Path) -> str:
    names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
    advice = hint or "check the path, or give a Hub data set as owner/name"
    return f"{path}: expected a file, a folder or a Hub data set, found none; {advice}"


def describe(value: Any) -> str:
    """What was found, in a few words for an error message."""
    if isinstance(value, dict):
        return f"keys {', '.join(map(str, value)) or '(none)'}"
    return f"{type(value).__name__} {str(value)[:40]!r}"


# The turns of a conversation, under whatever names people give them, as messages for a template.
#
# Roles are recognised by name. A tool call is a turn of its own (`function_call`, ShareGPT), or an
# assistant's `tool_calls` (OpenAI); both become the latter. What a tool answers has the role
# "tool".


USER_ROLES = frozenset({"user", "human", "prompter"})
SYSTEM_ROLES = frozenset({"system", "developer"})
ANSWER_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"})
CALL_ROLES = frozenset({"function_call", "tool_call"})
RESULT_ROLES = frozenset({"tool", "function", "observation", "tool_response", "ipython"})
THOUGHT_ROLES = frozenset({"thinking"})
"""Left out: no template has a place for a turn of thoughts."""

SKIP = "remove the record, or pass --skip-empty"
THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)

Message = dict[str, Any]
Messages = tuple[Message, ...]


class EmptyPromptError(ValueError):
    """A record without anything to ask or to learn; `skip_empty` leaves such records out."""


@dataclass(frozen=True)
class Reading:
    """What of a conversation is kept beside system and user turns.

    tools: calls and results. answers: what the assistant said. reasoning: <think> ... </think> in
    answers. left_out: counts what is not text, by its kind.
    """

    tools: Literal["keep", "drop"] = "drop"
    reasoning: Literal["keep", "drop"] = "keep"
    answers: bool = False
    left_out: Counter[str] = field(default_factory=Counter)

    def text(self, where: str, value: Any) -> str:
        """A text, or the texts of OpenAI's content parts. Raises ValueError for anything else."""
        if isinstance(value, list):
            parts = [part if isinstance(part, dict) else {"text": part} for part in value]
            for part in parts:
                kind = str(part.get("type", "text"))
                # data sets give all parts the same keys, null where a part has no text
                self.left_out[kind] += not part.get("text") and "text" not in kind
            value = [part["text"] for part in parts if part.get("text") is not None]
            odd = next((text for text in value if not isinstance(text, str)), None)
            value = odd if odd is not None else "".join(value)
        if not isinstance(value, str):
            raise ValueError(
                f"{where}: expected a string, got {describe(value)}; give the text itself"
            )
        return value

    def asked(self, where: str, value: Any) -> str:
        """As `text`; raises EmptyPromptError for an empty one."""
        text = self.text(where, value)
        if not text.strip():
            raise EmptyPromptError(f"{where}: expected a question, got an empty string; {SKIP}")
        return text


def read_turns(where: str, turns: list[Any], reading: Reading) -> Messages:
    """Messages of a conversation that ends with what is asked, or with `answers` said.

    Raises ValueError, naming the turn; EmptyPromptError where nothing is asked or said.
    """
    kept: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        message = _message(f"{where}, turn {number}", turn, reading)
        if message is not None:
            _link(kept, message)
            kept.append(message)
    last = {"assistant"} if reading.answers else {"user", "tool"}
    while kept and kept[-1]["role"] not in last:
        kept.pop()  # nothing is asked, or said, after it
    if not any(message["role"] == "user" for message in kept):
        raise EmptyPromptError(f"{where}: expected a user turn, found none; {SKIP}")
    return tuple(kept)


def with_tools(messages: Sequence[Message]) -> bool:
    """Whether a conversation has tool calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def check_tools(tokenizer: Any, template_args: dict[str, Any]) -> None:
    """Raises ValueError for a chat template that does not show tool calls and their results."""
    call = {"name": "look_up", "arguments": {"word": "heron"}}
    talk: list[Message] = [
        {"role": "user", "content": "What is a heron?"},
        {"role": "assistant", "content": "", "tool_calls": [_call("call00000", call)]},
        {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "A bird."},
    ]
    try:
        shown = tokenizer.chat_template and tokenizer.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True, **template_args
        )
        problem = "drops them"
    except (TemplateError, TypeError) as error:  # raised by the template
        shown, problem = "", f"refuses them ({error})"
    if not (shown and "look_up" in shown and "A bird." in shown):
        problem = problem if tokenizer.chat_template else "is missing"
        raise ValueError(
            f"--tools: expected a chat template that shows tool calls and results, the one of "
            f"{tokenizer.name_or_path} {problem}; leave them out with --tools drop"
        )


def _message(where: str, turn: Any, reading: Reading) -> Message | None:
    """A turn as a message; None: it is left out."""
    if not isinstance(turn, dict) or not (turn.get("role") or turn.get("from")):
        raise ValueError(
            f'{where}: expected {{"role", "content"}} or {{"from", "value"}}, '
            f"got {describe(turn)}; rename the keys"
        )
    role = str(turn.get("role") or turn["from"]).lower()
    content = turn["content"] if "content" in turn else turn.get("value")
    if role in USER_ROLES:
        return {"role": "user", "content": reading.asked(where, content)}
    if role in SYSTEM_ROLES:
        text = "" if content is None else reading.text(where, content)
        return {"role": "system", "content": text} if text.strip() else None
    if role in CALL_ROLES:
        return _calls(where, "", content) if reading.tools == "keep" else None
    if role in ANSWER_ROLES:
        return _answer(where, turn, content, reading)
    if role in RESULT_ROLES:
        return _result(where, turn, content, reading) if reading.tools == "keep" else None
    if role in THOUGHT_ROLES:
        return None
    raise ValueError(
        f"{where}: expected a user, system, assistant or tool role, got {role!r}; rename it"
    )


def _answer(where: str, turn: Message, content: Any, reading: Reading) -> Message | None:
    calls = turn.get("tool_calls") or turn.get("function_call")
    calls = calls if reading.tools == "keep" else None
    if not (calls or reading.answers):
        return None
    text = "" if not content else reading.asked(where, content)
    if reading.reasoning == "drop":
        text = THOUGHT.sub("", text)
    if calls:
        return _calls(where, text, calls)
    return {"role": "assistant", "content": text} if text else None


def _calls(where: str, text: str, value: Any) -> Message:
    """An assistant's message that calls tools, given as JSON text or as objects."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # they do not know where they are
            raise ValueError(
                f"{where}: expected a tool call as JSON, got {value[:40]!r} ({error}); repair it, "
                "or leave tools out"
            ) from error
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{where}: expected a tool call {{"name", "arguments"}}, got {describe(call)}; '
                "repair it, or leave tools out"
            )
        calls.append(_call(call.get("id"), function))
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _call(name: str | None, function: Message) -> Message:
    """As chat templates want it: arguments are an object."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):  # a tool that takes plain text
            arguments = {"input": arguments}
    function = {"name": function["name"], "arguments": arguments or {}}
    return {"id": name, "type": "function", "function": function}


def _result(where: str, turn: Message, content: Any, reading: Reading) -> Message:
    if content is not None and not isinstance(content, str | list):
        content = json.dumps(content)
    message = {"role": "tool", "content": reading.asked(where, content) if content else ""}
    return message | {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}


def _link(kept: list[Message], message: Message) -> None:
    """Name calls, and results after what they answer, where the source did not."""
    before = sum(len(other.get("tool_calls", ())) for other in kept)
    for place, call in enumerate(message.get("tool_calls", ()), start=before):
        call["id"] = call["id"] or f"call{place:05d}"  # nine letters, as Mistral's templates demand
    if message["role"] != "tool":
        return
    results = 0
    while results < len(kept) and kept[-1 - results]["role"] == "tool":
        results += 1
    calls = kept[-1 - results].get("tool_calls", ()) if results < len(kept) else ()
    if results < len(calls):
        message.setdefault("name", calls[results]["function"]["name"])
        message.setdefault("tool_call_id", calls[results]["id"])


# Prompts for the target, read from whatever people have lying about.
#
# Files: .json (a list, or {"data": [...]}), .jsonl, .jsonl.gz, .parquet, plain .txt and .md; a
# folder of such files (README and LICENSE are left out); or a Hub data set, "owner/name" or
# "owner/name:config".
#
# Layouts, recognised record by record, the first key that is present and not null wins:
#
#     messages        [{"role": ..., "content": ...}]           conversation
#     conversations   [{"from": ..., "value": ...}] (ShareGPT)  conversation
#     turns           ["...", ...] (MT-bench, Spec-Bench)       conversation
#     instruction     "..." with optional "input" (Alpaca)      conversation of one turn
#     prompt          "..." or a list of messages               conversation
#     text            "..."                                     plain text that the target continues
#
# Of a conversation only the system and user turns are kept: the target answers by itself. With
# tools="keep" the source's tool calls and their results stay too, as context: the target answers
# once the results are there. `read_conversations` keeps the answers.
#
# Only text is kept: images and other content parts are left out, which is said once.
#
# Plain text files hold one prompt per paragraph; without any blank line, one per line. With
# `prompt_words` each line is a prompt, cut to its first words: one long text becomes many openings
# for the target to continue.


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
