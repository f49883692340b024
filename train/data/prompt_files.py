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
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
