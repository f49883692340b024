"""These tests need a GPU, and are shown one: CUDA_VISIBLE_DEVICES=0 python -m pytest tests/gpu"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="no GPU in CUDA_VISIBLE_DEVICES"))
