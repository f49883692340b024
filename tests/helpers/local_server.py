"""An OpenAI-compatible server on this machine: as much of it as answering token ids takes, and all
ways to fail; and one that gives hidden states as vLLM's `extract_hidden_states` does.
"""

from __future__ import annotations

import fcntl
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from draftheads.heads.target.pretrained import decoder_layers

Json = dict[str, Any]
CUT, HANG, DRIP = -1, -2, -3
"""Faults that are no HTTP status: a connection cut in the middle of an answer, silence, and an
answer of which a byte comes now and then, without end.
"""
Fault = int | bytes | tuple[int, dict[str, str], bytes]
"""One of these, an HTTP status, the body of an answer, or an answer: status, headers, body."""


class LocalServer:
    """`choice(request)` makes a completion's choice. `fault(number, request)`, if set, may say a
    fault instead of None for the number-th completion that is asked for.

    `listed`: the body to give as the list of models; `metrics`: that of /metrics, b"" for none;
    `asked`: the requests so far; `headers`: their headers; `holding`: set once one hangs;
    `release`: set it to let the hanging ones go.
    """

    def __init__(self, choice: Callable[[Json], Json], models: tuple[Json, ...] = ()) -> None:
        self.choice = choice
        self.models = list(models) or [{"id": "tiny", "max_model_len": 256}]
        self.fault: Callable[[int, Json], Fault | None] = lambda number, request: None
        self.key: str | None = None
        self.listed: bytes | None = None
        self.metrics = b""
        self.asked: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.holding, self.release = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._server = _Quiet(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        """Answer one request."""
        if self.key and handler.headers.get("Authorization") != f"Bearer {self.key}":
            return _send(handler, 401, {"error": {"message": "Unauthorized"}})
        if handler.path == "/v1/models" and self.listed is not None:
            return _send_raw(handler, 200, {}, self.listed)
        if handler.path == "/v1/models":
            return _send(handler, 200, {"object": "list", "data": self.models})
        if handler.path == "/metrics" and self.metrics:
            claimed = {"Content-Type": "text/plain; charset=utf-16"}  # whatever it says
            return _send_raw(handler, 200, claimed, self.metrics)
        if handler.path != "/v1/completions":
            return _send(handler, 404, {"detail": "Not Found"})
        request = json.loads(body)
        with self._lock:
            number = len(self.asked)
            self.asked.append(request)
            self.headers.append(dict(handler.headers.items()))
        fault = self.fault(number, request)
        if fault == HANG:
            self.holding.set()
            self.release.wait()
        if fault in (CUT, HANG):
            return _cut(handler)
        if fault == DRIP:
            return self._drip(handler)
        if isinstance(fault, bytes | tuple):
            return _send_raw(handler, *(fault if isinstance(fault, tuple) else (200, {}, fault)))
        if fault is not None:
            wait = {"Retry-After": "0"} if fault == 429 else {}
            return _send(handler, fault, {"error": {"message": f"fault of {number}"}}, wait)
        choice = self.choice(request)
        params = {"kv_transfer_params": choice.pop("kv_transfer_params", None)}
        return _send(handler, 200, {"object": "text_completion", "choices": [choice], **params})

    def _drip(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        while not self.release.wait(0.05):
            handler.wfile.write(b" ")


class _Quiet(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Clients that went away are part of the tests."""


def _handler(server: LocalServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # headers and body are two writes

        def log_message(self, *args: object) -> None:
            """Stay quiet."""

        def handle_any(self) -> None:
            server.answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        do_GET = do_POST = handle_any

    return Handler


def _send(
    handler: BaseHTTPRequestHandler, status: int, value: Json, headers: dict[str, str] | None = None
) -> None:
    _send_raw(handler, status, headers or {}, json.dumps(value).encode())


def _send_raw(
    handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes
) -> None:
    handler.send_response(status)
    for name, text in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, text)
    handler.end_headers()
    handler.wfile.write(body)


def _cut(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


Tensors = dict[str, Tensor]


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[Tensor, int]:
    """All states (P, n + 1, H) of a document, the last one before the final norm, and the likeliest
    next token.
    """
    left: list[Tensor] = []

    def note(module: Any, args: Any, out: Any) -> None:
        left.append(out if isinstance(out, Tensor) else out[0])

    hook = decoder_layers(model)[-1].register_forward_hook(note)
    ids = torch.tensor([list(tokens)])
    out = model(ids, use_cache=False, output_hidden_states=True)
    hook.remove()
    states = [each[0] for each in out.hidden_states[:-1]] + [left[0].reshape(len(tokens), -1)]
    return torch.stack(states, dim=1), int(out.logits[0, -1].argmax())


class StatesServer(LocalServer):
    """`captured`: the states in its files; `folder`: where these are. `change(number, tensors)`
    may give other tensors for the number-th document; `held`: seconds for which its lock is held
    while it is written; `path_of(number)`: where it says that the file is.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, captured: Sequence[int]) -> None:
        self.model, self.folder, self.captured = model, folder, list(captured)
        self.change: Callable[[int, Tensors], Tensors | None] = lambda number, tensors: tensors
        self.path_of: Callable[[int], Path] = lambda n: folder / f"cmpl-{id(self)}-{n}.safetensors"
        self.held = 0.0
        self._forwards = threading.Lock()
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(self._answer)

    def _answer(self, request: Json) -> Json:
        tokens: list[int] = request["prompt"]
        assert request["max_tokens"] == 1 and request["temperature"] == 0
        with self._forwards:
            number, self._count = self._count, self._count + 1
            states_PNH, token = states_of(self.model, tokens)
        tensors: Tensors | None = {
            "hidden_states": states_PNH[:, self.captured].contiguous(),
            "token_ids": torch.tensor(tokens),
        }
        assert tensors is not None
        tensors, path = self.change(number, tensors), self.path_of(number)
        if tensors is not None:
            self._write(path, tensors)
        return {
            "text": "",
            "token_ids": [token],
            "prompt_token_ids": tokens,
            "finish_reason": "length",
            "kv_transfer_params": {"hidden_states_path": str(path)},
        }

    def _write(self, path: Path, tensors: Tensors) -> None:
        """With a lock beside it, which is released when the file is whole."""
        lock = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            if self.held:
                path.write_bytes(b"half")
                time.sleep(self.held)
            save_file(tensors, path)
            lock.close()

        threading.Thread(target=write, daemon=True).start()
