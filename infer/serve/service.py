"""Turns requests into jobs of the engine, and their steps into answers.

The event loop reads requests and writes answers; the `Scheduler`'s thread decodes. Every event of a
request (step, error, time-out, disconnect) arrives in one queue.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftheads.infer.accept import LEAST_TEMPERATURE, Acceptance, Greedy, Sampled
from draftheads.infer.background import Background
from draftheads.infer.constraint import ConstraintError
from draftheads.infer.engine import Speculator
from draftheads.infer.grammar import Grammar
from draftheads.infer.prompt import PromptRenderer
from draftheads.infer.rows import Step
from draftheads.infer.serve.jobs import Job
from draftheads.infer.serve.logprobs import ScoredRule, TokenScore, TokenTexts, prompt_scores
from draftheads.infer.serve.protocol import ApiError, Body, GenerationRequest, Json
from draftheads.infer.serve.reader import Gone, Reader
from draftheads.infer.serve.reply import Choice, EventStream, Piece, Reply
from draftheads.infer.serve.scheduler import Scheduler

QUIET = 5.0
"""Seconds without a token after which a stream sends a sign of life, so that no proxy or client
gives it up.
"""
Event = tuple[Choice, Step, Sequence[TokenScore]] | Exception
"""A step with the scores of its tokens, or what ends the request."""
Events = asyncio.Queue[Event]


@dataclass(frozen=True)
class ServeOptions:
    """Settings of a server."""

    name: str  # of the model, in requests
    key: str | None = None  # that requests must have
    temperature: float = 0.0  # this and the next two: defaults of requests
    top_p: float = 1.0
    top_k: int = 0
    slots: int = 4  # requests decoded at a time
    waiting: int = 64  # more get 429
    timeout: float = 600.0  # seconds for a request, those in the queue included
    allowed_hosts: tuple[str, ...] = ()  # `names_server`; default: by the address it listens on
    root_path: str = ""  # path under which a proxy serves it

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(/[^/?#\s]+)*", self.root_path):
            raise ValueError(
                f"--root-path: expected a path such as /model, got {self.root_path!r}; begin it "
                "with a slash, and end it without"
            )


class Metrics:
    """The counters of /metrics."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._make(Counter, "requests", "Requests by HTTP status", ["status"])
        counters = {
            "prompt_tokens": "Tokens of prompts",
            "cached_tokens": "Tokens of prompts that were not computed again",
            "completion_tokens": "Tokens of answers",
            "accepted_prediction_tokens": "Draft tokens that were accepted",
            "rejected_prediction_tokens": "Draft tokens that were not",
            "steps": "Forward passes of the target",
            "seconds": "Time of the engine",
        }
        self.counters = {name: self._make(Counter, name, text) for name, text in counters.items()}
        # by vLLM's names, which `doctor --engine` reads
        self.drafts = self._make(Counter, "spec_decode_num_drafts", "Drafts that were verified")
        self.drafted = self._make(Counter, "spec_decode_num_draft_tokens", "Draft tokens of these")
        self.accepted = self._make(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted by depth", ["position"]
        )
        for position in range(scheduler.speculator.tree.depth):
            self.accepted.labels(position)
        self.first = self._make(Histogram, "time_to_first_token_seconds", "From request to token")
        self.whole = self._make(Histogram, "request_seconds", "From request to the last token")
        active = self._make(Gauge, "active_requests", "Requests that are active")
        active.set_function(lambda: len(scheduler.active))
        waiting = self._make(Gauge, "waiting_requests", "Requests that are waiting")
        waiting.set_function(lambda: len(scheduler.waiting))

    def add(self, usage: Json, steps: Sequence[Step]) -> None:
        """Count the usage and the steps of a request."""
        counts = {
            **usage,
            **usage["prompt_tokens_details"],
            **usage["completion_tokens_details"],
        }
        for name, counter in self.counters.items():
            counter.inc(counts[name])
        for step in steps:
            if step.drafted:
                self.drafts.inc()
                self.drafted.inc(step.drafted)
            for position in range(step.from_drafts):
                self.accepted.labels(position).inc()

    def _make(self, kind: Any, name: str, text: str, labels: Sequence[str] = ()) -> Any:
        return kind(f"draftheads_{name}", text, labels, registry=self.registry)


class Service:
    """Answers requests with one engine. Its target must have a tokenizer. background: works while
    nothing is asked.
    """

    def __init__(
        self, speculator: Speculator, options: ServeOptions, background: Background | None
    ) -> None:
        self.background = background
        self.target = speculator.target
        self.options = options
        if self.target.tokenizer is None:
            raise ValueError(
                f"{self.target.name} has no tokenizer; a server needs one, add its files"
            )
        self.scheduler = Scheduler(
            speculator, slots=options.slots, waiting=options.waiting, background=background
        )
        self.reader = Reader(self.target, options.name, options.slots + options.waiting)
        self.metrics = Metrics(self.scheduler)
        marks = PromptRenderer(self.target, self.target.template_args).marks
        self._texts = TokenTexts(self.target.tokenizer, marks)

    async def respond(self, kind: type[Body], answer: type[Reply], http: Request) -> Response:
        """Answer a request whose body is of this kind with such an answer."""
        request, prompts = await self.reader.read(kind, http)
        reply = answer(request, self.options.name, prompts, self._texts, self.reader.calls)
        events = Events()
        constraint = await asyncio.to_thread(self._constraint, reply)
        jobs = [self._job(choice, constraint, events) for choice in reply.choices]
        try:
            await asyncio.to_thread(self.scheduler.check, *jobs)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        pieces = self._pieces(reply, jobs, events, http)
        if request.stream:
            chunks = reply.chunks(pieces, jobs)
            opening = await anext(chunks)  # after it is queued; an earlier error has its own status
            return EventStream(reply, opening, chunks)
        async for _ in pieces:  # the choices collect the pieces
            pass
        return JSONResponse(reply.whole(jobs))

    def _constraint(self, reply: Reply) -> Grammar | None:
        """The constraint of the answers, which may take a while. Raises ApiError."""
        request = reply.request
        grammars = request.grammars
        calls = self.reader.calls
        try:
            tools = request.required_tools
            if len(grammars) + bool(tools) > 1:
                raise ValueError(
                    "expected one of response_format, structured_outputs and a required tool, got "
                    "several; leave the others out"
                )
            if grammars:  # a call may replace the constrained answer
                tools = request.callable_tools
            if tools and calls is not None:
                grammars.append(("grammar", calls.grammar(tools, self.target.tokenizer)))
            return Grammar(self.target, "any", grammars) if grammars else None
        except (ValueError, ModuleNotFoundError) as error:
            raise ApiError(400, str(error)) from error

    def _job(self, choice: Choice, constraint: Grammar | None, events: Events) -> Job:
        """The job of an answer."""
        request = choice.request
        rule = self.rule(request, choice.index % request.count)
        if request.scores is not None:
            echoed = choice.prompt if request.echoes else ()
            rule = ScoredRule(
                rule, request.scores, prompt_scores(self.target, echoed, request.scores)
            )
        room = self.target.context - len(choice.prompt)
        return Job(
            choice.prompt,
            delivery(choice, rule, events),
            rule,
            min(request.limit or room, room),
            stop=request.stops,
            ends=frozenset(request.stop_token_ids or ()),
            draft=request.draft is not False,
            is_kept=request.store is not False,
            constraint=constraint,
        )

    def rule(self, request: GenerationRequest, number: int = 0) -> Acceptance:
        """The lossless rule that a request asks for. number: index of the answer to a prompt, which
        is added to the seed.
        """
        temperature = request.temperature
        top_p = request.top_p
        top_k = request.top_k
        if temperature is None:
            temperature = self.options.temperature
        if top_p is None:
            top_p = self.options.top_p
        if top_k is None:
            top_k = self.options.top_k
        if temperature < LEAST_TEMPERATURE:
            return Greedy()
        rule = Sampled(temperature, top_p, max(top_k, 0))
        if request.seed is not None:
            rule.seed((request.seed + number) % 2**63)
        return rule

    async def _pieces(
        self, reply: Reply, jobs: Sequence[Job], events: Events, http: Request
    ) -> AsyncGenerator[Piece | None]:
        """Queue the jobs, and yield the pieces of their steps as they come; None at once, and after
        QUIET seconds without a piece. Raises ApiError, and Gone if the client leaves; the jobs end
        with this generator.
        """
        self.scheduler.queue(*jobs)
        late = ApiError(504, f"no answer within {self.options.timeout:g} s", "timeout")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.options.timeout, events.put_nowait, late)
        watcher = asyncio.create_task(_watch(http, events))
        start = perf_counter()
        is_first = True
        try:
            yield None
            while not reply.is_complete:
                try:
                    async with asyncio.timeout(QUIET):
                        event = await events.get()
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, ApiError):
                    raise event
                if isinstance(event, ConstraintError):
                    raise ApiError(400, str(event))
                if isinstance(event, Exception):
                    what = type(event).__name__
                    raise ApiError(500, f"the engine failed at this request ({what})")
                choice, step, scores = event
                if is_first:
                    self.metrics.first.observe(perf_counter() - start)
                    is_first = False
                yield choice.add(step, scores)
            self.metrics.whole.observe(perf_counter() - start)
        finally:
            for job in jobs:
                self.scheduler.cancel(job)
            timer.cancel()
            watcher.cancel()
            steps = [step for choice in reply.choices for step in choice.steps]
            self.metrics.add(reply.usage(jobs), steps)


async def _watch(http: Request, events: Events) -> None:
    """Report when the client leaves."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    events.put_nowait(Gone())


def delivery(
    choice: Choice, rule: Acceptance, events: Events
) -> Callable[[Step | Exception], None]:
    """Returns a function that passes steps from the engine's thread to the event loop's queue, with
    the scores that the rule has noted by then.
    """
    loop = asyncio.get_running_loop()

    def deliver(outcome: Step | Exception) -> None:
        scores = list(rule.newest) if isinstance(rule, ScoredRule) else []
        event = outcome if isinstance(outcome, Exception) else (choice, outcome, scores)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(events.put_nowait, event)

    return deliver
