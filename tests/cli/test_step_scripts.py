"""The promise: scripts that time a decoding step make a row for each contestant, and the parts of a
step add up to the whole.
"""

from __future__ import annotations

import json

import pytest
import torch
from tiny_heads import random_head
from tiny_targets import some_prompts, tiny_target

from draftheads.infer import compiled
from draftheads.infer.engine import Speculator
from draftheads.scripts.benchmarks import gpu_steps, step_profile

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


@pytest.mark.parametrize(
    ("operator", "part"),
    [
        ("aten::addmm", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "products"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::topk", "other operators"),
        ("graph_0_cpp_fused_add_mul_3", "generated"),
        ("Torch-Compiled Region: 0/0", None),
    ],
)
def test_operators_belong_to_parts(operator, part):
    assert step_profile.kind(operator) == part


def test_parts_add_up_to_the_step():
    target = tiny_target()
    engine = Speculator(target, random_head("sequential", target))
    seconds, parts, operators = step_profile.step_parts(engine, some_prompts(9)[0], 5)
    assert parts.total() == pytest.approx(seconds)
    assert set(parts) == {"products", "other operators", "Python and dispatch"}
    assert operators > 100
