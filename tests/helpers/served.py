"""A server in this process, for clients that need a real one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event
from typing import Any

import uvicorn
from tiny_chat import END, llama

from draftheads.infer.background import Background, Point
from draftheads.infer.engine import Speculator
from draftheads.infer.rows import Row, Step
from draftheads.infer.serve.app import create_app
from draftheads.infer.serve.service import ServeOptions, Service
from draftheads.infer.slots import Runner, Slots


class Complaints(logging.Handler):
    """What the server logs as its own error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = self.format(record)
        if "without completing response" not in said:  # so it is cut off
            self.records.append(said)


@contextmanager
def running(
    engine: Speculator,
    options: ServeOptions | None = None,
    background: Background | None = None,
) -> Iterator[tuple[str, Service]]:
    """Yields its address and the service behind it."""
    app = create_app(engine, options or ServeOptions("tiny"), background=background)
    config = uvicorn.Config(app, port=0, log_level="error")
    server = app.state.service.uvicorn = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    complaints = Complaints()
    logging.getLogger("uvicorn.error").addHandler(complaints)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app.state.service
    server.should_exit = True
    thread.join(20)
    assert complaints.records == [], complaints.records[0]


class Scripted(Speculator):
    """A scheduler gets the steps of `generate`, in place of those of a forward pass."""

    rows_may_leave = property(lambda self: False, lambda self, value: None)

    def read(self, rows: Any, rule: Any, *more: Any) -> Any:
        rows[0].rule = rule
        return Script(rows[0], self.generate(rows[0].text))


class Script(Slots):
    """The reading of one row, and its steps."""

    def __init__(self, row: Row, script: Iterator[Step]) -> None:
        self.slots, self.runner = self, Runner()
        self.rows, self.script = [row], script

    def advance(self) -> bool:
        self.steps = [*self.step().values()]
        return True

    def use(self, tree: Any) -> None: ...

    def leave(self, row: Row, kept: Any) -> None: ...

    def step(self) -> dict[Row, Step]:
        step = next(self.script)
        self.rows[0].text += step.tokens
        return {self.rows[0]: step}


class Says(Scripted):
    """Answers with `text`, in steps of four bytes, three of them drafted, with a pause before each;
    `failure` is raised after the second one.
    """

    def __init__(self) -> None:
        super().__init__(llama(eos=(END,)))
        self.text, self.pause = "Hello.", 0.0
        self.failure: Exception | None = None
        self.asked: list[str] = []

    def generate(self, prompt: Any, **options: Any) -> Iterator[Step]:
        ids = self.target.tokenizer(self.text)["input_ids"]
        self.asked.append(self.target.tokenizer.decode(prompt))

        def steps() -> Iterator[Step]:
            yield Step(ids[:1], -1, None, 0.0, 0.01)
            for number, place in enumerate(range(1, len(ids), 4)):
                time.sleep(self.pause)
                if self.failure and number:
                    raise self.failure
                tokens = ids[place : place + 4]
                yield Step(tokens, len(tokens) - 1, None, 0.001, 0.009, 8)
            yield Step([END], 0, "eos", 0.001, 0.009, 8)

        return steps()


Work = Callable[[Speculator], Speculator]


class Pieces:
    """A background that does what a test says, and notes what it is given. Each piece waits for one
    `allow`, and does the next work of a list; without more, nothing is waited for or done.
    """

    def __init__(self, *works: Work) -> None:
        self.works = list(works)
        self.begun: SimpleQueue[Speculator] = SimpleQueue()
        self.answers: SimpleQueue[tuple[list[int], list[int]]] = SimpleQueue()
        self.number = 0
        self.curve: list[Point] = []
        self._gate = Event()

    def answered(self, prompt, answer) -> None:
        self.answers.put((list(prompt), list(answer)))

    def work(self, engine):
        if not self.works:
            return engine, 60.0
        self.number += 1
        self.begun.put(engine)
        assert self._gate.wait(20)
        self._gate.clear()
        return self.works.pop(0)(engine), 0.0

    def points(self):
        return self.curve

    def wait(self) -> Speculator:
        """Until a piece has begun; returns the engine that it works on."""
        return self.begun.get(timeout=20)

    def allow(self) -> None:
        """Let the piece end."""
        self._gate.set()


def same(engine: Speculator) -> Speculator:
    """Work that changes nothing."""
    return engine


def fails(engine: Speculator) -> Speculator:
    """Work that cannot be done."""
    raise RuntimeError("the disk is full")
