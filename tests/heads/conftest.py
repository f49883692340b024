"""Fixtures of the heads' tests."""

from __future__ import annotations

import pytest
from tiny_targets import tiny_target

from draftheads.heads.target.model import Target


@pytest.fixture(scope="session")
def target() -> Target:
    """Shared by tests: do not change it."""
    return tiny_target()
