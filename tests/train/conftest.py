"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_server import Json, LocalServer
from tiny_chat import END, llama, saved

from draftheads.heads.target.model import Target


@pytest.fixture(scope="session")
def shared_target() -> Target:
    return llama()


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    """The shared target; whatever a test does to its `prefill_chunks` is undone."""
    yield shared_target
    shared_target.__dict__.pop("prefill_chunks", None)


@pytest.fixture(scope="session")
def one_end(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with one end token, which no canned answer holds."""
    return saved(llama(eos=(END,)), tmp_path_factory.mktemp("one-end"))


@pytest.fixture
def start(shared_target: Target) -> Iterator[Callable[..., LocalServer]]:
    """Start servers; by default of canned answers, told as ids, that depend on the prompt alone."""
    servers: list[LocalServer] = []

    def encode(text: str) -> list[int]:
        return list(shared_target.tokenizer(text)["input_ids"])

    def canned(request: Json) -> Json:
        text = f"answer {sum(request['prompt']) % 97} \u00e9"
        ids = encode(text)[: request["max_tokens"]]
        whole = len(ids) == len(encode(text)) and len(ids) < request["max_tokens"]
        return {
            "text": text if whole else text.encode()[: len(ids)].decode(errors="replace"),
            "finish_reason": "stop" if whole else "length",
            "token_ids": [*ids, END] if whole else ids,
        }

    def started(choice: Callable[[Json], Json] = canned, **changes: Any) -> LocalServer:
        servers.append(LocalServer(choice, **changes))
        return servers[-1]

    yield started
    for server in servers:
        server.close()
