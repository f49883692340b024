"""Where the engines are that tests in this folder run."""

from __future__ import annotations

import os

import pytest

from draftheads.scripts.benchmarks.engines import VARIABLES


def place_of(engine: str) -> str:
    """Where an engine is; skips the module if no variable says."""
    place = os.environ.get(VARIABLES[engine])
    if not place:
        pytest.skip(f"{VARIABLES[engine]} is not set", allow_module_level=True)
    return place
