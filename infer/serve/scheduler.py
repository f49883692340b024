"""Requests that share one engine: a bounded queue, and a batch that rows join and leave.

One thread decodes. A request has one job or several, its answers, and up to `slots` jobs are
active. Prompts are read one part at a time, the next of the job that has used the least time, and
after each part the `ContinuousBatch` of all jobs whose prompts were read makes a step. Jobs with
drafts that cannot be batched have a batch each. Each slot keeps its keys and values, for a job that
continues the same text, and for copies of its beginning. While nothing is asked, a `Background`
works.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import product
from queue import SimpleQueue
from threading import Condition, Thread
from time import monotonic, perf_counter

import torch

from draftheads.heads.cache import ROOM
from draftheads.infer.accept import Acceptance
from draftheads.infer.background import COMPLETE, LONGEST_PAUSE, QUIET, Background
from draftheads.infer.continuous import ContinuousBatch
from draftheads.infer.engine import Speculator
from draftheads.infer.reading import Session
from draftheads.infer.rows import Row, Step
from draftheads.infer.serve.jobs import Job
from draftheads.infer.serve.protocol import ApiError

TURN = 256
"""Prompt tokens that are read in one turn."""
OPENING = 8
"""Tokens at the end of a prompt that open its answer, at most. Templates leave some of them out in
later turns, such as Qwen3's empty block of reasoning.
"""
FEWEST = 32
"""Tokens that are worth a copy, which takes as long as to read about 7 of them (SmolLM2, a CPU)."""

logger = logging.getLogger("draftheads")


class Closing(ApiError):
    """The scheduler ends: nothing more will be decoded."""

    def __init__(self, message: str = "the server is shutting down") -> None:
        super().__init__(503, message, "shutting_down")


class Scheduler:
    """Decodes jobs in a thread of its own.

    slots: jobs that are decoded at a time, and texts whose keys and values are kept. waiting: jobs
    in the queue, at most. background: works while there are no jobs, and may replace `speculator`
    by one of the same target.
    """

    def __init__(
        self,
        speculator: Speculator,
        *,
        slots: int = 4,
        waiting: int = 64,
        background: Background | None = None,
    ) -> None:
        self.background = background  # None after an error of it, too
        self.slots = slots
        self.room = waiting
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self._use(speculator)
        self._plain = ContinuousBatch(
            Speculator(speculator.target, compile=speculator.compile), slots
        )
        self._changed = Condition()
        self._end: float | None = None  # when the jobs that are left fail
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _use(self, speculator: Speculator) -> None:
        """Draft with this engine from now on. Batch and sessions are new, as old caches are of
        other drafts.
        """
        self._drafting = ContinuousBatch(speculator, self.slots)
        self.speculator = speculator
        self._idle = [Session() for _ in range(self.slots)]  # the least recently used first

    def submit(self, *jobs: Job) -> None:
        """Check and queue the jobs of a request."""
        self.check(*jobs)
        self.queue(*jobs)

    def check(self, *jobs: Job) -> None:
        """Raise ValueError as `Speculator.generate`. Takes a while for long prompts."""
        for job in jobs:
            job.row = Row(self.speculator.target, job.prompt, job.max_new_tokens, job.stop)
            job.row.ends |= job.ends
            job.row.constraint = job.constraint and job.constraint.row(0, job.prompt)

    def queue(self, *jobs: Job) -> None:
        """Queue all jobs of a request that was checked, or none. Raises ApiError."""
        with self._changed:
            if not self.is_open:
                raise Closing()
            if len(self.waiting) + len(self.active) + len(jobs) > self.room + self.slots:
                message = f"{len(self.waiting)} requests are waiting already; retry later"
                raise ApiError(429, message, "queue_full", **{"Retry-After": "1"})
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
        for batch in (self._drafting, self._plain):
            batch.engine.maker.compile_no_more()

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
                job.deliver(Closing())
            self.waiting.clear()
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """Wait, after `close`, until the thread has ended, at most so long."""
        self._thread.join(seconds)

    @property
    def is_open(self) -> bool:
        """True if jobs are taken."""
        return self._end is None and self._thread.is_alive()

    @torch.inference_mode()
    def _run(self) -> None:
        """A part of one prompt, and a step of each batch, again and again."""
        while self._fill():
            unread = [
                job for job in self.active if job.batch.room > 0 and job.row not in job.batch.rows
            ]
            if unread:
                self._advance(min(unread, key=lambda job: job.seconds))
            for batch in dict.fromkeys(job.batch for job in self.active):
                if batch.rows:
                    self._step(batch)

    def _fill(self) -> bool:
        """Wait until there are active jobs; False at the end.

        What holds whenever the lock is free: `active` has at most `slots` jobs, a job is in
        `waiting`, in `active` or done with. Other threads append to `waiting` or clear it, mark
        jobs as cancelled, and set the end; this thread alone moves jobs into `active` and out of
        it, and alone uses rows, sessions and batches. So it decodes without the lock. Pieces of the
        background's work are done here, too, when no job was active or waiting for a while: so no
        job ever sees another engine than that with which it began, and one that comes during a
        piece waits for no other.
        """
        pause = QUIET
        while True:
            with self._changed:
                has_news = self._changed.wait_for(
                    lambda: bool(self.active or self.waiting or self._end is not None),
                    pause if self.background is not None else None,
                )
                for job in [job for job in self.active if job.cancelled]:
                    self._leave(job)
                self.waiting = deque(job for job in self.waiting if not job.cancelled)
                while self.waiting and len(self.active) < self.slots:
                    self._enter(self.waiting.popleft())
                if self._end is not None and monotonic() >= self._end:
                    for job in list(self.active):
                        self._leave(job)
                        job.deliver(Closing("the server was shut down before the end"))
                if self.active:
                    return True
                if self._end is not None:
                    return False
            pause = QUIET if has_news else self._work()

    def _work(self) -> float:
        """One piece of the background's work; returns the seconds until the next. What comes of it
        is for later jobs.
        """
        assert self.background is not None
        try:
            with torch.inference_mode(False):
                engine, pause = self.background.work(self.speculator)
            if engine is not self.speculator:
                self._use(engine)
            return min(pause, LONGEST_PAUSE)
        except Exception:  # whatever it is, the answers are right without it
            self._end_background()
            return QUIET

    def _end_background(self) -> None:
        logger.exception("learning has failed and ends; answers go on")
        self.background = None

    def _enter(self, job: Job) -> None:
        """Give a job the slot whose newest prompt its own prompt continues; else the one that was
        not used for the longest time, into which `_copy_beginning` may copy. Drafters other than
        heads cannot be copied: they also get the slot that has the most of the prompt, if that is
        half of what the slot has.
        """
        if job.draft:
            session = max(self._idle, key=lambda session: session.shared(job.prompt))
            least = session.asked - OPENING
            if not self.speculator.rows_may_leave:
                least = min(least, session.length // 2)
            if session.shared(job.prompt) < least:
                session = self._idle[0]
            self._idle.remove(session)
            job.session = session
        job.batch = self._drafting if job.draft else self._plain
        if not job.batch.engine.rows_may_leave:
            job.batch = ContinuousBatch(job.batch.engine, 1)
        self.active.append(job)

    def _leave(self, job: Job) -> None:
        self.active.remove(job)
        if job.row in job.batch.rows:
            try:
                job.batch.leave(job.row, job.session.slots if job.session else None)
            except Exception:  # such as out of memory for its caches, which are only a saving
                logger.exception("the caches of a request are lost")
                job.session = job.session and Session()
        job.reading = None  # frees its caches, here and now
        if job.session is not None:
            self._idle.append(job.session)

    def _advance(self, job: Job) -> None:
        """Read one part of a job's prompt; after the last, let it enter its batch."""
        start = perf_counter()
        try:
            engine = job.batch.engine
            # in the midst of a prompt, a hybrid may have no states of what another slot shares
            is_new = job.reading is None
            may_copy = is_new or not engine.target.is_hybrid
            if job.session is not None and engine.rows_may_leave and may_copy:
                self._copy_beginning(job.session, job)
            if job.reading is None:
                reserved = min(job.max_new_tokens, ROOM)
                job.reading = engine.read([job.row], job.sampling, job.session, reserved, TURN)
            is_read = job.reading.advance()
        except Exception as error:  # the other jobs do not fail with it
            logger.exception("a request failed")
            self._tell(job, error)
            return
        job.seconds += perf_counter() - start
        if is_new and job.session is not None:
            job.reused = job.session.reused
        if not is_read:
            return
        reading = job.reading
        job.reading = None  # frees what the parts computed
        [step] = reading.steps
        if not step.finish:
            try:
                job.batch.enter(reading.slots)
            except Exception as error:
                self._read_again(job.batch, error)
        self._tell(job, step)

    def _copy_beginning(self, session: Session, job: Job) -> None:
        """Copy the longest beginning of a job's prompt that a slot has, idle or not, to the job's
        own slot, if that has less. So jobs that begin together read in turns what they share.
        """
        sessions = [*self._idle, *(each.session for each in self.active if each.session)]
        source = max(sessions, key=lambda each: each.shared(job.prompt))
        length = source.shared(job.prompt)
        if source.slots is None or length < session.shared(job.prompt) + FEWEST:
            return
        [row] = source.slots.rows
        batch = job.batch
        holder = batch.slots if batch.slots and row in batch.rows else source.slots
        session.slots = batch.engine.new_slots(1)
        session.slots.take(holder, row, length)
        job.reading = None  # another follows, from there on

    def _step(self, batch: ContinuousBatch) -> None:
        """One step of a batch, whose jobs share its time."""
        jobs = self._jobs(batch)
        start = perf_counter()
        try:
            steps = batch.step()
        except Exception as error:
            self._read_again(batch, error)
            return
        seconds = (perf_counter() - start) / len(steps)
        for job in jobs:
            job.seconds += seconds
            self._tell(job, steps[job.row])

    def _read_again(self, batch: ContinuousBatch, error: Exception) -> None:
        """After an error, read the texts of all jobs of a batch again, in smaller batches; the one
        that fails alone ends.
        """
        logger.error("a batch failed", exc_info=error)
        jobs = self._jobs(batch)
        batch.give_up()
        batch.shrink(len(jobs), error)
        for job in jobs:
            job.session = job.session and Session()  # nobody knows what the old one holds
        if len(jobs) == 1:
            self._tell(jobs[0], error)

    def _jobs(self, batch: ContinuousBatch) -> list[Job]:
        """The jobs that are decoded there."""
        return [job for job in self.active if job.row in batch.rows]

    def _tell(self, job: Job, event: Step | Exception) -> None:
        """Deliver a step or an error; its job may end with it."""
        event = job.row.fault or event
        finish = event.finish if isinstance(event, Step) else "error"
        if finish == "error":
            job.session = job.session and Session()
        if finish:
            with self._changed:
                self._leave(job)
        if self.background is not None and job.is_kept and finish in COMPLETE:
            try:  # before it is told: who has an answer may rely on its being kept
                self.background.answered(job.prompt, job.row.answer)
            except Exception:
                self._end_background()
        job.deliver(event)
