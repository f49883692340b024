"""The promise: OpenVINO GenAI generates our text with our EAGLE-3 and DFlash heads and accepts the
same drafts, as a chain and of EAGLE-3 as a dynamic tree.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from real_engines import place_of

from draftheads.heads.formats.hub import open_head
from draftheads.scripts.benchmarks.engines import Job, Outcome, ours, theirs
from draftheads.scripts.demo import RECIPES
from draftheads.scripts.openings import opening_ids

pytestmark = pytest.mark.engines
PLACE = place_of("openvino")
TREE = {"nodes": 16, "depth": 4, "top_k": 3}
SHORT = ["run.epochs=1.0", "head.vocabulary=null"]
SIZES = ["head.heads=4", "head.kv_heads=1", "head.head_dim=16", "head.feature_layers=[2,3,4]"]
HEADS = {"reduced": [], "full": SHORT, "sizes": [*SHORT, *SIZES]}
DFLASH = ["run.epochs=null", "run.steps=60", "head.vocabulary=null", "head.lm_head=shared"]
DFLASH += ["head.embeddings=shared", "head.conditioning=none", "head.sample_from_anchor=false"]
BLOCKS = {"dflash": ["head.mask=0"], "window": ["head.mask=0", "head.sliding_window=9"]}


@pytest.fixture(scope="module")
def job(demo_target) -> Job:
    prompts = opening_ids(demo_target, str(RECIPES / "demo-prompts.jsonl"), None, 24)
    return Job(str(demo_target.name), prompts, method="eagle3")


@pytest.fixture(scope="module")
def plain(job, demo_target) -> Outcome:
    return ours(job.plain, demo_target)


def same(mine: Outcome, their: Outcome, plain: Outcome, eos: list[int]) -> None:
    assert their.equal(plain, eos) == len(plain.answers)
    assert (their.drafts, their.accepted) == (mine.drafts, mine.accepted)
    assert sum(their.accepted) > their.drafts / 2  # or it would not tell much


def test_plain_text_is_ours(job, plain, demo_target):
    eos = list(demo_target.eos_ids)
    assert theirs("openvino", PLACE, job.plain).equal(plain, eos) == len(job.prompts)


@pytest.mark.parametrize("name", HEADS)
def test_a_chain_is_accepted_as_ours(job, plain, demo_target, trained, name):
    chain = replace(job, head=str(trained("eagle3", *HEADS[name])))
    mine = ours(chain, demo_target, "openvino")
    same(mine, theirs("openvino", PLACE, chain), plain, list(demo_target.eos_ids))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_accepted_as_ours(job, plain, demo_target, trained, name):
    folder = trained("block", *DFLASH, *BLOCKS[name]) / "best"
    count = open_head(folder).read()[0].depth  # slots see each other, so a block is whole
    block = replace(job, head=str(folder), method="dflash", draft_tokens=count)
    mine, their = ours(block, demo_target, "openvino"), theirs("openvino", PLACE, block)
    assert their.equal(plain, list(demo_target.eos_ids)) == len(plain.answers)
    assert (their.drafts, their.accepted) == (mine.drafts, mine.accepted)
    assert sum(their.accepted) > 0


def test_a_dynamic_tree_is_accepted_as_ours(job, plain, demo_target, trained):
    tree = replace(job, head=str(trained("eagle3")), tree=TREE)
    mine = ours(tree, demo_target, "openvino")
    same(mine, theirs("openvino", PLACE, tree), plain, list(demo_target.eos_ids))
