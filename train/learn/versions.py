"""Keeps the heads that learning from use has made, and the choice of the served one.

    v000001/      a head folder, renamed into place when it is complete
    state.json    the served version, and measurements; replaced as a whole

Version 0 is the head that learning started from, which stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from draftheads.heads.files import remove, staged, sweep, write_json
from draftheads.infer.background import Point

STATE = "state.json"
KEPT = 3
"""Number of versions that stay on disk, the served one included."""
POINTS = 500
"""Number of newest rounds whose results are stored."""


@dataclass(frozen=True)
class State:
    """The contents of state.json. served: the version in use. newest: the latest version that was
    made. points: results of the rounds of learning.
    """

    served: int = 0
    newest: int = 0
    points: tuple[Point, ...] = ()


_STATE = TypeAdapter(State)


class Versions:
    """The folder of one head's versions. Raises ValueError for a damaged state.json."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(folder, "v*")
        self.state = State()
        path = folder / STATE
        if path.exists():
            try:
                self.state = _STATE.validate_json(path.read_bytes())
            except ValidationError as error:
                raise ValueError(
                    f"{path}: expected the state of learning, got other content; delete {folder} "
                    "to start from the head again"
                ) from error

    @property
    def served(self) -> Path | None:
        """The folder of the served head; None for the head that learning started from. Raises
        ValueError if it is gone.
        """
        if not self.state.served:
            return None
        path = self.path(self.state.served)
        if not path.is_dir():
            raise ValueError(f"{path}: expected the served head, found none; delete {self.folder}")
        return path

    def path(self, version: int) -> Path:
        """The folder of a version."""
        return self.folder / f"v{version:06d}"

    def adopt(self, write: Callable[[Path], None], point: Point) -> Path:
        """Serve a new version. write: writes its files into a folder. Deletes versions that were
        rolled back.
        """
        before = self.state.served
        version = self.state.newest + 1
        with staged(self.path(version)) as folder:
            write(folder)
        self.note(point, served=version, newest=version)
        earlier = [number for number in self._there() if number <= before]
        for number in self._there() - {version, *sorted(earlier)[-KEPT + 1 :]}:
            remove(self.path(number))
        return self.path(version)

    def note(self, point: Point, **versions: int) -> None:
        """Store a measurement. versions: fields of `State` that change with it."""
        points = (*self.state.points, point)[-POINTS:]
        self._replace(points=points, **versions)

    def rollback(self) -> int:
        """Serve the newest existing version before the served one, or else the head that learning
        started from. Returns its number. Raises ValueError if that head is already served.
        """
        served = self.state.served
        if not served:
            raise ValueError(
                f"{self.folder}: expected a head that has learned, got the one that learning "
                "started from; there is nothing to go back to"
            )
        before = max((number for number in self._there() if number < served), default=0)
        self._replace(served=before)
        return before

    def _there(self) -> set[int]:
        """Numbers of the versions that have a folder."""
        names = [path.name[1:] for path in self.folder.glob("v*") if path.is_dir()]
        return {int(name) for name in names if name.isdecimal()}

    def _replace(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        write_json(self.folder / STATE, asdict(self.state))
