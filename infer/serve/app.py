"""An HTTP server with the interfaces of OpenAI and Anthropic in front of one engine, and a page to
chat on.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from draftheads.heads.terminal import printable
from draftheads.infer.accept import Greedy
from draftheads.infer.background import Background
from draftheads.infer.engine import Speculator
from draftheads.infer.serve.gate import Gate, error_response
from draftheads.infer.serve.messages import CountBody, MessagesBody, MessagesReply
from draftheads.infer.serve.protocol import (
    ApiError,
    Body,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Json,
)
from draftheads.infer.serve.reply import Reply
from draftheads.infer.serve.responses import ResponsesBody, ResponsesReply
from draftheads.infer.serve.scheduler import Scheduler
from draftheads.infer.serve.service import ServeOptions, Service

logger = logging.getLogger("draftheads")

GRACE = 20
"""Seconds that open requests get when the server ends."""
PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def create_app(
    speculator: Speculator,
    options: ServeOptions,
    hosts: Sequence[str] = ("*",),
    background: Background | None = None,
) -> FastAPI:
    """The application; its `state.service` decodes until the end of its lifespan.

    hosts: names by which browsers may call it, as in `names_server`, besides localhost, which leads
    to nothing else. background: works while nothing is asked.
    """
    service = Service(speculator, options, background)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.scheduler.close()

    app = FastAPI(
        lifespan=lifespan,
        openapi_url=None,  # bodies are read by `Reader`, and OpenAI describes them
    )
    app.state.service = service
    names = {"localhost", *map(str.lower, hosts)}
    app.add_middleware(Gate, service=service, hosts=names)

    @app.exception_handler(HTTPException)
    async def refuse(http: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404 and not isinstance(error, ApiError):
            path = http.url.path
            error = ApiError(404, f"expected a path such as /v1/chat/completions, got {path:.80}")
        return error_response(error, http.scope)

    @app.exception_handler(Exception)
    async def failed(http: Request, _: Exception) -> JSONResponse:
        error = ApiError(500, "the server failed at this request; its log says why")
        return error_response(error, http.scope)

    _add_answers(app, service)
    _add_models(app, service)
    _add_state(app, service)
    _add_page(app)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    def add(path: str, kind: type[Body], answer: type[Reply]) -> None:
        @app.post(path)
        async def respond(http: Request) -> Any:
            return await service.respond(kind, answer, http)

    add("/v1/chat/completions", ChatRequest, Reply)
    add("/v1/completions", CompletionRequest, Reply)
    add("/v1/responses", ResponsesBody, ResponsesReply)
    add("/v1/messages", MessagesBody, MessagesReply)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(http: Request) -> Any:
        _, [prompt] = await service.reader.read(CountBody, http)
        return {"input_tokens": len(prompt)}


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def model() -> Json:
        nodes = service.scheduler.speculator.tree.draft_nodes
        return {
            "id": service.options.name,
            "object": "model",
            "created": created,
            "owned_by": "draftheads",
            "max_model_len": service.target.context,
            "drafts": f"{nodes} draft nodes" if nodes else "",
            "learns": service.background is not None,
        }

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        if name != service.options.name:
            raise service.reader.unknown(name)
        return model()

    @app.get("/v1/learning")
    async def learning() -> Any:
        points = service.background.points() if service.background is not None else ()
        return {"object": "list", "data": [asdict(point) for point in points]}


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Any:
        if not service.scheduler.is_open:
            raise ApiError(503, "shutting down", "shutting_down")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Any:
        return PlainTextResponse(generate_latest(service.metrics.registry))


def _add_page(app: FastAPI) -> None:
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}

    def show(http: Request) -> Response:
        name = http.scope["route"].path.removeprefix("/") or "index.html"
        return FileResponse(PAGE / name, headers=headers)

    for path in ("/", "/page.css", "/page.js", "/markdown.js", "/icon.svg"):
        app.add_api_route(path, show, methods=["GET", "HEAD"])


class _Server(uvicorn.Server):
    """Ends the scheduler together with the connections; at a second signal, at once."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler) -> None:
        super().__init__(config)
        self.scheduler = scheduler

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.scheduler.close()
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.scheduler.is_open:
            self.scheduler.close(GRACE)
        await super().shutdown(sockets)
        self._captured_signals.clear()  # done as asked: exit code 0


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises ValueError for one that cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
        # asyncio sets it for sockets that name their protocol alone; else the first token waits
        # 40 ms for the client's system to acknowledge the headers
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--host, --port: expected a free address, got {host} {port} ({error}); choose another"
        ) from error
    return listening


def serve(
    speculator: Speculator,
    options: ServeOptions,
    host: str,
    port: int,
    background: Background | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then answer open requests within GRACE seconds. background:
    works while nothing is asked; its last piece may take GRACE seconds, too.

    Raises ValueError for an address that cannot be used.
    """
    listening = listen(host, port)
    address, port, *_ = listening.getsockname()
    is_local = ip_address(address).is_loopback
    if not is_local and not options.key:
        logger.warning("no --api-key-env: everybody who can reach %s can use the model", host)
    hosts = options.allowed_hosts
    if not hosts and not is_local:
        hosts = ("*",)
    app = create_app(speculator, options, hosts, background)
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=GRACE + 5,
    )
    service.scheduler.warm_up([Greedy(), service.rule(GenerationRequest())])
    shown = f"[{host}]" if ":" in host else host
    site = f"http://{shown}:{port}"
    server = _Server(config, service.scheduler)
    with server.capture_signals():  # who sees the address may send one, before the loop runs
        print(printable(f"{options.name}: {site} (OpenAI clients: {site}/v1)"), flush=True)
        server.run(sockets=[listening])
    if background is not None:
        service.scheduler.join(GRACE)
