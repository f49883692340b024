"""Fixtures of the decoding tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from exact_laws import WORDS
from recorder import recorded
from tiny_targets import random_model

from draftheads.heads.target.model import Target
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.infer.serve.scheduler import Scheduler


@pytest.fixture(scope="module")
def small_target() -> Target:
    model = random_model("llama")
    model.resize_token_embeddings(WORDS, mean_resizing=False)
    return Target(model, name="six-words")


@pytest.fixture(params=["eager", "recorded"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the steps of engines are run: as on a CPU, and as on a GPU."""
    if request.param == "recorded":
        monkeypatch.setitem(RECORDERS, "cpu", recorded)
    return request.param


@pytest.fixture
def schedulers() -> Iterator[Callable[..., Scheduler]]:
    """Makes schedulers, which end with the test, and their threads with them."""
    made: list[Scheduler] = []

    def make(engine: Speculator, **options: Any) -> Scheduler:
        made.append(Scheduler(engine, **options))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()
        scheduler._thread.join(20)
        assert not scheduler.active
