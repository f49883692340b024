"""The promise: the script that times decoding steps makes a row for each contestant, counts the
bytes of weights that a step reads, and writes its table into a page.
"""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from draftheads.heads.cpu.linear import has_int8
from draftheads.infer.fixed import steps as compiled
from draftheads.scripts.benchmarks import shapes
from draftheads.scripts.benchmarks.random_models import create_target

TINY = "--shape tiny --context 20 --rounds 3 --nodes 4 8 --kinds medusa eagle3"
KINDS = ["medusa", "eagle3"]


@pytest.mark.slow
def test_every_contestant_has_a_row(tmp_path, capsys):
    if not has_int8():
        pytest.skip("torch has no int8 products for this CPU")
    out = tmp_path / "steps.json"
    options = ["--dtype", "float32", "int8", "--batch", "1", "2", "--json", str(out)]
    shapes.main([*TINY.split(), *options])
    assert "weights that a step reads" in capsys.readouterr().out
    (report,) = json.loads(out.read_text())
    steps = [(kind, nodes) for kind in KINDS for nodes in (4, 8)]
    for dtype, batch in product(("float32", "int8"), (1, 2)):
        rows = [row for row in report["rows"] if (row["dtype"], row["batch"]) == (dtype, batch)]
        names = [(row["name"], row["nodes"]) for row in rows]
        stock = [("generate", 0)] if batch == 1 else []
        assert names == [*stock, ("plain", 0), *steps]


def report(dtype: str, **costs: float) -> dict:
    """What is written of a shape whose plain step takes 20 ms."""
    setup = {"shape": "tiny", "dtypes": [dtype], "threads": [1], "kinds": list(costs)}
    place = {"dtype": dtype, "threads": 1, "batch": 1, "mode": "eager"}
    rows = [{**place, "name": "plain", "nodes": 0, "seconds": 0.020, "c": 1.0}]
    for (kind, cost), nodes in product(costs.items(), (4, 8)):
        c = cost * nodes
        rows.append({**place, "name": kind, "nodes": nodes, "seconds": 0.020 * c, "c": c})
    machine = {"cpu": "a CPU", "torch": "2", "date": "2026-11-25T00"}
    return {"machine": machine, "setup": setup, "rows": rows}


def test_pages_and_recipes_say_what_was_measured(tmp_path):
    out = tmp_path / "steps.json"
    first, second = report("float32", medusa=0.2, eagle3=0.3), report("int8", medusa=0.5)
    for each in (
        report("float32", medusa=9.0, eagle3=9.0),
        second,
        first,
    ):  # the last replaces the first
        shapes.add_report(out, each)
    assert json.loads(out.read_text()) == [first, second]
    texts = {
        "table.md": "before\n<!-- shapes: by hand -->\nold\n<!-- end of shapes -->\nafter\n",
        "costs.md": "before\n<!-- costs: by hand -->\nold\n<!-- end of costs -->\nafter\n",
        "tiny-medusa.yaml": "# Decoding: old\ntarget: T\n",
    }
    pages = [tmp_path / name for name in texts]
    for page, text in zip(pages, texts.values(), strict=True):
        page.write_text(text)
    shapes.main(["--pages", str(out), *map(str, pages)])
    table, costs, recipe = (page.read_text() for page in pages)
    assert "| tiny | float32 | 1 | 1 |  | 20 ms | 0.80 / 1.60 |  |  | 1.20 / 2.40 |" in table
    assert "| tiny | int8 | 1 | 1 |  | 20 ms | 2.00 / 4.00 |  |  |  |" in table
    assert (
        "nodes of the slowest of 2 kinds pay from τ 2.4 in float32" in costs
        and "16 instead of 20 ms" in costs
    )
    start = "# Decoding: At the shape of tiny, 8 draft nodes of medusa heads pay from τ 1.6 in"
    assert recipe.startswith(start)
    assert recipe.endswith("\ntarget: T\n") and "old" not in table + costs + recipe


@pytest.mark.slow
def test_compiled_steps_have_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    out = tmp_path / "steps.json"
    shapes.main(
        [*TINY.split(), "--dtype", "float32", "--modes", "eager", "compiled", "--json", str(out)]
    )
    (written,) = json.loads(out.read_text())
    rows = written["rows"]
    named = [(row["name"], row["nodes"]) for row in rows if row["mode"] == "compiled"]
    assert named == [("plain", 0), *product(KINDS, (4, 8))]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_bytes_of_a_step_are_those_of_its_weights(dtype):
    """Each matrix once: int8 is a quarter of float32. Norms and embedded tokens are hardly any."""
    if dtype == "int8" and not has_int8():
        pytest.skip("torch has no int8 products for this CPU")
    setup = shapes.Setup(shape="tiny", context=8, kinds=(), rounds=2)
    target = create_target(setup.of(dtype))
    matrices = [module for module in target.model.modules() if isinstance(module, torch.nn.Linear)]
    numbers = sum(matrix.weight.numel() for matrix in matrices)
    if dtype == "int8":
        target.pack(8)
    [row] = shapes.steps(setup, shapes.contestants(setup, target, {}, "eager"), 1)
    size = numbers * (1 if dtype == "int8" else 4)
    assert size <= row["bytes"] <= 1.5 * size + 20_000


def test_what_a_machine_lacks_is_told():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="expected a GPU, found none; try --device cpu"):
            shapes.main(["--device", "cuda"])
