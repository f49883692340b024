"""An OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) that continues token ids.

Plain HTTP from the standard library, one connection per request and no proxy, called from many
threads: requests can be cut from outside, and have a time limit as a whole. The server's faults
(busy, restarting, cut, silent or garbled) are tried again a bounded number of times; what another
try cannot change is said at once.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from itertools import chain, islice
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoConfig

from draftheads.train.data.conversation import LOSSY, Conversation, Renderer
from draftheads.train.data.distill import Answered, Answerer, Sampling, until_end
from draftheads.train.data.tokenizer import TextSide

CONNECT_SECONDS = 10.0
BUSY = frozenset({408, 425, 429})
"""HTTP statuses below 500 that another try may change."""
REFUSED = frozenset({400, 413, 422})
"""HTTP statuses that speak of this prompt; all others below 500 speak of all prompts."""
LARGEST = 1 << 26
"""Bytes of an answer that are read; more is no answer."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries, except where the server asks for more."""
LONGEST_RETRY_AFTER = 600.0
SLOWEST = 2.0
"""Tokens per second of one answer below which a server, after a minute, counts as hanging."""

Json = dict[str, Any]


class ServerError(OSError):
    """A request that failed, and any other would; says why in words that do not depend on the
    prompt.
    """


class PromptRefused(ServerError):
    """The server refuses this prompt; others may be fine."""


class ServerFault(ServerError):
    """No prompt's fault; another try may end better, `retry_after` seconds later if the server said
    so.
    """

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class ServerGone(ServerFault):
    """No connection could be made."""


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


TokenId = Annotated[int, Field(strict=True, ge=0)]


class Completion(BaseModel):
    """What a server wrote, as text or `token_ids` or both. stop_reason, matched_stop (SGLang's name
    for it): may be the end token's id.
    """

    text: str | None = None
    token_ids: list[TokenId] | None = None
    finish_reason: Literal["stop", "length"]  # "abort": the server gave up
    stop_reason: Any = None
    matched_stop: Any = None


class _Completions(BaseModel):
    choices: list[Completion] = Field(min_length=1, max_length=1)


class _Model(BaseModel):
    id: str
    max_model_len: Any = None


class _Models(BaseModel):
    data: list[_Model]


class Server:
    """A server that was there when this was made. Its model and context stand in `model` and
    `context` (tokens; None where it does not say). Leaving it as a context manager cuts all
    requests under way, which also tells the server to stop; it can be entered again.

    Raises ValueError for an address, key or model name that cannot be right, ServerError when
    nobody answers. The key is in no message: what the server echoes is shown with *** for it.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._address = urlsplit(_normal(options.url))
        self.url = self._address.geturl()
        self._key = _key(options.api_key_env) if options.api_key_env else ""
        self._headers = {"Content-Type": "application/json"}
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._jitter = random.Random()  # the caller's random numbers are none of ours
        entry = self._choose(self._models())
        context = entry.max_model_len
        self.model = entry.id
        self.context = context if isinstance(context, int) and context > 1 else None

    def complete(self, request: Json) -> Completion:
        """POST /v1/completions with the model's name added; tries again where that may help.

        request: must have max_tokens. Raises ServerError; PromptRefused, ServerFault or ServerGone
        where that is known.
        """
        body = json.dumps({"model": self.model, **request}).encode()
        patience = self.options.timeout or 60 + request["max_tokens"] / SLOWEST
        number = 0
        while True:
            number += 1
            try:
                return self._complete_once(body, patience, request["max_tokens"])
            except ServerFault as error:
                last = number == self.options.tries
                if last or self._closed.wait(self._pause(number) + error.retry_after):
                    raise type(error)(f"{error}, tried {number} times") from None

    def __enter__(self) -> Server:
        self._closed.clear()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed.set()
            for connection in self._open:
                _shut(connection)

    def _complete_once(self, body: bytes, patience: float, most: int) -> Completion:
        status, headers, answer = self._request("POST", "/completions", body, patience)
        if status >= 500 or status in BUSY:
            retry_after = _seconds(headers.get("retry-after", "0"))
            raise ServerFault(self._refusal(status, answer), retry_after)
        if status in REFUSED:
            raise PromptRefused(self._refusal(status, answer))
        if status != 200:
            raise ServerError(self._refusal(status, answer) + _hint(status))
        try:
            [completion] = _Completions.model_validate_json(answer).choices
        except ValidationError as error:  # cut by a proxy, most likely
            raise ServerFault(f"expected a completion, got another answer{_where(error)}") from None
        if completion.text is None and completion.token_ids is None:
            raise ServerFault("expected a completion, got one without text and token ids")
        if (count := len(completion.token_ids or ())) > most:
            raise ServerFault(
                f"expected no more tokens than were asked for, got {count - most} more"
            )
        return completion

    def _models(self) -> list[_Model]:
        try:
            status, _, answer = self._request("GET", "/models", None, CONNECT_SECONDS)
        except ServerError as error:
            raise ServerError(
                f"{self.url}: expected an OpenAI-compatible server, got {error}; "
                "start it, or give another --server"
            ) from None
        try:
            if status == 200:
                return _Models.model_validate_json(answer).data
            found = self._refusal(status, answer) + (_hint(status) or "; is --server its address?")
        except ValidationError as error:  # some other kind of server
            found = f"another answer{_where(error)}; is --server its address?"
        raise ServerError(f"{self.url}/models: expected a list of models, got {found}")

    def _choose(self, models: list[_Model]) -> _Model:
        if self.options.model is None and len(models) == 1:
            return models[0]
        for model in models:
            if model.id == self.options.model:
                return model
        wish = "one model" if self.options.model is None else f"model {self.options.model!r}"
        names = self._hide(", ".join(model.id for model in models)) or "none"
        raise ValueError(f"{self.url}: expected {wish}, got {names}; set --server-model")

    def _request(
        self, method: str, path: str, body: bytes | None, patience: float
    ) -> tuple[int, dict[str, str], bytes]:
        secure = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host, port = self._address.hostname or "", self._address.port
        connection = kind(host, port, timeout=min(patience, CONNECT_SECONDS))
        try:
            connection.connect()
        except OSError as error:
            raise ServerGone(self._describe(error)) from None
        late = threading.Event()
        try:
            with self._registered(connection.sock), _limit(patience, connection.sock, late):
                connection.sock.settimeout(None)
                connection.request(method, self._address.path + path, body, self._headers)
                response = connection.getresponse()
                headers = {name.lower(): value for name, value in response.getheaders()}
                return response.status, headers, response.read(LARGEST)
        except ServerError:
            raise
        except (OSError, http.client.HTTPException) as error:  # cut, silent, or not HTTP
            found = "no whole answer in time" if late.is_set() else self._describe(error)
            raise ServerFault(found) from None
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

    def _refusal(self, status: int, answer: bytes) -> str:
        """The status, and what the server says beside it: OpenAI's error layout, or FastAPI's."""
        try:
            said = json.loads(answer)
            said = said.get("error", said)
            message = str(said["message"] if "message" in said else said["detail"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a page of HTML
            return f"HTTP {status} {http.client.responses.get(status, '')}".strip()
        message = self._hide(" ".join(message.split()))  # before digits of the key are replaced
        # prompts of other lengths are refused for one reason
        return f"HTTP {status}: {re.sub(r'[0-9]+', 'N', message)[:200]}"

    def _describe(self, error: Exception) -> str:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        words = "no answer in time" if isinstance(error, TimeoutError) else words
        return self._hide(" ".join(str(words).split()))[:200]

    def _hide(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _normal(url: str) -> str:
    if "@" in url:
        raise ValueError("--server: expected no password in the address; use --api-key-env")
    try:
        parts = urlsplit(url.strip().rstrip("/"))
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or half an IPv6 address
        right = False
    if not right:
        raise ValueError(f"--server: expected http://HOST:PORT, got {url!r}; give such an address")
    path = parts.path if parts.path.endswith("/v1") else f"{parts.path}/v1"
    return parts._replace(path=path, query="", fragment="").geturl()


def _key(variable: str) -> str:
    if not variable.isidentifier():
        raise ValueError(
            "--api-key-env: expected the name of an environment variable, got something else (the "
            "key itself?); export it, and give the variable's name"
        )
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"--api-key-env: expected a key in ${variable}, found nothing; export {variable}=..."
        )
    if not re.fullmatch("[!-~]+", key):
        raise ValueError(
            f"--api-key-env: expected a key of printable ASCII characters in ${variable}, got "
            "others in it (a line break, a blank?); export it again"
        )
    return key


def _hint(status: int) -> str:
    if status in (401, 403):
        return "; set --api-key-env to a variable whose key may ask this server"
    return "; give the address it has moved to" if 300 <= status < 400 else ""


def _where(error: ValidationError) -> str:
    """What is wrong in an answer, without its words."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f" ({': '.join(filter(None, ['.'.join(map(str, first['loc'])), first['msg']]))})"


@contextmanager
def _limit(seconds: float, connection: socket.socket, late: threading.Event) -> Iterator[None]:
    """A time limit for a whole answer: a socket's own is one for each piece of it."""

    def end() -> None:
        late.set()
        _shut(connection)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


# Answers of a target that a server runs; only its tokenizer, template and end tokens are here.
#
# Prompts go out as token ids, rendered as for a target in this process. Where the server tells the
# ids that it wrote (vLLM: `return_token_ids`), those are what is learned. Else its text is
# tokenised, and learned only if the ids decode to the same text.


AHEAD = 2
"""Conversations handed out at a time, per request at a time, so that no request waits for one."""
GIVE_UP = 10
"""Prompts in a row that the server failed to answer, each asked several times, after which it
counts as down."""

logger = logging.getLogger("draftheads")

NEUTRAL: Json = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Said aloud, as servers else take a model's own defaults, which stay out here as everywhere."""


class ServedTarget(Answerer):
    """A target whose tokens come from a server. name: the same model's folder or Hub id."""

    together = False

    def __init__(self, name: str, options: ServerOptions, revision: str | None = None) -> None:
        self._server = Server(options)  # before anything is downloaded
        config = AutoConfig.from_pretrained(name, revision=revision)
        text = config.get_text_config(decoder=True)
        context = getattr(text, "max_position_embeddings", None) or 1 << 30
        side = TextSide.load(name, revision)
        context = min(context, self._server.context or context)
        super().__init__(name, side.tokenizer, side.eos_ids, context)
        self._revision = revision or getattr(config, "_commit_hash", None)
        self._vocabulary: int = text.vocab_size
        self._renderer = Renderer(self, {})
        self._one_at_a_time = threading.Lock()  # tokenizers refuse two threads ("Already borrowed")

    def origin(self) -> dict[str, Any]:
        """As of a local target; weights nobody here has seen have no fingerprint."""
        server = {"url": self._server.url, "model": self._server.model, "context": self.context}
        return {
            "name": self.name,
            "revision": self._revision,
            "fingerprint": None,
            "dtype": None,
            "server": server,
        }

    def answer(
        self, batches: Iterable[list[Conversation]], sampling: Sampling, seeds: Sequence[str]
    ) -> Generator[Answered]:
        """Many conversations at a time, yielded as soon as they are done.

        Left out are those that the server failed to answer. Raises ServerError when that happens
        many times in a row, nobody listens any more or all requests are refused, after what is done
        was yielded. Whatever ends this early cuts all requests.
        """
        width = self._server.options.concurrency
        rows, failed = chain.from_iterable(batches), 0
        reasons: set[str] = set()
        pending: set[Future[tuple[Conversation, ServerError | None]]] = set()
        with ThreadPoolExecutor(width, "distill") as pool, self._server:
            while True:
                for row in islice(rows, AHEAD * width - len(pending)):
                    pending.add(pool.submit(self._converse, row, sampling, seeds))
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                results = [future.result() for future in done]
                refused = [error for _, error in results if isinstance(error, PromptRefused)]
                faults = [error for _, error in results if error and error not in refused]
                finished = [row for row, error in results if error not in faults]
                if refused or any(row.answered for row in finished):
                    failed = 0
                if finished:
                    yield finished, self._last_word(refused[-1]) if refused else None
                for error in faults:
                    failed += 1
                    if failed >= GIVE_UP or type(error) is not ServerFault:
                        raise self._last_word(error)
                    if str(error) not in reasons:
                        reasons.add(str(error))
                        logger.warning("%s; the prompt is left for the next launch", error)

    def _last_word(self, error: ServerError) -> ServerError:
        step = "put that right"
        if isinstance(error, ServerGone):
            step = "start the server"
        elif isinstance(error, ServerFault):
            step = "see the server's log"
        return type(error)(
            f"{self._server.url}: {error}; {step}, then run the same command again to resume"
        )

    def _converse(
        self, row: Conversation, sampling: Sampling, seeds: Sequence[str]
    ) -> tuple[Conversation, ServerError | None]:
        """All turns of one conversation, and what made it fail."""
        try:
            while self._ask(row):
                completion = self._server.complete(self._request(row, sampling, seeds))
                with self._one_at_a_time:
                    self._take(row, completion, sampling)
        except PromptRefused as error:  # this prompt is lost, the run is not
            row.end("failed", str(error))
            return row, error
        except ServerError as error:
            return row, error
        return row, None

    def _ask(self, row: Conversation) -> bool:
        with self._one_at_a_time:
            return row.ask()

    def _request(self, row: Conversation, sampling: Sampling, seeds: Sequence[str]) -> Json:
        drawn = hashlib.sha256(f"{seeds[row.prompt.index]}/{row.answered}".encode()).digest()
        return {
            "prompt": row.tokens,
            "max_tokens": min(sampling.max_new_tokens, self.context - len(row.tokens)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": int.from_bytes(drawn[:4]) >> 1,  # servers take 31 bits
            "stop_token_ids": list(self.eos_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
            **NEUTRAL,
        }

    def _take(self, row: Conversation, completion: Completion, sampling: Sampling) -> None:
        """Put an answer after its question, its end token included."""
        ids = completion.token_ids
        if ids is None:
            ids = self._renderer.written(completion.text or "", row.tokens)
            if ids is None or len(ids) > sampling.max_new_tokens:  # not those that were written
                row.end("skipped", LOSSY)
                return
            row.retokenized += 1
        ids = until_end(ids, self.eos_ids)
        ended = completion.finish_reason == "stop"
        if ended and self.eos_ids and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self._end(completion)]
        if not ids:
            raise ServerFault("answer without tokens")
        if max(ids) >= self._vocabulary:
            raise ServerError(
                f"expected token ids below {self._vocabulary}, the vocabulary of {self.name}, got "
                f"greater ones from {self._server.model}: is it the same model"
            )
        row.answer(ids)

    def _end(self, completion: Completion) -> int:
        """The end token that a server left out: the one it names, else the tokenizer's own."""
        told = (completion.stop_reason, completion.matched_stop, self.tokenizer.eos_token_id)
        for token in told:
            if isinstance(token, int) and token in self.eos_ids:
                return token
        return self.eos_ids[0]
