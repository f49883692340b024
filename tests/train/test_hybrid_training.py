"""The promise: heads of a hybrid target learn the same however its documents are packed, on any
number of processes, and after an interruption.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from hybrid_targets import MULTIMODAL, hybrid_model, multimodal_model
from launching import outputs_of_two_forks
from tiny_heads import decode
from tiny_targets import some_prompts
from tiny_training import random_answers, tiny_recipe, weights, write_answers
from transformers import GenerationConfig

from draftheads.heads.batch import Batch
from draftheads.heads.formats.hub import load_head
from draftheads.heads.target import packing
from draftheads.heads.target.model import Target
from draftheads.heads.target.packing import groups, unpacked_rows
from draftheads.train.data.answers import Answer
from draftheads.train.medusa import main
from draftheads.train.metrics import read_metrics

FAMILIES = ("qwen3.5", "lfm2", "nemotron-h")


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory) -> Path:
    """A hybrid target, and documents of 5 to 40 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    model = hybrid_model(request.param)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    model.save_pretrained(folder / "target")
    vocabulary = model.config.vocab_size
    answers = [
        Answer([token % vocabulary for token in answer.tokens], answer.learn)
        for answer in random_answers(60)
    ]
    write_answers(folder / "data", answers)
    return folder


def recipe_for(made: Path, output: Path, **data: object) -> Path:
    values = tiny_recipe(made, output=str(output), save_every=3)
    values["data"] |= data
    path = output.parent / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_packed_rows_teach_what_documents_teach_alone(made, tmp_path):
    """A step that holds all documents has one loss and one gradient."""
    found = []
    for pack in (True, False):
        output = tmp_path / f"pack-{pack}"
        recipe = recipe_for(made, output, pack=pack, rows_per_batch=1)
        assert main([str(recipe), "run.steps=1", "run.tokens_per_step=100000"]) == 0
        found.append(read_metrics(output)[0])
    for key in ("loss", "gradient_norm"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-4)


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_checkpoints_of_models_that_see_are_used_for_text_as_they_are(kind, tmp_path):
    model, prompt = multimodal_model(kind), some_prompts(9)[0]
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    model.save_pretrained(tmp_path / "target")
    out = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    target = Target.load(tmp_path / "target")
    text = decode(target, None, [prompt], max_new_tokens=20)[0][0]
    assert text == out[0, len(prompt) :].tolist()
    write_answers(tmp_path / "data", [Answer(prompt + text, [(len(prompt), 29)])] * 20)
    values = tiny_recipe(tmp_path, "eagle3", steps=1)
    del values["head"]["vocabulary"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    head = load_head(tmp_path / "run")
    assert decode(target, head, [prompt], max_new_tokens=20)[0][0] == text


@pytest.mark.slow
@pytest.mark.parametrize("made", ["qwen3.5"], indirect=True)
def test_two_processes_train_as_one(made, tmp_path):
    """Where they divide the target, both must run as many passes."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([str(recipe_for(made, one, rows_per_batch=1))]) == 0
    recipe = recipe_for(made, two, rows_per_batch=1)
    outputs_of_two_forks(tmp_path, "train/medusa.py", str(recipe), "target_placement=sharded")
    for single, shared in zip(read_metrics(one), read_metrics(two), strict=True):
        for key in single.keys() & {"loss", "gradient_norm", "chain"}:
            assert shared[key] == pytest.approx(single[key], rel=1e-4)
    left, right = weights(one, 6), weights(two, 6)
    assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in left)


def batch_of(*rows: tuple[int, ...]) -> Batch:
    """Rows of documents of these lengths, padded on the right."""
    width = max(map(sum, rows))
    documents_BT = torch.full((len(rows), width), -1)
    positions_BT = torch.zeros(len(rows), width, dtype=torch.long)
    for row, lengths in enumerate(rows):
        at = 0
        for number, length in enumerate(lengths):
            documents_BT[row, at : at + length] = number
            positions_BT[row, at : at + length] = torch.arange(length)
            at += length
    tokens_BT = torch.arange(len(rows) * width).view(len(rows), width)
    return Batch(tokens_BT, documents_BT >= 0, positions_BT, documents_BT)


def test_documents_of_similar_length_run_together(monkeypatch):
    monkeypatch.setattr(packing, "SIMILAR", 0.75)
    batch = batch_of((8, 3, 1), (6, 2, 4), (8,))
    together = groups(batch, 20)
    lengths = [[stop - start for _, start, stop in group] for group in together]
    assert lengths == [[8, 8], [6], [4, 3], [2], [1]]
    rows = unpacked_rows(batch, together[2])
    assert rows.tokens_BT.tolist() == [[20, 21, 22, 23], [8, 9, 10, 0]]
    assert rows.positions_BT.tolist() == [[0, 1, 2, 3]] * 2
