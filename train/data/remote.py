"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) that continues token ids.

Plain HTTP from the standard library, one connection per request and no proxy, called from many
threads. What passes by itself (busy, restarting, cut or silent connections) is tried again a
bounded number of times; what does not is said at once.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

CONNECT_SECONDS = 10.0
BUSY = frozenset({408, 425, 429})
"""HTTP statuses below 500 that another try may change."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries, except where the server asks for more."""
LONGEST_RETRY_AFTER = 600.0
SLOWEST = 2.0
"""Tokens per second of one answer below which a server, after a minute, counts as hanging."""

Json = dict[str, Any]


class ServerError(OSError):
    """A request that failed; says why in words that do not depend on the prompt.

    passing: another try may end better, `retry_after` seconds later if the server said so.
    """

    def __init__(self, reason: str, *, passing: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.passing = passing
        self.retry_after = retry_after


class ServerGone(ServerError):
    """No connection could be made: no prompt's fault."""


class ServerOptions(BaseModel):
    """Where the server is, and how patient to be with it."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(description="http://HOST:PORT, with or without /v1")
    model: str | None = Field(None, description="name at the server; default: its only one")
    api_key_env: str | None = Field(None, description="environment variable that holds the key")
    concurrency: int = Field(32, ge=1, description="requests at a time")
    timeout: float | None = Field(
        None, gt=0, description="seconds for an answer; default: 60, and half a one per token"
    )
    tries: int = Field(6, ge=1, description="of each request")
    pause: float = Field(0.5, ge=0, description="seconds before the second try; then doubled")


@dataclass(frozen=True)
class Completion:
    """What a server wrote. ids: None where it tells text alone; stop: the end token's id, where it
    tells that; ended: by an end token, not by length.
    """

    text: str
    ids: list[int] | None
    ended: bool
    stop: int | None


class Server:
    """A server that was there when this was made. Its model and context stand in `model` and
    `context` (tokens; None where it does not say). Leaving it as a context manager cuts all
    requests under way, which also tells the server to stop; it can be entered again.

    Raises ValueError for an address, key or model name that cannot be right, ServerError when
    nobody answers.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._address = urlsplit(_normal(options.url))
        self.url = self._address.geturl()
        self._headers = {"Content-Type": "application/json"} | _authorization(options.api_key_env)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._jitter = random.Random()  # the caller's random numbers are none of ours
        entry = self._choose(self._models())
        self.model = str(entry["id"])
        context = entry.get("max_model_len")
        self.context = context if isinstance(context, int) else None

    def complete(self, request: Json) -> Completion:
        """POST /v1/completions with the model's name added; tries again where that may help.

        request: must have max_tokens. Raises ServerError when it failed for good, ServerGone when
        nobody listens.
        """
        body = json.dumps({"model": self.model, **request}).encode()
        patience = self.options.timeout or 60 + request["max_tokens"] / SLOWEST
        number = 0
        while True:
            number += 1
            try:
                return self._complete_once(body, patience)
            except ServerError as error:
                if not error.passing:
                    raise
                last = number == self.options.tries
                if last or self._closed.wait(self._pause(number) + error.retry_after):
                    raise type(error)(f"{error}, tried {number} times") from error

    def __enter__(self) -> Server:
        self._closed.clear()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed.set()
            for connection in self._open:
                _shut(connection)

    def _complete_once(self, body: bytes, patience: float) -> Completion:
        status, headers, answer = self._request("POST", "/completions", body, patience)
        if status != 200:
            raise ServerError(
                _refusal(status, answer),
                passing=status >= 500 or status in BUSY,
                retry_after=_seconds(headers.get("retry-after", "0")),
            )
        return _completion(answer)

    def _models(self) -> list[Json]:
        try:
            status, _, answer = self._request("GET", "/models", None, CONNECT_SECONDS)
        except ServerError as error:
            raise ServerError(
                f"{self.url}: expected an OpenAI-compatible server, got {error}; "
                "start it, or give another --server"
            ) from error
        try:
            return list(json.loads(answer)["data"])
        except (ValueError, KeyError, TypeError) as error:  # some other kind of server, or refusal
            hint = "set --api-key-env" if status in (401, 403) else "is --server its address?"
            raise ServerError(
                f"{self.url}/models: expected a list of models, got HTTP {status}; {hint}"
            ) from error

    def _choose(self, models: list[Json]) -> Json:
        names = [str(entry["id"]) for entry in models]
        if self.options.model is None and len(models) == 1:
            return models[0]
        if self.options.model in names:
            return models[names.index(self.options.model)]
        wish = "one model" if self.options.model is None else f"model {self.options.model!r}"
        raise ValueError(
            f"{self.url}: expected {wish}, got {', '.join(names) or 'none'}; set --server-model"
        )

    def _request(
        self, method: str, path: str, body: bytes | None, patience: float
    ) -> tuple[int, dict[str, str], bytes]:
        secure = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host, port = self._address.hostname or "", self._address.port
        connection = kind(host, port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise ServerGone(_describe(error), passing=True) from error
        try:
            with self._registered(connection.sock):
                connection.sock.settimeout(patience)
                connection.request(method, self._address.path + path, body, self._headers)
                response = connection.getresponse()
                headers = {name.lower(): value for name, value in response.getheaders()}
                return response.status, headers, response.read()
        except ServerError:
            raise
        except (OSError, http.client.HTTPException) as error:  # cut, silent, or not HTTP
            raise ServerError(_describe(error), passing=True) from error
        finally:
            connection.close()

    @contextmanager
    def _registered(self, connection: socket.socket) -> Iterator[None]:
        """So that it can be cut."""
        with self._lock:
            if self._closed.is_set():
                raise ServerError("closed")
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def _pause(self, number: int) -> float:
        """Seconds to wait after a try that failed; number: of that try, from 1."""
        pause: float = min(LONGEST_PAUSE, self.options.pause * 2 ** (number - 1))
        return pause * self._jitter.uniform(0.5, 1.0)  # so that all do not come back at once


def _normal(url: str) -> str:
    parts = urlsplit(url.strip().rstrip("/"))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--server: expected http://HOST:PORT, got {url!r}; give such an address")
    if parts.username or parts.password:
        raise ValueError("--server: expected no password in the address; use --api-key-env")
    path = parts.path if parts.path.endswith("/v1") else f"{parts.path}/v1"
    return parts._replace(path=path, query="", fragment="").geturl()


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"--api-key-env: expected a key in ${variable}, found nothing; export {variable}=..."
        )
    return {"Authorization": f"Bearer {key}"}


def _completion(answer: bytes) -> Completion:
    try:
        [choice] = json.loads(answer)["choices"]
        text, reason = str(choice["text"]), choice["finish_reason"]
    except (ValueError, KeyError, TypeError) as error:  # cut by a proxy, most likely
        raise ServerError("expected a completion, got another answer", passing=True) from error
    if reason not in ("stop", "length"):  # "abort": the server gave up
        raise ServerError(f"answer ended by {reason!r}, not by itself or its length", passing=True)
    ids = choice.get("token_ids")
    stop = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM's name, SGLang's name
    return Completion(text, ids, reason == "stop", stop if isinstance(stop, int) else None)


def _refusal(status: int, answer: bytes) -> str:
    """The status, and what the server says beside it: OpenAI's error layout, or FastAPI's."""
    try:
        said = json.loads(answer)
        said = said.get("error", said)
        message = str(said["message"] if "message" in said else said["detail"])
    except (ValueError, KeyError, TypeError, AttributeError):  # a proxy's page of HTML
        return f"HTTP {status} {http.client.responses.get(status, '')}".strip()
    # prompts of other lengths are refused for one reason
    return f"HTTP {status}: {re.sub(r'[0-9]+', 'N', ' '.join(message.split()))[:200]}"


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(words).split())[:200]


def _seconds(retry_after: str) -> float:
    """Of a Retry-After header: a number, or a date."""
    try:
        if retry_after.strip().isdecimal():
            seconds = float(retry_after)
        else:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
    except ValueError:  # neither: our own pause will do
        return 0.0
    return min(max(0.0, seconds), LONGEST_RETRY_AFTER)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the server was faster
        return
