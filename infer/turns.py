"""Keeps the turns of races: those that have ended, the time for another one, and a file of the
ended ones from which the same command continues.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tqdm import tqdm

from draftheads.heads.files import write_text
from draftheads.heads.terminal import FIRST_LINE_S, progress_bar
from draftheads.infer.rows import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TimedRun:
    """One timed generation."""

    steps: list[Step]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [token for step in self.steps for token in step.tokens]


TURN = TypeAdapter(tuple[str, dict[str, TimedRun]])
"""A line of the file: a key, and the run of each candidate."""


class Turns:
    """One turn: every candidate once, on one prompt.

    path: of the file, which needs a folder; None keeps nothing. facts: what must be the same for
    the file to count, else a warning says what is not.
    """

    def __init__(self, path: Path | None = None, facts: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.runs = 0  # of all races, as far as it is known, for the progress bar
        self.share = 1.0  # of the minutes, after which the present race ends
        self.left_out = 0  # turns
        self.stop: BaseException | None = None  # Ctrl-C or SIGTERM
        self.ended: dict[str, dict[str, TimedRun]] = {}
        self._bar: tqdm[Any] | None = None
        self._is_estimated = False  # in a line
        self._began = time.monotonic()
        self._end = math.inf
        self._race_began = self._began
        self._turns = 0  # of this race, since then
        if path:
            self._read(path, dict(facts or {}))

    def _read(self, path: Path, facts: dict[str, str]) -> None:
        """Read the turns of the file, except for an incomplete line."""
        lines = [json.dumps(facts)]
        text = path.read_text() if path.is_file() else ""
        head, *turns = text.splitlines(keepends=True) or [lines[0]]
        whole = [line.rstrip() for line in turns if line.endswith("\n")]
        try:
            before = dict(json.loads(head))
            ended = dict(TURN.validate_json(line) for line in whole)
        except (ValueError, TypeError):
            before = ended = {}
        if before.keys() != facts.keys():
            raise ValueError(
                f"{path}: expected turns that an earlier command kept, got a damaged or another "
                "file; remove it, or give another --json"
            )
        changed = [name for name in facts if before[name] != facts[name]]
        if changed:
            logger.warning("%s: other %s before; starting anew", path, ", ".join(changed))
        elif text:
            lines += whole
            self.ended = ended
            logger.warning("%s: going on after %d turns", path, len(self.ended))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "\n".join(lines) + "\n")

    def open(self, keys: Sequence[str], candidates: int, minutes: float | None) -> None:
        """Begin a race. minutes: a turn that would end later does not begin; None: no limit."""
        self._end = self._began + 60 * self.share * (minutes or math.inf)
        before = sum(key in self.ended for key in keys) * candidates
        if self._bar is None:
            bound = f", at most {minutes:g} min" if minutes else ""
            self._bar = progress_bar(
                total=max(self.runs, len(keys) * candidates),
                desc=f"decoding{bound}",
                delay=FIRST_LINE_S,
                miniters=1,  # so that no thread draws during the measurement
                smoothing=0,
                leave=False,
            )
        self._bar.initial += before
        self._bar.n += before
        self._race_began = time.monotonic()
        self._turns = 0

    def has_time(self) -> bool:
        """True if another turn may begin. The first turn of a race always may."""
        if not self._turns:
            return True
        now = time.monotonic()
        return now + (now - self._race_began) / self._turns <= self._end

    def tick(self) -> None:
        """Count a run."""
        assert self._bar is not None, "a race opens its turns"
        self._bar.update()
        if not self._is_estimated and self._bar.format_dict["elapsed"] > FIRST_LINE_S:
            self._bar.refresh()
            self._is_estimated = True

    def keep(self, key: str, runs: dict[str, TimedRun]) -> None:
        """Note a turn that has ended."""
        self.ended[key] = runs
        self._turns += 1
        if self.path:
            with self.path.open("ab") as file:
                file.write(TURN.dump_json((key, runs)) + b"\n")

    def check(self) -> None:
        """Raise the signal that stopped a race, for callers to whom part of a race is useless."""
        if self.stop:
            raise self.stop

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the race, and delete the file if nothing was left out. Raises the signal that stopped
        a race.
        """
        if self._bar is not None:
            self._bar.close()
        if self.path and not (kind or self.left_out):
            self.path.unlink()
        if not kind:
            self.check()
