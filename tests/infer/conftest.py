"""Fixtures of the decoding tests."""

from __future__ import annotations

import pytest
from exact_laws import WORDS
from tiny_targets import random_model

from draftheads.heads.target import Target


@pytest.fixture(scope="module")
def small_target() -> Target:
    model = random_model("llama")
    model.resize_token_embeddings(WORDS, mean_resizing=False)
    return Target(model, name="six-words")
