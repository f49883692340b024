"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tiny_chat import llama

from draftheads.heads.target.model import Target


@pytest.fixture(scope="session")
def shared_target() -> Target:
    return llama()


@pytest.fixture
def target(shared_target: Target) -> Iterator[Target]:
    """The shared target; whatever a test does to its `prefill_chunks` is undone."""
    yield shared_target
    shared_target.__dict__.pop("prefill_chunks", None)
