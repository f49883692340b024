"""Requests that share one engine: a bounded queue, and turns of equal engine time.

One thread decodes. A request has one job or several, its answers. Up to `slots` jobs are decoded at
a time, one turn of one of them after the other: a step, or a part of a prompt. The next turn is
always of the request that has used the least time. Each slot keeps its keys and values, for a job
that continues the same text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from queue import SimpleQueue
from threading import Condition, Thread
from time import monotonic, perf_counter

from draftheads.infer.accept import Acceptance
from draftheads.infer.engine import Row, Session, Speculator, Step

TURN = 256
"""Prompt tokens that are read in one turn."""
RECENT = 1 / 8
"""Weight of the newest request in the mean of what requests take."""

logger = logging.getLogger("draftheads")


class QueueFull(Exception):
    """No room for another request. seconds: until those that wait are answered, at a guess."""

    def __init__(self, waiting: int, seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting already")
        self.seconds = seconds


class Closing(Exception):
    """The scheduler ends, or the engine has failed: nothing more will be decoded."""


@dataclass
class Account:
    """The engine's time that a request has used. The least is next."""

    clock: float = 0.0
    active: int = 0  # jobs


@dataclass(eq=False)
class Job:
    """A prompt to continue. deliver: called in the engine's thread with each Step that has tokens,
    or with the exception that ends the job early. account: shared by the jobs of a request.
    """

    prompt: list[int]
    deliver: Callable[[Step | Exception], None]
    sampling: Acceptance
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    draft: bool = True  # False: with the plain model
    account: Account = field(default_factory=Account)
    seconds: float = field(default=0.0, init=False)  # of the engine, so far
    reused: int = field(default=0, init=False)  # tokens of the prompt that were not computed again
    cancelled: bool = field(default=False, init=False)
    session: Session | None = field(default=None, init=False)
    steps: Iterator[Step] = field(default=iter(()), init=False)


class Scheduler:
    """Decodes jobs in a thread of its own.

    slots: jobs that are decoded at a time, and texts whose keys and values are kept. waiting: jobs
    in the queue, at most.
    """

    def __init__(self, speculator: Speculator, *, slots: int = 4, waiting: int = 64) -> None:
        self.speculator = speculator
        self.plain = Speculator(speculator.target, compile=speculator.compile)
        self.slots = slots
        self.room = waiting
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self._idle = [Session() for _ in range(slots)]  # the least recently used first
        self._changed = Condition()
        self._pace = 0.0  # seconds of the engine for a request, a mean over recent ones
        self._end: float | None = None  # when the jobs that are left fail
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, *jobs: Job) -> None:
        """Check and queue the jobs of a request."""
        self.check(*jobs)
        self.queue(*jobs)

    def check(self, *jobs: Job) -> None:
        """Raise ValueError as `Speculator.generate`. Takes a while for long prompts."""
        for job in {id(job.prompt): job for job in jobs}.values():
            Row(self.speculator.target, job.prompt, job.max_new_tokens, job.stop)

    def queue(self, *jobs: Job) -> None:
        """Queue all jobs of a request that was checked, or none. Raises QueueFull and Closing."""
        with self._changed:
            if not self.is_open:
                raise Closing("the server is shutting down")
            if len(self.waiting) + len(self.active) + len(jobs) > self.room + self.slots:
                raise QueueFull(len(self.waiting), self.room * self._pace)
            self.waiting.extend(jobs)
            self._changed.notify()

    def warm_up(self, rules: Sequence[Acceptance]) -> None:
        """If steps are compiled, compile them for these rules now, and for no others later."""
        if not self.speculator.compile:
            return
        size = self.speculator.target.vocab_size
        tries = (1, 2, 3)  # one of the prompts may be answered at once
        for rule, number, draft in product(rules, tries, (True, False)):
            events: SimpleQueue[Step | Exception] = SimpleQueue()
            prompt = [number * size // place for place in range(5, 9)]
            self.submit(Job(prompt, events.put, rule, 24, draft=draft))
            event = events.get()
            while isinstance(event, Step) and not event.finish:
                event = events.get()
        self.speculator.compile_no_more()
        self.plain.compile_no_more()

    def cancel(self, job: Job) -> None:
        """End a job after the step that is being computed, if it has one."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def close(self, grace: float = 0.0) -> None:
        """Fail all jobs that wait, and after `grace` seconds those that are not done by then."""
        with self._changed:
            self._end = monotonic() + grace
            for job in self.waiting:
                job.deliver(Closing("the server is shutting down"))
            self.waiting.clear()
            self._changed.notify()

    @property
    def is_open(self) -> bool:
        """Whether jobs are taken."""
        return self._end is None and self._thread.is_alive()

    def _run(self) -> None:
        job = self._next()
        while job is not None:
            self._advance(job)
            job = self._next()

    def _next(self) -> Job | None:
        """The job of the next turn, as soon as there is one; None at the end.

        What holds whenever the lock is free: `active` has at most `slots` jobs, a job is in
        `waiting`, in `active` or done with, and an account's `active` counts its jobs in `active`.
        Other threads append to `waiting` or clear it, mark jobs as cancelled, and set the end; this
        thread alone moves jobs into `active` and out of it, and alone uses steps and sessions. So
        it decodes without the lock.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.active or self.waiting or self._end is not None)
                self._drop_cancelled()
                self._fill_slots()
                if self._end is not None and monotonic() >= self._end:
                    self._fail_active()
                if self.active:
                    return min(self.active, key=lambda job: job.account.clock)
                if self._end is not None:
                    return None

    def _drop_cancelled(self) -> None:
        for job in list(self.active):
            if job.cancelled:
                self._leave(job)
        self.waiting = deque(job for job in self.waiting if not job.cancelled)

    def _fill_slots(self) -> None:
        """The first job that waits of the request that has the fewest slots is next."""
        while self.waiting and len(self.active) < self.slots:
            job = min(self.waiting, key=lambda job: job.account.active)
            self.waiting.remove(job)
            self._enter(job)

    def _fail_active(self) -> None:
        for job in list(self.active):
            self._leave(job)
            job.deliver(Closing("the server was shut down before the end"))

    def _enter(self, job: Job) -> None:
        """Give a job the slot that has the most of its prompt, if that is most of what the slot
        has; else the one that was not used for the longest time.
        """
        engine = self.speculator if job.draft else self.plain
        if job.draft and not job.sampling.reads_prompt:
            session = max(self._idle, key=lambda session: session.shared(job.prompt))
            if 2 * session.shared(job.prompt) < session.length:
                session = self._idle[0]
            self._idle.remove(session)
            job.session = session
        account = job.account
        if not account.active:  # time in which it had no slot gives it no more turns than others
            least = min((each.account.clock for each in self.active), default=0.0)
            account.clock = max(account.clock, least)
        account.active += 1
        job.steps = engine.generate(
            job.prompt,
            sampling=job.sampling,
            max_new_tokens=job.max_new_tokens,
            stop=job.stop,
            session=job.session,
            prefill_chunk=TURN,
        )
        self.active.append(job)

    def _leave(self, job: Job) -> None:
        self.active.remove(job)
        job.account.active -= 1
        job.steps = iter(())  # frees its caches, here and now
        if job.session is not None:
            self._idle.append(job.session)

    def _advance(self, job: Job) -> None:
        """One turn of a job."""
        start = perf_counter()
        event: Step | Exception
        try:
            event = next(job.steps)
        except Exception as error:  # the other jobs do not fail with it
            logger.exception("a request failed")
            event = error
            if job.session is not None:
                job.session = Session()  # nobody knows what the old one holds
        seconds = perf_counter() - start
        job.seconds += seconds
        job.account.clock += seconds
        if job.session is not None:
            job.reused = job.session.reused
        if isinstance(event, Step) and not event.tokens:
            return  # a part of the prompt
        if isinstance(event, Exception) or event.finish:
            with self._changed:
                self._leave(job)
                self._pace += RECENT * (job.seconds - self._pace)
        job.deliver(event)
