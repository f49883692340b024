"""The promise: `serve` is what its options say."""

from __future__ import annotations

import pytest

from draftheads.infer.engine import Speculator
from draftheads.infer.serve import app as server


@pytest.fixture
def served(monkeypatch) -> list:
    """What would be served: (engine, options, host, port)."""
    calls: list = []
    monkeypatch.setattr(server, "serve", lambda *given, background: calls.append(given))
    return calls


def test_options_reach_the_server(run, target, served, monkeypatch):
    monkeypatch.setenv("MY_KEY", "s3cret")
    command = ["serve", "--target", target, "--head", "ngram", "--nodes", 3, "--port", 0]
    settings = ["--api-key-env", "MY_KEY", "--temperature", 0.5, "--slots", 2, "--queue", 7]
    settings += ["--allowed-host", "a.b", "--allowed-host", "*.c", "--root-path", "/model/"]
    assert run(*command, *settings, "--timeout", 9)[0] == 0
    [(engine, options, host, port)] = served
    assert isinstance(engine, Speculator)
    assert (engine.tree.draft_nodes, host, port) == (3, "127.0.0.1", 0)
    assert (options.name, options.key, options.temperature) == (target.name, "s3cret", 0.5)
    assert (options.slots, options.waiting, options.timeout) == (2, 7, 9)
    assert (options.allowed_hosts, options.root_path) == (("a.b", "*.c"), "/model")


def test_without_heads_the_plain_model_is_served(run, target, served):
    assert run("serve", "--target", f"{target}/", "--name", "mine")[0] == 0
    assert (served[0][0].tree.draft_nodes, served[0][1].name) == (0, "mine")
