"""The promise: the code that others publish loads what we export, finds all that it looks for, and
computes what we compute. Opt-in: set the variables below and run `pytest -m interop`.

DRAFTHEADS_SPECULATORS: a Python that has the `speculators` package; made so, without a GPU:

    python -m venv DIR && DIR/bin/pip install torch==2.13.0
    DIR/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    DIR/bin/pip install "transformers<5.16" "datasets<=5.1.0" "loguru<=0.7.3" pydantic \\
        pydantic-settings click safetensors rich tqdm typer httpx aiohttp openai protobuf psutil

DRAFTHEADS_INTEROP_HEAD: an EAGLE-3 head on the demo target that is exported too; default: random
ones alone.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chains import features_of, our_chain
from plain_hydra import awake
from safetensors.torch import load_file, save_file
from tiny_heads import make_head

from draftheads.heads.batch import Batch
from draftheads.heads.block import BlockHead
from draftheads.heads.eagle import Eagle3Head
from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.target.model import Target
from draftheads.heads.training_time_test import unroll
from draftheads.scripts.convert import converted

pytestmark = pytest.mark.interop
PYTHON, HEAD = "DRAFTHEADS_SPECULATORS", "DRAFTHEADS_INTEROP_HEAD"
DEMO = Path(__file__).parents[2] / "recipes" / "demo-target"
STEPS, TOKENS = 3, 40
USUAL = {"vocabulary": list(range(5, 900, 3))}
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": USUAL,
    "whole-vocabulary": {"vocabulary": None},
    "eagle-3.1": {**USUAL, "fc_norm": True, "norm_output": True},
    "before-fc": {**USUAL, "norm_before_fc": True, "norm_before_residual": True},
    "two-layers": {**USUAL, "layers": 2},
    "sizes": {**USUAL, "heads": 4, "kv_heads": 2, "head_dim": 24, "rope_theta": 500.0},
    "window": {**USUAL, "sliding_window": 9},
    "qwen3": {**USUAL, "qk_norm": True, "norm_before_residual": True, "head_dim": 24},
    "qwen3-two-layers": {**USUAL, "qk_norm": True, "layers": 2},
    "yarn": {
        **USUAL,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256
        },
    },
    "two-features": {**USUAL, "feature_layers": [2, 5]},
}  # fmt: skip

BLOCK = {"mask": 7, "rank": 16, "block_size": 6, "conditioning": "markov"}
BLOCKS: dict[str, dict[str, Any]] = {
    "markov": BLOCK,
    "rnn": {**BLOCK, "conditioning": "rnn", "confidence": True},
    "none": {**BLOCK, "conditioning": "none"},
    "dflash": {**BLOCK, "conditioning": "none", "sample_from_anchor": False},
    "dflash-markov": {**BLOCK, "sample_from_anchor": False},
    "reduced": {**BLOCK, **USUAL},
    "sizes": {**BLOCK, "heads": 4, "kv_heads": 2, "head_dim": 24, "rope_theta": 500.0, "layers": 1},
    "yarn": {**BLOCK, "rope_scaling": VARIANTS["yarn"]["rope_scaling"]},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load(str(DEMO), dtype="float32")


@pytest.fixture(scope="module")
def python() -> str:
    if PYTHON not in os.environ:
        pytest.skip(f"set {PYTHON}; the docstring of {Path(__file__).name} says how to make it")
    return os.environ[PYTHON]


def some_text(target: Target) -> tuple[Batch, torch.Tensor]:
    """One document of random tokens, and the target's states of it as a head reads them."""
    torch.manual_seed(0)
    tokens_BT = torch.randint(4, target.vocab_size, (1, TOKENS))
    places_BT = torch.arange(TOKENS)[None]
    loss_mask_BT = places_BT > 0  # the first token has no feature
    return Batch(tokens_BT, loss_mask_BT, places_BT, torch.zeros_like(tokens_BT)), tokens_BT


@torch.no_grad()
def our_logits(head: Eagle3Head, target: Target) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the other code is to read, and our logits (R, v) with the (step, row) of each."""
    batch, tokens_BT = some_text(target)
    features_BTD = target.features(batch, head.feature_layers)
    unrolled = unroll(head, batch, head.fuse(features_BTD), target, STEPS)
    logits_Rv = head.states(unrolled.hidden_RH) @ head.lm_head.weight.T
    rows_R = unrolled.places_R - 2 - unrolled.steps_R  # their row 0 is our pair 1
    out = torch.full((STEPS, TOKENS - 1, logits_Rv.shape[1]), torch.nan)
    out[unrolled.steps_R, rows_R] = logits_Rv
    return {
        "features": features_BTD[0, 1:].contiguous(),
        "tokens": tokens_BT[0, 1:].contiguous(),
    }, out


def compared(
    folder: Path, python: str, target: Target, tmp_path: Path, steps: int = STEPS
) -> float:
    """The greatest difference of logits; asserts that nothing was missing or unexpected."""
    head = load_head(folder, target=target)
    assert isinstance(head, Eagle3Head)
    theirs = converted(folder, tmp_path / "theirs", "speculators", target)
    inputs, ours = our_logits(head, target)
    others = their_logits(theirs, python, inputs, tmp_path)
    assert others.shape == ours.shape
    judged = ~ours.isnan()
    assert judged[:, :, 0].sum(1).tolist() == [TOKENS - 2 - step for step in range(STEPS)]
    return float((others - ours)[:steps][judged[:steps]].abs().max())


def their_logits(
    theirs: Path, python: str, inputs: dict[str, torch.Tensor], tmp_path: Path
) -> torch.Tensor:
    """What the other code computes; asserts that nothing was missing or unexpected."""
    save_file(inputs, tmp_path / "inputs.safetensors")
    script = Path(__file__).parents[1] / "helpers" / "interop_speculators.py"
    files = [str(tmp_path / f"{name}.safetensors") for name in ("inputs", "outputs")]
    ran = subprocess.run(
        [python, str(script), str(theirs), *files], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert not any(found.values()), found
    return load_file(files[1])["logits"]


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_speculators_drafts_our_blocks(tmp_path, python, target, name):
    torch.manual_seed(1)
    head = awake(make_head(BlockHead, target, **BLOCKS[name])).eval()
    ours = save_head(head, tmp_path / "ours", target=target)
    theirs = converted(ours, tmp_path / "theirs", "speculators", target)
    texts, features, logits = [], [], []
    for length in (2, 13, 30):
        prompt = torch.randint(4, target.vocab_size, (length,))
        drafts, scores = our_chain(head, target, prompt)
        read_TX = features_of(target, prompt, head.feature_layers)[0, 1:]  # after each token
        padding = TOKENS - length - len(drafts)
        texts.append(F.pad(torch.cat([prompt, torch.tensor(drafts)]), (0, padding)))
        features.append(F.pad(read_TX, (0, 0, 0, TOKENS - len(read_TX))))
        logits.append(scores)
    inputs = {"features": torch.stack(features), "tokens": torch.stack(texts)}
    inputs["anchors"] = torch.tensor([1, 12, 29])
    others = their_logits(theirs, python, inputs, tmp_path)[:, -head.depth :]
    difference = float((others - torch.stack(logits)).abs().max())
    print(f"\n{name}: logits differ by at most {difference:.1e}")
    assert difference < 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_speculators_loads_what_we_export_and_gives_our_logits(tmp_path, python, target, name):
    torch.manual_seed(1)
    head = awake(make_head(Eagle3Head, target, **VARIANTS[name])).eval()
    ours = save_head(head, tmp_path / "ours", target=target)
    # its window does not move on with the steps, as that of engines and ours does
    difference = compared(ours, python, target, tmp_path, steps=1 if name == "window" else STEPS)
    print(f"\n{name}: logits differ by at most {difference:.1e}")
    assert difference < 1e-4


@pytest.mark.mend("speculators' default EAGLE-3")
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_what_speculators_saves_is_read(tmp_path, python, target, model_type):
    """Qwen3's layer is its default."""
    script = Path(__file__).parents[1] / "helpers" / "interop_speculators.py"
    made = tmp_path / "made"
    command = [python, str(script), "make", str(made), str(DEMO), model_type]
    subprocess.run(command, capture_output=True, check=True)
    head = load_head(made, target=target)
    assert isinstance(head, Eagle3Head) and head.design.qk_norm == (model_type == "qwen3")
    inputs, ours = our_logits(head, target)
    others = their_logits(made, python, inputs, tmp_path)
    judged = ~ours.isnan()
    difference = float((others - ours)[judged].abs().max())
    print(f"\n{model_type}: logits differ by at most {difference:.1e}")
    assert difference < 1e-4


def test_speculators_loads_a_trained_head(tmp_path, python, target):
    if HEAD not in os.environ:
        pytest.skip(f"set {HEAD} to a head that `make demo` trained")
    difference = compared(Path(os.environ[HEAD]), python, target, tmp_path)
    print(f"\n{os.environ[HEAD]}: logits differ by at most {difference:.1e}")
    assert difference < 1e-4
