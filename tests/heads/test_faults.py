"""The promise: a fault in a head, or in what it is fed, never changes the output, and is seen in
the tokens per step.

Each fault is planted in a head that knows a text by heart, or in its saved folder; without it, all
its drafts are accepted.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import Recorder, decode, misread_drafts, overfitted, written_by
from tiny_training import VOCABULARY, tiny_model

from draftheads.heads.formats.hub import load_head, save_head
from draftheads.heads.target.model import Target

PROMPTS = [[32, 22, 86, 87, 72, 5], [55, 0, 38, 81, 26, 6]]  # the answers to these are no loops
PADDED = 2 * VOCABULARY + 62  # so large that a wrong draft vocabulary is one of the target's still
DEPTH = 4
NEW = 1 + 17 * (DEPTH + 1)  # the prefill's token and full steps
CLEARLY = 0.75
"""Of the tokens per step, this share at most is left by each of the faults."""


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model()
    model.resize_token_embeddings(PADDED, mean_resizing=False)
    return Target(model, name="tiny-padded")


@pytest.fixture(scope="module")
def texts(target):
    return written_by(target, PROMPTS, NEW + 2)


@pytest.fixture(scope="module")
def good(tmp_path_factory, target, texts) -> Path:
    """The head's folder. Its RoPE base is one that the field's loaders do not assume."""
    words = sorted(set(texts.tokens_BT[texts.loss_mask_BT].tolist()))
    assert 30 < len(words) < VOCABULARY and words != list(range(len(words)))
    head = overfitted(
        "eagle3",
        target,
        texts,
        updates=60,
        vocabulary=words,
        feature_layers=[0, 1, 2],
        rope_theta=500000.0,
        **{"nodes": 24, "depth": DEPTH, "top_k": 3},
    )
    return save_head(head, tmp_path_factory.mktemp("faults") / "head", target=target)


@pytest.fixture
def folder(good, tmp_path) -> Path:
    """A copy to plant a fault in."""
    return Path(shutil.copytree(good, tmp_path / "head"))


def tokens_per_step(target: Target, texts, drafts, tree) -> float:
    """Of both rows together; the output must be the target's own."""
    rows, statistics = decode(target, drafts, PROMPTS, tree=tree, max_new_tokens=NEW)
    start = len(PROMPTS[0])
    assert rows == texts.tokens_BT[:, start : start + NEW].tolist()
    return sum(row.tokens for row in statistics) / sum(row.steps for row in statistics)


def plant_draft_ids(tensors, ids) -> None:
    """Other ids, in `t2d` as well: no check of the two against each other would notice."""
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(PADDED, dtype=torch.bool).index_fill(0, ids, True)


def absolute_ids(config, tensors) -> None:
    """`d2t` read as offsets, though it holds the ids themselves."""
    plant_draft_ids(tensors, tensors["d2t"] + 2 * torch.arange(len(tensors["d2t"])))


def ids_one_too_high(config, tensors) -> None:
    plant_draft_ids(tensors, tensors["d2t"] + torch.arange(len(tensors["d2t"])) + 1)


def ids_shifted_by_one_place(config, tensors) -> None:
    plant_draft_ids(tensors, (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).roll(1))


def other_rope_base(config, tensors) -> None:
    config["rope_theta"] = 10000.0


def rope_base_left_out(config, tensors) -> None:
    """As in checkpoints of the field, whose loaders then take 10000."""
    del config["rope_theta"]


def rope_scaling_too_much(config, tensors) -> None:
    config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}


def plant_layers(config, layers) -> None:
    config["draftheads"]["feature_layers"] = layers
    config["eagle_aux_hidden_state_layer_ids"] = layers


def features_swapped(config, tensors) -> None:
    plant_layers(config, [0, 2, 1])


def features_reversed(config, tensors) -> None:
    plant_layers(config, [2, 1, 0])


def layers_counted_from_outputs(config, tensors) -> None:
    """SGLang's numbers, taken for indices into hidden states."""
    plant_layers(config, [layer - 1 for layer in config["eagle_aux_hidden_state_layer_ids"]])


FAULTS = [
    absolute_ids,
    ids_one_too_high,
    ids_shifted_by_one_place,
    other_rope_base,
    rope_base_left_out,
    rope_scaling_too_much,
    features_swapped,
    features_reversed,
    layers_counted_from_outputs,
]


def test_without_a_fault_every_draft_is_accepted(target, texts, good):
    head = load_head(good, target=target)
    assert tokens_per_step(target, texts, head, head.tree) == DEPTH + 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_the_folder_costs_tokens_per_step_and_no_output(target, texts, folder, fault):
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    fault(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    head = load_head(folder, target=target)
    assert tokens_per_step(target, texts, head, head.tree) < CLEARLY * (DEPTH + 1)


class Misaligned(Recorder):
    """Features that belong to the token before: the alignment law broken by one."""

    def propose(self, committed):
        features_BCD = committed.features_BCD.roll(1, dims=1)
        return super().propose(replace(committed, features_BCD=features_BCD))


def test_features_of_the_wrong_token_cost_tokens_per_step_and_no_output(target, texts, good):
    head = load_head(good, target=target)

    def misaligned() -> Misaligned:
        return Misaligned(head.drafter(target), [])

    assert tokens_per_step(target, texts, misaligned, head.tree) < CLEARLY * (DEPTH + 1)


def test_positions_that_are_all_shifted_cost_nothing(target, texts, good):
    """RoPE is relative, so this is no fault: positions may be counted from 0 or from 1."""
    head = load_head(good, target=target)
    rope = head.rope
    head.rope = lambda positions_BQ: rope(positions_BQ + 1)
    assert tokens_per_step(target, texts, head, head.tree) == DEPTH + 1


@pytest.fixture(scope="module")
def good_sequential(tmp_path_factory, target, texts) -> Path:
    """The folder of a head that reads the whole text, the root and the drafts behind it."""
    choices = {"conditioning": "recurrent", "rank": 32, "prefix": True, "lm_head": "shared"}
    tree = {"nodes": 8, "depth": DEPTH, "top_k": 2}
    head = overfitted("sequential", target, texts, updates=40, **choices, **tree)
    return save_head(head, tmp_path_factory.mktemp("faults") / "head", target=target)


def embeddings_of_wrong_rows(monkeypatch, head) -> None:
    embed = head.embed
    monkeypatch.setattr(head, "embed", lambda tokens, target: embed((tokens + 1) % PADDED, target))


def other_tokens_than_were_drafted(monkeypatch, head) -> None:
    misread_drafts(monkeypatch)


def features_in_the_prefix_layer_one_late(monkeypatch, head) -> None:
    forward = head.prefix.forward
    monkeypatch.setattr(
        head.prefix,
        "forward",
        lambda features_BQD, *others: forward(features_BQD.roll(1, dims=1), *others),
    )


SEQUENTIAL_FAULTS = [
    embeddings_of_wrong_rows,
    other_tokens_than_were_drafted,
    features_in_the_prefix_layer_one_late,
]


def test_without_a_fault_every_draft_of_a_sequential_head_is_accepted(
    target, texts, good_sequential
):
    head = load_head(good_sequential, target=target)
    assert tokens_per_step(target, texts, head, head.tree) == DEPTH + 1


@pytest.mark.parametrize("fault", SEQUENTIAL_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_in_a_sequential_head_costs_tokens_per_step_and_no_output(
    target, texts, good_sequential, monkeypatch, fault
):
    head = load_head(good_sequential, target=target)
    fault(monkeypatch, head)
    assert tokens_per_step(target, texts, head, head.tree) < CLEARLY * (DEPTH + 1)
