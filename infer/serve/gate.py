"""Checks requests before they are read: the server's name, key, size and time of arrival."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftheads.infer.serve.hosts import names_server
from draftheads.infer.serve.messages import error_body
from draftheads.infer.serve.protocol import ApiError
from draftheads.infer.serve.service import Service

ARRIVAL_SECONDS = 20.0
"""Seconds in which the body of a request must arrive."""
MOST_BYTES = 4 << 20
"""Most bytes of a body."""


@dataclass
class Gate:
    """Admits requests that know the server's name and key, are short enough and arrive in time, and
    counts how they end. hosts: the server's names, as in `names_server`.
    """

    app: ASGIApp
    service: Service
    hosts: Collection[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.service.metrics.requests.labels(str(message["status"])).inc()
            await send(message)

        scope["root_path"] = self.service.options.root_path
        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, limit_arrival(receive), counted)
        else:
            await error_response(refusal, scope)(scope, receive, counted)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """The error for a request that may not pass by its head; None if it may."""
        options = self.service.options
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if not names_server(host, self.hosts):
            names = ", ".join(sorted(self.hosts))
            return ApiError(
                400,
                f"expected the host {names} or an address, got {host[:80]!r}; see --allowed-host",
            )
        path: str = scope["path"]
        below = path.removeprefix(options.root_path)  # some proxies keep the prefix
        is_open = not path.startswith("/v1") and not below.startswith("/v1")
        if is_open or options.key is None:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        keys = [headers.get(b"x-api-key", b"")]  # as Anthropic's clients send it
        if scheme.lower() == b"bearer":
            keys.append(key)
        # in a time that does not tell how much of the key is right
        if any(hmac.compare_digest(each.strip(), options.key.encode()) for each in keys):
            return None
        return ApiError(
            401,
            "expected the server's API key; send Authorization: Bearer KEY, or x-api-key: KEY",
            "invalid_api_key",
            **{"WWW-Authenticate": "Bearer"},
        )


def limit_arrival(receive: Receive) -> Receive:
    """Wraps the messages of a request. Raises ApiError unless its body arrives in time and has at
    most MOST_BYTES. The message after the body says that the client has left.
    """
    size = 0
    end: float | None = asyncio.get_running_loop().time() + ARRIVAL_SECONDS

    async def message_in_time() -> Message:
        nonlocal size, end
        try:
            async with asyncio.timeout_at(end):
                while True:
                    message = await receive()
                    size += len(message.get("body", b""))
                    # the whole of what is too long: who is cut off may not see the error
                    if size <= MOST_BYTES or not message.get("more_body"):
                        break
        except TimeoutError:
            late = {"Connection": "close"}
            raise ApiError(408, "the request took too long to arrive", **late) from None
        if size > MOST_BYTES:
            raise ApiError(
                413, f"expected a body of at most {MOST_BYTES} bytes, got more; send a shorter one"
            )
        if not message.get("more_body"):
            end = None
        return message

    return message_in_time


def error_response(error: HTTPException, scope: Scope) -> JSONResponse:
    """Render an error in the form of the protocol whose path was asked for."""
    if not isinstance(error, ApiError):
        error = ApiError(error.status_code, str(error.detail), None, **(error.headers or {}))
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    body = error_body(error) if path.startswith("/v1/messages") else error.body()
    return JSONResponse(body, error.status_code, error.headers)
