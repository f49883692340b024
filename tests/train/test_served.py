"""The promise: heads learn from a server's states what they learn from the target itself, and
nothing from anything else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from states_server import StatesServer
from tiny_training import (
    HEAD_SECTIONS,
    assert_same,
    random_answers,
    run,
    tiny_model,
    weights,
    write_answers,
    write_target,
)

from draftheads.heads.target import Target
from draftheads.train import served

LAYERS = 2
ALL = [*range(LAYERS + 1)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_target(folder / "target")
    write_answers(folder / "data", random_answers(40))
    return folder


@pytest.fixture
def server(tmp_path) -> Iterator[StatesServer]:
    server = StatesServer(tiny_model(), tmp_path / "exchange", ALL)
    yield server
    server.close()


def options(server: StatesServer, *more: str, mode: str = "served") -> list[str]:
    return [
        f"features.mode={mode}",
        f"features.server=[{server.url}]",
        f"features.exchange={server.folder}",
        f"features.layers={server.captured}",
        *more,
    ]


def losses(output: Path) -> list[float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("kind", HEAD_SECTIONS)
def test_heads_learn_the_same_as_online(made, server, tmp_path, kind):
    server.held = 0.02
    assert run(made, tmp_path / "online", kind=kind) == 0
    assert run(made, tmp_path / "served", *options(server), kind=kind) == 0
    online, from_server = losses(tmp_path / "online"), losses(tmp_path / "served")
    assert len(online) == 6
    assert from_server == pytest.approx(online, rel=1e-4)
    assert not list(server.folder.iterdir()), "what was read is deleted"
