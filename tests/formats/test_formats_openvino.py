"""The promise: `convert --to openvino` writes what OpenVINO's exporter and OpenVINO GenAI read
right; what they would pass over without a word is an error. A real engine: tests/engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converted_heads import forget, same
from deep_targets import LAYERS, READ, deep, saved, target
from emulators import EngineError
from emulators_eagle import openvino_eagle3
from safetensors.torch import load_file
from tiny_heads import random_head
from tiny_targets import CONFIGS, scaled_up
from trained_heads import FEW, SCALED
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftheads.heads.formats.card import render_card
from draftheads.heads.formats.hub import load_head, open_head, save_head
from draftheads.heads.target.model import Target
from draftheads.scripts.benchmarks.engine_runs.openvino import tell_layers
from draftheads.scripts.convert import converted

DFLASH = {
    "feature_layers": [1, 2],
    "mask": 7,
    "block_size": 5,
    "conditioning": "none",
    "sample_from_anchor": False,
}


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"vocabulary": FEW},
        {"rope_theta": 5e5},
        {"rope_scaling": SCALED},
        {"head_dim": 16},
        {"feature_layers": [4, 1, 2]},
    ],
    ids=["full", "reduced", "theta", "scaled", "sizes", "order"],
)
def test_an_export_is_complete_and_comes_back(tmp_path, choices):
    ours = saved(tmp_path, **choices)
    theirs = converted(ours, tmp_path / "theirs", "openvino")
    assert sorted(path.name for path in theirs.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]  # code in it, such as custom_generate/, would be run by the exporter
    head, read = openvino_eagle3(theirs, LAYERS), load_head(ours, target=target())
    assert head.dropped == set()
    assert head.uninitialised <= {"embed_tokens.weight", "t2d"}  # the target's, and not used
    assert head.facts["ids"] == sorted(choices.get("vocabulary") or range(read.vocab_size))
    assert head.facts["aux"] == read.feature_layers
    assert head.facts["rope"] == (read.rope.theta, read.rope.scaling)
    back = converted(theirs, tmp_path / "back", "draftheads", target())
    assert same(*(load_file(folder / "model.safetensors") for folder in (back, ours)))
    forget(theirs)
    assert same(load_head(theirs, target=target()).state_dict(), read.state_dict())


def test_without_d2t_the_exporter_leaves_memory_as_it_was(tmp_path):
    assert "d2t" in openvino_eagle3(saved(tmp_path), LAYERS).uninitialised


def test_without_its_layers_the_engine_reads_others(tmp_path):
    theirs = converted(saved(tmp_path), tmp_path / "theirs", "openvino")
    with pytest.raises(EngineError, match="at least 10"):
        openvino_eagle3(theirs, LAYERS, has_layers=False)
    assert openvino_eagle3(theirs, 16, has_layers=False).facts["aux"] == (3, 9, 14)


REFUSED: dict[str, dict[str, Any]] = {
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norms of queries and keys": {"qk_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "more than one layer": {"layers": 2},
    "sliding_window": {"sliding_window": 5},
    "other than three features": {"feature_layers": [1, 3]},
    "the same feature twice": {"feature_layers": [1, 3, 3]},
    "embeddings as a feature": {"feature_layers": [0, 1, 2]},
    "the last state as a feature": {"feature_layers": [1, 3, 5]},
}


@pytest.mark.parametrize("trait", REFUSED)
def test_what_would_be_lost_is_an_error_and_nothing_is_written(tmp_path, trait):
    ours = saved(tmp_path, **REFUSED[trait])
    with pytest.raises(ValueError, match=f"openvino does not support .*: it has {trait}; nothing"):
        converted(ours, tmp_path / "theirs", "openvino")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    card = render_card(open_head(ours).config)
    assert f"OpenVINO GenAI (2026.4) does not support this head: it has {trait}." in card


def saved_for(target: Target, folder: Path, choices: dict[str, Any]) -> Path:
    """An EAGLE-3 head, or, with choices, a block head."""
    head = random_head("block" if choices else "eagle3", target, **{**READ, **choices})
    return save_head(head, folder / "ours", target=target)


UNFOUND = ("gpt-neox", "gpt2", "opt", "olmo2", "mixtral")


@pytest.mark.parametrize("choices", [{}, DFLASH], ids=["eagle3", "dflash"])
@pytest.mark.parametrize("name", UNFOUND)
def test_a_target_whose_states_the_engine_does_not_find_is_refused(tmp_path, name, choices):
    """It would stop at the first token, with a line about a missing port."""
    ours = saved_for(deep(name), tmp_path, choices)
    with pytest.raises(ValueError, match="it has a target whose states the engine does not"):
        converted(ours, tmp_path / "theirs", "openvino")
    assert not (tmp_path / "theirs").exists()
    assert "OpenVINO GenAI (2026.4) does not support this head" in render_card(
        open_head(ours).config
    )


def test_of_qwen3s_experts_only_dflash_heads_find_the_states(tmp_path):
    name, options = "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2}
    shape = {**CONFIGS["qwen3"][1], "num_hidden_layers": LAYERS, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**shape, **options))
    target = Target(scaled_up(model), name="tiny-qwen3-moe")
    eagle3, dflash = (tmp_path / kind for kind in ("eagle3", "dflash"))
    with pytest.raises(ValueError, match="it has a target whose states the engine does not"):
        converted(saved_for(target, eagle3, {}), eagle3 / "theirs", "openvino")
    ours = saved_for(target, dflash, {**DFLASH, "lm_head": "shared", "embeddings": "shared"})
    assert converted(ours, dflash / "theirs", "openvino").is_dir()


@pytest.mark.parametrize("name", ["fc_norm", "norm_before_fc"])
def test_the_exporter_drops_what_it_does_not_know_and_ends_well(tmp_path, name):
    head = openvino_eagle3(saved(tmp_path, **REFUSED[name]), LAYERS)
    assert head.dropped == (
        {f"fc_norm.{place}.weight" for place in range(3)}
        if name == "fc_norm"
        else {"input_norm.weight"}
    )


def test_other_kinds_are_refused(tmp_path):
    ours = save_head(random_head("medusa", target()), tmp_path / "ours", target=target())
    with pytest.raises(ValueError, match="head of kind eagle3 or block for openvino, got medusa"):
        converted(ours, tmp_path / "theirs", "openvino")


def test_the_card_of_a_dflash_head_asks_for_whole_blocks(tmp_path):
    choices = {"feature_layers": [1, 2], "mask": 7, "block_size": 5, "conditioning": "none"}
    for name, is_dflash in (("dflash", True), ("dspark", False)):
        head = random_head("block", target(), **choices, sample_from_anchor=not is_dflash)
        card = render_card(open_head(save_head(head, tmp_path / name, target=target())).config)
        assert (
            "generate('Hello', max_new_tokens=100, num_assistant_tokens=4)" in card
        ) == is_dflash
        reason = (
            "OpenVINO GenAI (2026.4) does not support this head: it has slots or heads of DSpark"
        )
        assert (reason in card) != is_dflash
        assert "hidden_layers_list" not in card


def test_the_card_tells_the_layers(tmp_path):
    card = render_card(open_head(saved(tmp_path)).config)
    assert "draftheads convert THIS_FOLDER_OR_REPO for-openvino --to openvino" in card
    assert "hidden_layers_list value=\\'0 1 3\\'" in card


def test_the_runner_tells_the_layers_of_the_folder_as_the_card_does(tmp_path):
    theirs = converted(saved(tmp_path), tmp_path / "theirs", "openvino")
    model = theirs / "openvino_model.xml"
    model.write_text('<rt_info><eagle3_mode value="True" /></rt_info>')
    tell_layers(theirs)
    told = '<hidden_layers_list value="0 1 3" /><eagle3_mode value="True" />'
    assert model.read_text() == f"<rt_info>{told}</rt_info>"
    model.write_text("<rt_info></rt_info>")
    with pytest.raises(ValueError, match="expected <eagle3_mode once, got 0; is this a head"):
        tell_layers(theirs)
