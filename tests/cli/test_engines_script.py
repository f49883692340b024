"""The promise: the comparison with serving engines tells equal from different, and what failed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

import pytest
from tiny_heads import random_head
from tiny_targets import greedy, some_prompts, tiny_target

from draftheads.heads.formats.hub import save_head
from draftheads.heads.target.model import Target
from draftheads.infer.rows import Step
from draftheads.scripts.benchmarks import engines
from draftheads.scripts.benchmarks.engine_runs.llamacpp import counts
from draftheads.scripts.benchmarks.engines import (
    Job,
    cut_at_the_end,
    markdown,
    method,
    ours,
    row,
    theirs,
)

SCRIPT = """
import json, pathlib, sys
job, out = json.loads(pathlib.Path(sys.argv[1]).read_text()), sys.argv[2]
name = "with.json" if job["head"] else "plain.json"
pathlib.Path(out).write_text((pathlib.Path(__file__).parent / name).read_text())
"""


@pytest.fixture
def job(tmp_path, monkeypatch) -> Job:
    """A head on a tiny target, and an engine that repeats what files tell."""
    monkeypatch.setattr(engines, "RUNS", tmp_path)
    (tmp_path / "llamacpp.py").write_text(SCRIPT)
    target = tiny_target()
    save_head(random_head("medusa", target), tmp_path / "head", target=target)
    prompts = some_prompts(5, 9)
    return Job("tiny", prompts, str(tmp_path / "head"), "medusa", draft_tokens=2, new_tokens=12)


def test_ours_is_greedy_and_counts(job):
    target = tiny_target()
    outcome = ours(job, target)
    assert outcome.answers == [greedy(target, list(prompt), 12) for prompt in job.prompts]
    steps = sum(map(len, outcome.answers)) - len(job.prompts)
    assert outcome.drafts + sum(outcome.accepted) >= steps >= outcome.drafts


def test_the_last_drafts_are_counted_as_the_engine_does(job, monkeypatch):
    class Fake:
        def __init__(self, *_, **__) -> None: ...

        def generate(self, *_, **__) -> list[Step]:
            steps = [([7], -1), ([8, 9], 1), ([3, 4], 2)]  # of the last, the third token is cut
            return [Step(tokens, accepted, None, 0.0, 0.0) for tokens, accepted in steps]

    monkeypatch.setattr(engines, "Speculator", Fake)
    two = len(job.prompts)
    for engine, second in (("", two), ("openvino", 0)):
        outcome = ours(job, tiny_target(), engine)
        assert (outcome.drafts, outcome.accepted) == (2 * two, [2 * two, second])


def test_openvino_gets_the_converted_head(job, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "converted", lambda head, folder, to, _: f"{folder}|{head}|{to}")
    monkeypatch.setattr(Target, "load", lambda *_, **__: tiny_target())
    job = replace(job, method="eagle3")
    (tmp_path / "openvino.py").write_text("""
import json, sys
job = json.load(open(sys.argv[1]))
json.dump({"version": job["head"] or "", "answers": [], "drafts": 0, "accepted": [], "seconds": 1},
          open(sys.argv[2], "w"))
""")
    assert theirs("openvino", sys.executable, job).version.endswith(f"/head|{job.head}|openvino")
    assert theirs("openvino", sys.executable, job.plain).version == ""


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_vllm_gets_the_checkpoint_of_a_run_folder(job, tmp_path, method):
    """It knows no run folders; a Hub id stays."""
    (tmp_path / "run").mkdir()
    (tmp_path / "head").rename(tmp_path / "run" / "step-000009")
    (tmp_path / "vllm.py").write_text("""
import json, sys
job = json.load(open(sys.argv[1]))
json.dump({"version": job["head"] or "", "answers": [], "drafts": 0, "accepted": [], "seconds": 1},
          open(sys.argv[2], "w"))
""")
    job = replace(job, method=method, head=str(tmp_path / "run"))
    assert theirs("vllm", sys.executable, job).version == str(tmp_path / "run" / "step-000009")
    assert theirs("vllm", sys.executable, replace(job, head="me/heads")).version == "me/heads"


def test_a_row_shows_what_differs(job, tmp_path):
    target = tiny_target()
    mine, plain = ours(job, target, "llamacpp"), ours(job.plain, target)
    (tmp_path / "plain.json").write_text(json.dumps(asdict(plain)))
    other = [[token + 1 for token in mine.answers[0]], mine.answers[1]]
    wrong = replace(mine, answers=other, drafts=mine.drafts + 1, version="fake 1")
    (tmp_path / "with.json").write_text(json.dumps(asdict(wrong)))
    found = row("llamacpp", "", job, target)
    assert (found["equal text"], found["equal text without head"]) == (1, 2)
    assert found["drafts"] == [mine.drafts, mine.drafts + 1]
    assert "| fake 1 |" in markdown([found])


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


def test_an_engine_that_fails_says_why(job, tmp_path):
    (tmp_path / "llamacpp.py").write_text("raise SystemExit('no such model')")
    with pytest.raises(ValueError, match="llamacpp failed:\nno such model"):
        theirs("llamacpp", "", job)


def test_methods_are_the_engines_names(job, tmp_path):
    target, found = tiny_target(), []
    for name in ("eagle", "eagle3", "block-none", "block-markov"):
        save_head(random_head(name, target), tmp_path / name, target=target)
        found.append(method(str(tmp_path / name)))
    assert found == ["eagle", "eagle3", "dspark", "dspark"]
    bare = random_head("block-none", target, sample_from_anchor=False)
    assert method(str(save_head(bare, tmp_path / "bare", target=target))) == "dflash"
    save_head(random_head("sequential", target), tmp_path / "other", target=target)
    with pytest.raises(ValueError, match="no engine runs sequential heads"):
        method(str(tmp_path / "other"))
