"""An HTTP server with OpenAI's interface in front of one engine, and a page to chat on.

The event loop reads requests and writes answers; the `Scheduler`'s thread decodes. All that can
happen to a request arrives in one queue: its steps, errors, its time-out, the client's leaving.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from ipaddress import ip_address
from itertools import product
from time import perf_counter
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftheads.heads.terminal import printable
from draftheads.infer.accept import LEAST_TEMPERATURE, Acceptance, Greedy, Sampled
from draftheads.infer.engine import Speculator, Step
from draftheads.infer.serve.hosts import Hosts
from draftheads.infer.serve.logprobs import Scored, TokenScore, TokenTexts
from draftheads.infer.serve.protocol import (
    ApiError,
    ChatRequest,
    Choice,
    CompletionRequest,
    ErrorBody,
    Piece,
    Reply,
    Request,
    StreamOptions,
)
from draftheads.infer.serve.reader import Gone, Reader
from draftheads.infer.serve.scheduler import Account, Closing, Job, QueueFull, Scheduler
from draftheads.infer.text import AnswerText

logger = logging.getLogger("draftheads")

PAGE = {
    "/": "index.html",
    **{f"/{name}": name for name in ("page.css", "page.js", "markdown.js", "icon.svg")},
}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
ARRIVAL_SECONDS = 20.0
"""For the head of a request, and again for its body."""
STALL_SECONDS = 60.0
"""For a client to read what it was sent."""


Event = tuple[Choice, Step, Sequence[TokenScore], Sequence[TokenScore]] | Exception
"""A step with the scores of its tokens and of the prompt, or what ends the request."""


@dataclass(frozen=True)
class ServerOptions:
    """Settings of a server."""

    name: str  # of the model, in requests
    key: str | None = None  # that requests must have
    temperature: float = 0.0  # this and the next two: where a request says nothing
    top_p: float = 1.0
    top_k: int = 0
    slots: int = 4  # requests decoded at a time
    waiting: int = 64  # more get 429
    timeout: float = 600.0  # seconds for a request, those in the queue included
    grace: float = 20.0  # seconds for open requests when the server ends
    max_body: int = 4 << 20  # bytes
    allowed_hosts: tuple[str, ...] = ()  # as of `Hosts`; default: by the address it listens on
    root_path: str = ""  # of the address under which a proxy offers it

    def __post_init__(self) -> None:
        Hosts(self.allowed_hosts)
        if not re.fullmatch(r"(/[^/?#\s]+)*", self.root_path):
            raise ValueError(
                f"--root-path: expected a path such as /model, got {self.root_path!r}; begin it "
                "with a slash, and end it without"
            )


class Metrics:
    """What /metrics tells."""

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
        self.counters = {name: self._make(Counter, name, what) for name, what in counters.items()}
        self.first = self._make(Histogram, "time_to_first_token_seconds", "From request to token")
        self.whole = self._make(Histogram, "request_seconds", "From request to the last token")
        for name in ("active", "waiting"):
            gauge = self._make(Gauge, f"{name}_requests", f"Requests that are {name}")
            gauge.set_function(lambda name=name: len(getattr(scheduler, name)))

    def add(self, usage: dict[str, Any]) -> None:
        """Count what a request used."""
        details = (usage["prompt_tokens_details"], usage["completion_tokens_details"])
        for name, value in {**usage, **details[0], **details[1]}.items():
            if name in self.counters:
                self.counters[name].inc(value)

    def _make(self, kind: Any, name: str, what: str, labels: Any = ()) -> Any:
        return kind(f"draftheads_{name}", what, labels, registry=self.registry)


class Service:
    """Turns requests into jobs, and their steps into answers. The target must have a tokenizer."""

    def __init__(self, speculator: Speculator, options: ServerOptions) -> None:
        self.target, self.options = speculator.target, options
        if self.target.tokenizer is None:
            raise ValueError(
                f"{self.target.name} has no tokenizer; a server needs one, add its files"
            )
        self.scheduler = Scheduler(speculator, slots=options.slots, waiting=options.waiting)
        self.reader = Reader(self.target, options.name, options.slots + options.waiting)
        self.metrics = Metrics(self.scheduler)
        self._texts = TokenTexts(self.target.tokenizer)

    async def respond(self, kind: type[Request], http: HttpRequest) -> Any:
        """Answer a request of this kind."""
        request, prompts = await self.reader.read(kind, http)
        reply = Reply(request, self.options.name, prompts)
        events: asyncio.Queue[Event] = asyncio.Queue()
        jobs = self._jobs(reply, events)
        try:
            await asyncio.to_thread(self.scheduler.check, *jobs)
            self.scheduler.queue(*jobs)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except QueueFull as error:
            later = {"Retry-After": str(min(max(math.ceil(error.seconds), 1), 60))}
            raise ApiError(429, f"{error}; retry later", "queue_full", **later) from error
        except Closing as error:
            raise ApiError(503, str(error), "shutting_down") from error
        pieces = self._pieces(reply, jobs, events, http)
        if request.stream:
            first = await anext(pieces)  # an error before the first token has a status of its own
            return EventStream(self._chunks(reply, jobs, first, pieces))
        body = reply.whole([piece async for piece in pieces])
        return JSONResponse({**body, "usage": reply.usage(*used(reply, jobs))})

    def _jobs(self, reply: Reply, events: asyncio.Queue[Event]) -> list[Job]:
        """One for each answer. Makes the choices of the reply, too."""
        request, jobs, account = reply.request, list[Job](), Account()
        for prompt, number in product(reply.prompts, range(request.count)):
            rule = self.rule(request, number)
            if request.scores is not None:
                rule = Scored(rule, request.scores, request.is_echoed)
            choice = self._choice(reply, prompt)
            room = self.target.context - len(prompt)
            limit = min(request.limit or room, room)
            deliver, draft = delivery(choice, rule, events), request.draft is not False
            jobs.append(Job(prompt, deliver, rule, limit, request.stops, draft, account))
        return jobs

    def _choice(self, reply: Reply, prompt: list[int]) -> Choice:
        request, tokenizer = reply.request, self.target.tokenizer
        after = () if isinstance(request, ChatRequest) else prompt
        skip = request.skip_special_tokens is not False
        text = AnswerText(tokenizer, request.stops, after=after, skip_special_tokens=skip)
        echo = tokenizer.decode(prompt, skip_special_tokens=skip) if request.is_echoed else ""
        reply.choices.append(Choice(reply, prompt, text, self._texts, echo))
        return reply.choices[-1]

    def rule(self, request: Request, number: int = 0) -> Acceptance:
        """The lossless rule that a request asks for. number: of the answer to a prompt, which
        changes its seed.
        """
        given = (request.temperature, request.top_p, request.top_k)
        own = (self.options.temperature, self.options.top_p, self.options.top_k)
        temperature, top_p, top_k = (b if a is None else a for a, b in zip(given, own, strict=True))
        if temperature < LEAST_TEMPERATURE:
            return Greedy()
        rule = Sampled(temperature, top_p, max(int(top_k), 0))
        if request.seed is not None:
            rule.seed((request.seed + number) % 2**63)
        return rule

    async def _pieces(
        self, reply: Reply, jobs: Sequence[Job], events: asyncio.Queue[Event], http: HttpRequest
    ) -> AsyncGenerator[Piece]:
        """What the steps bring, as they come. Raises ApiError, and Gone if the client leaves; the
        jobs end with this.
        """

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            events.put_nowait(Gone())

        late = ApiError(504, f"no answer within {self.options.timeout:g} s", "timeout")
        loop, began, is_first = asyncio.get_running_loop(), perf_counter(), True
        timer = loop.call_later(self.options.timeout, events.put_nowait, late)
        watcher = asyncio.create_task(watch())
        try:
            while not reply.is_complete:
                event = await events.get()
                if isinstance(event, Exception):
                    raise self._as_api_error(event)
                choice, step, scores, before = event
                if choice.finish:  # by a stop token; its job is being cancelled
                    continue
                if is_first:
                    self.metrics.first.observe(perf_counter() - began)
                    is_first = False
                piece = choice.add(step, scores, before)
                if choice.finish:
                    self.scheduler.cancel(jobs[choice.index])
                yield piece
            self.metrics.whole.observe(perf_counter() - began)
        finally:
            for job in jobs:
                self.scheduler.cancel(job)
            timer.cancel()
            watcher.cancel()
            self.metrics.add(reply.usage(*used(reply, jobs)))

    def _as_api_error(self, error: Exception) -> Exception:
        """An error as the client is told of it."""
        if isinstance(error, ApiError | Gone):
            return error
        if isinstance(error, Closing):
            return ApiError(503, str(error), "shutting_down")
        return ApiError(500, f"the engine failed at this request ({type(error).__name__})")

    async def _chunks(
        self, reply: Reply, jobs: Sequence[Job], first: Piece, rest: AsyncGenerator[Piece]
    ) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a stream."""
        options = reply.request.stream_options or StreamOptions()
        usage = {"usage": None} if options.include_usage else {}
        opened = set[int]()
        async with aclosing(rest):
            piece: Piece | None = first
            while piece is not None:
                if piece.choice.index not in opened:
                    opened.add(piece.choice.index)
                    yield {**reply.opening(piece.choice), **usage}
                yield {**reply.chunk(piece), **usage}
                piece = await anext(rest, None)
        if usage:
            yield {**reply.head, "choices": [], "usage": reply.usage(*used(reply, jobs))}


def delivery(
    choice: Choice, rule: Acceptance, events: asyncio.Queue[Event]
) -> Callable[[Step | Exception], None]:
    """What brings the steps of a job from the engine's thread into the event loop's queue."""
    loop = asyncio.get_running_loop()

    def deliver(event: Step | Exception) -> None:
        brought: Event
        if isinstance(event, Exception):
            brought = event
        elif isinstance(rule, Scored):
            brought = choice, event, list(rule.newest), rule.prompt
        else:
            brought = choice, event, (), ()
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(events.put_nowait, brought)

    return deliver


def used(reply: Reply, jobs: Sequence[Job]) -> tuple[int, float]:
    """Prompt tokens that were not computed again, by the first answer to each prompt, and seconds
    of the engine.
    """
    reused = sum(job.reused for job in jobs[:: reply.request.count])
    return reused, sum(job.seconds for job in jobs)


class EventStream(StreamingResponse):
    """Chunks as server-sent events. An error ends the stream, and so does a client that leaves, or
    reads nothing for a minute.
    """

    def __init__(self, chunks: AsyncGenerator[dict[str, Any]]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers=headers)
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def say(*data: str) -> None:
            body = "".join(f"data: {each}\n\n" for each in data).encode()
            async with asyncio.timeout(STALL_SECONDS):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            async with aclosing(self.chunks):
                opening, first = await anext(self.chunks), await anext(self.chunks)
                await send(start)
                await say(json.dumps(opening), json.dumps(first))
                async for chunk in self.chunks:
                    await say(json.dumps(chunk))
                await say("[DONE]")
        except ApiError as error:
            await say(json.dumps(error.body()))
        except (Gone, TimeoutError):
            return  # the connection is closed
        await send({"type": "http.response.body", "body": b""})


class Gate:
    """Lets requests pass that know the server's name and key, are short enough and arrive in time;
    counts how they end.
    """

    def __init__(self, app: ASGIApp, service: Service, hosts: Hosts) -> None:
        self.app, self.service, self.hosts = app, service, hosts
        options = service.options
        self.key, self.most, self.root = options.key, options.max_body, options.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        end, arrived, size = asyncio.get_running_loop().time() + ARRIVAL_SECONDS, False, 0

        async def timely() -> Message:
            nonlocal arrived, size
            try:
                async with asyncio.timeout_at(None if arrived else end):
                    message = await receive()
                    size += len(message.get("body", b""))
                    while size > self.most and message.get("more_body"):
                        message = await receive()  # who is cut off may not see the error
            except TimeoutError:
                late = {"Connection": "close"}
                raise ApiError(408, "the request took too long to arrive", **late) from None
            if size > self.most:
                said = f"expected a body of at most {self.most} bytes, got more; send a shorter one"
                raise ApiError(413, said)
            arrived = not message.get("more_body")
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.service.metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        scope["root_path"] = self.root
        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, timely, counted)
        else:
            await error_response(refusal)(scope, receive, counted)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why a request may not pass, by its head."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if not self.hosts.allow(host):
            known = ", ".join(sorted({"localhost", *self.hosts.names}))
            return ApiError(
                400,
                f"expected the host {known} or an address, got {host[:80]!r}; see --allowed-host",
            )
        path: str = scope["path"]
        is_open = not path.removeprefix(self.root).startswith("/v1") and not path.startswith("/v1")
        if self.key is None or is_open or self._has_key(headers.get(b"authorization", b"")):
            return None
        return ApiError(
            401,
            "expected the server's API key; send Authorization: Bearer KEY",
            "invalid_api_key",
            **{"WWW-Authenticate": "Bearer"},
        )

    def _has_key(self, sent: bytes) -> bool:
        scheme, _, key = sent.partition(b" ")
        expected = str(self.key).encode()
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), expected)


class TimedProtocol(H11Protocol):
    """Closes connections that take too long to send the head of a request."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            ARRIVAL_SECONDS, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        timer, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if timer is not None and self.conn.their_state is h11.IDLE:
            self.timeout_keep_alive_task = timer  # the head is not complete
        elif timer is not None:
            timer.cancel()


def error_response(error: AnyHTTPException) -> JSONResponse:
    """An error in OpenAI's shape."""
    if not isinstance(error, ApiError):
        error = ApiError(error.status_code, str(error.detail), None, **(error.headers or {}))
    return JSONResponse(error.body(), error.status_code, error.headers)


def create_app(
    speculator: Speculator, options: ServerOptions, hosts: Sequence[str] = ("*",)
) -> FastAPI:
    """The application; its `state.service` decodes until the end of its lifespan.

    hosts: names by which browsers may call it, as of `Hosts`.
    """
    service = Service(speculator, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.scheduler.close()

    app = FastAPI(
        title="draftheads",
        description="OpenAI's interface to a causal LM with draft heads",
        lifespan=lifespan,
        docs_url=None,  # these pages read scripts from another host
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Gate, service=service, hosts=Hosts(hosts))
    _add_errors(app)
    _add_routes(app, service)
    _add_schemas(app)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(AnyHTTPException)
    async def refuse(http: HttpRequest, error: AnyHTTPException) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(Gone)
    async def left(http: HttpRequest, error: Gone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(http: HttpRequest, error: Exception) -> JSONResponse:
        return error_response(ApiError(500, "the server failed at this request; its log says why"))


def _add_routes(app: FastAPI, service: Service) -> None:
    errors: dict[int | str, Any] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
    responses = {**errors, 200: {"content": {"text/event-stream": {}}}}
    options, speculator = service.options, service.scheduler.speculator
    nodes = speculator.tree.draft_nodes
    model = {
        "id": options.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "draftheads",
        "max_model_len": service.target.context,
        "drafts": f"{nodes} draft nodes" if nodes else "",
    }

    @app.post("/v1/chat/completions", responses=responses, openapi_extra=body_of(ChatRequest))
    async def chat(http: HttpRequest) -> Any:
        return await service.respond(ChatRequest, http)

    @app.post("/v1/completions", responses=responses, openapi_extra=body_of(CompletionRequest))
    async def complete(http: HttpRequest) -> Any:
        return await service.respond(CompletionRequest, http)

    @app.get("/v1/models", responses=errors)
    async def models() -> Any:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses=errors)
    async def one_model(name: str) -> Any:
        if name != options.name:
            raise service.reader.unknown(name)
        return model

    @app.post("/load_model", include_in_schema=False)  # for `transformers chat`
    async def load_model() -> Response:
        ready = json.dumps({"status": "ready", "cached": True})
        return Response(f"data: {ready}\n\n", media_type="text/event-stream")

    @app.get("/health", responses=errors)
    async def health() -> Any:
        if not service.scheduler.is_open:
            raise ApiError(503, "shutting down", "shutting_down")
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Any:
        return PlainTextResponse(generate_latest(service.metrics.registry))

    page = files("draftheads.infer.serve") / "page"
    for path, name in PAGE.items():
        kind = KINDS[name.rpartition(".")[2]]
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}

        def show(name: str = name, kind: str = kind, headers: Any = headers) -> Response:
            return Response((page / name).read_bytes(), media_type=kind, headers=headers)

        app.add_api_route(path, show, include_in_schema=False)


def body_of(kind: type[Request]) -> dict[str, Any]:
    """What /openapi.json says about the body of a request."""
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_schemas(app: FastAPI) -> None:
    """Describe the bodies, which FastAPI does not read."""
    kinds = [(kind, "validation") for kind in (ChatRequest, CompletionRequest)]
    _, known = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    app.openapi()["components"]["schemas"].update(known["$defs"])


class _Server(uvicorn.Server):
    """Ends the scheduler together with the connections; at a second signal, without grace."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.service.scheduler.close()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.service.scheduler.is_open:
            self.service.scheduler.close(self.service.options.grace)
        await super().shutdown(sockets)
        self._captured_signals.clear()  # done as asked: exit code 0


def serve(speculator: Speculator, options: ServerOptions, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C, and answer what is open within `grace` seconds.

    Raises ValueError for an address that cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host, --port: expected a free address, got {host} {port} ({error}); choose another"
        ) from error
    is_local = ip_address(listening.getsockname()[0]).is_loopback
    if not is_local and not options.key:
        logger.warning("no --api-key-env: everybody who can reach %s can use the model", host)
    app = create_app(speculator, options, options.allowed_hosts or ((), ("*",))[not is_local])
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=int(options.grace) + 5,
    )
    service.scheduler.warm_up([Greedy(), service.rule(Request())])
    shown = f"[{host}]" if ":" in host else host
    print(printable(f"{options.name}: http://{shown}:{listening.getsockname()[1]}"), flush=True)
    _Server(config, service).run(sockets=[listening])
