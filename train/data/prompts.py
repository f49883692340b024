"""Prompts and conversations, read from files, folders and Hub data sets.

Files: .json (a list, {"data": [...]}, one object, or JSON lines), .traj, .jsonl, .txt and .md, also
packed as .gz, .bz2 or .zst; .csv, .tsv, .parquet and .arrow; a folder of them (README, LICENSE and
hidden files are ignored); a Hub data set, "owner/name" or "owner/name:config"; or one of SETS by
name. A .jsonl file may be a session of an agent (`draftheads.train.data.traces`). In a .txt or .md
file each paragraph is a record or, without blank lines, each line. JSON is read here, not by
`datasets`, which refuses lines of several shapes and fills their objects with nulls. Fields of .csv
and .tsv are text.

A record has a conversation, a question or a text; KEYS are the names of these and of what stands
beside them:

    conversation    [{"role": ..., "content": ...}], [{"from": ..., "value": ...}] (ShareGPT) or
                    ["...", ...], questions alone (MT-bench)
    question        "...", or a conversation up to the question
    context         goes behind the question, after a blank line (Alpaca's input, Dolly, SQuAD)
    choices         likewise (MMLU), as lines "A. ...", or with labels of their own (ARC)
    answer          "...", a number, messages, an index of the choices, or {"text": [...]} (SQuAD)
    reasoning       what the answer begins with
    label           false: the answer is a rejected one (KTO); a number is not read
    history         [["question", "answer"], ...] before the question; alone, messages (SWE-agent)
    system          the system's message, where the conversation has none
    tools           definitions for the chat template, as objects or JSON text
    variables       of the chat template, likewise (TRL)
    documents       likewise, for templates that show them
    text            plain text that the target continues
    not read        answers of others, marks of parts of an answer

An assistant's message may have its reasoning in a key of its own (THOUGHTS), `weight: 0`, `train:
false` or the like (MARKS) if it is not to be learned, and `finish_reason: length` if it was cut. So
may a record, also with a list of marks, one for each turn. Reasoning, calls and results may also
be parts of a content that is a list (PART_KEYS). A turn may name its `model`. In any record,
`category` may name the kind of a prompt. Keys that are known and not read are counted and said.
Errors name the record: "prompts.jsonl line 17, messages, turn 2: expected ...".
"""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from json import JSONDecoder
from pathlib import Path
from string import ascii_uppercase
from typing import Any, BinaryIO, Literal
from unittest import mock

from draftheads.arguments import (
    EITHER,
    FOLDER,
    HUB_ID,
    JSON,
    PROMPTS,
    bare_name,
    check_kind,
    suggestion,
)
from draftheads.extras import extras
from draftheads.infer.text import (
    ARGUMENT_KEYS,
    THOUGHT_KEY,
    THOUGHTS,
    assistant,
    read_arguments,
    tool_call,
)
from draftheads.recipes import FOLDER as RECIPES
from draftheads.recipes import packaged
from draftheads.train.data.traces import CutLineError, Records, with_sessions

KEYS: dict[str, tuple[str, ...]] = {  # what a key holds: its names; the first that is there is read
    "conversation": ("messages", "conversations", "conversation", "turns"),
    "question": ("instruction", "prompt", "question", "query", "problem", "inputs", "input"),
    "text": ("text",),
    "context": ("input", "context", "passage"),
    "choices": ("choices", "options"),
    "answer": (
        "output",
        "completion",
        "response",
        "solution",
        "answer",
        "answers",
        "answerKey",
        "targets",
    ),
    "history": ("history",),
    "reasoning": THOUGHTS,
    "label": ("label", "kto_tag"),
    "system": ("system", "system_prompt", "instructions"),
    "tools": ("tools", "functions"),
    "variables": ("chat_template_kwargs",),
    "documents": ("documents",),
    "not read": (
        "chosen",
        "rejected",
        "completions",
        "rejected_response",
        "mask",
        "rationale",
        "cot",
        "chain_of_thought",
    ),
}
QUESTIONS = KEYS["conversation"] + KEYS["question"] + KEYS["text"] + KEYS["history"]
"""Keys of which a record has one."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench"
SETS: dict[str, dict[str, str]] = {  # name -> arguments of datasets.load_dataset
    "spec-bench": {"path": "json", "data_files": f"{SPEC_BENCH}/question.jsonl", "split": "train"},
    "mt-bench": {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
    "humaneval": {"path": "openai/openai_humaneval", "split": "test"},
    "gsm8k": {"path": "openai/gsm8k", "name": "main", "split": "test"},
    "math500": {"path": "HuggingFaceH4/MATH-500", "split": "test"},
    "mbpp": {"path": "google-research-datasets/mbpp", "name": "sanitized", "split": "test"},
    "speed-bench": {"path": "nvidia/SPEED-Bench", "name": "qualitative", "split": "test"},
}
ELSEWHERE = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""What SPEED-Bench has in the place of questions of other data sets."""
PACKAGED = tuple(path.stem for path in RECIPES.glob("*.jsonl"))
"""Sets that come with the package."""
ROLES = {  # our role -> names of it in data sets
    "user": ("user", "human", "prompter"),
    "system": ("system", "developer"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"),
    "call": ("function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "tool_response", "ipython"),
    "thought": ("thinking", "reasoning", "exit"),  # mini-SWE-agent's exit, which nothing follows
}
PART_KEYS = {  # type of a content part: the key that a message has for it
    "thinking": THOUGHT_KEY,
    "reasoning": THOUGHT_KEY,
    "tool_use": "tool_calls",
    "tool_call": "tool_calls",
    "function_call": "tool_calls",
    "custom_tool_call": "tool_calls",
}
MARKS = ("weight", "train", "training", "trainable", "loss", "loss_weight", "loss_mask", "learn")
"""Keys of an assistant's message that is context alone, if one of them is 0 or false."""
FINISHES = ("finish_reason", "stop_reason")
CUT = ("length", "max_tokens", "max_output_tokens", "model_length", "content_filter", "abort")
"""Reasons for which an answer has no end of its own."""
UNREAD = ("train_detail", "training_detail", "loss_scale", "mask", "prefix", "refusal")
"""Keys of a turn that are known and not read."""
ENDED = re.compile(
    r"(<\|(im_end|eot_id|eom_id|end|return|end_of_turn)\|>|<end_of_turn>|\[/INST\].*</s>)\s*$"
)
"""The end of a text that a chat template rendered, with an answer."""
PACKED = (".gz", ".bz2", ".zst")
ABOUT = re.compile(
    r"^(readme|license|dataset_info\.json$|dataset_dict\.json$|state\.json$)|\.meta\.json$", re.I
)
"""What people, `datasets` and agents write beside a data set."""

logger = logging.getLogger("draftheads")

Message = dict[str, Any]
Messages = tuple[Message, ...]
Learn = Literal["all", "last"]


class EmptyPromptError(ValueError):
    """A record without a question, or of the kind that the message says, which is left out."""


@dataclass(frozen=True)
class Prompt:
    """One prompt for the target; either `messages` or `text` is given.

    index: position among the prompts, from 0. messages: system and user turns, and tool calls with
    their results if these are kept; the last is a user's or a tool's, or in a conversation with
    answers an assistant's. text: continued verbatim, without the chat template. template_args:
    variables of the chat template that the record has, such as tools.
    """

    index: int
    messages: Messages | None = None
    text: str | None = None
    category: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Parts:
    """Parts of a conversation to keep, in addition to system and user turns."""

    tools: bool
    answers: bool = False
    model: str = ""  # its answers are learned; default: those of all
    left_out: Counter[str] = field(default_factory=Counter)  # what is not text, not read, or empty


def read_prompts(
    source: str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    tools: str = "drop",
) -> list[Prompt]:
    """Read the prompts of a file, a folder or a Hub data set, without the answers in it.

    Records without a question are left out and counted. split: of a Hub data set; default: that of
    one of SETS, else "train". limit: read at most this many; of a Hub data set no more is
    downloaded then. tools: "drop" leaves out tool calls, results and definitions. Raises
    ValueError, naming the record, and if there are none.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected a positive number, got {limit}")
    records = _records(source, split, limit)
    prompts = [prompt for _, prompt in _parsed(records, _Parts(tools != "drop"), limit)]
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
    tools: str = "keep",
    learn: Learn = "all",
    model: str = "",
) -> list[Prompt]:
    """Read conversations up to their last answer; those without an answer are left out.

    split, limit, tools: as in `read_prompts`. learn: "last" makes all answers but the last one of
    each conversation context. model: where answers name their model, those of another one are
    context, and a conversation without any of this one is left out. An answer that is context has
    `learn: False`, reasoning that stands in a key or a turn of its own is its `reasoning_content`.
    Raises ValueError, naming the record.
    """
    parts = _Parts(tools != "drop", answers=True, model=bare_name(model))
    records = _records(source, split, limit)
    conversations = []
    for _, prompt in _parsed(records, parts, limit):
        if prompt.messages is None:
            parts.left_out["plain texts"] += 1
            continue
        if learn == "last":
            for message in prompt.messages[:-1]:
                if message["role"] == "assistant":
                    message["learn"] = False
        conversations.append(prompt)
    if not conversations:
        raise ValueError(
            f"{source}: expected at least one answer in a conversation, found none; in sessions of "
            "agents, --model NAME says whose answers"
        )
    return conversations


def check_source(source: str | Path) -> Path:
    """The path of a source, ~ expanded. Raises ValueError for what is neither a file of prompts, a
    folder with some nor one of SETS, and cannot be the name of a data set or is more likely a
    misspelt file.
    """
    if demo := packaged(str(source), ".jsonl"):
        return demo
    path = Path(os.path.expanduser(source))
    if str(source) and path.exists():
        kinds = (PROMPTS, JSON, FOLDER, EITHER)
        advice = f"pass a folder of {', '.join(SUFFIXES)} files, or one of them"
        check_kind(str(source), path, PROMPTS, kinds, advice)
        if path.is_dir():
            prompt_files(path)
        return path
    if str(source) in SETS:
        return path
    files = []
    if path.parent.is_dir():
        files = [other.name for other in path.parent.iterdir() if other.is_file()]
    sets = [] if "/" in str(source) else [*SETS, *PACKAGED]  # openai/gsm8k is a data set itself
    near = suggestion(path.name, [*files, *sets])
    named = HUB_ID.fullmatch(re.sub(r":[\w.-]+$", "", str(source)))
    in_folder = "/" in str(source) and path.parent.is_dir()
    if named and not near and not in_folder and not path.name.endswith((*SUFFIXES, *PACKED)):
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
        for file in prompt_files(path):
            yield from _file_records(file)
    else:
        yield from _hub_records(str(source), split, limit)


def prompt_files(folder: Path) -> list[Path]:
    """The files of a folder that hold prompts, in order. Raises ValueError where none does."""
    files = []
    for file in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        is_about = ABOUT.search(file.name)
        is_ours = _suffix(file) in SUFFIXES and file.is_file()
        if is_ours and not (is_about or is_hidden):
            files.append(file)
    if not files:
        raise ValueError(
            f"{folder}: expected a folder with {', '.join(SUFFIXES)} files, found none; "
            "give the folder that has them"
        )
    return files


def _hub_records(source: str, split: str | None, limit: int | None) -> Records:
    name, _, config = source.partition(":")
    choice = SETS.get(source, {"path": name, "name": config or None, "split": "train"})
    split = split or choice["split"]
    choice = choice | {"split": split}
    rows = _dataset(f"{source} [{split}]", **choice, streaming=limit is not None)
    return rows if "data_files" in choice else _without_retries(rows)


def _without_retries(rows: Records) -> Records:
    """The same: where the Hub does not answer, from what was downloaded earlier. `datasets` would
    ask for half a minute first.
    """
    with extras():
        import datasets  # slow, and optional

    from huggingface_hub import constants

    from draftheads.heads.online import hub_answers

    is_offline = not hub_answers()
    with (
        mock.patch.object(constants, "HF_HUB_OFFLINE", is_offline),
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", is_offline),
    ):
        yield from rows


def _table(path: Path) -> Records:
    kind = _suffix(path).removeprefix(".")
    return _dataset(str(path), path=kind, data_files=str(path), split="train", streaming=True)


def _text_table(path: Path) -> Records:
    """Records of text alone, in which pandas sees numbers and nothing ("02108", "NA")."""
    csv.field_size_limit((1 << 31) - 1)
    dialect = "excel-tab" if _suffix(path) == ".tsv" else "excel"
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, dialect=dialect, strict=True)
        for number, record in enumerate(rows, start=1):
            if None in record:
                raise ValueError(f"record {number} has more fields than the first line")
            yield f"{path} record {number}", record


def _dataset(place: str, **arguments: Any) -> Records:
    """The rows of a data set, as `datasets.load_dataset` takes its arguments; fields of CSV files
    are text here, too.
    """
    with extras():
        import datasets  # slow, and optional

    failures = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError)
    try:
        with extras():  # a file at a URL needs aiohttp
            rows = datasets.load_dataset(**arguments)
            if getattr(getattr(rows, "info", None), "builder_name", "") == "csv":
                names: Iterable[str] = rows.column_names or next(iter(rows), {})
                fields = dict.fromkeys(names, datasets.Value("string"))
                features = datasets.Features(fields)
                arguments |= {"features": features, "keep_default_na": False}
                rows = datasets.load_dataset(**arguments)
        for number, record in enumerate(rows, start=1):
            yield f"{place} record {number}", without_nulls(record)
    except failures as error:
        raise ValueError(
            f"{place}: expected a file, a folder or a Hub data set that can be read, "
            f"got: {' '.join(str(error.__cause__ or error).split())}; give another one"
        ) from error


def _suffix(path: Path) -> str:
    """The end of a file's name, without that of a packed file."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in PACKED else name.suffix


def _file_records(path: Path) -> Records:
    try:
        yield from with_sessions(READERS[_suffix(path)](path), {*QUESTIONS})
    except (  # codecs, pyarrow and pandas do not name the file, nor do events of unknown shapes
        AttributeError,
        KeyError,
        TypeError,
        csv.Error,
        EOFError,
        MemoryError,
        OSError,
        RuntimeError,
        ValueError,
    ) as e:
        if str(path) in str(e):
            raise
        raise ValueError(
            f"{path}: expected a complete {path.suffix} file, got one that cannot be read "
            f"({' '.join(str(e).split())}); copy or convert it again, or leave it out"
        ) from e


def _opened(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked."""
    if path.suffix.lower() not in PACKED:
        return path.open("rb")
    with extras():
        import pyarrow  # slow, and optional

    return io.BufferedReader(pyarrow.input_stream(str(path)))


def _paragraphs(path: Path) -> Records:
    with _opened(path) as file:
        text = file.read().decode("utf-8-sig").replace("\r\n", "\n").lstrip()
    parts = re.split(r"\n(?:[ \t]*\n)+", text)
    if len(parts) == 1:
        parts = text.split("\n")
    for number, part in enumerate(filter(str.strip, parts), start=1):
        yield f"{path} prompt {number}", {"text": part.strip()}


def without_nulls(value: Any) -> Any:
    """A value without the keys that Arrow adds, as nulls or NaN: it gives all objects of a column
    the same ones.
    """
    if isinstance(value, dict):
        return {
            key: without_nulls(each)
            for key, each in value.items()
            if each is not None and each == each
        }
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _json(text: str | bytes) -> Any:
    """JSON, with NaN, as pandas writes what is missing, for null."""
    return json.loads(text, parse_constant=lambda _: None)


def _json_lines(path: Path) -> Records:
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = _json(line)
            except (ValueError, RecursionError) as error:
                kind = ValueError if line.endswith(b"\n") else CutLineError
                raise kind(
                    f"{path} line {number}: expected JSON in UTF-8, got {line[:40]!r}... "
                    f"({error}); fix or remove it"
                ) from error
            yield f"{path} line {number}", record


def _json_records(path: Path) -> Records:
    try:
        with _opened(path) as file:
            loaded = _json(file.read())
    except (ValueError, RecursionError):  # many Hub data sets name JSON lines .json
        yield from _json_lines(path)
        return
    data = loaded.get("data") if isinstance(loaded, dict) else loaded
    if data is None:
        data = [loaded]
    if not isinstance(data, list):
        raise ValueError(
            f'{path}: expected a record, a list of records or {{"data": [...]}}, got '
            f"{_describe(loaded)}; put the records into a list"
        )
    for number, record in enumerate(data, start=1):
        yield f"{path} record {number}", record


READERS: dict[str, Callable[[Path], Records]] = {
    ".json": _json_records,
    ".traj": _json_records,
    ".jsonl": _json_lines,
    ".csv": _text_table,
    ".tsv": _text_table,
    ".parquet": _table,
    ".arrow": _table,
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
            prompt = _parse(where, number, record, parts)
            json.dumps(vars(prompt), ensure_ascii=False).encode()
        except EmptyPromptError as error:
            parts.left_out[str(error) or "empty records"] += 1
            continue
        except (TypeError, UnicodeError) as error:  # such as "\ud83d", half a character
            what = "text in Unicode" if isinstance(error, UnicodeError) else "values of other kinds"
            raise ValueError(
                f"{where}: expected {what}, got {error}; fix or remove the record"
            ) from error
        yield where, prompt
        number += 1
        if number == limit:
            break
    if parts.left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in parts.left_out.items())
        logger.warning("left out: %s", counts)


def _parse(where: str, index: int, record: Any, parts: _Parts) -> Prompt:
    """The prompt of a record."""
    if not isinstance(record, dict) or all(record.get(key) is None for key in QUESTIONS):
        raise ValueError(
            f"{where}: expected an object with one of the keys {', '.join(QUESTIONS)}, "
            f"got {_describe(record)}; rename the key"
        )
    left = {key: value for key, value in record.items() if value not in (None, "", [], {})}
    key = next((key for key in QUESTIONS if key in left), None)
    if key is None:
        raise EmptyPromptError
    turns = left.pop(key)
    if isinstance(turns, list) and ELSEWHERE in turns:
        raise EmptyPromptError("questions that only NVIDIA's specdec_bench fetches")
    text = _text(f"{where}, {key}", turns, parts) if key == "text" else ""
    if key == "text" and not text.strip():
        raise EmptyPromptError
    if ENDED.search(text):
        raise ValueError(
            f"{where}, text: expected plain text to go on with, got a rendered chat, which ends "
            f"with {text.strip()[-14:]!r}; give its turns as messages"
        )
    turns = _turns(where, key, turns, left, parts)
    messages = None if text else _read_turns(f"{where}, {key}", turns, parts)
    if messages and messages[0]["role"] != "system":
        system = _text(f"{where}, system", _take("system", left), parts)
        if system.strip():
            messages = ({"role": "system", "content": system}, *messages)
    variables = _variables(where, left, parts)
    _count_left(key, left, parts)
    category = record.get("category")
    category = category if isinstance(category, str) else None
    return Prompt(index, messages, text or None, category, variables)


def _variables(where: str, left: Message, parts: _Parts) -> Message:
    """The variables of the chat template that a record has."""
    variables = _loaded(_take("variables", left) or {})
    if not isinstance(variables, dict):
        raise ValueError(
            f"{where}, chat_template_kwargs: expected an object, got {_describe(variables)}; fix it"
        )
    tools = tool_definitions(f"{where}, tools", _take("tools", left)) if parts.tools else []
    more = {"tools": tools, "documents": _loaded(_take("documents", left))}
    return variables | {name: value for name, value in more.items() if value}


def _turns(where: str, key: str, turns: Any, left: Message, parts: _Parts) -> Any:
    """The turns of a record, with what it says of all or each of them."""
    if key in KEYS["question"]:
        turns = _question_and_answer(where, turns, left, parts)
    elif key in KEYS["conversation"]:
        turns = _loaded(turns)
    if not (parts.answers and isinstance(turns, list)):
        return turns
    turns = _marked(where, turns, left, parts)
    finish = {name: left[name] for name in FINISHES if name in left}
    if turns and isinstance(turns[-1], dict):
        turns[-1] = finish | turns[-1]
    return turns


def _marked(where: str, turns: list[Any], left: Message, parts: _Parts) -> list[Any]:
    """Turns with the marks that their record has, one for all or one for each."""
    marks = {name: _loaded(left[name]) for name in MARKS if name in left}
    for name in KEYS["label"]:
        label = _loaded(str(left.get(name)).lower())
        if isinstance(label, bool):
            marks[name] = label
            del left[name]
            parts.left_out.update([f"answers with {name} false"] * (not label))
    if parts.model:
        marks["model"] = _of_model(turns, parts.model)
    for name, mark in marks.items():
        each = mark if isinstance(mark, list) else [mark] * len(turns)
        if len(each) != len(turns):
            raise ValueError(
                f"{where}, {name}: expected a mark for each of {len(turns)} turns, got "
                f"{len(each)}; fix or remove them"
            )
        for place, own in enumerate(each):
            if not _is_set(f"{where}, {name}", own) and isinstance(turns[place], dict):
                turns[place] = {**turns[place], "learn": False}
    return turns


def _of_model(turns: list[Any], model: str) -> list[bool]:
    """Whether each turn may be of a model. Raises EmptyPromptError if all that name one are not."""
    models = [
        bare_name(str(turn.get("model") or "")) if isinstance(turn, dict) else "" for turn in turns
    ]
    if any(models) and model not in models:
        raise EmptyPromptError(
            f"sessions of {', '.join(sorted({*models} - {''}))} without an answer of {model}"
        )
    return [each in ("", model) for each in models]


def _is_set(where: str, mark: Any) -> bool:
    """True if a mark, a number or true or false, also as a text, is more than 0."""
    value = _loaded(mark.lower()) if isinstance(mark, str) else mark
    if not isinstance(value, int | float):
        raise ValueError(
            f"{where}: expected a number, true or false, got {_describe(mark)}; fix or remove it"
        )
    return value > 0


def _take(kind: str, left: Message) -> Any:
    """Take the value of the first key of a kind, or no text; the key is no longer left."""
    return next((left.pop(key) for key in KEYS[kind] if key in left), "")


def _count_left(main: str, left: Message, parts: _Parts) -> None:
    """Count what is left of a record and was not meant to be: known keys, and what is no text."""
    of_answers = () if parts.answers else ("answer", "reasoning", "label")
    kinds = [kind for kind in KEYS if kind not in of_answers]
    known = {key for kind in kinds for key in KEYS[kind]}
    parts.left_out.update(key for key in MEDIA if key in left)
    parts.left_out.update(f"{key} beside {main}" for key in left if key in known)


def _question_and_answer(where: str, question: Any, left: Message, parts: _Parts) -> Any:
    """The turns of which a question is the last, or the last but its answer. It may be a text, with
    texts beside it, or have turns itself.
    """
    turns = _history(where, _take("history", left))
    choices = _take("choices", left)
    labels: Sequence[str] = ascii_uppercase if choices else ""
    if choices and not isinstance(choices, str):
        named = _choices(where, choices, parts)
        labels = [*named]
        choices = "\n".join(f"{label}. {text}" for label, text in named.items())
    if isinstance(question, str):
        context = _text(f"{where}, input", _take("context", left), parts)
        question = ["\n\n".join(filter(str.strip, [question, context, choices]))]
    if not isinstance(question, list):
        return question
    turns += question
    if not parts.answers:
        return turns
    thought = _take("reasoning", left)
    answers = _answers(_take("answer", left), labels)
    if answers and thought:
        answers[-1] = {THOUGHT_KEY: thought, **answers[-1]}
    return turns + answers


def _history(where: str, value: Any) -> list[Any]:
    """The turns of a history, which has pairs of texts, or messages; also as JSON text."""
    turns: list[Any] = []
    pairs = _loaded(value or [])
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if isinstance(pair, list) and len(pair) <= 2:
            roles = zip(("user", "assistant"), pair, strict=False)
            turns += [{"role": role, "content": content} for role, content in roles]
        elif isinstance(pair, dict):
            turns.append(pair)
        else:
            raise ValueError(
                f"{where}, history: expected pairs of texts, or messages, got {_describe(pair)}; "
                "fix it"
            )
    return turns


def _choices(where: str, value: Any, parts: _Parts) -> dict[str, str]:
    """Choices by their labels. ARC has both in an object, MedQA an object by letter, others a
    list.
    """
    labels: Any = ascii_uppercase
    texts = value
    if isinstance(value, dict):
        texts = value.get("text", [*value.values()])
        labels = value.get("label", ascii_uppercase if "text" in value else [*value])
    if len(texts) > len(labels):
        raise ValueError(
            f"{where}, choices: expected at most {len(labels)}, got {len(texts)}; leave some out"
        )
    texts = [str(text) if isinstance(text, int | float) else text for text in texts]
    return {
        str(label): _text(f"{where}, choices", text, parts)
        for label, text in zip(labels, texts, strict=False)
    }


def _answers(value: Any, labels: Sequence[str]) -> list[Any]:
    """An answer as turns: a text, several that are right (SQuAD), a number, the index of a choice,
    or messages.
    """
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, list):
        if not value or isinstance(value[0], dict):
            return [*value]
        value = value[0]
    if isinstance(value, int | float):
        is_index = not isinstance(value, bool) and value in range(len(labels))
        value = labels[int(value)] if is_index else str(value)
    return [assistant(value)] if value else []


def _loaded(value: Any) -> Any:
    """The content of a JSON text; another value as it is."""
    try:
        return json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return value


def _objects(value: Any) -> list[Any]:
    """The objects of a JSON text, of a list of such, or the only one."""
    loaded = _loaded(value)
    return [*chain(*map(_objects, loaded))] if isinstance(loaded, list) else [loaded]


def read_tools(tools: str) -> list[Message]:
    """The definitions of tools in a JSON file; none for "keep" and "drop". Raises ValueError."""
    if tools in ("keep", "drop"):
        return []
    if not os.path.isfile(tools):
        raise ValueError(
            f"--tools: expected keep, drop or a JSON file of definitions, got {tools!r}; check it"
        )
    return tool_definitions(tools, Path(tools).read_text(encoding="utf-8"))


def tool_definitions(where: str, value: Any) -> list[Message]:
    """Definitions of tools, as objects or JSON text, in OpenAI's layout. Raises ValueError."""
    definitions = []
    for tool in _objects(value or []):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise ValueError(
                f'{where}: expected definitions of tools, {{"name", "description", "parameters"}}, '
                f"got {_describe(tool)}; fix it, or leave tools out"
            )
        definitions.append(tool if "function" in tool else {"type": "function", "function": tool})
    return definitions


def _read_turns(where: str, turns: Any, parts: _Parts) -> Messages:
    """The messages of a conversation up to the last question or, with answers, the last answer."""
    if not isinstance(turns, list):
        raise ValueError(f"{where}: expected a list of turns, got {_describe(turns)}")
    messages: list[Message] = []
    thought = ""
    flat = [(number, each) for number, turn in enumerate(turns, 1) for each in _unfolded(turn)]
    for number, turn in flat:
        message = _message(f"{where}, turn {number}", turn, parts)
        if message and message["role"] == "thought":  # of the answer that follows
            thought = message["content"]
        elif message:
            if thought and message["role"] == "assistant":
                message.setdefault(THOUGHT_KEY, thought)
            thought = ""
            messages.append(message)
    _link(messages)
    last = {"assistant"} if parts.answers else {"user", "tool"}
    while messages and (messages[-1]["role"] not in last or is_silent(messages[-1])):
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise EmptyPromptError
    return tuple(messages)


def is_silent(message: Mapping[str, Any]) -> bool:
    """True if an assistant says nothing here."""
    says = (message.get("content") or "").strip() or message.get("tool_calls")
    return message["role"] == "assistant" and not says


def _unfolded(turn: Any) -> list[Any]:
    """A turn without what its content has beside text: results, as turns before it, and reasoning
    and calls, in their own keys.
    """
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list):
        return [turn]
    turns: list[Message] = []
    own: Message = {"content": []}
    for part in content:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        if kind == "tool_result":
            turns.append({**part, "role": "tool", "tool_call_id": part.get("tool_use_id")})
        else:
            own.setdefault(PART_KEYS.get(kind, "content"), []).append(part)
    if len(turns) < max(1, len(content)):
        turns.append({**turn, **own})
    return turns


def _link(messages: list[Message]) -> None:
    """Give ids to calls that have none, and to results the ids and names of their calls."""
    names: dict[str, str] = {}  # of calls, by their ids
    waiting: list[str] = []  # ids without a result
    for message in messages:
        if message["role"] != "tool":
            waiting = []
        elif waiting:
            number = message.setdefault("tool_call_id", waiting[0])
            message.setdefault("name", names.get(number, names[waiting[0]]))
            waiting = [each for each in waiting if each != number]
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or f"call{len(names):05d}"  # nine letters, as Mistral requires
            names[call["id"]] = call["function"]["name"]
            waiting.append(call["id"])


def _message(where: str, turn: Any, parts: _Parts) -> Message | None:
    """A turn as a message for a chat template; None if it is left out."""
    if isinstance(turn, str):
        turn = {"role": "user", "content": turn}
    role = _role(where, turn)
    content = turn.get("content", turn.get("value"))
    if content is None and role != "user":
        content = ""
    if role == "tool":
        return _result(where, turn, content, parts) if parts.tools else None
    if role == "call":
        return _answer(where, {**turn, "tool_calls": content}, "", parts)
    if role == "assistant":
        return _answer(where, turn, content, parts)
    text = _text(where, content, parts)
    if text.strip():
        return {"role": role, "content": text}
    if role == "user":
        raise EmptyPromptError
    return None


def _role(where: str, turn: Any) -> str:
    """Our name for the role of a turn."""
    name = turn.get("role") or turn.get("from") if isinstance(turn, dict) else None
    if name and turn.get("channel") == "analysis":  # Harmony
        name = "thinking"
    for role, names in ROLES.items():
        if str(name).lower() in names:
            return role
    raise ValueError(
        f'{where}: expected {{"role", "content"}} or {{"from", "value"}} of a user, system, '
        f"assistant or tool, got {repr(name) if name else _describe(turn)}; rename it"
    )


def _result(where: str, turn: Message, content: Any, parts: _Parts) -> Message:
    """A tool's result as a message."""
    if not isinstance(content, str | list):
        content = json.dumps(content)
    origin = {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}
    return {"role": "tool", "content": _text(where, content, parts), **origin}


def _answer(where: str, turn: Message, content: Any, parts: _Parts) -> Message | None:
    """An assistant's text with its reasoning and tool calls as a message."""
    calls = turn.get("tool_calls") or turn.get("function_call")
    if not (parts.answers or calls and parts.tools):
        return None
    text = _text(where, content, parts)
    parts.left_out.update(["empty answers"] if not (calls or text.strip()) else [])
    parts.left_out.update(f"{key} of a turn" for key in UNREAD if turn.get(key))
    if calls or not parts.tools:
        text, _ = _without_calls(text)
    if not (parts.tools or text.strip()):  # it was a call
        return None
    message = assistant(text)
    thought = _text(where, next((turn[key] for key in THOUGHTS if turn.get(key)), ""), parts)
    if thought:
        message[THOUGHT_KEY] = thought
    if calls and parts.tools:
        message["tool_calls"] = _calls(where, calls)
    marks = [key for key in MARKS if turn.get(key) not in (None, "")]
    if not all(_is_set(f"{where}, {key}", turn[key]) for key in marks):
        message["learn"] = False
    if any(str(turn.get(key)).lower() in CUT for key in FINISHES):
        message[FINISHES[0]] = CUT[0]
    return message


def _calls(where: str, value: Any) -> list[Message]:
    """Tool calls, given as JSON text or as objects, in OpenAI's layout."""
    marked = _without_calls(value)[1] if isinstance(value, str) else []
    try:
        return [_call(call) for call in _objects(marked or value)]
    except (KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'{where}: expected a tool call as JSON, {{"name", "arguments"}}, got '
            f"{_describe(value)}; fix it, or leave tools out"
        ) from error


def _without_calls(text: str) -> tuple[str, list[str]]:
    """A text without its marked calls, and these. JSON may have the marks in its strings."""
    calls = []
    rest, mark, call = text.partition("<tool_call>")
    while mark:
        end = 0
        with suppress(ValueError, RecursionError):
            _, end = JSONDecoder(strict=False).raw_decode(call, len(call) - len(call.lstrip()))
        closing, _, after = call[end:].partition("</tool_call>")
        calls.append(call[:end] + closing)
        before, mark, call = after.partition("<tool_call>")
        rest += before
    return rest, calls


def _call(call: Message) -> Message:
    function = call.get("function") or _loaded(call.get("value")) or call
    try:
        arguments = read_arguments(function)
    except ValueError:  # of a tool that takes plain text; templates require an object
        [text, *_] = [function[key] for key in ARGUMENT_KEYS if function.get(key) is not None]
        arguments = {"input": text}
    return tool_call(function["name"], arguments, call.get("id"))


def _text(where: str, value: Any, parts: _Parts) -> str:
    """A string, or the text of OpenAI's content parts; parts of other types are counted."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}: expected a string, got {_describe(value)}; convert it to text")
    texts = []
    for item in value:
        kind = str(item.get("type", "text")) if isinstance(item, dict) else "text"
        text = item
        if isinstance(item, dict):
            text = next(
                (item[key] for key in ("text", "value", "thinking", "content") if key in item), None
            )
        if "text" not in kind and kind not in PART_KEYS:
            parts.left_out[kind] += 1
        elif text is not None:
            texts.append(_text(where, text, parts))
    return "".join(texts)


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"keys {', '.join(map(str, value)) or '(none)'}"
    return f"{type(value).__name__} {str(value)[:40]!r}"
