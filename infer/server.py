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
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from time import perf_counter
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftheads.infer.accept import LEAST_TEMPERATURE, Acceptance, Greedy, Sampled
from draftheads.infer.engine import Speculator, Step
from draftheads.infer.prompt import encode_prompt
from draftheads.infer.protocol import (
    ChatRequest,
    CompletionRequest,
    ErrorBody,
    Reply,
    Request,
)
from draftheads.infer.scheduler import Closing, Job, QueueFull, Scheduler
from draftheads.infer.text import AnswerText

logger = logging.getLogger("draftheads")

PAGE = {"/": "index.html", **{f"/{name}": name for name in ("page.css", "page.js", "icon.svg")}}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ARRIVAL_SECONDS = 20.0
"""For the head of a request, and again for its body."""
STALL_SECONDS = 60.0
"""For a client to read what it was sent."""


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


class ApiError(HTTPException):
    """An error that the client is told of in OpenAI's shape."""

    param: str | None = None  # the option that it is about

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(status, message, headers or None)
        self.code = code

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        said = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


class Gone(Exception):
    """The client has left."""


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
        self.metrics = Metrics(self.scheduler)
        self._encoding = threading.Lock()  # a tokenizer is for one thread at a time

    async def respond(self, request: ChatRequest | CompletionRequest, http: HttpRequest) -> Any:
        """Answer a request."""
        options = self.options
        if request.model not in (None, options.name):
            raise self.unknown(request.model)
        if isinstance(request, CompletionRequest) and request.token_ids:
            prompt = self._fitting(request.token_ids)
        else:
            prompt = await asyncio.to_thread(self._encoded, request)
        after = () if isinstance(request, ChatRequest) else prompt
        text = AnswerText(self.target.tokenizer, request.stops, after=after)
        reply = Reply(request, options.name, prompt, text)
        events: asyncio.Queue[Any] = asyncio.Queue()
        job = self._submit(request, prompt, events)
        pieces = self._pieces(reply, job, events, http)
        if request.stream:
            first = await anext(pieces)  # an error before the first token has a status of its own
            return EventStream(self._chunks(reply, job, first, pieces))
        written = [text async for _, text, _ in pieces]
        body = reply.choice("".join(written), finish_reason=reply.finish)
        if request.return_token_ids:
            body["choices"][0]["token_ids"] = reply.tokens
            body["prompt_token_ids"] = prompt
        return JSONResponse({**body, "usage": reply.usage(job.reused, job.seconds)})

    def unknown(self, model: str | None) -> ApiError:
        """The error for another model."""
        said = f"expected model {self.options.name!r}, got {model!r}; see /v1/models"
        return ApiError(404, said, "model_not_found")

    def _encoded(self, request: ChatRequest | CompletionRequest) -> list[int]:
        """Token ids of a request's prompt. Raises ApiError for one that cannot be answered."""
        target = self.target
        given: Any
        if isinstance(request, CompletionRequest):
            given = request.prompt
        elif not getattr(target.tokenizer, "chat_template", None):
            raise ApiError(400, f"{target.name} has no chat template; use /v1/completions")
        else:
            given = [message.plain() for message in request.messages]
        try:
            with self._encoding:
                return self._fitting(encode_prompt(target, given))
        except RecursionError as error:
            raise ApiError(400, "the messages are nested too deeply; send flatter ones") from error
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def _fitting(self, prompt: list[int]) -> list[int]:
        """The same prompt. Raises ApiError if it leaves no room for an answer."""
        if len(prompt) >= self.target.context:
            raise ApiError(
                400,
                f"expected a prompt shorter than the context of {self.target.context} tokens, got "
                f"{len(prompt)}; send a shorter one",
                "context_length_exceeded",
            )
        return prompt

    def _submit(self, request: Request, prompt: list[int], events: asyncio.Queue[Any]) -> Job:
        loop = asyncio.get_running_loop()

        def deliver(event: Step | Exception) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        most = getattr(request, "max_completion_tokens", None) or request.max_tokens
        room = self.target.context - len(prompt)
        job = Job(
            prompt,
            deliver,
            self.rule(request),
            min(most or room, room),
            request.stops,
            request.draft,
        )
        try:
            self.scheduler.submit(job)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except QueueFull as error:
            later = {"Retry-After": str(min(max(math.ceil(error.seconds), 1), 60))}
            raise ApiError(429, f"{error}; retry later", "queue_full", **later) from error
        except Closing as error:
            raise ApiError(503, str(error), "shutting_down") from error
        return job

    def rule(self, request: Request) -> Acceptance:
        """The lossless rule that a request asks for."""
        given = (request.temperature, request.top_p, request.top_k)
        own = (self.options.temperature, self.options.top_p, self.options.top_k)
        temperature, top_p, top_k = (b if a is None else a for a, b in zip(given, own, strict=True))
        if temperature < LEAST_TEMPERATURE:
            return Greedy()
        rule = Sampled(temperature, top_p, max(int(top_k), 0))
        if request.seed is not None:
            rule.seed(request.seed % 2**63)
        return rule

    async def _pieces(
        self, reply: Reply, job: Job, events: asyncio.Queue[Any], http: HttpRequest
    ) -> AsyncGenerator[tuple[Step, str, int]]:
        """Steps as they come, with their text and how much of it was drafted. Raises ApiError, and
        Gone if the client leaves; the job ends with this.
        """

        async def watch() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass
            events.put_nowait(Gone())

        late = ApiError(504, f"no answer within {self.options.timeout:g} s", "timeout")
        loop, began = asyncio.get_running_loop(), perf_counter()
        timer = loop.call_later(self.options.timeout, events.put_nowait, late)
        watcher = asyncio.create_task(watch())
        try:
            while reply.finish is None:
                event = await events.get()
                if isinstance(event, Exception):
                    raise self._as_api_error(event)
                if not reply.steps:
                    self.metrics.first.observe(perf_counter() - began)
                yield event, *reply.add(event)
            self.metrics.whole.observe(perf_counter() - began)
        finally:
            self.scheduler.cancel(job)
            timer.cancel()
            watcher.cancel()
            self.metrics.add(reply.usage(job.reused, job.seconds))

    def _as_api_error(self, error: Exception) -> Exception:
        """An error as the client is told of it."""
        if isinstance(error, ApiError | Gone):
            return error
        if isinstance(error, Closing):
            return ApiError(503, str(error), "shutting_down")
        return ApiError(500, f"the engine failed at this request ({type(error).__name__})")

    async def _chunks(
        self,
        reply: Reply,
        job: Job,
        first: tuple[Step, str, int],
        rest: AsyncGenerator[tuple[Step, str, int]],
    ) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a stream."""
        request, options = reply.request, reply.options
        usage = {"usage": None} if options.include_usage else {}
        more: dict[str, Any] = {}
        async with aclosing(rest):
            yield {**reply.opening(), **usage}
            piece: tuple[Step, str, int] | None = first
            while piece is not None:
                step, text, drafted = piece
                if options.include_steps:
                    more["step"] = reply.facts(step, drafted)
                if request.return_token_ids:
                    more["token_ids"] = reply.newest
                yield {**reply.choice(text, finish_reason=reply.finish, **more), **usage}
                piece = await anext(rest, None)
        if usage:
            yield {**reply.head, "choices": [], "usage": reply.usage(job.reused, job.seconds)}


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
    """Lets requests pass that have the key, are short enough and arrive in time; counts how they
    end.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self.key, self.most = service.options.key, service.options.max_body

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

        if self.key and scope["path"].startswith("/v1") and not self._has_key(scope):
            refusal = ApiError(401, "expected the server's API key; send Authorization: Bearer KEY")
            await error_response(refusal)(scope, receive, counted)
        else:
            await self.app(scope, timely, counted)

    def _has_key(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, f"Bearer {self.key}".encode())


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

    hosts: names by which browsers may call it.
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
    app.add_middleware(Gate, service=service)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))
    _add_errors(app)
    _add_routes(app, service)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(AnyHTTPException)
    async def refuse(http: HttpRequest, error: AnyHTTPException) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: RequestValidationError) -> JSONResponse:
        # of a union's alternatives, one of the right type
        faults = error.errors()
        fault = min(faults, key=lambda each: each["type"].endswith(("_type", "_parsing")))
        parts = [str(part) for part in fault["loc"][1:]]
        place = ".".join(part for part in parts if part.replace("_", "").isalnum())
        message = fault["msg"].removeprefix("Value error, ")
        refusal = ApiError(400, f"{place}: {message}" if place else message)
        refusal.param = place or None
        return error_response(refusal)

    @app.exception_handler(Gone)
    async def left(http: HttpRequest, error: Gone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(http: HttpRequest, error: Exception) -> JSONResponse:
        return error_response(ApiError(500, "the server failed at this request; its log says why"))


def _add_routes(app: FastAPI, service: Service) -> None:
    errors: dict[int | str, Any] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
    stream: dict[int | str, Any] = {200: {"content": {"text/event-stream": {}}}}
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

    @app.post("/v1/chat/completions", responses={**errors, **stream})
    async def chat(request: ChatRequest, http: HttpRequest) -> Any:
        return await service.respond(request, http)

    @app.post("/v1/completions", responses={**errors, **stream})
    async def complete(request: CompletionRequest, http: HttpRequest) -> Any:
        return await service.respond(request, http)

    @app.get("/v1/models", responses=errors)
    async def models() -> Any:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses=errors)
    async def one_model(name: str) -> Any:
        if name != options.name:
            raise service.unknown(name)
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

    page = files("draftheads.infer") / "page"
    for path, name in PAGE.items():
        kind = KINDS[name.rpartition(".")[2]]
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}

        def show(name: str = name, kind: str = kind, headers: Any = headers) -> Response:
            return Response((page / name).read_bytes(), media_type=kind, headers=headers)

        app.add_api_route(path, show, include_in_schema=False)


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
    names = [*LOOPBACK, "[::1]"] if host in LOOPBACK else ["*"]
    if host not in LOOPBACK and not options.key:
        logger.warning("no --api-key-env: everybody who can reach %s can use the model", host)
    app = create_app(speculator, options, names)
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
    print(f"{options.name}: http://{shown}:{listening.getsockname()[1]}", flush=True)
    _Server(config, service).run(sockets=[listening])
