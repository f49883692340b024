"""A recipe as short as can be, and the line that a mistake in it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftheads.train.recipe import load_recipe

MINIMAL = """\
target: some/model
data:
  path: answers
run:
  output: out
  steps: 10
"""


def error(path: Path, *overrides: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is the test
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message
