"""Features from serving engines that hold the target: vLLM's `extract_hidden_states`.

A document is sent alone, as token ids, with one token to generate. The server writes the states of
its tokens into a file of the exchange folder and names it in its answer. The file is read, checked
and deleted. Faults of a server are retried as `distill --server` does, then others are asked.

Source of the interface: vLLM 0.32, ExampleHiddenStatesConnector; hs-connectors 0.9 for fp8 files.
Legend: B batch, P tokens of a document, L captured states, H hidden size, D feature width.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path, PurePath
from threading import Thread
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from draftheads.heads.target.model import Target
from draftheads.heads.tensors import dtype_name
from draftheads.infer.remote import (
    PromptRefused,
    ServedCompletion,
    Server,
    ServerError,
    ServerFault,
    ServerOptions,
    connect,
)
from draftheads.train.batches import Rows
from draftheads.train.data.shards import Array
from draftheads.train.features.states import StateChecks, StateFeatures, StateLayout
from draftheads.train.recipe import FeatureChoices, Recipe

FILE_SECONDS = 30.0
"""How long a file may take after the answer that names it."""
CLOSE_SECONDS = 10.0
"""How long the end waits for answers to what was asked."""
ANSWERS = "cmpl-*.safetensors"
"""Files of vLLM's completions, each with a lock."""
OLD = 600.0
"""Seconds after which a file in the exchange folder is of a run that was killed."""
FP8 = 0.12
"""Relative error of states that is rounding."""
CONNECTOR = "ExampleHiddenStatesConnector"
"""vLLM's, which writes files."""
FAULTS = (OSError, RuntimeError, ValueError, TypeError, LookupError, SafetensorError)
"""What reading raises for a file that is damaged, or something else."""
STATES, IDS, SCALES = "hidden_states", "token_ids", "hidden_states_scales"
"""Tensors of a file."""

OPTION = re.compile(r"--(server-model|server|api-key-env)")
"""Options of `distill`, which are keys of features here."""

Document = tuple[list[int], Array]
"""The tokens of a document, or of a piece of one, and which of them are learned."""

logger = logging.getLogger("draftheads")


class WrongStates(ValueError):
    """A server gave something else than the states that training needs."""


class StateServers:
    """The servers, and the documents that they are asked for, in a thread of its own.

    captured: the states that they were started with, as in `StateLayout`. Raises ValueError for a
    folder that does not exist, servers of another model or with too little context, ServerError if
    one does not answer.
    """

    def __init__(
        self, target: Target, choices: FeatureChoices, captured: Sequence[int], length: int
    ) -> None:
        self.captured = captured
        self.folder = choices.exchange.resolve()
        self._checks = StateChecks(StateLayout(target, captured, ()))
        if not self.folder.is_dir():
            raise ValueError(
                f"features.exchange: expected the folder to which the server writes, found none at "
                f"{choices.exchange}; start the server first (`draftheads plan` prints how)"
            )
        options = ServerOptions(
            urls=choices.server,
            model=choices.server_model,
            api_key_env=choices.api_key_env,
            concurrency=choices.in_flight,
            timeout=choices.timeout,
        )
        try:
            self.servers = connect(options)
        except (ValueError, ServerError) as error:
            text = OPTION.sub(lambda option: f"features.{option[1].replace('-', '_')}", str(error))
            raise type(error)(text) from None
        for server in self.servers:
            if server.context and server.context <= length:
                raise ValueError(
                    f"{server.url}: expected a context above data.sequence_length, {length}, got "
                    f"{server.context}; start it with a larger --max-model-len"
                )
        self._sweep()
        self._turns = count()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="features", daemon=True)
        self._thread.start()
        self._clients = {server: server.client() for server in self.servers}
        self._places = {server: asyncio.Semaphore(choices.in_flight) for server in self.servers}
        self._asked: set[asyncio.Task[Tensor]] = set()
        self._is_closing = False

    def ask(self, document: Document, server: Server | None = None) -> Future[Tensor]:
        """The states (P, L, H) of a document, once they are there. server: None, any of them.

        Its errors are WrongStates and ServerError.
        """
        return asyncio.run_coroutine_threadsafe(self._states(document, server), self._loop)

    def probe(self, document: Document) -> str:
        """Ask each server for a document; returns what is proven by its states. Raises WrongStates
        unless servers and checkpoint are the same.
        """
        for server in self.servers:
            try:
                self.ask(document, server).result()
            except ServerError:
                if server in self.servers:  # it was not dropped
                    raise
        if self.captured[0] != 0:
            return "state 0 is not captured, so the numbers of layers were not checked"
        return "state 0 is the checkpoint's embeddings"

    def close(self) -> None:
        """End all requests, and delete the files that they brought."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        self._is_closing = True
        tasks = [*self._asked]
        if tasks:  # what servers have begun leaves a file each
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()  # threads that read and check files
        for client in self._clients.values():
            await client.aclose()

    async def _states(self, document: Document, only: Server | None) -> Tensor:
        """From the first server that gives them. Raises the error of the last one."""
        task = asyncio.current_task()
        assert task is not None
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        servers = [only] if only else self.servers
        first = next(self._turns) % len(servers)
        fault: ServerError | None = None
        for server in [*servers[first:], *servers[:first]]:
            if server not in self.servers:  # dropped meanwhile
                continue
            try:
                async with self._places[server]:
                    if self._is_closing:
                        raise asyncio.CancelledError
                    request = {
                        "model": server.model,
                        "prompt": document[0],
                        "max_tokens": 1,
                        "temperature": 0,
                        "cache_salt": uuid4().hex,  # states of a cached prefix would be missing
                    }
                    completion = await server.complete(self._clients[server], request)
                return await asyncio.to_thread(self._read, server, completion, document)
            except ServerError as error:
                fault = server.explained(error)
                if not isinstance(error, PromptRefused) and len(self.servers) > 1:
                    logger.warning("%s", fault)
                    self.servers = [each for each in self.servers if each is not server]
        assert fault is not None
        raise fault

    def _read(self, server: Server, completion: ServedCompletion, document: Document) -> Tensor:
        """The states that an answer names; their file is deleted."""
        parameters = completion.kv_transfer_params or {}
        name = parameters.get("hidden_states_path")
        if not isinstance(name, str):
            raise WrongStates(
                f"{server.url}: expected hidden_states_path in kv_transfer_params, got "
                f"{', '.join(parameters) or 'none'}; start the server as `draftheads plan` prints"
            )
        path = Path(name)
        if path.parent.resolve() != self.folder or not PurePath(path.name).match(ANSWERS):
            raise WrongStates(
                f"{server.url}: expected files {ANSWERS} in {self.folder} (features.exchange), got "
                f"{name}; nothing was read; set features.exchange to the server's "
                "shared_storage_path"
            )
        try:
            tensors = read_when_complete(path)
        except TimeoutError:
            raise ServerFault(
                f"no file {path} after {FILE_SECONDS:g} s; is its disk full"
            ) from None
        except FAULTS as error:
            raise ServerFault(f"{path}: cannot be read ({error})") from None
        finally:
            for each in (path, _lock_of(path)):
                if each.is_file():
                    each.unlink(missing_ok=True)
        try:
            return self.checked(tensors, document)
        except ValueError as error:
            raise WrongStates(f"{server.url}: {error}; nothing was learned from it") from None

    def checked(self, tensors: dict[str, Tensor], document: Document) -> Tensor:
        """The states (P, L, H) of a file. Raises ValueError unless they are of this document."""
        missing = {STATES, IDS} - tensors.keys()
        if missing:
            raise ValueError(f"expected tensors {STATES} and {IDS}, got {', '.join(tensors)}")
        tokens, learned_P = document
        ids = tensors[IDS].flatten().tolist()
        if ids != tokens:
            raise ValueError(
                f"expected the {len(tokens)} tokens that were sent, got {len(ids)} others; is a "
                "prefix cached (--no-enable-prefix-caching)"
            )
        states_PLH = tensors[STATES]
        scales = tensors.get(SCALES)
        if scales is not None:
            try:
                scales = scales.expand(*states_PLH.shape[:2], 1)
            except RuntimeError:
                raise ValueError(
                    f"expected scales of tokens and states {tuple(states_PLH.shape)}, got shape "
                    f"{tuple(scales.shape)}"
                ) from None
            states_PLH = states_PLH.float() * scales
            self._checks.rounding = FP8
        self._checks(states_PLH, tokens, learned_P)
        return states_PLH

    def _sweep(self) -> None:
        """Delete what a run that was killed has left, and nothing else that may lie there."""
        limit = time.time() - OLD
        deleted = 0
        for path in [*self.folder.glob(ANSWERS), *self.folder.glob(f"{ANSWERS}.lock")]:
            with contextlib.suppress(OSError):  # another process deletes it as well
                if path.is_file() and path.stat().st_mtime < limit:
                    path.unlink()
                    deleted += 1
        if deleted:
            logger.warning("%s: deleted %d files of an earlier run", self.folder, deleted)


def served_features(
    recipe: Recipe,
    target: Target,
    rows: tuple[Rows, Rows],
    layers: Sequence[int],
    log: Callable[[str], None],
) -> tuple[StateFeatures, StateFeatures]:
    """The sources of (training rows, held-out rows). layers: those of features.

    At their first use servers are asked for a document that proves what they serve: then ValueError
    is raised for something else, ServerError if one does not answer.
    """
    captured = recipe.features.layers or captured_states(layers, target.layers)
    layout = StateLayout(target, captured, layers)

    opened: Future[StateServers] = Future()  # or why they cannot be asked, which is found out once

    def open_servers() -> StateServers:
        length = max(max(each.sizes) for each in rows)
        source = StateServers(target, recipe.features, captured, length)
        try:
            proof = source.probe(documents_of(rows[0], 0)[0])
        except BaseException:
            source.close()
            raise
        log(f"{source.servers[0].url} serves {target.name}: {proof}")
        return source

    def servers() -> StateServers:
        if not opened.done():
            try:
                opened.set_result(open_servers())
            except (ValueError, OSError) as error:
                opened.set_exception(error)
        return opened.result()

    def close() -> None:
        if opened.done() and not opened.exception():
            servers().close()

    def features_of(own: Rows) -> StateFeatures:
        def ask(number: int) -> list[Future[Tensor]]:
            return list(map(servers().ask, documents_of(own, number)))

        return StateFeatures(layout, own, ask, close)

    train, heldout = rows
    return features_of(train), features_of(heldout)


def documents_of(rows: Rows, number: int) -> list[Document]:
    """Each document, or piece of one, in a row."""
    documents = rows.documents
    return [(documents.tokens(*s).tolist(), documents.mask(*s)) for s in rows.pieces(number)]


def serve_command(recipe: Recipe, captured: Sequence[int], dtype: torch.dtype) -> str:
    """The command that starts vLLM so that it captures these states. dtype: by itself, it serves
    float32 weights in half precision.
    """
    extra = {"shared_storage_path": str(recipe.features.exchange)}
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    states = {"eagle_aux_hidden_state_layer_ids": list(captured)}
    drafting = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": states},
    }
    return (
        f"vllm serve {recipe.target} --dtype {dtype_name(dtype)} "
        f"--max-model-len {recipe.data.sequence_length + 1} "
        f"--no-enable-prefix-caching --no-enable-chunked-prefill --max-num-batched-tokens "
        f"{max(8192, recipe.data.sequence_length + 1)} "
        f"--speculative-config {shlex.quote(json.dumps(drafting))} "
        f"--kv-transfer-config {shlex.quote(json.dumps(transfer))}"
    )


def captured_states(layers: Sequence[int], count: int) -> list[int]:
    """The states that servers should capture of a target of `count` layers: what a head reads, and
    the first and the last state, which prove that they are its own.
    """
    return sorted({0, count, *(layer % (count + 1) for layer in layers)})


def read_when_complete(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, once its writer has released its lock. Raises TimeoutError."""
    end = time.monotonic() + FILE_SECONDS
    while time.monotonic() < end:
        if path.exists() and not _is_locked(_lock_of(path)):
            with os.fdopen(_open_regular(path), "rb") as file:
                return load(file.read())  # what is mapped kills the process if it is cut
        time.sleep(0.005)
    raise TimeoutError(path)


def _is_locked(path: Path) -> bool:
    import fcntl  # not on Windows

    try:
        with os.fdopen(_open_regular(path), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _open_regular(path: Path) -> int:
    """A descriptor to read. Raises OSError for links, and for pipes, which would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path.name} is no regular file")
    return descriptor


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
