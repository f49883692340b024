"""The promise: mlx-vlm's drafters generate our text with our heads and accept the same drafts, but
for ties that are rounded otherwise.
Opt-in: `pytest -m engines`.

DRAFTHEADS_MLX: a Python with mlx-lm and mlx-vlm; scripts/benchmarks/engine_runs/install_mlx.sh
makes one, on Linux for its CPUs.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hybrid_targets import hybrid_model
from real_engines import place_of
from tiny_heads import random_head
from tiny_targets import VOCABULARY

from draftheads.heads.formats.hub import open_head, save_head
from draftheads.heads.target.model import Target
from draftheads.recipes import FOLDER as RECIPES
from draftheads.scripts.benchmarks.engines import Job, method, ours, theirs
from draftheads.scripts.openings import opening_ids

pytestmark = pytest.mark.engines
PLACE = place_of("mlx")
FEW = ("run.epochs=null", "run.steps=60", "head.vocabulary=null")
EAGLE = ("eagle3", *FEW)
BLOCK = ("block", *FEW, "head.mask=0")
BLOCK += ("head.lm_head=shared", "head.embeddings=shared")
DFLASH = ("head.conditioning=none", "head.sample_from_anchor=false")
YARN = "head.rope_scaling={rope_type: yarn, factor: 4.0, original_max_position_embeddings: 64}"
HEADS: dict[str, tuple[str, ...]] = {
    "eagle3": EAGLE,
    "eagle3-norms": (*EAGLE, "head.norm_before_fc=true", "head.norm_before_residual=true"),
    "eagle3-sizes": (*EAGLE, "head.heads=4", "head.kv_heads=1", "head.rope_theta=500.0"),
    "dflash": (*BLOCK, *DFLASH),
    "dflash-yarn": (*BLOCK, *DFLASH, YARN),
    "dspark": (*BLOCK, "head.conditioning=markov"),
    "dspark-none": (*BLOCK, "head.conditioning=none"),
    "dspark-own-slots": (*BLOCK, "head.conditioning=markov", "head.sample_from_anchor=false"),
}
"""Kinds of recipes, and what is set in them."""


@pytest.fixture(scope="module")
def plain(demo_target) -> Job:
    prompts = opening_ids(demo_target, str(RECIPES / "demo-prompts.jsonl"), 20)
    return Job(str(demo_target.name), prompts, eos=list(demo_target.eos_ids))


@pytest.mark.parametrize("name", HEADS)
def test_a_trained_head(name, trained, plain, demo_target):
    folder = trained(*HEADS[name]) / "best"
    kind, count = method(str(folder)), 3
    if kind != "eagle3":  # slots see each other, so a block is whole
        count = open_head(folder).read()[0].depth
    job = replace(plain, head=str(folder), method=kind, draft_tokens=count)
    mine, found = ours(job, demo_target), theirs("mlx", PLACE, job)
    print(f"\n{name}: {mine.drafts} / {found.drafts}, {mine.accepted} / {found.accepted}")
    assert found.answers == mine.answers == ours(plain, demo_target).answers
    # a draft whose two best logits differ by 8e-5 was seen to be rounded otherwise
    for counted, expected in zip(
        (found.drafts, *found.accepted), (mine.drafts, *mine.accepted), strict=True
    ):
        assert abs(counted - expected) <= mine.drafts / 100
    assert sum(found.accepted) > 0


def test_plain_text_is_ours(plain, demo_target):
    assert theirs("mlx", PLACE, plain).answers == ours(plain, demo_target).answers


# As checkpoints on the Hub have them; transformers does without.
OF_THE_HUB = {"qwen3.5": {"mrope_section": [1, 1, 0]}, "lfm2": {"block_dim": 32}}


@pytest.mark.parametrize("name", OF_THE_HUB)
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_hybrid_takes_back_what_was_rejected(tmp_path, name, kind):
    """With the target of mlx-vlm, and a random head, most of whose drafts are wrong."""
    hybrid_model(name).save_pretrained(tmp_path / name)
    file = tmp_path / name / "config.json"
    config = json.loads(file.read_text())
    section = config["rope_parameters"] if name == "qwen3.5" else config
    section.update(OF_THE_HUB[name])
    file.write_text(json.dumps(config))
    target = Target.load(tmp_path / name, dtype="float32")
    choices = (
        {"feature_layers": [1, 2, 3]}
        if kind == "eagle3"
        else {
            "feature_layers": [1, 2],
            "mask": 7,
            "conditioning": "markov",
            "lm_head": "shared",
            "embeddings": "shared",
        }
    )
    head = random_head(kind, target, **choices)
    save_head(head, tmp_path / "head", target=target)
    prompts = torch.randint(3, VOCABULARY, (6, 9)).tolist()
    job = Job(str(tmp_path / name), prompts, new_tokens=16, eos=list(target.eos_ids))
    drafts = 3 if kind == "eagle3" else head.depth
    method_of = replace(job, head=str(tmp_path / "head"), draft_tokens=drafts)
    job = replace(method_of, method=method(method_of.head))
    mine, found = ours(job, target), theirs("mlx", PLACE, job)
    assert found.answers == theirs("mlx", PLACE, job.plain).answers == mine.answers
    assert (found.drafts, found.accepted) == (mine.drafts, mine.accepted)
