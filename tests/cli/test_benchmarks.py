"""The promise: the scripts that measure count what they say, and a report comes out of each."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
from recorder import recorded
from tiny_heads import random_head
from tiny_targets import greedy, some_prompts, tiny_target

from draftheads.heads.cpu.linear import has_int8
from draftheads.heads.formats.hub import save_head
from draftheads.heads.target.model import Target
from draftheads.infer.engine import Speculator
from draftheads.infer.fixed import steps as compiled
from draftheads.infer.fixed.recorded import RECORDERS
from draftheads.infer.rows import Step
from draftheads.scripts.benchmarks import engines, gpu, shapes, step_time
from draftheads.scripts.benchmarks.engine_runs.llamacpp import counts
from draftheads.scripts.benchmarks.engines import Job, cut_at_the_end, markdown, ours, row, theirs
from draftheads.scripts.benchmarks.random_models import KINDS, SHAPES, create_head
from draftheads.scripts.benchmarks.random_models import create_target as random_target

SIZES = replace(SHAPES["tiny"], draft_vocab=13, rank=5, depth=3)


def test_random_heads_of_every_kind_draft():
    target = random_target(SIZES)
    for kind in KINDS:
        head = create_head(kind, SIZES, target)
        spreads = [p.detach().std() for p in head.parameters() if p.numel() > 9]
        assert spreads and all(0 < spread < 0.1 for spread in spreads), kind
        engine = Speculator(target, head, tree=shapes.tree_of(kind, 6, head.depth))
        _, *steps = engine.generate([5, 7, 9], max_new_tokens=9)
        assert {step.drafted for step in steps} == {6}, kind
        if kind != "eagle":  # guesses with the target's own matrix
            assert len(set(head.token_map.tolist())) == 13, kind


# step_time.py

TRAINING = step_time.Setup(
    hidden_size=32, intermediate_size=48, heads=4, kv_heads=2, vocabulary=64, draft_vocabulary=48,
    rows=2, length=32, documents=2, depth=2, ttt=2, repetitions=1,
)  # fmt: skip


def test_training_steps_are_reported(tmp_path, capsys):
    out = tmp_path / "step.json"
    step_time.main([*TRAINING.arguments(), "--profile", "--json", str(out)])
    printed = capsys.readouterr().out
    assert [kind for kind in step_time.KINDS if f"{kind}: whole step" not in printed] == []
    report = json.loads(out.read_text())
    assert report["setup"]["hidden_size"] == 32
    assert set(report["heads"]["eagle3"]["reached"]) == set(report["heads"]["medusa"]["reached"])


# shapes.py and gpu.py

TINY = ["--shape", "tiny", "--context", "20", "--rounds", "3", "--nodes", "4", "8"]
TRIED = ["medusa", "eagle3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "modes", "batches"),
    [
        ("float32", ["eager", "recorded"], (1, 2)),
        pytest.param("float32", ["eager", "compiled"], (1,), marks=pytest.mark.thorough),
        ("int8", ["eager"], (1, 2)),
    ],
)
def test_every_contestant_has_a_row(tmp_path, capsys, monkeypatch, dtype, modes, batches):
    if dtype == "int8" and not has_int8():
        pytest.skip("torch has no int8 products for this CPU")
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    if "recorded" in modes:
        monkeypatch.setitem(RECORDERS, "cpu", recorded)
    torch._dynamo.reset()
    options = ["--kinds", *TRIED, "--dtype", dtype, "--batch", *map(str, batches)]
    options += ["--modes", *modes, "--json", str(tmp_path / "steps.json")]
    shapes.main([*TINY, *options])
    assert "weights that a step reads" in capsys.readouterr().out
    (report,) = json.loads((tmp_path / "steps.json").read_text())
    for mode, batch in product(modes, batches):
        rows = [each for each in report["rows"] if (each["mode"], each["batch"]) == (mode, batch)]
        stock = [("generate", 0)] if (mode, batch) == ("eager", 1) else []
        names = [(each["name"], each["nodes"]) for each in rows]
        assert names == [*stock, ("plain", 0), *product(TRIED, (4, 8))]
        assert mode != "eager" or all(each["bytes"] for each in rows[len(stock) :])
    if "recorded" in modes:
        assert "| recorded | medusa | 4 |" in gpu.steps_table(report)


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
    old = report("float32", medusa=9.0, eagle3=9.0)
    first, second = report("float32", medusa=0.2, eagle3=0.3), report("int8", medusa=0.5)
    for each in (old, second, first):  # the last replaces the first
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
    assert "nodes of the slowest of 2 kinds pay from τ 2.4 in float32" in costs
    assert "16 instead of 20 ms" in costs
    start = "# Decoding: At the shape of tiny, 8 draft nodes of medusa heads pay from τ 1.6 in"
    assert recipe.startswith(start) and recipe.endswith("\ntarget: T\n")
    assert "old" not in table + costs + recipe


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_bytes_of_a_step_are_those_of_its_weights(dtype):
    """Each matrix once: int8 is a quarter of float32. Norms and embedded tokens are hardly any."""
    if dtype == "int8" and not has_int8():
        pytest.skip("torch has no int8 products for this CPU")
    setup = shapes.Setup(shape="tiny", context=8, kinds=(), rounds=2)
    target = random_target(setup.of(dtype))
    matrices = [module for module in target.model.modules() if isinstance(module, torch.nn.Linear)]
    numbers = sum(matrix.weight.numel() for matrix in matrices)
    if dtype == "int8":
        target.pack(8, "torch")  # the bytes of its operators are counted
    [step] = shapes.steps(setup, shapes.contestants(setup, target, {}, "eager"), 1)
    size = numbers * (1 if dtype == "int8" else 4)
    assert size <= step["bytes"] <= 1.5 * size + 20_000


WRITE = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[1])
runs = json.loads(out.read_text())[0]["runs"] if out.exists() else 0
out.write_text(json.dumps([{"runs": runs + 1}]))
time.sleep(float(sys.argv[2]))
sys.exit(sys.argv[3] or None)
"""


def stage(name: str, sleep: str = "0", said: str = "") -> gpu.Stage:
    return gpu.Stage(name, 3, (sys.executable, "-c", WRITE, "OUT", sleep, said))


def test_what_ended_is_not_run_again_and_what_was_measured_is_kept(tmp_path, monkeypatch):
    made = [stage("slow one", sleep="60"), stage("broken", said="no such GPU"), stage("good")]
    monkeypatch.setattr(gpu, "stages", lambda device: made)
    call = ["--out", str(tmp_path), "--device", "cpu"]
    gpu.main([*call, "--minutes", "0.05"])
    assert not (tmp_path / "stages.json").exists(), "no stage begins that cannot end in time"
    for _ in range(2):
        gpu.main(call)
    ends = json.loads((tmp_path / "stages.json").read_text())
    assert [each["end"] for each in ends.values()] == [gpu.STOPPED, "failed with 1", gpu.ENDED]
    assert ends["broken"]["said"] == "no such GPU"
    runs = [json.loads((tmp_path / each["file"]).read_text())[0]["runs"] for each in ends.values()]
    assert runs == [2, 2, 1]
    page = (tmp_path / "report.md").read_text()
    assert "| broken | failed with 1 |" in page and "## slow one" in page and "no such GPU" in page


@pytest.mark.thorough
def test_the_whole_kit_runs_on_a_cpu(tmp_path):
    gpu.main(["--out", str(tmp_path), "--device", "cpu"])
    ends = json.loads((tmp_path / "stages.json").read_text())
    assert {each["end"] for each in ends.values()} == {gpu.ENDED}, ends
    assert len(ends) == len(gpu.stages("cuda"))


# engines.py

REPEAT = """
import json, pathlib, sys
job, out = json.loads(pathlib.Path(sys.argv[1]).read_text()), sys.argv[2]
name = "with.json" if job["head"] else "plain.json"
pathlib.Path(out).write_text((pathlib.Path(__file__).parent / name).read_text())
"""
NAME_THE_HEAD = """
import json, sys
job = json.load(open(sys.argv[1]))
json.dump({"version": job["head"] or "", "answers": [], "drafts": 0, "accepted": [], "seconds": 1},
          open(sys.argv[2], "w"))
"""


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    """A head on a tiny target; llama.cpp repeats what files tell, others name the head they get."""
    monkeypatch.setattr(engines, "RUNS", tmp_path)
    for engine, script in {
        "llamacpp": REPEAT,
        "openvino": NAME_THE_HEAD,
        "vllm": NAME_THE_HEAD,
        "mlx": "raise SystemExit('no such model')",
    }.items():
        (tmp_path / f"{engine}.py").write_text(script)
    target = tiny_target()
    save_head(random_head("medusa", target), tmp_path / "head", target=target)
    prompts = some_prompts(5, 9)
    return Job("tiny", prompts, str(tmp_path / "head"), "medusa", draft_tokens=2, new_tokens=12)


def test_a_row_shows_what_differs(job, tmp_path):
    """Ours is greedy, with and without the head, and counts its drafts."""
    target = tiny_target()
    mine, plain = ours(job, target, "llamacpp"), ours(job.plain, target)
    outcome = ours(job, target)
    assert outcome.answers == [greedy(target, list(prompt), 12) for prompt in job.prompts]
    steps = sum(map(len, outcome.answers)) - len(job.prompts)
    assert outcome.drafts + sum(outcome.accepted) >= steps >= outcome.drafts > 0
    (tmp_path / "plain.json").write_text(json.dumps(asdict(plain)))
    other = [[token + 1 for token in mine.answers[0]], mine.answers[1]]
    wrong = replace(mine, answers=other, drafts=mine.drafts + 1, version="fake 1")
    (tmp_path / "with.json").write_text(json.dumps(asdict(wrong)))
    found = row("llamacpp", "", job, target)
    assert (found["equal text"], found["equal text without head"]) == (1, 2)
    assert found["drafts"] == [mine.drafts, mine.drafts + 1]
    assert "| fake 1 |" in markdown([found])


@pytest.mark.mend("engines get a checkpoint, not a run folder")
def test_an_engine_gets_a_head_that_it_reads(job, tmp_path, monkeypatch):
    """OpenVINO a converted one; vLLM, which knows no run folders, the checkpoint of one."""
    monkeypatch.setattr(engines, "converted", lambda head, folder, to, _: f"{folder}|{head}|{to}")
    monkeypatch.setattr(Target, "load", lambda *_, **__: tiny_target())
    eagle = replace(job, method="eagle3")
    assert theirs("openvino", sys.executable, eagle).version.endswith(f"/head|{job.head}|openvino")
    assert theirs("openvino", sys.executable, eagle.plain).version == ""
    (tmp_path / "run").mkdir()
    (tmp_path / "head").rename(tmp_path / "run" / "step-000009")
    for method in ("eagle3", "dflash"):
        of_a_run = replace(job, method=method, head=str(tmp_path / "run"))
        step = str(tmp_path / "run" / "step-000009")
        assert theirs("vllm", sys.executable, of_a_run).version == step
        of_the_hub = replace(of_a_run, head="me/heads")
        assert theirs("vllm", sys.executable, of_the_hub).version == "me/heads"


@pytest.mark.parametrize(
    ("tokens", "accepted", "left", "counted"),
    [
        ([5, 6, 7], 2, 9, 2),  # two drafts and the target's own token
        ([5, 6, 0], 2, 9, 2),  # the end token is the target's own
        ([5, 0], 2, 9, 1),  # it was a draft
        ([0], 3, 9, 0),  # and what was drafted after it
        ([5, 6, 0], 3, 9, 3),  # the last of three
        ([5, 6], 3, 2, 1),  # a draft of one leaves room for the target's own
        ([5], 2, 1, None),  # no room for a draft
    ],
)
def test_last_drafts_are_counted_as_llamacpp_does(tokens, accepted, left, counted):
    job = Job("tiny", [], draft_tokens=3, new_tokens=1 + left)
    first, last = Step([4], -1, None, 0, 0), Step(tokens, accepted, None, 0, 0)
    found = [step.accepted for step in cut_at_the_end([first, last], job, [0])]
    assert found == ([-1] if counted is None else [-1, counted])


@pytest.mark.mend("equal counts of llama.cpp and ours compare as equal")
def test_llamacpps_counts_have_a_place_for_every_position_of_a_chain():
    """As ours have: a position at which nothing is accepted made equal counts differ."""
    name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
    metrics = f"""# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 40
# TYPE {name} counter
{name}{{position="0"}} 17
{name}{{position="1"}} 2
{name}{{position="2"}} 0
"""
    assert counts(metrics) == (40, [17, 2, 0])
    assert counts("") == (0, [])


# refusals

NO_GPU = "expected a GPU, found none; try --device cpu"
REFUSALS = [
    (lambda job: shapes.main(["--device", "cuda"]), NO_GPU),
    (lambda job: gpu.main(["--out", "out"]), NO_GPU),
    (lambda job: gpu.main(["--device", "cpu"]), "--out: expected a folder"),
    (lambda job: theirs("mlx", sys.executable, job), "mlx failed:\nno such model"),
    (lambda job: engines.method(of_no_engine(job)), "no engine runs sequential heads"),
]


def of_no_engine(job: Job) -> str:
    target = tiny_target()
    return str(save_head(random_head("sequential", target), f"{job.head}-other", target=target))


def test_what_cannot_be_measured_is_told(job):
    for call, said in REFUSALS:
        if said == NO_GPU and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=said):
            call(job)
