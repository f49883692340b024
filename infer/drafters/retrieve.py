"""Retrieval (REST, arXiv 2311.08252): n-grams are also looked up in the user's own files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from draftheads.heads.target.model import Target
from draftheads.infer.drafters.ngram import NGramIndex

MOST = 2_000_000
"""The most tokens that are read."""
MOST_CHARACTERS = 8 * MOST
"""The most characters that are read of one file, which may be a log of gigabytes."""


def read_files(path: Path, target: Target) -> NGramIndex:
    """The texts of a file or of all files below a folder, in order. Skips names that begin with a
    dot and files that are not UTF-8. Raises ValueError if no text is left.
    """
    index = NGramIndex(4 * MOST)
    size = 0
    for text in _texts(path):
        ids = target.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        index.append(ids[: MOST - size])
        size += len(ids)
        if size >= MOST:
            warnings.warn(
                f"{path}: expected at most {MOST} tokens, got more; the files after them were not "
                "read, so name a part of them",
                stacklevel=2,
            )
            break
    if not size:
        raise ValueError(
            f"{path}: expected a text or a folder of texts, found none; give files in UTF-8"
        )
    return index


def _texts(path: Path) -> Iterator[str]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if is_hidden or not file.is_file():
            continue
        try:
            with file.open(encoding="utf-8") as content:
                yield content.read(MOST_CHARACTERS)
        except UnicodeDecodeError:
            continue
