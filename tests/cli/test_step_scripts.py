"""The promise: the script that times decoding steps makes a row for each contestant, counts the
bytes of weights that a step reads, and writes its table into a page.
"""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from draftheads.heads.cpu_linear import has_int8
from draftheads.infer import compiled
from draftheads.scripts.benchmarks import laptop, shapes

TINY = "--shape tiny --context 20 --rounds 3 --nodes 4 8 --kinds medusa eagle3"
KINDS = ["medusa", "eagle3"]


def test_every_contestant_has_a_row(tmp_path, capsys):
    if not has_int8():
        pytest.skip("torch has no int8 products for this CPU")
    out, page = tmp_path / "steps.json", tmp_path / "page.md"
    options = ["--dtype", "float32", "int8", "--batch", "1", "2", "--json", str(out)]
    shapes.main([*TINY.split(), *options])
    assert "weights that a step reads" in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    steps = [(kind, nodes) for kind in KINDS for nodes in (4, 8)]
    for dtype, batch in product(("float32", "int8"), (1, 2)):
        chosen = [row for row in rows if (row["dtype"], row["batch"]) == (dtype, batch)]
        names = [(row["name"], row["nodes"]) for row in chosen]
        stock = [("generate", 0)] if batch == 1 else []
        assert names == [*stock, ("plain", 0), *steps]
    page.write_text("before\n<!-- shapes: by hand -->\nold\n<!-- end of shapes -->\nafter\n")
    shapes.main(["--table", str(out), str(page)])
    lines = page.read_text().splitlines()
    assert (lines[0], lines[2], lines[-1]) == (
        "before",
        "| heads, draft nodes | float32 | int8 |",
        "after",
    )
    assert "old" not in lines and any(line.startswith("| eagle3, 8 | ") for line in lines)


@pytest.mark.slow
def test_compiled_steps_have_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    out = tmp_path / "steps.json"
    shapes.main([*TINY.split(), "--dtype", "float32", "--compile", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    named = [(row["name"], row["nodes"]) for row in rows if row["compiled"]]
    assert named == [("plain", 0), *product(KINDS, (4, 8))]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_bytes_of_a_step_are_those_of_its_weights(dtype):
    """Each matrix once: int8 is a quarter of float32. Norms and embedded tokens are hardly any."""
    if dtype == "int8" and not has_int8():
        pytest.skip("torch has no int8 products for this CPU")
    setup = shapes.Setup(shape="tiny", context=8, kinds=(), rounds=2)
    target = shapes.random_target(setup, dtype)
    matrices = [module for module in target.model.modules() if isinstance(module, torch.nn.Linear)]
    numbers = sum(matrix.weight.numel() for matrix in matrices)
    if dtype == "int8":
        target.pack(8)
    [row] = shapes.steps(setup, shapes.contestants(setup, target, {}, False), 1)
    size = numbers * (1 if dtype == "int8" else 4)
    assert size <= row["bytes"] <= 1.5 * size + 20_000


def test_what_a_machine_lacks_is_told():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="expected a GPU, found none; try --device cpu"):
            shapes.main(["--device", "cuda"])
    if not (laptop.llamacpp.PLACE / "llama-server").is_file():
        with pytest.raises(ValueError, match=r"that install_llamacpp\.sh made, found no"):
            laptop.main(["--tokenizer", "any"])
