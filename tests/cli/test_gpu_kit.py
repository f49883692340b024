"""The promise: the kit asks a GPU one thing after the other, keeps what each stage measured by its
time limit, and goes on where it was; on a CPU all of it runs, in tiny shapes.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch
from recorder import recorded

from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.scripts.benchmarks import gpu, shapes
from draftheads.scripts.benchmarks.gpu import ENDED, STOPPED, Stage

WRITE = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[1])
runs = json.loads(out.read_text())[0]["runs"] if out.exists() else 0
out.write_text(json.dumps([{"runs": runs + 1}]))
time.sleep(float(sys.argv[2]))
sys.exit(sys.argv[3] or None)
"""


def fake(name: str, sleep: str = "0", said: str = "") -> Stage:
    return Stage(name, 3, (sys.executable, "-c", WRITE, "OUT", sleep, said))


def test_what_ended_is_not_run_again_and_what_was_measured_is_kept(tmp_path, monkeypatch):
    def stages(device: str) -> list[Stage]:
        return [fake("slow one", sleep="60"), fake("broken", said="no such GPU"), fake("good")]

    monkeypatch.setattr(gpu, "stages", stages)
    for _ in range(2):
        gpu.main(["--out", str(tmp_path), "--device", "cpu"])
    ends = json.loads((tmp_path / "stages.json").read_text())
    assert [each["end"] for each in ends.values()] == [STOPPED, "failed with 1", ENDED]
    assert ends["broken"]["said"] == "no such GPU"
    runs = [json.loads((tmp_path / each["file"]).read_text())[0]["runs"] for each in ends.values()]
    assert runs == [2, 2, 1]
    page = (tmp_path / "report.md").read_text()
    assert "| broken | failed with 1 |" in page and "## slow one" in page and "no such GPU" in page


def test_no_stage_begins_when_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "stages", lambda device: [fake("good")])
    gpu.main(["--out", str(tmp_path), "--device", "cpu", "--minutes", "0.05"])
    assert not (tmp_path / "stages.json").exists()


def test_recorded_steps_are_timed_beside_eager_ones(tmp_path, monkeypatch):
    monkeypatch.setitem(RECORDERS, "cpu", recorded)
    out = tmp_path / "steps.json"
    options = "--shape tiny --context 9 --rounds 2 --nodes 4 --kinds medusa --modes eager recorded"
    shapes.main([*options.split(), "--dtype", "float32", "--json", str(out)])
    (report,) = json.loads(out.read_text())
    rows = [(row["mode"], row["name"], row["bytes"]) for row in report["rows"][1:]]
    assert [row[:2] for row in rows] == [
        (mode, name) for mode in ("eager", "recorded") for name in ("plain", "medusa")
    ]
    assert all(size for mode, _, size in rows if mode == "eager")
    assert "| recorded | medusa | 4 |" in gpu.steps_table(report)


def test_a_continuous_batch_is_timed_in_every_way(monkeypatch):
    monkeypatch.setitem(RECORDERS, "cpu", recorded)
    rows = gpu.distil(gpu.SHAPES["tiny"], prompts=4, rows=2, new=6)
    assert [next(rows)["name"] for _ in range(2)] == ["eager", "recorded"]


@pytest.mark.thorough
def test_the_whole_kit_runs_on_a_cpu(tmp_path):
    gpu.main(["--out", str(tmp_path), "--device", "cpu"])
    ends = json.loads((tmp_path / "stages.json").read_text())
    assert {each["end"] for each in ends.values()} == {ENDED}, ends
    assert len(ends) == len(gpu.stages("cuda"))


def test_a_gpu_that_is_not_there_is_told(tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="expected a GPU, found none; try --device cpu"):
            gpu.main(["--out", str(tmp_path)])
    with pytest.raises(ValueError, match="--out: expected a folder"):
        gpu.main(["--device", "cpu"])
