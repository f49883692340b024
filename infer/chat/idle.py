"""Lets a background work while a chat waits for its user."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event, Thread

from draftheads.infer.background import LONGEST_PAUSE, QUIET, Background
from draftheads.infer.engine import Speculator


@dataclass
class IdleTime:
    """Runs a background in a thread of its own while this context is entered. Leaving the context
    waits for the end of the current piece of work, so only one thread at a time uses the engine.

    engine: decodes the answers that follow. fault: the exception that ended the work.
    """

    background: Background | None
    engine: Speculator
    fault: Exception | None = None
    _is_over: Event = field(default_factory=Event)
    _thread: Thread | None = None

    def __enter__(self) -> None:
        self._end()  # Ctrl-C may have left a piece running
        if self.background is None:
            return
        self._is_over.clear()
        self._thread = Thread(
            target=self._work, args=(self.background,), name="learning", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._end()

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _work(self, background: Background) -> None:
        pause = QUIET
        while not self._is_over.wait(pause):
            try:
                self.engine, pause = background.work(self.engine)
                pause = min(pause, LONGEST_PAUSE)
            except Exception as error:  # the chat continues after any error
                self.fault = error
                return
