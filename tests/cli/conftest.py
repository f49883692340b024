"""Fixtures of the commands' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_chat import llama


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    """A tiny chat model in a folder."""
    folder = tmp_path_factory.mktemp("target")
    tiny = llama()
    tiny.model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder
