"""The promise: vLLM itself runs our heads as we do: the text of plain greedy decoding, as many
verified drafts, and as many accepted tokens at each position. Opt-in: `pytest -m engines`.

DRAFTHEADS_VLLM: a Python with vLLM 0.32 for CPUs; scripts/benchmarks/engine_runs/install_vllm.sh
makes one. Its CPU build has no DSpark (Model Runner V2 needs Triton) and no tree.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines import place_of

from draftheads.heads.formats.hub import open_head
from draftheads.scripts.benchmarks.engines import Job, method, ours, theirs
from draftheads.scripts.convert import converted
from draftheads.scripts.demo import RECIPES
from draftheads.scripts.openings import opening_ids
from draftheads.scripts.publish import prepare, publish

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]
PLACE = place_of("vllm")
PROMPTS = 20
FEW = ("run.epochs=null", "run.steps=200")
DFLASH = ("head.conditioning=none", "head.sample_from_anchor=false", "head.mask=0", *FEW)
HEADS: dict[str, tuple[str, ...]] = {
    "eagle3": ("eagle3",),
    "eagle3.1": ("eagle3", "head.fc_norm=true", "head.norm_output=true", *FEW),
    "eagle": ("eagle3", "head.kind=eagle", *FEW),
    "medusa": ("medusa", "head.vocabulary=null", *FEW),
    "dflash": ("block", *DFLASH),
    "dflash-window": ("block", *DFLASH, "head.sliding_window=9"),
}
"""Kinds of recipes, and what is set in them."""


@pytest.fixture(scope="module")
def plain(demo_target) -> Job:
    prompts = opening_ids(demo_target, str(RECIPES / "demo-prompts.jsonl"), None, PROMPTS)
    return Job(demo_target.name, prompts)


@pytest.fixture(scope="module")
def plain_answers(plain, demo_target) -> list[list[int]]:
    return ours(plain, demo_target).answers


def job_of(head: str, plain: Job, like: Path) -> Job:
    """A chain of three, or, as blocks end with vLLM's chain, a whole block."""
    kind = method(str(like))
    count = open_head(like).read()[0].depth if kind == "dflash" else 3
    return Job(plain.target, plain.prompts, head, kind, count)


def check(job: Job, mine: Job, target, answers: list[list[int]]) -> None:
    """vLLM's job has the answers, and the counts of ours."""
    expected, found = ours(mine, target), theirs("vllm", PLACE, job)
    assert found.answers == expected.answers == answers
    assert (found.drafts, found.accepted) == (expected.drafts, expected.accepted)
    assert sum(found.accepted) > 0


@pytest.mark.parametrize("name", HEADS)
def test_a_trained_head(name, trained, plain, plain_answers, demo_target):
    folder = trained(*HEADS[name]) / "best"
    job = job_of(str(folder), plain, folder)
    check(job, job, demo_target, plain_answers)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_speculators_folder(name, trained, plain, plain_answers, demo_target, tmp_path):
    folder = trained(*HEADS[name]) / "best"
    made = converted(folder, tmp_path / "theirs", "speculators", demo_target)
    mine = job_of(str(folder), plain, folder)
    check(job_of(str(made), plain, folder), mine, demo_target, plain_answers)


def test_a_published_head_by_its_id(hub, trained, plain, plain_answers, demo_target, monkeypatch):
    folder = trained(*HEADS["eagle3"]) / "best"
    publish(prepare(folder, "me/heads"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(folder.parent / "hub"))
    job = job_of("me/heads", plain, folder)
    check(job, job_of(str(folder), plain, folder), demo_target, plain_answers)
    assert any("model.safetensors" in request for request in hub.requests)
