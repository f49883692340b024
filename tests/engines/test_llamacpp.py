"""The promise: llama.cpp's server writes our greedy text with our heads, and verifies and accepts
what our chain does, to the last draft; and a head serves a quantised target as well.

DRAFTHEADS_LLAMACPP: a folder that scripts/benchmarks/engine_runs/install_llamacpp.sh made. Numbers
are printed with -s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines import place_of

from draftheads.heads.block import BlockHead
from draftheads.heads.formats.hub import load_head, open_head, save_head
from draftheads.heads.formats.llamacpp import server_options
from draftheads.heads.target.model import Target
from draftheads.infer.measure.llamacpp import serving
from draftheads.infer.remote import ServerOptions
from draftheads.recipes import FOLDER as RECIPES
from draftheads.scripts.benchmarks.engine_runs.llamacpp import (
    EXACT,
    EXACT_DRAFTS,
    PROGRAM,
    SAFE,
    end_tokens,
    head_gguf,
    target_gguf,
)
from draftheads.scripts.benchmarks.engines import Job, markdown, method, ours, row, theirs
from draftheads.scripts.openings import opening_ids
from draftheads.scripts.publish import prepare, publish
from draftheads.train.advice.doctor import Evidence
from draftheads.train.advice.engine import first_difference
from draftheads.train.data.distill import DistillOptions, distill
from draftheads.train.data.prompts import read_prompts
from draftheads.train.data.server import ServedTarget
from draftheads.train.medusa import fit
from draftheads.train.recipe import load_recipe

PLACE = place_of("llamacpp")
pytestmark = pytest.mark.engines
SHORT = ("run.epochs=null", "run.steps=200")
YARN = "head.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 256}"
SWITCHES = ("head.norm_before_fc=true", "head.norm_before_residual=true")
BLOCK = (*SHORT, "head.mask=1")
DFLASH = ("head.conditioning=none", "head.sample_from_anchor=false")
HEADS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "eagle3": (3, "eagle3", ()),
    "eagle3-long": (6, "eagle3", ()),
    "eagle3-other": (4, "eagle3", (*SHORT, *SWITCHES, YARN, "head.feature_layers=[0,2,4]")),
    "dspark": (7, "block", (*BLOCK, "head.conditioning=markov")),
    "dspark-bare": (7, "block", (*BLOCK, "head.conditioning=none", "head.confidence=true")),
    "dspark-window": (
        6,
        "block",
        (*BLOCK, "head.conditioning=markov", "head.sample_from_anchor=false")
        + (YARN, "head.sliding_window=12"),
    ),
    "dflash": (6, "block", (*BLOCK, *DFLASH)),
    "dflash2": (6, "block", (*BLOCK, *DFLASH, "head.vocabulary=null")),
}
"""Draft tokens, recipe of the demo, choices. Shorter blocks of llama.cpp's are not ours."""


def agrees(job: Job, target: Target) -> None:
    found = row("llamacpp", PLACE, job, target)
    print(f"\n{markdown([found])}")
    assert len(job.prompts) >= 20
    assert found["equal text"] == found["equal text without head"] == len(job.prompts)
    for mine, their in (found["drafts"], found["accepted"]):
        assert mine == their
    assert found["accepted"][0][0] > 0


def job_of(target: Target, prompts: Any, head: Path, drafts: int) -> Job:
    ids = opening_ids(target, str(prompts), 24)
    return Job(str(target.name), ids, str(head), method(str(head)), drafts, 48)


@pytest.mark.parametrize("name", HEADS)
def test_the_demo_agrees_to_the_last_draft(demo_target, trained, tmp_path, name):
    drafts, kind, choices = HEADS[name]
    head = trained(kind, *choices)
    if name == "dflash2":
        head = with_a_selector(head, demo_target, tmp_path / "dflash2")
    agrees(job_of(demo_target, RECIPES / "demo-prompts.jsonl", head, drafts), demo_target)


def with_a_selector(folder: Path, target: Target, path: Path) -> Path:
    """The head with convolutions and a selector, drawn so small that its drafts stay good. The
    target's width has room for the scores of 12 x 13 pairs in llama.cpp, not for 16 x 17.
    """
    head: Any = load_head(folder, target=target)
    other = BlockHead(replace(head.design, rank=8, candidates=12, convolutions=True))
    torch.manual_seed(0)
    for parameter_name, parameter in other.named_parameters():
        torch.nn.init.normal_(parameter, std=0.05 if "_conv" in parameter_name else 0.5)
        if parameter_name.endswith("base_kernel"):
            parameter.data[:, 0] += 1
    other.load_state_dict(head.state_dict(), strict=False)
    other.tree = head.tree
    return save_head(other, path, target=target)


@pytest.mark.parametrize("drafts", [1, 3])
def test_multi_token_prediction_in_its_targets_file(relative, trained, drafts):
    """Its layer reads one pair more than ours: a request's first token, with zeros or the last
    state of the request before.
    """
    target = relative("glm4_moe")
    head = trained("mtp", *SHORT, target=target)
    job = job_of(target, RECIPES / "demo-prompts.jsonl", head, drafts)
    found = row("llamacpp", PLACE, job, target)
    print(f"\n{markdown([found])}")
    assert found["equal text"] == found["equal text without head"] == len(job.prompts)
    mine, their = found["accepted"]
    assert found["drafts"][1] == pytest.approx(found["drafts"][0], rel=0.02)
    assert their == pytest.approx(mine, rel=0.05, abs=2) and mine[0] > 0


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_requests_decoded_together_get_drafts_of_their_own(demo_target, trained, kind):
    """With -np 4. Without --no-spec-draft-backend-sampling, EAGLE-3 heads had 138, 85, 56 accepted
    tokens in place of 233, 150, 100.
    """
    head = trained(kind, *(HEADS["dspark"][2] if kind == "block" else ()))
    drafts = 3 if kind == "eagle3" else 7
    job = job_of(demo_target, RECIPES / "demo-prompts.jsonl", head, drafts)
    agrees(replace(job, slots=4), demo_target)


def test_a_sentencepiece_target_agrees_to_the_last_draft(stories, tmp_path):
    target, text = Target.load(stories, dtype="float32"), stories.parent / "tinystories"
    lines = (text / "train.txt").read_text().splitlines()
    openings = tmp_path / "ten-words.txt"
    openings.write_text("\n".join(" ".join(line.split()[:10]) for line in lines if line.strip()))
    distill(
        target,
        read_prompts(openings, limit=300),
        DistillOptions(out=tmp_path / "data", max_new_tokens=100),
    )
    places = (f"target={stories}", f"data.path={tmp_path / 'data'}", f"run.output={tmp_path}/head")
    fit(load_recipe(RECIPES / "stories260k-eagle3.yaml", [*places, "run.steps=60"]))
    agrees(job_of(target, openings, tmp_path / "head", 3), target)


def test_a_published_head_by_its_id(hub, demo_target, trained, tmp_path, monkeypatch):
    head = trained("eagle3")
    publish(prepare(head, "me/heads"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    job = job_of(demo_target, RECIPES / "demo-prompts.jsonl", head, 3)
    mine, found = ours(job, demo_target, "llamacpp"), replace(job, head="me/heads")
    their = theirs("llamacpp", PLACE, found)
    assert their.equal(mine, demo_target.eos_ids) == len(job.prompts)
    assert (their.drafts, their.accepted) == (mine.drafts, mine.accepted)
    assert any("model.safetensors" in request for request in hub.requests)


def test_a_head_serves_a_quantised_target_as_well(demo_target, trained, tmp_path):
    """Trained on float32 states, and used on those of 8 bits."""
    job = job_of(demo_target, RECIPES / "demo-prompts.jsonl", trained("eagle3"), 3)
    whole = target_gguf(job.target, tmp_path)
    small = tmp_path / "small.gguf"
    quantize = [f"{PLACE}/llama-quantize", whole, small, "Q8_0"]
    subprocess.run(quantize, check=True, capture_output=True)
    plain, found = (
        theirs("llamacpp", PLACE, replace(job, target=str(file))) for file in (whole, small)
    )
    for outcome in (plain, found):
        print(outcome.version, outcome.drafts, outcome.accepted, f"{outcome.rate:.1f} tokens/s")
    rates = [sum(each.accepted) / each.drafts for each in (plain, found)]
    assert rates[1] > 0.9 * rates[0]


def test_the_doctor_names_what_a_server_does_otherwise(demo_target, trained, tmp_path):
    """Nothing while it runs the head, then that it runs none, drafts shorter chains, or reads other
    layers of the target.
    """
    folder = open_head(trained("eagle3"))
    head = folder.load(demo_target)
    other = Path(shutil.copytree(folder.path, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    layers = [layer - 1 for layer in head.feature_layers]
    config["draftheads"]["feature_layers"] = config["eagle_aux_hidden_state_layer_ids"] = layers
    (other / "config.json").write_text(json.dumps(config))
    prompts = opening_ids(demo_target, str(RECIPES / "demo-prompts.jsonl"), 24)
    evidence = Evidence(demo_target, head, folder.facts, prompts)
    target = target_gguf(str(demo_target.name), tmp_path)
    options = ["-m", target, "-np", 1, "-c", 1024, "-t", 1, *EXACT, *SAFE]
    options += server_options("eagle3", end_tokens(str(demo_target.name)))
    whole = head_gguf(str(folder.path), target, tmp_path)
    for file, chain, check in (
        (whole, head.depth, None),
        (None, 0, "speculation"),
        (whole, 2, "draft length"),
        (head_gguf(str(other), target, other), head.depth, "acceptance"),
    ):
        drafts: list[object] = []
        if file:
            drafts += ["-md", file, *EXACT_DRAFTS]
            drafts += ["--spec-type", "draft-eagle3", "--spec-draft-n-max", chain]
        with serving(PROGRAM, [*options, *drafts]) as server:
            served = ServedTarget(str(demo_target.name), ServerOptions(urls=[server.url]))
            finding = first_difference(evidence, served)
        print(f"\n{finding}")
        assert check == (finding.check if finding else None)
