"""Stores questions and answers as token ids for training on this machine: one line per answer.

    1764100000000.jsonl    {"time": seconds, "start": 17, "tokens": [...]}

Tokens from `start` on are the answer. Only their owner can read the files. A line is on disk when
`add` returns; one that was cut by the end of a process is skipped.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from draftheads.heads.files import naming

SUFFIX = ".jsonl"
FILE_BYTES = 1 << 20
FILE_SHARE = 0.1
"""A file that is larger, or older, than this share of the limits is not written to any more,
because files are deleted as a whole.
"""
NEAR = 64
"""Number of newest conversations that an answer may continue."""


@dataclass(eq=False)
class Dialogue:
    """The tokens of a conversation so far, and the half-open spans of its answers.

    time: of the last answer. key: derived from the text up to the end of the first answer, so it
    never changes.
    """

    tokens: array[int]
    answers: list[tuple[int, int]]
    time: float
    key: int

    @property
    def answered(self) -> int:
        """Number of tokens in its answers."""
        return sum(stop - start for start, stop in self.answers)


class Texts:
    """A store of at most `most_bytes`, whose texts are deleted after `keep_days`. vocabulary: the
    number of token ids; a damaged line may have others.

    Raises OSError if nothing can be written.
    """

    def __init__(self, folder: Path, *, vocabulary: int, most_bytes: int, keep_days: float) -> None:
        self.folder = folder
        self.vocabulary = vocabulary
        self.most_bytes = most_bytes
        self.keep_seconds = keep_days * 86400
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.conversations: list[Dialogue] = []
        now = time.time()
        for number, path in enumerate(self.files):  # the clock may have been ahead
            if begin_of(path) > now:
                path.rename(folder / f"{int(now * 1000) + number}{SUFFIX}")
        self.tidy()
        for prompt, answer, seconds in self._read():
            self._append(prompt, answer, seconds)

    @property
    def files(self) -> list[Path]:
        """The files of texts, oldest first."""
        return files_in(self.folder)

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> Dialogue:
        """Store an answer. Returns its conversation."""
        now = time.time()
        values = {"time": now, "start": len(prompt), "tokens": [*prompt, *answer]}
        line = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        path = self._newest(now)
        with naming(path), open(path, "ab+", opener=partial(os.open, mode=0o600)) as file:
            if size := file.tell():
                file.seek(size - 1)
                if file.read() != b"\n":  # a line that was cut
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file)
        self.tidy()
        return self._append(prompt, answer, now)

    def tidy(self) -> None:
        """Delete files with expired texts, and the oldest files beyond the limit of bytes, with
        their conversations.
        """
        delete_older(self.folder, self.keep_seconds)
        files = self.files
        total = sum(path.stat().st_size for path in files)
        while total > self.most_bytes:
            path = files.pop(0)
            total -= path.stat().st_size
            path.unlink()
        since = begin_of(files[0]) if files else math.inf
        self.conversations = [talk for talk in self.conversations if talk.time >= since]

    def _newest(self, now: float) -> Path:
        """The file to write to."""
        for path in self.files[-1:]:
            age = now - begin_of(path)
            if path.stat().st_size <= FILE_BYTES and age <= FILE_SHARE * self.keep_seconds:
                return path
        return self.folder / f"{int(now * 1000)}{SUFFIX}"

    def _append(self, prompt: Sequence[int], answer: Sequence[int], seconds: float) -> Dialogue:
        """Extend the newest conversation that the prompt continues, or begin one. Returns it."""
        span = (len(prompt), len(prompt) + len(answer))
        tokens = array("i", [*prompt, *answer])
        grown = Dialogue(tokens, [span], seconds, zlib.crc32(tokens.tobytes()))
        for begun in self.conversations[: -NEAR - 1 : -1]:
            if begun.tokens == tokens[: len(begun.tokens)] and len(begun.tokens) <= len(prompt):
                self.conversations.remove(begun)
                grown.answers, grown.key = [*begun.answers, span], begun.key
                break
        self.conversations.append(grown)
        return grown

    def _read(self) -> Iterator[tuple[list[int], list[int], float]]:
        """Yields prompts, answers and times of all intact lines, oldest first."""
        for path in self.files:
            for line in path.read_bytes().splitlines():
                try:
                    values = json.loads(line)
                    tokens, start = values["tokens"], int(values["start"])
                    seconds = min(float(values["time"]), time.time())  # not of a wrong clock
                    if min(tokens) < 0 or max(array("i", tokens)) >= self.vocabulary:
                        continue
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    continue
                yield tokens[:start], tokens[start:], seconds


def files_in(folder: Path) -> list[Path]:
    """The files of texts, the oldest first."""
    return sorted(filter(begin_of, folder.glob(f"*{SUFFIX}")), key=begin_of)


def delete_older(folder: Path, seconds: float) -> None:
    """Delete the files that were begun longer ago than this."""
    for path in files_in(folder):
        if begin_of(path) < time.time() - seconds:
            path.unlink()


def begin_of(path: Path) -> float:
    """The Unix time at which a file of texts was begun; 0.0 for any other file."""
    return int(path.stem) / 1000 if path.stem.isdecimal() else 0.0
