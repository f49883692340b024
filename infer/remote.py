"""The client side of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...).

Faults of the server (busy, restarting, cut, silent or malformed responses) are retried a bounded
number of times; errors that a retry cannot fix are raised at once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from typing import Annotated, Any, Literal, TypeVar

from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # re-exported
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftheads.arguments import bare_name, secret
from draftheads.heads.terminal import printable

CONNECT_SECONDS = 10.0
BUSY = {408, 425, 429}
"""HTTP statuses below 500 that a retry may fix."""
REFUSED = {400, 413, 422}
"""HTTP statuses about one prompt; all others below 500 are about all prompts."""
SLOWEST = 2.0
"""Tokens per second of one answer below which a server, after a minute, counts as hanging."""
COUNTER = re.compile(
    r'^(?:vllm:|llamacpp:|draftheads_)(\w+_total)(?:\{(?:[^}]*position="(\d+)")?[^}]*\})? (\S+)$',
    re.MULTILINE,
)
"""Name, position and value of a counter on the page of metrics."""

logger = logging.getLogger("draftheads")


class ServerError(OSError):
    """An error that every other request would meet, too."""


class PromptRefused(ServerError):
    """The server refuses this prompt; it may accept others."""


class ServerFault(ServerError):
    """Not the prompt's fault; a retry may succeed."""


class Unreachable(ServerError):
    """No connection, also after retries: it is gone, for all prompts."""


class ServerOptions(BaseModel):
    """Addresses of the servers, and how long to wait for them."""

    model_config = ConfigDict(extra="forbid")

    urls: list[str] = Field(min_length=1)  # http://HOST:PORT, with or without /v1
    model: str | None = None  # name at the servers; default: their only one
    api_key_env: str | None = None  # environment variable with the key
    concurrency: int = Field(32, ge=1)  # requests at a time, to each server
    timeout: float | None = Field(None, gt=0)  # seconds for an answer; default: 60 + 0.5 per token
    tries: int = Field(6, ge=1)  # per request
    pause: float = Field(0.5, ge=0)  # seconds before the second try; then doubled


class ServedCompletion(BaseModel):
    """Output of a server: text, token ids or both."""

    text: str | None = None
    token_ids: list[Annotated[int, Field(strict=True, ge=0)]] | None = None
    finish_reason: Literal["stop", "length"]  # "abort": the server gave up
    stop_reason: Any = None  # may be the id of the end token
    matched_stop: Any = None  # SGLang's name for it
    kv_transfer_params: dict[str, Any] | None = None  # vLLM's, of the whole response


class _Completions(BaseModel):
    model: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    choices: list[ServedCompletion] = Field(min_length=1, max_length=1)


class _Model(BaseModel):
    id: str
    root: Any = None  # vLLM: what several names stand for
    max_model_len: Any = None


class _Models(BaseModel):
    data: list[_Model]


Body = TypeVar("Body", _Completions, _Models)


class Server:
    """The HTTP side of one server. model: its name there; context: in tokens, None if unknown."""

    def __init__(self, url: str, options: ServerOptions, key: str) -> None:
        self.url = url
        self._options = options
        self._key = key
        self._client: dict[str, Any] = {
            "base_url": url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx.Timeout(None, connect=CONNECT_SECONDS),
            "trust_env": False,  # no proxy
        }
        served = self._choose()
        self.shown = self._hide(served.id)  # in messages
        self.model = served.id
        self.source = served.root if isinstance(served.root, str) else served.id
        length = served.max_model_len
        self.context = length if isinstance(length, int) and length > 1 else None

    def explained(self, error: ServerError) -> ServerError:
        """The same error with this server's address, and what to do."""
        advice = "check the server, then run the same command again to resume"
        return type(error)(f"{self.url}: {error}; {advice}")

    def client(self) -> Any:
        """A new connection pool."""
        return httpx.AsyncClient(**self._client)

    async def complete(self, client: Any, request: dict[str, Any]) -> ServedCompletion:
        """The server's completion, retried after faults."""
        for number in range(self._options.tries - 1):
            try:
                return await self._attempt(client, request)
            except (ServerFault, Unreachable):
                await asyncio.sleep(self._options.pause * 2**number)
        return await self._attempt(client, request)

    async def _attempt(self, client: Any, request: dict[str, Any]) -> ServedCompletion:
        """One try. Raises the ServerError of a response that no retry makes better, ServerFault or
        Unreachable for what one may.
        """
        patience = self._options.timeout or 60 + request["max_tokens"] / SLOWEST
        try:
            async with asyncio.timeout(patience):  # for the whole answer
                response = await client.post("/completions", json=request)
        except TimeoutError:
            raise ServerFault("no complete answer in time") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unreachable(self._reason(error)) from None
        except httpx.HTTPError as error:
            raise ServerFault(self._reason(error)) from None
        completions = self._read(response, _Completions)
        name = completions.model  # also with a path, a date or a file's ending, or its weights'
        if name and name not in self._aliases and bare_name(name) != bare_name(self.model):
            raise ServerError(
                f"expected completions of model {self.model!r}, got some of {self._hide(name)!r}; "
                "serve it under the name that is asked for, or set --server-model"
            )
        [completion] = completions.choices
        completion.kv_transfer_params = completions.kv_transfer_params
        if completion.text is None and completion.token_ids is None:
            raise ServerFault("expected text or token ids, got neither")
        if len(completion.token_ids or ()) > request["max_tokens"]:
            raise ServerFault("expected no more tokens than requested, got more")
        return completion

    def _reason(self, error: Exception) -> str:
        return self._hide(str(error) or type(error).__name__)

    def metrics(self) -> str | None:
        """The page of its counters; None if it has none, as other servers need not."""
        return self.fetch("GET", f"{self.url.removesuffix('/v1')}/metrics")

    def counters(self) -> Counter[str]:
        """What vLLM, llama.cpp or our own server has counted since its start, by the name of the
        counter and, of draft tokens, the position; nothing for other servers.
        """
        counts = Counter[str]()
        for name, position, value in COUNTER.findall(self.metrics() or ""):
            counts[name + position] += int(float(value))
        return counts

    def fetch(self, method: str, path: str, body: Any = None) -> str | None:
        """The text of a response within CONNECT_SECONDS; None for an error."""
        try:
            with httpx.Client(**self._client) as client:
                response = client.request(method, path, json=body, timeout=CONNECT_SECONDS)
        except httpx.HTTPError:
            return None
        text: str = response.content.decode(errors="replace")  # whatever charset it claims
        return text if response.status_code == 200 else None

    def warn_of_speculation(self) -> None:
        """Name a vLLM that verifies drafts, as far as its metrics tell."""
        if "vllm:spec_decode_num_drafts" in (self.metrics() or ""):
            logger.warning(
                "%s speculates: where vLLM 0.32 runs on a CPU, its answers are then garbage "
                "above temperature 0; start it there without --speculative-config",
                self.url,
            )

    def _choose(self) -> _Model:
        """The model that the options name, or the only one."""
        try:
            with httpx.Client(**self._client) as client:
                response = client.get("/models", timeout=CONNECT_SECONDS)
            models = self._read(response, _Models).data
        except (httpx.HTTPError, ServerError) as error:
            raise ServerError(
                f"{self.url}: expected an OpenAI-compatible server with a list of models, got "
                f"{self._hide(str(error))}; start it, or check its address and --api-key-env"
            ) from None
        wanted = self._options.model
        for model in models:
            if model.id == wanted or (wanted is None and len(models) == 1):
                self._aliases = {
                    each.id for each in models if each.root is not None and each.root == model.root
                }
                return model
        names = self._hide(", ".join(model.id for model in models)) or "none"
        expected = "one model" if wanted is None else f"model {wanted!r}"
        raise ValueError(f"{self.url}: expected {expected}, got {names}; set --server-model")

    def _read(self, response: Any, kind: type[Body]) -> Body:
        """The body of a response. Raises the ServerError that its status or its body means."""
        status = response.status_code
        if status != 200:
            error = ServerFault if status >= 500 or status in BUSY else ServerError
            raise (PromptRefused if status in REFUSED else error)(self._refusal(response))
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:  # cut by a proxy, or some other kind of server
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerFault(f"an unexpected response ({where} {first['msg']})") from None

    def _refusal(self, response: Any) -> str:
        """The status and the server's message, in OpenAI's or FastAPI's layout."""
        try:
            body = response.json()
            body = body.get("error", body)
            message = str(body["message"] if "message" in body else body["detail"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a page of HTML
            message = response.reason_phrase
        message = self._hide(" ".join(message.split())[:2000])[:200]
        # without numbers: prompts of different lengths are refused for the same reason
        return f"HTTP {response.status_code}: {re.sub(r'[0-9]+', 'N', message)}"

    def _hide(self, text: str) -> str:
        return without_secret(printable(text), self._key)


def connect(options: ServerOptions) -> list[Server]:
    """The servers. Raises ValueError for an invalid address, key or model name, and for servers of
    several models; ServerError if one of them does not answer.
    """
    key = secret(options.api_key_env) if options.api_key_env else ""
    servers = [Server(url, options, key) for url in dict.fromkeys(map(_base_url, options.urls))]
    if any(server.model != servers[0].model for server in servers):
        got = ", ".join(f"{server.shown} at {server.url}" for server in servers)
        raise ValueError(
            f"--server: expected one model at all servers, got {got}; leave out the others, or "
            "serve it under one name"
        )
    return servers


def _base_url(url: str) -> str:
    if "@" in url:
        raise ValueError("server: expected no password in the address; use --api-key-env")
    try:
        parts = httpx.URL(url.strip().rstrip("/"))
        valid = parts.scheme in ("http", "https") and parts.host
    except (httpx.InvalidURL, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"server: expected http://HOST:PORT, got {url!r}; give such an address")
    return str(parts).removesuffix("/").removesuffix("/v1") + "/v1"


def without_secret(text: str, key: str) -> str:
    """The text with *** for each word that holds 8 characters of the key in a row, of a short key
    half of it, at least 4: servers quote what they refuse.
    """
    size = min(len(key), max(4, min(8, len(key) // 2)))
    starts = range(len(key) - size + 1) if size else ()
    parts = {key[start : start + size].lower() for start in starts}

    def shown(word: re.Match[str]) -> str:
        is_secret = any(part in word[0].lower() for part in parts)
        return "***" if is_secret else word[0]

    return re.sub(r"\S+", shown, text)
