"""The promise: vLLM itself runs our heads as we do: the text of plain greedy decoding, as many
verified drafts, and as many accepted tokens at each position. Opt-in: `pytest -m engines`.

DRAFTHEADS_VLLM: a Python with vLLM 0.32 for CPUs; scripts/benchmarks/engine_runs/install_vllm.sh
makes one. Its CPU build has no DSpark (Model Runner V2 needs Triton) and no tree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from real_engines import place_of
from safetensors.torch import load_file, save_file

from draftheads.heads.formats.hub import open_head
from draftheads.heads.mtp.head import MtpHead
from draftheads.heads.target.model import Target
from draftheads.recipes import FOLDER as RECIPES
from draftheads.scripts.benchmarks.engines import Job, method, ours, theirs
from draftheads.scripts.convert import converted
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
    prompts = opening_ids(demo_target, str(RECIPES / "demo-prompts.jsonl"), PROMPTS)
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
    print(f"\n{found.version}: {found.drafts} drafts, accepted {found.accepted}")
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


# EAGLE-3 with Qwen3's layer, on a Qwen3 target

SHORT = ("run.epochs=null", "run.steps=60")
BEFORE = "head.norm_before_residual=true"  # as speculators trains them
QK_NORM = ("eagle3", "head.qk_norm=true")
QWEN3: dict[str, tuple[str, ...]] = {
    "usual": (*QK_NORM, BEFORE, *FEW),
    "full": (*QK_NORM, BEFORE, "head.vocabulary=null", "head.heads=4", "head.kv_heads=1", *SHORT),
    "layers": (*QK_NORM, "head.layers=2", "head.sliding_window=9", *SHORT),
    "norms": (*QK_NORM, BEFORE, "head.fc_norm=true", "head.norm_output=true", *SHORT),
    "five": (*QK_NORM, "head.vocabulary=null", "head.feature_layers=[1,2,3,4,5]", *SHORT),
}


@dataclass(frozen=True)
class Qwen3:
    """The demo target's weights as a Qwen3 model, and its text."""

    target: Target
    plain: Job
    answers: list[list[int]]

    def check(self, made: Path, head: Path) -> None:
        """vLLM runs one folder as we run the other."""
        job, mine = (job_of(str(folder), self.plain, head) for folder in (made, head))
        check(job, mine, self.target, self.answers)


@pytest.fixture(scope="module")
def qwen3(relative) -> Qwen3:
    target = relative("qwen3")
    prompts = opening_ids(target, str(RECIPES / "demo-prompts.jsonl"), PROMPTS)
    plain = Job(target.name, prompts)
    return Qwen3(target, plain, ours(plain, target).answers)


def architecture(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["architectures"][0]


def as_vllm_runs_glm(monkeypatch) -> None:
    """vLLM leaves out the embedding of a text's first pair, and feeds GLM's layer its own output
    before the norm (models/glm4_moe_mtp.py).
    """
    advance = MtpHead.advance

    def masked(self, embedded_BQD, hidden_BQD, angles, memories):
        norm = self.post_norm
        self.post_norm = torch.nn.Identity()
        embedded_BQD = torch.where(angles[0][:, 0] == 0, 0, embedded_BQD)
        out_BQD = advance(self, embedded_BQD, hidden_BQD, angles, memories)
        self.post_norm = norm
        return out_BQD

    monkeypatch.setattr(MtpHead, "advance", masked)
    monkeypatch.setattr(MtpHead, "states", lambda self, out_BQD: self.post_norm(out_BQD))


@pytest.mark.parametrize("count", [1, 3])
def test_multi_token_prediction_in_its_targets_folder(count, relative, trained, monkeypatch):
    target = relative("glm4_moe")
    folder = trained("mtp", *FEW, target=target) / "best"
    prompts = opening_ids(target, str(RECIPES / "demo-prompts.jsonl"), PROMPTS)
    plain = Job(target.name, prompts)
    job = replace(plain, head=str(folder), method="mtp", draft_tokens=count)
    answers = ours(plain, target).answers
    usual = ours(job, target)
    print(f"\nours: {usual.drafts} drafts, accepted {usual.accepted}")
    as_vllm_runs_glm(monkeypatch)
    check(job, job, target, answers)


@pytest.mark.parametrize("name", ["usual", "full", "layers", "norms"])
def test_a_head_with_qwen3s_layer(name, trained, qwen3, tmp_path):
    folder = trained(*QWEN3[name], target=qwen3.target) / "best"
    made = converted(folder, tmp_path / "theirs", "vllm", qwen3.target)
    assert architecture(made) == "Eagle3Qwen3ForCausalLM"
    qwen3.check(made, folder)


def test_a_speculators_folder_with_qwen3s_layer(trained, qwen3, tmp_path):
    """vLLM and we read the same folder."""
    folder = trained(*QWEN3["usual"], target=qwen3.target) / "best"
    made = converted(folder, tmp_path / "theirs", "speculators", qwen3.target)
    qwen3.check(made, made)


def test_deepspecs_head_with_qwen3s_layer(trained, qwen3, tmp_path):
    """We read its layout, of five features, and vLLM what we make of it."""
    folder = deepspec(trained(*QWEN3["five"], target=qwen3.target) / "best", tmp_path / "theirs")
    made = converted(folder, tmp_path / "made", "vllm", qwen3.target)
    assert architecture(made) == "Eagle3Qwen3ForCausalLM"
    qwen3.check(made, folder)


def deepspec(head: Path, folder: Path) -> Path:
    """A head of one layer as DeepSpec stores it: features by the layers whose outputs they are, and
    none of our keys.
    """
    ours = json.loads((head / "config.json").read_text())
    config = {
        **ours["transformer_layer_config"],
        "architectures": ["Qwen3Eagle3Model"],
        "target_layer_ids": [layer - 1 for layer in ours["eagle_aux_hidden_state_layer_ids"]],
    }
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(renamed, folder / "model.safetensors")
    return folder
