"""The promise: the script that times a decoding step makes a row for each contestant."""

from __future__ import annotations

import json

import pytest
import torch

from draftheads.infer import compiled
from draftheads.scripts.benchmarks import gpu_steps

SHAPE = "--hidden 64 --vocab 96 --layers 2 --context 20 --steps 4 --warmup 1 --device cpu"
TREES = "--nodes 6 --medusa-nodes 9 --depth 3 --dtype float32 --bandwidth 10"


@pytest.mark.slow
def test_every_contestant_has_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    out = tmp_path / "steps.json"
    gpu_steps.main([*SHAPE.split(), *TREES.split(), "--json", str(out)])
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    kinds = ["plain", "medusa", "sequential", "block", "eagle3"]
    assert list(rows) == ["generate", *kinds, *[f"{kind} compiled" for kind in kinds]]
    assert [rows[kind]["nodes"] for kind in kinds] == [0, 9, 6, 6, 6]
    assert rows["medusa"]["bytes"] > rows["plain"]["bytes"] == rows["generate"]["bytes"]
    assert "at 10 GB/s" in capsys.readouterr().out


def test_without_a_gpu_the_next_step_is_told():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="expected a GPU, found none; try --device cpu"):
        gpu_steps.main([])
